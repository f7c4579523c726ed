"""The three walks of the block agree with a plain one and with each other."""

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models import transformer
from areal_jax.models.config import ModelConfig, RopeScaling
from tests import tiny

PAGE = 4
PROMPT = 2  # tokens that are prefilled before decoding
STALE = 7.0  # what stands in a page before it is written
# Slots share no page and theirs lie out of order; page 6 is no slot's.
PERMUTED, IDENTITY = [[4, 0, 2], [5, 3, 1]], [[0, 1, 2], [3, 4, 5]]
NARROW = [[4, 0], [5, 3]]
# One row of two sequences and padding, one of a single sequence.
SEGMENTS = np.array([[1] * 5 + [2] * 6 + [0], [1] * 12], np.int32)
POSITIONS = np.array([[*range(5), *range(6), 0], [*range(12)]], np.int32)
IDS = np.random.default_rng(0).integers(0, 37, SEGMENTS.shape).astype(np.int32)


def make_config(**changes):
  settings = dict(
      vocab_size=37,
      width=32,
      layers=2,
      heads=4,
      kv_heads=2,
      head_size=8,
      mlp_width=48,
      tied_embeddings=False,
      qkv_bias=True,
      qk_norm=True,
  )
  return ModelConfig(**{**settings, **changes})


# Wide enough that the spread of its matrices is known to a few percent.
INITIAL = ModelConfig(
    vocab_size=40,
    width=64,
    layers=8,
    heads=8,
    kv_heads=8,
    head_size=8,
    mlp_width=256,
)


def make_params(config):
  """Noise on every parameter: a forgotten norm or bias must show."""
  rng = np.random.default_rng(1)

  def draw(path, like):
    middle = 1.0 if 'norm' in jax.tree_util.keystr(path) else 0.0
    return (middle + 0.2 * rng.normal(size=like.shape)).astype('f')

  return jax.tree.map_with_path(draw, transformer.abstract_params(config))


def run(config, params, mesh=None):
  """Logits, and the gradient of the real tokens' own log-probability."""

  def loss(params):
    logits = transformer.forward(
        config, params, IDS, POSITIONS, SEGMENTS, mesh=mesh, rules=Rules()
    )
    logps = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logps, IDS[..., None], -1)[..., 0]
    return -jnp.mean(jnp.where(SEGMENTS > 0, own, 0)), logits

  gradient, logits = jax.jit(jax.grad(loss, has_aux=True))(params)
  return np.asarray(logits), jax.tree.map(np.asarray, gradient)


def run_decode(config, params, *tables, mesh=None):
  """Row 1, and the first sequence of row 0, a token at a time from PROMPT on.

  Returns:
    For each page table [S, P]: logits [S, steps, V], and the cache.
  """
  rows, lengths = IDS[[1, 0]], np.array([12, 5])
  where = dict(mesh=mesh, rules=Rules())

  @jax.jit
  def fill(params, table):
    filled = transformer.prefill(
        config, params, rows[:, :PAGE], jnp.full(2, PROMPT), **where
    )
    blank = jnp.full((config.layers, 7, *filled[0].shape[2:]), STALE)
    return [blank.at[:, table[:, 0]].set(x) for x in filled]

  @functools.partial(jax.jit, donate_argnums=(3, 4))
  def step(params, *inputs):
    return transformer.decode(config, params, *inputs, **where)

  results = []
  for table in tables:
    table = np.asarray(table, np.int32)
    keys, values = fill(params, table)
    logits = []
    for position in range(PROMPT, table.shape[1] * PAGE):
      at, ids = np.full(2, position, np.int32), rows[:, position]
      ok = position < lengths
      out, keys, values = step(params, ids, at, keys, values, table, ok)
      logits.append(np.asarray(out))
    results.append((np.stack(logits, 1), np.asarray(keys), np.asarray(values)))
  return results


def pad(array, more, value=0):
  """The array with `more` entries added at the end of each axis."""
  return np.pad(array, [(0, m) for m in more], constant_values=value)


