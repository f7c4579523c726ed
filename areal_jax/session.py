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

import contextlib
import dataclasses
import os
import pathlib
import random
import threading
import time
from typing import Any, Sequence

import jax
import numpy as np

from areal_jax import config as config_lib
from areal_jax.buffer import GroupBuffer
from areal_jax.cluster.local import AsyncThread, Rollout, build_rollout
from areal_jax.data.stream import ProblemStream
from areal_jax.experiment import Experiment, Prepared, prepare
from areal_jax.ledger import Ledger
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices, cut, devices_needed
from areal_jax.models import hf, transformer
from areal_jax.rewards.scorer import Scorer
from areal_jax.rollout.controller import Controller
from areal_jax.rollout.evaluation import Evaluation, evaluate
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry import plots, run_folder, trace
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.metrics import MetricWriter
from areal_jax.telemetry.progress import Progress
from areal_jax.telemetry.samples import SampleWriter
from areal_jax.train.supervised import supervised_warm_start
from areal_jax.train.trainer import Trainer
from areal_jax.types import (
    Draw,
    Group,
    Problem,
    RewardResult,
    SamplingParams,
    Trajectory,
)

TOKENIZER = 'tokenizer.model'
WARM_START = 'warm_start'  # the policy that reinforcement learning starts from
POLICY = 'policy'  # the trained policy, in the Hugging Face layout


@dataclasses.dataclass(frozen=True)
class Result:
  """What a finished run leaves: its folder and its summary, as written."""

  folder: pathlib.Path
  summary: dict[str, Any]


def run(experiment: Experiment) -> Result:
  """Runs an experiment to its end.

  Raises:
    ConfigError: a mistake in the settings; nothing was written.
    BaseException: what ended the run; its folder holds all until then.
  """
  started = time.monotonic()
  prepared = prepare(experiment)
  settings = prepared.settings
  slices = cut(_devices(settings), settings.mesh)
  rules = Rules()
  with contextlib.ExitStack() as stack:
    params = _first_params(prepared, slices, rules)
    folder = run_folder.new_run_folder(settings.output, settings.name)
    session = stack.enter_context(
        Session(prepared, slices, rules, folder, started)
    )
    return Result(folder, session.run(params))


def _devices(settings: Experiment) -> Sequence[jax.Device]:
  """The machine's devices; on a CPU, as many pretended ones as are needed.

  Has an effect only before jax starts: a process that has started it already
  (a notebook, a test) keeps its devices, and so does one with real ones.
  """
  mesh = settings.mesh
  if max(mesh.train.devices, mesh.rollout.tensor) > 1:
    # Two slices that dispatch collectives side by side on a CPU deadlock in a
    # thread pool of the size that two cores give. Without collectives the
    # larger pool only costs: 1.6 times the time of a small train step.
    os.environ.setdefault('NPROC', str(max(16, 4 * devices_needed(mesh))))
  forced = 'xla_force_host_platform_device_count'
  if forced not in os.environ.get('XLA_FLAGS', ''):
    with contextlib.suppress(RuntimeError):
      jax.config.update('jax_num_cpu_devices', devices_needed(mesh))
  return jax.devices()


def _first_params(prepared: Prepared, slices: Slices, rules: Rules) -> Any:
  """The policy's weights as loaded or drawn, on the train mesh."""
  settings, model = prepared.settings, prepared.model
  if not settings.policy.path:
    return transformer.init_params(model, settings.seed, slices.train, rules)
  _, params = hf.load_hf(
      settings.policy.path,
      slices.train,
      rules,
      overrides={
          'vocab_multiple': model.vocab_multiple,
          'layer_loop': model.layer_loop,
          'compute_dtype': model.compute_dtype,
          'remat': model.remat,
      },
  )
  return params


