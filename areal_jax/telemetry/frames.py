"""A saved run as pandas frames: metrics, groups, samples, spans.

Reads what `MetricWriter`, `EventLog`, `SampleWriter` and the session wrote and
lays it out for people who ask questions in a notebook. It reads whole files
into memory, and of a run that still goes on what it has written so far. Call it
as `areal_jax.telemetry.read`: pandas is needed by nothing else in this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import functools
import json
import os
import pathlib
from typing import Any

import numpy as np
import pandas as pd

from areal_jax.telemetry import jsonl, run_folder

_EVENT_KEYS = (
    'attempt', 'process', 'lane', 'kind', 'span', 'parent', 'version',
    'draw_index', 'slot', 'reason',
)  # fmt: skip
_WHOLE = ('parent', 'version', 'draw_index', 'slot')  # or missing
_PER_TOKEN = {'ids': np.int32, 'versions': np.int32, 'logps': np.float32}
_SAMPLE_KEYS = (
    'step', 'draw_index', 'sample', 'prompt', 'completion', 'reward',
    'stop_reason', *_PER_TOKEN,
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Run:
  """The files of a run as frames.

  Attributes:
    folder: where it lies.
    config: the resolved settings, as config.json has them.
    summary: the outcome; empty while the run goes on or if it failed.
    metrics: indexed by `step`; one column a metric (docs/metrics.md), NaN where
      it was not measured; `version`, `wall` in seconds since 1970, and
      `nonfinite`, the names of values that were NaN or infinite.
    samples: one row a trained answer, up to the limit of samples.jsonl: `step`,
      `draw_index`, `sample`, `prompt`, `completion`, `reward`, `stop_reason`;
      arrays [T] over its sampled tokens `ids`, `versions`, `logps` (nats) and
      `staleness` (versions); `length` T; `head_staleness`, of its oldest token;
      `mixed`, whether it has tokens of two versions or more.
    events: one row an event: `start` and `end` in seconds since the first
      event, `duration` (NaN for an instant), and the keys of
      `telemetry.events`; what an event has in `fields` is a column of its own.
  """

  folder: pathlib.Path
  config: Mapping[str, Any]
  summary: Mapping[str, Any]
  metrics: pd.DataFrame
  samples: pd.DataFrame
  events: pd.DataFrame

  @property
  def spans(self) -> pd.DataFrame:
    """The events that have a duration."""
    return self.events[self.events.duration.notna()]

  @functools.cached_property
  def groups(self) -> pd.DataFrame:
    """Returns a row a draw, indexed by `draw_index`.

    `admitted_version`; `admitted_s`, `finished_s`, `dropped_s` in the seconds
    of `events`; `members` with a score and `failed` ones; `dropped`, the reason
    if it was dropped. Of trained groups (NaN otherwise, and beyond the limit of
    samples.jsonl): `step`, `head_version` and `head_staleness` of the oldest
    token, `staleness_mean` over tokens, `reward_mean`, `reward_std` and
    `length_mean` over answers.
    """
    return _groups(self.events, self.samples)

  def training(self) -> tuple[float, float]:
    """Seconds at which the first step began to wait and the last one ended.

    Raises:
      ValueError: no step has ended.
    """
    spans = self.spans[self.spans.lane == 'train']
    waits, steps = spans[spans.kind == 'wait'], spans[spans.kind == 'step']
    if waits.empty or steps.empty:
      raise ValueError(f'{self.folder} has no step that ended')
    return float(waits.start.min()), float(steps.end.max())

  def shares(self) -> pd.DataFrame:
    """Returns the shares of time that each part worked or waited in training.

    Index `who` ('trainer', 'engine 0', ...), columns what it did, as shares of
    the time between the first and the last step; each row adds up to 1.

      trainer   'waits for groups', 'trains', 'other' (publishing, logging)
      engines   'waits for requests', 'decodes', 'prefills', 'swaps' (rebuilding
                of caches included), 'other' (hands answers over, polls)
    """
    first, last = self.training()
    spans = self.spans
    seconds = np.minimum(spans.end, last) - np.maximum(spans.start, first)
    spans = spans.assign(seconds=seconds.clip(lower=0))
    rows = {'trainer': _spent(spans, ['train'], _TRAINER)}
    lanes = spans.lane[spans.lane.str.startswith('generate/')].unique()
    for name in sorted(lane.partition('/')[2] for lane in lanes):
      own = [f'{lane}/{name}' for lane in ('generate', 'prefill', 'swap')]
      rows[f'engine {name}'] = _spent(spans, own, _ENGINE)
    shares = pd.DataFrame(rows).T.fillna(0.0) / (last - first)
    shares['other'] = (1 - shares.sum(axis=1)).clip(lower=0)
    return shares.rename_axis('who')


# What a span of a kind is called in `Run.shares`. A prefill is dispatched here
# and done on the device with the next decode step, so its span is short.
_TRAINER = {'wait': 'waits for groups', 'step': 'trains'}
_ENGINE = {
    'idle': 'waits for requests',
    'generate': 'decodes',
    'prefill': 'prefills',
    'swap': 'swaps',
}


def read(folder: str | os.PathLike) -> Run:
  """Reads the folder of a run. See `areal_jax.telemetry.read`.

  Raises:
    FileNotFoundError: the folder holds no run.
    ValueError: a finished line of a log is not JSON.
  """
  folder = pathlib.Path(folder)
  if not (folder / run_folder.CONFIG).is_file():
    raise FileNotFoundError(
        f'{folder} holds no {run_folder.CONFIG}, wanted the folder of a run,'
        ' such as runs/quickstart'
    )
  return Run(
      folder=folder,
      config=_json(folder / run_folder.CONFIG),
      summary=_json(folder / run_folder.SUMMARY),
      metrics=_metrics(_rows(folder / run_folder.METRICS)),
      samples=_samples(_rows(folder / run_folder.SAMPLES)),
      events=_events(_rows(folder / run_folder.EVENTS)),
  )


def _json(path: pathlib.Path) -> dict[str, Any]:
  return json.loads(path.read_text()) if path.exists() else {}


def _rows(path: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of a log; none where a run ended before it was begun."""
  return jsonl.read_jsonl(path) if path.exists() else []


