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


def _plain(q, k, v, mask):
  out = np.zeros(q.shape)
  group = q.shape[2] // k.shape[2]
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = mask[b, t]
    if not seen.any():
      continue
    weights = np.exp(k[b, seen, n // group] @ q[b, t, n])
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


def test_paged_attention_reads_the_pages_of_its_slot_up_to_the_position():
  q, k, v, _ = _inputs(heads=4, kv_heads=2)
  rng = np.random.default_rng(3)
  keys = rng.normal(size=(3, 6, 2, 2, 4)).astype('f')  # [L, pages, page, K, H]
  values = rng.normal(size=keys.shape).astype('f')
  table, positions = np.array([[5, 0, 2], [1, 3, 4]]), np.array([3, 0])
  got = jax.jit(attention.attend_paged)(
      q[:, 0], keys, values, 1, table, positions
  )
  for slot in range(2):
    count = positions[slot] + 1
    k, v = (x[1, table[slot]].reshape(1, 6, 2, 4) for x in (keys, values))
    wanted = _plain(
        q[slot : slot + 1, :1], k, v, (np.arange(6) < count)[None, None]
    )
    np.testing.assert_allclose(got[slot], wanted[0, 0], atol=1e-6)
