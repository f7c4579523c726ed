"""Each metric of a step against its definition, with planted values.

Eight tokens of two answers are handed to the objective of the policy, with
log-probs under four policies that no network made. What the metrics have to say
of them is worked out here by their definitions in `telemetry/metrics.py`, in
plain numpy.
"""

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from areal_jax.losses.statistics import AGES
from areal_jax.telemetry.metrics import GROUPS, registered
from areal_jax.train.objectives import Scores, policy_objective
from areal_jax.train.outcome import UpdateOutcome
from areal_jax.train.summary import record_metrics, summarize, summarize_critic
from areal_jax.types import (
    Draw,
    Group,
    Problem,
    RewardResult,
    RewardStatus,
    Segment,
    StopReason,
    Trajectory,
)

VERSION = 7
# Token by token; the last one is not in the loss.
MASK = np.array([1, 1, 1, 1, 1, 1, 1, 0.0])
VERSIONS = np.array([7, 7, 6, 6, 5, 2, 1, 7])
NOW = np.array([-1.0, -0.5, -2.0, -1.0, -0.2, -24.0, -1.5, -9.0])
START = np.array([-1.3, -0.5, -1.7, -1.1, -0.2, -24.0, -1.5, -1.0])
BEHAVIOR = np.array([-1.301, -0.5, -2.7, -1.6, -0.1, -25.5, -24.5, -2.0])
REFERENCE = np.array([-1.2, -0.7, -1.0, -1.0, -0.5, -1.0, -1.5, -3.0])
ADVANTAGES = np.array([1.0, -1.0, -0.5, 0.5, 2.0, -2.0, 1.0, 5.0])
ENTROPY = np.array([0.5, 1.0, 1.5, 2.0, 0.0, 0.3, 0.7, 9.0])
RULES = (
    WeightRule(action='clamp', upper=2.0),
    WeightRule(metric='k2', upper=3.0),
)
LOSS = PolicyLoss(
    clip=0.2,
    dual_clip=1.05,
    kl_coefficient=0.1,
    kl_kind='k3',
    weight_rules=RULES,
)


def _bounded(x):
  return np.exp(np.clip(x, -20, 20))


def _k3(one, other):
  d = np.maximum(one - other, -20.0)
  return np.expm1(-d) + d


def _expected():
  """The definitions, over the seven loss tokens."""
  on = MASK > 0
  now, start, behavior, reference, advantages, ages = (
      x[on]
      for x in (NOW, START, BEHAVIOR, REFERENCE, ADVANTAGES, VERSION - VERSIONS)
  )
  count = len(now)
  distance = start - behavior
  raw, ratio = _bounded(distance), _bounded(now - start)
  rejected = distance**2 / 2 > 3.0
  used = np.where(rejected, 0.0, np.minimum(raw, 2.0))
  free, bounded = ratio * advantages, np.clip(ratio, 0.8, 1.2) * advantages
  clipped = (bounded < free) & ~rejected
  objective = np.minimum(free, bounded)
  dual = (advantages < 0) & (objective < 1.05 * advantages) & ~rejected
  objective = np.where(dual, 1.05 * advantages, objective)
  divergence = used * ratio * _k3(now, reference)
  gap = np.abs(distance)
  total = np.sum(used * objective) - 0.1 * np.sum(divergence)
  values = {
      'loss': -total / count,
      'entropy': ENTROPY[on].mean(),
      'clip_fraction': clipped.mean(),
      'clip_high_fraction': clipped[advantages > 0].mean(),
      'clip_low_fraction': clipped[advantages < 0].mean(),
      'dual_clip_fraction': dual.mean(),
      'ratio_mean': ratio.mean(),
      'ratio_max': ratio.max(),
      'kl_update': _k3(start, now).mean(),
      'rejected_fraction': rejected.mean(),
      'clamped_fraction': (np.abs(distance) > 20).mean(),
      'kl_reference': divergence.sum() / count,
      'kl_saturated_fraction': (now - reference <= -20).mean(),
      'importance_weight_mean': raw.mean(),
      'importance_weight_max': raw.max(),
      'used_weight_mean': used.mean(),
      'used_weight_max': used.max(),
      'importance_capped_fraction': (raw > 2.0).mean(),
      'kl_behavior': _k3(behavior, start).mean(),
      'logprob_gap_fresh_max': gap[ages == 0].max(),
      'logprob_gap_mean': gap.mean(),
      'effective_sample_size': raw.sum() ** 2 / (count * np.sum(raw**2)),
      'used_sample_size': used.sum() ** 2 / (count * np.sum(used**2)),
      'learning_rate': 3e-4,
      'gradient_norm': 2.0,
      'update_norm': 0.25,
      'skipped_steps': 5 + 2,
      'trained_tokens': count,
  }
  for age in AGES:
    of = ages >= age if age == AGES[-1] else ages == age
    values |= {
        f'staleness_{age}_fraction': of.mean(),
        f'logprob_gap_staleness_{age}': gap[of].mean(),
        f'logprob_gap_max_staleness_{age}': gap[of].max(),
        f'kl_k1_staleness_{age}': (behavior - start)[of].mean(),
        f'kl_k3_staleness_{age}': _k3(behavior, start)[of].mean(),
        f'importance_weight_staleness_{age}': raw[of].mean(),
        f'clip_fraction_staleness_{age}': clipped[of].mean(),
        f'rejected_fraction_staleness_{age}': rejected[of].mean(),
        f'effective_sample_size_staleness_{age}': (
            raw[of].sum() ** 2 / (of.sum() * np.sum(raw[of] ** 2))
        ),
    }
  return values


