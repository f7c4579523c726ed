"""The three walks of the block agree with a plain one and with each other."""

import dataclasses
import functools
import operator
import re

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models import block, parameters, transformer
from areal_jax.models import rope as rope_lib
from areal_jax.models.config import (
    AttentionSettings,
    LoraSettings,
    ModelConfig,
    MoeSettings,
    RopeScaling,
)
from tests import tiny
from tests.closeness import assert_close

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


# Compiles in half the time; what it runs here is small.
quick_jit = functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


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


def make_mixed(**changes):
  """Every setting at once that some family has; the layers are not alike."""
  settings = dict(
      activation='gelu_tanh',
      qkv_bias=False,
      post_norms=True,
      unit_offset=True,
      scaled_embeddings=True,
      query_scalar=5.0,
      attention_cap=2.0,
      logit_cap=3.0,
      sliding_window=5,
      sliding_layers=(1,),
      sliding_rope_theta=100.0,
      rope_theta=1e4,
      rope_scaling=RopeScaling('yarn', 4.0, original_max_length=64),
      vocab_size=40,
      layers=3,
  )
  return make_config(**{**settings, **changes})


def make_params(config):
  """Noise on every parameter: a forgotten norm or bias must show."""
  rng = np.random.default_rng(1)
  one = 0.0 if config.unit_offset else 1.0

  def draw(path, like):
    middle = one if 'norm' in jax.tree_util.keystr(path) else 0.0
    return (middle + 0.2 * rng.normal(size=like.shape)).astype('f')

  return jax.tree.map_with_path(draw, parameters.abstract_params(config))


def run(config, params, mesh=None):
  """Logits, and the gradient of the real tokens' own log-probability."""

  def loss(params):
    logits = transformer.forward(
        config, params, IDS, POSITIONS, SEGMENTS, mesh=mesh, rules=Rules()
    )
    logps = jax.nn.log_softmax(logits)
    own = jnp.take_along_axis(logps, IDS[..., None], -1)[..., 0]
    return -jnp.mean(jnp.where(SEGMENTS > 0, own, 0)), logits

  gradient, logits = quick_jit(jax.grad(loss, has_aux=True))(params)
  return np.asarray(logits), jax.tree.map(np.asarray, gradient)


def run_decode(config, params, *tables, mesh=None, apart=False):
  """Row 1, and the first sequence of row 0, a token at a time from PROMPT on.

  Returns:
    For each page table [S, P]: logits [S, steps, V], and the cache.
  """
  rows, lengths = IDS[[1, 0]], np.array([12, 5])
  where = dict(mesh=mesh, rules=Rules())

  @quick_jit
  def fill(params, table):
    filled = transformer.prefill(
        config, params, rows[:, :PAGE], jnp.full(2, PROMPT), **where
    )
    blank = jnp.full((config.layers, 7, *filled[0].shape[2:]), STALE)
    return [blank.at[:, table[:, 0]].set(x) for x in filled]

  @functools.partial(quick_jit, donate_argnums=(3, 4))
  def step(params, *inputs):
    return transformer.decode(config, params, *inputs, **where)

  fed = params
  if apart:
    fed = parameters.layers_apart(config, params, mesh, Rules())
    assert [type(layer) for layer in fed['blocks']] == [dict] * config.layers
  results = []
  for table in tables:
    table = np.asarray(table, np.int32)
    keys, values = fill(params, table)
    logits = []
    for position in range(PROMPT, table.shape[1] * PAGE):
      at, ids = np.full(2, position, np.int32), rows[:, position]
      ok = position < lengths
      out, keys, values = step(fed, ids, at, keys, values, table, ok)
      logits.append(np.asarray(out))
    results.append((np.stack(logits, 1), np.asarray(keys), np.asarray(values)))
  return results


def pad(array, more, value=0):
  """The array with `more` entries added at the end of each axis."""
  return np.pad(array, [(0, m) for m in more], constant_values=value)


