"""A run trained again from its schedule: the same batches, the same parameters.

`python -m areal_jax.run --config=... --config.replay=runs/x` reads the batches
that run x trained (`telemetry/schedule.py`) and gives them to the same trainer
in the same order. Nothing is generated, scored or waited for, so it is quick,
and what an asynchronous run learnt from answers that came when they came is
reached again, bit for bit on the same number of devices. After each step its
numbers are compared with the recorded ones.

It begins where the run began, or at a checkpoint (`--config.resume=...`, or the
one that lies beside a schedule which begins later), and ends at
`replay_until`. The state that it ends in is saved for a look at it.
"""

from __future__ import annotations

import dataclasses
import pathlib
import time
from typing import Any, Mapping

from areal_jax import config as config_lib
from areal_jax import resume
from areal_jax.build import (
    build_trainer,
    export_policy,
    initial_params,
    warm_started,
)
from areal_jax.config import ConfigError, require
from areal_jax.mesh.program_cache import keep_programs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices, cut, devices_first, machine_devices
from areal_jax.models import parameters
from areal_jax.prepare.prepared import Prepared, prepare
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.metric_writer import MetricWriter
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.schedule import Schedule, ScheduleError
from areal_jax.train import checkpoint, checkpoint_tensors, memory, pretrained
from areal_jax.train.checkpoint import CheckpointError, Saved
from areal_jax.train.trainer import Trainer

# Settings that decide what a batch does to the parameters.
_DECIDE = (
    'policy.',
    'warm_start.',
    'train.',
    'mesh.train.',
    'rollout.staleness',  # `mask` takes tokens out by their age
    'rollout.eta',
)


@dataclasses.dataclass(frozen=True)
class Replayed:
  """The folder and the summary of a replay, as written."""

  folder: pathlib.Path
  summary: dict[str, Any]


def run(experiment: Experiment) -> Replayed:
  """Trains the recorded batches of a run again.

  Raises:
    ConfigError: a mistake in the settings, a schedule that is not whole or not
      of such a run; nothing was written.
    NonFiniteError: too many updates in a row were skipped, as in the run.
  """
  started = time.monotonic()
  with devices_first(experiment.mesh):
    prepared = prepare(experiment)
  settings = prepared.settings
  schedule = _open(settings.replay)
  saved = _start(prepared, schedule)
  first = 1 if saved is None else saved.step + 1
  last = _last(settings, schedule, first)
  _require_same(prepared, schedule, saved)
  keep_programs()
  devices = machine_devices(settings.mesh)
  slices, rules = cut(devices, settings.mesh), Rules()
  progress = Progress(last)
  try:
    trainer = _trainer(prepared, slices, rules, saved, progress)
    trainer.warm_up()
    folder = run_folder.new_run_folder(settings.output, settings.name)
    plain = config_lib.to_dict(settings)
    run_folder.write_json(folder / run_folder.CONFIG, plain)
    for change in _changes(schedule, plain):
      progress.note(f'other than {change}')
    differing = _train(trainer, schedule, range(first, last + 1), folder,
                       progress)  # fmt: skip
    _leave(prepared, slices, trainer, folder)
    summary = {
        'name': settings.name,
        'replay': str(schedule.path),
        'first_step': first,
        'last_step': last,
        'differing_steps': len(differing),
        'first_difference': differing[0] if differing else '',
        'wall_s': time.monotonic() - started,
        'peak_rss_bytes': run_folder.peak_rss_bytes(),
    }
    run_folder.write_json(folder / run_folder.SUMMARY, summary)
    same = 'as they were recorded'
    progress.note(
        f'steps {first} to {last} trained again,'
        f' {f"{len(differing)} of them otherwise" if differing else same};'
        f' see {folder}'
    )
  finally:
    progress.close()
    schedule.close()
  return Replayed(folder, summary)


# What is replayed, and from where.


def _open(path: str) -> Schedule:
  """The schedule that `config.replay` names."""
  file = pathlib.Path(path)
  if file.is_dir():
    file = file / run_folder.SCHEDULE
  wanted = f'the folder of a run with a {run_folder.SCHEDULE} in it'
  require(file.is_file(), 'config.replay', path, wanted)
  try:
    schedule = Schedule(file)
  except ScheduleError as error:
    raise ConfigError(f'config.replay: {error}') from error
  require(bool(schedule.steps), 'config.replay', path,
          'a schedule that holds a step')  # fmt: skip
  return schedule


def _start(prepared: Prepared, schedule: Schedule) -> Saved | None:
  """The checkpoint to begin with; None to begin where the run began."""
  settings = prepared.settings
  if settings.resume:
    start = resume.find(
        settings.resume,
        settings.output,
        settings.name,
        settings.checkpoint.folder,
    )
    require(
        start.folder is None and start.saved is not None,
        'config.resume',
        settings.resume,
        'one checkpoint, with config.replay',
    )
    return start.saved
  first = schedule.steps[0]
  if first == 1:
    return None
  beside = schedule.path.parent / run_folder.CHECKPOINTS
  try:
    return checkpoint.verify(checkpoint.at_step(beside, first - 1))
  except CheckpointError as error:
    raise ConfigError(
        f'config.replay: {schedule.path} begins with step {first}, wanted'
        f' config.resume with a checkpoint to begin with: {error}'
    ) from error


