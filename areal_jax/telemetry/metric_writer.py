"""Writes the values of metrics to metrics.jsonl and to TensorBoard.

A row of values by name comes in; names that the table `metrics.py` does not
have are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
import math
import numbers
import os
import pathlib
import time
from typing import Any

import tensorboardX
from tensorboardX.proto import summary_pb2

from areal_jax.telemetry import jsonl, run_folder
from areal_jax.telemetry.metrics import GROUP_OF, METRICS, registered


class MetricWriter:
  """Appends rows to metrics.jsonl and TensorBoard; owned by one thread.

  A row of metrics.jsonl holds `step`, `version`, `wall` (seconds since 1970),
  the values by name, and `nonfinite`: the names of those that were NaN or
  infinite, whose values are null. Each row is on disk when `write` returns.

  Args:
    folder: folder of the run; a file there is continued.
    after: last step of an earlier attempt that this one goes on from;
      TensorBoard then shows none of the later steps of that attempt.
    wall: clock of dates, in seconds since 1970.
    more: gets (step, version, values) of each row as well, after it is on disk.
  """

  def __init__(
      self,
      folder: str | os.PathLike,
      *,
      after: int | None = None,
      wall: Callable[[], float] = time.time,
      more: Callable[[int, int, Mapping[str, Any]], None] | None = None,
  ):
    folder = pathlib.Path(folder)
    self._wall = wall
    self._more = more
    self._file = jsonl.open_to_append(folder / run_folder.METRICS)
    self._board = tensorboardX.SummaryWriter(
        str(folder / run_folder.TENSORBOARD),
        flush_secs=5,
        purge_step=None if after is None else after + 1,
    )

  def write(self, step: int, version: int, values: Mapping[str, Any]) -> None:
    """Appends one row.

    Args:
      step: training steps done.
      version: the version that the values speak of.
      values: numbers (or arrays of one number on the host) by metric name.

    Raises:
      ValueError: a name that is not in `METRICS`.
      TypeError: a value that is not one number.
    """
    unknown = sorted(name for name in values if registered(name) not in METRICS)
    if unknown:
      raise ValueError(
          f'metrics {unknown} are not registered, wanted names of METRICS in'
          ' areal_jax/telemetry/metrics.py (add them there with unit,'
          ' definition and range)'
      )
    known = {name: _number(name, value) for name, value in values.items()}
    wall = self._wall()
    row = {'step': int(step), 'version': int(version), 'wall': wall}
    nonfinite = [n for n, v in known.items() if not math.isfinite(v)]
    row |= known | dict.fromkeys(nonfinite)
    row['nonfinite'] = nonfinite
    self._file.write(jsonl.line(row).encode())
    self._file.flush()
    # One event for all: each crosses a queue between threads, by way of a pipe.
    # NaN is a value there: TensorBoard marks the place with a triangle.
    shown = summary_pb2.Summary(
        value=[
            summary_pb2.Summary.Value(
                tag=f'{GROUP_OF[registered(name)]}/{name}', simple_value=value
            )
            for name, value in known.items()
        ]
    )
    self._board.file_writer.add_summary(shown, step, walltime=wall)
    if self._more is not None:
      self._more(int(step), int(version), known)

  def offset(self) -> int:
    """Bytes of metrics.jsonl."""
    return self._file.seek(0, os.SEEK_END)

  def close(self) -> None:
    """Writes what is waiting and closes the files. Again does nothing."""
    self._file.close()
    self._board.close()


def _number(name: str, value: Any) -> int | float:
  """The value as a Python number; whole numbers stay whole."""
  if isinstance(value, numbers.Integral):
    return int(value)
  try:
    if isinstance(value, str):
      raise TypeError('text')
    return float(value)
  except (TypeError, ValueError) as error:
    raise TypeError(f'metric {name} is {value!r}, wanted one number') from error