def plain_logits(config, params, ids):
  """The policy written out in float64, a head and a query at a time."""
  c = config
  p = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
  cap = lambda x, most: most * np.tanh(x / most) if most else x

  def norm(x, w):
    scale = 1 + w if c.unit_offset else w
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + c.norm_eps) * scale

  def activate(x):
    if c.activation == 'silu':
      return x / (1 + np.exp(-x))
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

  def rotate(x, slides):
    frequencies, stretch = rope_lib.rope_frequencies(c), 1.0
    if c.rope_scaling.kind == 'yarn':
      stretch = 0.1 * np.log(c.rope_scaling.factor) + 1
    if slides and c.sliding_rope_theta:
      halves = np.arange(0, c.head_size, 2) / c.head_size
      frequencies, stretch = c.sliding_rope_theta**-halves, 1.0
    angles = np.arange(len(ids))[:, None] * frequencies
    cos, sin = stretch * np.cos(angles), stretch * np.sin(angles)
    a, b = np.split(x, 2, 1)
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], 1)

  x = p['embedding'][ids]
  if c.scaled_embeddings:
    x = x * np.sqrt(c.width)
  for layer in range(c.layers):
    w = jax.tree.map(operator.itemgetter(layer), p['blocks'])
    slides = layer in c.sliding_layers
    h, more = norm(x, w['attention_norm']), np.zeros_like(x)
    for head in range(c.heads):
      shared = head // 2
      q, k, v = h @ w['query'][:, head], *(
          h @ w[name][:, shared] for name in ('key', 'value')
      )
      if c.qkv_bias:
        q = q + w['query_bias'][head]
        k, v = k + w['key_bias'][shared], v + w['value_bias'][shared]
      q = rotate(norm(q, w['query_norm']), slides)
      k = rotate(norm(k, w['key_norm']), slides)
      for t in range(len(ids)):
        first = max(0, t + 1 - c.sliding_window) if slides else 0
        scores = k[first : t + 1] @ q[t] / np.sqrt(c.query_scalar or 8)
        scores = cap(scores, c.attention_cap)
        weights = np.exp(scores - scores.max())
        mixed = weights / weights.sum() @ v[first : t + 1]
        more[t] += mixed @ w['out'][head]
    x = x + (norm(more, w['attention_post_norm']) if c.post_norms else more)
    h = norm(x, w['mlp_norm'])
    more = (activate(h @ w['gate']) * (h @ w['up'])) @ w['down']
    x = x + (norm(more, w['mlp_post_norm']) if c.post_norms else more)
  return cap(norm(x, p['final_norm']) @ p['unembedding'], c.logit_cap)


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
def mixed_params():
  return make_params(make_mixed())


@pytest.fixture(scope='module')
def mixed(mixed_params):
  """Logits and gradient of `make_mixed` with its layers unrolled."""
  return run(make_mixed(), mixed_params)


@pytest.fixture(scope='module')
def initial():
  """Initial parameters as on one device."""
  return parameters.init_params(INITIAL, 0, None, None)


def test_packed_sequences_have_the_logits_that_each_has_alone(
    config, params, logits
):
  for row, start, stop in ((0, 0, 5), (0, 5, 11), (1, 0, 12)):
    alone = plain_logits(config, params, IDS[row, start:stop])
    assert_close(logits[row, start:stop], alone)


def test_all_settings_of_the_families_together_equal_the_plain_version(
    mixed, mixed_params
):
  config = make_mixed()
  for row, start, stop in ((0, 0, 5), (0, 5, 11), (1, 0, 12)):
    alone = plain_logits(config, mixed_params, IDS[row, start:stop])
    assert_close(mixed[0][row, start:stop], alone)


@pytest.mark.parametrize(
    'name, value',
    [
        ('activation', 'silu'),
        ('post_norms', False),
        ('unit_offset', False),
        ('scaled_embeddings', False),
        ('query_scalar', 8.0),
        ('attention_cap', 3.0),
        ('logit_cap', 0.0),
        ('sliding_window', 6),
        ('sliding_layers', (2,)),
        ('sliding_rope_theta', 0.0),
        ('rope_scaling', RopeScaling()),
    ],
)
def test_each_of_those_settings_left_out_would_be_seen(
    name, value, mixed, mixed_params
):
  config = make_mixed(**{name: value})
  wrong = plain_logits(config, mixed_params, IDS[1])
  assert np.abs(wrong - mixed[0][1]).max() > 1e-3


