"""A saved run comes back as frames whose numbers can be worked out by hand."""

import pathlib
import subprocess
import sys

import numpy as np
import pandas as pd
import pytest

from areal_jax import telemetry
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.samples import SampleWriter
from tests import hand_run

ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('hand')
  hand_run.write_run(folder)
  return telemetry.read(folder)


def test_metrics_have_one_row_a_step(run):
  assert list(run.metrics.index) == [0, 1, 2]
  np.testing.assert_array_equal(run.metrics.reward_mean, [np.nan, 0.5, 1.0])
  np.testing.assert_array_equal(run.metrics.eval_accuracy, [0.25, np.nan, 0.75])
  assert np.isnan(run.metrics.loss[1])
  assert list(run.metrics.nonfinite) == [(), ('loss',), ()]
  assert list(run.metrics.version) == [0, 1, 2]


def test_samples_know_the_age_of_each_token(run):
  ages = [list(ages) for ages in run.samples.staleness]
  assert ages == [[0, 0], [0], [1, 0, 0], [0]]
  assert list(run.samples.length) == [2, 1, 3, 1]
  assert list(run.samples.head_staleness) == [0, 0, 1, 0]
  assert list(run.samples.mixed) == [False, False, True, False]
  assert run.samples.logps[0].dtype == np.float32
  assert np.isnan(run.samples.reward[3])  # no score is no score of 0


def test_groups_join_what_events_and_samples_know(run):
  groups = run.groups
  assert list(groups.index) == [0, 1, 2]
  assert list(groups.admitted_version) == [0, 0, 0]
  np.testing.assert_array_equal(groups.step, [1, np.nan, 2])
  np.testing.assert_array_equal(groups.head_version, [0, np.nan, 0])
  np.testing.assert_array_equal(groups.head_staleness, [0, np.nan, 1])
  np.testing.assert_array_equal(groups.staleness_mean, [0, np.nan, 0.25])
  np.testing.assert_array_equal(groups.reward_mean, [0.5, np.nan, 1.0])
  np.testing.assert_array_equal(groups.reward_std, [0.5, np.nan, 0.0])
  np.testing.assert_array_equal(groups.length_mean, [1.5, np.nan, 2.0])
  np.testing.assert_array_equal(groups.members, [2, np.nan, 1])
  np.testing.assert_array_equal(groups.failed, [0, np.nan, 1])
  assert groups.dropped[1] == 'failed'
  assert groups.dropped.isna().tolist() == [True, False, True]
  # Seconds since the first event, which was at 9.
  np.testing.assert_allclose(groups.finished_s, [3, np.nan, 10])
  assert groups.dropped_s[1] == pytest.approx(3)


def test_spans_have_times_and_fields(run):
  spans = run.spans
  assert not set(spans.kind) & {'admit', 'group', 'drop'}
  assert spans.start.is_monotonic_increasing
  swap = spans[spans.kind == 'swap'].iloc[0]
  assert (swap.start, swap.end) == pytest.approx((8.0, 8.5))
  assert (swap.version, swap.alive_before) == (1, 1)
  assert spans[spans.kind == 'generate'].tokens.tolist() == [7, 3]
  assert (run.config, run.summary) == ({'name': 'hand'}, {'steps': 2})


def test_shares_of_waiting_and_work_add_up(run):
  assert run.training() == pytest.approx((1.0, 11.0))
  shares = run.shares()
  assert list(shares.index) == ['trainer', 'engine 0']
  trainer, engine = shares.loc['trainer'], shares.loc['engine 0']
  assert trainer['waits for groups'] == pytest.approx(0.3)
  assert trainer['trains'] == pytest.approx(0.5)
  assert trainer['other'] == pytest.approx(0.2)
  assert engine['decodes'] == pytest.approx(0.4)  # 3 of the first 4 s count
  assert engine['waits for requests'] == pytest.approx(0.4)
  assert engine['swaps'] == pytest.approx(0.05)
  np.testing.assert_allclose(shares.sum(axis=1), 1.0)


def test_attempts_stand_one_behind_the_other(tmp_path):
  """A resumed run has another monotonic clock; wall time places it."""
  run_folder.write_json(tmp_path / run_folder.CONFIG, {})
  for attempt, mono, wall in ((0, 500.0, 1000.0), (1, 3.0, 1060.0)):
    with EventLog(
        tmp_path / run_folder.EVENTS,
        attempt=attempt,
        monotonic=lambda mono=mono: mono,
        wall=lambda wall=wall: wall,
    ) as log:
      log.record('step', 'train', mono, 2.0)
  events = telemetry.read(tmp_path).events
  assert events.start.tolist() == [0.0, 60.0]
  assert events.attempt.tolist() == [0, 1]


def test_unfinished_run_is_read_as_far_as_it_is(tmp_path):
  hand_run.write_run(tmp_path)
  (tmp_path / run_folder.SUMMARY).unlink()
  for name in (run_folder.METRICS, run_folder.SAMPLES, run_folder.EVENTS):
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:-5])  # a line half written
  run = telemetry.read(tmp_path)
  assert run.summary == {}
  assert np.isnan(run.metrics.eval_accuracy[2])
  assert len(run.samples) == 3


def test_run_without_any_row_has_empty_frames(tmp_path):
  run_folder.write_json(tmp_path / run_folder.CONFIG, {})
  run = telemetry.read(tmp_path)
  for frame in (run.metrics, run.samples, run.events, run.spans, run.groups):
    assert isinstance(frame, pd.DataFrame)
    assert frame.empty
  with pytest.raises(ValueError, match='has no step that ended'):
    run.shares()


def test_note_of_the_limit_is_no_sample(tmp_path):
  run_folder.write_json(tmp_path / run_folder.CONFIG, {})
  writer = SampleWriter(tmp_path / run_folder.SAMPLES, 400)
  for sample in range(5):
    writer.write(
        prompt='p', prompt_ids=[1], completion='c', reward=1.0, ids=[1],
        versions=[0], logps=[-0.5], step=1, draw_index=0, sample=sample,
        stop_reason='stop',
    )  # fmt: skip
  writer.close()
  samples = telemetry.read(tmp_path).samples
  assert 0 < len(samples) < 5
  assert samples.prompt.eq('p').all()


def test_folder_without_a_run_is_named(tmp_path):
  with pytest.raises(FileNotFoundError, match='holds no config.json, wanted'):
    telemetry.read(tmp_path)


def test_telemetry_is_light_and_says_when_pandas_is_missing():
  code = (
      'import sys; from areal_jax import telemetry;'
      "print([m for m in ('pandas', 'jax', 'numpy') if m in sys.modules]);"
      "sys.modules['pandas'] = None; telemetry.read('x')"
  )
  child = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, capture_output=True, text=True
  )
  assert child.stdout == '[]\n'
  assert child.stderr.splitlines()[-1] == (
      'ModuleNotFoundError: areal_jax.telemetry.read needs pandas, which is not'
      ' installed: pip install -r requirements-notebooks.txt'
  )
