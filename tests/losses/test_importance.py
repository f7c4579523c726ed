"""Importance weights: levels and rules by hand."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.losses import importance
from areal_jax.losses.importance import WeightRule

# log(π_prox / π_behav) of two sequences in one row, and padding.
_DISTANCES = np.array([[0.5, -0.1, 1.0, 0.0]])
_MASK = np.array([[1, 1, 1, 0]])
_SEGMENT_IDS = np.array([[1, 1, 2, 0]])


def _weights(level, *rules):
  result = importance.importance_weights(
      _DISTANCES,
      np.zeros((1, 4)),
      _MASK,
      _SEGMENT_IDS,
      level=level,
      rules=rules,
  )
  return np.asarray(result.weight)[0], np.asarray(result.kept)[0]


@pytest.mark.parametrize(
    'level, logs',
    [
        ('none', [0, 0, 0]),
        ('token', [0.5, -0.1, 1.0]),
        ('sequence_mean', [0.2, 0.2, 1.0]),
        ('sequence_sum', [0.4, 0.4, 1.0]),
    ],
)
def test_weight_of_each_level_by_hand(level, logs):
  weight, kept = _weights(level)
  np.testing.assert_allclose(weight, [*np.exp(logs), 0], rtol=1e-6)
  np.testing.assert_array_equal(kept, [True, True, True, False])


@pytest.mark.parametrize(
    'rule, kept',
    [
        # ratios 1.65, 0.90, 2.72; geometric means 1.22, 2.72; whole 1.49, 2.72
        (WeightRule(upper=2.0), [1, 1, 0]),
        (WeightRule(lower=0.95, upper=2.0), [1, 0, 0]),
        (WeightRule('sequence', upper=1.3), [1, 1, 0]),
        (WeightRule('sequence', aggregation='sum', upper=1.4), [0, 0, 0]),
        (WeightRule('sequence', aggregation='max', upper=1.6), [0, 0, 0]),
        (WeightRule('sequence', aggregation='max', upper=1.7), [1, 1, 0]),
        # k1 0.5, -0.1, 1; k2 .125, .005, .5
        (WeightRule(metric='k1', lower=-0.2, upper=0.2), [0, 1, 0]),
        (WeightRule(metric='k2', upper=0.2), [1, 1, 0]),
        (WeightRule('sequence', metric='k2', upper=0.1), [1, 1, 0]),
        # k3 .1487, .0048, .7183; reversed .1065, .0052, .3679
        (WeightRule(metric='k3', upper=0.14), [0, 1, 0]),
        (WeightRule(metric='k3_reversed', upper=0.14), [1, 1, 0]),
    ],
)
def test_what_a_rule_masks_by_hand(rule, kept):
  weight, result = _weights('token', rule)
  np.testing.assert_array_equal(result, [*map(bool, kept), False])
  np.testing.assert_allclose(weight[:3], np.exp([0.5, -0.1, 1.0]), rtol=1e-6)


def test_what_a_rule_clamps_by_hand():
  clamp = WeightRule(action='clamp', lower=1.0, upper=2.0)
  weight, kept = _weights('token', clamp)
  np.testing.assert_allclose(weight, [np.exp(0.5), 1.0, 2.0, 0.0], rtol=1e-6)
  assert kept[:3].all()
  # Of a sequence whose largest token ratio lies outside, the mean is cut.
  clamp = WeightRule('sequence', 'clamp', aggregation='max', upper=1.5)
  weight, _ = _weights('sequence_mean', clamp)
  np.testing.assert_allclose(weight[:3], [np.exp(0.2)] * 2 + [1.5], rtol=1e-6)


def test_rules_are_judged_together_on_the_whole_mask():
  """The second rule sees the token that the first one drops."""
  tight, whole = (
      WeightRule(upper=1.0),
      WeightRule('sequence', upper=1.3),
  )
  _, kept = _weights('token', tight, whole)
  np.testing.assert_array_equal(kept, [False, True, False, False])


def test_second_moment_mask_by_hand():
  """δ² = 4, 0.01, 0.25, 0.09: without 4 the mean is 0.117, then 0.05."""
  behavior = np.zeros((2, 3))
  proximal = np.array([[2.0, 0.1, np.nan], [-0.5, 0.3, np.nan]])
  mask = np.array([[1, 1, 0], [1, 1, 0]])
  keep = lambda bound: importance.second_moment_keep(
      proximal, behavior, mask, threshold=bound
  )
  np.testing.assert_array_equal(keep(0.2), [[0, 1, 0], [1, 1, 0]])
  np.testing.assert_array_equal(keep(0.06), [[0, 1, 0], [0, 1, 0]])
  np.testing.assert_array_equal(keep(1e-9), [[0, 1, 0], [0, 0, 0]])
  np.testing.assert_array_equal(keep(9.0), mask)
  nothing = importance.second_moment_keep(
      proximal, behavior, 0 * mask, threshold=1
  )
  assert not nothing.any()


def test_proximal_policy_by_interpolation_by_hand():
  """Ages 0, 1, 2, 4: α = 0, 0, 1/2, 3/4 of the way to the policy."""
  policies = [np.full(4, -1.0), np.full(4, -3.0)]
  ages = np.array([0, 1, 2, 4])
  between = lambda kind: importance.approximate_proximal(kind, *policies, ages)
  np.testing.assert_allclose(between('loglinear'), [-3, -3, -2, -1.5])
  alpha = np.array([0, 0, 0.5, 0.75])
  mixed = np.log((1 - alpha) * np.exp(-3.0) + alpha * np.exp(-1.0))
  np.testing.assert_allclose(between('linear'), mixed, rtol=1e-6)
  np.testing.assert_array_equal(between('behavior'), policies[1])
