"""Adapters: their product, what learns, and that merging changes nothing."""

import functools

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, lora, parameters, transformer
from areal_jax.models.config import PROJECTIONS, LoraSettings, MoeSettings
from tests import tiny
from tests.closeness import assert_close

SEGMENTS = np.array([[1, 1, 1, 1, 1, 2, 2, 0], [1] * 8], np.int32)
POSITIONS = np.array([[0, 1, 2, 3, 4, 0, 1, 0], [*range(8)]], np.int32)
IDS = np.random.default_rng(0).integers(0, 40, SEGMENTS.shape).astype('i4')
EVERY = LoraSettings(projections=PROJECTIONS, rank=3, alpha=6.0)
# Resolved, so that compiled functions can be kept by their settings.
CONFIG = resolve(tiny.config(lora=EVERY, qkv_bias=True))
PLAIN = lora.without(CONFIG)
PAGE = 4


def noise(config):
  """Parameters without compiling anything."""
  rng = np.random.default_rng(2)
  return jax.tree.map(
      lambda x: (0.2 * rng.normal(size=x.shape)).astype('f'),
      parameters.abstract_params(config),
  )


def moved(config, params, seed=5):
  """The policy after some training: no B is 0 any more."""
  rng = np.random.default_rng(seed)
  learns, _ = parameters.partition(config, params)
  learns = jax.tree.map(
      lambda x: x + 0.2 * rng.normal(size=x.shape).astype('f'), learns
  )
  return lora.overlaid(params, learns)


@pytest.fixture(scope='module')
def initial():
  return parameters.init_params(CONFIG, 0, None, None)


@pytest.fixture(scope='module')
def params(initial):
  return moved(CONFIG, initial)


@functools.cache
def forward(config, mesh=None):
  return jax.jit(
      functools.partial(transformer.forward, config, mesh=mesh, rules=Rules())
  )


def logits(config, params, mesh=None):
  return np.asarray(forward(config, mesh)(params, IDS, POSITIONS, SEGMENTS))


@pytest.fixture(scope='module')
def wanted(params):
  """Logits of the merged policy."""
  return logits(*_merged(params))


def _merged(params):
  config, merged = lora.merged(CONFIG, params)
  assert config == PLAIN
  return PLAIN, merged


def test_adapter_is_the_scaled_product_of_its_two_matrices():
  x = np.arange(8.0, dtype='f').reshape(2, 4) - 3
  config = tiny.config(width=4, layers=1, lora=LoraSettings(('gate',), 2, 3.0))
  adapter = lora.Adapter(config, 'gate', nnx.Rngs(0))
  a = np.array([[1, 0], [2, 1], [0, -1], [1, 1]], 'f')
  b = np.arange(2 * 48, dtype='f').reshape(2, 48) / 50
  adapter.a.set_value(jnp.array(a))  # one layer's, as `walk` slices them
  adapter.b.set_value(jnp.array(b))
  np.testing.assert_allclose(adapter(x), 1.5 * (x @ a @ b), rtol=1e-6)


@pytest.mark.parametrize(
    'settings, wanted',
    [
        (LoraSettings(('up',), rank=4, alpha=8.0), 2.0),
        (LoraSettings(('up',), rank=4, alpha=8.0, rslora=True), 4.0),
    ],
)
def test_scale_is_alpha_over_rank_or_its_root(settings, wanted):
  assert lora.scale(settings) == wanted


def test_a_policy_begins_as_its_base(initial):
  base = parameters.init_params(PLAIN, 0, None, None)
  _, stays = parameters.partition(CONFIG, initial)
  jax.tree.map(np.testing.assert_array_equal, stays, base)
  np.testing.assert_array_equal(logits(CONFIG, initial), logits(PLAIN, base))


def test_merged_policy_has_the_same_logits(params, initial, wanted):
  got = logits(CONFIG, params)
  assert_close(got, wanted)
  # The adapters say something: without them the logits are others.
  assert np.abs(got - logits(CONFIG, initial)).max() > 0.05


