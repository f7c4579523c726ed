"""Importance weights of stale tokens, and the rules that cut or reject them.

Log-probs of the policies that sampled (behavior) and of the one that the step
started from (proximal) come in; weights and what is left in the loss go out.
`approximate_proximal` stands in for a forward pass under the proximal weights.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Sequence

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from areal_jax.config import require
from areal_jax.losses import masking, segments

Proximal = Literal['exact', 'loglinear', 'linear', 'behavior']
WeightLevel = Literal['none', 'token', 'sequence_mean', 'sequence_sum']
RuleMetric = Literal['ratio', 'k1', 'k2', 'k3', 'k3_reversed']


@dataclasses.dataclass
class WeightRule:
  """A rule for tokens whose proximal and behavior policies are far apart.

  With d = log π_prox - log π_behav of a token, the metrics are

    ratio exp(d),  k1 d,  k2 d² / 2,  k3 exp(d) - 1 - d,
    k3_reversed exp(-d) - 1 + d

  k3 estimates KL(π_behav ‖ π_prox) from tokens of π_behav, k3_reversed is what
  AReaL calls kl_k3. On the level of a sequence the metric is the mean, sum or
  maximum over its tokens; for the ratio that of d, before exp: the mean gives
  the geometric mean of the ratios, the sum the ratio of the whole sequence.

  Attributes:
    level: whether each token or each sequence is judged.
    action: 'mask' drops what lies outside the bounds from the loss, while the
      denominator goes on counting it; 'clamp' cuts its weight to the bounds.
    metric: see above.
    aggregation: from the tokens of a sequence to its metric.
    lower, upper: inclusive bounds; None for none. TIS is a clamp of the ratio
      from above, IcePop and MIS are masks of the ratio of tokens and sequences.
  """

  level: Literal['token', 'sequence'] = 'token'
  action: Literal['mask', 'clamp'] = 'mask'
  metric: RuleMetric = 'ratio'
  aggregation: Literal['mean', 'sum', 'max'] = 'mean'
  lower: float | None = None
  upper: float | None = 5.0

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning or an effect."""
    bounds = (self.lower, self.upper)
    given = [bound for bound in bounds if bound is not None]
    right = bool(given) and all(math.isfinite(bound) for bound in given)
    right = right and given == sorted(given)
    require(right, f'{at}.upper', bounds, '(lower, upper) finite, in order, at'
            ' least one of them not None')  # fmt: skip
    if given and self.metric != 'k1':
      require(given[0] >= 0, f'{at}.lower', given[0],
              f'at least 0 with metric {self.metric!r}')  # fmt: skip
    require(
        self.action == 'mask' or self.metric == 'ratio',
        f'{at}.metric',
        self.metric,
        "'ratio' with action 'clamp', which cuts the ratio",
    )


@dataclasses.dataclass(frozen=True)
class ImportanceWeights:
  """Importance weights of tokens, all [B, T] and constant.

  Attributes:
    raw: float32 w before any rule, within exp(±20); 1 without weights, 0 where
      masked.
    weight: float32 w, after clamps; 1 without weights, 0 where masked.
    kept: bool, in the mask and dropped by no rule.
    capped: bool, a rule changed the weight.
    clamped: bool, the log-ratio left ±20.
  """

  raw: Array
  weight: Array
  kept: Array
  capped: Array
  clamped: Array


def importance_weights(
    proximal_logps: Array,
    behavior_logps: Array,
    mask: Array,
    segment_ids: Array | None,
    *,
    level: WeightLevel,
    rules: Sequence[WeightRule] = (),
) -> ImportanceWeights:
  """w = π_prox / π_behav of tokens or sequences, and what the rules leave.

  See https://arxiv.org/abs/2110.00641 for the weight;
  https://fengyao.notion.site/off-policy-rl for TIS,
  https://arxiv.org/abs/2510.18855 for IcePop.

  Args:
    proximal_logps, behavior_logps: [B, T] nats; masked ones may be NaN.
    mask: [B, T] positive on sampled tokens.
    segment_ids: [B, T]; None where neither level nor rules look at sequences.
    level: see `PolicyLoss.weight_level`.
    rules: see `WeightRule`; each is judged on the whole mask.
  """
  counts = jnp.asarray(mask) > 0
  distance = masking.constant(proximal_logps, mask) - masking.constant(
      behavior_logps, mask
  )
  distance = jnp.where(counts, distance, 0.0)
  log_weight = {
      'none': lambda: jnp.zeros_like(distance),
      'token': lambda: distance,
      'sequence_mean': lambda: segments.mean(distance, mask, segment_ids),
      'sequence_sum': lambda: segments.total(distance, mask, segment_ids),
  }[level]()
  raw, clamped = masking.bounded_exp(log_weight)
  weight = raw
  kept, capped = counts, jnp.zeros_like(counts)
  for rule in rules:
    seen = _metric(rule, distance, mask, segment_ids)
    inside = jnp.ones_like(counts)
    if rule.lower is not None:
      inside &= seen >= rule.lower
    if rule.upper is not None:
      inside &= seen <= rule.upper
    if rule.action == 'mask':
      kept &= inside
      continue
    # None leaves that side open. A sequence is cut only where its metric, which
    # need not be its weight, lies outside.
    cut = jnp.where(inside, weight, jnp.clip(weight, rule.lower, rule.upper))
    capped |= counts & (cut != weight)
    weight = cut
  raw, weight = (jnp.where(counts, x, 0.0) for x in (raw, weight))
  return ImportanceWeights(raw, weight, kept, capped, clamped & counts)