def plain_logits(config, params, ids):
  """A Llama written out in float64, a head and a query at a time."""
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  norm = lambda x, w: x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * w
  angles = np.arange(len(ids))[:, None] * 10_000 ** (-np.arange(0, 8, 2) / 8)

  def rotate(x):
    a, b = x[:, :4], x[:, 4:]
    cos, sin = np.cos(angles), np.sin(angles)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)

  x = p['embedding'][ids]
  for layer in range(config.layers):
    w = jax.tree.map(operator.itemgetter(layer), p['blocks'])
    h = norm(x, w['attention_norm'])
    for head in range(config.heads):
      shared = head // 2
      q = h @ w['query'][:, head] + w['query_bias'][head]
      k = h @ w['key'][:, shared] + w['key_bias'][shared]
      v = h @ w['value'][:, shared] + w['value_bias'][shared]
      q = rotate(norm(q, w['query_norm']))
      k = rotate(norm(k, w['key_norm']))
      for t in range(len(ids)):
        scores = k[: t + 1] @ q[t] / np.sqrt(8)
        weights = np.exp(scores - scores.max())
        mixed = weights / weights.sum() @ v[: t + 1]
        x[t] = x[t] + mixed @ w['out'][head]
    h = norm(x, w['mlp_norm'])
    gate = h @ w['gate']
    x = x + (gate / (1 + np.exp(-gate)) * (h @ w['up'])) @ w['down']
  return norm(x, p['final_norm']) @ p['unembedding']


@pytest.fixture(scope='module')
def config():
  return make_config()


@pytest.fixture(scope='module')
def params(config):
  return make_params(config)


@pytest.fixture(scope='module')
def reference(config, params):
  """Logits and gradient on one device, layers unrolled."""
  return run(config, params)


@pytest.fixture(scope='module')
def logits(reference):
  return reference[0]


@pytest.fixture(scope='module')
def gradient(reference):
  return reference[1]


@pytest.fixture(scope='module')
def decoded(config, params):
  return run_decode(config, params, PERMUTED, IDENTITY, NARROW)


@pytest.fixture(scope='module')
def initial():
  """Initial parameters as on one device."""
  return transformer.init_params(INITIAL, 0, None, None)


def assert_trees_close(got, wanted, atol):
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=atol),
      got,
      wanted,
  )


def test_packed_sequences_have_the_logits_that_each_has_alone(
    config, params, logits
):
  for row, start, stop in ((0, 0, 5), (0, 5, 11), (1, 0, 12)):
    alone = plain_logits(config, params, IDS[row, start:stop])
    np.testing.assert_allclose(logits[row, start:stop], alone, atol=1e-5)


def test_padding_is_finite_in_value_and_gradient(logits, gradient):
  assert np.isfinite(logits).all()
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_decode_through_permuted_pages_equals_forward(decoded, logits):
  got, _, _ = decoded[0]
  np.testing.assert_allclose(got[0], logits[1, PROMPT:], atol=5e-6)
  np.testing.assert_allclose(got[1, :3], logits[0, PROMPT:5], atol=5e-6)


def test_logits_do_not_depend_on_which_pages_a_slot_has(decoded):
  (permuted, _, _), (identity, _, _), _ = decoded
  np.testing.assert_array_equal(permuted, identity)


def test_fewer_columns_of_the_page_table_give_the_same_logits(decoded):
  (wide, _, _), _, (narrow, _, _) = decoded
  assert narrow.shape[1] == 2 * PAGE - PROMPT
  np.testing.assert_allclose(narrow[0], wide[0, : narrow.shape[1]], atol=5e-6)


def test_a_slot_that_may_not_write_leaves_the_cache_as_it_was(decoded):
  # Slot 1 stops writing at 5 tokens: one in page 3, none in page 1.
  for cache in decoded[0][1:]:
    assert (cache[:, 1] == STALE).all() and (cache[:, 3, 1:] == STALE).all()
    assert not (cache[:, 3, 0] == STALE).any()
    assert (cache[:, 6] == STALE).all()


