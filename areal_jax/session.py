"""One run from its settings to its summary.

Three kinds of loop, each waiting on one thing:

                    requests                groups
  controller  ----------------->  engine  - - - - - ->  trainer
  (asyncio)   <-----------------  (a thread  (buffer)   (main thread)
  waits for      completions      a replica)            waits for B groups
  room in the                     waits for                  |
  ledger                          requests or weights        | weights
      ^                                ^                     v
      '---- version v published -------'------------------ publisher

This file builds them, walks the steps and has everything written down. What a
step does is in `train/trainer.py`, what may run ahead in `ledger.py`, what
happens on new weights in `rollout/loop.py`.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import json
import pathlib
import random
import sys
import threading
import time
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from areal_jax import config as config_lib
from areal_jax import resume
from areal_jax.buffer import GroupBuffer
from areal_jax.build import (
    build_trainer,
    compile_training_ahead,
    export_merged,
    export_policy,
    initial_params,
    warm_started,
)
from areal_jax.cluster.evaluations import Evaluations
from areal_jax.cluster.local import (
    AsyncThread,
    Rollout,
    Stalled,
    build_evaluator,
    build_rollout,
    pinned_weights,
    require_memory,
)
from areal_jax.cluster.metric_sink import GuardedSink
from areal_jax.cluster.signals import Interrupted, Signals
from areal_jax.cluster.watchdog import Watchdog, Work
from areal_jax.config import require
from areal_jax.data.stream import ProblemStream
from areal_jax.ledger import Ledger
from areal_jax.mesh.program_cache import keep_programs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices, cut, devices_first, machine_devices
from areal_jax.models import parameters
from areal_jax.prepare.prepared import Prepared, prepare
from areal_jax.resume import SavedRun, Start
from areal_jax.rewards.base import BadReward
from areal_jax.rewards.scorer import Scorer
from areal_jax.rewards.self_test import self_test
from areal_jax.rollout.controller import Controller, Costs, Snapshot
from areal_jax.rollout.evaluation import Evaluation, table_text
from areal_jax.rollout.memory import decode_state_bytes
from areal_jax.rollout.workflow import (
    Workflow,
    WorkflowContext,
    build_workflow,
)
from areal_jax.settings.algorithm import algorithm_changes
from areal_jax.settings.cautions import cautions
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import plots, run_folder, trace
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.health import Health
from areal_jax.telemetry.metric_writer import MetricWriter
from areal_jax.telemetry.profiling import Profiler
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.samples import LimitedLog, SampleWriter
from areal_jax.telemetry.schedule import ScheduleWriter
from areal_jax.telemetry.stopwatch import Stopwatch
from areal_jax.telemetry.text_log import TextLog
from areal_jax.train import checkpoint_tensors, memory, pretrained
from areal_jax.train.outcome import NonFiniteError
from areal_jax.train.state import with_no_skips
from areal_jax.train.trainer import Pending, Trainer
from areal_jax.types import (
    Draw,
    DropReason,
    Group,
    Problem,
    Purpose,
    RewardResult,
    RewardStatus,
    Trajectory,
)
from areal_jax.weights import Handle

_SELF_TESTED = 4  # problems whose gold answers are scored at the start
_SELF_TEST_TIMEOUTS = 4  # times reward.timeout_s that all of it may take
_SELF_TEST_TOLD_S = 5.0  # seconds between two words on how far it is
_MARGIN_S = 30.0  # by which the watchdog's limit exceeds that of a wait
_WRITES = 3  # a checkpoint before is written, one is copied and written
_SLOW_BYTES_PER_S = 1e7  # on their way from mesh to mesh


@dataclasses.dataclass(frozen=True)
class Result:
  """The folder and the summary of a finished run, as written."""

  folder: pathlib.Path
  summary: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Cut:
  """The run as it was when a version was published, groups and log alike.

  Attributes:
    snapshot: of the controller.
    events: bytes of events.jsonl that speak of no later time.
    costs: of the controller.
  """

  snapshot: Snapshot
  events: int
  costs: Costs


@dataclasses.dataclass
class HandedOut:
  """A step that training was given, and that is still to be written down.

  Attributes:
    version: that it started from.
    groups: that it trains on.
    pending: its numbers, as soon as the devices have them.
    begun: monotonic second at which it was handed out.
    seconds: of the whole step, with the wait for its groups and publishing.
    facts: metrics that the host knew when its version was published.
    mark: of the book at that moment.
    values: metrics of training; None until they were read.
  """

  version: int
  groups: Sequence[Group]
  pending: Pending
  begun: float
  seconds: float = 0.0
  facts: dict[str, float] = dataclasses.field(default_factory=dict)
  mark: Mark | None = None
  values: dict[str, float] | None = None


def cut_at(controller: Controller, events: EventLog) -> Cut:
  """The run as it is; call it on the controller's event loop."""
  costs = dataclasses.replace(controller.costs)
  return Cut(controller.snapshot(), events.offset(), costs)


def run(experiment: Experiment) -> Result:
  """Runs an experiment to its end.

  Raises:
    ConfigError: a mistake in the settings; nothing was written.
    Interrupted: SIGTERM or SIGINT; saved, if training had begun.
    BaseException: what ended the run; its folder holds all until then.
  """
  started = time.monotonic()
  with devices_first(experiment.mesh):
    prepared = prepare(experiment)
  settings = prepared.settings
  require(not settings.replay, 'config.replay', settings.replay,
          "'', or `areal_jax.replay.run`, which nothing generates"
          )  # fmt: skip
  start, carried = _start(prepared)
  prepared = _as_it_began(prepared, carried)
  settings = prepared.settings
  summary = _ended(start, settings)
  if summary is not None:
    return summary
  keep_programs()
  devices = machine_devices(settings.mesh)
  slices = cut(devices, settings.mesh)
  rules = Rules()
  with contextlib.ExitStack() as stack:
    stack.enter_context(_modules_left_alone())
    signals = stack.enter_context(Signals())
    params, left = _first_params(prepared, start, slices, rules)
    require_memory(
        prepared.model,
        settings.rollout.engine,
        slices,
        rules,
        dtype=settings.rollout.dtype,
        pins=settings.evaluation.every > 0,
        merge=settings.rollout.merge_adapters,
        turns=settings.memory_by_phases,
    )
    memory.check(
        prepared.model,
        settings.train,
        slices.train,
        rules,
        prepared.reference and prepared.reference[0],
        params,
    )
    folder = start.folder
    if folder is None:
      folder = run_folder.new_run_folder(settings.output, settings.name)
    session = stack.enter_context(
        Session(
            prepared, slices, rules, folder, started, start, carried, signals
        )
    )
    session.tell_start(left)
    return Result(folder, session.run(params))


@contextlib.contextmanager
def _modules_left_alone() -> Iterator[None]:
  """The garbage collector looks at nothing older than this context.

  That is the modules of jax and others, mostly. Each full collection goes over
  them, while no other thread runs Python.
  """
  gc.freeze()
  try:
    yield
  finally:
    gc.unfreeze()


