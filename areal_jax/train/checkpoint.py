"""Checkpoints: the whole state of a run at one version, or nothing.

Flows in: the train state, other parts as bytes or JSON. Flows out: a folder for
each saved step,

  00000050/
    state/          arrays, written by orbax
    <part>          one file a part
    manifest.json   schema version, step, tensors, size and hash of every file
    COMMITTED       hash of the manifest; written last

A folder without its marker, or with a file that is not what the manifest says,
is no checkpoint: it is refused by name and the one before it stands. Nothing is
renamed, because object stores cannot do that in one piece. All paths are
`etils.epath`, so a folder may be gs://.

`Checkpointer.save` returns as soon as the arrays are copied off the devices; a
thread does the writing. What the parts mean is left to `areal_jax.resume`.
"""

from __future__ import annotations

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import logging
import math
import os
import re
import threading
import time
from typing import Any, Callable, Mapping, Sequence

from etils import epath
import jax
import orbax.checkpoint as ocp

from areal_jax.config import require
from areal_jax.mesh.host import require_whole
from areal_jax.telemetry import jsonl
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.metrics import METRICS
from areal_jax.train.state import TrainState

SCHEMA_VERSION = 2  # 1 had no counters of its own for each network
STATE = 'state'
MANIFEST = 'manifest.json'
COMMITTED = 'COMMITTED'
METRIC = 'metric.json'  # of the version, for `keep_best`; may come later

# bytes, whatever JSON holds, or a function that makes one of them when the
# thread that writes asks for it.
Part = bytes | Any | Callable[[], bytes | Any]
Shapes = Mapping[str, jax.ShapeDtypeStruct]

