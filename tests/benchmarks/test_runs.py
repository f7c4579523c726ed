"""Timing runs from outside."""

import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from benchmarks import runs
from tests.limits import WAIT_S, wait_until

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')

# Half a second of work, and as much in a child. Each says when it has done it,
# and is idle until it is told to go on. Last come the seconds of both.
CODE = """
import os, subprocess, sys
work = '''
import sys, time
while time.process_time() < 0.5: pass
print('done', flush=True)
sys.stdin.readline()
'''
exec(work)
subprocess.run([sys.executable, '-c', work], check=True)
print(sum(os.times()[:4]), flush=True)
"""


def test_load_counts_the_run_and_its_children_and_not_its_sleep(monkeypatch):
  looks, idle, said = [], [], []
  real = runs._session
  monkeypatch.setattr(
      runs, '_session', lambda pid: looks.append(pid) or real(pid)
  )

  def wait_for_looks(count):
    wanted = len(looks) + count
    wait_until(lambda: len(looks) >= wanted, 'a look at the processes')

  def lead(child):
    """Lets each of the two go on when it has been looked at for a while."""
    for _ in range(2):
      said.append(child.stdout.readline())
      wait_for_looks(2)  # samples of all that it has done
      start = time.monotonic()
      wait_for_looks(2)
      idle.append((start, time.monotonic()))
      child.stdin.write('\n')
      child.stdin.flush()
    said.append(child.stdout.readline())

  with subprocess.Popen(
      [sys.executable, '-c', CODE],
      start_new_session=True,
      stdin=subprocess.PIPE,
      stdout=subprocess.PIPE,
      text=True,
  ) as child:
    leads = threading.Thread(target=lead, args=(child,))
    leads.start()
    load = runs._sample(child)
    leads.join(WAIT_S)
  assert said[:2] == ['done\n'] * 2
  # How the two end is not seen; a sample may miss some ticks of 10 ms.
  assert load.own[-1] == pytest.approx(float(said[2]), abs=0.15)
  assert load.own[-1] > 0.9
  assert load.own_within(idle) < 0.1 and runs.seconds(idle) > 0.4
  assert load.own_within([(load.moments[0], load.moments[-1])]) > 0.8
  assert np.all(np.diff(load.own) >= 0)
  assert load.machine[-1] - load.machine[0] >= load.own[-1] - 0.15


def test_load_inside_of_intervals_is_interpolated():
  moments = np.array([0.0, 1.0, 2.0])
  load = runs.Load(moments, np.array([0, 1, 1]), np.array([0, 1, 3]))
  assert load.own_within([(0.5, 1.5)]) == pytest.approx(0.5)
  assert load.own_within([(0.0, 0.25), (0.5, 0.75)]) == pytest.approx(0.5)
  assert load.own_within([]) == 0
  assert load.elsewhere_within([(0.5, 1.5)]) == pytest.approx(1.0)


def test_run_that_fails_says_why(tmp_path):
  with pytest.raises(RuntimeError, match='nowhere.py'):
    runs.run('nowhere.py', tmp_path, 'one', {'steps': 1})


def test_taken_name_is_refused(tmp_path):
  (tmp_path / 'one').mkdir()
  with pytest.raises(FileExistsError, match='one'):
    runs.run('experiments/long_tail.py', tmp_path, 'one', {})


def test_overlap_is_the_part_inside():
  span = {'mono': 2.0, 'duration': 3.0}
  assert runs.overlap(span, (0.0, 10.0)) == (2.0, 5.0)
  assert runs.overlap(span, (3.0, 4.0)) == (3.0, 4.0)
  assert runs.overlap(span, (5.0, 6.0)) is None
  assert runs.seconds([(0.0, 1.0), (2.0, 2.5)]) == 1.5


def test_union_counts_each_moment_once():
  intervals = [(4.0, 5.0), (0.0, 2.0), (1.0, 1.5), (1.0, 3.0)]
  assert runs.union(intervals) == [(0.0, 3.0), (4.0, 5.0)]
  assert runs.union([]) == []