def _metrics(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Returns a row a step; in the file an evaluation is a row of its own."""
  merged: dict[int, dict[str, Any]] = {}
  for row in rows:
    into = merged.setdefault(row['step'], {'nonfinite': ()})
    names = (*into['nonfinite'], *row['nonfinite'])
    into |= row | {'nonfinite': names}
  columns = ('step', 'version', 'wall', 'nonfinite')
  frame = pd.DataFrame(list(merged.values()), columns=_all(merged, columns))
  values = [name for name in frame if name not in columns]
  frame[values] = frame[values].astype(float)  # what is null becomes NaN
  return frame.set_index('step').sort_index()


def _all(rows: Mapping[Any, Mapping[str, Any]], first: Sequence[str]):
  """Names in any of the rows, in the order of their first appearance."""
  named = (name for row in rows.values() for name in row)
  return list(dict.fromkeys([*first, *named]))


def _samples(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  rows = [row for row in rows if 'note' not in row]  # the limit was met
  frame = pd.DataFrame(rows, columns=list(_SAMPLE_KEYS))
  frame['reward'] = frame.reward.astype(float)
  for name, dtype in _PER_TOKEN.items():
    frame[name] = _arrays(frame[name], dtype)
  # A step trains from the version before its own.
  frame['staleness'] = _arrays(
      [step - 1 - v for step, v in zip(frame.step, frame.versions)], np.int32
  )
  for name, dtype, values in (
      ('length', np.int64, [len(v) for v in frame.versions]),
      ('head_staleness', np.int64, [s.max(initial=0) for s in frame.staleness]),
      ('mixed', np.bool_, [len(np.unique(v)) > 1 for v in frame.versions]),
  ):
    frame[name] = np.asarray(values, dtype)
  return frame


def _arrays(values: Any, dtype: type) -> list[np.ndarray]:
  return [np.asarray(value, dtype) for value in values]


def _events(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
  """Times as in `telemetry.trace`: one pairing of clocks an attempt."""
  clocks: dict[tuple[int, int], float] = {}
  starts = []
  for row in rows:
    place = (row['attempt'], row['process'])
    shift = clocks.setdefault(place, row['wall'] - row['mono'])
    starts.append(row['mono'] + shift)
  durations = [row['duration'] for row in rows]
  frame = pd.DataFrame(
      {
          'start': np.asarray(starts, np.float64) - min(starts, default=0.0),
          'duration': np.asarray(durations, np.float64),
          **{key: [row[key] for row in rows] for key in _EVENT_KEYS},
      }
  )
  frame.insert(1, 'end', frame.start + frame.duration.fillna(0.0))
  for key in _WHOLE:
    frame[key] = frame[key].astype('Int64')
  fields = pd.DataFrame([row['fields'] for row in rows], index=frame.index)
  fields = fields.rename(
      columns={name: f'{name}_field' for name in fields if name in frame}
  )
  return frame.join(fields).sort_values(
      'start', kind='stable', ignore_index=True
  )


def _groups(events: pd.DataFrame, samples: pd.DataFrame) -> pd.DataFrame:
  def of(kind: str, **columns: str) -> pd.DataFrame:
    chosen = events[(events.kind == kind) & (events.lane == 'data')]
    chosen = chosen.reindex(columns=['draw_index', *columns.values()])
    chosen.columns = ['draw_index', *columns]
    # A draw that a resumed attempt admitted again counts with its last event.
    return chosen.drop_duplicates('draw_index', keep='last').set_index(
        'draw_index'
    )

  trained = samples.assign(
      head=[v.min(initial=np.iinfo(np.int32).max) for v in samples.versions],
      age_sum=[s.sum() for s in samples.staleness],
  ).groupby('draw_index')
  groups = pd.DataFrame({
      'step': trained.step.first(),
      'head_version': trained['head'].min(),
      'head_staleness': trained.head_staleness.max(),
      'staleness_mean': trained.age_sum.sum() / trained.length.sum(),
      'reward_mean': trained.reward.mean(),
      'reward_std': trained.reward.std(ddof=0),
      'length_mean': trained.length.mean(),
  })  # fmt: skip
  frame = of('admit', admitted_version='version', admitted_s='start')
  for other in (
      of('group', finished_s='start', members='members', failed='failed'),
      of('drop', dropped_s='start', dropped='reason'),
      groups,
  ):
    frame = frame.join(other, how='outer')
  return frame.sort_index()


def _spent(
    spans: pd.DataFrame, lanes: Sequence[str], names: Mapping[str, str]
) -> pd.Series:
  """Seconds in the spans of these lanes and kinds, under their names."""
  chosen = spans[spans.lane.isin(lanes) & spans.kind.isin(names)]
  seconds = chosen.groupby('kind').seconds.sum()
  return seconds.rename(index=names).reindex(names.values(), fill_value=0.0)
