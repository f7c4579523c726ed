"""The first checks of any run, on a small budget, with real runs.

  step 1      engine and trainer agree, the ratio is 1, nothing is clipped
  η = 0       a run equals a plain loop: generate, train, repeat
  weights     what engines run is what was trained, tensor by tensor
  gap         what is left of the difference, split by cause
  standing    with a learning rate of 0 neither gap nor reward moves
  overfitting eight prompts can be learnt by heart

Runs are written into a folder that is thrown away. They use the devices, the
policy, the reward and the shapes of the settings, and few problems and steps.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
import math
import pathlib
import time
from typing import Any, Iterator, Mapping, Sequence

import jax
import numpy as np

from areal_jax import session
from areal_jax.build import build_trainer, initial_params
from areal_jax.cluster.local import build_rollout
from areal_jax.data.stream import ProblemStream
from areal_jax.doctor.attribution import Attribution, Paths, attribute
from areal_jax.doctor.verdict import Verdict, judge
from areal_jax.mesh.program_cache import keep_programs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut, machine_devices
from areal_jax.models import lora
from areal_jax.prepare.prepared import Prepared, prepare
from areal_jax.rewards.scorer import Scorer
from areal_jax.rollout.workflow import (
    MemberFailed,
    WorkflowContext,
    build_workflow,
)
from areal_jax.sandbox.call import call
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.trainer import Trainer
from areal_jax.types import Draw, Group, Problem, Trajectory

_PLAIN_STEPS = 3
_PROMPTS = 8  # to be learnt by heart
_ATTRIBUTED = 8  # answers whose gap is split
_WARM_START_STEPS = 200  # at most
_OLDER = 3  # versions before the one whose gap is split, to compare with
_WAIT_S = 600.0


def first_checks(
    experiment: Experiment, folder: pathlib.Path, steps: int
) -> Iterator[Verdict]:
  """Runs the checks; later ones are skipped where an earlier run breaks.

  Args:
    experiment: open settings that `prepare` accepts; not changed.
    folder: where runs are written.
    steps: of the runs with a learning rate of 0 and on eight prompts.
  """
  first = small(experiment, folder, 'first', steps=_PLAIN_STEPS)
  first.rollout.eta, first.rollout.exact = 0.0, True
  outcome = call(session.run, first)
  if outcome.status != 'ok':
    yield _broken('a run of three steps', outcome.detail)
    return
  result = outcome.value
  rows = _steps(result.folder)
  yield step_one(rows[0])

  outcome = call(PlainLoop(prepare(starting_from(first, result))).run)
  if outcome.status != 'ok':
    yield _broken('a plain loop', outcome.detail)
  else:
    yield from plain_loop(outcome.value, result.folder)

  standing = starting_from(
      small(experiment, folder, 'standing', steps=steps), result
  )
  standing.train.optimizer.learning_rate = 0.0
  outcome = call(session.run, standing)
  if outcome.status != 'ok':
    yield _broken('a run with a learning rate of 0', outcome.detail)
  else:
    yield stands_still(_steps(outcome.value.folder))

  few = starting_from(small(experiment, folder, 'few', steps=steps), result)
  _only(few, prepare(few).train[:_PROMPTS], folder)
  outcome = call(session.run, few)
  if outcome.status != 'ok':
    yield _broken('a run on eight prompts', outcome.detail)
  else:
    yield overfits(_steps(outcome.value.folder))


# Judging what the runs wrote.


def step_one(row: dict[str, Any]) -> Verdict:
  """Checks the first step at η = 0, where all tokens are fresh."""
  gap = row.get('logprob_gap_staleness_0', math.inf)
  kl = row.get('kl_k3_staleness_0', math.inf)
  ratio, clipped = row['ratio_mean'], row['clip_fraction']
  right = gap < 0.01 and kl < 1e-3
  right = right and abs(ratio - 1) < 1e-5 and clipped == 0
  return judge(
      'step 1',
      right,
      f'engine and trainer differ by {gap:.2g} nats a token (KL {kl:.2g}), the'
      f' ratio is {ratio:.6g}, {clipped:.0%} is clipped',
      'the gap is split below; a ratio other than 1 or clipping means that the'
      ' proximal policy is not the one that is trained',
  )


def plain_loop(plain: Plain, folder: pathlib.Path) -> Iterator[Verdict]:
  """Checks that a run equals the plain loop."""
  ran = {
      (s['step'], s['draw_index'], s['sample']): s
      for s in read_jsonl(folder / run_folder.SAMPLES)
  }
  other, most = [], 0.0
  for step, trajectory in plain.answers:
    own = trajectory.sampled
    key = (step, trajectory.draw_index, trajectory.sample)
    said = ran.get(key)
    if said is None or said['ids'] != trajectory.ids[own].tolist():
      other.append(key)
      continue
    gap = np.abs(np.asarray(said['logps']) - trajectory.logps[own])
    most = max(most, float(gap.max(initial=0.0)))
  yield judge(
      'η = 0',
      not other and most < 1e-5 and len(ran) == len(plain.answers),
      f'{len(plain.answers) - len(other)} of {len(ran)} answers of'
      f' {_PLAIN_STEPS} steps are those of a plain loop, log-probs to'
      f' {most:.1g}'
      + (f'; not (step, draw, sample) {other[0]}' if other else ''),
      'a reward that changes its mind, or a device whose programs do not repeat'
      ' their bits',
  )
  yield judge(
      'weights after a swap',
      not plain.differing,
      f'{plain.tensors - len(plain.differing)} of {plain.tensors} tensors of an'
      f' engine equal what was trained'
      + (f', not {plain.differing[0]}' if plain.differing else ''),
      'rollout.dtype, merge_adapters and the shardings of config.mesh.rollout',
  )
  found = plain.attribution
  right = found.cause == 'numerics' and found.gap < 0.01
  yield judge('gap', right, str(found), _ADVICE[found.cause])


_ADVICE = {
    'numerics': 'float32 in rollout.dtype and model.compute_dtype, and'
    ' JAX_DEFAULT_MATMUL_PRECISION=highest, to see whether it goes',
    'sampling transform': 'temperature and masks must come before the softmax'
    ' on both sides',
    'stale weights': 'the label of a token must be the version that sampled it',
    'stale cache': "rollout.swap='recompute', and no prefix that outlives its"
    ' weights',
    'wrong tokens': 'ids must travel as they were sampled, never decoded and'
    ' encoded again',
}


def stands_still(rows: Sequence[dict[str, Any]]) -> Verdict:
  """Checks that a run with a learning rate of 0 changes nothing."""
  rewards = np.array([row['reward_mean'] for row in rows])
  gaps = [row['logprob_gap_mean'] for row in rows]
  moved = max(row['update_norm'] for row in rows)
  half = len(rewards) // 2
  parts = rewards[:half], rewards[half:]
  error = (
      math.sqrt(sum(p.var(ddof=1) / len(p) for p in parts)) if half > 1 else 0
  )
  drift = parts[1].mean() - parts[0].mean() if half else 0.0
  right = moved == 0 and abs(drift) <= max(4 * error, 1e-6) and max(gaps) < 0.01
  return judge(
      'standing still',
      right,
      f'learning rate 0, {len(rows)} steps: updates of {moved:.2g}, reward'
      f' {parts[0].mean() if half else rewards.mean():.3g} then'
      f' {drift:+.2g} ± {error:.2g}, largest mean gap {max(gaps):.2g}',
      'something other than the optimizer moves the policy, or the gap grows'
      ' with age though all versions are alike: look at caches and labels',
  )


def overfits(rows: Sequence[dict[str, Any]]) -> Verdict:
  """Checks that a run can overfit a few prompts."""
  rewards = np.array([row['reward_mean'] for row in rows])
  part = max(1, len(rewards) // 5)
  first, last = rewards[:part], rewards[-part:]
  said = (
      f'{_PROMPTS} prompts, {len(rows)} steps: reward {first.mean():.3g} ->'
      f' {last.mean():.3g}'
  )
  if all(row['reward_std'] == 0 for row in rows):
    return Verdict(
        'overfitting', 'look', f'{said}; no answer ever differed in its score',
        'a policy that is right now and then, an easier task, or more samples:'
        ' nothing can be learned from equal scores',
    )  # fmt: skip
  spread = max(first.std(), last.std(), 1e-9) / math.sqrt(part)
  return judge(
      'overfitting',
      last.mean() - first.mean() > 2 * spread,
      said,
      'a larger learning rate or more --steps; then advantages (signs, groups)'
      ' and the loss mask',
  )


# The plain loop.


@dataclasses.dataclass(frozen=True)
class Plain:
  """The record of the plain loop.

  Attributes:
    answers: (step, answer) of all steps.
    tensors: of an engine's weights.
    differing: names of those that are not what was trained.
    attribution: of the gap in the last step.
  """

  answers: tuple[tuple[int, Trajectory], ...]
  tensors: int
  differing: tuple[str, ...]
  attribution: Attribution


class PlainLoop:
  """Generates B groups one after another, trains, repeats.

  No controller, ledger, buffer or event loop that goes on: only the machines of
  the run, one at a time.
  """

  def __init__(self, prepared: Prepared):
    settings = prepared.settings
    self._prepared = prepared
    self._rules = Rules()
    keep_programs()
    self._slices = cut(machine_devices(settings.mesh), settings.mesh)
    self._draws = ProblemStream(
        prepared.train, seed=settings.seed, parts=prepared.parts
    )
    reward = settings.reward
    self._scorer = Scorer(reward.function, reward.workers, reward.timeout_s)
    self._rollout = build_rollout(
        prepared.model,
        settings.rollout.engine,
        self._slices,
        self._rules,
        swap=settings.rollout.swap,
        events=EventLog(None),
        dispatch_lock=None,
        tokenizer=prepared.tokenizer,
        dtype=settings.rollout.dtype or None,
        merge=settings.rollout.merge_adapters,
    )
    self._workflow = build_workflow(
        settings.rollout.workflow,
        WorkflowContext(
            client=self._rollout.client,
            render=prepared.prompt_ids,
            decode=lambda ids: prepared.tokenizer.decode(ids.tolist()),
            score=lambda draw, text: self._scorer(draw.problem, text),
            sampling=prepared.sampling,
            clock=time.monotonic,
        ),
    )

  def run(self) -> Plain:
    """All steps of the settings."""
    settings = self._prepared.settings
    mesh, rules = self._slices.train, self._rules
    self._rollout.compile_ahead(settings.rollout.dtype)
    params, _ = initial_params(self._prepared, mesh, rules)
    trainer = build_trainer(self._prepared, params, mesh, rules)
    publisher = self._rollout.publisher
    answers, groups = [], []
    older: dict[int, Any] = {}  # weights by version, on the host
    with contextlib.ExitStack() as stack:
      stack.callback(self._rollout.close)
      stack.callback(self._rollout.stop)
      stack.callback(self._scorer.close)
      for loop in self._rollout.loops:
        loop.start()
      for step in range(1, settings.steps + 1):
        version = trainer.version
        adapters = bool(self._prepared.model.lora.projections) and version > 0
        publisher.publish(
            version,
            trainer.trainable if adapters else trainer.params,
            'adapter' if adapters else 'full',
        ).wait(_WAIT_S)
        groups = [
            asyncio.run(self._group(next(self._draws), version))
            for _ in range(settings.rollout.batch_size)
        ]
        answers += [(step, t) for g in groups for t in g.trajectories]
        if step == settings.steps:
          differing, tensors = self._compare(trainer)
          attribution = self._attribute(groups, version, older)
        elif step >= settings.steps - _OLDER:
          older[version] = jax.device_get(self._held())
        trainer.step([group for group in groups if group.trajectories])
    return Plain(tuple(answers), tensors, differing, attribution)

  async def _group(self, draw: Draw, version: int) -> Group:
    size = self._prepared.settings.rollout.group_size
    said = await asyncio.gather(
        *(self._workflow(draw, sample, version) for sample in range(size)),
        return_exceptions=True,
    )
    for outcome in said:
      if isinstance(outcome, BaseException) and not isinstance(
          outcome, MemberFailed
      ):
        raise outcome
    kept = tuple(t for t in said if isinstance(t, Trajectory))
    failed = tuple(
        (i, str(t)) for i, t in enumerate(said) if not isinstance(t, Trajectory)
    )
    return Group(draw, size, kept, failed, version)

  def _compare(self, trainer: Trainer) -> tuple[tuple[str, ...], int]:
    """Names of the tensors that an engine has otherwise, and how many all."""
    settings = self._prepared.settings.rollout
    params = jax.device_get(trainer.params)
    if settings.merge_adapters:
      params = lora.merged(self._prepared.model, params)[1]
    held = jax.device_get(self._held())

    def same(one: np.ndarray, other: np.ndarray) -> bool:
      one = np.asarray(one).astype(other.dtype)
      if settings.merge_adapters:  # added up on other devices
        return np.allclose(one, other, atol=1e-5)
      return np.array_equal(one, other)

    flags = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(same, params, held)
    )
    differing = [jax.tree_util.keystr(p) for p, equal in flags if not equal]
    return tuple(differing), len(flags)

  def _held(self) -> Any:
    """The weights that an engine runs."""
    _, held = self._rollout.publisher.latest()
    return held[f'engine/{self._rollout.loops[0].name}']

  def _attribute(
      self, groups: Sequence[Group], version: int, older: Mapping[int, Any]
  ) -> Attribution:
    loop = self._rollout.loops[0]
    paths = Paths(
        loop.engine.config,
        {**older, version: self._held()},
        mesh=loop.engine.mesh,
        rules=loop.engine.rules,
        length=loop.engine.settings.max_length,
    )
    records = [t for group in groups for t in group.trajectories]
    # What evaluation samples with should not have got into training.
    other = self._prepared.evaluation_sampling
    shaped = {
        name: getattr(other, name)
        for name in ('temperature', 'top_k', 'top_p', 'min_p',
                     'repetition_penalty', 'frequency_penalty',
                     'presence_penalty')
    }  # fmt: skip
    return attribute(records[:_ATTRIBUTED], paths, transforms=[shaped])


# Settings of small runs.


def small(
    experiment: Experiment, folder: pathlib.Path, name: str, *, steps: int
) -> Experiment:
  """The settings with few steps, one update a step, and nothing else to do."""
  made = copy.deepcopy(experiment)
  made.name, made.output, made.steps = name, str(folder), steps
  made.resume, made.shuffle_rewards = '', False
  made.checkpoint = CheckpointSettings(at_end=False)
  made.profiling = type(made.profiling)()
  made.evaluation = dataclasses.replace(made.evaluation, every=0, show=0)
  made.task.eval_problems = min(made.task.eval_problems, _PROMPTS)
  made.warm_start.steps = min(made.warm_start.steps, _WARM_START_STEPS)
  made.rollout.batch_size = min(made.rollout.batch_size, _PROMPTS)
  made.rollout.dynamic_sampling = False
  made.rollout.staleness = 'soft'
  made.train.minibatches = 1
  made.train.critic.warmup_steps = 0
  made.train.optimizer.warmup_steps = 0
  made.train.optimizer.schedule = 'constant'
  return made


def starting_from(experiment: Experiment, result: session.Result) -> Experiment:
  """The same from the policy that another run began with, warm-started."""
  made = copy.deepcopy(experiment)
  warm = result.folder / run_folder.WARM_START
  if warm.is_dir():
    made.policy.path, made.policy.load = str(warm), 'all'
    made.warm_start.steps = 0
  if not made.tokenizer.path:
    made.tokenizer.path = str(result.folder)
  return made


def _only(
    experiment: Experiment, problems: Sequence[Problem], folder: pathlib.Path
) -> None:
  """Leaves the run these problems to train on, all of them in each step."""
  path = folder / 'few.jsonl'
  rows = [
      {
          'id': p.id,
          'source': p.source,
          'prompt': p.prompt
          if isinstance(p.prompt, str)
          else [dataclasses.asdict(message) for message in p.prompt],
          'answer': p.answer,
          'meta': dict(p.meta),
      }
      for p in problems
  ]
  path.write_text(''.join(f'{json.dumps(row)}\n' for row in rows))
  experiment.task.train_file, experiment.task.train_sources = str(path), ()
  experiment.rollout.batch_size = min(
      experiment.rollout.batch_size, len(problems)
  )


def _steps(folder: pathlib.Path) -> list[dict[str, Any]]:
  """Rows of the training steps."""
  return [r for r in read_jsonl(folder / run_folder.METRICS) if 'loss' in r]


def _broken(what: str, detail: str) -> Verdict:
  return Verdict(what, 'fail', detail.partition('\n')[0], detail)