def test_merging_under_jit_on_a_mesh_equals_merging_on_the_host(params):
  mesh = tiny.mesh(1, 2)
  shardings = parameters.param_shardings(PLAIN, mesh, Rules())
  placed = jax.device_put(
      params, parameters.param_shardings(CONFIG, mesh, Rules())
  )
  got = lora.merging(CONFIG, '', shardings)(placed)
  _, host = lora.merged(CONFIG, jax.device_get(params))
  assert_close(got, host)
  assert jax.tree.map(lambda x: x.sharding, got) == shardings


def test_merging_changes_nothing_in_any_family():
  """All that families add to a block, at once; each projection is adapted."""
  config = resolve(
      tiny.config(
          lora=EVERY,
          qk_norm=True,
          post_norms=True,
          unit_offset=True,
          scaled_embeddings=True,
          attention_cap=5.0,
          logit_cap=3.0,
          sliding_window=3,
          sliding_layers=(0,),
          activation='gelu_tanh',
          tied_embeddings=False,
      )
  )
  params = noise(config)
  got = logits(config, params)
  assert_close(got, logits(*lora.merged(config, params)))
  _, stays = parameters.partition(config, params)
  assert np.abs(got - logits(lora.without(config), stays)).max() > 0.01


def test_a_merge_without_its_scale_is_seen(params, wanted):
  half = resolve(tiny.config(
      qkv_bias=True, lora=LoraSettings(PROJECTIONS, rank=3, alpha=3.0)
  ))  # fmt: skip
  _, merged = lora.merged(half, params)
  assert np.abs(logits(PLAIN, merged) - wanted).max() > 0.01


def test_decode_through_adapters_equals_forward(params, wanted):
  where = dict(rules=Rules())

  @jax.jit
  def fill(params):
    filled = transformer.prefill(
        CONFIG, params, IDS[:1, :PAGE], jnp.array([2]), **where
    )
    blank = jnp.zeros((CONFIG.layers, 2, *filled[0].shape[2:]))
    return [blank.at[:, :1].set(x) for x in filled]

  @jax.jit
  def step(params, *inputs):
    return transformer.decode(CONFIG, params, *inputs, **where)

  keys, values = fill(params)
  for at in range(2, 5):
    out, keys, values = step(
        params, IDS[:1, at], np.array([at], np.int32), keys, values,
        np.array([[0, 1]], np.int32), np.array([True]),
    )  # fmt: skip
    assert_close(out[0], wanted[0, at])


@pytest.mark.parametrize('shape', [(2, 2), (1, 4)])
def test_adapters_on_four_devices_equal_one_device(params, wanted, shape):
  mesh = tiny.mesh(*shape)
  shardings = parameters.param_shardings(CONFIG, mesh, Rules())
  got = logits(CONFIG, jax.device_put(params, shardings), mesh)
  assert_close(got, wanted)
  query = shardings['blocks']['adapters']['query']
  if shape == (2, 2):
    assert query['a'].spec[1] == ('fsdp', 'expert')
    assert query['b'].spec[2] == 'tensor'


def test_adapters_alone_learn_and_the_filter_says_so(params):
  learns, stays = parameters.partition(CONFIG, params)
  assert set(learns['blocks']) == {'adapters'} and set(learns) == {'blocks'}
  assert set(learns['blocks']['adapters']) == set(PROJECTIONS)
  assert 'adapters' not in stays['blocks'] and 'embedding' in stays
  jax.tree.map(
      lambda a, b: a is b or pytest.fail('another'),
      lora.overlaid(stays, learns),
      params,
  )
  assert parameters.partition(PLAIN, stays) == (stays, {})


def test_overlaying_changes_no_tree_in_place():
  base, part = {'a': {'b': 1, 'c': 2}, 'd': 3}, {'a': {'c': 4, 'e': 5}}
  assert lora.overlaid(base, part) == {'a': {'b': 1, 'c': 4, 'e': 5}, 'd': 3}
  assert base == {'a': {'b': 1, 'c': 2}, 'd': 3}


