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

`checkpoint_writer.py` writes them, `checkpoint_tensors.py` reads the arrays,
and this file finds and verifies whole ones. What the parts mean is left to
`areal_jax.resume`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import re
from typing import Any, Mapping

from etils import epath

from areal_jax.config import require
from areal_jax.telemetry.metrics import METRICS

SCHEMA_VERSION = 2  # 1 had no counters of its own for each network
STATE = 'state'
MANIFEST = 'manifest.json'
COMMITTED = 'COMMITTED'
METRIC = 'metric.json'  # of the version, for `keep_best`; may come later


_STEP = re.compile(r'\d{8,}')
_CHUNK = 1 << 22


class CheckpointError(RuntimeError):
  """A checkpoint that cannot be written or must not be read; says why."""


@dataclasses.dataclass
class CheckpointSettings:
  """Settings of when the state of a run is saved, and what is kept.

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
    """Returns whether a step is saved, in a run whose last step is `last`."""
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
  return absolute(folder) / f'{step:08d}'


def absolute(path: epath.PathLike) -> epath.Path:
  """The path as orbax wants it; one with a scheme, gs://, is absolute."""
  text = os.fspath(path)
  return epath.Path(text if '://' in text else os.path.abspath(text))


def is_one(path: epath.PathLike) -> bool:
  """Returns whether a path is meant to be a checkpoint, whole or not."""
  path = epath.Path(path)
  return (path / MANIFEST).exists() or (path / COMMITTED).exists()


def verify(path: epath.PathLike) -> Saved:
  """Reads and hashes all of a checkpoint.

  Raises:
    CheckpointError: it is not whole; names the file, what was seen, what is
      wanted.
  """
  path = absolute(path)
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
  seen = described(file)
  for what in ('bytes', 'sha256'):
    if seen[what] != entry[what]:
      raise CheckpointError(
          f'checkpoint {path}: {name} has {what} {seen[what]}, wanted'
          f' {entry[what]} by {MANIFEST}'
      )


def described(file: epath.Path) -> dict[str, Any]:
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