@pytest.fixture(scope='module')
def summary():
  row = lambda x: np.asarray(x, np.float32)[None]
  batch = {
      'loss_mask': row(MASK),
      'versions': VERSIONS[None].astype(np.int32),
      'version': np.int32(VERSION),
      'behavior_logps': row(BEHAVIOR),
      'advantages': row(ADVANTAGES),
      'denominator': np.float32(MASK.sum()),
      'segment_ids': np.ones((1, len(MASK)), np.int32),
  }
  scores = [row(x) for x in (NOW, ENTROPY, START, REFERENCE)]
  loss, stats = jax.device_get(
      jax.jit(lambda s, b: policy_objective(LOSS)(Scores(*s), b))(scores, batch)
  )
  outcome = UpdateOutcome(
      applied=True,
      gradient_norm=2.0,
      update_norm=0.25,
      learning_rate=3e-4,
      loss=float(loss),
      idle_updates=5,
      skipped_updates=2,
      consecutive_skips=0,
      nonfinite=(),
      stats=stats,
  )
  return summarize([outcome], [float(MASK.sum())])


@pytest.mark.parametrize('name', _expected())
def test_metric_is_what_its_definition_says(summary, name):
  np.testing.assert_allclose(
      summary[name], _expected()[name], rtol=2e-5, atol=1e-7
  )


def test_ninety_nine_percent_of_gaps_are_below_what_is_said(summary):
  """To a quarter of a decade, and never above the largest."""
  gap = np.abs(START - BEHAVIOR)[MASK > 0]
  ages = (VERSION - VERSIONS)[MASK > 0]
  for age in AGES:
    largest = gap[ages >= age if age == 3 else ages == age].max()
    told = summary[f'logprob_gap_p99_staleness_{age}']
    assert largest / 10**0.25 <= told <= largest * (1 + 1e-3)


def _answer(sample, score, versions, mask, stop):
  count = len(versions)
  return Trajectory(
      draw_index=4,
      sample=sample,
      segments=(Segment('prompt', 0, 2), Segment('sampled', 2, count, stop)),
      ids=np.arange(count + 2),
      loss_mask=np.r_[0, 0, mask].astype(np.float32),
      logps=np.zeros(count + 2, np.float32),
      versions=np.r_[-1, -1, versions],
      turn_ids=np.zeros(count + 2, np.int32),
      reward=RewardResult(RewardStatus.OK, score),
      temperature=1.0,
      admitted_version=2,
  )


def test_metrics_of_the_records_are_what_their_definitions_say():
  """Staleness is of the trained tokens, all else of what was sampled."""
  first = _answer(0, 1.0, [5, 7, 7], [1, 1, 1], StopReason.STOP)
  second = _answer(1, 0.0, [2, 7], [1, 1], StopReason.LENGTH)
  group = Group(
      Draw(4, 0, Problem('p', 's', 'q', 'a'), 0), 2, (first, second), (), 2
  )
  trained = dataclasses.replace(
      second, loss_mask=np.array([0, 0, 0, 1], np.float32)
  )
  found = record_metrics([group], VERSION, [[first, trained]])
  assert found == pytest.approx(
      {
          'reward_mean': 0.5,
          'reward_std': 0.5,
          'zero_variance_fraction': 0.0,
          'response_length_mean': 2.5,
          'truncated_fraction': 0.5,
          'mixed_version_fraction': 1.0,
          'head_staleness_max': 5.0,
          'staleness_mean': 2 / 4,
          'staleness_max': 2.0,
      }
  )


def test_metrics_of_the_critic_are_what_their_definitions_say():
  """Values 1, 3 and returns 2, 6: errors 1, 3 of variance 1, returns' 4."""
  stats = {
      'tokens_sum': 2.0,
      'value_sum': 4.0,
      'return_sum': 8.0,
      'return_squared_sum': 40.0,
      'value_error_sum': 4.0,
      'value_error_squared_sum': 10.0,
      'value_clipped_sum': 1.0,
  }
  outcome = UpdateOutcome(True, 1.5, 0.1, 1e-3, 2.5, 3, 4, 0, (), stats)
  assert summarize_critic([outcome], [2.0]) == pytest.approx(
      {
          'critic_loss': 2.5,
          'critic_gradient_norm': 1.5,
          'critic_clip_fraction': 0.5,
          'critic_skipped_updates': 4,
          'value_mean': 2.0,
          'return_mean': 4.0,
          'explained_variance': 1 - 1.0 / 4.0,
      }
  )


# Metrics of a step that other tests show, with the place.
ELSEWHERE = {
    'masked_fraction': 'test_trainer.py: stale and truncated tokens',
}


def test_every_metric_of_a_step_has_a_planted_value():
  shown = {registered(name) for name in _expected()}
  shown |= {registered(f'logprob_gap_p99_staleness_{age}') for age in AGES}
  shown |= {
      'reward_mean', 'reward_std', 'zero_variance_fraction',
      'response_length_mean', 'truncated_fraction', 'mixed_version_fraction',
      'head_staleness_max', 'staleness_mean', 'staleness_max',
      'critic_loss', 'critic_gradient_norm', 'critic_clip_fraction',
      'critic_skipped_updates', 'value_mean', 'return_mean',
      'explained_variance', *ELSEWHERE,
  }  # fmt: skip
  of_step = {
      metric.name
      for group in ('learning', 'off-policy')
      for metric in GROUPS[group]
      if not metric.name.startswith('eval_')
  }
  assert of_step - shown == set()