def test_scanned_layers_that_differ_equal_unrolled_ones(mixed, mixed_params):
  logits, gradient = run(make_mixed(layer_loop='scan'), mixed_params)
  assert_close(logits, mixed[0])
  assert_close(gradient, mixed[1])


# A window that needs fewer pages than a slot has, and one that needs all.
@pytest.mark.parametrize(
    'loop, window', [('unroll', 2), ('unroll', 5), ('scan', 5)]
)
def test_decode_of_layers_that_differ_equals_forward(
    loop, window, mixed, mixed_params
):
  config = make_mixed(layer_loop=loop, sliding_window=window)
  ((got, _, _),) = run_decode(config, mixed_params, PERMUTED)
  wanted = plain_logits(config, mixed_params, IDS[1])
  assert_close(got[0], wanted[PROMPT:])
  wanted = plain_logits(config, mixed_params, IDS[0, :5])
  assert_close(got[1, :3], wanted[PROMPT:])


@pytest.mark.parametrize('faulty', [False, True])
def test_layers_are_cut_out_of_stacks_by_kernels_that_are_alike(
    monkeypatch, faulty
):
  """Kernels that differ in a constant are compiled each for itself."""
  config = make_config(layers=3)
  if faulty:  # XLA can tell which branch it is

    def decided(which, first, other):
      return first() if which is not None else other()

    monkeypatch.setattr(jax.lax, 'cond', decided)
  ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)

  def loss(params, ids):
    return transformer.hidden(config, params, ids, ids, ids).sum()

  params = parameters.abstract_params(config)
  text = jax.jit(jax.grad(loss)).lower(params, ids).compile().as_text()
  cuts = re.findall(r' = f32\[1,[\d,]+\]\S* (slice|dynamic-slice)\(', text)
  assert cuts
  assert (cuts.count('slice') > 0) == faulty


@pytest.mark.parametrize(
    'changes, kinds',
    [
        ({}, 1),
        ({'sliding_window': 4, 'sliding_layers': (0, 2)}, 2),
        (
            {
                'sliding_window': 4,
                'sliding_layers': (0, 1),
                'moe': MoeSettings(
                    experts=4, chosen=2, width=16, dense_layers=(1, 2)
                ),
            },
            4,
        ),
    ],
)
def test_layers_of_one_kind_are_traced_once(monkeypatch, changes, kinds):
  config = make_config(layers=4, **changes)
  traced = []
  real = block.Block.__call__

  def counted(self, *args, **kwargs):
    traced.append(self)
    return real(self, *args, **kwargs)

  monkeypatch.setattr(block.Block, '__call__', counted)
  ids = jax.ShapeDtypeStruct((2, 8), jnp.int32)

  def loss(params, ids):
    return transformer.hidden(config, params, ids, ids, ids).sum()

  jax.jit(jax.grad(loss)).lower(parameters.abstract_params(config), ids)
  assert len(traced) == kinds


def test_layers_apart_give_the_same_logits(config, params, decoded):
  got = run_decode(config, params, PERMUTED, apart=True)[0]
  for one, wanted in zip(got, decoded[0]):
    assert_close(one, wanted)


# What `prefill` returns is a cache with one page a row.
ONE_PAGE_A_ROW = np.arange(2)[:, None]


@pytest.mark.parametrize('loop', ['unroll', 'scan'])
def test_a_prompt_in_pieces_has_the_cache_that_it_has_whole(loop, mixed_params):
  # Rows of unlike lengths, in pieces of unlike lengths: 4 + 8 and 3 + 2.
  config = make_mixed(layer_loop=loop)
  first, rest = np.array([4, 3]), np.array([8, 2])
  rows = IDS[[1, 0]]
  pieces = np.zeros((2, 8), np.int32)
  for row, start, length in zip(range(2), first, rest):
    pieces[row, :length] = rows[row, start : start + length]

  @quick_jit
  def program(params):
    whole = transformer.prefill(config, params, rows, first + rest)
    begun = transformer.prefill(config, params, rows[:, :4], first)
    prefix = transformer.Prefix(*begun, ONE_PAGE_A_ROW, first)
    return (
        whole,
        begun,
        transformer.prefill(config, params, pieces, rest, prefix),
    )

  for whole, begun, ended in zip(*program(mixed_params)):
    for row, start, length in zip(range(2), first, rest):
      wanted = whole[:, row, : start + length]
      got = np.concatenate([begun[:, row, :start], ended[:, row, :length]], 1)
      assert_close(got, wanted)