@pytest.mark.parametrize('loop', ['unroll', 'scan'])
def test_decode_writes_the_donated_cache_in_place(loop):
  config = make_config(layer_loop=loop)
  cache = jax.ShapeDtypeStruct((2, 1024, PAGE, 2, 8), jnp.float32)
  integers = jax.ShapeDtypeStruct((2,), jnp.int32)
  program = jax.jit(
      functools.partial(transformer.decode, config), donate_argnums=(3, 4)
  )
  memory = (
      program.lower(
          transformer.abstract_params(config),
          integers,
          integers,
          cache,
          cache,
          jax.ShapeDtypeStruct((2, 2), jnp.int32),
          jax.ShapeDtypeStruct((2,), jnp.bool_),
      )
      .compile()
      .memory_analysis()
  )
  size = 4 * np.prod(cache.shape)
  assert memory.alias_size_in_bytes >= 2 * size
  # A copy of one layer of the cache would take half of `size`.
  assert memory.temp_size_in_bytes < size / 4


def test_scanned_layers_equal_unrolled_ones(params, logits, gradient, decoded):
  scan = make_config(layer_loop='scan')
  got_logits, got_gradient = run(scan, params)
  np.testing.assert_allclose(got_logits, logits, atol=5e-6)
  assert_trees_close(got_gradient, gradient, 1e-6)
  for got, wanted in zip(run_decode(scan, params, PERMUTED)[0], decoded[0]):
    np.testing.assert_allclose(got, wanted, atol=5e-6)


@pytest.mark.parametrize('loop', ['unroll', 'scan'])
def test_recomputed_layers_have_the_same_gradient(params, gradient, loop):
  remat = make_config(remat=True, layer_loop=loop)
  assert_trees_close(run(remat, params)[1], gradient, 1e-6)


def test_a_policy_on_2_x_2_devices_equals_one_device(params, logits, gradient):
  mesh = tiny.mesh(2, 2)
  config = make_config(vocab_multiple=2)
  padded = dict(
      params,
      embedding=pad(params['embedding'], (1, 0)),
      unembedding=pad(params['unembedding'], (0, 1)),
  )
  placed = jax.device_put(
      padded, transformer.param_shardings(config, mesh, Rules())
  )
  assert placed['blocks']['query'].sharding.shard_shape((2, 32, 4, 8)) == (
      (2, 16, 2, 8)
  )
  got_logits, got_gradient = run(config, placed, mesh)
  np.testing.assert_allclose(got_logits[..., :37], logits, atol=1e-5)
  assert_trees_close(got_gradient['blocks'], gradient['blocks'], 1e-5)


def test_two_kv_heads_serve_four_devices(params, logits):
  mesh = tiny.mesh(1, 4)
  wide = make_config(vocab_size=40)  # 37 would not divide
  padded = dict(
      params,
      embedding=pad(params['embedding'], (3, 0)),
      unembedding=pad(params['unembedding'], (0, 3)),
  )
  shardings = transformer.param_shardings(wide, mesh, Rules())
  placed = jax.device_put(padded, shardings)
  assert shardings['blocks']['key'].spec[2] is None
  assert shardings['blocks']['query'].spec[2] == 'tensor'
  got, _ = run(wide, placed, mesh)
  np.testing.assert_allclose(got[..., :37], logits, atol=1e-5)
  ((got, _, _),) = run_decode(wide, placed, PERMUTED, mesh=mesh)
  np.testing.assert_allclose(got[0, :, :37], logits[1, PROMPT:], atol=1e-5)


def test_padded_ids_have_no_probability_and_no_gradient(params, logits):
  config = make_config(vocab_multiple=8)
  assert config.padded_vocab_size == 40
  # Ones, which would win if they were let.
  padded = dict(
      params,
      embedding=pad(params['embedding'], (3, 0), 1),
      unembedding=pad(params['unembedding'], (0, 3), 1),
  )
  got, gradient = run(config, padded)
  np.testing.assert_allclose(got[..., :37], logits, atol=5e-6)
  assert np.isfinite(got).all() and (got[..., 37:] < -1e29).all()
  np.testing.assert_allclose(
      np.exp(got).sum(-1), np.exp(logits).sum(-1), rtol=1e-5
  )
  assert (gradient['embedding'][37:] == 0).all()
  assert (gradient['unembedding'][:, 37:] == 0).all()


