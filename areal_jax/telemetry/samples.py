"""Answers for people to read: `samples.jsonl` and `evaluations.jsonl`.

As they were trained, one row an answer, with id, version and log-probability of
every sampled token; and as they were evaluated. The files have a limit in
bytes, because a long run would otherwise fill a disk; the last row says when
the limit was met. What a replay needs is in `schedule.bin`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
import os
import pathlib
from typing import Any

import numpy as np

from areal_jax.telemetry import jsonl


class LimitedLog:
  """Appends rows to a log up to a limit; owned by one thread.

  A file that an earlier attempt of the run left is continued, under the same
  limit.

  Args:
    path: the file.
    limit_bytes: size that the file will not exceed, last row included.

  Raises:
    ValueError: a limit too small for the row that reports it.
  """

  def __init__(self, path: str | os.PathLike, limit_bytes: int):
    note = {'limit_bytes': limit_bytes, 'note': 'limit met, later rows lost'}
    self._note = jsonl.line(note).encode()
    if limit_bytes < len(self._note):
      raise ValueError(
          f'limit_bytes is {limit_bytes}, wanted at least {len(self._note)}'
      )
    self._limit = limit_bytes
    self._file = jsonl.open_to_append(pathlib.Path(path))
    self._size = self._file.seek(0, os.SEEK_END)
    self._full = self._ends_with_note()

  def append(self, row: Mapping[str, Any]) -> bool:
    """Appends a row; returns False where the limit left no room for it."""
    if self._full:
      return False
    line = jsonl.line(row).encode()
    # Room for the note stays free, so that the note itself always fits.
    if self._size + len(line) + len(self._note) > self._limit:
      if self._size + len(self._note) <= self._limit:
        self._append(self._note)
      self._full = True
      return False
    self._append(line)
    return True

  def flush(self) -> None:
    """Hands what was written to the operating system."""
    self._file.flush()

  def offset(self) -> int:
    """Bytes of the file, those included that no flush has written yet."""
    return self._size

  def close(self) -> None:
    """Closes the file. A second call does nothing."""
    self._file.close()

  def _append(self, line: bytes) -> None:
    self._file.write(line)
    self._size += len(line)

  def _ends_with_note(self) -> bool:
    """Returns whether an earlier attempt met the limit in this file."""
    self._file.seek(max(0, self._size - len(self._note)))
    return self._file.read() == self._note


class SampleWriter(LimitedLog):
  """Appends samples to a `LimitedLog`."""

  def write(
      self,
      *,
      prompt: str,
      prompt_ids: Sequence[int] | np.ndarray,
      completion: str,
      reward: float | None,
      ids: Sequence[int] | np.ndarray,
      versions: Sequence[int] | np.ndarray,
      logps: Sequence[float] | np.ndarray,
      step: int,
      draw_index: int,
      sample: int,
      stop_reason: str | None,
  ) -> bool:
    """Appends one sample; returns False where the limit left no room for it.

    Args:
      prompt: text of the ids that the model was fed, special tokens written
        out.
      prompt_ids: [P] int, these ids.
      completion: text that it sampled.
      reward: score, None where scoring gave none.
      ids: [T] int, the sampled tokens, special ones included.
      versions: [T] int, of the weights that sampled each token.
      logps: [T] nats, of the distribution sampled from; written with as many
        digits as float32 needs to be read back in bits.
      step: training step that used it.
      draw_index: draw of its problem.
      sample: member of its group.
      stop_reason: why it ended (a `types.StopReason` or its text).

    Raises:
      ValueError: ids, versions and log-probs differ in length.
    """
    ids = np.asarray(ids, np.int64)
    versions = np.asarray(versions, np.int64)
    logps = np.asarray(logps, np.float32)
    if not ids.shape == versions.shape == logps.shape or ids.ndim != 1:
      raise ValueError(
          f'sample {draw_index}/{sample} has ids {ids.shape}, versions'
          f' {versions.shape} and logps {logps.shape}, wanted one of each a'
          ' token'
      )
    if self._full:
      return False
    return self.append(
        {
            'step': step,
            'draw_index': draw_index,
            'sample': sample,
            'prompt': prompt,
            'prompt_ids': np.asarray(prompt_ids, np.int64),
            'completion': completion,
            'reward': reward,
            'stop_reason': stop_reason,
            'ids': ids,
            'versions': versions,
            'logps': [float(str(logp)) for logp in logps],
        }
    )
