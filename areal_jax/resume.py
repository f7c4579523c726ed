"""Going on with a run: where from, with what, and how a checkpoint holds it.

`find` says what `--config.resume` means: which folder, which checkpoint. A
checkpoint holds, beside the arrays of `train.checkpoint`, everything that
decides how the run goes on; `parts` makes these files and `read` takes them
apart again:

  run.json       step, version, seed, ledger, data position, evaluation
                 schedule, length of every log file, meshes, running sums
  records.npz    finished groups with their tokens, draws in flight, the state
                 of the generator that shuffles rewards
  config.json    the resolved settings
  policy.json    the policy's shape
  tokenizer...   the tokenizer's files

Logs are cut back to what the checkpoint speaks of, so nothing is told twice.
What the machines do with all this is left to `session.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import hashlib
import pathlib
import shutil
from typing import Any, Callable, Iterator, Mapping, Sequence

from etils import epath
import jax
import numpy as np

from areal_jax import records
from areal_jax.config import ConfigError, require
from areal_jax.data.stream import ProblemStream
from areal_jax.ledger import Ledger
from areal_jax.mesh.slices import Slices
from areal_jax.rollout.controller import Snapshot
from areal_jax.telemetry import jsonl, run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.schedule import ScheduleWriter
from areal_jax.tokenizer import special_tokens
from areal_jax.train import checkpoint, pretrained
from areal_jax.train.checkpoint import (
    CheckpointError,
    CheckpointSettings,
    Saved,
)
from areal_jax.train.checkpoint_writer import Checkpointer, Part
from areal_jax.train.state import TrainState
from areal_jax.types import DropReason, Group

RUN = 'run.json'
RECORDS = 'records.npz'
CONFIG = 'config.json'
TOKENIZER = 'tokenizer/'  # before the names of the tokenizer's files

LOGS = (
    run_folder.METRICS,
    run_folder.EVENTS,
    run_folder.SAMPLES,
    run_folder.EVALUATIONS,
    run_folder.SCHEDULE,
)
_CRASH_BYTES = 1 << 34  # of one batch: no limit in practice
_WANTED = "empty, 'auto', the folder of a run, or a checkpoint"


@dataclasses.dataclass(frozen=True)
class Start:
  """The place where a run begins.

  Attributes:
    folder: of the run that goes on; None to make a new one.
    saved: the checkpoint that it goes on from; None to begin at the beginning.
    logs: folder whose logs a new one takes over, up to the checkpoint.
    refused: why newer checkpoints are not taken.
  """

  folder: pathlib.Path | None = None
  saved: Saved | None = None
  logs: pathlib.Path | None = None
  refused: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class SavedRun:
  """The part of a checkpoint beside arrays, settings and files.

  Attributes:
    snapshot: ledger, groups, draws and data position, at one cut.
    shuffle: state of the generator that deals out rewards, `random.getstate`.
    seed: of the run.
    attempt: which start of the run saved it, from 0.
    evaluation: what has been evaluated and what was under way.
    logs: bytes of every log file that speak of no later step.
    sums: running sums over the steps so far.
    digests: `Prepared.data_digests`; none in checkpoints of before there were
      any.
    began_exact: whether the run began at eta = 0 before there was a setting
      `rollout.exact`, when eta = 0 alone meant equal bits.
  """

  snapshot: Snapshot
  shuffle: tuple[Any, ...]
  seed: int
  attempt: int
  evaluation: dict[str, Any]
  logs: dict[str, int]
  sums: dict[str, Any]
  digests: dict[str, str] = dataclasses.field(default_factory=dict)
  began_exact: bool = False

  @property
  def version(self) -> int:
    """Version of the policy, the number of steps done."""
    return self.snapshot.ledger.version


# Where from.


def folder_of(run: pathlib.Path, folder: str) -> epath.Path:
  """The folder of a run's checkpoints.

  Args:
    run: the folder of the run.
    folder: `CheckpointSettings.folder`.
  """
  if folder:
    return epath.Path(folder) / run.name
  return epath.Path(run) / run_folder.CHECKPOINTS


def find(resume: str, output: str, name: str, folder: str) -> Start:
  """Finds the place that `--config.resume` names.

  Args:
    resume: its value.
    output: folder of all runs.
    name: of this run.
    folder: `CheckpointSettings.folder`.

  Raises:
    ConfigError: it names nothing that could go on.
  """
  run = pathlib.Path(output) / name
  if resume == 'auto':
    return _last_of(run, folder, anew=True)
  if not resume:
    # Elsewhere than in the run's own folder, which is new, there may be some.
    held = checkpoint.steps(folder_of(run, folder)) if folder else []
    require(not held, 'config.checkpoint.folder', folder,
            f'one without checkpoints of a run {name!r}, or resume=auto'
            )  # fmt: skip
    return Start()
  place = epath.Path(resume)
  if checkpoint.is_one(place):
    try:
      saved = checkpoint.verify(place)
    except CheckpointError as error:
      raise ConfigError(f'config.resume: {error}') from error
    source = pathlib.Path(resume).absolute().parent.parent
    known = (source / run_folder.METRICS).is_file()
    return Start(saved=saved, logs=source if known else None)
  local = pathlib.Path(resume)
  if (local / run_folder.CONFIG).is_file() or (
      local / run_folder.CHECKPOINTS
  ).is_dir():
    return _last_of(local, folder, anew=False)
  require(bool(checkpoint.steps(place)), 'config.resume', resume, _WANTED)
  saved, refused = checkpoint.latest(place)
  _require_whole(saved, refused, resume)
  return Start(saved=saved, refused=refused)


def _last_of(run: pathlib.Path, folder: str, *, anew: bool) -> Start:
  """The last whole checkpoint of a run.

  Args:
    run: its folder.
    folder: `CheckpointSettings.folder`.
    anew: whether a run that was killed before its first one starts anew.
  """
  where = folder_of(run, folder)
  saved, refused = checkpoint.latest(where)
  if saved is None:
    committed = [
        step
        for step in checkpoint.steps(where)
        if (checkpoint.at_step(where, step) / checkpoint.COMMITTED).exists()
    ]
    # Those of a killed first attempt have no marker. Where there was a whole
    # one, starting anew would throw the run away without a word.
    if not anew or committed:
      _require_whole(None, refused or (f'{where} holds none',), str(run))
    ended = run / run_folder.SUMMARY
    require(not ended.exists(), 'config.resume', 'auto',
            f'another name: {run} is a run that has ended, and saved no'
            ' checkpoint')  # fmt: skip
  return Start(folder=run, saved=saved, refused=refused)


def _require_whole(
    saved: Saved | None, refused: tuple[str, ...], at: str
) -> None:
  if saved is None:
    raise ConfigError(
        f'config.resume: {at} has no whole checkpoint: {"; ".join(refused)}'
    )


# What a checkpoint holds.


@dataclasses.dataclass(frozen=True)
class RunIdentity:
  """The part that all checkpoints of a run share.

  Attributes:
    config: the resolved settings as plain data.
    policy: `pretrained.shape_part`.
    tokenizer: its files by name.
    slices: the meshes.
  """

  config: Mapping[str, Any]
  policy: Mapping[str, Any]
  tokenizer: Mapping[str, bytes]
  slices: Slices


def parts(
    fixed: RunIdentity, carried: SavedRun, applied_updates: int
) -> dict[str, Part]:
  """The files of a checkpoint.

  Args:
    fixed: what does not change.
    carried: what is to come back.
    applied_updates: of the optimizer.
  """
  snapshot = carried.snapshot
  ledger = snapshot.ledger
  return {
      RUN: {
          'step': ledger.version,
          'version': ledger.version,
          'applied_updates': applied_updates,
          'seed': carried.seed,
          'attempt': carried.attempt,
          'ledger': {
              **dataclasses.asdict(ledger),
              'dropped': {r.value: n for r, n in ledger.dropped.items()},
          },
          'failed_members': snapshot.failed_members,
          'failed_groups': snapshot.failed_groups,
          'data': snapshot.data,
          'evaluation': carried.evaluation,
          'logs': carried.logs,
          'mesh': {
              'train': _mesh(fixed.slices.train),
              'rollout': [_mesh(mesh) for mesh in fixed.slices.rollout],
          },
          'sums': carried.sums,
          'digests': carried.digests,
          'began_exact': carried.began_exact,
      },
      RECORDS: lambda: records.dumps(
          {
              'ready': snapshot.ready,
              'running': snapshot.running,
              'shuffle': carried.shuffle,
          }
      ),
      **_fixed_parts(fixed),
  }


def _fixed_parts(fixed: RunIdentity) -> dict[str, Part]:
  return {
      CONFIG: fixed.config,
      pretrained.SHAPE: fixed.policy,
      **{
          TOKENIZER + name: content for name, content in fixed.tokenizer.items()
      },
  }


def _mesh(mesh: jax.sharding.Mesh) -> dict[str, Any]:
  return {
      'shape': dict(mesh.shape),
      'devices': [str(device) for device in mesh.devices.flat],
  }


def read(saved: Saved) -> SavedRun:
  """Reads what `parts` wrote.

  Raises:
    ConfigError: the checkpoint is of a policy alone, and of no run.
  """
  if RUN not in saved.files:
    raise ConfigError(
        f'config.resume: checkpoint {saved.path} has no {RUN}, wanted that of a'
        ' run; config.policy.path takes a policy alone'
    )
  run = saved.read_json(RUN)
  kept = records.loads(saved.read(RECORDS))
  counts = run['ledger']
  dropped = {DropReason(r): n for r, n in counts.pop('dropped').items()}
  ledger = Ledger(
      **{**counts, 'eta': float(counts['eta'])},
      dropped=collections.Counter(dropped),
  )
  return SavedRun(
      snapshot=Snapshot(
          ledger=ledger,
          ready=kept['ready'],
          running=kept['running'],
          data=run['data'],
          failed_members=run['failed_members'],
          # Checkpoints of earlier versions did not count them.
          failed_groups=run.get('failed_groups', 0),
      ),
      shuffle=kept['shuffle'],
      seed=run['seed'],
      attempt=run['attempt'],
      evaluation=run['evaluation'],
      logs=run['logs'],
      sums=run['sums'],
      digests=run.get('digests', {}),
      began_exact=run.get('began_exact', _meant_exact(saved)),
  )


def _meant_exact(saved: Saved) -> bool:
  """Whether a checkpoint is of a time when eta = 0 alone meant equal bits."""
  rollout = saved.read_json(CONFIG).get('rollout', {})
  return rollout.get('eta') == 0 and 'exact' not in rollout


def require_same(
    saved: Saved,
    carried: SavedRun | None,
    *,
    seed: int,
    policy: Mapping[str, Any],
    tokenizer: Mapping[str, bytes],
    roles: Mapping[str, bool],
) -> None:
  """Refuses settings under which the checkpoint would be of another run.

  Args:
    saved: the checkpoint.
    carried: what it holds; None for the state of training alone.
    seed: of this run.
    policy: `pretrained.shape_part` of its policy.
    tokenizer: its tokenizer's files by name.
    roles: whether its settings ask for 'reference' and 'critic'.

  Raises:
    ConfigError: names the setting, its value and the one that was saved.
  """

  def require_saved(name: str, seen: Any, wanted: Any) -> None:
    require(seen == wanted, f'config.{name}', seen,
            f'{wanted!r} as in checkpoint {saved.path}')  # fmt: skip

  if carried is not None:
    require_saved('seed', seed, carried.seed)
  files = {
      name.removeprefix(TOKENIZER): saved.read(name)
      for name in saved.files
      if name.startswith(TOKENIZER)
  }
  require(
      _reading(files) == _reading(tokenizer),
      'config.tokenizer',
      sorted(tokenizer),
      f'the same files as in checkpoint {saved.path}',
  )
  shape = _arithmetic(saved.read_json(pretrained.SHAPE))
  policy = _arithmetic(jsonl.plain(policy))
  for name in sorted({*shape, *policy}):
    require_saved(f'policy: {name}', policy.get(name), shape.get(name))
  for role, (setting, above) in _ASKS_FOR.items():
    held = any(name.startswith(f'roles/{role}/') for name in saved.tensors)
    require(
        held == roles[role],
        f'config.train.{setting}',
        above[roles[role]],
        f'{above[held]}: checkpoint {saved.path} has'
        f' {"a" if held else "no"} {role}',
    )


def _reading(files: Mapping[str, bytes]) -> dict[str, bytes]:
  """The files that say how text is read, by name without folders.

  The others name ends of answers. What ends an answer may change, as
  `rollout.stop_ids` may, and older checkpoints lack some of these files.
  """
  by_name = {name.rpartition('/')[2]: files[name] for name in files}
  others = (special_tokens.GENERATION, special_tokens.MAP)
  return {name: by_name[name] for name in by_name if name not in others}


def _arithmetic(shape: Mapping[str, Any]) -> dict[str, Any]:
  """A policy's shape without lengths that no parameter or product rests on."""
  rope = dict(shape.get('rope_scaling') or {})
  kind, lengths = rope.get('rope_type'), ['max_position_embeddings']
  if kind == 'linear':
    rope.pop('original_max_position_embeddings', None)
  elif kind == 'dynamic':
    lengths = []
  kept = {name: shape[name] for name in shape if name not in lengths}
  return {**kept, 'rope_scaling': rope or None}


