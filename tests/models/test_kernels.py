"""Programs that are compiled for TPUs and lowered for GPUs have the kernels.

What the kernels compute is compared in `test_attention.py`, interpreted.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.compile_check.chips import has_libtpu, parse_topology
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import mesh_of
from areal_jax.models import (
    attention,
    paged_attention,
    parameters,
    transformer,
    visibility,
)
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings

# Heads as in Qwen2.5-1.5B, by two key/value heads on each device.
CONFIG = ModelConfig(
    vocab_size=512,
    width=256,
    layers=1,
    heads=8,
    kv_heads=4,
    head_size=128,
    mlp_width=512,
    compute_dtype='bfloat16',
)


@pytest.fixture(scope='module')
def tpu():
  """A mesh [fsdp, tensor] of four TPUs that nobody has."""
  if not has_libtpu():
    pytest.skip('libtpu is not installed: nothing compiles for TPU')
  return mesh_of(parse_topology('v5e:2x2').devices(), fsdp=2, tensor=2)


def on(mesh, shape, dtype, *axes, rules=Rules()):
  sharding = rules.sharding(axes, shape, mesh)
  return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def params_on(config, mesh):
  return jax.tree.map(
      lambda p, sharding: jax.ShapeDtypeStruct(
          p.shape, p.dtype, sharding=sharding
      ),
      parameters.abstract_params(config),
      parameters.param_shardings(config, mesh, Rules()),
  )


def assert_has_splash(text, tokens):
  for phase in ('fwd', 'dq', 'dkv'):
    assert f'splash_mha_{phase}_segmented' in text
  # No mask and no scores of all queries and keys.
  assert f'{tokens},{tokens}]' not in text


@pytest.mark.parametrize(
    'rules', [Rules(), Rules(batch=None, time='fsdp')], ids=['rows', 'places']
)
def test_attention_on_tpus_is_a_kernel_forward_and_backward(tpu, rules):
  rows = lambda heads: on(
      tpu, (2, 1024, heads, 64), jnp.bfloat16, 'batch', 'time', 'heads', 'head',
      rules=rules,
  )  # fmt: skip
  segments = on(tpu, (2, 1024), jnp.int32, 'batch', 'time', rules=rules)

  def loss(q, k, v, segments):
    mixed = attention.attend(
        q,
        k,
        v,
        visibility.Visibility.of_rows(1024, segments),
        platform='tpu',
        window=300,
        cap=50.0,
        mesh=tpu,
        rules=rules,
    )
    return mixed.astype(jnp.float32).sum()

  program = jax.jit(jax.grad(loss, (0, 1, 2)))
  inputs = rows(4), rows(2), rows(2), segments
  assert_has_splash(program.lower(*inputs).compile().as_text(), 1024)


@pytest.mark.slow
def test_training_on_tpus_runs_splash_attention_in_its_layers(tpu):
  rows = on(tpu, (4, 1024), jnp.int32, 'batch', 'time')

  def loss(params, ids, positions, segments):
    hidden = transformer.hidden(
        CONFIG, params, ids, positions, segments, mesh=tpu, rules=Rules()
    )
    return jnp.square(hidden.astype(jnp.float32)).sum()

  lowered = jax.jit(jax.grad(loss)).lower(
      params_on(CONFIG, tpu), rows, rows, rows
  )
  assert_has_splash(lowered.compile().as_text(), 1024)


def test_decode_on_tpus_runs_the_kernel_over_the_donated_cache(tpu):
  place = dict(mesh=tpu, rules=Rules())
  pages, slots = 64, 8
  keys, values = transformer.cache_shapes(CONFIG, pages, 64, **place)
  assert keys.shape == (1, pages, 64, CONFIG.kv_heads * CONFIG.head_size)
  axes = transformer.CACHE_AXES[:4]
  keys, values = (on(tpu, x.shape, x.dtype, *axes) for x in (keys, values))
  integers = on(tpu, (slots,), jnp.int32, 'tokens')
  program = functools.partial(transformer.decode, CONFIG, **place)
  compiled = (
      jax.jit(program, donate_argnums=(3, 4))
      .lower(
          params_on(CONFIG, tpu),
          integers,
          integers,
          keys,
          values,
          on(tpu, (slots, 32), jnp.int32, 'tokens', None),
          on(tpu, (slots,), jnp.bool_, 'tokens'),
      )
      .compile()
  )
  assert 'attend_pages' in compiled.as_text()
  # Bytes of keys and values on one of two devices.
  size = 2 * np.prod(keys.shape) * 2 // 2
  memory = compiled.memory_analysis()
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 2  # no copy of it


@pytest.mark.slow
def test_an_engine_on_tpus_runs_the_kernel_in_each_data_shard():
  if not has_libtpu():
    pytest.skip('libtpu is not installed: nothing compiles for TPU')
  mesh = mesh_of(parse_topology('v5e:2x2').devices(), data=2, tensor=2)
  settings = EngineSettings(
      slots=8, max_length=256, max_prompt_length=64, page_size=64, pages=4096
  )
  engine = Engine(CONFIG, settings, mesh, Rules().for_rollout())
  trace = engine.jitted.trace_generate(engine.abstract_weights(), 4)
  compiled = trace.lower().compile()
  assert 'attend_pages' in compiled.as_text()
  state, memory = engine.jitted.abstract_state, compiled.memory_analysis()
  # Half of the pages and of the heads, 2 bytes a number, keys and values.
  size = state.keys.size * 2 * 2 // 4
  assert memory.alias_size_in_bytes >= size
  assert memory.temp_size_in_bytes < size / 2  # no copy of it


def lowered(form, *inputs):
  """The program of a form for a GPU, as text."""
  traced = jax.jit(form).trace(*inputs)
  return traced.lower(lowering_platforms=('cuda',)).as_text()


def test_programs_for_gpus_have_the_kernels():
  shape = lambda *s: jax.ShapeDtypeStruct(s, jnp.bfloat16)
  whole = lambda *s: jax.ShapeDtypeStruct(s, jnp.int32)
  rows = shape(2, 256, 4, 64), shape(2, 256, 2, 64), shape(2, 256, 2, 64)

  def loss(q, k, v, segments):
    visible = visibility.Visibility.of_rows(256, segments)
    mixed = attention.attend(q, k, v, visible, platform='gpu')
    return mixed.astype(jnp.float32).sum()

  text = lowered(jax.grad(loss, (0, 1, 2)), *rows, whole(2, 256))
  assert 'mha_forward' in text and 'mha_backward' in text

  def decode(q, keys, values, table, positions):
    return paged_attention.attend_paged(
        q, keys, values, 1, table, positions, platform='gpu'
    )

  cache = shape(2, 32, 16, 2, 64)
  text = lowered(decode, shape(4, 8, 64), cache, cache, whole(4, 8), whole(4))
  assert 'attend_pages' in text
