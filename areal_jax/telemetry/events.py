"""What happened when: one append-only log of instants and spans.

Engine loops, controller, reward pool and trainer all write here, some hundred
events a second from several threads. An event costs its caller one line of JSON
and a short lock; a thread of the log writes to the file each second, or sooner
when much is waiting, so no loop ever waits for a disk. Running totals are kept
beside it: the summary of a run needs no second look at the file. If the file
cannot be written any more (a full disk), the next event raises that error: a
run does not go on unrecorded. The file may have a limit in bytes; its last row
then says that the limit was met, and from there on only totals are kept.

One row of `events.jsonl` has these keys, always all of them:

  mono        monotonic seconds at the start; comparable within one attempt
  wall        seconds since 1970 at the start; comparable across attempts
  attempt     0 for the first start of a run, one more for each resume
  process     index of the process
  lane        where it happened: 'train', 'generate/0', ... (see `LANES`)
  kind        what happened: 'step', 'swap', 'publish', ...
  span        id of the event, unique within (attempt, process)
  parent      id of the span that was open around it, or null
  duration    seconds, or null for an instant
  version     version of the weights in question, or null
  draw_index  the draw in question, or null
  slot        the engine's slot in question, or null
  reason      why, or null; the exception's name if a span ended by one
  fields      everything else, by name
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import contextvars
import itertools
import math
import os
import pathlib
import threading
import time
from typing import Any, BinaryIO

from areal_jax.telemetry import jsonl

# Lanes in the order of a prompt's walk; replicas are 'generate/0' and so on.
LANES = (
    'data',
    'prefill',
    'generate',
    'rebuild',
    'swap',
    'reward',
    'train',
    'publish',
    'evaluate',
    'checkpoint',
)

_FLUSH_SECONDS = 1.0
_FLUSH_ROWS = 1000  # about 250 kB
_KEPT_DURATIONS = 1000  # a kind, for percentiles
FULL = 'limit met'  # kind of the last row of a file that met its limit
_ROOM_FOR_NOTE = 512  # bytes that the row of that kind will not exceed

# The log and the id of the span that is open in this thread or coroutine.
_OPEN: contextvars.ContextVar[tuple[EventLog, int] | None] = (
    contextvars.ContextVar('open_span', default=None)
)


class EventLog:
  """Appends events to a file and keeps their totals; safe among threads.

  After `close` it goes on as one without a file: totals only. Threads that are
  still winding down then lose no totals and raise no second error.

  Args:
    path: the file, created or continued; None keeps totals only.
    limit_bytes: size that the file will not exceed, None for no limit. A file
      that is continued keeps it.
    attempt: which start of the run this is, from 0.
    process: index of this process.
    monotonic: clock of starts and durations, in seconds.
    wall: clock of dates, in seconds since 1970.

  Raises:
    ValueError: a limit too small for the row that reports it.
  """

  def __init__(
      self,
      path: pathlib.Path | None,
      *,
      limit_bytes: int | None = None,
      attempt: int = 0,
      process: int = 0,
      monotonic: Callable[[], float] = time.monotonic,
      wall: Callable[[], float] = time.time,
  ):
    if limit_bytes is not None and limit_bytes < _ROOM_FOR_NOTE:
      raise ValueError(
          f'limit_bytes is {limit_bytes}, wanted at least {_ROOM_FOR_NOTE}'
      )
    self._path = path
    self._limit = limit_bytes
    self._attempt = attempt
    self._process = process
    self._monotonic = monotonic
    self._wall = wall
    self._ids = itertools.count(1)
    self._lock = threading.Lock()  # over waiting rows and totals, held briefly
    self._seconds: dict[tuple[str, str], float] = collections.defaultdict(float)
    self._counts: collections.Counter[tuple[str, str]] = collections.Counter()
    self._durations: dict[str, collections.deque[tuple[str, float]]] = (
        collections.defaultdict(
            lambda: collections.deque(maxlen=_KEPT_DURATIONS)
        )
    )
    self._waiting: list[str] = []
    self._lost = 0
    self._failure: OSError | None = None
    self._file_lock = threading.Lock()  # over the file, held while writing
    self._file = None if path is None else jsonl.open_to_append(path)
    self._size, self._full = _already_written(self._file)
    self._wake = threading.Event()
    self._closing = False
    self._writer = None
    if self._file is not None:
      self._writer = threading.Thread(
          target=self._write_loop, name='event-log', daemon=True
      )
      self._writer.start()

  def instant(
      self,
      kind: str,
      lane: str,
      *,
      version: int | None = None,
      draw_index: int | None = None,
      slot: int | None = None,
      reason: str | None = None,
      **fields: Any,
  ) -> int:
    """Logs something that took no time; returns its id."""
    return self._log(
        next(self._ids), kind, lane, self._monotonic(), None, self._parent(),
        version, draw_index, slot, reason, fields,
    )  # fmt: skip

  def span(
      self,
      kind: str,
      lane: str,
      *,
      version: int | None = None,
      draw_index: int | None = None,
      slot: int | None = None,
      reason: str | None = None,
      **fields: Any,
  ) -> Span:
    """Logs the time spent in a `with` block, which receives open `fields`.

    Events of the same thread or coroutine inside the block name it as parent.
    A block that ends by an exception is logged too, with the exception's name
    as its reason if it had none.

    Example: `with log.span('step', 'train') as fields: fields['tokens'] = 3`.
    """
    return Span(self, kind, lane, version, draw_index, slot, reason, fields)

  def record(
      self,
      kind: str,
      lane: str,
      start: float,
      duration: float,
      *,
      parent: int | None = None,
      version: int | None = None,
      draw_index: int | None = None,
      slot: int | None = None,
      reason: str | None = None,
      **fields: Any,
  ) -> int:
    """Logs a span that was measured elsewhere; returns its id.

    Args:
      kind: what happened.
      lane: where it happened.
      start: seconds of the log's monotonic clock.
      duration: seconds.
      parent: id of the span around it; default the one open here, if any.
      version: version of the weights in question.
      draw_index: the draw in question.
      slot: the slot in question.
      reason: why.
      **fields: everything else.

    Raises:
      ValueError: the start is not finite, or the duration negative or not
        finite.
    """
    if not math.isfinite(start):
      raise ValueError(f'{kind} starts at {start}, wanted a finite number')
    if not 0 <= duration < math.inf:
      raise ValueError(f'{kind} lasts {duration} s, wanted at least 0, finite')
    parent = self._parent() if parent is None else parent
    return self._log(
        next(self._ids), kind, lane, start, duration, parent,
        version, draw_index, slot, reason, fields,
    )  # fmt: skip

  def seconds(self, kind: str, lane: str | None = None) -> float:
    """Seconds spent in spans of a kind, in one lane or in all."""
    with self._lock:
      return _total(self._seconds, kind, lane)

  def count(self, kind: str, lane: str | None = None) -> int:
    """Events of a kind, instants and spans, in one lane or in all."""
    with self._lock:
      return _total(self._counts, kind, lane)

  def durations(self, kind: str, lane: str | None = None) -> list[float]:
    """Seconds of each of the last 1,000 spans of a kind, oldest first; of them
    those in one lane, or all."""
    with self._lock:
      return [
          seconds
          for of, seconds in self._durations.get(kind, ())
          if lane in (None, of)
      ]

  @property
  def lost(self) -> int:
    """Events that the limit of the file left no room for; totals hold them."""
    with self._lock:
      return self._lost

  def offset(self) -> int:
    """Bytes that the file will have when all events so far are written."""
    with self._lock:
      return self._size

  def flush(self) -> None:
    """Writes what is waiting to the file.

    Raises:
      OSError: this or an earlier write failed (disk full, for instance).
    """
    with self._file_lock:
      if self._failure is not None:
        raise self._failure
      if self._file is None:
        return
      with self._lock:
        rows, self._waiting = self._waiting, []
      if rows:
        try:
          self._file.write(''.join(rows).encode())
          self._file.flush()
        except OSError as error:
          self._failure = error
          raise

  def close(self) -> None:
    """Writes everything and closes the file. A second call does nothing.

    Raises:
      OSError: a write failed.
    """
    with self._lock:
      if self._closing:
        return
      self._closing = True  # from here on no row is put in the waiting list
    if self._writer is None:
      return
    self._wake.set()
    self._writer.join()
    try:
      self.flush()
    finally:
      with self._file_lock:
        self._file.close()
        self._file = None

  def __enter__(self) -> EventLog:
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()

  def _parent(self) -> int | None:
    """Id of the span of this log that is open in this thread or coroutine."""
    current = _OPEN.get()
    return current[1] if current is not None and current[0] is self else None

  def _log(
      self, identity, kind, lane, start, duration, parent,
      version, draw_index, slot, reason, fields,
  ) -> int:  # fmt: skip
    """Encodes one event outside of the lock, then appends and totals it."""
    row = None
    if self._file is not None and not self._full:
      row = self._row(
          identity, kind, lane, start, duration, parent,
          version, draw_index, slot, reason, fields,
      )  # fmt: skip
    with self._lock:
      self._counts[kind, lane] += 1
      if duration is not None:
        self._seconds[kind, lane] += duration
        self._durations[kind].append((lane, duration))
      if self._file is not None and not self._closing:
        self._keep(row)
      full = len(self._waiting) >= _FLUSH_ROWS
      failure = None if self._closing else self._failure
    if failure is not None:
      raise failure
    if full:
      self._wake.set()
    return identity

  def _row(
      self, identity, kind, lane, start, duration, parent,
      version, draw_index, slot, reason, fields,
  ) -> str:  # fmt: skip
    return jsonl.line(
        {
            'mono': start,
            'wall': self._wall() - (self._monotonic() - start),
            'attempt': self._attempt,
            'process': self._process,
            'lane': lane,
            'kind': kind,
            'span': identity,
            'parent': parent,
            'duration': duration,
            'version': version,
            'draw_index': draw_index,
            'slot': slot,
            'reason': reason,
            'fields': fields,
        }
    )

  def _keep(self, row: str | None) -> None:
    """Puts a row (ASCII) in line for the file; called with the lock held."""
    room = math.inf if self._limit is None else self._limit - self._size
    # Room for the note stays free, so that the note itself always fits.
    if row is not None and not self._full and len(row) + _ROOM_FOR_NOTE <= room:
      self._waiting.append(row)
      self._size += len(row)
      return
    self._lost += 1
    if not self._full:
      self._full = True
      note = self._row(
          next(self._ids), FULL, 'data', self._monotonic(), None, None,
          None, None, None, 'later events lost', {'limit_bytes': self._limit},
      )  # fmt: skip
      if len(note) <= room:
        self._waiting.append(note)
        self._size += len(note)

  def _write_loop(self) -> None:
    """Flushes each second, when woken, and once more at the end."""
    while not self._closing and self._failure is None:
      self._wake.wait(_FLUSH_SECONDS)
      self._wake.clear()
      try:
        self.flush()
      except OSError:
        return  # kept in _failure, which the next event or flush raises


class Span:
  """A span in the making; see `EventLog.span`. Entered once."""

  def __init__(
      self,
      log: EventLog,
      kind: str,
      lane: str,
      version: int | None,
      draw_index: int | None,
      slot: int | None,
      reason: str | None,
      fields: dict[str, Any],
  ):
    self._log = log
    self._what = (kind, lane)
    self._about = (version, draw_index, slot)
    self._reason = reason
    self._fields = fields

  def __enter__(self) -> dict[str, Any]:
    self._parent = self._log._parent()
    self._identity = next(self._log._ids)
    self._token = _OPEN.set((self._log, self._identity))
    self._start = self._log._monotonic()
    return self._fields

  def __exit__(self, exception_type, exception, traceback) -> None:
    duration = self._log._monotonic() - self._start
    _OPEN.reset(self._token)
    if exception_type is not None and self._reason is None:
      self._reason = exception_type.__name__
    self._log._log(
        self._identity, *self._what, self._start, duration, self._parent,
        *self._about, self._reason, self._fields,
    )  # fmt: skip


def _already_written(file: BinaryIO | None) -> tuple[int, bool]:
  """Bytes of a log that is continued, and whether it met its limit."""
  if file is None:
    return 0, False
  size = file.seek(0, os.SEEK_END)
  file.seek(max(0, size - _ROOM_FOR_NOTE))
  last = file.read(_ROOM_FOR_NOTE).decode(errors='replace').splitlines()[-1:]
  return size, any(f'"kind":"{FULL}"' in line for line in last)


def _total(totals, kind: str, lane: str | None):
  if lane is not None:
    return totals.get((kind, lane), 0)
  return sum(value for (of, _), value in totals.items() if of == kind)
