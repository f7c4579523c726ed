"""Sums that stay finite whatever a masked position holds.

`0 * nan` is `nan`, and the derivative of a function at a masked position is
taken before the mask is applied. So it is the *input* of a formula that is
masked, not its output: `formula(keep(x, mask))` and then a masked sum. In that
form (the double `where`) a masked NaN or infinity reaches neither the value nor
the gradient.

A mask is an array that is positive where a position counts.
"""

from __future__ import annotations

import jax
from jax import Array
import jax.numpy as jnp

# exp(20) is 4.9e8: no log-ratio of two useful policies comes near, and products
# of two such ratios with an advantage still fit into float32.
MAX_LOG_RATIO = 20.0


def keep(x: Array, mask: Array, fill: float = 0.0) -> Array:
  """x as float32 where the mask is positive, `fill` elsewhere.

  Args:
    x: any shape; masked positions may hold NaN or infinity.
    mask: the shape of x, or one that broadcasts to it.
    fill: a value at which the formula that follows is finite.
  """
  x = jnp.asarray(x, jnp.float32)
  return jnp.where(jnp.asarray(mask) > 0, x, jnp.float32(fill))


def masked_count(mask: Array) -> Array:
  """Positions that count, a float32 scalar."""
  return jnp.sum(jnp.asarray(mask) > 0, dtype=jnp.float32)


def masked_sum(x: Array, mask: Array) -> Array:
  """Σ x over the positions that count, a float32 scalar."""
  return jnp.sum(keep(x, mask))


def masked_mean(
    x: Array, mask: Array, denominator: Array | float | None = None
) -> Array:
  """Σ x over the positions that count, divided once.

  Args:
    x: any shape; masked positions may hold NaN or infinity.
    mask: the shape of x.
    denominator: what to divide by. None divides by the count of the mask, which
      is right for a whole batch only: parts of a batch are to be divided by the
      count of the whole, so that their results add up.

  Returns:
    A float32 scalar; 0 where nothing counts.
  """
  if denominator is None:
    denominator = masked_count(mask)
  return divide(masked_sum(x, mask), denominator)


def masked_max(x: Array, mask: Array) -> Array:
  """Largest x ≥ 0 over the positions that count, 0 where nothing counts."""
  return jnp.max(keep(x, mask), initial=0.0)


def divide(total: Array, denominator: Array | float) -> Array:
  """total / denominator, and total where the denominator is 0.

  A batch that lost all its tokens has a total of 0, and a loss of 0 then.
  """
  denominator = jnp.asarray(denominator, jnp.float32)
  return total / jnp.where(denominator > 0, denominator, 1.0)


def bounded_exp(log_ratio: Array) -> tuple[Array, Array]:
  """exp of a log-ratio, clamped to ±`MAX_LOG_RATIO` before it can overflow.

  Returns:
    The ratio, with a gradient of 0 where it was clamped, and whether it was.
  """
  clamped = jnp.clip(log_ratio, -MAX_LOG_RATIO, MAX_LOG_RATIO)
  return jnp.exp(clamped), jnp.abs(log_ratio) > MAX_LOG_RATIO


def constant(x: Array, mask: Array) -> Array:
  """x with 0 where masked, taken as data."""
  return jax.lax.stop_gradient(keep(x, mask))
