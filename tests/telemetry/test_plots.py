"""The curves of a run are drawn from what the run wrote."""

import math
import pathlib
import subprocess
import sys

from matplotlib import image
import numpy as np

from areal_jax.telemetry import plots
from areal_jax.telemetry.metrics import MetricWriter


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
