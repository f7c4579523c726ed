"""The schedule of a run: every batch that it trained, in order, whole.

What an asynchronous run learns depends on which answers came in time, so a seed
alone does not bring it back; its schedule does (`areal_jax/replay.py`). It is a
file of frames that are appended and never changed, each with checksums:

  header   28 bytes, little-endian: the tag 'AJS1', four letters that say the
           kind, step (8 bytes), length of the payload, CRC-32 of the payload,
           CRC-32 of the header so far (4 bytes each)
  payload  zlib of `records.dumps`

  kind     when                         what
  'run '   a start of the run           seed, settings, shapes: see `Schedule`
  'batc'   before a step                its groups, rewards as they were trained
  'step'   after it                     what training said of it
  'full'   when the limit was met       nothing; later steps are not recorded

A thread packs and writes, so training waits for neither. The file has a limit
in bytes. Times of answers are left out: events.jsonl has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
import concurrent.futures
import dataclasses
import os
import pathlib
import struct
from typing import Any, BinaryIO
import zlib

from areal_jax import records
from areal_jax.types import Group

_TAG = b'AJS1'
_RUN, _BATCH, _STEP, _FULL = b'run ', b'batc', b'step', b'full'
_KINDS = (_RUN, _BATCH, _STEP, _FULL)
_FIELDS = struct.Struct('<4s4sQII')
_CHECK = struct.Struct('<I')
_HEADER = _FIELDS.size + _CHECK.size
_LEVEL = 6  # of zlib


class ScheduleError(ValueError):
  """A schedule that is not what was written; names file, byte and step."""


@dataclasses.dataclass(frozen=True)
class _Frame:
  """A frame by its header.

  Attributes:
    kind: one of `_KINDS`.
    step: that it speaks of; of the start of a run the one that comes next.
    start: first byte of its payload.
    length: bytes of its payload.
    checksum: CRC-32 of its payload.
  """

  kind: bytes
  step: int
  start: int
  length: int
  checksum: int

  @property
  def end(self) -> int:
    return self.start + self.length


class ScheduleWriter:
  """Appends to a schedule; owned by one thread.

  A file that an earlier attempt of the run left is continued under the same
  limit; half a frame at its end is cut off.

  Args:
    path: the file.
    limit_bytes: size that it will not exceed; 0 to write nothing at all.
    run: what is to be known of this start of the run, see `Schedule.runs`.
    full: called once, with `full_at`, when the limit is met; in the thread.

  Attributes:
    full_at: the first step that the limit left no room for; None so far.
  """

  def __init__(
      self,
      path: str | os.PathLike,
      limit_bytes: int,
      run: Mapping[str, Any],
      full: Callable[[int], None] = lambda step: None,
  ):
    self.full_at: int | None = None
    self._path = pathlib.Path(path)
    self._limit = limit_bytes
    self._full = full
    self._size = 0
    self._thread: concurrent.futures.ThreadPoolExecutor | None = None
    self._pending: concurrent.futures.Future | None = None
    if not limit_bytes:
      return
    self._path.parent.mkdir(parents=True, exist_ok=True)
    # No buffer: what a full disk refused would be refused again at the end.
    self._file = open(self._path, 'a+b', buffering=0)
    held = list(_whole_frames(self._file))
    last = held[-1] if held else None
    self._size = last.end if last else 0
    if self._file.seek(0, os.SEEK_END) > self._size:
      self._file.truncate(self._size)
    if last is not None and last.kind == _FULL:
      self.full_at = last.step
    self._thread = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='schedule'
    )
    self._submit(_RUN, last.step + 1 if last else 1, dict(run))

  def __enter__(self) -> ScheduleWriter:
    return self

  def __exit__(self, *exception: Any) -> None:
    self.close()

  def batch(self, step: int, groups: Sequence[Group]) -> None:
    """Records what a step is about to be trained on.

    Args:
      step: that will have been done then, from 1.
      groups: in the order in which training is given them.

    Raises:
      OSError: what came before could not be written.
    """
    self._submit(_BATCH, step, tuple(groups))

  def outcome(self, step: int, values: Mapping[str, float]) -> None:
    """Records what training said of a step. Raises like `batch`."""
    self._submit(_STEP, step, dict(values))

  def offset(self) -> int:
    """Bytes of the file with all that was recorded so far, which is written.

    Raises:
      OSError: it could not be.
    """
    self._settle()
    return self._size

  def close(self) -> None:
    """Writes what is waiting and closes the file. Again does nothing."""
    if self._thread is None:
      return
    try:
      self._settle()
    finally:
      self._thread.shutdown()
      self._thread = None
      self._file.close()

  def _settle(self) -> None:
    pending, self._pending = self._pending, None
    if pending is not None:
      pending.result()

  def _submit(self, kind: bytes, step: int, value: Any) -> None:
    if self._thread is None:
      return
    self._settle()  # so that no more than one waits, and the limit is known
    if self.full_at is not None:
      return
    self._pending = self._thread.submit(self._append, kind, step, value)

  # In the thread.

  def _append(self, kind: bytes, step: int, value: Any) -> None:
    if kind == _BATCH:
      value = tuple(_without_times(group) for group in value)
    frame = _packed(kind, step, zlib.compress(records.dumps(value), _LEVEL))
    # Room for the last frame stays free, so that it always fits.
    if self._size + len(frame) + _HEADER > self._limit:
      self.full_at = step
      self._full(step)
      frame = _packed(_FULL, step, b'')
      if self._size + len(frame) > self._limit:
        return
    left = memoryview(frame)
    while left:
      left = left[self._file.write(left) :]
    self._size += len(frame)


class Schedule:
  """A schedule that is read; the file is kept open.

  Args:
    path: the file.

  Attributes:
    path: the file.
    runs: of each start of the run 'seed', 'attempt', 'config' (the settings as
      plain data), 'policy' (its shape), 'tokenizer' (hash by file) and 'mesh'.
    steps: those that it holds, in their order.
    full_at: the first step that the limit left no room for, or None.

  Raises:
    ScheduleError: no schedule, or one that was changed.
    OSError: it cannot be read.
  """

  def __init__(self, path: str | os.PathLike):
    self.path = pathlib.Path(path)
    self.full_at: int | None = None
    self._file = open(self.path, 'rb')
    self._batches: dict[int, _Frame] = {}
    self._outcomes: dict[int, _Frame] = {}
    starts = []
    for frame in _frames(self._file, self.path):
      if frame.kind == _RUN:
        starts.append(frame)
      elif frame.kind == _FULL:
        self.full_at = frame.step
      else:
        held = self._batches if frame.kind == _BATCH else self._outcomes
        if frame.step <= max(held, default=0):
          raise ScheduleError(
              f'{self.path} holds step {frame.step} after {max(held)}, wanted'
              ' each step once and in order'
          )
        held[frame.step] = frame
    self.runs: tuple[dict[str, Any], ...] = tuple(map(self._read, starts))
    if not self.runs:
      raise ScheduleError(f'{self.path} is empty, wanted the schedule of a run')

  @property
  def steps(self) -> tuple[int, ...]:
    return tuple(self._batches)

  def batch(self, step: int) -> tuple[Group, ...]:
    """The groups of a step, equal to those that were trained but for times.

    Raises:
      ScheduleError: the file was changed.
      KeyError: it does not hold this step.
    """
    return self._read(self._batches[step])

  def outcome(self, step: int) -> dict[str, float] | None:
    """Records the outcome of a step; None where the step did not finish."""
    frame = self._outcomes.get(step)
    return None if frame is None else self._read(frame)

  def close(self) -> None:
    self._file.close()

  def _read(self, frame: _Frame) -> Any:
    self._file.seek(frame.start)
    payload = self._file.read(frame.length)
    seen = zlib.crc32(payload)
    if seen != frame.checksum:
      raise ScheduleError(
          f'{self.path} at byte {frame.start} (step {frame.step}) has CRC-32'
          f' {seen:08x}, wanted {frame.checksum:08x}'
      )
    return records.loads(zlib.decompress(payload))


def _packed(kind: bytes, step: int, payload: bytes) -> bytes:
  fields = _FIELDS.pack(_TAG, kind, step, len(payload), zlib.crc32(payload))
  return fields + _CHECK.pack(zlib.crc32(fields)) + payload


def _frames(file: BinaryIO, path: pathlib.Path) -> Iterator[_Frame]:
  """The frames of a file by their headers; half a frame at its end is none.

  Raises:
    ScheduleError: a header is not what was written.
  """
  size = file.seek(0, os.SEEK_END)
  at = 0
  while at + _HEADER <= size:
    file.seek(at)
    header = file.read(_HEADER)
    fields, check = header[: _FIELDS.size], header[_FIELDS.size :]
    tag, kind, step, length, checksum = _FIELDS.unpack(fields)
    right = tag == _TAG and kind in _KINDS
    if not right or _CHECK.unpack(check)[0] != zlib.crc32(fields):
      raise ScheduleError(
          f'{path} at byte {at} has {header[:8]!r}, wanted a frame of a'
          f' schedule, {_TAG!r} and its kind with the right checksum'
      )
    frame = _Frame(kind, step, at + _HEADER, length, checksum)
    if frame.end > size:
      return
    yield frame
    at = frame.end


def _whole_frames(file: BinaryIO) -> Iterator[_Frame]:
  """The frames up to the first that is not whole, whatever is wrong with it.

  To go on writing: a run is not kept from going on by what its record has lost.
  """
  frames = _frames(file, pathlib.Path(file.name))
  while True:
    try:
      frame = next(frames, None)
    except ScheduleError:
      return
    if frame is None:
      return
    yield frame


def _without_times(group: Group) -> Group:
  return dataclasses.replace(
      group,
      trajectories=tuple(
          dataclasses.replace(trajectory, timestamps={})
          for trajectory in group.trajectories
      ),
  )
