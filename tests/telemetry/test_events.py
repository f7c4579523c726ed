"""The event log: nothing lost, true totals, one schema."""

import asyncio
import pathlib
import threading

import pytest

from areal_jax.telemetry.events import FULL, EventLog
from areal_jax.telemetry.jsonl import read_jsonl
from tests.limits import wait_until

KEYS = [
    'mono', 'wall', 'attempt', 'process', 'lane', 'kind', 'span', 'parent',
    'duration', 'version', 'draw_index', 'slot', 'reason', 'fields',
]  # fmt: skip


class Clock:
  """Seconds that a test sets."""

  def __init__(self, now):
    self.now = now

  def __call__(self):
    return self.now


def test_every_row_has_the_whole_schema(tmp_path):
  mono, wall = Clock(10.0), Clock(1000.0)
  path = tmp_path / 'events.jsonl'
  with EventLog(path, attempt=2, process=1, monotonic=mono, wall=wall) as log:
    log.instant('drop', 'data', draw_index=7, reason='stale', why='old')
    with log.span('step', 'train', version=3) as fields:
      mono.now, wall.now = 12.5, 1002.5
      fields['tokens'] = 3
    log.record('swap', 'swap/0', 11.0, 0.25, version=4, slot=1)
  drop, step, swap = read_jsonl(path)
  for row in (drop, step, swap):
    assert list(row) == KEYS
    assert (row['attempt'], row['process']) == (2, 1)
  assert (drop['mono'], drop['wall'], drop['duration']) == (10.0, 1000.0, None)
  assert (drop['draw_index'], drop['reason']) == (7, 'stale')
  assert drop['fields'] == {'why': 'old'}
  # A span is dated by its start, by both clocks.
  assert (step['mono'], step['wall'], step['duration']) == (10.0, 1000.0, 2.5)
  assert (step['version'], step['fields']) == (3, {'tokens': 3})
  assert (swap['mono'], swap['wall'], swap['duration']) == (11.0, 1001.0, 0.25)
  assert (swap['version'], swap['slot'], swap['lane']) == (4, 1, 'swap/0')


