"""The first signal ends a run in order, the second at once."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from areal_jax.cluster.signals import STUCK, Interrupted, Signals
from tests.limits import WAIT_S


def send(number):
  os.kill(os.getpid(), number)


@pytest.mark.parametrize('number', [signal.SIGTERM, signal.SIGINT])
def test_within_training_the_first_one_waits_for_a_look(number, capfd):
  reached = []

  def train(signals):
    with signals.held():
      send(number)
      reached.append('the next line')
      signals.check()
      reached.append('behind the look')

  with Signals() as signals, pytest.raises(Interrupted) as caught:
    train(signals)
  assert reached == ['the next line']
  assert caught.value.code == 128 + number
  assert 'saves and ends; once more ends it now' in capfd.readouterr().err


def test_one_that_nobody_looked_at_is_raised_at_the_end():
  with Signals() as signals, pytest.raises(Interrupted), signals.held():
    send(signal.SIGTERM)


def test_outside_of_training_it_raises_where_it_comes():
  with Signals(), pytest.raises(KeyboardInterrupt, match='SIGTERM'):
    send(signal.SIGTERM)


def test_handlers_of_before_are_put_back():
  before = signal.getsignal(signal.SIGTERM)
  with Signals() as signals:
    assert signal.getsignal(signal.SIGTERM) != before and signals.installed
  assert signal.getsignal(signal.SIGTERM) == before


def test_in_another_thread_there_are_no_handlers():
  found = []

  def enter():
    with Signals() as signals:
      found.append(signals.installed)
      signals.expire(TimeoutError())  # does nothing

  thread = threading.Thread(target=enter)
  thread.start()
  thread.join()
  assert found == [False]


def test_another_thread_has_the_main_one_raise():
  with Signals() as signals, signals.held():
    error = TimeoutError('slot 3 waits')
    threading.Timer(0.1, signals.expire, [error]).start()
    with pytest.raises(TimeoutError, match='slot 3'):
      threading.Event().wait(WAIT_S)  # a wait that nothing else would end


def test_second_signal_ends_the_process_at_once():
  code = (
      'import os, signal, time\n'
      'from areal_jax.cluster.signals import Signals\n'
      'with Signals() as signals, signals.held():\n'
      '  for _ in range(2):\n'
      '    os.kill(os.getpid(), signal.SIGTERM)\n'
      '  time.sleep(60)\n'
  )
  done = subprocess.run(
      [sys.executable, '-c', code], timeout=WAIT_S, check=False
  )
  assert done.returncode == 128 + signal.SIGTERM


HANGS = """
import concurrent.futures, threading
from areal_jax.cluster.signals import Signals

never = threading.Event()
executor = concurrent.futures.ThreadPoolExecutor(1)
executor.submit(never.wait)  # an engine that never comes back
with Signals(grace_s=0.5) as signals:
  threading.Timer(0.1, signals.expire, [TimeoutError('engine 0')]).start()
  {wait}
"""


@pytest.mark.parametrize(
    'wait',
    ['never.wait()', 'signal.pthread_sigmask(0, [2]); never.wait()'],
    ids=['leaves and waits at the end', 'does not leave'],
)
def test_run_that_hangs_ends_with_a_code_of_its_own(wait):
  # CASES A15 (c). The second one does not even hear the signal.
  code = 'import signal\n' + HANGS.format(wait=wait)
  done = subprocess.run(
      [sys.executable, '-c', code], timeout=WAIT_S, check=False
  )
  assert done.returncode == STUCK
