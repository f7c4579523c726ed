"""A sum of pauses is right at every moment; under a clock of the test's own."""

import pytest

from areal_jax.telemetry.stopwatch import Stopwatch


class Clock:

  def __init__(self):
    self.now = 100.0

  def __call__(self):
    return self.now


def test_a_pause_counts_while_it_goes_on():
  clock = Clock()
  watch = Stopwatch(clock)
  with watch.pause():
    clock.now += 3
    assert watch.seconds == 3
  clock.now += 0.028  # work
  assert watch.seconds == 3
  with watch.pause():
    clock.now += 4
    assert watch.seconds == 7
  assert watch.seconds == 7


def test_a_pause_that_an_exception_ends_is_counted_once():
  clock = Clock()
  watch = Stopwatch(clock)

  def fails():
    with watch.pause():
      clock.now += 2
      raise RuntimeError

  with pytest.raises(RuntimeError):
    fails()
  clock.now += 5
  assert watch.seconds == 2


def test_pauses_of_elsewhere_are_counted_in():
  clock = Clock()
  watch = Stopwatch(clock)
  watch.add(10)
  with watch.pause():
    clock.now += 1
    assert watch.seconds == 11
