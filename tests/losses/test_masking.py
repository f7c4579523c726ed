"""Masked sums against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.losses import masking


def test_masked_sum_ignores_nan_and_infinity():
  x = jnp.array([1.0, jnp.nan, jnp.inf, 2.0])
  assert masking.masked_sum(x, jnp.array([1, 0, 0, 1])) == 3.0


def test_gradient_of_a_formula_ignores_masked_overflow():
  """where(mask, exp(x), 0) has the value and not the gradient."""
  x = jnp.array([0.0, 1e3])
  mask = jnp.array([1, 0])

  def right(x):
    return masking.masked_sum(jnp.exp(masking.keep(x, mask)), mask)

  def wrong(x):
    return jnp.sum(jnp.where(mask > 0, jnp.exp(x), 0.0))

  np.testing.assert_array_equal(jax.grad(right)(x), [1.0, 0.0])
  assert right(x) == wrong(x) == 1.0
  assert np.isnan(jax.grad(wrong)(x)[1])


def test_token_mean_counts_tokens_not_sequences():
  """Case A3: [[1], [2, 2, 2]] is 7 / 4, and 1.5 is the mean of means."""
  losses = jnp.array([[1.0, jnp.nan, jnp.nan], [2.0, 2.0, 2.0]])
  mask = jnp.array([[1, 0, 0], [1, 1, 1]])
  assert masking.masked_mean(losses, mask) == 1.75
  count = masking.masked_count(mask)
  parts = [
      masking.masked_mean(losses[i : i + 1], mask[i : i + 1], count)
      for i in range(2)
  ]
  assert sum(parts) == 1.75
  own_means = [masking.masked_mean(losses[i], mask[i]) for i in range(2)]
  assert sum(own_means) / 2 == 1.5


def test_denominator_follows_the_mask():
  """Case A4: a truncated sequence leaves the loss and the denominator."""
  losses = jnp.ones((2, 4))
  truncated = jnp.array([[1, 1, 1, 1], [0, 0, 0, 0]])
  assert masking.masked_mean(losses, truncated) == 1.0


def test_nothing_in_the_mask_gives_zero():
  x, mask = jnp.array([jnp.nan, 5.0]), jnp.zeros(2)
  assert masking.masked_mean(x, mask) == 0.0
  assert masking.masked_max(x, mask) == 0.0
  gradient = jax.grad(lambda x: masking.masked_mean(x, mask))(x)
  np.testing.assert_array_equal(gradient, [0.0, 0.0])


def test_masked_max_ignores_what_is_masked():
  assert masking.masked_max(jnp.array([1.0, jnp.inf]), jnp.array([1, 0])) == 1


@pytest.mark.parametrize('log_ratio', [-jnp.inf, -1e4, 1e4, jnp.inf])
def test_bounded_exp_is_finite_with_no_gradient_where_clamped(log_ratio):
  ratio, clamped = masking.bounded_exp(jnp.float32(log_ratio))
  gradient = jax.grad(lambda x: masking.bounded_exp(x)[0])(
      jnp.float32(log_ratio)
  )
  assert np.isfinite(ratio) and clamped and gradient == 0


def test_bounded_exp_is_exp_in_between():
  ratio, clamped = masking.bounded_exp(jnp.log(jnp.float32(3.0)))
  np.testing.assert_allclose(ratio, 3.0, rtol=1e-6)
  assert not clamped


def test_nan_that_counts_is_not_hidden():
  assert np.isnan(masking.masked_sum(jnp.array([jnp.nan]), jnp.ones(1)))
  assert np.isnan(masking.bounded_exp(jnp.float32(jnp.nan))[0])