_STEP = re.compile(r'\d{8,}')
_PARAMETERS = ('trainable', 'frozen')  # parts of a role, see `state.Role`
_CHUNK = 1 << 22


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written or must not be read; says why."""


@dataclasses.dataclass
class CheckpointSettings:
  """When the state of a run is saved, and what is kept.

  Attributes:
    every: steps from one to the next; 0 for none but the last.
    at_end: whether the last step is saved, whatever `every` says.
    keep_last: how many of the newest are kept.
    keep_best: name of a metric that training or evaluation knows, such as
      'eval_accuracy'; the checkpoint in which it is highest is kept too, and
      exported at the end. Empty for none. A metric of evaluation rates the
      version that was evaluated, one of training the version that gave most of
      the answers that it is of. A checkpoint is kept as long as its rating is
      to come.
    keep_every: those of steps that are multiples of it are kept for good; 0 for
      none.
    wait_s: seconds that copying the arrays of one off the devices may take, and
      that writing it may take; what takes longer has failed and is told.
    folder: where they go, in a folder of the run's name; may be gs://. Empty
      for 'checkpoints' in the folder of the run.
  """

  every: int = 0
  at_end: bool = True
  keep_last: int = 2
  keep_best: str = ''
  keep_every: int = 0
  wait_s: float = 1800.0
  folder: str = ''

  def validate(self, at: str) -> None:
    for name, least in (('every', 0), ('keep_last', 1), ('keep_every', 0)):
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')
    require(0 < self.wait_s < math.inf, f'{at}.wait_s', self.wait_s,
            'more than 0 and finite: every wait ends')  # fmt: skip
    require(
        not self.keep_best or self.keep_best in METRICS,
        f'{at}.keep_best',
        self.keep_best,
        'the name of a metric, which docs/metrics.md lists',
    )

  @property
  def best_by_evaluation(self) -> bool:
    """Whether evaluation rates checkpoints, and not training."""
    return self.keep_best.startswith('eval_')

  def due(self, step: int, last: int) -> bool:
    """Whether this step is saved, in a run whose last step is `last`."""
    if step == last and self.at_end:
      return True
    return self.every > 0 and step % self.every == 0


@dataclasses.dataclass(frozen=True)
class Saved:
  """A whole checkpoint.

  Attributes:
    path: its folder.
    step: training steps done.
    version: of the policy.
    tensors: dtype and shape of every array, by name.
    files: names of its parts.
  """

  path: epath.Path
  step: int
  version: int
  tensors: Mapping[str, tuple[str, tuple[int, ...]]]
  files: tuple[str, ...]

  def read(self, part: str) -> bytes:
    """The bytes of a part.

    Raises:
      CheckpointError: it has no such part.
    """
    if part not in self.files:
      raise CheckpointError(
          f'checkpoint {self.path} has no part {part!r}, wanted one of'
          f' {sorted(f for f in self.files if "/" not in f)}'
      )
    return (self.path / part).read_bytes()

  def read_json(self, part: str) -> Any:
    """The value of a part that was given as JSON."""
    return json.loads(self.read(part))


# Finding and reading.


def steps(folder: epath.PathLike) -> list[int]:
  """Steps of all checkpoints in a folder, whole or not, oldest first."""
  folder = epath.Path(folder)
  if not folder.is_dir():
    return []
  names = [path.name for path in folder.iterdir()]
  return sorted(int(name) for name in names if _STEP.fullmatch(name))


def at_step(folder: epath.PathLike, step: int) -> epath.Path:
  """Folder of the checkpoint of a step."""
  return _absolute(folder) / f'{step:08d}'


def _absolute(path: epath.PathLike) -> epath.Path:
  """The path as orbax wants it; one with a scheme, gs://, is absolute."""
  text = os.fspath(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def is_one(path: epath.PathLike) -> bool:
  """Whether a path is meant to be a checkpoint, whole or not."""
  path = epath.Path(path)
  return (path / MANIFEST).exists() or (path / COMMITTED).exists()


def verify(path: epath.PathLike) -> Saved:
  """Reads and hashes all of a checkpoint.

  Raises:
    CheckpointError: it is not whole; names the file, what was seen, what is
      wanted.
  """
  path = _absolute(path)
  try:
    return _verified(path)
  except IsADirectoryError as error:
    raise CheckpointError(
        f'checkpoint {path}: {error.filename} is a folder, wanted a file'
    ) from error


def _verified(path: epath.Path) -> Saved:
  marker = path / COMMITTED
  if not marker.exists():
    raise CheckpointError(
        f'checkpoint {path} is incomplete: it has no {COMMITTED}'
    )
  manifest_file = path / MANIFEST
  if not manifest_file.exists():
    raise CheckpointError(f'checkpoint {path}: {MANIFEST} is missing')
  text = manifest_file.read_bytes()
  seen = hashlib.sha256(text).hexdigest()
  wanted = marker.read_bytes().decode(errors='replace').strip()
  if seen != wanted:
    raise CheckpointError(
        f'checkpoint {path}: {MANIFEST} has sha256 {seen}, wanted {wanted} by'
        f' {COMMITTED}'
    )
  manifest = json.loads(text)
  if manifest['schema_version'] != SCHEMA_VERSION:
    raise CheckpointError(
        f'checkpoint {path} has schema_version {manifest["schema_version"]},'
        f' wanted {SCHEMA_VERSION}'
    )
  for name, entry in manifest['files'].items():
    _verify_file(path, name, entry)
  return Saved(
      path,
      manifest['step'],
      manifest['version'],
      {n: (d, tuple(s)) for n, (d, s) in manifest['tensors'].items()},
      tuple(manifest['files']),
  )


def _verify_file(path: epath.Path, name: str, entry: Mapping[str, Any]) -> None:
  file = path / name
  if not file.exists():
    raise CheckpointError(
        f'checkpoint {path}: {name} is missing, wanted {entry["bytes"]} bytes'
    )
  seen = _described(file)
  for what in ('bytes', 'sha256'):
    if seen[what] != entry[what]:
      raise CheckpointError(
          f'checkpoint {path}: {name} has {what} {seen[what]}, wanted'
          f' {entry[what]} by {MANIFEST}'
      )


def _described(file: epath.Path) -> dict[str, Any]:
  """Size and hash of a file, as the manifest has them."""
  digest, size = hashlib.sha256(), 0
  with file.open('rb') as stream:
    while chunk := stream.read(_CHUNK):
      digest.update(chunk)
      size += len(chunk)
  return {'bytes': size, 'sha256': digest.hexdigest()}


def latest(folder: epath.PathLike) -> tuple[Saved | None, tuple[str, ...]]:
  """The newest whole checkpoint, and why each newer one is refused."""
  refused = []
  for step in reversed(steps(folder)):
    try:
      return verify(at_step(folder, step)), tuple(refused)
    except CheckpointError as error:
      refused.append(str(error))
  return None, tuple(refused)


def restore_state(
    saved: Saved, like: TrainState, padded: Mapping[str, int] | None = None
) -> TrainState:
  """The train state, placed as `like` says, on any mesh.

  Args:
    saved: a whole checkpoint.
    like: `jax.ShapeDtypeStruct` with shardings in place of arrays.
    padded: axis by name of those parameters that may be padded to another
      length than when they were saved: the vocabulary is, so that it divides
      over a mesh. Zeros come or go at its end, and at that of the moments,
      those too that have one axis of their parameter only.

  Raises:
    CheckpointError: its tensors are not those of `like`; names the first.
  """
  wanted, tree = _named_leaves(like)
  _require_tensors(saved, wanted, saved.tensors, padded or {})
  found = _read_tensors(saved, wanted)
  roles = jax.tree.unflatten(tree, [found[name] for name in wanted])
  return TrainState(roles, version=saved.version)


def restore_params(
    saved: Saved,
    like: Mapping[str, Any],
    padded: Mapping[str, int] | None = None,
    *,
    matching: bool = False,
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """The policy's parameters alone.

  Args:
    saved: a whole checkpoint.
    like: their `jax.ShapeDtypeStruct` with shardings.
    padded: see `restore_state`.
    matching: whether tensors that are missing or of another shape are left out
      instead of refused.

  Returns:
    Parameters by name ('blocks/query'), and the names that were left out.

  Raises:
    CheckpointError: a tensor is missing or has another shape or dtype.
  """
  leaves = jax.tree.leaves_with_path(like)
  saved_as = {}
  for path, leaf in leaves:
    name = name_of(path)
    where = f'roles/policy/trainable/{name}'
    if where not in saved.tensors:
      frozen = f'roles/policy/frozen/{name}'
      where = frozen if frozen in saved.tensors else where
    saved_as[where] = (name, leaf)
  wanted = {where: leaf for where, (_, leaf) in saved_as.items()}
  left = ()
  if matching:
    lengths = _padded_lengths(saved, wanted, padded or {})
    left = tuple(
        where
        for where, leaf in wanted.items()
        if _difference(saved, where, leaf, lengths)
    )
    wanted = {n: leaf for n, leaf in wanted.items() if n not in left}
  else:
    _require_tensors(saved, wanted, wanted, padded or {})
  found = _read_tensors(saved, wanted)
  return (
      {saved_as[where][0]: array for where, array in found.items()},
      tuple(saved_as[where][0] for where in left),
  )


def _require_tensors(
    saved: Saved,
    wanted: Shapes,
    known: Mapping[str, Any],
    padded: Mapping[str, int],
) -> None:
  """Refuses tensors that differ from the wanted ones or have no place."""
  lengths = _padded_lengths(saved, wanted, padded)
  for name, leaf in wanted.items():
    difference = _difference(saved, name, leaf, lengths)
    if difference:
      raise CheckpointError(f'checkpoint {saved.path}: {difference}')
  extra = sorted(set(known) - set(wanted))
  if extra:
    raise CheckpointError(
        f'checkpoint {saved.path}: {len(extra)} tensors have no place in this'
        f' run: {", ".join(extra[:4])}'
    )


def _padded_lengths(
    saved: Saved, wanted: Shapes, padded: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
  """Saved and wanted length of the padded axis, by name of the parameter."""
  lengths = {}
  for name, leaf in wanted.items():
    _, role, *_ = name.split('/')
    parameter = name.rpartition('/')[2]
    kinds = [f'roles/{role}/{kind}/{parameter}' for kind in _PARAMETERS]
    if name in kinds and name in saved.tensors and parameter in padded:
      axis, shape = padded[parameter], saved.tensors[name][1]
      if len(shape) == len(leaf.shape):
        lengths[parameter] = shape[axis], leaf.shape[axis]
  return lengths


def _difference(
    saved: Saved,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    lengths: Mapping[str, tuple[int, int]],
) -> str:
  """What is wrong with a saved tensor; empty if nothing is."""
  if name not in saved.tensors:
    return f'tensor {name} is missing'
  dtype, shape = saved.tensors[name]
  # A factored moment has the axes of its parameter but one, so the padded one
  # is known by its length.
  padding = lengths.get(name.rpartition('/')[2])
  right = len(shape) == len(leaf.shape) and all(
      one == other or (one, other) == padding
      for one, other in zip(shape, leaf.shape)
  )
  if right and dtype == str(leaf.dtype):
    return ''
  return (
      f'tensor {name} is {dtype} of shape {shape}, wanted {leaf.dtype} of shape'
      f' {tuple(leaf.shape)}'
  )


def _read_tensors(saved: Saved, wanted: Shapes) -> dict[str, jax.Array]:
  """Arrays by name, cut or padded with zeros to their wanted shape."""
  if not wanted:
    return {}
  arguments = {
      name: ocp.ArrayRestoreArgs(
          sharding=leaf.sharding,
          global_shape=leaf.shape,
          dtype=leaf.dtype,
          strict=False,
      )
      for name, leaf in wanted.items()
  }
  with ocp.Checkpointer(_handler()) as reader:
    found = reader.restore(
        saved.path / STATE,
        args=ocp.args.PyTreeRestore(
            item=_nested(wanted),
            restore_args=_nested(arguments),
            partial_restore=True,
        ),
    )
  return {name: _at(found, name) for name in wanted}


# Writing.


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
    self._folder = _absolute(folder)
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
    """Whether one is being written."""
    return self._pending is not None and not self._pending[1].done()

  def explain(self) -> str:
    """What is being written, for how long; any thread may ask."""
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
    tensors, _ = _named_leaves(state)
    version = state.version
    # Not orbax's way of renaming a folder when it is written.
    with ocp.AsyncCheckpointer(
        _handler(),
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
        temporary_path_class=ocp.path.atomicity.CommitFileTemporaryPath,
    ) as writer:
      writer.save(path / STATE, args=ocp.args.PyTreeSave(_nested(tensors)))
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
        str(file.relative_to(path)): _described(file) for file in _walk(path)
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


# Helpers.


def _handler() -> ocp.PyTreeCheckpointHandler:
  """Reads and writes arrays, each from one replica.

  By default orbax lets all replicas write a part, which it cuts out by a
  program that it compiles: in the middle of a run.
  """
  arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
  return ocp.PyTreeCheckpointHandler(
      type_handler_registry=ocp.type_handlers.create_type_handler_registry(
          (jax.Array, arrays)
      )
  )


def _named_leaves(state: TrainState) -> tuple[dict[str, Any], Any]:
  """Arrays of a state by name, such as 'roles/policy/trainable/embedding'."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(state.roles)
  return {f'roles/{name_of(path)}': leaf for path, leaf in leaves}, structure


def name_of(path: Sequence[Any]) -> str:
  """A path in a tree as tensors are named: 'blocks/query'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def _nested(named: Mapping[str, Any]) -> dict[str, Any]:
  """{'a/b': x} -> {'a': {'b': x}}."""
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    *above, last = name.split('/')
    place = tree
    for part in above:
      place = place.setdefault(part, {})
    place[last] = leaf
  return tree


def _at(tree: Mapping[str, Any], name: str) -> Any:
  for part in name.split('/'):
    tree = tree[part]
  return tree


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