class Session:
  """The machines of one run, from their building to their end.

  Args:
    prepared: checked settings and what they name.
    slices: train and rollout meshes.
    rules: logical to mesh axes.
    folder: where everything is written.
    started: monotonic second at which the run began.
  """

  def __init__(
      self,
      prepared: Prepared,
      slices: Slices,
      rules: Rules,
      folder: pathlib.Path,
      started: float,
  ):
    settings = prepared.settings
    self._prepared = prepared
    self._settings = settings
    self._slices = slices
    self._rules = rules
    self._folder = folder
    self._started = started
    self._stack = contextlib.ExitStack()
    self._compilations = CompilationCounter()
    self._progress = Progress(settings.steps)
    self._shuffle = random.Random(settings.seed)
    # Slices that share devices take turns: two programs with collectives that
    # reach the devices in different orders would wait for each other for ever.
    self._turns = threading.Lock() if settings.mesh.colocated else None

  def __enter__(self) -> Session:
    with contextlib.ExitStack() as stack:
      self._open(stack)
      self._stack = stack.pop_all()
    return self

  def __exit__(self, *exception: Any) -> None:
    self._stack.close()

  def _open(self, stack: contextlib.ExitStack) -> None:
    settings, folder = self._settings, self._folder
    run_folder.write_json(
        folder / run_folder.CONFIG, config_lib.to_dict(settings)
    )
    (folder / TOKENIZER).write_bytes(self._prepared.tokenizer_model)
    stack.callback(self._progress.close)
    self._compilations.install()
    stack.callback(self._compilations.uninstall)
    self._events = stack.enter_context(EventLog(folder / run_folder.EVENTS))
    self._metrics = MetricWriter(folder)
    stack.callback(self._metrics.close)
    self._samples = SampleWriter(
        folder / run_folder.SAMPLES, settings.sample_bytes
    )
    stack.callback(self._samples.close)
    reward = settings.reward
    self._scorer = Scorer(reward.function, reward.workers, reward.timeout_s)
    stack.callback(self._scorer.close)
    self._scorer.start()
    # Ended in the opposite order: engines before the event loop they answer.
    self._async = AsyncThread('controller')
    stack.callback(self._async.stop)
    self._rollout = self._build_rollout()
    stack.callback(self._rollout.stop)

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
        dtype=rollout.dtype or None,
    )

  # The walk.

  def run(self, params: Any) -> dict[str, Any]:
    """Warm start, evaluation, training, evaluation; returns the summary."""
    params = self._warm_start(params)
    trainer = Trainer(
        self._prepared.model,
        self._settings.train,
        self._slices.train,
        self._rules,
        params,
    )
    self._warm_up(trainer)
    before = self._evaluate(trainer)
    self._compilations.mark_warm()
    controller = self._controller()
    book = Book(time.monotonic(), self._rollout)
    self._async.call(controller.start)
    try:
      for _ in range(self._settings.steps):
        self._step(trainer, controller, book)
    finally:
      book.stop()
      self._async.run(controller.stop(), timeout_s=60)
    after = self._evaluate(trainer)
    hf.save_hf(self._folder / POLICY, self._prepared.model, trainer.params)
    return self._finish(controller, book, before, after)

  def _warm_start(self, params: Any) -> Any:
    settings, prepared = self._settings, self._prepared
    if not settings.warm_start.steps:
      return params
    total = settings.warm_start.steps

    def report(done: int, loss: float) -> None:
      self._progress.note(f'warm start {done}/{total}: loss {loss:.3f}')

    with self._events.span('warm start', 'train', steps=total):
      params = supervised_warm_start(
          prepared.model,
          params,
          prepared.demonstrations,
          settings.warm_start,
          self._slices.train,
          self._rules,
          report,
      )
    hf.save_hf(self._folder / WARM_START, prepared.model, params)
    return params

  def _warm_up(self, trainer: Trainer) -> None:
    """Compiles everything, starts the engines and hands them version 0."""
    with self._events.span('compile', 'train'):
      trainer.warm_up()
      handle = self._rollout.publisher.publish(0, trainer.params)
      _, weights = self._rollout.publisher.latest()
      for loop in self._rollout.loops:
        loop.engine.warm_up(weights[f'engine/{loop.name}'])
    for loop in self._rollout.loops:
      loop.start()
    handle.wait(60)

  def _step(self, trainer: Trainer, controller: Controller, book: Book) -> None:
    """Waits for B groups, trains on them, publishes the next version."""
    start = time.monotonic()
    version = trainer.version
    with self._events.span('wait', 'train', version=version):
      groups = self._async.run(
          controller.next_batch(self._settings.rollout.batch_size),
          timeout_s=self._settings.rollout.wait_s,
          explain=controller.explain,
          check=self._rollout.check,
      )
    book.waited += time.monotonic() - start
    if self._settings.shuffle_rewards:
      groups = shuffle_rewards(groups, self._shuffle)
    with self._turns or contextlib.nullcontext():
      with self._events.span('step', 'train', version=version) as fields:
        values = trainer.step(groups)
        fields['staleness'] = values['staleness_mean']
      self._rollout.publisher.publish(trainer.version, trainer.params)
    self._async.call(controller.published, trainer.version)
    self._record(trainer.version, groups, values, controller, book,
                 time.monotonic() - start)  # fmt: skip

  def _evaluate(self, trainer: Trainer) -> Evaluation:
    """Accuracy of the version published last, while nothing is trained."""
    workflow = self._workflow(self._prepared.evaluation_sampling)
    version = trainer.version
    with self._events.span('evaluate', 'evaluate', version=version) as fields:
      result = self._async.run(
          evaluate(
              self._prepared.evaluation,
              workflow,
              self._settings.evaluation,
              version,
          ),
          timeout_s=self._settings.rollout.wait_s,
          check=self._rollout.check,
      )
      fields['accuracy'] = result.accuracy
    if set(result.versions) - {version}:
      raise RuntimeError(
          f'evaluation of version {version} was answered by versions'
          f' {result.versions}'
      )
    self._metrics.write(version, version, {'eval_accuracy': result.accuracy})
    self._progress.note(
        f'evaluation at version {version}: accuracy {result.accuracy:.3f},'
        f' mean score {result.score_mean:.3f} ± {result.standard_error:.3f}'
        f' over {result.problems} problems'
    )
    self._show(result)
    return result

  def _show(self, result: Evaluation) -> None:
    """Prints some answers, spread evenly over the problems."""
    count = min(self._settings.evaluation.show, len(result.trajectories))
    places = np.linspace(0, len(result.trajectories) - 1, count, dtype=int)
    for place in places:
      trajectory = result.trajectories[place]
      problem = self._prepared.evaluation[trajectory.draw_index]
      text = self._text(trajectory)
      self._progress.note(
          f'  {problem.prompt!r} -> {text!r} ({trajectory.reward.score:g})'
      )

  # Its parts.

  def _workflow(self, sampling: SamplingParams) -> SingleTurn:
    tokenizer = self._prepared.tokenizer
    return SingleTurn(
        client=self._rollout.client,
        render=self._render,
        decode=lambda ids: tokenizer.decode(ids.tolist()),
        score=self._score,
        sampling=sampling,
        clock=time.monotonic,
    )

  def _render(self, problem: Problem) -> tuple[int, ...]:
    return self._prepared.prompts[problem.id]

  async def _score(self, draw: Draw, text: str) -> RewardResult:
    with self._events.span(
        'reward', 'reward', draw_index=draw.draw_index
    ) as fields:
      result = await self._scorer(draw.problem, text)
      fields['status'] = result.status.value
    return result

  def _controller(self) -> Controller:
    rollout = self._settings.rollout
    return Controller(
        draws=ProblemStream(self._prepared.train, seed=self._settings.seed),
        workflow=self._workflow(self._prepared.sampling),
        ledger=Ledger(rollout.batch_size, rollout.eta),
        buffer=GroupBuffer(rollout.staleness, rollout.eta),
        group_size=rollout.group_size,
        max_running=self._prepared.max_running,
        clock=time.monotonic,
        observe=lambda kind, draw_index, **fields: self._events.instant(
            kind, 'data', draw_index=draw_index, **fields
        ),
    )

  # What is written down.

  def _record(
      self,
      version: int,
      groups: Sequence[Group],
      values: dict[str, float],
      controller: Controller,
      book: Book,
      seconds: float,
  ) -> None:
    book.add(values)
    rows = dict(values)
    rows.pop('trained_tokens')
    flow = self._async.call(lambda: dataclasses.replace(controller.ledger))
    counts = self._scorer.counts
    rates = book.rates()
    rows |= {
        'drawn': flow.drawn,
        'trained': flow.trained,
        'dropped': sum(flow.dropped.values()),
        'in_flight': flow.outstanding,
        'running': flow.running,
        'ready': flow.ready,
        'groups_failed': sum(bool(g.failed) for g in groups),
        'reward_errors': counts['error'],
        'reward_timeouts': counts['timeout'],
        'reward_unparseable': counts['unparseable'],
        'step_s': seconds,
        'peak_rss_bytes': run_folder.peak_rss_bytes(),
        'recompiles': self._compilations.since_warm,
        **rates,
    }
    stalls = self._events.durations('swap')[1:]  # the first one starts the run
    if stalls:
      rows['swap_stall_ms'] = 1000 * stalls[-1]
    self._metrics.write(version, version, rows)
    self._write_samples(version, groups)
    self._progress.update(
        step=version,
        version=version,
        reward=values['reward_mean'],
        staleness=values.get('staleness_mean'),
        rollout_tokens_per_s=rates['rollout_tokens_per_s'],
        trained_tokens_per_s=rates['trained_tokens_per_s'],
    )

  def _write_samples(self, step: int, groups: Sequence[Group]) -> None:
    for group in groups:
      for trajectory in group.trajectories:
        sampled = trajectory.loss_mask > 0
        self._samples.write(
            prompt=str(group.draw.problem.prompt),
            completion=self._text(trajectory),
            reward=trajectory.reward.score,
            versions=trajectory.versions[sampled],
            logps=trajectory.logps[sampled],
            step=step,
            draw_index=group.draw_index,
            sample=trajectory.sample,
            stop_reason=trajectory.stop_reason,
        )
    self._samples.flush()

  def _text(self, trajectory: Trajectory) -> str:
    """What was sampled, special tokens left out."""
    sampled = trajectory.ids[trajectory.loss_mask > 0]
    return self._prepared.tokenizer.decode(sampled.tolist())

  def _finish(
      self,
      controller: Controller,
      book: Book,
      before: Evaluation,
      after: Evaluation,
  ) -> dict[str, Any]:
    ledger = controller.ledger
    stalls = self._events.durations('swap')[1:]
    summary = {
        'name': self._settings.name,
        'eval_before': before.accuracy,
        'eval_after': after.accuracy,
        'eval_score_before': before.score_mean,
        'eval_score_after': after.score_mean,
        'eval_standard_error': after.standard_error,
        'wall_s': time.monotonic() - self._started,
        'train_wall_s': book.seconds,
        'steps': self._settings.steps,
        'eta': self._settings.rollout.eta,
        'drawn': ledger.drawn,
        'trained': ledger.trained,
        'dropped': sum(ledger.dropped.values()),
        'dropped_by_reason': {r.value: n for r, n in ledger.dropped.items()},
        'in_flight': ledger.outstanding,
        'failed_members': controller.failed_members,
        'rewards': dict(self._scorer.counts),
        **book.summary(),
        'recompiles_after_warmup': self._compilations.since_warm,
        'recompiled_after_warmup': self._compilations.names_since_warm[:20],
        'swaps': len(stalls),
        'swap_stall_ms_p50': 1000 * float(np.median(stalls)) if stalls else 0.0,
        'peak_rss_bytes': run_folder.peak_rss_bytes(),
    }
    folder = self._folder
    self._events.flush()
    trace.write_trace(folder / run_folder.EVENTS, folder / run_folder.TRACE)
    plots.plot_folder(folder)
    run_folder.write_json(folder / run_folder.SUMMARY, summary)
    self._progress.note(
        f'accuracy {before.accuracy:.3f} -> {after.accuracy:.3f} in'
        f' {summary["wall_s"]:.0f} s; see {folder}'
    )
    return summary