def test_nothing_is_lost_among_threads(tmp_path):
  path = tmp_path / 'events.jsonl'
  log = EventLog(path)

  def work(lane):
    for i in range(700):
      with log.span('step', lane):
        log.instant('tick', lane, number=i)

  threads = [
      threading.Thread(target=work, args=(f'generate/{t}',)) for t in range(4)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  log.close()
  log.close()
  rows = read_jsonl(path)
  assert len(rows) == 2 * 4 * 700
  assert len({row['span'] for row in rows}) == len(rows)
  spans = {row['span']: row for row in rows if row['kind'] == 'step'}
  for row in rows:
    if row['kind'] == 'tick':  # the parent is the span of its own thread
      assert spans[row['parent']]['lane'] == row['lane']
  assert log.count('tick') == 4 * 700
  assert log.count('tick', 'generate/2') == 700


def test_coroutines_keep_their_own_parents(tmp_path):
  path = tmp_path / 'events.jsonl'
  log = EventLog(path)

  async def workflow(draw_index):
    with log.span('workflow', 'reward', draw_index=draw_index):
      await asyncio.sleep(0)
      log.instant('scored', 'reward', draw_index=draw_index)
      await asyncio.sleep(0)

  async def main():
    await asyncio.gather(*(workflow(i) for i in range(5)))

  asyncio.run(main())
  log.close()
  rows = read_jsonl(path)
  draws = {r['span']: r['draw_index'] for r in rows if r['kind'] == 'workflow'}
  scored = [r for r in rows if r['kind'] == 'scored']
  assert len(scored) == 5
  for row in scored:
    assert draws[row['parent']] == row['draw_index']


def test_totals_need_no_file():
  clock = Clock(0.0)
  log = EventLog(None, monotonic=clock)
  for duration in (1.0, 2.0, 4.0):
    log.record('swap', 'swap/0', 0.0, duration)
  with log.span('swap', 'swap/1'):
    clock.now += 0.5
  log.instant('swap', 'swap/1')
  assert log.seconds('swap') == 7.5
  assert log.seconds('swap', 'swap/1') == 0.5
  assert log.count('swap') == 5
  assert log.durations('swap') == [1.0, 2.0, 4.0, 0.5]
  assert (log.seconds('never'), log.count('never')) == (0, 0)
  assert log.durations('never') == []


def test_kept_durations_are_bounded():
  log = EventLog(None)
  for i in range(1050):
    log.record('decode', 'generate', 0.0, float(i))
  kept = log.durations('decode')
  assert (len(kept), kept[0], kept[-1]) == (1000, 50.0, 1049.0)
  assert log.count('decode') == 1050


def test_failed_block_is_logged_with_its_reason(tmp_path):
  path = tmp_path / 'events.jsonl'
  with EventLog(path) as log:
    with pytest.raises(KeyError):
      with log.span('step', 'train'):
        raise KeyError('x')
    log.instant('after', 'train')
  failed, after = read_jsonl(path)
  assert failed['reason'] == 'KeyError'
  assert failed['duration'] >= 0
  assert after['parent'] is None


def test_waiting_rows_are_written_without_another_event(tmp_path):
  path = tmp_path / 'events.jsonl'
  log = EventLog(path)
  log.instant('one', 'train')
  wait_until(lambda: path.stat().st_size > 0)
  assert [row['kind'] for row in read_jsonl(path)] == ['one']
  log.instant('two', 'train')
  log.flush()
  assert [row['kind'] for row in read_jsonl(path)] == ['one', 'two']
  log.close()


def test_many_rows_are_written_before_the_log_is_closed(tmp_path):
  path = tmp_path / 'events.jsonl'
  log = EventLog(path)
  for _ in range(1000):
    log.instant('tick', 'train')
  wait_until(lambda: path.stat().st_size > 0)
  log.close()
  assert len(read_jsonl(path)) == 1000


def test_closed_log_keeps_totals_only(tmp_path):
  path = tmp_path / 'events.jsonl'
  log = EventLog(path)
  log.close()
  log.instant('late', 'train')
  log.flush()
  assert log.count('late') == 1
  assert read_jsonl(path) == []


def test_second_attempt_continues_the_file(tmp_path):
  path = tmp_path / 'events.jsonl'
  for attempt in range(2):
    with EventLog(path, attempt=attempt) as log:
      log.instant('start', 'train')
  assert [row['attempt'] for row in read_jsonl(path)] == [0, 1]


def test_limit_is_kept_and_told_and_totals_go_on(tmp_path):
  path = tmp_path / 'events.jsonl'
  with EventLog(path, limit_bytes=4000) as log:
    for number in range(50):
      log.record('step', 'train', float(number), 0.5)
  assert 4000 - 1024 < path.stat().st_size <= 4000
  *rows, note = read_jsonl(path)
  assert list(note) == KEYS
  assert (note['kind'], note['fields']) == (FULL, {'limit_bytes': 4000})
  assert [row['mono'] for row in rows] == list(range(len(rows)))
  assert log.lost == 50 - len(rows) > 0
  assert (log.count('step'), log.seconds('step')) == (50, 25.0)


def test_continued_file_keeps_its_limit(tmp_path):
  path = tmp_path / 'events.jsonl'
  written = 0
  for attempt in range(30):  # each attempt adds one
    with EventLog(path, limit_bytes=4000, attempt=attempt) as log:
      log.instant('start', 'train')
    written += 1 - log.lost
  rows = read_jsonl(path)
  assert path.stat().st_size <= 4000
  assert [row['kind'] for row in rows] == ['start'] * written + [FULL]
  assert 0 < written < 30


def test_limit_without_room_for_its_own_row_is_refused(tmp_path):
  with pytest.raises(ValueError, match='limit_bytes is 100, wanted at least'):
    EventLog(tmp_path / 'events.jsonl', limit_bytes=100)


def test_full_disk_stops_the_next_event():
  path = pathlib.Path('/dev/full')
  if not path.exists():
    pytest.skip('no /dev/full here')
  log = EventLog(path)
  log.instant('one', 'train')
  with pytest.raises(OSError, match='No space left'):
    log.flush()
  with pytest.raises(OSError, match='No space left'):
    log.instant('two', 'train')
  with pytest.raises(OSError, match='No space left'):
    log.close()


@pytest.mark.parametrize(
    ('start', 'duration'),
    [(0.0, -1e-9), (0.0, float('nan')), (float('inf'), 1.0)],
)
def test_impossible_span_is_refused(start, duration):
  with pytest.raises(ValueError, match='swap (lasts|starts)'):
    EventLog(None).record('swap', 'swap', start, duration)
