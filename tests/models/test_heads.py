"""Heads on the trunk: hand-worked products, packing, gradients, meshes."""

import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, hf, parameters, transformer
from tests import tiny
from tests.closeness import assert_close

SEGMENTS = np.array([[1, 1, 1, 2, 2, 0], [1, 1, 1, 1, 1, 1]], np.int32)
POSITIONS = np.array([[0, 1, 2, 0, 1, 0], [*range(6)]], np.int32)
IDS = np.random.default_rng(0).integers(0, 40, SEGMENTS.shape).astype('i4')
CONFIG = resolve(tiny.config(tied_embeddings=False))


@pytest.fixture(scope='module')
def policy():
  return parameters.init_params(CONFIG, 0, None, None)


@pytest.fixture(scope='module')
def critic(policy):
  made = heads.with_head(CONFIG, 'value', policy, 3, None, None)
  return {**made, 'value_head_bias': jnp.array([0.25])}


@pytest.fixture(scope='module')
def reward_model(policy):
  return heads.with_head(CONFIG, 'reward', policy, 3, None, None)


@functools.cache
def program(function, config=CONFIG, mesh=None):
  """Compiled for all tests at once."""
  return jax.jit(functools.partial(function, config, mesh=mesh, rules=Rules()))


def run(function, params, mesh=None):
  said = program(function, CONFIG, mesh)(params, IDS, POSITIONS, SEGMENTS)
  assert said.dtype == np.float32 and said.shape == IDS.shape
  return np.asarray(said)


def test_values_are_the_products_with_the_states(policy, critic):
  states = np.asarray(
      program(transformer.hidden)(policy, IDS, POSITIONS, SEGMENTS)
  )
  wanted = states @ np.asarray(critic['value_head'])[:, 0] + 0.25
  assert_close(run(heads.values, critic), np.where(SEGMENTS, wanted, 0))


def test_a_sequence_is_scored_at_its_last_token_alone(policy, reward_model):
  said = run(heads.scores, reward_model)
  assert np.argwhere(said).tolist() == [[0, 2], [0, 4], [1, 5]]
  states = program(transformer.hidden)(policy, IDS, POSITIONS, SEGMENTS)
  wanted = (
      np.asarray(states)[0, 4] @ np.asarray(reward_model['reward_head'])[:, 0]
  )
  assert_close(said[0, 4], wanted)


def test_last_tokens_end_sequences_rows_and_what_padding_follows():
  assert np.asarray(heads.last_tokens(SEGMENTS)).astype(int).tolist() == [
      [0, 0, 1, 0, 1, 0],
      [0, 0, 0, 0, 0, 1],
  ]


def test_a_packed_sequence_has_the_values_that_it_has_alone(critic):
  packed = run(heads.values, critic)
  alone = jax.jit(functools.partial(heads.values, CONFIG))(
      critic, IDS[:1, 3:5], POSITIONS[:1, 3:5], np.ones((1, 2), np.int32)
  )
  assert_close(packed[0, 3:5], alone[0])


def test_the_trunk_learns_with_the_head(critic):
  def loss(params):
    said = heads.values(CONFIG, params, IDS, POSITIONS, SEGMENTS)
    return jnp.sum(jnp.square(said - 1) * (SEGMENTS > 0))

  gradient = jax.jit(jax.grad(loss))(critic)
  for path, leaf in jax.tree.leaves_with_path(gradient):
    assert np.isfinite(leaf).all() and np.abs(leaf).max() > 0, path
  assert 'unembedding' not in gradient


def test_a_trunk_comes_from_a_policy_and_the_seed_makes_the_head(policy):
  made = heads.with_head(CONFIG, 'value', policy, 3, None, None)
  again = heads.with_head(CONFIG, 'reward', policy, 3, None, None)
  other = heads.with_head(CONFIG, 'reward', policy, 4, None, None)
  assert made['embedding'] is policy['embedding']
  np.testing.assert_array_equal(made['value_head'], again['reward_head'])
  assert not np.array_equal(again['reward_head'], other['reward_head'])
  assert 0.5 / 33 < np.std(made['value_head']) < 2 / 33  # D is 32
  assert np.asarray(made['value_head_bias']).tolist() == [0]


@pytest.mark.parametrize('kind', ['value', 'reward'])
def test_shapes_axes_and_parameters_have_one_structure(kind):
  mesh = tiny.mesh(2, 2)
  shapes = heads.abstract_params(CONFIG, kind)
  shardings = heads.param_shardings(CONFIG, kind, mesh, Rules())
  params = heads.init_params(CONFIG, kind, 0, mesh, Rules())
  assert jax.tree.structure(params) == jax.tree.structure(shapes)

  def check(array, shape, sharding):
    assert array.shape == shape.shape and array.dtype == shape.dtype
    assert array.sharding == sharding

  jax.tree.map(check, params, shapes, shardings)


def test_a_critic_on_2_x_2_devices_equals_one_device(critic):
  mesh = tiny.mesh(2, 2)
  placed = jax.device_put(
      critic, heads.param_shardings(CONFIG, 'value', mesh, Rules())
  )
  assert_close(run(heads.values, placed, mesh), run(heads.values, critic))


@pytest.mark.parametrize('kind', ['value', 'reward'])
def test_a_head_is_published_with_its_trunk_and_read_back(
    critic, reward_model, tmp_path, kind
):
  params = critic if kind == 'value' else reward_model
  hf.save_hf(tmp_path, CONFIG, params, head=kind)
  tensors = safetensors.numpy.load_file(tmp_path / 'model.safetensors')
  assert 'lm_head.weight' not in tensors
  described = json.loads((tmp_path / 'config.json').read_text())
  if kind == 'reward':
    assert tensors['score.weight'].shape == (1, 32)  # transformers: one label
    assert described['architectures'] == ['LlamaForSequenceClassification']
  else:
    assert tensors['v_head.summary.weight'].shape == (1, 32)
    assert tensors['v_head.summary.bias'].tolist() == [0.25]
  config, got = hf.load_hf(tmp_path, None, None, head=kind)
  assert config.width == 32 and set(got) == set(params)
  jax.tree.map(np.testing.assert_array_equal, got, params)
  other = 'reward' if kind == 'value' else 'value'
  with pytest.raises(ConfigError, match='lacks [12] tensors: (score|v_head)'):
    hf.load_hf(tmp_path, None, None, head=other)
