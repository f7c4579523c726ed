"""Turns the events of a run into a trace that Perfetto opens.

The output is Chrome's trace event format in JSON (see
https://perfetto.dev/docs/getting-started/other-formats): a process for each
(attempt, process) of the run, a named thread for each lane in the order of a
prompt's walk, complete events ('X') for spans, instants ('i') and counters
('C') of version and staleness. Open it at https://ui.perfetto.dev.

Spans of one thread must nest. Where those of a lane overlap instead (rewards
are scored side by side) the lane is split into rows 'reward', 'reward (2)', ...
"""

from __future__ import annotations

import collections
from collections.abc import Iterable
import dataclasses
import itertools
import json
import os
import pathlib
from typing import Any

from areal_jax.telemetry import jsonl
from areal_jax.telemetry.events import LANES


def write_trace(
    events_path: str | os.PathLike, trace_path: str | os.PathLike
) -> int:
  """Writes the trace of an events file; returns how many events it shows.

  Times are microseconds since the first event. Within an attempt they come
  from the monotonic clock; attempts are placed beside each other by wall time.

  Raises:
    ValueError: a finished line of the events file is not JSON.
  """
  entries, metadata = _trace(jsonl.iterate_jsonl(events_path))
  trace_path = pathlib.Path(trace_path)
  part = trace_path.with_name(f'.{trace_path.name}.{os.getpid()}.part')
  try:
    with open(part, 'w', encoding='utf-8') as file:
      file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
      # `json.dumps` would make an encoder anew for each of many thousands.
      encode = json.JSONEncoder(separators=(',', ':')).encode
      file.write(',\n'.join(map(encode, metadata + entries)))
      file.write('\n]}\n')
    os.replace(part, trace_path)
  finally:
    part.unlink(missing_ok=True)
  return len(entries)


@dataclasses.dataclass(frozen=True)
class _Mark:
  """An event of the log, in microseconds.

  They are whole: floats would make a span that ends with its parent end a
  little later now and then, and the two would count as overlapping.
  """

  start: int
  end: int
  instant: bool
  row: dict[str, Any]


def _trace(rows: Iterable[dict[str, Any]]) -> tuple[list[dict], list[dict]]:
  """Entries in the order of time, and the metadata that names their places."""
  marks, first = _marks(rows)
  entries = []
  metadata = []
  for pid, place in enumerate(sorted(marks), 1):
    attempt, process = place
    metadata.append(_name('process', pid, 0, f'process {process}', attempt))
    tid = 0
    for lane in sorted(marks[place], key=lane_order):
      for number, row in enumerate(_rows_that_nest(marks[place][lane]), 1):
        tid += 1
        name = lane if number == 1 else f'{lane} ({number})'
        metadata.append(_name('thread', pid, tid, name))
        metadata.append({
            'ph': 'M', 'name': 'thread_sort_index', 'pid': pid, 'tid': tid,
            'args': {'sort_index': tid},
        })  # fmt: skip
        for mark in row:
          entries.append(_entry(mark, first, pid, tid))
          entries.extend(_counters(mark, first, pid))
  # Parents before children that start with them.
  entries.sort(key=lambda entry: (entry['ts'], -entry.get('dur', 0)))
  return entries, metadata


def _marks(rows):
  """Marks by (attempt, process), then lane, and the time of the first."""
  marks = collections.defaultdict(lambda: collections.defaultdict(list))
  clocks = {}
  origin = None
  for row in rows:
    place = (row['attempt'], row['process'])
    # One pairing of clocks an attempt: setting the wall clock later moves
    # nothing. Only differences are taken, which keep a float's precision.
    mono, wall = clocks.setdefault(place, (row['mono'], row['wall']))
    origin = wall if origin is None else origin
    shift = round((wall - origin) * 1e6)
    start = shift + round((row['mono'] - mono) * 1e6)
    duration = row['duration']
    end = shift + round((row['mono'] - mono + (duration or 0.0)) * 1e6)
    mark = _Mark(start, end, duration is None, row)
    marks[place][row['lane']].append(mark)
  lanes = itertools.chain.from_iterable(m.values() for m in marks.values())
  starts = (mark.start for lane in lanes for mark in lane)
  return marks, min(starts, default=0)