def _last(settings: Experiment, schedule: Schedule, first: int) -> int:
  """The last step to train; all from the first to it are recorded."""
  last = settings.replay_until or schedule.steps[-1]
  held = set(schedule.steps)
  lacking = [step for step in range(first, last + 1) if step not in held]
  ends = f'{schedule.steps[0]} to {schedule.steps[-1]}'
  if schedule.full_at is not None:
    ends += f', where its limit was met at step {schedule.full_at}'
  require(
      not lacking,
      'config.replay_until' if settings.replay_until else 'config.replay',
      settings.replay_until or settings.replay,
      f'steps that {schedule.path} holds, which are of {ends}; step'
      f' {lacking[0] if lacking else 0} is not there',
  )
  require(first <= last, 'config.replay_until', settings.replay_until,
          f'at least {first}, the first step behind the checkpoint'
          )  # fmt: skip
  return last


def _require_same(
    prepared: Prepared, schedule: Schedule, saved: Saved | None
) -> None:
  """Refuses settings under which the schedule would be of another run."""
  settings = prepared.settings
  shape = pretrained.shape_part(prepared.model)
  origin = resume.describe(settings.seed, shape, prepared.tokenizer_files)
  for held in schedule.runs:
    for name in origin:
      require(
          origin[name] == held[name],
          f'config.{name}',
          _what_differs(origin[name], held[name]),
          f'that of {schedule.path}',
      )
  if saved is not None:
    resume.require_same(
        saved,
        None,
        seed=settings.seed,
        policy=shape,
        tokenizer=prepared.tokenizer_files,
        roles={
            'reference': settings.train.needs_reference,
            'critic': settings.train.advantages.critic,
        },
    )


def _what_differs(ours: Any, theirs: Any) -> Any:
  """The parts of a mapping that the other has not; anything else as it is."""
  if not isinstance(ours, Mapping):
    return ours
  return {
      name: ours.get(name)
      for name in sorted({*ours, *theirs})
      if ours.get(name) != theirs.get(name)
  }


def _changes(schedule: Schedule, config: Mapping[str, Any]) -> list[str]:
  """Settings that decide, and were others when the batches were trained."""
  return [
      f'in attempt {held["attempt"]}: {line}'
      for held in schedule.runs
      for line in resume.differences(held['config'], config)
      if line.startswith(_DECIDE)
  ]


# The walk.


def _trainer(
    prepared: Prepared,
    slices: Slices,
    rules: Rules,
    saved: Saved | None,
    progress: Progress,
) -> Trainer:
  """The trainer as it was before the first batch."""
  settings, mesh = prepared.settings, slices.train
  if saved is None:
    params, _ = initial_params(prepared, mesh, rules)
  else:  # its own take their place
    params = parameters.init_params(prepared.model, settings.seed, mesh, rules)
  memory.check(
      prepared.model,
      settings.train,
      mesh,
      rules,
      prepared.reference and prepared.reference[0],
      params,
  )
  if saved is None:
    params = warm_started(
        prepared,
        params,
        mesh,
        rules,
        lambda done, loss: progress.note(
            f'warm start {done}/{settings.warm_start.steps}: loss {loss:.3f}'
        ),
    )
  trainer = build_trainer(prepared, params, mesh, rules)
  if saved is not None:
    axes = pretrained.vocabulary_axes(prepared.model)
    trainer.restore(
        lambda like: checkpoint_tensors.restore_state(saved, like, axes)
    )
  return trainer


def _train(
    trainer: Trainer,
    schedule: Schedule,
    steps: range,
    folder: pathlib.Path,
    progress: Progress,
) -> list[str]:
  """Trains the steps; returns what differs from the record, a line a step."""
  differing = []
  metrics = MetricWriter(folder)
  try:
    for step in steps:
      values = trainer.step(schedule.batch(step))
      difference = _difference(schedule.outcome(step), values)
      if difference:
        differing.append(f'step {step}: {difference}')
        if len(differing) == 1:
          progress.note(differing[0])
      rows = dict(values)
      tokens = rows.pop('trained_tokens')
      metrics.write(step, step, rows)
      progress.update(
          step=step,
          version=step,
          reward=values['reward_mean'],
          staleness=values.get('staleness_mean'),
          tokens=tokens,
      )
  finally:
    metrics.close()
  return differing


def _difference(
    recorded: Mapping[str, float] | None, values: Mapping[str, float]
) -> str:
  """The first number of a step that is not the recorded one; empty if none.

  A step that was recorded without its numbers (the run ended in it) has none to
  differ from.
  """
  for name in sorted({*(recorded or {}), *values} if recorded else ()):
    before, now = recorded.get(name), values.get(name)
    both_nan = before != before and now != now
    if before != now and not both_nan:
      return f'{name} is {now!r}, {before!r} in the record'
  return ''


def _leave(
    prepared: Prepared, slices: Slices, trainer: Trainer, folder: pathlib.Path
) -> None:
  """Writes the policy, and the whole state of training as a checkpoint."""
  export_policy(prepared, trainer.params, folder)
  fixed = resume.RunIdentity(
      config_lib.to_dict(prepared.settings),
      pretrained.shape_part(prepared.model),
      prepared.tokenizer_files,
      slices,
  )
  resume.save_state(
      folder / run_folder.CHECKPOINTS, trainer.state, fixed,
      events=EventLog(None),
  )  # fmt: skip
