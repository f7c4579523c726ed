"""The loss of the policy: one formula whose parts are settings.

  L = -(1 / D) Σ_t c_t [ w_t J_t - c_kl v_t KL_t + c_entropy H_t ]

J is what one token is worth (`objective`) given the ratio ρ = π_θ / π_prox of
the token or of its sequence (`ratio_level`) and its advantage; w = π_prox /
π_behav a constant that makes up for tokens sampled by older weights
(`weight_level`), cut down or rejected by `weight_rules`; v = w π_θ / π_prox, a
constant too, makes the KL one of tokens of π_θ, whoever sampled them; c and D
say what a token counts (`aggregation`). The published algorithms are rows of
such settings in `presets.py`.

D is handed in and is that of the whole batch (`aggregation.denominator`), not
of the part at hand. So the parts of a batch, cut into any microbatches and
shards, add up to the same loss and gradient. A sequence is never cut; what
belongs to one is told by segment ids. What needs all tokens of a batch at once
(`second_moment_keep`) is computed before the first part and handed in.

The weights and their rules are in `importance.py`, sums over tokens and their
merging in `statistics.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.config import require
from areal_jax.losses import aggregation as aggregation_lib
from areal_jax.losses import kl, masking, segments
from areal_jax.losses.importance import (
    Proximal,
    WeightLevel,
    WeightRule,
    approximate_proximal,
    importance_weights,
)
from areal_jax.losses.statistics import (
    gap_by_age,
    of_ages,
    sums_by_age,
    weight_sums,
)

ObjectiveKind = Literal['clip', 'gate', 'cispo', 'reinforce', 'geometric_mean']
RatioLevel = Literal['token', 'sequence', 'sequence_token']


@dataclasses.dataclass
class PolicyLoss:
  """Settings of the policy loss. The default is decoupled PPO.

  Attributes:
    objective: J of a token, with the advantage A:
      'clip' min(ρ A, clip(ρ, 1 - ε, 1 + ε_high) A), PPO;
      'gate' (4 / τ) sigmoid(τ (ρ - 1)) A, SAPO, with τ by the sign of A;
      'cispo' clip(ρ, 1 - ε, 1 + ε_high) A log π_θ, the ratio a constant;
      'reinforce' A log π_θ;
      'geometric_mean' GMPO: exp of the mean over the sequence of the log-ratio
      clipped to [-ε, ε_high] on the side that A makes harmful, times the mean
      of A.
    ratio_level: 'token'; 'sequence' takes ρ = exp(mean of log ρ over the
      sequence) and the mean of A, with the gradient through that mean (GSPO);
      'sequence_token' has the same value, and each token its own A and
      gradient (GSPO-token). Without rejected tokens and with one A in a
      sequence the two are the same.
    clip: ε, the trust region reaches from a ratio of 1 - ε (1 leaves it open)
    clip_high: ... to 1 + this; None for 1 + ε. Larger is DAPO's clip-higher.
    dual_clip: c, J is at least c A where A < 0; None for no such bound.
    gate_positive, gate_negative: τ of 'gate' for A > 0 and A ≤ 0.
    proximal: the policy in whose neighbourhood the step stays. 'exact' is that
      of the weights at the start of the step; 'loglinear' and 'linear' stand
      for it by interpolation between π_behav and π_θ (`approximate_proximal`),
      without a forward pass; 'behavior' is π_behav, ordinary PPO: the weight is
      1 then and the ratio bears all of the distance.
    weight_level: of w, the ratio π_prox / π_behav of the 'token', or exp of the
      mean or of the sum of log-ratios over the sequence; 'none' leaves it out,
      which is right only where nothing was sampled by older weights.
    weight_rules: applied together, each judged on all tokens of the mask.
    second_moment: M2PO, tokens are masked, those of the largest
      (log π_prox - log π_behav)² first, until its mean over the batch is below
      this; None for no such mask. See `second_moment_keep`.
    aggregation: from tokens to the batch, see `aggregation.py`.
    constant_length: tokens; for the aggregation 'constant' alone.
    kl_coefficient: weight of the KL to a reference policy; 0 for none.
    kl_kind: its estimator, 'k2' or 'k3'; see `kl.py`. k1 has no gradient in the
      mean, so it is refused here and belongs in the reward.
    entropy_coefficient: weight of the entropy bonus; 0 for none.
  """

  objective: ObjectiveKind = 'clip'
  ratio_level: RatioLevel = 'token'
  clip: float = 0.2
  clip_high: float | None = None
  dual_clip: float | None = None
  gate_positive: float = 1.0
  gate_negative: float = 1.05
  proximal: Proximal = 'exact'
  weight_level: WeightLevel = 'token'
  weight_rules: tuple[WeightRule, ...] = ()
  second_moment: float | None = None
  aggregation: aggregation_lib.Kind = 'token_mean'
  constant_length: int = 0
  kl_coefficient: float = 0.0
  kl_kind: kl.Kind = 'k3'
  entropy_coefficient: float = 0.0

  @property
  def needs_segments(self) -> bool:
    """Returns whether anything is computed over a sequence."""
    return (
        self.ratio_level != 'token'
        or self.objective == 'geometric_mean'
        or self.weight_level.startswith('sequence')
        or self.aggregation == 'sequence_mean_of_means'
        or any(rule.level == 'sequence' for rule in self.weight_rules)
    )

  @property
  def needs_ages(self) -> bool:
    """Returns whether the proximal policy is interpolated by age."""
    return self.proximal in ('loglinear', 'linear')

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning or an effect."""
    right = 0 < self.clip <= 1  # 1: no bound from below
    require(right, f'{at}.clip', self.clip, 'more than 0 and at most 1')
    positive = ('clip_high', 'second_moment', 'gate_positive', 'gate_negative')
    for name in positive:
      value = getattr(self, name)
      right = value is None or (value > 0 and math.isfinite(value))
      require(right, f'{at}.{name}', value, 'None or a number above 0')
    bound = self.dual_clip
    right = bound is None or (1 < bound < math.inf and self.objective == 'clip')
    require(right, f'{at}.dual_clip', bound,
            "None, or a number above 1 with objective 'clip'")  # fmt: skip
    sequences = self.ratio_level == 'token' or self.objective in (
        'clip',
        'gate',
    )
    require(sequences, f'{at}.ratio_level', self.ratio_level,
            f"'token' with objective {self.objective!r}")  # fmt: skip
    weighs = self.weight_level != 'none'
    clamps = any(rule.action == 'clamp' for rule in self.weight_rules)
    require(weighs or not clamps, f'{at}.weight_rules', self.weight_rules,
            "no 'clamp' with weight_level 'none'")  # fmt: skip
    apart = self.proximal != 'behavior'
    require(
        apart or not (self.weight_rules or self.second_moment),
        f'{at}.proximal',
        self.proximal,
        "another with weight_rules or second_moment: 'behavior' leaves no"
        ' distance that they could judge',
    )
    fixed = self.aggregation == 'constant'
    length = self.constant_length
    right = length >= 1 if fixed else length == 0
    require(right, f'{at}.constant_length', length,
            "at least 1 with aggregation 'constant', else 0")  # fmt: skip
    for name in ('kl_coefficient', 'entropy_coefficient'):
      value = getattr(self, name)
      right = value >= 0 and math.isfinite(value)
      require(right, f'{at}.{name}', value, 'at least 0')
    require(
        not self.kl_coefficient or self.kl_kind != 'k1',
        f'{at}.kl_kind',
        self.kl_kind,
        "'k2' or 'k3': the gradient of k1 is 0 in the mean. k1 belongs in the"
        ' reward: train.advantages.kl_coefficient with'
        " train.advantages.kl_kind='k1'",
    )


