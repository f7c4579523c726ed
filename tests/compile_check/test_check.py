"""A small run checked for machines that are not there."""

import dataclasses
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from areal_jax.compile_check import report
from areal_jax.compile_check.__main__ import Asked, main
from areal_jax.compile_check.advice import advise
from areal_jax.compile_check.check import check
from areal_jax.compile_check.chips import has_libtpu, parse_topology
from areal_jax.compile_check.hlo import Cost
from areal_jax.compile_check.programs import (
    Memory,
    Program,
    Task,
    compile_program,
)
from areal_jax.compile_check.sides import RolloutSide, TrainSide
from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut
from areal_jax.models import moe
from areal_jax.prepare.prepared import prepare_shapes
from areal_jax.train.step import TrainStep
from tests.compile_check.failing import no_such_program
from tests.conftest import ROOT
from tests.limits import WAIT_S
from tests.small_experiment import experiment

MESH = dict(mesh__train__fsdp=2, mesh__rollout__replicas=2)


@pytest.fixture(scope='module')
def estimate(tmp_path_factory):
  """The small run on four GPUs, two that train and two that generate."""
  small = experiment(tmp_path_factory.mktemp('small'), **MESH)
  prepared = prepare_shapes(small)
  return prepared, check(prepared, parse_topology('gpu:h100:4'), search=1)


def test_every_program_of_a_run_is_compiled(estimate):
  _, found = estimate
  assert [program.name for program in found.programs] == [
      'accumulate', 'apply', 'extend', 'generate',
  ]  # fmt: skip
  for program in found.programs:
    assert program.refused == 0
    assert program.memory.total > 0
    assert program.cost.bytes > 0
  by_name = {program.name: program for program in found.programs}
  kinds = {c.kind for c in by_name['accumulate'].cost.collectives}
  assert kinds & {'all-gather', 'all-reduce'}  # fsdp
  assert not by_name['generate'].cost.collectives  # one chip a replica


def test_memory_by_kind_is_what_shapes_say(estimate):
  prepared, found = estimate
  kinds = found.train.kinds
  # Everything divides over fsdp but the scales of norms, which are small.
  assert kinds['parameters'] == pytest.approx(found.parameters * 4 / 2, rel=0.1)
  assert kinds['optimizer'] == pytest.approx(2 * kinds['parameters'], rel=0.01)
  assert kinds['gradients'] == kinds['parameters']
  engine, model = prepared.settings.rollout.engine, prepared.model
  a_token = 2 * model.layers * model.kv_heads * model.head_size * 4
  cache = engine.total_pages * engine.page_size * a_token
  assert found.rollout.kinds['cache'] == cache  # none to evaluate with
  assert found.train.peak >= sum(
      kinds[name] for name in ('parameters', 'optimizer', 'gradients')
  )


def test_a_step_adds_up(estimate):
  prepared, found = estimate
  step, chip = found.step, found.topology.chip
  assert step.answers == 4 * 2
  assert step.tokens == 8 * 16 // 2
  # 8 answers of 8 sampled tokens and prompts of 8 are one microbatch of 4 · 32.
  assert step.calls == {'apply': 1, 'accumulate': 1}
  seconds = {p.name: p.roofline(chip).seconds for p in found.programs}
  assert step.train_s == seconds['accumulate'] + seconds['apply']
  # 64 tokens over two replicas of 4 slots, and the prompts.
  assert step.decode_steps == 8
  assert step.seconds == max(step.train_s, step.rollout_s)
  assert step.tokens_per_s == pytest.approx(64 / step.seconds)


def test_a_publish_sends_each_replica_the_whole_policy(estimate):
  _, found = estimate
  size = 4 * found.parameters
  assert found.reshard.total == 2 * size
  assert found.reshard.received == size


def test_the_largest_microbatch_is_looked_for(estimate):
  _, found = estimate
  # Doubled as often as it is tried.
  assert (found.rows, found.largest_rows) == (4, 8)
  assert any('packing.rows=8 fits' in line for line in found.advice)


def test_it_is_said_that_an_estimate_is_one(estimate):
  _, found = estimate
  text = report.to_text(found)
  assert 'an estimate: compiled for pretended CPU devices' in text
  assert 'DOES NOT FIT' not in text
  fields = json.loads(report.to_json(found))
  assert fields['topology']['is_estimate'] is True
  assert fields['fits'] is True
  assert fields['programs'][0]['roofline']['seconds'] > 0


def small_chips(name: str, hbm: float):
  """The topology with less memory than it has."""
  topology = parse_topology(name)
  return dataclasses.replace(
      topology, chip=dataclasses.replace(topology.chip, hbm=hbm)
  )


def test_planted_chips_that_are_too_small_do_not_fit(estimate):
  prepared, fitting = estimate
  tiny = small_chips('gpu:h100:4', fitting.train.peak - 1)
  found = check(prepared, tiny, search=0)
  assert not found.fits and not found.train.fits
  assert 'DOES NOT FIT' in report.to_text(found)
  assert any("remat='full'" in line for line in found.advice)
  assert any("compute_dtype='bfloat16'" in line for line in found.advice)


