"""Timing runs from outside."""

import subprocess
import sys

import numpy as np
import pytest

from benchmarks import runs

pytestmark = pytest.mark.skipif(sys.platform != 'linux', reason='reads /proc')

# Half a second of work, as much in a child of its own, and half a second idle.
CODE = """
import subprocess, sys, time
work = 'import time\\nwhile time.process_time() < 0.5: pass'
exec(work)
subprocess.run([sys.executable, '-c', work], check=True)
time.sleep(0.5)
"""


def test_load_counts_the_run_and_its_children_and_not_its_sleep():
  child = subprocess.Popen([sys.executable, '-c', CODE], start_new_session=True)
  load = runs._sample(child)
  # The child's last 10 ms and what came before its first look may be missing.
  assert load.own[-1] == pytest.approx(1.0, abs=0.15)
  end = load.moments[-1]
  assert load.own_within([(end - 0.4, end)]) < 0.1
  assert load.own_within([(load.moments[0], end)]) > 0.8
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
