"""The loss of a critic: how far its values are from the returns."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.config import require
from areal_jax.losses import aggregation as aggregation_lib
from areal_jax.losses import masking


@dataclasses.dataclass
class ValueLoss:
  """Settings of the loss of a critic.

  Attributes:
    clip: how far a value may move from the one before the step and still be
      rewarded for it; None for any distance.
    kind: 'squared', h(x) = x² / 2, or 'huber', which goes on in a straight line
      from |x| = `huber_delta` on.
    huber_delta: for 'huber', in units of reward.
    aggregation, constant_length: as in `PolicyLoss`.
  """

  clip: float | None = 0.2
  kind: Literal['squared', 'huber'] = 'squared'
  huber_delta: float = 10.0
  aggregation: aggregation_lib.Kind = 'token_mean'
  constant_length: int = 0

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning."""
    for name in ('clip', 'huber_delta'):
      value = getattr(self, name)
      right = value is None or 0 < value < math.inf
      require(right, f'{at}.{name}', value, 'None or a number above 0')
    fixed = self.aggregation == 'constant'
    length = self.constant_length
    right = length >= 1 if fixed else length == 0
    require(right, f'{at}.constant_length', length,
            "at least 1 with aggregation 'constant', else 0")  # fmt: skip


def value_loss(
    values: Array,
    old_values: Array,
    returns: Array,
    mask: Array,
    *,
    denominator: Array | float,
    settings: ValueLoss,
    segment_ids: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Clipped regression of values on returns.

  L = (1 / D) Σ_t c_t max(h(V - R), h(clip(V, V_old ± ε) - R))

  See https://arxiv.org/abs/1707.06347 and, for the clip, OpenAI's baselines.
  Masked positions may hold NaN or infinity in any array.

  Args:
    values: [B, T] V, units of reward; carries the gradient.
    old_values: [B, T] V of the weights at the start of the step.
    returns: [B, T] R, see `advantages.TokenAdvantages`.
    mask: [B, T] positive on sampled tokens.
    denominator: `aggregation.denominator` of the whole batch; with 0 the loss
      is 0.
    settings: see `ValueLoss`.
    segment_ids: [B, T]; None where the aggregation looks at no sequences.

  Returns:
    The loss, a float32 scalar, and the statistics over the mask: tokens_sum,
    value_sum, value_clipped_sum (the clip made the loss larger),
    value_error_sum and return_sum with their squares, from which the explained
    variance follows.

  Raises:
    ValueError: segment_ids are missing.
  """
  if settings.aggregation == 'sequence_mean_of_means' and segment_ids is None:
    raise ValueError(
        "segment_ids is None with aggregation 'sequence_mean_of_means', wanted"
        ' [B, T]'
    )
  values = masking.keep(values, mask)
  old_values = jax.lax.stop_gradient(masking.keep(old_values, mask))
  returns = jax.lax.stop_gradient(masking.keep(returns, mask))
  losses = _distance(settings, values - returns)
  clipped = jnp.zeros(losses.shape, bool)
  if settings.clip is not None:
    near = jnp.clip(
        values, old_values - settings.clip, old_values + settings.clip
    )
    bounded = _distance(settings, near - returns)
    clipped, losses = bounded > losses, jnp.maximum(losses, bounded)
  shares = aggregation_lib.shares(settings.aggregation, mask, segment_ids)
  error = values - returns
  stats = {
      'tokens_sum': masking.masked_count(mask),
      'value_sum': masking.masked_sum(values, mask),
      'value_clipped_sum': masking.masked_sum(clipped, mask),
      'value_error_sum': masking.masked_sum(error, mask),
      'value_error_squared_sum': masking.masked_sum(error**2, mask),
      'return_sum': masking.masked_sum(returns, mask),
      'return_squared_sum': masking.masked_sum(returns**2, mask),
  }
  loss = masking.masked_mean(shares * losses, mask, denominator)
  return loss, jax.lax.stop_gradient(stats)


def _distance(settings: ValueLoss, x: Array) -> Array:
  squared = jnp.square(x) / 2
  if settings.kind == 'squared':
    return squared
  delta = settings.huber_delta
  size = jnp.abs(x)
  return jnp.where(size <= delta, squared, delta * (size - delta / 2))
