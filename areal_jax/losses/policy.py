"""Losses of the policy: decoupled PPO and supervised.

A loss here is a sum over tokens divided by a denominator that is handed in: the
count of the whole batch, not of the part at hand. So the parts of a batch, cut
into any microbatches and shards, add up to the same loss and gradient.

Statistics come out as a dict in which the end of a name says how two parts are
put together: `_sum` adds, `_max` takes the larger (`merge_stats`). All maxima
are of numbers ≥ 0, so zeros are neutral. A mean is a sum divided by
`tokens_sum`, taken after the last part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Iterable, Mapping

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.config import require
from areal_jax.losses import kl, masking


@dataclasses.dataclass
class PolicyLoss:
  """What the policy is trained on. The weight π_prox / π_behav has no switch.

  clip: ε, the trust region reaches from a ratio of 1 - ε ...
  clip_high: ... to 1 + this; None for 1 + ε. Larger is DAPO's clip-higher.
  importance_cap: largest weight π_prox / π_behav, larger ones are cut down to
    it; None leaves the weight as it is, which is the paper's way.
  kl_coefficient: weight of the KL to a reference policy; 0 for none.
  kl_kind: its estimator, see `kl.py` (k1 is of no use as a penalty).
  entropy_coefficient: weight of the entropy bonus; 0 for none.
  """

  clip: float = 0.2
  clip_high: float | None = None
  importance_cap: float | None = None
  kl_coefficient: float = 0.0
  kl_kind: kl.Kind = 'k3'
  entropy_coefficient: float = 0.0

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning."""
    require(0 < self.clip < 1, f'{at}.clip', self.clip, 'between 0 and 1')
    for name in ('clip_high', 'importance_cap'):
      value = getattr(self, name)
      right = value is None or (value > 0 and math.isfinite(value))
      require(right, f'{at}.{name}', value, 'None or a number above 0')
    for name in ('kl_coefficient', 'entropy_coefficient'):
      value = getattr(self, name)
      right = value >= 0 and math.isfinite(value)
      require(right, f'{at}.{name}', value, 'at least 0')