def _rows_that_nest(marks: list[_Mark]) -> list[list[_Mark]]:
  """Splits the marks of a lane into rows in which spans nest or are apart.

  Each mark, in the order of time, goes to the first row where it fits. Rows are
  as many as spans overlap at once, few; each has its open spans, the innermost
  last.
  """
  rows: list[list[_Mark]] = []
  opened: list[list[_Mark]] = []
  for mark in sorted(marks, key=lambda mark: (mark.start, -mark.end)):
    if mark.instant and rows:
      rows[0].append(mark)
      continue
    place = _first_fit(opened, mark)
    if place == len(rows):
      rows.append([])
      opened.append([])
    rows[place].append(mark)
    if not mark.instant:
      opened[place].append(mark)
  return rows


def _first_fit(opened: list[list[_Mark]], mark: _Mark) -> int:
  """Index of the first row where the mark nests, or of a new one."""
  for place, spans in enumerate(opened):
    while spans and spans[-1].end <= mark.start:
      spans.pop()
    if not spans:
      return place
    if mark.end <= spans[-1].end and all(_may_hold(s, mark) for s in spans):
      return place
  return len(opened)


def _may_hold(outer: _Mark, inner: _Mark) -> bool:
  """Returns whether one span can be a part of the other.

  A short score that falls into the time of a long one is no part of it.
  """
  draws = {outer.row['draw_index'], inner.row['draw_index']} - {None}
  return outer.row['kind'] != inner.row['kind'] and len(draws) < 2


def _entry(mark: _Mark, first: int, pid: int, tid: int) -> dict[str, Any]:
  """A span or an instant with all that the log says about it."""
  keys = ('version', 'draw_index', 'slot', 'reason', 'span', 'parent')
  args = {key: mark.row[key] for key in keys if mark.row[key] is not None}
  entry = {
      'ph': 'i' if mark.instant else 'X',
      'name': mark.row['kind'],
      'cat': mark.row['lane'],
      'pid': pid,
      'tid': tid,
      'ts': mark.start - first,
      'args': args | mark.row['fields'],
  }
  if mark.instant:
    entry['s'] = 't'  # drawn on its thread only
  else:
    entry['dur'] = mark.end - mark.start
  return entry


def _counters(mark: _Mark, first: int, pid: int) -> list[dict[str, Any]]:
  """Version and staleness at the end of an event that tells them.

  The version goes up with events of kind 'publish'. A field 'staleness', or
  fields 'staleness_mean' and so on, make the other counter.
  """
  counted = []
  if mark.row['kind'] == 'publish' and mark.row['version'] is not None:
    counted.append(('version', {'version': mark.row['version']}))
  staleness = {
      name.removeprefix('staleness_'): value
      for name, value in mark.row['fields'].items()
      if name.split('_')[0] == 'staleness' and isinstance(value, (int, float))
  }
  if staleness:
    counted.append(('staleness', staleness))
  ts = mark.end - first
  return [
      {'ph': 'C', 'name': name, 'pid': pid, 'tid': 0, 'ts': ts, 'args': args}
      for name, args in counted
  ]


def _name(what: str, pid: int, tid: int, name: str, attempt: int = 0):
  """Metadata that gives a process or thread its name."""
  name = f'{name}, attempt {attempt}' if attempt else name
  return {
      'ph': 'M', 'name': f'{what}_name', 'pid': pid, 'tid': tid,
      'args': {'name': name},
  }  # fmt: skip


def lane_order(lane: str) -> tuple[int, str, int, str]:
  """Sorts lanes as the prompt walks, 'generate/2' before 'generate/10'."""
  base, _, replica = lane.partition('/')
  walk = LANES.index(base) if base in LANES else len(LANES)
  return walk, base, int(replica) if replica.isdigit() else -1, replica
