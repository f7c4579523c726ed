"""Computes the metrics of a training step.

The records of the step and the sums that its updates brought back come in;
values by metric name go out. All of it is numpy on the host: an eager jax
operation here would compile in a step.
"""

from __future__ import annotations

import math
from typing import Mapping, Sequence

import numpy as np

from areal_jax.losses import advantages as advantages_lib
from areal_jax.losses import statistics
from areal_jax.train.batch import BatchScores, kl_token_rewards, score_of
from areal_jax.train.outcome import UpdateOutcome
from areal_jax.train.settings import TrainSettings
from areal_jax.types import Group, StopReason, Trajectory


def record_metrics(
    groups: Sequence[Group],
    version: int,
    dealt: Sequence[Sequence[Trajectory]],
) -> dict[str, float]:
  """Computes the metrics that the records alone tell.

  Args:
    groups: of one step.
    version: V, the version that the step started from. A token is V - (its
      version) old, and an answer is mixed if its tokens have two versions.
    dealt: the trajectories of each minibatch, with the masks that they are
      trained with.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  sampled = [t.versions[t.sampled] for t in trajectories]
  ages = version - np.concatenate(
      [t.versions[t.loss_mask > 0] for members in dealt for t in members]
  )
  scores = np.array([score_of(t) for t in trajectories])
  draws = np.array([t.draw_index for t in trajectories])
  values = {
      'reward_mean': scores.mean(),
      'reward_std': scores.std(),
      'zero_variance_fraction': advantages_lib.fraction_zero_variance(
          scores, draws
      ),
      'response_length_mean': np.mean([len(v) for v in sampled]),
      'truncated_fraction': np.mean(
          [t.stop_reason is StopReason.LENGTH for t in trajectories]
      ),
      'mixed_version_fraction': np.mean(
          [len(set(v.tolist())) > 1 for v in sampled]
      ),
      'head_staleness_max': max(version - g.head_version for g in groups),
  }
  if ages.size:
    values |= {'staleness_mean': ages.mean(), 'staleness_max': ages.max()}
  return {name: float(value) for name, value in values.items()}


def summarize(
    outcomes: Sequence[UpdateOutcome],
    denominators: Sequence[float],
    *,
    exact: bool = True,
) -> dict[str, float]:
  """Metrics of a step from the sums of its updates.

  Args:
    outcomes: one an update.
    denominators: what the loss of each was divided by.
    exact: whether all updates have seen the log-probs under the weights at the
      start of the step. If not, only the first one has, and engine and trainer
      are compared on its tokens.
  """
  stats = merged(outcomes)
  compared = stats if exact else merged(outcomes[:1])
  # A step whose answers are all masked has sums of 0 over 0 tokens.
  count = max(1.0, stats['tokens_sum'])
  losses = [o.loss * part for o, part in zip(outcomes, denominators)]
  values = {
      'loss': sum(losses) / max(1.0, sum(denominators)),
      **_norms(outcomes),
      'learning_rate': outcomes[-1].learning_rate,
      'skipped_steps': outcomes[-1].idle_updates + outcomes[-1].skipped_updates,
      'logprob_gap_mean': compared['gap_sum']
      / max(1.0, compared['tokens_sum']),
      'trained_tokens': stats['tokens_sum'],
      'importance_weight_max': stats['importance_weight_max'],
      'used_weight_max': stats['used_weight_max'],
      'ratio_max': stats['ratio_max'],
  }
  for name, of in (
      ('entropy', 'entropy'),
      ('clip_fraction', 'clipped'),
      ('dual_clip_fraction', 'dual_clipped'),
      ('rejected_fraction', 'rejected'),
      ('clamped_fraction', 'clamped'),
      ('ratio_mean', 'ratio'),
      ('importance_weight_mean', 'importance_weight'),
      ('used_weight_mean', 'used_weight'),
      ('importance_capped_fraction', 'importance_capped'),
      ('kl_update', 'update_kl'),
      ('kl_behavior', 'behavior_kl'),
      ('kl_reference', 'reference_kl'),
      ('kl_saturated_fraction', 'reference_saturated'),
  ):
    if f'{of}_sum' in stats:
      values[name] = stats[f'{of}_sum'] / count
  for side, sign in (('high', 'positive'), ('low', 'negative')):
    if stats[f'{sign}_sum']:
      clipped = stats[f'clipped_{side}_sum'] / stats[f'{sign}_sum']
      values[f'clip_{side}_fraction'] = clipped
  for age in statistics.AGES:
    tokens = stats['age_tokens_sum'][age]
    values[f'staleness_{age}_fraction'] = tokens / count
    if tokens:
      for name, of in (
          ('importance_weight', 'weight'),
          ('clip_fraction', 'clipped'),
          ('rejected_fraction', 'rejected'),
      ):
        value = stats[f'age_{of}_sum'][age] / tokens
        values[f'{name}_staleness_{age}'] = value
      values |= _sample_size(stats, age)
    values |= _gaps(compared, age)
  for name, of in (
      ('effective_sample_size', 'importance_weight'),
      ('used_sample_size', 'used_weight'),
  ):
    squares = stats[f'{of}_squared_sum']
    if squares:
      values[name] = stats[f'{of}_sum'] ** 2 / (count * squares)
  if compared['fresh_tokens_sum']:
    values['logprob_gap_fresh_max'] = compared['fresh_gap_max']
  routers = [name for name in outcomes[0].stats if name.startswith('router_')]
  for name in routers:  # of a minibatch each, and means already
    values[name] = np.mean([outcome.stats[name] for outcome in outcomes])
  return {name: float(value) for name, value in values.items()}


def summarize_critic(
    outcomes: Sequence[UpdateOutcome], denominators: Sequence[float]
) -> dict[str, float]:
  """Metrics of the critic from the sums of its updates.

  Args:
    outcomes: one an update.
    denominators: what the loss of each was divided by.
  """
  stats = merged(outcomes)
  count = max(1.0, stats['tokens_sum'])
  losses = [o.loss * part for o, part in zip(outcomes, denominators)]

  def variance(of: str) -> float:
    mean = stats[f'{of}_sum'] / count
    return stats[f'{of}_squared_sum'] / count - mean**2

  values = {
      'critic_loss': sum(losses) / max(1.0, sum(denominators)),
      'critic_gradient_norm': _norms(outcomes)['gradient_norm'],
      'critic_clip_fraction': stats['value_clipped_sum'] / count,
      'critic_skipped_updates': outcomes[-1].skipped_updates,
      'value_mean': stats['value_sum'] / count,
      'return_mean': stats['return_sum'] / count,
  }
  if variance('return') > 1e-8:  # equal returns leave nothing to explain
    unexplained = variance('value_error') / variance('return')
    values['explained_variance'] = 1 - unexplained
  return {name: float(value) for name, value in values.items()}


def _sample_size(
    stats: Mapping[str, float | np.ndarray], age: int
) -> dict[str, float]:
  """Effective sample size of the tokens of an age, as a share of them."""
  squares = stats['age_weight_squared_sum'][age]
  if not squares:
    return {}
  size = stats['age_weight_sum'][age] ** 2 / squares
  share = size / stats['age_tokens_sum'][age]
  return {f'effective_sample_size_staleness_{age}': share}


def _gaps(
    stats: Mapping[str, float | np.ndarray], age: int
) -> dict[str, float]:
  """Computes the gap between engine and trainer on tokens of one age."""
  tokens = stats['age_tokens_sum'][age]
  if not tokens:
    return {}
  largest = stats['age_gap_max'][age]
  enough = stats['age_gap_below_sum'][age] >= 0.99 * tokens
  edge = statistics.GAP_EDGES[np.argmax(enough)] if enough.any() else largest
  return {
      f'logprob_gap_staleness_{age}': stats['age_gap_sum'][age] / tokens,
      f'logprob_gap_p99_staleness_{age}': min(edge, largest),
      f'logprob_gap_max_staleness_{age}': largest,
      f'kl_k1_staleness_{age}': stats['age_k1_sum'][age] / tokens,
      f'kl_k3_staleness_{age}': stats['age_k3_sum'][age] / tokens,
  }


def merged(outcomes: Sequence[UpdateOutcome]) -> dict[str, float | np.ndarray]:
  """The statistics of several updates together: maxima of `_max`, else sums."""

  def together(name):
    values = [outcome.stats[name] for outcome in outcomes]
    return np.max(values, 0) if name.endswith('_max') else sum(values)

  return {name: together(name) for name in outcomes[0].stats}


def _norms(outcomes: Sequence[UpdateOutcome]) -> dict[str, float]:
  finite = [o.gradient_norm for o in outcomes if math.isfinite(o.gradient_norm)]
  return {
      'gradient_norm': float(np.mean(finite)) if finite else math.nan,
      'update_norm': float(np.mean([o.update_norm for o in outcomes])),
  }


def masked_fraction(groups: Sequence[Group], tokens: float) -> float:
  """Share of the sampled tokens that were taken from the loss and its count."""
  sampled = sum(
      np.count_nonzero(t.sampled) for g in groups for t in g.trajectories
  )
  return float(1 - tokens / sampled) if sampled else 0.0


def mean_kl(
    groups: Sequence[Group], scores: BatchScores, settings: TrainSettings
) -> float:
  """Mean of the KL that the rewards were charged for, nats a token."""
  trajectories = [t for group in groups for t in group.trajectories]
  charged = kl_token_rewards(trajectories, scores, settings)
  tokens = sum(np.count_nonzero(t.sampled) for t in trajectories)
  total = sum(float(np.sum(c)) for c in charged)
  return -total / (settings.advantages.kl_coefficient * max(1, tokens))