def test_a_piece_sees_what_stands_before_it(mixed_params):
  config, lengths = make_mixed(layer_loop='scan'), np.array([4, 4])
  rows = IDS[:, 4:8]

  @quick_jit
  def program(params):
    prefix = transformer.Prefix(
        *transformer.prefill(config, params, IDS[:, :4], lengths),
        ONE_PAGE_A_ROW,
        lengths,
    )
    return [
        transformer.prefill(config, params, rows, lengths, before)[0]
        for before in (prefix, dataclasses.replace(prefix, lengths=lengths - 1))
    ]

  right, wrong = program(mixed_params)
  assert np.abs(np.asarray(right) - wrong).max() > 1e-2


def test_padding_is_finite_in_value_and_gradient(logits, gradient):
  assert np.isfinite(logits).all()
  assert all(np.isfinite(g).all() for g in jax.tree.leaves(gradient))


def test_decode_through_permuted_pages_equals_forward(decoded, logits):
  got, _, _ = decoded[0]
  assert_close(got[0], logits[1, PROMPT:])
  assert_close(got[1, :3], logits[0, PROMPT:5])


def test_logits_do_not_depend_on_which_pages_a_slot_has(decoded):
  (permuted, _, _), (identity, _, _), _ = decoded
  np.testing.assert_array_equal(permuted, identity)


def test_fewer_columns_of_the_page_table_give_the_same_logits(decoded):
  (wide, _, _), _, (narrow, _, _) = decoded
  assert narrow.shape[1] == 2 * PAGE - PROMPT
  assert_close(narrow[0], wide[0, : narrow.shape[1]])


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
          parameters.abstract_params(config),
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


@pytest.mark.parametrize('form', ['mosaic', 'triton'])
def test_decode_in_a_kernel_equals_decode_in_plain_form(form):
  # Layers of which one slides, in a scan: the kernel has to know its window.
  config = make_config(
      head_size=128, sliding_window=2, sliding_layers=(1,), layer_loop='scan'
  )
  params = make_params(config)
  chosen = dataclasses.replace(config, attention=AttentionSettings(pages=form))
  keys, _ = transformer.cache_shapes(chosen, 6, 8)
  last = (256,) if form == 'mosaic' else (2, 128)
  assert keys.shape == (2, 6, 8, *last)
  table, ok = np.array(PERMUTED, np.int32), np.ones(2, bool)

  def run(config):
    keys, values = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype),
        transformer.cache_shapes(config, 6, 8),
    )
    for position in range(3):
      at = jnp.full(2, position)
      logits, keys, values = transformer.decode(
          config, params, IDS[:, position], at, keys, values, table, ok
      )
    return logits

  got, wanted = (jax.jit(lambda c=c: run(c))() for c in (chosen, config))
  assert_close(got, wanted)


def test_scanned_layers_equal_unrolled_ones(params, logits, gradient, decoded):
  scan = make_config(layer_loop='scan')
  got_logits, got_gradient = run(scan, params)
  assert_close(got_logits, logits)
  assert_close(got_gradient, gradient)
  for got, wanted in zip(run_decode(scan, params, PERMUTED)[0], decoded[0]):
    assert_close(got, wanted)


@pytest.mark.parametrize(
    'loop,remat',
    [
        ('unroll', 'dots'),
        ('unroll', 'full'),
        ('scan', 'full'),
        ('scan', 'offload'),
    ],
)
def test_recomputed_layers_have_the_same_gradient(
    params, gradient, loop, remat
):
  config = make_config(remat=remat, layer_loop=loop)
  assert_close(run(config, params)[1], gradient)