def _start(prepared: Prepared) -> tuple[Start, SavedRun | None]:
  """Returns where the run begins and what it carries on, checked."""
  settings = prepared.settings
  start = resume.find(
      settings.resume,
      settings.output,
      settings.name,
      settings.checkpoint.folder,
  )
  if start.saved is None:
    return start, None
  carried = resume.read(start.saved)
  resume.require_same(
      start.saved,
      carried,
      seed=settings.seed,
      policy=pretrained.shape_part(prepared.model),
      tokenizer=prepared.tokenizer_files,
      roles={
          'reference': settings.train.needs_reference,
          'critic': settings.train.advantages.critic,
      },
  )
  return start, carried


def _as_it_began(prepared: Prepared, carried: SavedRun | None) -> Prepared:
  """A run that was begun exact goes on so, though no setting said it then."""
  rollout = prepared.settings.rollout
  if carried is None or not carried.began_exact or not rollout.synchronous:
    return prepared
  rollout = dataclasses.replace(rollout, exact=True)
  settings = dataclasses.replace(prepared.settings, rollout=rollout)
  return dataclasses.replace(prepared, settings=settings)


def _ended(start: Start, settings: Experiment) -> Result | None:
  """The result of a run that needs no step more; None if there is work."""
  if start.saved is None or start.folder is None:
    return None
  file = start.folder / run_folder.SUMMARY
  if start.saved.step < settings.steps or not file.is_file():
    return None
  print(f'{start.folder} has ended at step {start.saved.step}', file=sys.stderr)
  return Result(start.folder, json.loads(file.read_text()))


def _first_params(
    prepared: Prepared, start: Start, slices: Slices, rules: Rules
) -> tuple[Any, tuple[str, ...]]:
  """The policy's weights as loaded or drawn, and which of them were not."""
  if start.saved is None:
    return initial_params(prepared, slices.train, rules)
  # The checkpoint's take their place.
  seed, model = prepared.settings.seed, prepared.model
  return parameters.init_params(model, seed, slices.train, rules), ()


