"""Every form of attention equals the plain one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.models import attention


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
  np.testing.assert_allclose(got[sees], _plain(q, k, v, mask)[sees], atol=1e-6)
  assert np.isfinite(got).all()


@pytest.mark.parametrize(
    'form', [attention.attend_grouped, attention.attend_by_head]
)
def test_a_cap_bounds_the_scores_of_each_form(form):
  q, k, v, mask = _inputs()
  got = np.asarray(jax.jit(form, static_argnums=4)(q, k, v, mask, 1.5))
  sees = mask.any(-1)
  wanted = _plain(q, k, v, mask, 1.5)
  np.testing.assert_allclose(got[sees], wanted[sees], atol=1e-6)
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
    np.testing.assert_allclose(one, other, atol=1e-6)


@pytest.mark.parametrize(
    'platform, shards, heads, unrolled',
    [
        ('cpu', 1, 4, True),
        ('cpu', 2, 4, False),
        ('tpu', 1, 4, False),
        ('cpu', 1, 32, False),
    ],
)
def test_the_loop_over_heads_is_for_few_whole_heads_on_cpu(
    platform, shards, heads, unrolled
):
  inputs = _inputs(heads=heads)
  text = str(
      jax.make_jaxpr(
          lambda *a: attention.attend(*a, platform=platform, shards=shards)
      )(*inputs)
  )
  assert text.count('dot_general') == (2 * heads if unrolled else 2)


# Both forms of paged attention: heads side by side, and apart.
FORMS = ('cpu', 1), ('cpu', 2), ('tpu', 1)


@pytest.mark.parametrize('platform, shards', FORMS)
def test_paged_attention_reads_the_pages_of_its_slot_up_to_the_position(
    platform, shards
):
  q, k, v, _ = _inputs(heads=4, kv_heads=2)
  rng = np.random.default_rng(3)
  keys = rng.normal(size=(3, 6, 2, 2, 4)).astype('f')  # [L, pages, page, K, H]
  values = rng.normal(size=keys.shape).astype('f')
  table, positions = np.array([[5, 0, 2], [1, 3, 4]]), np.array([3, 0])
  form = dict(platform=platform, shards=shards)
  got = attention.attend_paged(
      q[:, 0], keys, values, 1, table, positions, **form
  )
  for slot in range(2):
    count = positions[slot] + 1
    k, v = (x[1, table[slot]].reshape(1, 6, 2, 4) for x in (keys, values))
    wanted = _plain(
        q[slot : slot + 1, :1], k, v, (np.arange(6) < count)[None, None]
    )
    np.testing.assert_allclose(got[slot], wanted[0, 0], atol=1e-6)


@pytest.mark.parametrize('platform', ['cpu', 'tpu'])
@pytest.mark.parametrize('traced', [False, True])
@pytest.mark.parametrize('window', [1, 2, 3, 4])
def test_a_window_of_pages_leaves_out_what_lies_before_it(
    window, traced, platform
):
  q, _, _, _ = _inputs()
  rng = np.random.default_rng(3)
  keys = rng.normal(size=(1, 8, 2, 2, 4)).astype('f')
  values = rng.normal(size=keys.shape).astype('f')
  table, positions = np.array([[5, 0, 2, 7], [1, 3, 4, 6]]), np.array([7, 2])
  # A page wholly before the window may hold anything.
  stale = table[0, : (8 - window) // 2]
  keys[:, stale], values[:, stale] = 1e4, 1e4
  program = lambda window: attention.attend_paged(
      q[:, 0],
      keys,
      values,
      0,
      table,
      positions,
      window=window,
      cap=2.0,
      platform=platform,
      shards=1,
  )
  got = jax.jit(program)(window) if traced else program(window)
  for slot in range(2):
    last = positions[slot]
    k, v = (x[0, table[slot]].reshape(1, 8, 2, 4) for x in (keys, values))
    places = np.arange(8)
    seen = (places <= last) & (places > last - window)
    wanted = _plain(q[slot : slot + 1, :1], k, v, seen[None, None], 2.0)
    np.testing.assert_allclose(got[slot], wanted[0, 0], atol=1e-6)


def test_a_known_window_reads_its_own_pages_alone():
  shape = lambda *s: jax.ShapeDtypeStruct(s, np.float32)
  whole = lambda *s: jax.ShapeDtypeStruct(s, np.int32)
  cache = shape(1, 128, 4, 2, 4)

  def work(window):
    program = lambda q, k, v, table, at: attention.attend_paged(
        q, k, v, 0, table, at, window=window, platform='cpu', shards=1
    )
    inputs = shape(2, 4, 4), cache, cache, whole(2, 64), whole(2)
    compiled = jax.jit(program).lower(*inputs).compile()
    return compiled.cost_analysis()['flops']

  assert work(8) < work(None) / 5