# What asks for a role: a setting, and what it is without and with the role.
_ASKS_FOR = {
    'reference': ('loss.kl_coefficient', (0, 'above 0')),
    'critic': ('advantages.critic', (False, True)),
}


_DATA = {
    'train_problems': 'prompts or answers to train on',
    'train_prompts': 'prompts to train on as token ids',
    'evaluation_problems': 'prompts or answers to evaluate on',
    'evaluation_prompts': 'prompts to evaluate on as token ids',
}


def place_draws(
    draws: ProblemStream,
    carried: SavedRun,
    digests: Mapping[str, str],
    changed_data: str,
) -> tuple[SavedRun, list[str]]:
  """Puts the data where a checkpoint left them, if they are the same data.

  Args:
    draws: of this run, at their beginning.
    carried: what the checkpoint holds.
    digests: `Prepared.data_digests` of this run.
    changed_data: `Experiment.changed_data`.

  Returns:
    What the run carries on, with a position in this run's data, and notes for
    a reader.

  Raises:
    ConfigError: they are other data, and the setting says 'refuse'.
  """
  state = carried.snapshot.data
  other = [
      what
      for name, what in _DATA.items()
      if carried.digests and carried.digests.get(name) != digests[name]
  ]
  train = [what for what in other if 'to train on' in what]
  difference = draws.difference(state)
  lines = [*([difference] if difference else []), *other]
  if lines and changed_data == 'refuse':
    raise ConfigError(
        'config.task is of other data than the checkpoint:'
        f' {"; ".join(lines)}; wanted the same problems, templates and'
        " tokenizer, or config.changed_data='restart' to draw the new data from"
        ' their beginning'
    )
  notes = [f'warning: other data than before: {line}' for line in lines]
  if not carried.digests:
    notes.append(
        'the checkpoint holds no digest of prompts and answers: only the ids of'
        ' the problems were compared'
    )
  if difference or train:
    draws.begin_at(int(state['next_draw_index']))
    notes.append('warning: the data begin anew at problem 0')
  else:
    draws.restore(state)
  snapshot = dataclasses.replace(carried.snapshot, data=draws.state())
  return dataclasses.replace(carried, snapshot=snapshot), notes


