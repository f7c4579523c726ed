"""The arithmetic of benchmarks/async_vs_sync.py, by hand-made runs."""

import json
import operator
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.config import resolve
from benchmarks import async_vs_sync, runs
from benchmarks.async_vs_sync import Measured
from experiments import long_tail
from tests.conftest import ROOT

# Two cores, 10 s, one of them busy; half of the decoding is for nothing.
SYNC = Measured(
    steps=10,
    wall=10.0,
    tokens=1000.0,
    spent=10.0,
    elsewhere=0.0,
    decoding=6.0,
    occupancy=0.5,
    phases={kind: 1.0 for kinds in async_vs_sync.PHASES.values()
            for kind in kinds},
)  # fmt: skip


def changed(**changes) -> Measured:
  return Measured(**{**vars(SYNC), **changes})


def test_bound_takes_away_waiting_and_waste():
  assert SYNC.throughput == 100 and SYNC.thrift == 100 and SYNC.cores == 1
  assert SYNC.waste == 3
  assert async_vs_sync.bound(SYNC, cores=2) == pytest.approx(20 / 7)
  # A run that wastes nothing and keeps both cores busy cannot be beaten here.
  tight = changed(spent=20.0, occupancy=1.0)
  assert async_vs_sync.bound(tight, cores=2) == 1
  # What others took was not to be had.
  shared = changed(elsewhere=6.0)
  assert async_vs_sync.bound(shared, cores=2) == pytest.approx(14 / 7)


def test_median_is_a_run_of_the_arm():
  runs_of = [changed(tokens=tokens) for tokens in (300.0, 100.0, 200.0)]
  assert async_vs_sync.median(runs_of).tokens == 200
  assert async_vs_sync.median(runs_of[:2]).tokens == 100


def test_ratio_is_taken_within_a_round():
  # The machine slows down by half in the second round; the ratio of the
  # medians would be 220 / 160.
  base = [changed(tokens=tokens) for tokens in (200.0, 100.0, 160.0)]
  arm = [changed(tokens=tokens) for tokens in (220.0, 110.0, 240.0)]
  assert async_vs_sync.times(arm, base) == pytest.approx(1.1)


def test_sweep_takes_one_setting_after_another():
  tried = []

  def measure_one(layout, values):
    tried.append((layout, values['slots'], values['steps']))
    speed = {32: 1, 64: 3, 16: 2}[values['slots']]
    speed += {4: 0.5, 1: 0.1, 16: 0.7}[values['steps']]
    return speed - (layout == 'two')

  layout, chosen = async_vs_sync.best(
      async_vs_sync.SWEEP, ['one', 'two'], measure_one
  )
  assert (layout, chosen) == ('one', {'slots': 64, 'steps': 16})
  assert tried == [
      ('one', 32, 4), ('one', 16, 4), ('one', 64, 4),
      ('one', 64, 1), ('one', 64, 16), ('two', 64, 16),
  ]  # fmt: skip


def folder_of_a_run(folder, *, replicas=1):
  """Three steps of 1 s after waits of 1 s, from second 0; 10 slots."""
  folder.mkdir()
  events = [
      event('wait', 'train', 2 * step, 1, {}) for step in range(3)
  ] + [
      event('step', 'train', 2 * step + 1, 1, {'tokens': 50 + step})
      for step in range(3)
  ] + [
      event('generate', 'generate/0', 2 * step, 0.5, {'tokens': 12, 'steps': 2})
      for step in range(3)
  ] + [
      event('generate', 'evaluate/0', 3, 1, {'tokens': 9, 'steps': 1}),
      {'mono': 3, 'duration': None, 'kind': 'admit', 'lane': 'data'},
  ]  # fmt: skip
  lines = ''.join(json.dumps(e) + '\n' for e in events)
  (folder / 'events.jsonl').write_text(lines)
  config = {
      'mesh': {'rollout': {'replicas': replicas}},
      'rollout': {'engine': {'slots': 10}},
  }
  (folder / 'config.json').write_text(json.dumps(config))
  moments = np.arange(7.0)
  return runs.Run(folder, runs.Load(moments, 1.5 * moments, 2.0 * moments))


def event(kind, lane, mono, duration, fields):
  return {
      'kind': kind, 'lane': lane, 'mono': mono, 'duration': duration,
      'fields': fields,
  }  # fmt: skip


def test_run_is_measured_after_its_warm_up(tmp_path):
  run = folder_of_a_run(tmp_path / 'run')
  measured = async_vs_sync.measure(run, warm=1)
  # From the end of the first step, at second 2, to the end of the last, at 6.
  assert measured.wall == 4 and measured.steps == 2
  assert measured.tokens == 51 + 52
  assert measured.spent == pytest.approx(6)
  assert measured.elsewhere == pytest.approx(2)
  assert measured.phases['step'] == 2 and measured.phases['wait'] == 2
  assert measured.phases['generate'] == 1  # the evaluation's is not in it
  assert measured.decoding == pytest.approx(1.5)
  assert measured.occupancy == pytest.approx(24 / (10 * 4))
  assert async_vs_sync.measure(run, warm=0).wall == 6
  with pytest.raises(ValueError, match='3 steps, wanted more than warm=3'):
    async_vs_sync.measure(run, warm=3)


def test_engine_phases_are_those_of_one_replica(tmp_path):
  run = folder_of_a_run(tmp_path / 'run', replicas=2)
  assert async_vs_sync.measure(run, warm=1).phases['generate'] == 0.5


def test_table_has_a_column_an_arm():
  found = {arm: [SYNC] for arm in async_vs_sync.ARMS}
  head, first, *_ = async_vs_sync.table(found).splitlines()
  assert head.split() == ['sync', 'eta', '1', 'eta', '4']
  assert first.split() == ['tokens/s', '100', '100', '100']


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_benchmark_runs_all_arms():
  done = subprocess.run(
      [sys.executable, '-m', 'benchmarks.async_vs_sync', '--short'],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  report = json.loads(done.stdout.splitlines()[-1])
  assert report['name'] == 'async_vs_sync'
  values = {row['row']: row['value'] for row in report['rows']}
  assert values['eta 1: times sync'] > 0 and values['bound on times sync'] > 1
  assert values['answer tokens: p99'] > 4 * values['answer tokens: p50']
  assert values['answers ended by a stop id'] > 0.9
  assert [r for r in report['rows'] if not r['met']] == []


def test_no_arm_pays_for_equal_bits():
  for overrides in async_vs_sync.ARMS.values():
    made = long_tail.get_config()
    for name, value in overrides.items():
      holder, _, field = name.rpartition('.')
      setattr(operator.attrgetter(holder)(made), field, value)
    assert not resolve(made).rollout.exact
