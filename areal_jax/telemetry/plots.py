"""Pictures of a run: reward, evaluation and staleness over its steps.

Draws with matplotlib's Agg canvas and touches no global state of pyplot, so it
works in threads, without a display and inside a notebook alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import os
import pathlib
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
import numpy as np

from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl

_BLUE, _GREEN, _ORANGE, _GREY = '#2b6cb0', '#2f855a', '#c05621', '#4a5568'


def plot_run(
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
    path: str | os.PathLike,
) -> None:
  """Draws three panels over a shared axis of steps into a PNG.

  Args:
    metrics: rows of metrics.jsonl: `step`, and where known `reward_mean`,
      `staleness_mean` and `staleness_max`.
    evaluations: `step` and `accuracy` (share of right answers, 0 to 1) of each
      evaluation.
    path: the PNG to write.
  """
  figure = Figure(figsize=(8.0, 7.5), dpi=120, layout='constrained')
  FigureCanvasAgg(figure)
  reward, accuracy, staleness = figure.subplots(3, 1, sharex=True)

  steps, values = _series(metrics, 'reward_mean')
  reward.plot(steps, values, color=_BLUE, alpha=0.35, linewidth=1)
  window = max(1, len(values) // 15)
  smooth = _running_mean(values, window)
  label = 'mean of the step' if window == 1 else f'mean of {window} steps'
  reward.plot(steps, smooth, color=_BLUE, linewidth=2, label=label)
  reward.set_ylabel('reward\n(units of reward)')
  _title(reward, 'Reward of the trained answers')

  steps, values = _series(evaluations, 'accuracy')
  accuracy.plot(
      steps, values, color=_GREEN, linewidth=2, marker='o', markersize=5
  )
  for step, value in zip(steps, values):
    accuracy.annotate(
        f'{value:.2f}', (step, value), xytext=(0, 7), ha='center',
        textcoords='offset points', fontsize=8, color=_GREY,
    )  # fmt: skip
  accuracy.set_ylim(-0.03, 1.14)
  accuracy.set_yticks([0, 0.25, 0.5, 0.75, 1])
  accuracy.set_ylabel('accuracy\n(share, 0 to 1)')
  _title(accuracy, 'Evaluation on problems never trained on')

  steps, values = _series(metrics, 'staleness_max')
  staleness.plot(
      steps, values, color=_ORANGE, alpha=0.45, linewidth=1,
      drawstyle='steps-mid', label='oldest token',
  )  # fmt: skip
  steps, values = _series(metrics, 'staleness_mean')
  staleness.plot(steps, values, color=_ORANGE, linewidth=2, label='mean')
  staleness.set_ylim(bottom=0)
  staleness.set_ylabel('staleness\n(versions)')
  _title(staleness, 'Age of the trained tokens')
  staleness.set_xlabel('training step')
  staleness.xaxis.set_major_locator(MaxNLocator(integer=True))
  steps = [row['step'] for row in (*metrics, *evaluations)] or [0]
  margin = 0.5 + 0.03 * (max(steps) - min(steps))
  staleness.set_xlim(min(steps) - margin, max(steps) + margin)

  for axes in (reward, accuracy, staleness):
    axes.grid(color='#e2e8f0', linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[['top', 'right']].set_visible(False)
    if not any(len(drawn.get_xdata()) for drawn in axes.lines):
      axes.text(
          0.5, 0.5, 'no data', transform=axes.transAxes, ha='center',
          va='center', color=_GREY,
      )  # fmt: skip
    elif axes is not accuracy:
      axes.legend(  # beside the title, where no curve can run through it
          loc='lower right', bbox_to_anchor=(1, 0.99), ncols=2, frameon=False,
          fontsize=8, borderaxespad=0,
      )  # fmt: skip
  figure.align_ylabels()
  figure.savefig(path, format='png')


def plot_folder(folder: str | os.PathLike) -> pathlib.Path:
  """Draws the curves of a saved run into its folder; returns the picture.

  Evaluations are the rows of metrics.jsonl that hold an `eval_accuracy`.
  """
  folder = pathlib.Path(folder)
  metrics = read_jsonl(folder / run_folder.METRICS)
  steps, values = _series(metrics, 'eval_accuracy')
  evaluations = [
      {'step': step, 'accuracy': value} for step, value in zip(steps, values)
  ]
  path = folder / run_folder.CURVES
  plot_run(metrics, evaluations, path)
  return path


def _title(axes: Axes, text: str) -> None:
  axes.set_title(text, loc='left', fontsize=10, color=_GREY)


def _series(
    rows: Sequence[Mapping[str, Any]], name: str
) -> tuple[np.ndarray, np.ndarray]:
  """Steps [N] and finite values [N] of the rows that hold the name."""
  kept = [
      (row['step'], row[name])
      for row in rows
      if row.get(name) is not None and math.isfinite(row[name])
  ]
  pairs = np.asarray(kept, np.float64).reshape(-1, 2)
  return pairs[:, 0], pairs[:, 1]


def _running_mean(values: np.ndarray, window: int) -> np.ndarray:
  """[N] mean of each value and up to window - 1 values before it."""
  sums = np.concatenate([[0.0], np.cumsum(values)])
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(0, ends - window)
  return (sums[ends] - sums[starts]) / (ends - starts)