class Session:
  """The machines of one run, from their building to their end.

  Args:
    prepared: checked settings and what they name.
    slices: train and rollout meshes.
    rules: logical to mesh axes.
    folder: where everything is written.
    started: monotonic second at which the run began.
    start: where it begins.
    carried: what it carries on from there; None from the beginning.
    signals: entered already.

  Raises:
    ConfigError: the checkpoint is of other problems.
  """

  def __init__(
      self,
      prepared: Prepared,
      slices: Slices,
      rules: Rules,
      folder: pathlib.Path,
      started: float,
      start: Start,
      carried: SavedRun | None,
      signals: Signals,
  ):
    settings = prepared.settings
    self._prepared = prepared
    self._settings = settings
    self._slices = slices
    self._rules = rules
    self._folder = folder
    self._started = started
    self._start = start
    self._carried = carried
    self._signals = signals
    self._controller: Controller | None = None
    in_place = start.folder is not None and start.saved is not None
    self._saved = start.saved.step if in_place else None  # the last step
    self._handed_out: HandedOut | None = None  # the last step, until written
    self._trained_until = 0.0  # monotonic second at which a step was done
    self._deaths: dict[str, int] = {}  # by engine, as far as they are told
    self._evaluating: int | None = None  # version
    self._counted: dict[str, int] = {}  # results of scoring, last row's
    self._reward_failed = False  # as far as it was told
    self._printed = False  # by the reward, as far as it was told
    # Answers of a draw that are being scored; on the controller's event loop.
    self._scoring: collections.Counter[tuple[Purpose, int]] = (
        collections.Counter()
    )
    self._stack = contextlib.ExitStack()
    self._compilations = CompilationCounter()
    self._progress = Progress(settings.steps)
    self._health = Health(self._progress.note)
    self._shuffle = random.Random(settings.seed)
    self._draws = ProblemStream(
        prepared.train, seed=settings.seed, parts=prepared.parts
    )
    self._digests = prepared.data_digests()
    self._data_notes: list[str] = []
    if carried is not None:
      self._carried, self._data_notes = resume.place_draws(
          self._draws, carried, self._digests, settings.changed_data
      )
    # Slices that share devices take turns if both have collectives: two such
    # programs that reach the devices in different orders would wait for each
    # other for ever. Replicas of one device each decode side by side.
    mesh = settings.mesh
    collectives = mesh.train.devices > 1 and mesh.rollout.engine_devices > 1
    self._turns = threading.Lock() if mesh.colocated and collectives else None

  def __enter__(self) -> Session:
    with contextlib.ExitStack() as stack:
      self._open(stack)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._stack.close()

  def _open(self, stack: contextlib.ExitStack) -> None:
    settings, folder = self._settings, self._folder
    carried = self._carried
    attempt = 0 if carried is None else carried.attempt + 1
    self._short_logs = resume.open_folder(folder, self._start, carried)
    run_folder.write_json(
        folder / run_folder.CONFIG, config_lib.to_dict(settings)
    )
    for name, content in self._prepared.tokenizer_files.items():
      (folder / name).parent.mkdir(exist_ok=True)
      (folder / name).write_bytes(content)
    stack.callback(self._progress.close)
    self._signals.told = self._progress.leave_line
    self._watchdog = self._build_watchdog()
    stack.callback(self._watchdog.stop)
    self._compilations.install()
    stack.callback(self._compilations.uninstall)
    self._events = stack.enter_context(
        EventLog(
            folder / run_folder.EVENTS,
            limit_bytes=settings.event_bytes,
            attempt=attempt,
        )
    )
    sink = self._build_sink()
    if sink is not None:
      stack.callback(sink.close)
    self._metrics = MetricWriter(
        folder,
        after=None if carried is None else carried.version,
        more=sink and sink.write,
    )
    stack.callback(self._metrics.close)
    self._samples = SampleWriter(
        folder / run_folder.SAMPLES, settings.sample_bytes
    )
    stack.callback(self._samples.close)
    self._answers = LimitedLog(
        folder / run_folder.EVALUATIONS, settings.sample_bytes
    )
    stack.callback(self._answers.close)
    self._fixed = resume.RunIdentity(
        config_lib.to_dict(settings),
        pretrained.shape_part(self._prepared.model),
        self._prepared.tokenizer_files,
        self._slices,
    )
    self._origin = resume.origin(self._fixed, settings.seed, attempt)
    self._schedule = stack.enter_context(
        ScheduleWriter(
            folder / run_folder.SCHEDULE,
            settings.schedule_bytes,
            self._origin,
            lambda step: self._progress.note(
                f'{run_folder.SCHEDULE} has met its limit of schedule_bytes:'
                f' step {step} and later ones cannot be replayed'
            ),
        )
    )
    self._profiler = stack.enter_context(
        Profiler(
            folder / run_folder.PROFILE, settings.profiling, self._progress.note
        )
    )
    self._keeper = self._build_keeper()
    stack.callback(self._keeper.close)
    reward = settings.reward
    output = folder / run_folder.REWARD_OUTPUT
    self._reward_errors = TextLog(
        folder / run_folder.REWARD_ERRORS, settings.sample_bytes
    )
    # Another one for evaluation: training never queues behind its answers.
    self._scorer, self._judge = (
        Scorer(reward.function, reward.workers, reward.timeout_s, output)
        for _ in range(2)
    )
    stack.callback(_remove_if_empty, output)
    for scorer in (self._scorer, self._judge):
      stack.callback(scorer.close)
    # Ended in the opposite order: engines before the event loop they answer.
    self._async = AsyncThread('controller', self._progress.note)
    stack.callback(self._async.stop)
    self._test_reward()
    self._rollout = self._build_rollout()
    stack.callback(self._rollout.close)
    stack.callback(self._rollout.stop)
    self._rollout.compile_ahead(settings.rollout.dtype)
    self._steps = compile_training_ahead(
        self._prepared, self._slices.train, self._rules
    )
    self._compiles = self._steps[0].ahead
    stack.callback(self._compiles.close)
    if self._slices.train.devices.flat[0].platform == 'cpu':
      self._compiles.hold_back()  # until there is a step
    for scorer in (self._scorer, self._judge):
      scorer.start()  # processes come up while programs are compiled
    self._evaluator = build_evaluator(self._rollout, self._events)
    stack.callback(self._evaluator.stop)
    self._evaluations = self._build_evaluations()

  def _build_sink(self) -> GuardedSink | None:
    settings = self._settings
    if not settings.metrics_sink:
      return None
    return GuardedSink(
        settings.metrics_sink,
        self._folder,
        config_lib.to_dict(settings),
        self._progress.note,
    )

  def _build_rollout(self) -> Rollout:
    rollout = self._settings.rollout
    return build_rollout(
        self._prepared.model,
        rollout.engine,
        self._slices,
        self._rules,
        swap=rollout.swap,
        events=self._events,
        dispatch_lock=self._turns,
        tokenizer=self._prepared.tokenizer,
        dtype=rollout.dtype or None,
        merge=rollout.merge_adapters,
        restarts=self._settings.failures.restarts,
        evicts=self._settings.failures.evicts,
        exact=rollout.exact,
        release_idle=self._settings.mesh.colocated,
    )

  def _build_watchdog(self) -> Watchdog:
    return Watchdog(
        progress=self._moved,
        report=self._report,
        tell=self._tell_silence,
        expire=self._expire,
        quiet_s=self._settings.failures.quiet_s,
        # Waits for groups end by themselves; this is for what does not.
        limit_s=self._settings.rollout.wait_s + _MARGIN_S,
        compiling=self._compilations_under_way,
    )

  def _build_keeper(self) -> resume.Keeper:
    settings = self._settings.checkpoint
    start = self._start
    in_place = start.folder is not None and start.saved is not None
    return resume.Keeper(
        resume.folder_of(self._folder, settings.folder),
        settings,
        self._settings.steps,
        self._fixed,
        events=self._events,
        note=self._progress.note,
        start=start.saved.step if in_place else None,
        evaluating=self._carried.evaluation['running'] if in_place else None,
    )

  def _build_evaluations(self) -> Evaluations:
    prepared, settings = self._prepared, self._settings
    return Evaluations(
        self._evaluator,
        self._async,
        settings=settings.evaluation,
        problems=prepared.evaluation,
        workflow=self._build_workflow(
            client=self._evaluator.client,
            score=functools.partial(self._score, self._judge, 'evaluate'),
            sampling=prepared.evaluation_sampling,
        ),
        decode=self._decode,
        vote=settings.evaluation.load_vote('config.evaluation'),
        events=self._events,
        done=self._record_evaluation,
        wait_s=settings.rollout.wait_s,
        busy=self._compiles_something,
    )

  # Silence. These are called in the watchdog's thread.

  def _moved(self) -> tuple[Any, ...]:
    """Returns counters that the watchdog compares to notice a stalled run."""
    controller = self._controller
    return (
        controller and (controller.answers, controller.ledger.drawn),
        *(loop.counts.tokens for loop in self._rollout.loops),
        *(loop.counts.tokens for loop in self._evaluator.loops),
        *self._scorer.counts.values(),
        *self._judge.counts.values(),
        self._rollout.compiled,
        self._compiles.done,
    )

  def _compilations_under_way(self) -> list[Work]:
    """What is being compiled for the engines and for the trainer."""
    engines = [loop.engine.programs for loop in self._rollout.loops]
    limit = self._settings.failures.compile_s
    works = []
    for programs in (*engines, self._compiles):
      if programs.under_way is not None:
        name, since = programs.under_way
        what = f'compiles {name}'
        works.append(Work(what, since, limit, 'config.failures.compile_s'))
    return works

  def _compiles_something(self) -> bool:
    """Whether a wait may be for a program: its limit stands still then."""
    now = time.monotonic()
    return any(
        now - work.since < work.limit_s
        for work in self._compilations_under_way()
    )

  def _report(self) -> str:
    """Describes who waits for whom."""
    controller = self._controller
    parts = [
        controller.explain() if controller else 'no group has been drawn yet',
        self._rollout.explain(),
        self._evaluator.explain(),
        f'training: {self._scorer.explain()}',
        f'evaluation: {self._judge.explain()}',
        self._keeper.explain(),
        f'trainer: {self._compiles.explain() or "all of it is compiled"}',
    ]
    return '\n'.join(f'  {part}' for part in parts)

  def _tell_silence(self, text: str) -> None:
    self._progress.note(text)
    self._events.instant('silence', 'watchdog', reason=text)

  def _expire(self, text: str) -> None:
    with open(self._folder / run_folder.STACKS, 'w') as file:
      faulthandler.dump_traceback(file)
    self._progress.note(
        f'the run is given up; what each thread does: {run_folder.STACKS}'
    )
    self._signals.expire(Stalled(text))

  # The walk.

  def tell_start(self, left: Sequence[str]) -> None:
    """Says what a reader of the run's output should know of its start.

    Args:
      left: parameters that the policy's path did not have.
    """
    note, saved = self._progress.note, self._start.saved
    changes = algorithm_changes(self._settings)
    if changes:
      note(f'algorithm {self._settings.algorithm}, changed in')
    for change in changes:
      note(f'  {change}')
    for caution in (*cautions(self._settings), *self._prepared.cautions):
      note(f'caution: {caution}')
    for refused in self._start.refused:
      note(refused)
    if left:
      note(f'left at their initial values: {", ".join(left)}')
    if saved is None:
      return
    snapshot = self._carried.snapshot
    note(
        f'goes on from checkpoint {saved.path}: {len(snapshot.ready)} groups'
        f' ready, {len(snapshot.running)} generated again'
    )
    if self._carried.began_exact and self._settings.rollout.exact:
      note(
          '  rollout.exact=True: the run began when eta = 0 alone meant equal'
          ' bits, and it goes on so'
      )
    settings = config_lib.to_dict(self._settings)
    for line in self._data_notes:
      note(f'  {line}')
    for change in resume.changed_settings(saved, settings):
      note(f'  other than before: {change}')
    for name in self._short_logs:
      note(f'  {name} is shorter than the checkpoint says')
    lost = self._carried.evaluation['running']
    if lost not in (None, saved.version):
      note(f'  the evaluation of version {lost} is lost: its weights are gone')

  def _test_reward(self) -> None:
    """Scores gold answers; ends the run if none of them gets a score.

    It comes before anything is compiled. Without gold answers it only sees
    whether the reward can be called at all.
    """
    reward = self._settings.reward
    if self._carried is not None or not reward.self_test:
      return
    held_out = self._prepared.evaluation
    golds = [p for p in held_out if p.answer]
    problems = (golds or held_out)[:_SELF_TESTED]
    self._judge.start()
    self._reward_failed = True  # it is told below
    # Time for the work of each worker to run out of time some times.
    limit = _SELF_TEST_TIMEOUTS * reward.timeout_s
    done = [0, 0]
    told = time.monotonic()

    def count(*numbers: int) -> None:
      done[:] = numbers

    def check() -> None:
      nonlocal told
      self._signals.check()
      if time.monotonic() - told >= _SELF_TEST_TOLD_S:
        told = time.monotonic()
        self._progress.note(
            f'tests the reward: {done[0]} of {done[1] or "all"} answers are'
            f' scored; it takes at most {limit:g} s'
        )

    score = functools.partial(self._told, self._judge)
    found = self._async.run(
        self_test(score, problems, limit_s=limit, tell=count),
        timeout_s=limit + 60,
        explain=self._judge.explain,
        check=check,
    )
    self._tell_reward_output()
    if not golds:
      self._reward_failed = bool(found.failed)
      if found.failed and not found.scored:
        self._progress.note(
            'caution: the reward gives none of the texts tried a score'
            f' ({found.why}; details: {self._reward_errors.path})'
        )
      return
    try:
      found.require_scores()
    except BadReward as error:
      errors = self._reward_errors.path
      more = f' (details: {errors})' if errors.exists() else ''
      raise BadReward(f'{error}{more}') from None
    self._reward_failed = bool(found.failed)
    if not found.passed:
      self._progress.note(
          f'caution: {found.right} of {found.problems} gold answers score above'
          f' corrupted ones ({found.why}); python -m areal_jax.doctor says more'
      )

  async def _told(
      self, scorer: Scorer, problem: Problem, text: str
  ) -> RewardResult:
    """Scores a text; why it failed goes to a file, its first line stays."""
    result = await scorer(problem, text)
    if result.status not in (RewardStatus.ERROR, RewardStatus.TIMEOUT):
      return result
    self._reward_errors.append(
        f'problem {problem.id}, answer {text[:200]!r}\n{result.detail}'
    )
    line = result.detail.partition('\n')[0]
    if not self._reward_failed:
      self._reward_failed = True
      self._progress.note(
          f'the reward failed: {line} (all failures:'
          f' {self._reward_errors.path})'
      )
    return dataclasses.replace(result, detail=line)

  def _tell_reward_output(self) -> None:
    """Shows the first lines that the reward has printed, once."""
    file = self._folder / run_folder.REWARD_OUTPUT
    if self._printed or not file.exists() or not file.stat().st_size:
      return
    self._printed = True
    with open(file, encoding='utf-8', errors='replace') as lines:
      first = [line.rstrip()[:200] for _, line in zip(range(3), lines)]
    self._progress.note(f'the reward prints; all of it goes to {file}:')
    for line in first:
      self._progress.note(f'  {line}')

  def run(self, params: Any) -> dict[str, Any]:
    """Warm start, evaluation, training, evaluation; returns the summary."""
    if self._carried is None:
      params = self._warm_start(params)
    trainer = build_trainer(
        self._prepared, params, self._slices.train, self._rules, self._steps
    )
    if self._carried is not None:
      self._restore(trainer)
    handle = self._publish_first(trainer)
    self._watchdog.at('evaluates the policy before training')
    self._watchdog.start()
    self._before = self._evaluate_before(trainer.version)
    self._compilations.mark_warm()
    for loop in self._rollout.loops:
      loop.start()
    self._wait_for_first_swap(handle)
    controller = self._controller = self._build_controller()
    book = Book(time.monotonic(), self._rollout)
    if self._carried is not None:
      controller.restore(self._carried.snapshot)  # its loop is idle
      controller.costs = Costs(**self._carried.sums.get('costs', {}))
      book.restore(self._carried.sums['book'])
      if self._carried.evaluation['running'] == trainer.version:
        self._evaluate_beside(trainer.version)
    self._async.call(controller.start)
    try:
      self._walk(trainer, controller, book)
      cut = self._async.call(cut_at, controller, self._events)
    except BaseException as why:
      self._leave(trainer, controller, book, why)
      raise
    finally:
      book.stop()
      self._watchdog.at('gives up what is under way')
      for left in self._async.run(
          controller.stop(), timeout_s=60, explain=self._async.explain
      ):
        self._progress.note(f'left behind, it does not end: {left}')
    try:
      return self._end(trainer, controller, book)
    except BaseException as why:
      self._leave(trainer, controller, book, why, cut)
      raise

  def _walk(self, trainer: Trainer, controller: Controller, book: Book) -> None:
    """Takes all steps, and writes down each of them."""
    with self._signals.held():
      while trainer.version < self._settings.steps:
        self._signals.check()
        with self._profiler.step(trainer.version + 1):
          cut = self._step(trainer, controller, book)
        self._evaluate_if_due(trainer.version)
        if cut is not None:
          self._save(trainer, cut, book)
        self._keeper.look()
    self._settle(trainer, book)

  def _end(
      self, trainer: Trainer, controller: Controller, book: Book
  ) -> dict[str, Any]:
    """Evaluates and exports what training has led to; the summary."""
    self._watchdog.at('waits for the engines to end')
    self._rollout.stop()
    self._watchdog.at('waits for the evaluation that runs')
    self._evaluations.wait()
    self._watchdog.at('evaluates the policy after training')
    after = self._evaluate(trainer.version)
    with self._writing('writes down the policy and the summary'):
      export_policy(self._prepared, trainer.params, self._folder)
      self._keeper.finish()
      self._export_best()
      return self._finish(controller, book, after)

  def _writing(self, what: str) -> contextlib.AbstractContextManager[None]:
    """Tells the watchdog of a work that moves weights to a disk."""
    limit = _WRITES * self._settings.checkpoint.wait_s
    return self._watchdog.working(
        what, limit, f'{_WRITES} times config.checkpoint.wait_s'
    )

  def _wait_for_first_swap(self, handle: Handle) -> None:
    """Waits until the engines have their first weights.

    Raises:
      TimeoutError: it takes longer than a compilation and the bytes may.
    """
    limit = self._settings.failures.compile_s + handle.bytes / _SLOW_BYTES_PER_S
    setting = 'config.failures.compile_s and the bytes of the weights'
    what = 'waits for the engines to take their first weights'
    with self._watchdog.working(what, limit, setting):
      handle.wait(limit)

  def _leave(
      self,
      trainer: Trainer,
      controller: Controller,
      book: Book,
      why: BaseException,
      cut: Cut | None = None,
  ) -> None:
    """Writes down and saves what training has reached, before the run ends.

    What cannot be written down or saved is told. The run ends for its own
    reason, and not for that.

    Args:
      trainer: its version is saved.
      controller: draws in flight are saved with it.
      book: running sums.
      why: what ends the run.
      cut: the run as it was when training ended; None while it goes on.
    """
    limit = _WRITES * self._settings.checkpoint.wait_s
    with self._signals.patient(limit):
      try:
        self._save_last(trainer, controller, book, why, cut)
      # What is wrong with the devices, the event loop or the disk.
      except (OSError, RuntimeError, ValueError) as error:
        self._progress.note(
            f'step {trainer.version} could not be saved:'
            f' {type(error).__name__}: {error}'
        )

  def _save_last(
      self,
      trainer: Trainer,
      controller: Controller,
      book: Book,
      why: BaseException,
      cut: Cut | None,
  ) -> None:
    """Saves the version trained last, if it is not saved already; tells it."""
    step, version = self._handed_out, trainer.version
    if isinstance(why, Stalled) and step is not None and not step.pending.done:
      self._handed_out = None  # its numbers will not come
      self._progress.note(
          f'step {step.version + 1} is still on the devices, and so is what'
          f' would be saved; the last checkpoint: {self._saved}'
      )
      self._keeper.finish()
      return
    try:
      self._settle(trainer, book)
    except NonFiniteError as error:
      self._progress.note(str(error))
      why = error
    if isinstance(why, NonFiniteError):  # else a run from here ends at once
      trainer.state = with_no_skips(trainer.state)
    if version != self._saved:
      if cut is None:
        cut = self._async.call(self._cut_before_leaving, controller, version)
      self._save(trainer, cut, book)
    self._watchdog.at(f'waits for the checkpoint of step {version}')
    self._keeper.finish()
    reason = str(why) if isinstance(why, Interrupted) else type(why).__name__
    self._progress.note(
        f'{reason} at step {version}; --config.resume=auto goes on from there'
    )

  def _cut_before_leaving(self, controller: Controller, version: int) -> Cut:
    """The run with a version that may have been trained and not published."""
    if controller.ledger.version < version:
      controller.published(version)
    return cut_at(controller, self._events)

  def _restore(self, trainer: Trainer) -> None:
    """Puts everything but the controller where the checkpoint left it."""
    saved, carried = self._start.saved, self._carried
    axes = pretrained.vocabulary_axes(self._prepared.model)
    with self._events.span('restore', 'checkpoint', version=saved.version):
      trainer.restore(
          lambda like: checkpoint_tensors.restore_state(saved, like, axes)
      )
    self._shuffle.setstate(carried.shuffle)
    self._scorer.counts.update(carried.sums['rewards'])
    self._counted = dict(self._scorer.counts)
    self._health.restore(carried.sums.get('health', {}))

  def _save(
      self,
      trainer: Trainer,
      cut: Cut,
      book: Book,
  ) -> None:
    """Saves the version that was published last."""
    carried = SavedRun(
        snapshot=cut.snapshot,
        shuffle=self._shuffle.getstate(),
        seed=self._settings.seed,
        attempt=0 if self._carried is None else self._carried.attempt + 1,
        evaluation={
            'before': self._before,
            'running': self._evaluating,
            'skipped': self._evaluations.skipped,
        },
        logs={
            run_folder.METRICS: self._metrics.offset(),
            run_folder.EVENTS: cut.events,
            run_folder.SAMPLES: self._samples.offset(),
            run_folder.EVALUATIONS: self._answers.offset(),
            run_folder.SCHEDULE: self._schedule.offset(),
        },
        sums={
            'book': book.state(),
            'costs': dataclasses.asdict(cut.costs),
            'rewards': dict(self._scorer.counts),
            'seconds': self._seconds,
            'health': self._health.state(),
        },
        digests=self._digests,
        began_exact=self._carried is not None and self._carried.began_exact,
    )
    with self._writing(f'saves step {trainer.version}'):
      self._keeper.save(trainer.version, trainer.state, carried)
    self._saved = trainer.version

  def _export_best(self) -> None:
    best, metric = self._keeper.best(), self._settings.checkpoint.keep_best
    if metric and best is None:
      self._progress.note(f'no checkpoint has a value of {metric!r}')
    if best is not None:
      model = self._prepared.model
      source = pretrained.Pretrained(None, best)
      params = source.load(model, self._slices.train, self._rules)
      export_merged(self._prepared, params, self._folder / run_folder.BEST)
      self._progress.note(f'best: checkpoint {best.path}')

  def _warm_start(self, params: Any) -> Any:
    settings, prepared = self._settings, self._prepared
    if not settings.warm_start.steps:
      return params
    total = settings.warm_start.steps

    def report(done: int, loss: float) -> None:
      self._progress.note(f'warm start {done}/{total}: loss {loss:.3f}')

    with self._events.span('warm start', 'train', steps=total):
      params = warm_started(
          prepared, params, self._slices.train, self._rules, report
      )
    export_merged(prepared, params, self._folder / run_folder.WARM_START)
    return params

  def _publish_first(self, trainer: Trainer) -> Handle:
    """Publishes to engines that are still to start, and compiles publishing.

    The programs of engines and trainer are compiled since the session was
    opened, and go on to be while the first answers are generated: each is
    waited for by those who call it.
    """
    publisher = self._rollout.publisher
    handle = publisher.publish(trainer.version, trainer.params)
    if self._prepared.model.lora.projections:
      publisher.warm_up(trainer.trainable)
    self._evaluator.start()
    return handle

  def _step(
      self, trainer: Trainer, controller: Controller, book: Book
  ) -> Cut | None:
    """Waits for B groups, hands out their training, publishes what comes of it.

    The step before is written down while the devices are at it. So is this one
    before the next, if it is to be saved: a checkpoint holds what the logs say
    up to it.

    Returns:
      The cut at that version, if it is to be saved.
    """
    start = time.monotonic()
    version = trainer.version
    batch = self._settings.rollout.batch_size
    self._watchdog.at(f'step {version + 1}: waits for {batch} groups')
    with (
        book.waiting.pause(),
        self._events.span('wait', 'train', version=version),
    ):
      groups = self._async.run(
          controller.next_batch(batch),
          timeout_s=self._settings.rollout.wait_s,
          explain=self._report,
          check=self._check,
          busy=self._compiles_something,
      )
    if self._settings.shuffle_rewards:
      groups = shuffle_rewards(groups, self._shuffle)
    due = self._keeper.due(version + 1)
    limit = self._settings.failures.step_s
    what = f'trains step {version + 1}'
    with self._watchdog.working(what, limit, 'config.failures.step_s'):
      handed_out, handle = self._train(trainer, groups, book, due)
    self._compiles.let_go()
    cut = self._async.call(self._published, controller, trainer.version, due)
    handed_out.seconds = time.monotonic() - start
    handed_out.mark = book.mark()
    handed_out.facts = self._facts(controller)
    handed_out.facts['published_bytes'] = handle.bytes
    if self._settings.train.offload_optimizer:
      handed_out.facts |= trainer.offloaded.metrics()
    if due:
      self._settle(trainer, book)
    return cut

  def _train(
      self, trainer: Trainer, groups: Sequence[Group], book: Book, due: bool
  ) -> tuple[HandedOut, Handle]:
    """Hands out the training of a batch and publishes what comes of it.

    The step before is written down meanwhile.

    Args:
      trainer: gets the batch.
      groups: the batch.
      book: running sums.
      due: whether the step is to be saved.
    """
    if trainer.reads_first or self._turns is not None:
      self._settle(trainer, book)
    if self._turns is not None:  # a turn is not for waiting for programs
      self._compiles.wait_for_all()
    with self._turns or contextlib.nullcontext():
      handed_out = self._hand_out(trainer, groups)
      self._settle(trainer, book)  # the step before
      self._handed_out = handed_out
      if due:
        self._read(trainer, handed_out)
      # Engines admit nobody from when they are handed weights until they have
      # them, so these are not handed over while they are still computed.
      handed_out.pending.wait()
      adapters = bool(self._prepared.model.lora.projections)
      handle = self._rollout.publisher.publish(
          trainer.version,
          trainer.trainable,
          'adapter' if adapters else 'full',
      )
    return handed_out, handle

  def _hand_out(self, trainer: Trainer, groups: Sequence[Group]) -> HandedOut:
    """Gives the devices a step, which is recorded before."""
    version, begun = trainer.version, time.monotonic()
    self._schedule.batch(version + 1, groups)
    return HandedOut(version, groups, trainer.hand_out(groups), begun)

  def _read(self, trainer: Trainer, step: HandedOut) -> dict[str, float]:
    """The numbers of a step; one without a number is left."""
    if step.values is not None:
      return step.values
    try:
      step.values = step.pending.read()
    except NonFiniteError:
      self._handed_out = None  # there is nothing of it to be written down
      # If the next one was handed out already, it has moved nothing.
      resume.leave_crash(
          self._folder / run_folder.CRASH,
          dataclasses.replace(trainer.state, version=step.version),
          step.groups,
          self._fixed,
          self._origin,
          events=self._events,
          note=self._progress.note,
      )
      raise
    # Devices begin when they have done with the step before.
    begun, done = max(step.begun, self._trained_until), step.pending.wait()
    self._trained_until = done
    self._events.record(
        'step',
        'train',
        begun,
        done - begun,
        version=step.version,
        # None where every token was too old to be trained.
        staleness=step.values.get('staleness_mean'),
        tokens=step.values['trained_tokens'],
    )
    self._schedule.outcome(step.version + 1, step.values)
    return step.values

  def _settle(self, trainer: Trainer, book: Book) -> None:
    """Writes down the step that was handed out last, if it is not yet."""
    step = self._handed_out
    if step is None:
      return
    values = self._read(trainer, step)
    self._handed_out = None
    if step.mark is not None:  # else its version was not published
      self._record(step, values, book)

  def _published(
      self, controller: Controller, version: int, look: bool
  ) -> Cut | None:
    """Makes room; looks at everything before anybody takes it, if asked."""
    controller.published(version)
    if not look:
      return None
    return cut_at(controller, self._events)

  def _check(self) -> None:
    """Raises what ended an engine or an evaluation, or that a signal came."""
    self._signals.check()
    self._tell_deaths()
    self._rollout.check()
    self._evaluations.check()

  def _tell_deaths(self) -> None:
    """Says which engines died since this was called last, and what follows."""
    note = self._progress.note
    for loop in (*self._rollout.loops, *self._evaluator.loops):
      told = self._deaths.get(loop.name, 0)
      if loop.counts.deaths == told:
        continue
      self._deaths[loop.name] = loop.counts.deaths
      times = f'engine {loop.name} died ({loop.last_death}), death'
      if loop.failure() is None:
        note(f'{times} {loop.counts.deaths}; it began anew')
      else:
        note(
            f'{times} {loop.counts.deaths} and its last; the replicas that are'
            ' left answer its requests'
        )

  @property
  def _engine_deaths(self) -> dict[str, int]:
    """Deaths of engine threads so far, those of evaluation included."""
    loops = (*self._rollout.loops, *self._evaluator.loops)
    return {
        'engine_deaths': sum(loop.counts.deaths for loop in loops),
        'engines_evicted': sum(loop.failure() is not None for loop in loops),
    }

  def _evaluate(self, version: int) -> Evaluation:
    """Evaluates the version published last and waits for the result."""
    self._evaluations.start(version, pinned_weights(self._rollout, version))
    result = self._evaluations.wait()
    self._show(result)
    return result

  def _evaluate_before(self, version: int) -> dict[str, Any]:
    """Evaluates version 0, if asked, or remembers what was found before."""
    if self._carried is not None:
      self._evaluations.skipped = self._carried.evaluation['skipped']
      return self._carried.evaluation['before']
    if not self._settings.evaluation.before:
      return {'accuracy': None, 'score_mean': None}
    return self._evaluate(version).to_dict()

  def _evaluate_if_due(self, version: int) -> None:
    """Starts an evaluation beside training; the last version has its own."""
    self._evaluations.look()
    every = self._settings.evaluation.every
    if every and version % every == 0 and version != self._settings.steps:
      self._evaluate_beside(version)

  def _evaluate_beside(self, version: int) -> None:
    weights = pinned_weights(self._rollout, version)
    if self._evaluations.start(version, weights):
      self._evaluating = version
    else:
      self._progress.note(
          f'evaluation at version {version} skipped: another one still runs'
      )

  def _record_evaluation(self, result: Evaluation) -> None:
    version, whole = result.version, result.whole
    self._evaluating = None
    self._metrics.write(version, version, result.metrics())
    self._health.look(version, result.metrics())
    self._keeper.evaluated(version, result.metrics())
    for row in result.rows():
      self._answers.append(row)
    self._answers.flush()
    self._progress.note(
        f'evaluation at version {version}: accuracy {whole.accuracy:.3f} ±'
        f' {whole.standard_error:.3f}, mean score {whole.score_mean:.3f} over'
        f' {whole.problems} problems'
    )
    if len(result.by_source) > 1 or whole.pass_at or whole.failed:
      self._progress.note(table_text(result))

  def _show(self, result: Evaluation) -> None:
    """Prints some answers, spread evenly over the problems."""
    count = min(self._settings.evaluation.show, len(result.answers))
    places = np.linspace(0, len(result.answers) - 1, count, dtype=int)
    for place in places:
      answer = result.answers[place]
      problem = self._prepared.evaluation[answer.draw_index]
      score = answer.status.value if answer.score is None else answer.score
      prompt = self._spell(self._render(problem))
      self._progress.note(f'  {prompt!r} -> {answer.text!r} ({score})')

  # Its parts.

  def _build_workflow(self, **parts: Any) -> Workflow:
    """The workflow of the settings, for training or evaluation.

    Args:
      **parts: client, score and sampling of the `WorkflowContext`.
    """
    context = WorkflowContext(
        render=self._render, decode=self._decode, clock=time.monotonic, **parts
    )
    return build_workflow(self._settings.rollout.workflow, context)

  def _render(self, problem: Problem) -> tuple[int, ...]:
    return self._prepared.prompt_ids(problem)

  def _spell(self, ids: Sequence[int] | np.ndarray) -> str:
    """The text of ids that were fed, special tokens written out."""
    return self._prepared.tokenizer.spell([int(i) for i in ids])

  def _decode(self, ids: np.ndarray) -> str:
    return self._prepared.tokenizer.decode(ids.tolist())

  async def _score(
      self, scorer: Scorer, lane: str, draw: Draw, text: str
  ) -> RewardResult:
    key = (draw.purpose, draw.draw_index)
    self._scoring[key] += 1
    try:
      with self._events.span(
          'reward', lane, draw_index=draw.draw_index
      ) as fields:
        result = await self._told(scorer, draw.problem, text)
        fields['status'] = result.status.value
    finally:
      self._scoring[key] -= 1
      if not self._scoring[key]:
        del self._scoring[key]
    return result

  def _served(self, draw: Draw) -> bool:
    """Whether an engine or the verifier works for a draw at the moment."""
    key = (draw.purpose, draw.draw_index)
    return key in self._scoring or self._rollout.client.serves(*key)

  def _build_controller(self) -> Controller:
    rollout = self._settings.rollout
    return Controller(
        draws=self._draws,
        workflow=self._build_workflow(
            client=self._rollout.client,
            score=functools.partial(self._score, self._scorer, 'reward'),
            sampling=self._prepared.sampling,
        ),
        ledger=Ledger(rollout.batch_size, rollout.eta),
        buffer=GroupBuffer(rollout.staleness, rollout.eta),
        group_size=rollout.group_size,
        max_running=self._prepared.max_running,
        max_ready=rollout.max_ready,
        group_s=rollout.group_limit_s,
        served=self._served,
        clock=time.monotonic,
        observe=lambda kind, draw_index, **fields: self._events.instant(
            kind, 'data', draw_index=draw_index, **fields
        ),
        failures=self._settings.failures,
        informative=scores_differ if rollout.dynamic_sampling else None,
        uninformative_limit=(
            rollout.dynamic_sampling_tries * rollout.batch_size
        ),
    )

  # What is written down.

  def _facts(self, controller: Controller) -> dict[str, float]:
    """Metrics of the host, at the moment."""
    flow = self._async.call(lambda: dataclasses.replace(controller.ledger))
    counts = dict(self._scorer.counts)
    scored = {k: n - self._counted.get(k, 0) for k, n in counts.items()}
    self._counted = counts
    facts = {
        'drawn': flow.drawn,
        'trained': flow.trained,
        'dropped': sum(flow.dropped.values()),
        'dropped_uninformative': flow.dropped[DropReason.UNINFORMATIVE],
        'dropped_unfinished': flow.dropped[DropReason.UNFINISHED],
        'dropped_stale': flow.dropped[DropReason.STALE],
        'dropped_tokens': controller.costs.dropped_tokens,
        'length_bias': controller.costs.length_bias,
        'in_flight': flow.outstanding,
        'running': flow.running,
        'ready': flow.ready,
        'groups_failed': controller.failed_groups,
        'reward_errors': counts['error'],
        'reward_timeouts': counts['timeout'],
        'reward_unparseable': counts['unparseable'],
        'reward_unparseable_fraction': (
            scored['unparseable'] / max(1, sum(scored.values()))
        ),
        'unfinished_members': controller.unfinished_members,
        'retried_members': controller.retried_members,
        **self._engine_deaths,
        'silences': self._watchdog.told,
        **self._rollout.engine_counts,
        'rss_bytes': run_folder.rss_bytes(),
        'heap_bytes': run_folder.heap_bytes(),
        'peak_rss_bytes': run_folder.peak_rss_bytes(),
        'recompiles': self._compilations.since_warm,
    }
    stalls = self._swap_stalls()
    last = [of_replica[-1] for of_replica in stalls if of_replica]
    if last:
      facts['swap_stall_ms'] = 1000 * max(last)
    return facts

  def _record(
      self, step: HandedOut, values: dict[str, float], book: Book
  ) -> None:
    self._tell_deaths()
    self._tell_reward_output()
    book.add(values)
    rates = book.rates(step.mark)
    rows = {**values, **step.facts, **rates, 'step_s': step.seconds}
    rows.pop('trained_tokens')
    version = step.version + 1
    self._metrics.write(version, version, rows)
    self._health.look(version, rows)
    self._keeper.trained(step.groups, rows)
    self._write_samples(version, step.groups)
    self._progress.update(
        step=version,
        version=version,
        reward=values['reward_mean'],
        staleness=values.get('staleness_mean'),
        rollout_tokens_per_s=rates['rollout_tokens_per_s'],
        trained_tokens_per_s=rates['trained_tokens_per_s'],
    )

  def _swap_stalls(self) -> list[list[float]]:
    """Returns the seconds for which the last swaps stopped each replica.

    The first swap of a replica starts it and stops nothing. It is left out
    while it is among those that are kept.
    """
    stalls = []
    for loop in self._rollout.loops:
      lane = f'swap/{loop.name}'
      after_first = self._events.count('swap', lane) - 1
      kept = self._events.durations('swap', lane)
      stalls.append(kept[-after_first:] if after_first > 0 else [])
    return stalls

  def _swaps(self) -> int:
    """Counts weight swaps, excluding initial loads."""
    return sum(
        max(0, self._events.count('swap', f'swap/{loop.name}') - 1)
        for loop in self._rollout.loops
    )

  def _write_samples(self, step: int, groups: Sequence[Group]) -> None:
    for group in groups:
      for trajectory in group.trajectories:
        sampled = trajectory.sampled
        fed = trajectory.ids[: int(np.argmax(sampled))]
        self._samples.write(
            prompt=self._spell(fed),
            prompt_ids=fed,
            completion=self._text(trajectory),
            reward=trajectory.reward.score,
            ids=trajectory.ids[sampled],
            versions=trajectory.versions[sampled],
            logps=trajectory.logps[sampled],
            step=step,
            draw_index=group.draw_index,
            sample=trajectory.sample,
            stop_reason=trajectory.stop_reason,
        )
    self._samples.flush()

  @property
  def _seconds(self) -> float:
    """Seconds of the run so far, those of earlier attempts included."""
    earlier = self._carried.sums['seconds'] if self._carried else 0.0
    return earlier + time.monotonic() - self._started

  def _text(self, trajectory: Trajectory) -> str:
    """Returns the text of what was sampled, without special tokens."""
    return self._decode(trajectory.ids[trajectory.sampled])

  def _finish(
      self,
      controller: Controller,
      book: Book,
      after: Evaluation,
  ) -> dict[str, Any]:
    ledger, before = controller.ledger, self._before
    stalls = [s for of_replica in self._swap_stalls() for s in of_replica]
    summary = {
        'name': self._settings.name,
        'eval_before': before['accuracy'],
        'eval_after': after.whole.accuracy,
        'eval_score_before': before['score_mean'],
        'eval_score_after': after.whole.score_mean,
        'eval_standard_error': after.whole.standard_error,
        'evaluation': after.to_dict(),
        'evaluations_skipped': self._evaluations.skipped,
        'wall_s': self._seconds,
        'attempt': 0 if self._carried is None else self._carried.attempt + 1,
        **self._keeper.counts(),
        'train_wall_s': book.seconds,
        'steps': self._settings.steps,
        'eta': self._settings.rollout.eta,
        'drawn': ledger.drawn,
        'trained': ledger.trained,
        'dropped': sum(ledger.dropped.values()),
        'left_out': dict(self._prepared.left_out),
        'dropped_by_reason': {r.value: n for r, n in ledger.dropped.items()},
        'dropped_tokens': controller.costs.dropped_tokens,
        'length_bias': controller.costs.length_bias,
        'in_flight': ledger.outstanding,
        'ready_pauses': controller.ready_pauses,
        'events_lost': self._events.lost,
        'failed_members': controller.failed_members,
        'unfinished_members': controller.unfinished_members,
        'retried_members': controller.retried_members,
        **self._engine_deaths,
        'silences': self._watchdog.told,
        'rewards': dict(self._scorer.counts),
        'unhealthy': self._health.report(),
        **book.summary(),
        'recompiles_after_warmup': self._compilations.since_warm,
        'recompiled_after_warmup': self._compilations.names_since_warm[:20],
        'discarded_tokens': self._rollout.discarded_tokens,
        'cache_bytes': sum(
            decode_state_bytes(loop.engine) for loop in self._rollout.loops
        ),
        'cache_releases': self._rollout.cache_releases,
        **self._rollout.engine_counts,
        'swaps': self._swaps(),
        'swap_stall_ms_p50': 1000 * float(np.median(stalls)) if stalls else 0.0,
        'peak_rss_bytes': run_folder.peak_rss_bytes(),
    }
    folder = self._folder
    self._events.flush()
    trace.write_trace(folder / run_folder.EVENTS, folder / run_folder.TRACE)
    plots.plot_folder(folder)
    run_folder.write_json(folder / run_folder.SUMMARY, summary)
    for line in self._health.lines():
      self._progress.note(line)
    first, last = summary['eval_before'], after.whole.accuracy
    since = '' if first is None else f'{first:.3f} -> '
    seconds = summary['wall_s']
    self._progress.note(
        f'accuracy {since}{last:.3f} in {seconds:.0f} s; see {folder}'
    )
    return summary