def test_advice_names_what_takes_the_memory(estimate):
  prepared, found = estimate
  kinds = dict.fromkeys(found.train.kinds, 0)
  holding = dataclasses.replace(found.train, fits=False, kinds=kinds)
  one = dataclasses.replace(found, train=holding)
  full = found.topology.chip.hbm

  def said(**more):
    holding = dataclasses.replace(one.train, kinds={**kinds, **more})
    changed = dataclasses.replace(one, train=holding)
    return ' '.join(advise(prepared, changed))

  assert 'mesh.train.fsdp=8' in said(optimizer=int(1.5 * full))
  assert 'mesh.train.fsdp' not in said(temporaries=int(1.5 * full))


def test_planted_failure_of_the_compiler_is_told_and_the_others_go_on(
    estimate, monkeypatch, capsys
):
  prepared, whole = estimate
  trace = TrainStep.trace

  def planted(step, name, shape=None):
    if name == 'accumulate':
      return no_such_program()
    return trace(step, name, shape)

  monkeypatch.setattr(TrainStep, 'trace', planted)
  found = check(prepared, parse_topology('gpu:h100:4'), search=1)
  (failure,) = found.failures
  assert failure.startswith('accumulate on mesh.train (fsdp 2): ')
  assert 'no_such_target' in failure
  compiled = [p.name for p in found.programs if p.cost is not None]
  assert compiled == ['apply', 'extend', 'generate']
  # Nobody knows of the train mesh; the replicas are as they were.
  assert (found.fits, found.train.fits) == (None, None)
  assert found.rollout == whole.rollout and found.rollout.fits
  assert found.step is None and found.largest_rows is None
  assert 'NOT KNOWN whether it fits' in report.to_text(found)
  assert f'could not be compiled: {failure}' in report.to_text(found)
  assert json.loads(report.to_json(found))['fits'] is None
  tiny = dataclasses.replace(found.train, fits=False)
  assert 'DOES NOT FIT' in report.to_text(
      dataclasses.replace(found, fits=False, train=tiny)
  )
  # The door: the report, one line, code 2.
  monkeypatch.setattr('areal_jax.compile_check.check.check',
                      lambda *args, **settings: found)  # fmt: skip
  asked = Asked(prepared.settings, 'gpu:h100:4', 0, 0, -1.0, json=True)
  assert main(asked) == 2
  said = capsys.readouterr()
  assert json.loads(said.out)['programs'][0]['failed']
  assert said.err.splitlines()[-1] == (
      'error: gpu:h100:4: 1 of 4 programs could not be compiled: ' + failure
  )


def with_programs(**bytes_each):
  """Programs of the run that need so many bytes of temporaries."""
  cost = Cost(0.0, 0.0, (), {}, 0, 0.0)
  sides = dict(accumulate='train', apply='train', generate='rollout')
  return [
      Program(name, sides[name], 1.0, Memory(0, 0, size, 0), cost)
      for name, size in bytes_each.items()
  ]


def test_phases_on_the_same_chips_leave_each_other_the_room(tmp_path):
  """Moments and caches count in the phase in which they are on the chip."""
  topology = parse_topology('gpu:h100:1')
  both = {}
  for eta in (0.0, 2.0):
    prepared = prepare_shapes(
        experiment(
            tmp_path,
            mesh__colocated=True,
            rollout__eta=eta,
            train__offload_optimizer=True,
        )
    )
    slices = cut(topology.devices(), prepared.settings.mesh)
    train = TrainSide(prepared, slices, topology, Rules())
    rollout = RolloutSide(prepared, slices, topology, Rules())
    programs = with_programs(accumulate=10**6, apply=0, generate=10**7)
    both[eta] = (
        train.holding(programs, 1e12, rollout.beside),
        rollout.holding(programs, 1e12, train.beside),
    )
  policy = both[0.0][0].kinds['parameters']
  moments = both[0.0][0].kinds['optimizer']
  batches = both[0.0][0].kinds['batches']
  cache = both[0.0][1].kinds['cache'] + both[0.0][1].kinds['slots']
  assert moments == pytest.approx(2 * policy, rel=0.01)
  few = 64  # counters, which stay
  # In turn: gradients beside one version of the weights, and no cache;
  training, generation = both[0.0]
  assert training.at == 'accumulate'
  assert training.peak == policy + moments + policy + batches + 10**6 + policy
  # a cache beside parameters whose moments are away.
  assert generation.at == 'generate'
  assert 0 <= generation.peak - (2 * policy + cache + 10**7) <= few
  # Side by side: all of either is there for the other, and new weights too.
  training, generation = both[2.0]
  all_training = 2 * policy + moments + batches
  all_generation = 2 * policy + cache
  assert training.peak == all_training + 10**6 + all_generation
  assert generation.peak == all_generation + 10**7 + all_training


def test_meshes_larger_than_the_topology_are_refused(estimate):
  prepared, _ = estimate
  with pytest.raises(ConfigError, match='mesh needs 4 devices .* there are 2'):
    check(prepared, parse_topology('gpu:h100:2'))


