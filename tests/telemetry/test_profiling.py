"""Profiles on demand, by settings and by a signal, and nothing otherwise."""

import contextlib
import gzip
import json
import os
import signal
import threading

import jax
import jax.numpy as jnp
import pytest

from areal_jax import config as config_lib
from areal_jax import session
from areal_jax.config import ConfigError
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.telemetry.profiling import Profiler, ProfilingSettings
from tests import small_experiment
from tests.limits import wait_until
from tests.test_session import experiment


def traced_steps(folder):
  """Numbers of the steps in the trace below a folder."""
  (path,) = folder.rglob('*.trace.json.gz')
  events = json.loads(gzip.decompress(path.read_bytes()))['traceEvents']
  return sorted(
      int(event['args']['step_num'])
      for event in events
      if event.get('name') == 'step' and 'step_num' in event.get('args', {})
  )


def names(folder):
  return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def work():
  """A small program and its argument."""
  double = jax.jit(lambda x: x * 2)
  one = jnp.ones(8)
  jax.block_until_ready(double(one))
  return lambda: jax.block_until_ready(double(one))


def test_steps_of_the_settings_are_traced_and_no_others(tmp_path, work):
  settings = ProfilingSettings(first_step=2, last_step=3, memory_step=4)
  notes = []
  with Profiler(tmp_path / 'profile', settings, notes.append) as profiler:
    for number in range(1, 6):
      with profiler.step(number):
        work()
  folder = tmp_path / 'profile'
  assert names(folder) == ['memory-step-4.prof', 'steps-2-3']
  assert traced_steps(folder / 'steps-2-3') == [2, 3]
  # pprof: gzipped, with the names of what it counts in its table of strings.
  profile = gzip.decompress((folder / 'memory-step-4.prof').read_bytes())
  assert b'allocations' in profile and b'space' in profile
  assert [note.split(':')[0] for note in notes] == ['profile', 'device memory']


def test_signal_traces_the_next_step_and_is_given_back(tmp_path, work):
  before = signal.getsignal(signal.SIGUSR1)
  with Profiler(tmp_path, ProfilingSettings(signal_steps=2)) as profiler:
    for number in range(1, 6):
      with profiler.step(number):
        work()
        if number == 2:
          os.kill(os.getpid(), signal.SIGUSR1)
  assert signal.getsignal(signal.SIGUSR1) is before
  # The memory of the step under way, the two steps behind it.
  assert names(tmp_path) == ['memory-step-2.prof', 'steps-3-4']
  assert traced_steps(tmp_path / 'steps-3-4') == [3, 4]


def test_signal_during_a_trace_waits_for_its_turn(tmp_path, work):
  settings = ProfilingSettings(first_step=1, last_step=2)
  with Profiler(tmp_path, settings) as profiler:
    for number in range(1, 4):
      with profiler.step(number):
        work()
        if number == 1:
          os.kill(os.getpid(), signal.SIGUSR1)
  assert names(tmp_path) == ['memory-step-1.prof', 'steps-1-2', 'steps-3-3']
  assert traced_steps(tmp_path / 'steps-3-3') == [3]


def test_signal_in_the_last_step_says_that_nothing_followed(tmp_path, work):
  notes = []
  with Profiler(tmp_path, ProfilingSettings(), notes.append) as profiler:
    with profiler.step(1):
      os.kill(os.getpid(), signal.SIGUSR1)
      work()
  assert names(tmp_path) == ['memory-step-1.prof']
  assert notes[-1] == 'no step came after the signal: nothing was traced'


def test_step_that_fails_leaves_a_whole_trace(tmp_path, work):
  settings = ProfilingSettings(first_step=1, last_step=9)
  with contextlib.suppress(ZeroDivisionError):
    with Profiler(tmp_path, settings) as profiler:
      with profiler.step(1):
        work()
      with profiler.step(2):
        raise ZeroDivisionError
  assert 1 in traced_steps(tmp_path / 'steps-1-9')
  with Profiler(tmp_path / 'next', settings) as profiler:  # none is left open
    with profiler.step(9):
      work()
  assert names(tmp_path / 'next') == ['steps-9-9']


def test_another_thread_leaves_signals_alone(tmp_path, work):
  before = signal.getsignal(signal.SIGUSR1)
  seen = []

  def profiled():
    with Profiler(tmp_path, ProfilingSettings(memory_step=1)) as profiler:
      seen.append(signal.getsignal(signal.SIGUSR1))
      with profiler.step(1):
        work()

  thread = threading.Thread(target=profiled)
  thread.start()
  thread.join()
  assert seen == [before]
  assert names(tmp_path) == ['memory-step-1.prof']


@pytest.mark.parametrize(
    'changes, complaint',
    [
        ({'first_step': -1}, r'profiling.first_step is -1, wanted at least 0'),
        ({'last_step': 2}, r'profiling.first_step is 0, wanted 1 to last_step'),
        ({'first_step': 3}, r'profiling.last_step is 0, wanted at least first'),
        ({'signal_steps': -1}, r'profiling.signal_steps is -1, wanted at'),
        ({'memory_step': 2}, r'profiling.memory_step is 2, wanted at most'),
        (
            {'first_step': 1, 'last_step': 2},
            r'profiling.last_step is 2, wanted at most steps=1',
        ),
    ],
)
def test_impossible_steps_are_refused(changes, complaint, tmp_path):
  settings = small_experiment.experiment(tmp_path)
  settings.profiling = ProfilingSettings(**changes)
  with pytest.raises(ConfigError, match=complaint):
    config_lib.resolve(settings)


def test_run_is_profiled_while_it_goes_on(tmp_path, monkeypatch):
  """By settings in steps 1 and 2, by a signal in step 4; nothing recompiles."""
  record = session.Session._record

  def signalled(self, step, *rest):
    if step.version == 0:  # generation goes on, up to its bound
      wait_until(lambda: self._controller.ready_pauses > 0, 'a pause')
    if step.version == 1:  # step 2 is written down in step 3
      os.kill(os.getpid(), signal.SIGUSR1)
    record(self, step, *rest)

  monkeypatch.setattr(session.Session, '_record', signalled)
  settings = experiment(
      tmp_path,
      steps=4,
      event_bytes=6000,
      rollout__eta=float('inf'),
      rollout__max_ready=5,
      profiling=ProfilingSettings(first_step=1, last_step=2),
  )
  result = session.run(settings)
  folder = result.folder / 'profile'
  assert names(folder) == ['memory-step-3.prof', 'steps-1-2', 'steps-4-4']
  assert traced_steps(folder / 'steps-1-2') == [1, 2]
  assert traced_steps(folder / 'steps-4-4') == [4]
  assert result.summary['recompiles_after_warmup'] == 0
  # Host memory and disk are bounded, and a run says so when they were met.
  assert result.summary['ready_pauses'] > 0
  assert result.summary['events_lost'] > 0
  events = result.folder / 'events.jsonl'
  assert events.stat().st_size <= 6000
  assert read_jsonl(events)[-1]['kind'] == 'limit met'