def decoupled_ppo_loss(
    logps: Array,
    proximal_logps: Array,
    behavior_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    denominator: Array | float,
    settings: PolicyLoss,
    reference_logps: Array | None = None,
    entropy: Array | None = None,
    fresh: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Clipped policy gradient with the trust region around the proximal policy.

  L = -(1 / denominator) Σ_mask [ w min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A)
                                  - c_kl KL + c_entropy H ]
  ρ = π_θ / π_prox,  w = π_prox / π_behav, a constant, at most `importance_cap`

  See https://arxiv.org/abs/2110.00641 and https://arxiv.org/abs/2505.24298
  eq. (5). Ratios are taken in log space and clamped to exp(±20); how often is
  in the statistics. With one update a step the proximal policy is π_θ itself,
  and `logps` may be handed in twice.

  Masked positions may hold NaN or infinity in any array.

  Args:
    logps: [B, T] log π_θ of the sampled tokens, in nats; carries the gradient.
    proximal_logps: [B, T] the same under the weights this step started from.
    behavior_logps: [B, T] the same as the engine reported while sampling.
    advantages: [B, T] in units of reward.
    mask: [B, T] positive on sampled tokens, 0 on prompt, tool output, padding.
    denominator: loss tokens of the whole batch; with 0 the loss is 0.
    settings: see `PolicyLoss`.
    reference_logps: [B, T] under the reference policy; None without one.
    entropy: [B, T] of π_θ, in nats; carries gradient. None if not computed.
    fresh: [B, T] positive on tokens that the proximal weights sampled, where
      proximal and behavior log-probs have to agree. None if not known.

  Returns:
    The loss, a float32 scalar, and the statistics over the mask:
      tokens_sum: tokens that count.
      objective_sum: w min(ρ A, clip(ρ) A).
      clipped_sum: tokens at which the clip cut the objective down.
      ratio_sum, ratio_max: ρ.
      importance_weight_sum, importance_weight_squared_sum,
        importance_weight_max: w as used. (Σw)² / (n Σw²) is the effective
        sample size.
      importance_capped_sum: tokens whose w was above the cap.
      clamped_sum: tokens with a log-ratio outside ±20.
      update_kl_sum: k3 of KL(π_prox ‖ π_θ), how far this step has moved.
      behavior_kl_sum: k3 of KL(π_behav ‖ π_prox), how stale the tokens are.
      reference_kl_sum: of `kl_kind`, with `reference_logps` only.
      entropy_sum: with `entropy` only.
      fresh_tokens_sum, fresh_gap_sum, fresh_gap_max: |log π_prox - log π_behav|
        of fresh tokens, with `fresh` only.

  Raises:
    ValueError: a coefficient is set and what it weighs was not handed in.
  """
  _require_given('kl_coefficient', settings, 'reference_logps', reference_logps)
  _require_given('entropy_coefficient', settings, 'entropy', entropy)
  logps = masking.keep(logps, mask)
  proximal_logps = _constant(proximal_logps, mask)
  behavior_logps = _constant(behavior_logps, mask)
  advantages = _constant(advantages, mask)

  ratio, ratio_clamped = masking.bounded_exp(logps - proximal_logps)
  high = settings.clip if settings.clip_high is None else settings.clip_high
  clipped_ratio = jnp.clip(ratio, 1 - settings.clip, 1 + high)
  free, clipped = ratio * advantages, clipped_ratio * advantages

  uncapped, weight_clamped = masking.bounded_exp(
      proximal_logps - behavior_logps
  )
  capped = jnp.zeros_like(weight_clamped)
  weight = uncapped
  if settings.importance_cap is not None:
    capped = uncapped > settings.importance_cap
    weight = jnp.minimum(uncapped, settings.importance_cap)

  total = objective = masking.masked_sum(
      weight * jnp.minimum(free, clipped), mask
  )
  stats = {
      'tokens_sum': masking.masked_count(mask),
      'objective_sum': objective,
      'clipped_sum': masking.masked_sum(clipped < free, mask),
      'ratio_sum': masking.masked_sum(ratio, mask),
      'ratio_max': masking.masked_max(ratio, mask),
      'importance_weight_sum': masking.masked_sum(weight, mask),
      'importance_weight_squared_sum': masking.masked_sum(weight**2, mask),
      'importance_weight_max': masking.masked_max(weight, mask),
      'importance_capped_sum': masking.masked_sum(capped, mask),
      'clamped_sum': masking.masked_sum(ratio_clamped | weight_clamped, mask),
      'update_kl_sum': jnp.sum(kl.k3(proximal_logps, logps)),
      'behavior_kl_sum': jnp.sum(kl.k3(behavior_logps, proximal_logps)),
  }
  if reference_logps is not None:
    reference_kl = jnp.sum(
        kl.estimate(settings.kl_kind, logps, reference_logps, mask)
    )
    if settings.kl_coefficient:
      total -= settings.kl_coefficient * reference_kl
    stats['reference_kl_sum'] = reference_kl
  if entropy is not None:
    entropy_sum = masking.masked_sum(entropy, mask)
    if settings.entropy_coefficient:
      total += settings.entropy_coefficient * entropy_sum
    stats['entropy_sum'] = entropy_sum
  if fresh is not None:
    fresh = (jnp.asarray(fresh) > 0) & (jnp.asarray(mask) > 0)
    gap = jnp.abs(proximal_logps - behavior_logps)
    stats['fresh_tokens_sum'] = masking.masked_count(fresh)
    stats['fresh_gap_sum'] = masking.masked_sum(gap, fresh)
    stats['fresh_gap_max'] = masking.masked_max(gap, fresh)
  return -masking.divide(total, denominator), jax.lax.stop_gradient(stats)


def sft_loss(logps: Array, mask: Array, *, denominator: Array | float) -> Array:
  """Negative log-likelihood, L = -(1 / denominator) Σ_mask log π_θ.

  Args:
    logps: [B, T] log π_θ of the tokens, in nats; masked ones may be NaN.
    mask: [B, T] positive on the tokens to learn.
    denominator: such tokens in the whole batch; with 0 the loss is 0.

  Returns:
    The loss, a float32 scalar.
  """
  return -masking.masked_mean(logps, mask, denominator)


def merge_stats(parts: Iterable[Mapping[str, Array]]) -> dict[str, Array]:
  """Statistics of the whole from those of its parts, by the end of the name.

  Works on traced, device and host values alike.

  Raises:
    ValueError: no part, parts with other names, or a name that ends neither in
      `_sum` nor in `_max`.
  """
  parts = list(parts)
  if not parts:
    raise ValueError('parts is empty, wanted the statistics of at least one')
  for part in parts:
    if set(part) != set(parts[0]):
      raise ValueError(
          f'parts hold {sorted(part)} and {sorted(parts[0])}, wanted one set'
      )
  return {
      name: functools.reduce(_merger(name), [part[name] for part in parts])
      for name in parts[0]
  }


def _merger(name: str):
  if name.endswith('_sum'):
    return lambda one, other: one + other
  if name.endswith('_max'):
    return jnp.maximum
  raise ValueError(f'statistic {name!r}, wanted a name in _sum or _max')


def _constant(x: Array, mask: Array) -> Array:
  """x with 0 where masked, taken as data."""
  return jax.lax.stop_gradient(masking.keep(x, mask))


def _require_given(
    coefficient: str, settings: PolicyLoss, name: str, value: Array | None
) -> None:
  weight = getattr(settings, coefficient)
  if weight and value is None:
    raise ValueError(
        f'{name} is None with {coefficient} {weight}, wanted an array [B, T]'
    )