def test_tied_embeddings_read_the_embedding_both_ways(params):
  config = make_config(tied_embeddings=True)
  tied = {k: v for k, v in params.items() if k != 'unembedding'}
  ids, ones = IDS[1:], np.ones((1, 12), np.int32)
  got = jax.jit(functools.partial(transformer.forward, config))(
      tied, ids, POSITIONS[1:], ones
  )
  wanted = plain_logits(
      config, dict(tied, unembedding=tied['embedding'].T), ids[0]
  )
  np.testing.assert_allclose(got[0], wanted, atol=1e-5)


def test_bfloat16_walks_give_float32_logits_close_to_float32(params, logits):
  config = make_config(compute_dtype='bfloat16')
  got, _ = run(config, params)
  assert got.dtype == np.float32
  gap = np.abs(got - logits)[SEGMENTS > 0]
  assert 1e-4 < gap.max() < 0.15
  keys, _ = jax.eval_shape(
      functools.partial(transformer.prefill, config),
      params,
      IDS,
      SEGMENTS.sum(1),
  )
  assert keys.dtype == jnp.bfloat16


def test_initial_values_do_not_depend_on_the_mesh(initial):
  mesh = tiny.mesh(2, 2)
  four = transformer.init_params(INITIAL, 0, mesh, Rules())
  shardings = transformer.param_shardings(INITIAL, mesh, Rules())
  assert jax.tree.map(lambda x: x.sharding, four) == shardings
  jax.tree.map(np.testing.assert_array_equal, four, initial)


def test_initial_matrices_have_the_documented_spread(initial):
  blocks = initial['blocks']
  std = lambda name: float(np.std(blocks[name]))
  assert std('query') == pytest.approx(1 / 8, rel=0.03)
  assert std('out') == pytest.approx(1 / 8 / 4, rel=0.03)
  assert std('down') == pytest.approx(1 / 16 / 4, rel=0.03)
  assert (blocks['mlp_norm'] == 1).all()
  # No two layers and no two matrices are the same numbers.
  assert not np.array_equal(blocks['gate'][0], blocks['gate'][1])
  assert not np.array_equal(blocks['gate'], blocks['up'])


def test_parameter_trees_have_one_structure(config, params):
  abstract = transformer.abstract_params(config)
  axes = transformer.logical_axes(config)
  named = jax.tree.map(lambda p, names: len(names) == p.ndim, abstract, axes)
  assert all(jax.tree.leaves(named))
  assert jax.tree.structure(abstract) == jax.tree.structure(params)


def test_heads_that_do_not_divide_are_refused_with_the_numbers(config):
  with pytest.raises(ConfigError, match='heads of size 4 .* the 8 devices'):
    transformer.param_shardings(
        make_config(vocab_size=40), tiny.mesh(1, 8), Rules()
    )


def test_rope_frequencies_are_powers_of_theta():
  config = make_config(head_size=4, rope_theta=100.0)
  np.testing.assert_allclose(
      transformer.rope_frequencies(config), [1, 0.1], rtol=1e-6
  )


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
  # In 5 π tokens a frequency of 1, 0.4 x 2.5 and 0.1 turns 2.5 times and 0.25
  # times: half way between 1 and 4, and below 1.
  rope = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_length=16)
  config = make_config(head_size=4, rope_theta=100.0, rope_scaling=rope)
  turns = 16 / (2 * np.pi)
  middle = (turns - 1) / 3
  np.testing.assert_allclose(
      transformer.rope_frequencies(config),
      [middle + (1 - middle) / 8, 0.1 / 8],
      rtol=1e-6,
  )
  long = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_length=10_000)
  config = make_config(head_size=4, rope_theta=100.0, rope_scaling=long)
  np.testing.assert_allclose(
      transformer.rope_frequencies(config), [1, 0.1], rtol=1e-6
  )
