"""Silence is told once, with who waits for whom; under a clock of its own."""

import threading

import pytest

from areal_jax.cluster.watchdog import Watchdog, Work
from tests.limits import WAIT_S


class World:
  """Counters, a clock, and what was told."""

  def __init__(self, quiet=5.0, limit=60.0):
    self.now = 0.0
    self.tokens = 0
    self.told = []
    self.expired = []
    self.compiling = []
    self.watchdog = Watchdog(
        progress=lambda: self.tokens,
        report=lambda: '  draw 7 waits for sample 2',
        tell=self.told.append,
        expire=self.expired.append,
        quiet_s=quiet,
        limit_s=limit,
        compiling=lambda: self.compiling,
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


def test_a_long_step_is_no_silence():
  world = World()
  with world.watchdog.working('trains step 3', 1000.0, 'failures.step_s'):
    world.pass_time(900)
  world.watchdog.at('waits for groups')
  world.pass_time(59)
  assert not world.expired
  short, full = world.told
  assert short == (
      'nothing else moves: trains step 3 for 6.0 s, of 1000 s that it may take'
      ' (failures.step_s)'
  )
  assert 'draw 7 waits for sample 2' in full
  assert world.watchdog.told == 1


def test_steps_that_are_long_are_told_once():
  world = World()
  for step in range(3):
    with world.watchdog.working(f'step {step}', 1000.0, 'failures.step_s'):
      world.pass_time(500)
  assert len(world.told) == 1 and not world.expired


@pytest.mark.parametrize('tokens', [0, 1])
def test_a_step_that_never_ends_ends_the_run_at_its_own_limit(tokens):
  world = World()
  with world.watchdog.working('trains step 3', 1000.0, 'failures.step_s'):
    world.pass_time(999, tokens)
    assert not world.expired
    world.pass_time(100, tokens)
  (text,) = world.expired
  assert text.startswith('trains step 3 for 1000.0 s, of 1000 s')
  assert 'draw 7 waits for sample 2' in text


def test_a_long_compilation_is_no_silence_and_leads_with_the_cause():
  world = World()
  world.compiling = [Work('compiles decode', 0.0, 1000.0, 'failures.compile_s')]
  world.pass_time(900)
  assert not world.expired
  (text,) = world.told
  assert text.startswith('nothing else moves: compiles decode for 6.0 s')
  assert '\n' not in text and world.watchdog.told == 0


def test_a_compilation_that_never_ends_ends_the_run_at_its_own_limit():
  world = World()
  world.compiling = [Work('compiles decode', 1.0, 1000.0, 'failures.compile_s')]
  world.pass_time(1000)
  assert not world.expired
  world.pass_time(10)
  (text,) = world.expired
  assert text.startswith('compiles decode for 1000.0 s, of 1000 s')


def test_a_step_is_not_charged_for_a_compilation():
  world = World()
  with world.watchdog.working('trains step 1', 100.0, 'failures.step_s'):
    world.compiling = [Work('compiles', 0.0, 1000.0, 'failures.compile_s')]
    world.pass_time(900)
    world.compiling = []
    world.pass_time(99)
    assert not world.expired
    world.pass_time(1)
  assert len(world.expired) == 1


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
