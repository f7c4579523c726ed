"""The trace is what Perfetto needs: named rows, order, proper nesting."""

import json
import random

import pytest

from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.trace import write_trace


def trace_of(tmp_path):
  path = tmp_path / 'trace.json'
  shown = write_trace(tmp_path / 'events.jsonl', path)
  trace = json.loads(path.read_text())['traceEvents']
  named = {
      (e['pid'], e['tid']): e['args']['name']
      for e in trace
      if e['name'] == 'thread_name'
  }
  entries = [e for e in trace if e['ph'] != 'M']
  assert shown == len(entries)
  return named, entries


def check_valid(named, entries):
  """What holds of every trace."""
  assert [e['ts'] for e in entries] == sorted(e['ts'] for e in entries)
  rows = {}
  for entry in entries:
    assert entry['ph'] in 'XiC'
    assert entry['ts'] >= 0
    if entry['ph'] != 'C':
      assert (entry['pid'], entry['tid']) in named
    if entry['ph'] == 'X':
      assert entry['dur'] >= 0
      start = entry['ts']
      end = start + entry['dur']
      rows.setdefault((entry['pid'], entry['tid']), []).append((start, end))
  for spans in rows.values():
    for i, (start, end) in enumerate(spans):
      for other_start, other_end in spans[i + 1 :]:
        apart = other_start >= end
        nested = other_end <= end
        assert apart or nested, (start, end, other_start, other_end)


def test_lanes_are_named_in_the_order_of_the_walk(tmp_path):
  with EventLog(tmp_path / 'events.jsonl') as log:
    for lane in ('publish', 'zoo', 'generate/10', 'train', 'generate/2'):
      log.record('work', lane, 1.0, 0.5, tokens=3)
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  order = [named[place] for place in sorted(named)]
  assert order == ['generate/2', 'generate/10', 'train', 'publish', 'zoo']
  assert {e['dur'] for e in entries} == {500_000.0}
  assert entries[0]['args']['tokens'] == 3


def test_overlapping_rewards_get_rows_of_their_own(tmp_path):
  with EventLog(tmp_path / 'events.jsonl') as log:
    log.record('score', 'reward', 0.0, 2.0, draw_index=0)
    log.record('parse', 'reward', 0.2, 1.0, draw_index=0)  # a part of it
    log.record('score', 'reward', 0.5, 0.5, draw_index=1)  # only beside it
    log.record('score', 'reward', 1.5, 1.5, draw_index=2)  # overlaps it
    log.record('score', 'reward', 2.0, 2.0, draw_index=3)  # as the first ends
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  rows = [
      (e['name'], e['args']['draw_index'], named[e['pid'], e['tid']])
      for e in entries
  ]
  assert rows == [
      ('score', 0, 'reward'),
      ('parse', 0, 'reward'),
      ('score', 1, 'reward (2)'),
      ('score', 2, 'reward (2)'),
      ('score', 3, 'reward'),
  ]


def test_spans_that_end_with_their_parent_stay_in_its_row(tmp_path):
  # At these clocks sums of floats are off in the last digits.
  with EventLog(tmp_path / 'events.jsonl') as log:
    for i in range(200):
      start = 86_400.1 + i * 0.3
      log.record('step', 'train', start, 0.3)  # adjacent to the next
      log.record('forward', 'train', start, 0.1)
      log.record('backward', 'train', start + 0.1, 0.2)  # to the step's end
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  assert list(named.values()) == ['train']
  assert len(entries) == 600


def test_any_overlaps_nest_in_the_end(tmp_path):
  source = random.Random(0)
  with EventLog(tmp_path / 'events.jsonl') as log:
    for _ in range(300):
      lane = source.choice(['reward', 'train'])
      kind = source.choice(['a', 'b', 'c'])
      log.record(kind, lane, source.random() * 9, source.random() ** 4)
      if source.random() < 0.3:
        log.instant('y', lane)
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  assert sum(e['ph'] == 'X' for e in entries) == 300


def test_version_and_staleness_are_counters(tmp_path):
  with EventLog(tmp_path / 'events.jsonl') as log:
    log.record('publish', 'publish', 5.0, 0.5, version=1)
    log.record('step', 'train', 4.0, 1.0, staleness_mean=0.5, staleness_max=2)
    log.record('step', 'train', 5.0, 2.0, staleness=1.5, stale=9)
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  counters = [
      (e['name'], e['ts'], e['args']) for e in entries if e['ph'] == 'C'
  ]
  assert counters == [
      ('staleness', 1_000_000.0, {'mean': 0.5, 'max': 2}),
      ('version', 1_500_000.0, {'version': 1}),
      ('staleness', 3_000_000.0, {'staleness': 1.5}),
  ]


def test_attempts_stand_side_by_side_by_wall_time(tmp_path):
  # The monotonic clock started anew with the machine; the wall clock did not.
  for attempt, mono, wall in ((0, 500.0, 1000.0), (1, 3.0, 1060.0)):
    with EventLog(
        tmp_path / 'events.jsonl',
        attempt=attempt,
        monotonic=lambda now=mono: now,
        wall=lambda now=wall: now,
    ) as log:
      log.instant('start', 'train')
  named, entries = trace_of(tmp_path)
  check_valid(named, entries)
  assert [e['ts'] for e in entries] == [0.0, 60e6]
  assert len({e['pid'] for e in entries}) == 2


def test_empty_log_makes_an_empty_trace(tmp_path):
  EventLog(tmp_path / 'events.jsonl').close()
  assert trace_of(tmp_path) == ({}, [])


def test_missing_log_leaves_no_trace(tmp_path):
  with pytest.raises(FileNotFoundError):
    write_trace(tmp_path / 'none.jsonl', tmp_path / 'trace.json')
  assert list(tmp_path.iterdir()) == []
