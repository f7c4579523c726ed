"""Every form of attention equals the plain one."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.mesh.rules import Rules
from areal_jax.models import attention, blockwise, paged_attention, visibility
from tests import tiny
from tests.closeness import assert_close

# Compiles in half the time; what it runs here is small.
QUICK = {'xla_backend_optimization_level': 0}


def _inputs(seed=0, heads=4, kv_heads=2):
  rng = np.random.default_rng(seed)
  shape = lambda n: rng.normal(size=(2, 5, n, 4)).astype('f')
  mask = np.tri(5, dtype=bool)[None].repeat(2, 0)
  mask[1, 4] = False  # a padded query sees nothing
  return shape(heads), shape(kv_heads), shape(kv_heads), mask


def _plain(q, k, v, mask, cap=np.inf):
  out = np.zeros(q.shape)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = mask[b, t]
    if not seen.any():
      continue
    scores = k[b, seen, n // group] @ q[b, t, n]
    if cap < np.inf:
      scores = cap * np.tanh(scores / cap)
    weights = np.exp(scores)
    out[b, t, n] = weights / weights.sum() @ v[b, seen, n // group]
  return out


@pytest.mark.parametrize(
    'form', [attention.attend_grouped, attention.attend_by_head]
)
@pytest.mark.parametrize('kv_heads', [1, 2, 4])
def test_each_form_equals_a_loop_over_queries(form, kv_heads):
  q, k, v, mask = _inputs(kv_heads=kv_heads)
  got = np.asarray(jax.jit(form)(q, k, v, mask))
  sees = mask.any(-1)
  assert_close(got[sees], _plain(q, k, v, mask)[sees])
  assert np.isfinite(got).all()


@pytest.mark.parametrize(
    'form', [attention.attend_grouped, attention.attend_by_head]
)
def test_a_cap_bounds_the_scores_of_each_form(form):
  q, k, v, mask = _inputs()
  got = np.asarray(jax.jit(form, static_argnums=4)(q, k, v, mask, 1.5))
  sees = mask.any(-1)
  wanted = _plain(q, k, v, mask, 1.5)
  assert_close(got[sees], wanted[sees])
  assert np.abs(wanted - _plain(q, k, v, mask)).max() > 1e-2


def test_both_forms_have_one_gradient_and_it_is_finite():
  q, k, v, mask = _inputs()

  def loss(form, *inputs):
    return jnp.sum(jnp.sin(form(*inputs, mask))[mask.any(-1)])

  gradients = [
      jax.jit(jax.grad(loss, (1, 2, 3)), static_argnums=0)(form, q, k, v)
      for form in (attention.attend_grouped, attention.attend_by_head)
  ]
  for one, other in zip(*gradients):
    assert np.isfinite(one).all()
    assert_close(one, other)


def test_a_sight_sees_its_segment_up_to_its_place_and_within_its_window():
  # Two sequences and padding, of which the second half of the queries asks.
  segments = np.array([[1, 1, 2, 2, 2, 0]])
  places = np.arange(6)
  visible = visibility.Visibility(places[3:], places, segments[:, 3:], segments)
  wanted = np.array([
      [0, 0, 1, 1, 0, 0],
      [0, 0, 1, 1, 1, 0],
      [0, 0, 0, 0, 0, 0],
  ])  # fmt: skip
  np.testing.assert_array_equal(visible.mask()[0], wanted)
  wanted[1, 2] = 0
  np.testing.assert_array_equal(visible.mask(2)[0], wanted)
  alone = visibility.Visibility.of_rows(3)
  np.testing.assert_array_equal(alone.mask()[0], np.tri(3))


def _rows(tokens, *, heads=4, kv_heads=2, head_size=8, rows=2):
  """Inputs [rows, tokens, ...] and the segments of rows packed unlike."""
  rng = np.random.default_rng(tokens)
  shape = lambda n: rng.normal(size=(rows, tokens, n, head_size)).astype('f')
  segments = np.ones((rows, tokens), np.int32)
  segments[0, tokens // 3 :] = 2
  segments[0, -tokens // 5 :] = 0
  return shape(heads), shape(kv_heads), shape(kv_heads), segments


def _value_and_gradient(form, segments, *inputs, **more):
  """The mixture at real tokens, and gradients of a sum of its sines."""

  def loss(*inputs):
    *inputs, segments = inputs
    visible = visibility.Visibility.of_rows(inputs[0].shape[1], segments)
    mixed = attention.attend(
        *inputs, visible, form=form, platform='cpu', **more
    )
    mixed = jnp.where((segments != 0)[..., None, None], mixed, 0)
    return jnp.sin(mixed).sum(), mixed

  gradient = jax.grad(loss, (0, 1, 2), has_aux=True)
  program = jax.jit(gradient, compiler_options=QUICK)
  gradient, mixed = program(*inputs, segments)
  return [np.asarray(x) for x in (mixed, *gradient)]


ASKED = [dict(), dict(window=20, cap=2.0)]


@pytest.mark.parametrize('more', ASKED, ids=['plain', 'window_and_cap'])
@pytest.mark.parametrize('form', ['blockwise', 'splash', 'triton'])
def test_long_forms_equal_the_plain_one_in_value_and_gradient(form, more):
  if form == 'triton' and more:
    pytest.skip('the kernel has no window and no cap, and is refused them')
  # Of the form by blocks the last ones are padded.
  inputs = _rows(300 if form == 'blockwise' else 256)
  got = _value_and_gradient(form, inputs[3], *inputs[:3], **more)
  wanted = _value_and_gradient('grouped', inputs[3], *inputs[:3], **more)
  for one, other in zip(got, wanted):
    assert np.isfinite(one).all()
    assert_close(one, other)


@pytest.mark.parametrize('form', ['blockwise', 'splash'])
def test_a_window_that_the_layer_decides_is_that_of_the_layer(form):
  inputs = _rows(256)

  @functools.partial(jax.jit, compiler_options=QUICK)
  def run(slides):
    visible = visibility.Visibility.of_rows(256, inputs[3])
    window = visibility.Window(20, slides)
    return attention.attend(
        *inputs[:3], visible, form=form, platform='cpu', window=window
    )

  for slides in (False, True):
    wanted = attention.attend(
        *inputs[:3],
        visibility.Visibility.of_rows(256, inputs[3]),
        form='grouped',
        platform='cpu',
        window=20 if slides else None,
    )
    got = np.asarray(run(slides))
    real = inputs[3] != 0
    assert_close(got[real], wanted[real])


MESHES = [
    ('blockwise', (2, 2), Rules()),
    # More devices than key/value heads: each has its own copy.
    ('blockwise', (1, 4), Rules()),
    ('splash', (1, 2), Rules()),
    # Places cut: queries of a device see the keys of all.
    ('grouped', (2, 2), Rules(batch=None, time='fsdp')),
    ('blockwise', (2, 2), Rules(batch=None, time='fsdp')),
    ('splash', (2, 2), Rules(batch=None, time='fsdp')),
]


@pytest.mark.parametrize('form, shape, rules', MESHES)
def test_attention_on_several_devices_equals_that_on_one(form, shape, rules):
  # Neither do three key/value heads divide over two devices, nor do their
  # groups of two over three query heads.
  heads = (6, 3) if shape == (1, 2) else (4, 2)
  *inputs, segments = _rows(256, heads=heads[0], kv_heads=heads[1])
  where = dict(mesh=tiny.mesh(*shape), rules=rules)
  got = _value_and_gradient(form, segments, *inputs, window=20, **where)
  wanted = _value_and_gradient('grouped', segments, *inputs, window=20)
  for one, other in zip(got, wanted):
    assert_close(one, other)


@pytest.mark.parametrize('form, tokens', [('blockwise', 300), ('splash', 256)])
def test_a_query_that_sees_nothing_is_finite_in_long_forms(form, tokens):
  *inputs, segments = _rows(tokens)
  for x in _value_and_gradient(form, np.zeros_like(segments), *inputs):
    assert np.isfinite(x).all()


@pytest.mark.parametrize('form', ['blockwise', 'grouped'])
def test_memory_of_a_gradient_grows_with_the_length_in_the_form_for_long_rows(
    form,
):
  def temporary(tokens):
    shape = lambda n: jax.ShapeDtypeStruct((1, tokens, n, 16), jnp.float32)
    segments = jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    def loss(q, k, v, segments):
      visible = visibility.Visibility.of_rows(tokens, segments)
      mixed = attention.attend(q, k, v, visible, form=form, platform='cpu')
      return jnp.sin(mixed).sum()

    program = jax.jit(jax.grad(loss, (0, 1, 2)))
    inputs = shape(2), shape(1), shape(1), segments
    compiled = program.lower(*inputs).compile(QUICK)
    return compiled.memory_analysis().temp_size_in_bytes

  sizes = [temporary(tokens) for tokens in (1024, 2048, 4096)]
  growths = [more / less for less, more in zip(sizes, sizes[1:])]
  if form == 'blockwise':
    assert max(growths) < 2.3
  else:
    assert min(growths) > 3  # what the test above would miss otherwise


def test_blocks_of_other_segments_are_not_computed():
  # A loop whose trips are counted in its bounds: 4 blocks of queries see 1 + 2
  # + 1 + 2 blocks of keys where two sequences of 2 blocks are packed, and
  # 1 + 2 + 3 + 4 where there is one.
  def blocks(segments):
    places = jnp.arange(1024)
    rows = blockwise._rows(
        places, places, segments, segments, blockwise.NO_WINDOW, (256, 256)
    )
    return int((rows.end_key - rows.first_key).sum())

  one = jnp.ones((1, 1024), jnp.int32)
  assert blocks(one) == 10
  assert blocks(one.at[:, 512:].set(2)) == 6
  assert blocks(one.at[:, 256:].set(0)) == 1


# Every form of paged attention, those of other platforms interpreted.
FORMS = ('side_by_side', 'gathered', 'mosaic', 'triton')


def _paged(form, q, keys, values, layer, table, positions, **more):
  """`attend_paged` in a form, its cache as that wants it."""
  if form in FORMS[:2]:
    run = getattr(paged_attention, f'attend_{form}')
    return run(q, keys, values, layer, table, positions, **more)
  if form == 'mosaic':
    keys, values = (x.reshape(*x.shape[:3], -1) for x in (keys, values))
  return paged_attention.attend_paged(
      q,
      keys,
      values,
      layer,
      table,
      positions,
      platform='cpu',
      form=form,
      **more,
  )


def _cache(slots, layers, pages, page, head_size=128):
  """Queries [S, N, H], keys and values [L, pages, page, K, H]."""
  rng = np.random.default_rng(3)
  q = rng.normal(size=(slots, 4, head_size)) / np.sqrt(head_size)
  cache = rng.normal(size=(2, layers, pages, page, 2, head_size))
  return q.astype('f'), *cache.astype('f')


def _assert_slots_see(got, q, keys, values, table, seen, cap=np.inf):
  """keys, values [pages, page, K, H] of the layer; seen [S, positions]."""
  for slot, pages in enumerate(table):
    k, v = (x[pages].reshape(1, -1, *x.shape[2:]) for x in (keys, values))
    wanted = _plain(q[slot][None, None], k, v, seen[slot][None, None], cap)
    assert_close(got[slot], wanted[0, 0])


@pytest.mark.parametrize('form', FORMS)
def test_paged_attention_reads_the_pages_of_its_slot_up_to_the_position(form):
  q, keys, values = _cache(2, 3, 6, 8)
  # Page 5 is shared.
  table, positions = np.array([[5, 0, 2], [5, 3, 4]]), np.array([15, 0])
  got = _paged(form, q, keys, values, 1, table, positions)
  seen = np.arange(24) <= positions[:, None]
  _assert_slots_see(got, q, keys[1], values[1], table, seen)


@pytest.mark.parametrize(
    'form, traced, window',
    [
        *itertools.product(FORMS[:2], [False, True], [1, 2, 3, 4]),
        ('mosaic', False, 3),
        ('triton', False, 3),
        ('triton', True, 4),
    ],
)
def test_a_window_of_pages_leaves_out_what_lies_before_it(form, traced, window):
  q, keys, values = _cache(2, 1, 8, 2)
  table, positions = np.array([[5, 0, 2, 7], [1, 3, 4, 6]]), np.array([7, 2])
  # A page wholly before the window may hold anything.
  stale = table[0, : (8 - window) // 2]
  keys[:, stale], values[:, stale] = 1e4, 1e4
  program = lambda window: _paged(
      form, q, keys, values, 0, table, positions, window=window, cap=2.0
  )
  got = jax.jit(program)(window) if traced else program(window)
  places = np.arange(8)
  seen = (places <= positions[:, None]) & (places > positions[:, None] - window)
  _assert_slots_see(got, q, keys[0], values[0], table, seen, 2.0)


@pytest.mark.parametrize('form', ['mosaic', 'triton'])
def test_kernels_over_pages_walk_slots_of_unlike_lengths(form):
  # Several blocks of pages a slot, and a number of the layer that is traced.
  page, columns, slots = 64, 20, 3
  q, keys, values = _cache(slots, 2, columns * slots, page)
  table = np.random.default_rng(4).permutation(columns * slots)
  table = table.reshape(slots, columns)
  positions = np.array([page * columns - 1, 7, 700])
  program = jax.jit(functools.partial(_paged, form))
  got = program(q, keys, values, 1, table, positions)
  wanted = paged_attention.attend_gathered(q, keys, values, 1, table, positions)
  assert_close(got, wanted)


@pytest.mark.parametrize('window', [None, 300, np.int32(300)], ids=repr)
def test_long_sequences_are_read_in_blocks_on_a_cpu(window, monkeypatch):
  # Five blocks of 256 positions, the last of them two pages.
  page, columns, slots = 64, 18, 4
  q, keys, values = _cache(slots, 2, columns * slots, page)
  table = np.random.default_rng(4).permutation(columns * slots)
  table = table.reshape(slots, columns)
  positions = np.array([page * columns - 1, 7, 700, 256])
  more = dict(window=window, cap=2.0)

  def compiled(live):
    monkeypatch.setattr(paged_attention, '_LIVE', live)
    program = functools.partial(_paged, 'side_by_side', **more)
    inputs = q, keys, values, 1, table, positions
    program = jax.jit(program, static_argnums=3).lower(*inputs).compile()
    got = program(q, keys, values, table, positions)
    return got, program.memory_analysis().temp_size_in_bytes

  (whole, much), (blocks, less) = compiled(2**20), compiled(256)
  wanted = paged_attention.attend_gathered(
      q, keys, values, 1, table, positions, **more
  )
  for got in whole, blocks:
    assert_close(got, wanted)
  # A known window is less than two blocks as it is.
  assert less < (much if isinstance(window, int) else much / 3)
  # A block left out is seen.
  planted = positions - np.array([256, 0, 0, 0])
  missed = paged_attention.attend_gathered(
      q, keys, values, 1, table, planted, **more
  )
  assert np.abs(missed - wanted)[0].max() > 1e-3


@pytest.mark.parametrize('form', ['mosaic', 'triton'])
def test_kernels_over_pages_run_where_heads_are_cut(form):
  q, keys, values = _cache(2, 1, 6, 8)
  table, positions = np.array([[5, 0, 2], [1, 3, 4]]), np.array([17, 1])
  where = dict(mesh=tiny.mesh(1, 2), rules=Rules())
  program = jax.jit(functools.partial(_paged, form, **where))
  got = program(q, keys, values, 0, table, positions)
  wanted = paged_attention.attend_gathered(q, keys, values, 0, table, positions)
  assert_close(got, wanted)


def test_a_known_window_reads_its_own_pages_alone():
  shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)
  whole = lambda *s: jax.ShapeDtypeStruct(s, np.int32)
  cache = shape(1, 128, 4, 2, 4)

  def work(window):
    program = lambda q, k, v, table, at: paged_attention.attend_paged(
        q, k, v, 0, table, at, window=window, platform='cpu'
    )
    inputs = shape(2, 4, 4), cache, cache, whole(2, 64), whole(2)
    compiled = jax.jit(program).lower(*inputs).compile()
    return compiled.cost_analysis()['flops']

  assert work(8) < work(None) / 5
