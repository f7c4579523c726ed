"""Pictures of a run: what it learnt, how stale it was, who waited for whom.

A run draws its own curves into its folder (`plot_folder`). The other functions
take a run as `areal_jax.telemetry.read` gives it and return a figure, which a
notebook with `%matplotlib inline` shows. All draw with matplotlib's Agg canvas
and touch no global state of pyplot, so they work in threads and without a
display too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import math
import os
import pathlib
import typing
from typing import Any

from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
import numpy as np

from areal_jax.telemetry import run_folder, trace
from areal_jax.telemetry.jsonl import read_jsonl

if typing.TYPE_CHECKING:
  from areal_jax.telemetry.frames import Run

_BLUE, _GREEN, _ORANGE, _GREY = '#2b6cb0', '#2f855a', '#c05621', '#4a5568'
_PALE = '#cbd5e0'  # for what is not work
_ACTIVITIES = {  # of `Run.shares`
    'trains': _ORANGE,
    'waits for groups': _PALE,
    'decodes': _BLUE,
    'prefills': '#63b3ed',
    'swaps': '#805ad5',
    'waits for requests': _PALE,
    'other': '#edf2f7',
}
_KINDS = {  # of spans in a timeline; decoding is coloured by version
    'wait': _PALE,
    'idle': _PALE,
    'step': _ORANGE,
    'reward': _GREEN,
}
_LINE = 64  # characters of a line in the view of an answer
_FLOOR = -4.0  # nats; a token less likely than that is as dark as can be


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
  _curves(metrics, evaluations).savefig(path, format='png')


def _curves(
    metrics: Sequence[Mapping[str, Any]],
    evaluations: Sequence[Mapping[str, Any]],
) -> Figure:
  figure = _figure(8.0, 7.5)
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
  return figure


def plot_folder(folder: str | os.PathLike) -> pathlib.Path:
  """Draws the curves of a saved run into its folder; returns the picture.

  Evaluations are the rows of metrics.jsonl that hold an `eval_accuracy`.
  """
  folder = pathlib.Path(folder)
  metrics = read_jsonl(folder / run_folder.METRICS)
  path = folder / run_folder.CURVES
  plot_run(metrics, _evaluations(metrics), path)
  return path


def curves(run: Run) -> Figure:
  """Reward, evaluation and staleness over the steps, as in curves.png."""
  rows = run.metrics.reset_index().to_dict('records')
  return _curves(rows, _evaluations(rows))


def compare(runs: Mapping[str, Run], name: str, label: str) -> Figure:
  """Plots one metric of several runs over their steps.

  Args:
    runs: by what the legend calls them; the first is drawn boldest.
    name: of the metric.
    label: of the vertical axis, with the unit.
  """
  figure = _figure(8.0, 3.2)
  axes = figure.subplots()
  for (title, run), color in zip(runs.items(), (_BLUE, _ORANGE, _GREEN, _GREY)):
    rows = run.metrics.reset_index().to_dict('records')
    steps, values = _series(rows, name)
    window = max(1, len(values) // 15)
    axes.plot(steps, values, color=color, alpha=0.25, linewidth=1)
    axes.plot(
        steps, _running_mean(values, window), color=color, linewidth=2,
        label=title,
    )  # fmt: skip
  axes.set_xlabel('training step')
  axes.set_ylabel(label)
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.legend(frameon=False, fontsize=9)
  _plain(axes)
  return figure


def staleness(run: Run) -> Figure:
  """Plots the staleness of tokens, and of the oldest token of each answer.

  Shares over the answers in samples.jsonl.
  """
  figure = _figure(8.0, 3.2)
  axes = figure.subplots()
  tokens = np.concatenate([np.zeros(0, int), *run.samples.staleness])
  heads = run.samples.head_staleness.to_numpy()
  bins = np.arange(max([0, *tokens, *heads]) + 1)
  for ages, place, color, label in (
      (tokens, -0.2, _BLUE, f'{len(tokens):,} tokens'),
      (heads, 0.2, _ORANGE, f'oldest token of {len(heads):,} answers'),
  ):
    shares = np.bincount(ages, minlength=len(bins)) / max(1, len(ages))
    bars = axes.bar(bins + place, shares, 0.38, color=color, label=label)
    axes.bar_label(bars, [_percent(s) for s in shares], fontsize=8, padding=2)
  axes.set_xticks(bins)
  axes.margins(y=0.15)
  axes.set_xlabel('staleness (versions between sampling and training)')
  axes.set_ylabel('share')
  axes.legend(frameon=False, fontsize=9)
  _plain(axes)
  return figure


def gap_by_staleness(runs: Mapping[str, Run]) -> Figure:
  """Mean |log-prob of trainer - log-prob of engine| by age of the token.

  Tokens of staleness 0 were sampled by the weights that train on them: what is
  left there is error. For older ones it is how far the policy has moved.

  Args:
    runs: by what the legend calls them.
  """
  figure = _figure(8.0, 3.4)
  axes = figure.subplots()
  ages = np.arange(4)
  width = 0.8 / max(1, len(runs))
  lowest = 1e-8
  for i, (title, run) in enumerate(runs.items()):
    gaps = []
    for age in ages:
      names = [f'logprob_gap_staleness_{age}', f'staleness_{age}_fraction']
      # A run without a token of that age has no such column.
      gap, share = (run.metrics.reindex(columns=names)[name] for name in names)
      share = share.where(gap.notna(), 0.0)
      total = share.sum()
      gaps.append((gap.fillna(0.0) * share).sum() / total if total else np.nan)
    places = ages + (i - (len(runs) - 1) / 2) * width
    heights = np.maximum(np.asarray(gaps, float), lowest)
    axes.bar(
        places, heights, 0.9 * width, color=(_BLUE, _ORANGE, _GREEN)[i % 3],
        label=title,
    )  # fmt: skip
    texts = ['no token' if np.isnan(gap) else f'{gap:.1g}' for gap in gaps]
    for place, height, text in zip(places, heights, texts):
      at = height if np.isfinite(height) else lowest
      axes.annotate(
          text, (place, at), xytext=(0, 2), ha='center', fontsize=8,
          textcoords='offset points', color=_GREY,
      )  # fmt: skip
  axes.set_yscale('log')
  axes.set_ylim(lowest, 10.0)
  axes.axhline(1e-4, color=_GREY, linewidth=1, linestyle=':')
  axes.text(
      1.01, 1e-4, '1e-4: what\nfloat32 allows', fontsize=8, color=_GREY,
      va='center', transform=axes.get_yaxis_transform(),
  )  # fmt: skip
  axes.set_xticks(ages, ['0', '1', '2', '3 or more'])
  axes.set_xlabel('staleness (versions)')
  axes.set_ylabel('mean log-prob gap\n(nats)')
  if len(runs) > 1:
    axes.legend(frameon=False, fontsize=9, loc='upper left', ncols=len(runs))
  _plain(axes)
  return figure


def lengths(run: Run) -> Figure:
  """Lengths of the answers in the first and the last fifth of the steps."""
  figure = _figure(8.0, 3.2)
  axes = figure.subplots()
  samples = run.samples
  last = samples.step.max() if len(samples) else 0
  fifth = max(1, last // 5)
  longest = int(samples.length.max()) if len(samples) else 0
  bins = np.arange(longest + 2) - 0.5
  for right, color, label in (
      (samples.step <= fifth, _GREY, f'steps 1 to {fifth}'),
      (samples.step > last - fifth, _BLUE,
       f'steps {last - fifth + 1} to {last}'),
  ):  # fmt: skip
    chosen = samples[right]
    if chosen.empty:
      continue
    cut = (chosen.stop_reason == 'length').mean()
    axes.hist(
        chosen.length, bins, weights=np.full(len(chosen), 1 / len(chosen)),
        color=color, alpha=0.55, label=f'{label}: mean'
        f' {chosen.length.mean():.1f}, {_percent(cut)} cut off',
    )  # fmt: skip
  axes.set_xlabel('length of the answer (tokens)')
  axes.set_ylabel('share of answers')
  axes.xaxis.set_major_locator(MaxNLocator(integer=True))
  axes.margins(y=0.25)
  if len(samples):
    axes.legend(frameon=False, fontsize=9, loc='upper left')
  _plain(axes)
  return figure


def shares(run: Run) -> Figure:
  """Plots who waited for whom: a bar of `Run.shares` for each part."""
  table = run.shares()
  figure = _figure(8.0, 1.3 + 0.5 * len(table))
  axes = figure.subplots()
  left = np.zeros(len(table))
  for name, color in _ACTIVITIES.items():
    values = table[name].to_numpy()
    bars = axes.barh(
        table.index, values, 0.6, left, color=color, label=name,
        hatch='///' if name.startswith('waits') else None, edgecolor='white',
    )  # fmt: skip
    axes.bar_label(
        bars, [_percent(v) if v > 0.04 else '' for v in values],
        label_type='center', fontsize=8,
        color='white' if name in ('trains', 'decodes', 'swaps') else 'black',
    )  # fmt: skip
    left += values
  axes.invert_yaxis()
  axes.set_xlim(0, 1)
  axes.set_xlabel('share of the time between the first and the last step')
  axes.legend(
      loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=4, frameon=False,
      fontsize=8,
  )  # fmt: skip
  axes.spines[['top', 'right', 'left']].set_visible(False)
  axes.tick_params(left=False)
  return figure


def timeline(run: Run, step: int) -> Figure:
  """Plots what every lane did during one training step, waits included.

  Decoding is coloured by the version that decodes.

  Raises:
    ValueError: the run's events do not hold that step.
  """
  spans = run.spans
  own = spans[(spans.lane == 'train') & (spans.version == step - 1)]
  wait, work = own[own.kind == 'wait'], own[own.kind == 'step']
  if wait.empty or work.empty:
    raise ValueError(f'{run.folder} has no events of step {step}')
  first, end = wait.start.iloc[-1], work.end.iloc[-1]
  last = end + 0.15 * (end - first)  # the new version goes out
  shown = spans[(spans.end > first) & (spans.start < last)]
  # An evaluator without work keeps nobody waiting.
  evaluator = shown.lane.str.startswith('evaluate/')
  shown = shown[~(evaluator & (shown.kind == 'idle'))]
  lanes = sorted(shown.lane.unique(), key=trace.lane_order)
  versions = sorted(shown[shown.kind == 'generate'].version.dropna().unique())
  tints = dict(zip(versions, colormaps['Blues'](np.linspace(0.45, 0.9, max(
      1, len(versions))))))  # fmt: skip
  figure = _figure(9.0, 1.2 + 0.36 * len(lanes))
  axes = figure.subplots()
  for row, lane in enumerate(lanes):
    for span in shown[shown.lane == lane].itertuples():
      start, stop = max(span.start, first), min(span.end, last)
      if span.kind == 'generate':
        color = tints[span.version]
      else:
        color = _KINDS.get(span.kind, '#805ad5')
      axes.broken_barh(
          [(1000 * (start - first), max(1000 * (stop - start), 0.1))],
          (row - 0.36, 0.72), facecolor=color, edgecolor='white',
          linewidth=0.2, alpha=0.5 if span.kind == 'reward' else 1.0,
      )  # fmt: skip
  axes.axvline(1000 * (end - first), color=_GREY, linewidth=1, linestyle=':')
  axes.set_yticks(range(len(lanes)), lanes)
  axes.invert_yaxis()
  axes.set_xlim(0, 1000 * (last - first))
  axes.set_xlabel(f'ms since step {step} began to wait')
  marks = [Patch(color=tints[v], label=f'version {v} decodes')
           for v in versions]  # fmt: skip
  marks += [Patch(color=_ORANGE, label=f'step {step} trains'),
            Patch(color=_PALE, label='waits'),
            Patch(color='#805ad5', label='other')]  # fmt: skip
  axes.legend(
      handles=marks, loc='lower center', bbox_to_anchor=(0.5, 1.0), ncols=4,
      frameon=False, fontsize=8,
  )  # fmt: skip
  axes.spines[['top', 'right']].set_visible(False)
  return figure


def answer(sample: Any, pieces: Sequence[str]) -> Figure:
  """An answer token by token: which version sampled it, and how likely.

  Args:
    sample: a row of `Run.samples`.
    pieces: [T] text of each of its tokens.

  Raises:
    ValueError: not one piece a token.
  """
  if len(pieces) != len(sample.versions):
    raise ValueError(
        f'pieces are {len(pieces)}, wanted one for each of'
        f' {len(sample.versions)} tokens'
    )
  places, columns, lines = _places(pieces)
  figure = _figure(9.0, 1.1 + 0.7 * lines)
  above, below = figure.subplots(2, 1)
  reward = 'no' if np.isnan(sample.reward) else f'{sample.reward:g}'
  _title(
      above, f'{sample.prompt!r} answered in step {sample.step}, reward'
      f' {reward}. Colour: version that sampled the token',
  )  # fmt: skip
  versions = np.unique(sample.versions)
  tints = dict(zip(versions, colormaps['Set2'](np.arange(len(versions)) % 8)))
  _tokens(above, pieces, places, [tints[v] for v in sample.versions])
  above.legend(
      handles=[Patch(color=tints[v], label=f'version {v}') for v in versions],
      loc='center left', bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8,
  )  # fmt: skip
  _title(below, 'Colour: log-probability (nats); dark is unlikely')
  scale = Normalize(_FLOOR, 0.0, clip=True)
  tints_of = colormaps['Oranges_r']
  shades = [tints_of(0.25 + 0.75 * scale(logp)) for logp in sample.logps]
  _tokens(below, pieces, places, shades)
  for axes in (above, below):
    axes.set_xlim(0, columns)
    axes.set_ylim(lines - 0.5, -0.5)
    axes.set_axis_off()
  marks = (0.0, -1.0, -2.0, _FLOOR)
  below.legend(
      handles=[Patch(color=tints_of(0.25 + 0.75 * scale(m)), label=f'{m:g}')
               for m in marks],
      loc='center left', bbox_to_anchor=(1.0, 0.5), frameon=False, fontsize=8,
  )  # fmt: skip
  return figure


def _places(
    pieces: Sequence[str],
) -> tuple[list[tuple[int, int]], int, int]:
  """(column, line) of each piece; how many columns and lines there are."""
  places, column, line, columns = [], 0, 0, 32
  for piece in pieces:
    width = len(_visible(piece))
    if column and column + width > _LINE:
      column, line = 0, line + 1
    places.append((column, line))
    column += width
    columns = max(columns, column)
  return places, columns, line + 1


def _visible(piece: str) -> str:
  """A piece as it is drawn: blanks are seen, and so is a special token."""
  return piece.replace(' ', '·').replace('\n', '↵').replace('\t', '→') or '∎'


def _tokens(
    axes: Axes,
    pieces: Sequence[str],
    places: Sequence[tuple[int, int]],
    colors: Sequence[Any],
) -> None:
  """Draws pieces of monospaced text on coloured ground."""
  for piece, (column, line), color in zip(pieces, places, colors):
    text = _visible(piece)
    axes.broken_barh(
        [(column + 0.04, len(text) - 0.08)], (line - 0.42, 0.84),
        facecolor=color,
    )  # fmt: skip
    dark = 0.3 * color[0] + 0.59 * color[1] + 0.11 * color[2] < 0.5
    axes.text(
        column + len(text) / 2, line, text, ha='center', va='center',
        family='monospace', fontsize=10, color='white' if dark else 'black',
        parse_math=False,
    )  # fmt: skip


def _figure(width: float, height: float) -> Figure:
  """An empty figure, in inches, on a canvas of its own."""
  figure = Figure(figsize=(width, height), dpi=120, layout='constrained')
  FigureCanvasAgg(figure)
  return figure


def _plain(axes: Axes) -> None:
  axes.grid(color='#e2e8f0', linewidth=0.8, axis='y')
  axes.set_axisbelow(True)
  axes.spines[['top', 'right']].set_visible(False)


def _percent(share: float) -> str:
  """'12 %', and '<1 %' where rounding would hide something."""
  return '<1 %' if 0 < share < 0.005 else f'{100 * share:.0f} %'


def _evaluations(
    metrics: Sequence[Mapping[str, Any]],
) -> list[dict[str, Any]]:
  """Step and accuracy of the rows that hold an `eval_accuracy`."""
  steps, values = _series(metrics, 'eval_accuracy')
  return [
      {'step': step, 'accuracy': value} for step, value in zip(steps, values)
  ]


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
