"""Steps of a dispatch: worked examples, and the rule that they follow."""

import numpy as np
import pytest

from areal_jax.rollout.pace import Pace


def learnt(once, each, most=16, mean=None):
  """A pace that has seen dispatches of such a cost, and answers."""
  pace = Pace(most)
  for k in (1, 4, most):
    pace.took(k, once + each * k)
  if mean is not None:
    for tokens in (mean - 5, mean + 5):
      pace.ended(tokens)
  return pace


def test_dispatches_are_long_where_nothing_is_known_or_nothing_ends():
  many = np.full(64, 1000)
  assert Pace(8).steps(many, many > 0) == 8
  assert learnt(0.1, 1.0).steps(many, many < 0) == 16


def test_a_dispatch_ends_when_most_slots_do():
  left, never = np.full(64, 5), np.zeros(64, bool)
  assert learnt(0.1, 1.0).steps(left, never) == 5


def test_one_slot_that_ends_does_not_hold_up_the_others():
  # A free slot of 64 costs 1/64 step; a dispatch more costs 1/10 of one.
  left = np.array([1] + [1000] * 63)
  never = np.zeros(64, bool)
  assert learnt(0.1, 1.0).steps(left, never) > 4
  assert learnt(0.0, 1.0).steps(left, never) == 1  # every one costs


@pytest.mark.parametrize(('once', 'mean'), [(0.1, 25), (0.5, 60), (0.02, 100)])
def test_stops_that_come_by_chance_shorten_dispatches(once, mean):
  """Waste is about k / 2 m and cost once / k, least at k = √(2 m once)."""
  left, may = np.full(64, 10_000), np.ones(64, bool)
  chosen = learnt(once, 1.0, mean=mean).steps(left, may)
  assert abs(chosen - np.sqrt(2 * mean * once)) <= 1
  # Planted fault: what does not know of stops takes as many as it may.
  assert learnt(once, 1.0).steps(left, may) == 16


def test_costs_are_those_of_lately():
  pace = learnt(5.0, 1.0, mean=25)
  left, may = np.full(64, 10_000), np.ones(64, bool)
  before = pace.steps(left, may)
  for _ in range(300):
    for k in (1, 2, 8):
      pace.took(k, 0.1 + k)
  assert pace.steps(left, may) < before
