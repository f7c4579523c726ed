"""The curves of a run are drawn from what the run wrote."""

import math
import pathlib
import subprocess
import sys

from matplotlib import image
import numpy as np
import pytest

from areal_jax import telemetry
from areal_jax.telemetry import plots
from areal_jax.telemetry.metric_writer import MetricWriter
from tests import hand_run


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('hand')
  hand_run.write_run(folder)
  return telemetry.read(folder)


def coloured(path):
  """Pixels that are neither grey nor white: the curves."""
  pixels = image.imread(path)[..., :3]
  return int((np.ptp(pixels, axis=-1) > 0.3).sum())


def test_curves_of_a_saved_run(tmp_path):
  writer = MetricWriter(tmp_path)
  writer.write(0, 0, {'eval_accuracy': 0.1})
  for step in range(1, 31):
    writer.write(step, step, {
        'reward_mean': 1 - math.exp(-step / 10),
        'staleness_mean': 0.5,
        'staleness_max': 1 + step % 3,
    })  # fmt: skip
  writer.write(30, 30, {'eval_accuracy': 0.9})
  writer.close()
  path = plots.plot_folder(tmp_path)
  assert path == tmp_path / 'curves.png'
  assert image.imread(path).shape[:2] == (900, 960)
  drawn = coloured(path)
  plots.plot_run([], [], tmp_path / 'empty.png')
  assert drawn > 1000
  assert coloured(tmp_path / 'empty.png') == 0


def test_pyplot_is_left_alone():
  code = (
      'import sys; import areal_jax.telemetry.plots;'
      "print('matplotlib.pyplot' in sys.modules)"
  )
  root = pathlib.Path(__file__).resolve().parents[2]
  printed = subprocess.run(
      [sys.executable, '-c', code], cwd=root, check=True, capture_output=True
  ).stdout
  assert printed.strip() == b'False'


def test_rows_without_a_finite_value_are_left_out():
  rows = [
      {'step': 1, 'reward_mean': 0.5},
      {'step': 2},
      {'step': 3, 'reward_mean': None},
      {'step': 4, 'reward_mean': float('nan')},
      {'step': 5, 'reward_mean': 0.0},
  ]
  steps, values = plots._series(rows, 'reward_mean')
  np.testing.assert_array_equal(steps, [1, 5])
  np.testing.assert_array_equal(values, [0.5, 0.0])


def test_running_mean_equals_the_slow_one():
  values = np.random.default_rng(0).normal(size=20)
  slow = [values[max(0, i - 3) : i + 1].mean() for i in range(20)]
  np.testing.assert_allclose(plots._running_mean(values, 4), slow)
  assert plots._running_mean(np.zeros(0), 4).size == 0


# Figures for notebooks, over a run worked out by hand (tests/hand_run.py).


def bars(figure):
  """(left, width, height) of every rectangle, in the order of drawing."""
  (axes,) = figure.axes
  return [(p.get_x(), p.get_width(), p.get_height()) for p in axes.patches]


def texts(axes):
  return [text.get_text() for text in axes.texts]


def test_staleness_bars_are_the_shares(run):
  # Ages of tokens 0 0 0 1 0 0 0, of oldest tokens 0 0 1 0.
  heights = [height for _, _, height in bars(plots.staleness(run))]
  np.testing.assert_allclose(heights, [6 / 7, 1 / 7, 3 / 4, 1 / 4])


def test_gap_is_weighted_by_tokens(run):
  figure = plots.gap_by_staleness({'one': run, 'other': run})
  (axes,) = figure.axes
  # (1 * 1e-6 + 0.75 * 8e-6) / 1.75 at age 0, and 0.02 at age 1.
  first = [height for _, _, height in bars(figure)][:4]
  np.testing.assert_allclose(first[:2], [4e-6, 0.02])
  assert np.isnan(first[2:]).all()
  shown = ['4e-06', '0.02', 'no token', 'no token']
  assert texts(axes)[:8] == shown + shown


def test_lengths_of_first_and_last_steps(run):
  figure = plots.lengths(run)
  (axes,) = figure.axes
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == [
      'steps 1 to 1: mean 1.5, 0 % cut off',
      'steps 2 to 2: mean 2.0, 0 % cut off',
  ]
  total = sum(height for _, _, height in bars(figure))
  assert total == pytest.approx(2.0)  # each of the two adds up to 1


def test_bars_of_waiting_end_at_one(run):
  drawn = bars(plots.shares(run))
  assert max(left + width for left, width, _ in drawn) == pytest.approx(1.0)
  (axes,) = plots.shares(run).axes
  assert {'30 %', '50 %', '20 %', '40 %'} <= set(texts(axes))


def test_timeline_shows_one_step_lane_by_lane(run):
  (axes,) = plots.timeline(run, 2).axes
  lanes = [label.get_text() for label in axes.get_yticklabels()]
  assert lanes == ['generate/0', 'train']
  # It began to wait at 18 s and ended at 20 s; 15 % more are shown.
  assert axes.get_xlim() == pytest.approx((0.0, 2300.0))
  legend = [text.get_text() for text in axes.get_legend().get_texts()]
  assert legend[:2] == ['version 1 decodes', 'step 2 trains']
  with pytest.raises(ValueError, match='has no events of step 7'):
    plots.timeline(run, 7)


def test_answer_is_coloured_by_version_and_log_prob(run):
  sample = run.samples.iloc[2]
  by_version, by_logp = plots.answer(sample, ['a b', '', '\n']).axes
  assert texts(by_version) == texts(by_logp) == ['a·b', '∎', '↵']
  colors = [c.get_facecolor()[0].tolist() for c in by_version.collections]
  assert colors[0] != colors[1] == colors[2]
  legend = [text.get_text() for text in by_version.get_legend().get_texts()]
  assert legend == ['version 0', 'version 1']
  with pytest.raises(ValueError, match='pieces are 1, wanted one for each'):
    plots.answer(sample, ['a'])


def test_long_answers_are_wrapped_between_tokens():
  places, columns, lines = plots._places(['x' * 30, 'y' * 30, 'z' * 30, 'w'])
  assert places == [(0, 0), (30, 0), (0, 1), (30, 1)]
  assert (columns, lines) == (60, 2)


def test_curves_of_runs_are_drawn(run):
  assert len(plots.curves(run).axes) == 3
  (axes,) = plots.compare({'one': run, 'two': run}, 'reward_mean', 'r').axes
  np.testing.assert_array_equal(axes.lines[0].get_ydata(), [0.5, 1.0])
  labels = [text.get_text() for text in axes.get_legend().get_texts()]
  assert labels == ['one', 'two']


def test_figures_of_an_empty_run_are_drawn(tmp_path):
  """Of a run that has just begun there is little, and no error."""
  (tmp_path / 'config.json').write_text('{}')
  empty = telemetry.read(tmp_path)
  for draw in (plots.curves, plots.staleness, plots.lengths):
    draw(empty).canvas.draw()
