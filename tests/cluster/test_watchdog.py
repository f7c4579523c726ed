"""Silence is told once, with who waits for whom; under a clock of its own."""

import threading

from areal_jax.cluster.watchdog import Watchdog
from tests.limits import WAIT_S


class World:
  """Counters, a clock, and what was told."""

  def __init__(self, quiet=5.0, limit=60.0):
    self.now = 0.0
    self.tokens = 0
    self.told = []
    self.expired = []
    self.watchdog = Watchdog(
        progress=lambda: self.tokens,
        report=lambda: '  draw 7 waits for sample 2',
        tell=self.told.append,
        expire=self.expired.append,
        quiet_s=quiet,
        limit_s=limit,
        clock=lambda: self.now,
    )

  def pass_time(self, seconds, tokens=0):
    for _ in range(seconds):
      self.now += 1
      self.tokens += tokens
      self.watchdog.look()


def test_nothing_is_told_while_something_moves():
  world = World()
  world.pass_time(100, tokens=1)
  assert not world.told and not world.expired


def test_silence_is_told_once_with_owner_and_report():
  world = World()
  world.watchdog.at('step 3: waits for 4 groups')
  world.pass_time(50)
  (text,) = world.told
  assert 'nothing has moved for 5.0 s' in text
  assert 'main thread: step 3: waits for 4 groups, for 6.0 s' in text
  assert 'draw 7 waits for sample 2' in text
  assert world.watchdog.told == 1


def test_silence_after_progress_is_another_one():
  world = World()
  world.pass_time(20)
  world.pass_time(1, tokens=1)
  world.pass_time(20)
  assert len(world.told) == 2


def test_what_the_main_thread_begins_is_progress():
  world = World()
  for step in range(10):
    world.watchdog.at(f'step {step}')
    world.pass_time(4)
  assert not world.told


def test_silence_that_lasts_ends_the_run_once():
  world = World(limit=30.0)
  world.pass_time(29)
  assert not world.expired
  world.pass_time(100)
  (text,) = world.expired
  assert 'nothing has moved for 30.0 s' in text


def test_it_looks_from_a_thread_of_its_own():
  told = threading.Event()
  watchdog = Watchdog(
      progress=lambda: 0,
      report=str,
      tell=lambda text: told.set(),
      expire=lambda text: None,
      quiet_s=0.05,
      limit_s=10 * WAIT_S,
  )
  with watchdog:
    assert told.wait(WAIT_S)
  watchdog.stop()  # a second time