def policy_loss(
    logps: Array,
    proximal_logps: Array | None,
    behavior_logps: Array,
    advantages: Array,
    mask: Array,
    *,
    denominator: Array | float,
    settings: PolicyLoss,
    segment_ids: Array | None = None,
    ages: Array | None = None,
    kept: Array | None = None,
    reference_logps: Array | None = None,
    entropy: Array | None = None,
    fresh: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """The loss at the top of this file, of one part of a batch.

  The default settings are decoupled PPO, https://arxiv.org/abs/2110.00641 and
  https://arxiv.org/abs/2505.24298 eq. (5). Ratios are taken in log space and
  clamped to exp(±20); how often is in the statistics. With one update a step
  the proximal policy is π_θ itself, and `logps` may be handed in twice.

  Masked positions may hold NaN or infinity in any array.

  Args:
    logps: [B, T] log π_θ of the sampled tokens, in nats; carries the gradient.
    proximal_logps: [B, T] the same under the weights this step started from;
      is looked at with `proximal='exact'` only and may be None otherwise.
    behavior_logps: [B, T] the same as the engine reported while sampling.
    advantages: [B, T] in units of reward.
    mask: [B, T] positive on sampled tokens, 0 on prompt, tool output, padding.
    denominator: `aggregation.denominator` of the whole batch; with 0 the loss
      is 0.
    settings: see `PolicyLoss`.
    segment_ids: [B, T] 1, 2, ... for the sequences of a row, 0 for padding.
      None where `settings.needs_segments` is off.
    ages: [B, T] int, versions between the one that sampled a token and the one
      that the step started from. None where `settings.needs_ages` is off and
      no statistics by age are wanted.
    kept: [B, T] positive on tokens that a rule over the whole batch left in the
      loss (`second_moment_keep`); None without one.
    reference_logps: [B, T] under the reference policy; None without one.
    entropy: [B, T] of π_θ, in nats; carries gradient. None if not computed.
    fresh: [B, T] positive on tokens that the proximal weights sampled, where
      proximal and behavior log-probs have to agree. None if not known.

  Returns:
    The loss, a float32 scalar, and the statistics. Over the mask:
      tokens_sum: tokens that count.
      positive_sum, negative_sum: those with A > 0 and A < 0.
      rejected_sum: those dropped by a rule, by `second_moment` or by no weight.
      ratio_sum, ratio_max: ρ.
      importance_weight_sum, importance_weight_squared_sum,
        importance_weight_max: w before any rule, within exp(±20).
        (Σw)² / (n Σw²) is the effective sample size.
      used_weight_sum, used_weight_squared_sum, used_weight_max: w as used,
        after the rules, 0 where rejected.
      importance_capped_sum: tokens whose w a rule cut.
      clamped_sum: tokens with a log-ratio outside ±20.
      update_kl_sum: k3 of KL(π_prox ‖ π_θ), how far this step has moved.
      behavior_kl_sum: k3 of KL(π_behav ‖ π_prox), how stale the tokens are.
      reference_kl_sum: v KL of `kl_kind`, with `reference_logps` only.
      reference_saturated_sum: tokens whose k3 has no gradient, with
        `reference_logps` only; 0 with k2.
      entropy_sum: with `entropy` only.
      fresh_tokens_sum, fresh_gap_sum, fresh_gap_max: |log π_prox - log π_behav|
        of fresh tokens, with `fresh` only.
      age_tokens_sum, age_weight_sum, age_weight_squared_sum (before any rule),
        age_clipped_sum, age_rejected_sum: [A], for each of `AGES`, with `ages`
        only; so are those of `gap_by_age`.
    Over the tokens that no rule dropped:
      objective_sum: w J, each token counted once.
      clipped_sum: tokens at which the clip changed J.
      clipped_high_sum, clipped_low_sum: of these A > 0 and A < 0.
      dual_clipped_sum: tokens at which `dual_clip` bound J.

  Raises:
    ValueError: something that the settings need was not handed in.
  """
  _require_given(settings, 'kl_coefficient', 'reference_logps', reference_logps)
  _require_given(settings, 'entropy_coefficient', 'entropy', entropy)
  _require_given(settings, 'needs_segments', 'segment_ids', segment_ids)
  _require_given(settings, 'needs_ages', 'ages', ages)
  _require_given(settings, 'second_moment', 'kept', kept)
  mask = jnp.asarray(mask)
  logps = masking.keep(logps, mask)
  behavior_logps = masking.constant(behavior_logps, mask)
  advantages = masking.constant(advantages, mask)
  if settings.proximal == 'exact':
    if proximal_logps is None:
      raise ValueError(
          "proximal_logps is None with proximal 'exact', wanted [B, T]"
      )
    proximal_logps = masking.constant(proximal_logps, mask)
  else:
    proximal_logps = approximate_proximal(
        settings.proximal, logps, behavior_logps, ages
    )

  weights = importance_weights(
      proximal_logps,
      behavior_logps,
      mask,
      segment_ids,
      level=settings.weight_level,
      rules=settings.weight_rules,
  )
  surviving = weights.kept
  if kept is not None:
    surviving &= jnp.asarray(kept) > 0
  weight = jnp.where(surviving, weights.weight, 0.0)
  # What was rejected has no part in the ratio of its sequence either.
  gain = _gain(
      settings, logps, proximal_logps, advantages, surviving, segment_ids
  )

  share = aggregation_lib.shares(settings.aggregation, mask, segment_ids)
  total = masking.masked_sum(share * weight * gain.objective, surviving)
  rejected = (jnp.asarray(mask) > 0) & ~surviving
  stats = {
      'tokens_sum': masking.masked_count(mask),
      'positive_sum': masking.masked_sum(advantages > 0, mask),
      'negative_sum': masking.masked_sum(advantages < 0, mask),
      'rejected_sum': masking.masked_count(rejected),
      'objective_sum': masking.masked_sum(weight * gain.objective, surviving),
      'clipped_sum': masking.masked_sum(gain.clipped, surviving),
      'clipped_high_sum': masking.masked_sum(
          gain.clipped & (advantages > 0), surviving
      ),
      'clipped_low_sum': masking.masked_sum(
          gain.clipped & (advantages < 0), surviving
      ),
      'dual_clipped_sum': masking.masked_sum(gain.dual_clipped, surviving),
      'ratio_sum': masking.masked_sum(gain.ratio, mask),
      'ratio_max': masking.masked_max(gain.ratio, mask),
      **weight_sums('importance_weight', weights.raw, mask),
      **weight_sums('used_weight', weight, mask),
      'importance_capped_sum': masking.masked_sum(weights.capped, mask),
      'clamped_sum': masking.masked_sum(gain.clamped | weights.clamped, mask),
      'update_kl_sum': jnp.sum(kl.k3(proximal_logps, logps)),
      'behavior_kl_sum': jnp.sum(kl.k3(behavior_logps, proximal_logps)),
  }
  if reference_logps is not None:
    reference_logps = masking.constant(reference_logps, mask)
    moved, _ = masking.bounded_exp(
        jax.lax.stop_gradient(logps) - proximal_logps
    )
    estimates = (
        weight
        * moved
        * kl.estimate(settings.kl_kind, logps, reference_logps, mask)
    )
    if settings.kl_coefficient:
      total -= settings.kl_coefficient * masking.masked_sum(
          share * estimates, surviving
      )
    stats['reference_kl_sum'] = masking.masked_sum(estimates, surviving)
    stats['reference_saturated_sum'] = masking.masked_sum(
        kl.saturates(logps, reference_logps) & (settings.kl_kind == 'k3'), mask
    )
  if entropy is not None:
    entropy = masking.keep(entropy, mask)
    if settings.entropy_coefficient:
      total += settings.entropy_coefficient * masking.masked_sum(
          share * entropy, surviving
      )
    stats['entropy_sum'] = jnp.sum(entropy)
  gap = jnp.abs(proximal_logps - behavior_logps)
  if fresh is not None:
    fresh = (jnp.asarray(fresh) > 0) & (jnp.asarray(mask) > 0)
    stats['fresh_tokens_sum'] = masking.masked_count(fresh)
    stats['fresh_gap_sum'] = masking.masked_sum(gap, fresh)
    stats['fresh_gap_max'] = masking.masked_max(gap, fresh)
  if ages is not None:
    stats |= sums_by_age(
        of_ages(mask, ages),
        {
            'tokens': jnp.ones_like(weight),
            'weight': weights.raw,
            'weight_squared': weights.raw**2,
            'clipped': gain.clipped & surviving,
            'rejected': rejected,
        },
    )
    stats |= gap_by_age(proximal_logps, behavior_logps, mask, ages)
  return -masking.divide(total, denominator), jax.lax.stop_gradient(stats)


@dataclasses.dataclass(frozen=True)
class _Gain:
  """The parts of the objective by token, all [B, T].

  Attributes:
    objective: float32 J, with the gradient.
    ratio: float32 ρ.
    clipped, dual_clipped: bool, a bound changed J.
    clamped: bool, the log-ratio left ±20.
  """

  objective: Array
  ratio: Array
  clipped: Array
  dual_clipped: Array
  clamped: Array


def _gain(
    settings: PolicyLoss,
    logps: Array,
    proximal_logps: Array,
    advantages: Array,
    mask: Array,
    segment_ids: Array | None,
) -> _Gain:
  """J and ρ of each token; see `PolicyLoss`. Inputs are finite."""
  distance = logps - proximal_logps
  log_ratio = distance
  if settings.ratio_level != 'token':
    log_ratio = segments.mean(distance, mask, segment_ids)
  if settings.ratio_level == 'sequence':
    advantages = segments.mean(advantages, mask, segment_ids)
  elif settings.ratio_level == 'sequence_token':
    # The value of the sequence, the gradient of the token.
    stop = jax.lax.stop_gradient
    log_ratio = stop(log_ratio) + logps - stop(logps)
  ratio, clamped = masking.bounded_exp(log_ratio)
  high = settings.clip if settings.clip_high is None else settings.clip_high
  inside = jnp.clip(ratio, 1 - settings.clip, 1 + high)
  clipped = dual_clipped = jnp.zeros(ratio.shape, bool)
  if settings.objective == 'clip':
    free, bounded = ratio * advantages, inside * advantages
    objective, clipped = jnp.minimum(free, bounded), bounded < free
    if settings.dual_clip is not None:
      least = settings.dual_clip * advantages
      dual_clipped = (advantages < 0) & (objective < least)
      objective = jnp.where(dual_clipped, least, objective)
  elif settings.objective == 'gate':
    steepness = jnp.where(
        advantages > 0, settings.gate_positive, settings.gate_negative
    )
    gate = jax.nn.sigmoid(steepness * (ratio - 1)) * 4 / steepness
    objective = gate * advantages
  elif settings.objective == 'cispo':
    objective = jax.lax.stop_gradient(inside) * advantages * logps
    clipped = inside != ratio
  elif settings.objective == 'reinforce':
    objective = advantages * logps
  elif settings.objective == 'geometric_mean':
    sign = jnp.sign(advantages)
    held = jnp.clip(distance, -settings.clip, high)
    # The lesser of the two where A > 0, the greater where A < 0.
    harmless = sign * jnp.minimum(sign * distance, sign * held)
    clipped = sign * harmless < sign * distance
    of_sequence, clamped = masking.bounded_exp(
        segments.mean(harmless, mask, segment_ids)
    )
    objective = segments.mean(advantages, mask, segment_ids) * of_sequence
  else:
    raise ValueError(f'objective is {settings.objective!r}, wanted a known one')
  return _Gain(objective, ratio, clipped, dual_clipped, clamped)


def _require_given(
    settings: PolicyLoss, why: str, name: str, value: Array | None
) -> None:
  asked = getattr(settings, why)
  if asked and value is None:
    raise ValueError(
        f'{name} is None with {why} {asked}, wanted an array [B, T]'
    )