def approximate_proximal(
    kind: Proximal, logps: Array, behavior_logps: Array, ages: Array | None
) -> Array:
  """Stands in for the proximal log-probs, without a forward pass.

  The proximal policy is taken to be one version before the one that the step
  started from, so that it lies α = (n - 1) / n of the way from a behavior
  policy n versions old to π_θ; α = 0 for n ≤ 0:

    loglinear  log π_behav + α (log π_θ - log π_behav)
    linear     log((1 - α) π_behav + α π_θ)
    behavior   log π_behav

  See https://arxiv.org/abs/2512.06547.

  Args:
    kind: one of the three.
    logps: [B, T] log π_θ, nats, finite.
    behavior_logps: [B, T] nats, finite.
    ages: [B, T] n, in versions; None for 'behavior'.

  Returns:
    [B, T] float32 nats, a constant.
  """
  logps, behavior_logps = jax.lax.stop_gradient((logps, behavior_logps))
  if kind == 'behavior':
    return behavior_logps
  ages = jnp.asarray(ages, jnp.float32)
  alpha = jnp.where(ages > 0, (ages - 1) / jnp.maximum(ages, 1), 0.0)
  if kind == 'loglinear':
    return behavior_logps + alpha * (logps - behavior_logps)
  # 0 log 0: an end of the way is that policy alone.
  first = jnp.log1p(-alpha) + behavior_logps
  second = jnp.log(jnp.where(alpha > 0, alpha, 1.0)) + logps
  return jnp.where(alpha > 0, jnp.logaddexp(first, second), behavior_logps)


def second_moment_keep(
    proximal_logps: np.ndarray,
    behavior_logps: np.ndarray,
    mask: np.ndarray,
    *,
    threshold: float,
) -> np.ndarray:
  """Chooses the tokens that M2PO keeps, over the whole batch, on the host.

  Tokens of the largest δ² = (log π_prox - log π_behav)² are dropped, as few as
  bring the mean of the rest below the threshold; one token always stays.

  See https://arxiv.org/abs/2510.01161.

  Args:
    proximal_logps, behavior_logps: any one shape, nats; masked ones may be NaN.
      All tokens that share a denominator, so that the cut of a batch into parts
      does not matter.
    mask: the same shape, positive on sampled tokens.
    threshold: of the mean of δ², above 0.

  Returns:
    float32 of that shape, 1 on tokens that stay, 0 elsewhere.
  """
  counts = np.asarray(mask) > 0
  kept = np.zeros(counts.shape, np.float32)
  places = np.flatnonzero(counts)
  if not places.size:
    return kept
  gap = np.asarray(proximal_logps, np.float64).ravel()[places]
  gap = gap - np.asarray(behavior_logps, np.float64).ravel()[places]
  order = np.argsort(gap**2, kind='stable')  # smallest first
  means = np.cumsum(gap[order] ** 2) / np.arange(1, places.size + 1)
  stay = max(1, int(np.count_nonzero(means < threshold)))
  kept.ravel()[places[order[:stay]]] = 1
  return kept


def _metric(
    rule: WeightRule, distance: Array, mask: Array, segment_ids: Array | None
) -> Array:
  """Computes what a rule compares with its bounds, [B, T]."""
  held = jnp.clip(distance, -masking.MAX_LOG_RATIO, masking.MAX_LOG_RATIO)
  value = {
      'ratio': lambda: distance,
      'k1': lambda: distance,
      'k2': lambda: jnp.square(distance) / 2,
      'k3': lambda: jnp.expm1(held) - held,
      'k3_reversed': lambda: jnp.expm1(-held) + held,
  }[rule.metric]()
  if rule.level == 'sequence':
    reduce = {
        'mean': segments.mean,
        'sum': segments.total,
        'max': segments.largest,
    }[rule.aggregation]
    value = reduce(value, mask, segment_ids)
  if rule.metric == 'ratio':
    value, _ = masking.bounded_exp(value)
  return value