def test_a_path_with_a_published_name_needs_no_files(tmp_path):
  small = experiment(tmp_path, policy__path='nowhere/Qwen2.5-7B-Instruct')
  found = prepare_shapes(small)
  assert (found.model.width, found.model.layers) == (3584, 28)
  assert found.model.vocab_size == 152_064
  small = experiment(tmp_path, policy__path='nowhere/Nonsense-7B')
  with pytest.raises(ConfigError, match="'Qwen2.5-7B'"):
    prepare_shapes(small)


def run_door(
    *arguments: str, timeout: float = WAIT_S
) -> subprocess.CompletedProcess:
  """The command line, without the pretended devices of the tests."""
  environment = {k: v for k, v in os.environ.items() if k != 'XLA_FLAGS'}
  return subprocess.run(
      [sys.executable, '-m', 'areal_jax.compile_check', *arguments],
      cwd=ROOT,
      env=environment,
      capture_output=True,
      text=True,
      timeout=timeout,
  )


def test_the_door_refuses_a_bad_topology_in_one_line():
  child = run_door('--config=experiments/gsm8k.py', '--topology=v9:2x2')
  assert child.returncode == 2
  assert child.stderr.startswith("error: --topology is 'v9:2x2'")
  assert child.stderr.count('\n') == 1


needs_libtpu = pytest.mark.skipif(
    not has_libtpu(), reason='libtpu is not installed: nothing compiles for TPU'
)


@needs_libtpu
def test_a_small_run_is_compiled_for_three_tpu_slices(tmp_path):
  """Two of them train: libtpu fails at a program on two of three."""
  prepared = prepare_shapes(
      experiment(
          tmp_path,
          mesh__train__data=2,
          mesh__train__fsdp=4,
          mesh__rollout__replicas=4,
          train__packing__rows=8,
      )
  )
  found = check(prepared, parse_topology('v5e:2x2*3'), search=0)
  assert found.fits
  assert not found.topology.is_estimate
  # Each replica gets all of it: nothing is there already.
  assert found.reshard.total == 4 * found.reshard.received
  flops = {p.name: p.cost.flops for p in found.programs}
  # Forward and backward of each matrix for each token of a row of 32.
  matrices = found.parameters - prepared.model.width * 40
  assert flops['accumulate'] > 0.9 * 6 * matrices * 32


@needs_libtpu
def test_part_of_a_v5e_slice_is_refused_in_one_line(tmp_path):
  prepared = prepare_shapes(experiment(tmp_path, **MESH))
  with pytest.raises(ConfigError, match='config.mesh.train .* whole slices'):
    check(prepared, parse_topology('v5e:4x8'), search=0)


@needs_libtpu
def test_planted_policy_that_is_too_large_for_a_tpu_does_not_fit(tmp_path):
  small = experiment(
      tmp_path,
      **MESH,
      policy__model__width=8192,
      policy__model__mlp_width=262_144,
  )
  found = check(prepare_shapes(small), parse_topology('v5e:2x2'), search=0)
  assert not found.fits
  assert any(program.refused for program in found.programs) or (
      found.train.peak > found.topology.chip.hbm
  )
  assert any('mesh.train.fsdp=' in line for line in found.advice)


@needs_libtpu
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    'config, topology',
    [
        ('experiments/gsm8k.py', 'v5e:2x4'),
        ('experiments/gsm8k.py', 'gpu:h100:8'),
        ('experiments/paper_math.py:1.5B', 'v5p:4x4x4'),
        ('experiments/paper_math.py:7B', 'v5p:4x4x8'),
    ],
)
def test_the_experiment_fits_the_machine_that_it_is_for(config, topology):
  child = run_door(
      f'--config={config}',
      f'--topology={topology}',
      '--json',
      '--search=0',
      timeout=1700,
  )
  assert child.returncode == 0, child.stdout + child.stderr
  assert json.loads(child.stdout)['fits'] is True


@needs_libtpu
def test_grouped_products_of_a_tpu_are_counted():
  m, a, b, e = 512, 256, 128, 4
  device = parse_topology('v5e:2x2').devices()[0]
  place = jax.sharding.SingleDeviceSharding(device)
  shape = lambda dtype, *sizes: jax.ShapeDtypeStruct(
      sizes, dtype, sharding=place
  )
  shapes = (
      shape(jnp.bfloat16, m, a),
      shape(jnp.bfloat16, e, a, b),
      shape(jnp.int32, e),
  )

  def gradient(product):
    def loss(x, matrices, sizes):
      return (product(x, matrices, sizes).astype(jnp.float32) ** 2).sum()

    traced = jax.jit(jax.grad(loss, (0, 1))).trace(*shapes)
    task = Task('gradient', 'train', 'one chip', lambda: traced, grouped=0.5)
    return compile_program(task, device).cost.flops

  # The product, and the gradients of both: a row with one matrix of the four,
  # and half of the rows have one.
  assert gradient(moe.grouped_product) == 3 * 2 * m * a * b / 2
  # What XLA makes of the last: every row in every group.
  assert gradient(jax.lax.ragged_dot) >= 2 * m * a * b * e