def test_less_of_a_layer_is_kept_where_it_is_computed_again():
  deep = make_config(layers=8, layer_loop='scan')
  rows = jnp.zeros((8, 64), jnp.int32)
  kept = {}
  for remat in ('none', 'dots', 'full'):
    config = dataclasses.replace(deep, remat=remat)

    def loss(params, config=config):
      return transformer.hidden(config, params, rows, rows, rows + 1).sum()

    program = jax.jit(jax.grad(loss)).lower(parameters.abstract_params(config))
    kept[remat] = program.compile().memory_analysis().temp_size_in_bytes
  assert kept['full'] < kept['dots'] < kept['none']
  # Of each of 8 layers 'full' keeps the input alone, and 'none' the activations
  # of its MLP too, which are three times the width each.
  stream = 4 * rows.size * deep.width
  assert kept['none'] - kept['full'] > 8 * 2 * stream


def test_sides_of_matrices_are_those_of_their_products():
  """What is summed over and what comes out, of every kind of projection."""
  config = make_config(
      qkv_bias=True,
      qk_norm=True,
      moe=MoeSettings(experts=2, chosen=1, width=8, dense_layers=(0,)),
      lora=LoraSettings(('query', 'out'), rank=2),
  )
  sides = parameters.matrix_sides(config)
  blocks = sides['blocks']
  assert blocks['query'] == blocks['key'] == ((1,), (2, 3))
  assert blocks['out'] == ((1, 2), (3,))
  assert blocks['gate'] == blocks['down'] == ((1,), (2,))
  assert blocks['expert_up'] == blocks['expert_down'] == ((2,), (3,))
  adapters = blocks['adapters']
  assert adapters['query'] == {'a': ((1,), (2,)), 'b': ((1,), (2, 3))}
  assert adapters['out'] == {'a': ((1, 2), (3,)), 'b': ((1,), (2,))}
  others = {k for k, v in blocks.items() if v is None}
  assert others == {
      'attention_norm', 'mlp_norm', 'query_norm', 'key_norm', 'query_bias',
      'key_bias', 'value_bias', 'router',
  }  # fmt: skip
  assert sides['embedding'] is None and sides['final_norm'] is None


def test_a_policy_on_2_x_2_devices_equals_one_device(params, logits, gradient):
  mesh = tiny.mesh(2, 2)
  config = make_config(vocab_multiple=2)
  padded = dict(
      params,
      embedding=pad(params['embedding'], (1, 0)),
      unembedding=pad(params['unembedding'], (0, 1)),
  )
  placed = jax.device_put(
      padded, parameters.param_shardings(config, mesh, Rules())
  )
  assert placed['blocks']['query'].sharding.shard_shape((2, 32, 4, 8)) == (
      (2, 16, 2, 8)
  )
  got_logits, got_gradient = run(config, placed, mesh)
  assert_close(got_logits[..., :37], logits)
  assert_close(got_gradient['blocks'], gradient['blocks'])


def test_two_kv_heads_serve_four_devices(params, logits):
  mesh = tiny.mesh(1, 4)
  wide = make_config(vocab_size=40)  # 37 would not divide
  padded = dict(
      params,
      embedding=pad(params['embedding'], (3, 0)),
      unembedding=pad(params['unembedding'], (0, 3)),
  )
  shardings = parameters.param_shardings(wide, mesh, Rules())
  placed = jax.device_put(padded, shardings)
  assert shardings['blocks']['key'].spec[2] is None
  assert shardings['blocks']['query'].spec[2] == 'tensor'
  got, _ = run(wide, placed, mesh)
  assert_close(got[..., :37], logits)
  ((got, _, _),) = run_decode(wide, placed, PERMUTED, mesh=mesh)
  assert_close(got[0, :, :37], logits[1, PROMPT:])