def changed_settings(saved: Saved, config: Mapping[str, Any]) -> list[str]:
  """Settings that are not as they were when the checkpoint was saved.

  Returns:
    Lines such as 'rollout.eta: 1.0 -> 4.0'.
  """
  return differences(saved.read_json(CONFIG), config)


def differences(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> list[str]:
  """Settings that differ, as lines such as 'rollout.eta: 1.0 -> 4.0'."""
  before, after = _flat(jsonl.plain(before)), _flat(jsonl.plain(after))
  return [
      f'{name}: {before.get(name)} -> {after.get(name)}'
      for name in sorted({*before, *after})
      if before.get(name) != after.get(name) and name != 'resume'
  ]


def _flat(tree: Any, at: str = '') -> dict[str, Any]:
  if not isinstance(tree, dict):
    return {at: tree}
  found = {}
  for name, value in tree.items():
    found |= _flat(value, f'{at}.{name}' if at else name)
  return found


# The state of training alone: for a look at it, and for replays.


def origin(fixed: RunIdentity, seed: int, attempt: int) -> dict[str, Any]:
  """Returns the entry of `Schedule.runs` for a start of a run."""
  return {
      **describe(seed, fixed.policy, fixed.tokenizer),
      'attempt': attempt,
      'config': jsonl.plain(fixed.config),
      'mesh': _mesh(fixed.slices.train),
  }


def describe(
    seed: int, policy: Mapping[str, Any], tokenizer: Mapping[str, bytes]
) -> dict[str, Any]:
  """Returns what identifies a schedule as one of this run, as JSON.

  Args:
    seed: of the run.
    policy: `pretrained.shape_part` of its policy.
    tokenizer: its tokenizer's files by name.
  """
  return {
      'seed': seed,
      'tokenizer': {
          name: hashlib.sha256(content).hexdigest()
          for name, content in tokenizer.items()
      },
      'policy': jsonl.plain(policy),
  }


def save_state(
    folder: pathlib.Path,
    state: TrainState,
    fixed: RunIdentity,
    *,
    events: EventLog,
) -> epath.Path:
  """Saves the state of training in a folder of its own; returns its path.

  No run goes on from it, but `config.policy.path` and a replay take it.

  Raises:
    CheckpointError: it could not be written.
    ConfigError: the folder holds checkpoints.
  """
  writer = Checkpointer(folder, CheckpointSettings(), events=events)
  try:
    writer.save(state.version, state, _fixed_parts(fixed))
    writer.wait()
  finally:
    writer.close()
  return checkpoint.at_step(folder, state.version)


def leave_crash(
    folder: pathlib.Path,
    state: TrainState,
    groups: Sequence[Group],
    fixed: RunIdentity,
    run: Mapping[str, Any],
    *,
    events: EventLog,
    note: Callable[[str], None],
) -> None:
  """Keeps a batch whose step ended without a number, with its state.

  Nothing has moved where there was no number, so it can be trained again from
  there, alone. What cannot be kept is told: the run ends for its own reason.

  Args:
    folder: where; what an earlier attempt left in it goes away.
    state: after the step, called by the version before.
    groups: of the step.
    fixed: what checkpoints hold.
    run: `origin`.
    events: where spans go.
    note: called with what a reader should know.
  """
  try:
    if folder.exists():
      shutil.rmtree(folder)
    path = folder / run_folder.SCHEDULE
    with ScheduleWriter(path, _CRASH_BYTES, run) as schedule:
      schedule.batch(state.version + 1, groups)
    save_state(folder / run_folder.CHECKPOINTS, state, fixed, events=events)
  except (OSError, CheckpointError) as error:
    note(f'the batch of step {state.version + 1} is not kept: {error}')
  else:
    note(f'to train the batch again: --config.replay={folder}')


def version_of(groups: Sequence[Group]) -> int:
  """The version that sampled most tokens of a batch; of equal ones the newest.

  Args:
    groups: with one sampled token at least.
  """
  versions = np.concatenate(
      [t.versions for group in groups for t in group.trajectories]
  )
  found, counts = np.unique(versions[versions >= 0], return_counts=True)
  return int(found[counts == counts.max()].max())


class Keeper:
  """Saves one run as it goes on; what fails is told and does not end it.

  Args:
    folder: of its checkpoints.
    settings: when it is saved and what is kept.
    last: the last step of the run.
    fixed: what all checkpoints hold alike.
    events: where spans go.
    note: called with what a reader should know.
    start: step of the checkpoint in this folder that the run goes on from.
    evaluating: version whose evaluation begins again then, if one does.
  """

  def __init__(
      self,
      folder: epath.Path,
      settings: CheckpointSettings,
      last: int,
      fixed: RunIdentity,
      *,
      events: EventLog,
      note: Callable[[str], None],
      start: int | None,
      evaluating: int | None = None,
  ):
    self._settings = settings
    self._last = last
    self._fixed = fixed
    self._events = events
    self._note = note
    self._overdue = False
    self._late = 0
    self._checkpointer = Checkpointer(
        folder,
        settings,
        events=events,
        start=start,
        awaited=start is not None and self._awaits(start, evaluating),
    )

  def due(self, step: int) -> bool:
    """Returns whether this step is to be saved; call it once a step.

    One that falls due while another is being written gives way to the first
    step after that, because training waits for no disk. The last step does.
    """
    falls_due = self._settings.due(step, self._last)
    if falls_due and step != self._last and self._checkpointer.busy:
      self._late += 1
      self._note(
          f'checkpoint of step {step} put off: the one before is still being'
          ' written'
      )
    self._overdue |= falls_due
    return self._overdue and (step == self._last or not self._checkpointer.busy)

  def save(
      self,
      step: int,
      state: TrainState,
      carried: SavedRun,
  ) -> None:
    """Saves a step; returns once the arrays are copied off the devices.

    Args:
      step: training steps done.
      state: may be donated as soon as this returns.
      carried: the rest.
    """
    self.finish()  # so that its failure is not taken for one of this
    self._overdue = False
    applied = int(state.policy.counters.applied_updates)
    with self._told():
      self._checkpointer.save(
          step,
          state,
          parts(self._fixed, carried, applied),
          awaited=self._awaits(step, carried.evaluation['running']),
      )

  def _awaits(self, step: int, evaluating: int | None) -> bool:
    """Whether a rating of this version is to come.

    The last version is evaluated at the end, and gives no answers to train on.
    """
    if self._settings.best_by_evaluation:
      return step in (evaluating, self._last)
    return bool(self._settings.keep_best) and step < self._last

  def explain(self) -> str:
    """Describes what is being written; any thread may call it."""
    return self._checkpointer.explain()

  def evaluated(self, version: int, metrics: Mapping[str, float]) -> None:
    """Takes in the evaluation of a version, which may rate its checkpoint."""
    if self._settings.best_by_evaluation:
      self._checkpointer.rate(version, metrics.get(self._settings.keep_best))

  def trained(
      self, groups: Sequence[Group], metrics: Mapping[str, float]
  ) -> None:
    """Takes in a step, which may rate the version that gave its answers.

    Args:
      groups: that it was trained on.
      metrics: of the step.
    """
    name = self._settings.keep_best
    if name in metrics and not self._settings.best_by_evaluation:
      self._checkpointer.rate(version_of(groups), metrics[name])

  def look(self) -> None:
    """Tells of a checkpoint that could not be written."""
    with self._told():
      self._checkpointer.check()

  def finish(self) -> None:
    """Waits until the last one is written."""
    with self._told():
      self._checkpointer.wait()

  def best(self) -> Saved | None:
    """The one whose metric is highest; None if that is not asked for."""
    best = None
    with self._told():
      best = self._checkpointer.best()
    self.look()
    return best

  def close(self) -> None:
    """Lets the thread end."""
    self.finish()
    self._checkpointer.close()

  def counts(self) -> dict[str, int | float]:
    """Counts saves and failures, and the seconds that training waited."""
    return {
        'checkpoints_saved': self._checkpointer.saved,
        'checkpoints_failed': self._checkpointer.failed,
        'checkpoints_late': self._late,
        'checkpoint_wait_s': self._events.seconds('copy', 'checkpoint'),
    }

  @contextlib.contextmanager
  def _told(self) -> Iterator[None]:
    try:
      yield
    except CheckpointError as error:
      self._note(str(error))
      self._events.instant('failure', 'checkpoint', reason=str(error))


# Logs.


def open_folder(
    folder: pathlib.Path, start: Start, carried: SavedRun | None
) -> list[str]:
  """Makes the folder of a run one that ends where the run begins.

  Args:
    folder: of the run; made if it is not there.
    start: where the run begins.
    carried: what it carries on.

  Returns:
    Names of logs that are shorter than the checkpoint says: a machine that lost
    power, or another machine than before.
  """
  folder.mkdir(parents=True, exist_ok=True)
  lengths = {} if carried is None else carried.logs
  for name in LOGS:
    if start.logs is not None and (start.logs / name).is_file():
      shutil.copyfile(start.logs / name, folder / name)
  (folder / run_folder.SUMMARY).unlink(missing_ok=True)
  board = folder / run_folder.TENSORBOARD
  if carried is None and board.is_dir():
    shutil.rmtree(board)  # its curves begin anew too
  return [n for n in LOGS if not jsonl.cut(folder / n, lengths.get(n, 0))]
