"""What compilers say of one program, and products inside of kernels."""

import jax
from jax.experimental import pallas as pl
import jax.numpy as jnp
import pytest

from areal_jax.compile_check.chips import CHIPS
from areal_jax.compile_check.hlo import Collective, Cost
from areal_jax.compile_check.programs import (
    KernelCost,
    Memory,
    Program,
    Roofline,
    Task,
    bytes_wanted,
    compile_program,
    first_line,
    kernel_cost,
    require_whole_slices,
)
from areal_jax.config import ConfigError
from tests.compile_check.failing import no_such_program

REFUSAL = (
    'RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in'
    ' memory space hbm. Used 33.07G of 31.25G hbm. Exceeded hbm capacity by'
    ' 1.83G.'
)


def test_the_bytes_that_were_refused_are_read():
  assert bytes_wanted(REFUSAL) == pytest.approx(33.07 * 2**30, abs=1)
  assert bytes_wanted(REFUSAL.replace('33.07G', '512.5M')) == 512.5 * 2**20
  temporaries = (
      'RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required'
      ' for HLO temporaries (44.02G) exceeds available HBM (15.75G).'
  )
  assert bytes_wanted(temporaries) == pytest.approx(44.02 * 2**30, abs=1)


@pytest.mark.parametrize(
    'message', ['INTERNAL: Used 33.07G of 31.25G hbm', 'RESOURCE_EXHAUSTED: x']
)
def test_another_failure_is_none_of_memory(message):
  assert bytes_wanted(message) == 0


def test_planted_failure_of_the_compiler_is_its_first_line_and_the_mesh():
  task = Task('square', 'train', 'data 8 · fsdp 4', no_such_program)
  found = compile_program(task, jax.devices()[0])
  assert (found.memory, found.cost, found.refused) == (None, None, 0)
  assert found.failed.startswith('mesh.train (data 8 · fsdp 4): ')
  assert 'no_such_target' in found.failed and '\n' not in found.failed
  assert found.roofline(CHIPS['v5e']) is None


def test_the_first_line_that_says_something_is_told():
  assert first_line('\n  INTERNAL: RET_CHECK failure\n  at x.cc') == (
      'INTERNAL: RET_CHECK failure'
  )
  assert first_line('') == 'an error without a word'


def test_a_mistake_in_a_program_of_ours_passes_through():
  def fail():
    raise TypeError('not of the compiler')

  with pytest.raises(TypeError, match='not of the compiler'):
    compile_program(Task('x', 'train', 'one chip', fail), jax.devices()[0])


def test_a_part_of_a_slice_that_a_tpu_refuses_is_one_clear_line():
  message = (
      'INTERNAL: RET_CHECK failure (x.cc:1879) device_count =='
      ' target.Topology()->LogicalDeviceCount( ::tpu::TpuCoreType::kTensorCore)'
      ' On platforms with limited ICI routing device assignment should include'
      ' all slice devices'
  )
  with pytest.raises(ConfigError, match='config.mesh.train .* whole slices'):
    require_whole_slices('train', message)
  require_whole_slices('train', 'INTERNAL: RET_CHECK failure of another kind')


def multiply(a, b):
  """[64, 32] · [32, 16] by a kernel over two halves of the rows."""

  def kernel(a_ref, b_ref, out_ref):
    out_ref[...] = a_ref[...] @ b_ref[...]

  return pl.pallas_call(
      kernel,
      grid=(2,),
      in_specs=[
          pl.BlockSpec((32, 32), lambda i: (i, 0)),
          pl.BlockSpec((32, 16), lambda i: (0, 0)),
      ],
      out_specs=pl.BlockSpec((32, 16), lambda i: (i, 0)),
      out_shape=jax.ShapeDtypeStruct((64, 16), jnp.float32),
      interpret=True,
      name='multiply',
  )(a, b)


def test_products_of_kernels_count_by_their_grid_and_by_loops_around():
  a = jnp.zeros((64, 32))
  b = jnp.zeros((5, 32, 16))
  once = 2 * 64 * 32 * 16
  traced = jax.jit(multiply).trace(a, b[0])
  # Each half of the rows once, the other matrix once, each half of the result.
  moved = 4 * (64 * 32 + 32 * 16 + 64 * 16)
  assert kernel_cost(traced.jaxpr.jaxpr) == KernelCost(once, moved)

  def scanned(a, b):
    return jax.lax.scan(lambda c, w: (c, multiply(a, w)), 0.0, b)[1]

  traced = jax.jit(scanned).trace(a, b)
  assert kernel_cost(traced.jaxpr.jaxpr) == KernelCost(5 * once, 5 * moved)


def test_products_outside_of_kernels_are_none_of_them():
  traced = jax.jit(jnp.matmul).trace(jnp.zeros((4, 4)), jnp.zeros((4, 4)))
  assert kernel_cost(traced.jaxpr.jaxpr) == KernelCost()


def test_the_roofline_is_the_slowest_of_three():
  chip = CHIPS['v5e']  # 1.97e14 FLOP/s, 8.1e11 and 9e10 bytes/s
  sent = Collective('all-gather', 4, 1, 4e10, 3.6e10)
  cost = Cost(1.97e13, 8.1e10, (sent,), {}, 0, 0.0)
  program = Program('x', 'train', 1.0, Memory(1, 2, 3, 4), cost)
  found = program.roofline(chip)
  assert (found.compute, found.memory) == (0.1, 0.1)
  assert found.links == found.seconds == pytest.approx(0.4)
  assert found.bound == 'links'
  assert program.memory.total == 10


def test_a_refused_program_has_no_roofline():
  program = Program('x', 'train', 1.0, None, None, refused=5)
  assert program.roofline(CHIPS['v5e']) is None


def test_a_program_is_compiled_and_measured():
  square = jax.jit(lambda x: x @ x)
  shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
  task = Task('square', 'train', 'one chip', lambda: square.trace(shape))
  found = compile_program(task, jax.devices()[0])
  assert found.refused == 0 and found.compile_s > 0
  assert found.cost.flops == 2 * 64**3
  assert found.memory.arguments == found.cost.arguments == 64 * 64 * 4
  assert found.memory.results == 64 * 64 * 4
  assert Roofline(3.0, 2.0, 1.0).bound == 'compute'