@pytest.mark.parametrize('shape', [(2, 2), (1, 4)])
def test_layers_that_differ_on_several_devices_equal_one_device(
    shape, mixed, mixed_params
):
  mesh, config = tiny.mesh(*shape), make_mixed(layer_loop='scan')
  shardings = parameters.param_shardings(config, mesh, Rules())
  placed = jax.device_put(mixed_params, shardings)
  program = functools.partial(
      transformer.forward, config, mesh=mesh, rules=Rules()
  )
  logits = quick_jit(program)(placed, IDS, POSITIONS, SEGMENTS)
  assert_close(logits, mixed[0])
  if shape == (1, 4):
    ((got, _, _),) = run_decode(config, placed, PERMUTED, mesh=mesh)
    assert_close(got[0], mixed[0][1, PROMPT:])


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
  assert_close(got[..., :37], logits)
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
  assert_close(got[0], wanted)


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


def test_what_needs_float32_has_it_in_bfloat16(mixed_params):
  # The activation is the one other use of these functions; SiLU has its own.
  config = make_mixed(compute_dtype='bfloat16', activation='silu')
  program = functools.partial(transformer.forward, config)
  text = str(jax.make_jaxpr(program)(mixed_params, IDS, POSITIONS, SEGMENTS))
  # Norms, softmax, caps, RoPE.
  names = 'rsqrt', 'exp', 'tanh', 'cos', 'sin'
  found = re.findall(rf':(\w+)\[[^]]*\] = ({"|".join(names)})\b', text)
  assert {name for _, name in found} == {*names}
  assert {kind for kind, _ in found} == {'f32'}
  assert ':bf16[' in text


def test_bfloat16_of_all_settings_is_close_to_float32(mixed, mixed_params):
  config = make_mixed(compute_dtype='bfloat16', layer_loop='scan')
  program = quick_jit(functools.partial(transformer.forward, config))
  logits = np.asarray(program(mixed_params, IDS, POSITIONS, SEGMENTS))
  assert logits.dtype == np.float32
  gap = np.abs(logits - mixed[0])[SEGMENTS > 0]
  assert 1e-4 < gap.max() < 0.15
  # Logits are no numbers of bfloat16 that were made wide.
  assert (logits != logits.astype(jnp.bfloat16)).mean() > 0.9


def test_initial_values_do_not_depend_on_the_mesh(initial):
  mesh = tiny.mesh(2, 2)
  four = parameters.init_params(INITIAL, 0, mesh, Rules())
  shardings = parameters.param_shardings(INITIAL, mesh, Rules())
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


def test_initial_norms_multiply_by_one(initial):
  @jax.jit
  def norms():  # alone, so that nothing is drawn
    model = transformer.Transformer(make_mixed(), nnx.Rngs(0))
    return model.final_norm[...], model.blocks.mlp_post_norm[...]

  assert all((norm == 0).all() for norm in norms())
  assert (initial['final_norm'] == 1).all()


def test_parameter_trees_have_one_structure(config, params):
  abstract = parameters.abstract_params(config)
  axes = parameters.logical_axes(config)
  named = jax.tree.map(lambda p, names: len(names) == p.ndim, abstract, axes)
  assert all(jax.tree.leaves(named))
  assert jax.tree.structure(abstract) == jax.tree.structure(params)


def test_heads_that_do_not_divide_are_refused_with_the_numbers(config):
  with pytest.raises(ConfigError, match='heads of size 4 .* the 8 devices'):
    parameters.param_shardings(
        make_config(vocab_size=40), tiny.mesh(1, 8), Rules()
    )


def test_rope_frequencies_are_powers_of_theta():
  config = make_config(head_size=4, rope_theta=100.0)
  np.testing.assert_allclose(
      rope_lib.rope_frequencies(config), [1, 0.1], rtol=1e-6
  )


def test_llama3_scaling_keeps_short_waves_and_stretches_long_ones():
  # In 5 π tokens a frequency of 1, 0.4 x 2.5 and 0.1 turns 2.5 times and 0.25
  # times: half way between 1 and 4, and below 1.
  rope = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_length=16)
  config = make_config(head_size=4, rope_theta=100.0, rope_scaling=rope)
  turns = 16 / (2 * np.pi)
  middle = (turns - 1) / 3
  np.testing.assert_allclose(
      rope_lib.rope_frequencies(config),
      [middle + (1 - middle) / 8, 0.1 / 8],
      rtol=1e-6,
  )
  long = RopeScaling('llama3', 8.0, 1.0, 4.0, original_max_length=10_000)
  config = make_config(head_size=4, rope_theta=100.0, rope_scaling=long)
  np.testing.assert_allclose(
      rope_lib.rope_frequencies(config), [1, 0.1], rtol=1e-6
  )