def _remove_if_empty(file: pathlib.Path) -> None:
  if file.exists() and not file.stat().st_size:
    file.unlink()


@dataclasses.dataclass(frozen=True)
class Mark:
  """Sums of a `Book` at a moment, since training began.

  Attributes:
    seconds: of wall time.
    tokens: drawn by all replicas.
    idle: seconds in which replicas had nothing to do, added up.
    waited: seconds in which training waited for groups.
  """

  seconds: float
  tokens: int
  idle: float
  waited: float


class Book:
  """Running sums over the steps of a run.

  Args:
    start: monotonic second at which training began.
    rollout: the engines whose tokens and idle time are counted from then on.
    clock: monotonic seconds.

  Attributes:
    waiting: pauses in which training waits for groups.
  """

  def __init__(
      self,
      start: float,
      rollout: Rollout,
      clock: Callable[[], float] = time.monotonic,
  ):
    self.waiting = Stopwatch(clock)
    self._clock = clock
    self._start = start
    self._end: float | None = None
    self._rollout = rollout
    self._tokens_before = rollout.tokens
    self._idle_before = rollout.idle_seconds
    self._at_end = (0, 0.0)
    self._sums: collections.Counter[str] = collections.Counter()
    self._most: dict[str, float] = {}
    self._skipped = 0.0

  def add(self, values: dict[str, float]) -> None:
    """Takes in the metrics of one step."""
    tokens = values['trained_tokens']
    self._sums['steps'] += 1
    self._sums['trained_tokens'] += tokens
    self._sums['mixed_version'] += values['mixed_version_fraction']
    if 'staleness_mean' in values:
      self._sums['staleness'] += tokens * values['staleness_mean']
    for name in ('staleness_max', 'head_staleness_max',
                 'logprob_gap_fresh_max'):  # fmt: skip
      if name in values:
        self._most[name] = max(values[name], self._most.get(name, 0.0))
    self._skipped = values['skipped_steps']

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, as JSON."""
    tokens, idle = self._rollout_so_far()
    return {
        'seconds': self.seconds,
        'waited': self.waiting.seconds,
        'rollout_tokens': tokens,
        'rollout_idle': idle,
        'sums': dict(self._sums),
        'most': self._most,
        'skipped': self._skipped,
    }

  def restore(self, state: dict[str, Any]) -> None:
    """Counts an earlier attempt in; before the first step of this one."""
    self._start -= state['seconds']
    self.waiting.add(state['waited'])
    self._tokens_before -= state['rollout_tokens']
    self._idle_before -= state['rollout_idle']
    self._sums.update(state['sums'])
    self._most.update(state['most'])
    self._skipped = state['skipped']

  def stop(self) -> None:
    """Training has ended; later tokens and seconds are not its own."""
    self._at_end = self._rollout_so_far()
    self._end = self._clock()

  @property
  def seconds(self) -> float:
    end = self._clock() if self._end is None else self._end
    return end - self._start

  def _rollout_so_far(self) -> tuple[int, float]:
    if self._end is not None:
      return self._at_end
    rollout = self._rollout
    return (
        rollout.tokens - self._tokens_before,
        rollout.idle_seconds - self._idle_before,
    )

  def mark(self) -> Mark:
    """Returns the sums so far, for `rates`."""
    tokens, idle = self._rollout_so_far()
    return Mark(self.seconds, tokens, idle, self.waiting.seconds)

  def rates(self, at: Mark) -> dict[str, float]:
    """Tokens a second and idle shares from the start of training to a mark.

    Args:
      at: a moment by which the steps that were added had been handed out, and
        no other.
    """
    loops = len(self._rollout.loops)
    return {
        'rollout_tokens_per_s': at.tokens / at.seconds,
        'trained_tokens_per_s': self._sums['trained_tokens'] / at.seconds,
        'rollout_idle_fraction': at.idle / (at.seconds * loops),
        'train_idle_fraction': at.waited / at.seconds,
    }

  def summary(self) -> dict[str, float | None]:
    """Staleness, gaps and rates over the whole run.

    `engine_trainer_logprob_gap_max` is over tokens of staleness 0 and None if
    no such token was trained.
    """
    sums, most = self._sums, self._most
    return {
        'staleness_mean': sums['staleness'] / max(1, sums['trained_tokens']),
        'staleness_max': most.get('staleness_max', 0.0),
        'head_staleness_max': most['head_staleness_max'],
        'mixed_version_fraction': sums['mixed_version'] / sums['steps'],
        'engine_trainer_logprob_gap_max': most.get('logprob_gap_fresh_max'),
        'skipped_steps': self._skipped,
        **self.rates(self.mark()),
    }


def scores_differ(group: Group) -> bool:
  """Returns whether a group has scores that differ."""
  return len({t.reward.score for t in group.trajectories}) > 1


def shuffle_rewards(
    groups: Sequence[Group], generator: random.Random
) -> list[Group]:
  """Deals the rewards of a batch out anew among its answers: a control."""
  rewards = [t.reward for g in groups for t in g.trajectories]
  generator.shuffle(rewards)
  dealt = iter(rewards)
  return [
      dataclasses.replace(
          group,
          trajectories=tuple(
              dataclasses.replace(t, reward=next(dealt))
              for t in group.trajectories
          ),
      )
      for group in groups
  ]
