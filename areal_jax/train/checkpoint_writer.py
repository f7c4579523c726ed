"""Writes the checkpoints of one run and deletes old ones.

`Checkpointer.save` returns as soon as the arrays are copied off the devices; a
thread does the writing. The form of a checkpoint is in `checkpoint.py`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import hashlib
import json
import logging
import math
import threading
import time
from typing import Any, Callable, Mapping

from etils import epath
import orbax.checkpoint as ocp

from areal_jax.config import require
from areal_jax.mesh.host import require_whole
from areal_jax.telemetry import jsonl
from areal_jax.telemetry.events import EventLog
from areal_jax.train.checkpoint import (
    COMMITTED,
    MANIFEST,
    METRIC,
    SCHEMA_VERSION,
    STATE,
    CheckpointError,
    CheckpointSettings,
    Saved,
    absolute,
    at_step,
    described,
    steps,
    verify,
)
from areal_jax.train.checkpoint_tensors import handler, named_leaves, nested
from areal_jax.train.state import TrainState

# bytes, whatever JSON holds, or a function that makes one of them when the
# thread that writes asks for it.
Part = bytes | Any | Callable[[], bytes | Any]


class Checkpointer:
  """Saves the states of one run, one at a time, and deletes old ones.

  Owned by one thread. After an error the run may go on: the checkpoints before
  it stand, and the next `save` tries anew.

  Args:
    folder: of all checkpoints of the run; made with the first one.
    settings: what is kept.
    events: where spans go.
    start: step of the checkpoint that the run goes on from. Newer ones are of a
      line that ends there, and lose their markers.
    awaited: whether a rating of that one is to come.

  Attributes:
    saved: how many were written whole.
    failed: how many could not be.

  Raises:
    ConfigError: the folder holds checkpoints, and none to go on from is named.
  """

  def __init__(
      self,
      folder: epath.PathLike,
      settings: CheckpointSettings,
      *,
      events: EventLog,
      start: int | None = None,
      awaited: bool = False,
  ):
    self._folder = absolute(folder)
    self._settings = settings
    self._events = events
    self.saved = 0
    self.failed = 0
    self._pending: tuple[int, concurrent.futures.Future] | None = None
    self._gave_up = False  # a write took longer than `wait_s`
    self._begun = 0.0  # monotonic second of the last save
    self._ratings: collections.deque[concurrent.futures.Future] = (
        collections.deque()
    )
    self._whole: list[int] = []  # steps of this line, oldest first
    for step in steps(folder):
      marker = at_step(folder, step) / COMMITTED
      if not marker.exists():
        continue
      require(start is not None, 'the folder of checkpoints', str(folder),
              'one without any, or a run that goes on from them')  # fmt: skip
      if step <= start:
        self._whole.append(step)
      else:
        marker.unlink()
    # Steps whose rating is to come, and ratings of steps that are to be saved.
    self._awaited: set[int] = {start} if awaited else set()
    self._early: dict[int, float] = {}
    self._thread = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='checkpoint'
    )
    self._quiet = _WithoutOrbax()
    logging.getLogger('absl').addFilter(self._quiet)

  def save(
      self,
      step: int,
      state: TrainState,
      parts: Mapping[str, Part],
      *,
      awaited: bool = False,
  ) -> None:
    """Saves a state; returns once its arrays are copied off the devices.

    Waits for the one before, if it is still being written (`busy`).

    Args:
      step: training steps done.
      state: may be donated to a step as soon as this returns.
      parts: files of the checkpoint by name.
      awaited: whether `rate` is going to be called for this step. It is kept
        until then.

    Raises:
      CheckpointError: the one before could not be written. Call again to save
        this one, whose own failure the next call raises.
    """
    require_whole(state.roles, 'the state to be saved: ')
    self.check()
    self.wait()
    copied = threading.Event()
    future = self._thread.submit(
        self._write, step, state, dict(parts), awaited, copied
    )
    self._pending = (step, future)
    self._begun = time.monotonic()
    future.add_done_callback(lambda _: copied.set())
    limit = self._settings.wait_s
    if not copied.wait(limit):
      raise CheckpointError(
          f'checkpoint of step {step}: after {limit:g} s its arrays are not'
          ' copied off the devices'
      )

  @property
  def busy(self) -> bool:
    """Returns whether a checkpoint is being written."""
    return self._pending is not None and not self._pending[1].done()

  def explain(self) -> str:
    """Describes what is being written; any thread may call it."""
    pending = self._pending
    if pending is None or pending[1].done():
      return 'no checkpoint is being written'
    seconds = time.monotonic() - self._begun
    return (
        f'the checkpoint of step {pending[0]} is being written to'
        f' {self._folder} for {seconds:.1f} s'
    )

  def rate(self, step: int, metric: float | None) -> None:
    """Tells the value of `settings.keep_best` for a version.

    In its turn behind what is being written. The version may still have to be
    saved. Ratings come in the order of versions, so none of an earlier version
    is awaited any more.

    Args:
      step: that the version is saved under.
      metric: the value; None if there is none after all.
    """
    self._ratings.append(self._thread.submit(self._rate, step, metric))

  def check(self) -> None:
    """Raises `CheckpointError` if what was being written could not be."""
    while self._ratings and self._ratings[0].done():
      error = self._ratings.popleft().exception()
      if error is not None:
        raise CheckpointError(
            f'a rating ({METRIC}) in {self._folder} could not be written, or a'
            f' checkpoint not be deleted after one: {error}'
        ) from error
    if self._pending is not None and self._pending[1].done():
      self.wait()

  def wait(self) -> None:
    """Waits for what is being written.

    Raises:
      CheckpointError: it could not be, or takes longer than `settings.wait_s`.
    """
    if self._pending is None:
      return
    step, future = self._pending
    path = at_step(self._folder, step)
    try:
      error = future.exception(self._settings.wait_s)
    except concurrent.futures.TimeoutError as timeout:
      self._gave_up = True
      raise CheckpointError(
          f'checkpoint {path} is not written after {self._settings.wait_s:g} s'
      ) from timeout
    self._pending = None
    if error is not None:
      self.failed += 1
      raise CheckpointError(
          f'checkpoint {path} could not be written:'
          f' {type(error).__name__}: {" ".join(str(error).split())}'
      ) from error
    self.saved += 1

  def best(self) -> Saved | None:
    """The kept checkpoint whose metric is highest; None if none has any.

    No rating is awaited after this.

    Raises:
      CheckpointError: it is not whole.
    """
    self._ratings.append(self._thread.submit(self._await_none))
    ratings = self._thread.submit(lambda: None)  # behind them all
    ratings.result(self._settings.wait_s)
    step = self._best()
    return None if step is None else verify(at_step(self._folder, step))

  def close(self) -> None:
    """Lets the thread finish what it has. Raises nothing; see `wait`.

    A write that `wait` gave up is not waited for again.
    """
    self._thread.shutdown(wait=not self._gave_up)
    logging.getLogger('absl').removeFilter(self._quiet)

  # In the thread.

  def _write(
      self,
      step: int,
      state: TrainState,
      parts: Mapping[str, Part],
      awaited: bool,
      copied: threading.Event,
  ) -> None:
    start = time.monotonic()
    path = at_step(self._folder, step)
    if path.exists():
      path.rmtree()  # what an earlier attempt left of it
    path.mkdir(parents=True)
    tensors, _ = named_leaves(state)
    version = state.version
    # Not orbax's way of renaming a folder when it is written.
    with ocp.AsyncCheckpointer(
        handler(),
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
    ) as writer:
      writer.save(path / STATE, args=ocp.args.PyTreeSave(nested(tensors)))
      shapes = {n: (str(t.dtype), list(t.shape)) for n, t in tensors.items()}
      del state, tensors  # donated from here on
      copied.set()
      self._events.record(
          'copy', 'checkpoint', start, time.monotonic() - start, version=step
      )
      for name, part in parts.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(_part(part))
      writer.wait_until_finished()
    files = {
        str(file.relative_to(path)): described(file) for file in _walk(path)
    }
    manifest = {
        'schema_version': SCHEMA_VERSION,
        'step': step,
        'version': version,
        'wall': time.time(),
        'tensors': shapes,
        'files': files,
    }
    text = json.dumps(manifest, indent=1).encode()
    (path / MANIFEST).write_bytes(text)
    if step in self._early:
      self._write_metric(step, self._early[step])
    self._early = {s: value for s, value in self._early.items() if s > step}
    # What was flushed to the logs by now is what the parts speak of.
    self._events.flush()
    (path / COMMITTED).write_text(hashlib.sha256(text).hexdigest() + '\n')
    self._whole.append(step)
    if awaited and not (path / METRIC).exists():
      self._awaited.add(step)
    self._delete_old()
    self._events.record(
        'write',
        'checkpoint',
        start,
        time.monotonic() - start,
        version=step,
        bytes=sum(entry['bytes'] for entry in files.values()),
    )

  def _rate(self, step: int, metric: float | None) -> None:
    if metric is not None and math.isfinite(metric):
      if step in self._whole:
        self._write_metric(step, metric)
      elif not self._whole or step > self._whole[-1]:
        self._early[step] = metric
    self._awaited = {s for s in self._awaited if s > step}
    if self._whole:
      self._delete_old()

  def _await_none(self) -> None:
    self._awaited.clear()
    if self._whole:
      self._delete_old()

  def _write_metric(self, step: int, metric: float) -> None:
    value = {'name': self._settings.keep_best, 'value': float(metric)}
    (at_step(self._folder, step) / METRIC).write_text(json.dumps(value))

  def _best(self) -> int | None:
    if not self._settings.keep_best:
      return None
    name = self._settings.keep_best
    values = {s: _metric(at_step(self._folder, s), name) for s in self._whole}
    rated = [(value, s) for s, value in values.items() if value is not None]
    return max(rated)[1] if rated else None  # of equal ones the newest

  def _delete_old(self) -> None:
    settings = self._settings
    kept = {*self._whole[-settings.keep_last :], self._best(), *self._awaited}
    if settings.keep_every:
      kept |= {s for s in self._whole if s % settings.keep_every == 0}
    for step in steps(self._folder):
      # A newer one without a marker is of a line that was left; its step comes.
      if step not in kept and step <= self._whole[-1]:
        path = at_step(self._folder, step)
        (path / COMMITTED).unlink(missing_ok=True)  # first: half of it is none
        path.rmtree()
    self._whole = [step for step in self._whole if step in kept]


class _WithoutOrbax(logging.Filter):
  """orbax logs a failed write five times with its traceback; we raise it."""

  def filter(self, record: logging.LogRecord) -> bool:
    return 'orbax' not in record.pathname


def _part(part: Part) -> bytes:
  value = part() if callable(part) else part
  if isinstance(value, bytes):
    return value
  return (json.dumps(jsonl.plain(value), indent=1) + '\n').encode()


def _walk(folder: epath.Path) -> list[epath.Path]:
  """All files below a folder, sorted."""
  found = []
  for path in sorted(folder.iterdir()):
    found += _walk(path) if path.is_dir() else [path]
  return found


def _metric(path: epath.Path, name: str) -> float | None:
  """The rating of a checkpoint; None if there is none that can be read."""
  file = path / METRIC
  if not file.exists():
    return None
  try:
    found = json.loads(file.read_bytes())
  except ValueError:
    return None  # it is about which to keep, and no reason to stop
  return found['value'] if found['name'] == name else None