class Book:
  """Running sums over the steps of a run.

  Args:
    start: monotonic second at which training began.
    rollout: the engines whose tokens and idle time are counted from then on.
  """

  def __init__(self, start: float, rollout: Rollout):
    self.waited = 0.0  # seconds that training waited for groups
    self._start = start
    self._end: float | None = None
    self._rollout = rollout
    self._tokens_before = rollout.tokens
    self._idle_before = rollout.idle_seconds
    self._at_end = (0, 0.0)
    self._trained_tokens = 0.0
    self._steps: list[dict[str, float]] = []

  def add(self, values: dict[str, float]) -> None:
    """Takes in the metrics of one step."""
    self._trained_tokens += values['trained_tokens']
    self._steps.append(values)

  def stop(self) -> None:
    """Training has ended; later tokens and seconds are not its own."""
    self._at_end = self._rollout_so_far()
    self._end = time.monotonic()

  @property
  def seconds(self) -> float:
    return (self._end or time.monotonic()) - self._start

  def _rollout_so_far(self) -> tuple[int, float]:
    if self._end is not None:
      return self._at_end
    rollout = self._rollout
    return (
        rollout.tokens - self._tokens_before,
        rollout.idle_seconds - self._idle_before,
    )

  def rates(self) -> dict[str, float]:
    """Tokens a second and idle shares since training began."""
    tokens, idle = self._rollout_so_far()
    seconds = self.seconds
    return {
        'rollout_tokens_per_s': tokens / seconds,
        'trained_tokens_per_s': self._trained_tokens / seconds,
        'rollout_idle_fraction': idle / (seconds * len(self._rollout.loops)),
        'train_idle_fraction': self.waited / seconds,
    }

  def summary(self) -> dict[str, float | None]:
    """Staleness, gaps and rates over the whole run.

    `engine_trainer_logprob_gap_max` is over tokens of staleness 0 and None if
    no such token was trained.
    """
    weights = [s['trained_tokens'] for s in self._steps]
    gaps = [
        s['logprob_gap_fresh_max']
        for s in self._steps
        if 'logprob_gap_fresh_max' in s
    ]

    def of(name):
      return [s[name] for s in self._steps if name in s]

    return {
        'staleness_mean': float(
            np.average(of('staleness_mean'), weights=weights)
        ),
        'staleness_max': max(of('staleness_max')),
        'head_staleness_max': max(of('head_staleness_max')),
        'mixed_version_fraction': float(np.mean(of('mixed_version_fraction'))),
        'engine_trainer_logprob_gap_max': max(gaps, default=None),
        'skipped_steps': of('skipped_steps')[-1],
        **self.rates(),
    }


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