def test_scanned_and_recomputed_layers_have_the_same_gradient(params):
  def gradient(config):
    learns, stays = parameters.partition(config, params)

    def loss(learns):
      said = transformer.forward(
          config, lora.overlaid(stays, learns), IDS, POSITIONS, SEGMENTS
      )
      return jnp.mean(jax.nn.logsumexp(said[..., ::2], -1))

    return jax.jit(jax.grad(loss))(learns)

  plain = gradient(CONFIG)
  assert all(np.abs(g).max() > 0 for g in jax.tree.leaves(plain))
  other = gradient(
      tiny.config(lora=EVERY, qkv_bias=True, layer_loop='scan', remat='full')
  )
  assert_close(plain, other)


def test_new_adapters_on_a_base_are_those_of_initial_parameters(initial):
  _, base = parameters.partition(CONFIG, initial)
  mesh = tiny.mesh(2, 2)
  placed = jax.device_put(
      base, parameters.param_shardings(PLAIN, mesh, Rules())
  )
  got = parameters.with_adapters(CONFIG, placed, 0, mesh, Rules())
  jax.tree.map(np.testing.assert_array_equal, got, initial)
  assert jax.tree.map(lambda x: x.sharding, got) == (
      parameters.param_shardings(CONFIG, mesh, Rules())
  )


def test_frozen_parameters_may_be_bfloat16_and_adapters_are_not():
  config = tiny.config(
      lora=LoraSettings(('query', 'down'), 2, base_dtype='bfloat16')
  )
  base = noise(lora.without(config))
  made = parameters.with_adapters(config, base, 0, None, None)
  shapes = parameters.abstract_params(config)
  assert jax.tree.map(lambda x: x.dtype, made) == (
      jax.tree.map(lambda x: x.dtype, shapes)
  )
  learns, stays = parameters.partition(config, made)
  assert {str(x.dtype) for x in jax.tree.leaves(learns)} == {'float32'}
  assert {str(x.dtype) for x in jax.tree.leaves(stays)} == {'bfloat16'}
  _, merged = lora.merged(config, made)
  assert {str(x.dtype) for x in jax.tree.leaves(merged)} == {'float32'}


def test_a_critic_on_an_adapted_policy_has_its_trunk_alone(params):
  critic = heads.with_head(CONFIG, 'value', params, 0, None, None)
  assert jax.tree.structure(critic) == jax.tree.structure(
      heads.abstract_params(CONFIG, 'value')
  )
  assert 'adapters' not in critic['blocks']


def test_a_policy_with_experts_has_adapters_on_attention_alone():
  experts = MoeSettings(experts=4, chosen=2, width=8)

  def config(*names):
    lora_settings = LoraSettings(names, rank=2)
    return resolve(tiny.config(moe=experts, lora=lora_settings))

  with pytest.raises(ConfigError, match='none of .* with experts'):
    config('query', 'up')
  said = forward(config('query'))(
      noise(config('query')), IDS, POSITIONS, SEGMENTS
  )
  assert np.isfinite(said).all()


@pytest.mark.parametrize(
    'changes, words',
    [
        (dict(rank=0), 'lora.rank is 0, wanted at least 1'),
        (dict(alpha=0.0), 'lora.alpha is 0.0, wanted above 0'),
        (
            dict(projections=('q_proj',)),
            r"lora.projections is \('q_proj',\), wanted some of \('query',",
        ),
        (dict(projections=('up', 'up')), "is .'up', 'up'., wanted .* once"),
    ],
)
def test_wrong_settings_are_one_line(changes, words):
  settings = LoraSettings(**{'projections': ('query',), **changes})
  with pytest.raises(ConfigError, match=words) as caught:
    resolve(tiny.config(lora=settings))
  assert '\n' not in str(caught.value)