# By the functions of transformers 5.24.0 (modeling_rope_utils.py), run on these
# settings; theta is 10,000.
@pytest.mark.parametrize(
    'scaling, wanted, amplitude',
    [
        (
            RopeScaling('linear', 4.0),
            [0.25, 0.0790569, 0.025, 0.00790569, 0.0025, 0.000790569, 0.00025,
             7.90569e-05],
            1,
        ),
        (
            RopeScaling('yarn', 4.0, original_max_length=64),
            [1, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025,
             7.905695e-05],
            1.138629436111989,
        ),
        (
            RopeScaling('yarn', 4.0, original_max_length=64, truncate=False,
                        beta_fast=16.0, beta_slow=2.0, attention_factor=0.9),
            [1, 0.1484903, 0.025, 0.007905695, 0.0025, 0.0007905695, 0.00025,
             7.905695e-05],
            0.9,
        ),
        (
            RopeScaling('yarn', 4.0, original_max_length=64, mscale=0.707,
                        mscale_all_dim=0.5),
            [1, 0.2371708, 0.05, 0.007905695, 0.0025, 0.0007905695, 0.00025,
             7.905695e-05],
            1.0268361529030026,
        ),
        (
            RopeScaling('llama3', 8.0, original_max_length=32),
            [1, 0.09583998, 0.0125, 0.003952847, 0.00125, 0.0003952847,
             0.000125, 3.952847e-05],
            1,
        ),
    ],
    ids=['linear', 'yarn', 'yarn_set', 'yarn_mscale', 'llama3'],
)  # fmt: skip
def test_scaled_frequencies_are_those_of_transformers(
    scaling, wanted, amplitude
):
  config = make_config(head_size=16, rope_scaling=scaling)
  got = rope_lib.rope_frequencies(config)
  np.testing.assert_allclose(got, wanted, rtol=1e-6)
  assert scaling.amplitude == pytest.approx(amplitude, rel=1e-12)
  cos, sin = rope_lib.rotations(config, jnp.arange(50))
  angles = np.arange(50)[:, None] * got
  assert_close(cos[:, 0], amplitude * np.cos(angles))
  assert_close(sin[:, 0], amplitude * np.sin(angles))


# By the same source, for sequences of so many tokens.
@pytest.mark.parametrize(
    'length, wanted',
    [
        (3, [1, 0.1, 0.01, 0.001]),
        (64, [1, 0.1, 0.01, 0.001]),
        (65, [1, 0.09799946, 0.009603894, 0.0009411765]),
        (256, [1, 0.04252904, 0.001808719, 7.692308e-05]),
    ],
)
def test_dynamic_scaling_encodes_a_token_as_the_last_of_its_sequence(
    length, wanted
):
  scaling = RopeScaling('dynamic', 4.0, original_max_length=64)
  config = make_config(rope_scaling=scaling)
  cos, sin = rope_lib.rotations(config, jnp.array([0, length - 1]))
  angles = (length - 1) * np.array(wanted)
  assert_close(cos[1, 0], np.cos(angles))
  assert_close(sin[1, 0], np.sin(angles))


def test_decode_agrees_with_forward_as_a_dynamic_base_grows(params):
  scaling = RopeScaling('dynamic', 4.0, original_max_length=6)
  config = make_config(rope_scaling=scaling, layer_loop='scan')
  program = quick_jit(functools.partial(transformer.forward, config))
  logits = np.asarray(program(params, IDS, POSITIONS, SEGMENTS))
  ((got, _, _),) = run_decode(config, params, PERMUTED)
  assert_close(got[0], logits[1, PROMPT:])
  plain = plain_logits(make_config(), params, IDS[1])
  assert_close(logits[1, :6], plain[:6])
  assert np.abs(logits[1, 6:] - plain[6:]).max() > 1e-3
