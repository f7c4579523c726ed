"""Sums over tokens by age, and the merging of those of parts."""

from __future__ import annotations

import numpy as np
import pytest

from areal_jax.losses import statistics


def test_gaps_are_counted_below_each_edge():
  """Against a plain count; what is masked or of another age is not in it."""
  random = np.random.default_rng(0)
  gaps = 10.0 ** random.uniform(-9, 2, (3, 50))
  mask = random.integers(0, 2, (3, 50))
  ages = random.integers(0, 3, (3, 50))
  stats = statistics.gap_by_age(
      np.zeros((3, 50), np.float32), gaps.astype(np.float32), mask, ages
  )
  for age in (0, 1, 2):
    held = gaps.astype(np.float32)[(mask > 0) & (ages == age)]
    expected = [(held <= np.float32(e)).sum() for e in statistics.GAP_EDGES]
    assert stats['age_gap_below_sum'][age].tolist() == expected
  assert not stats['age_gap_below_sum'][3].any()


def test_maxima_merge_by_the_larger_and_sums_add():
  merged = statistics.merge_stats(
      [{'a_sum': 1.0, 'b_max': 3.0}, {'a_sum': 2.0, 'b_max': 0.5}]
  )
  assert merged == {'a_sum': 3.0, 'b_max': 3.0}


@pytest.mark.parametrize(
    'parts, message',
    [
        ([], 'parts is empty'),
        ([{'a_sum': 1.0}, {'b_sum': 1.0}], 'wanted one set'),
        ([{'mean': 1.0}], "statistic 'mean'"),
    ],
)
def test_statistics_that_cannot_be_merged_are_refused(parts, message):
  with pytest.raises(ValueError, match=message):
    statistics.merge_stats(parts)
