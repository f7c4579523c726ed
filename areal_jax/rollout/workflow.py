"""Workflows: the coroutine that turns one draw into one scored trajectory.

A workflow renders the prompt once, awaits the engine, awaits the reward and
lays everything out per token. It never sees threads, slots or versions other
than those that the completion carries. `rollout.workflow` names the function
that builds it; docs/extend.md shows how to write one.
"""

from __future__ import annotations

import asyncio
import dataclasses
import inspect
from typing import Any, Awaitable, Callable, Protocol

import numpy as np

from areal_jax.config import ConfigError, require
from areal_jax.rollout.client import Client
from areal_jax.sandbox.call import load_function
from areal_jax.types import (
    Completion,
    Draw,
    Problem,
    Purpose,
    Request,
    RewardResult,
    RewardStatus,
    SamplingParams,
    StopReason,
    Trajectory,
    segments_of,
)

Score = Callable[[Draw, str], Awaitable[RewardResult]]

SINGLE_TURN = 'areal_jax.rollout.workflow:SingleTurn'  # the default


class MemberFailed(Exception):
  """This sample has no score; the group goes on without it.

  `trajectory` is the answer with the status of its reward, None if there was
  no answer either.
  """

  def __init__(self, reason: str, trajectory: Trajectory | None = None):
    super().__init__(reason)
    self.trajectory = trajectory


class Workflow(Protocol):
  """The protocol of a workflow: draw and sample number to a trajectory."""

  async def __call__(
      self, draw: Draw, sample: int, admitted_version: int
  ) -> Trajectory:
    """Raises `MemberFailed` if this sample cannot be scored."""


@dataclasses.dataclass(frozen=True)
class WorkflowContext:
  """What a run gives to the function that builds its workflow.

  A run builds two workflows: one for training, one for evaluation. They have
  different clients, scorers and sampling.

  Attributes:
    client: generates; `await client.generate(request)`.
    render: turns the prompt of a problem into token ids.
    decode: turns token ids of an answer, without its stop id, into text. A stop
      string is still in the text, from `Completion.text_end` on.
    score: scores a text; `await score(draw, text)`.
    sampling: how answers are sampled.
    clock: gives seconds, for timestamps.
  """

  client: Client
  render: Callable[[Problem], tuple[int, ...]]
  decode: Callable[[np.ndarray], str]
  score: Score
  sampling: SamplingParams
  clock: Callable[[], float]


def load_workflow(spec: str, at: str) -> Callable[[WorkflowContext], Workflow]:
  """The function that builds a workflow, from its `'package.module:function'`.

  Args:
    spec: module and function (or class), with a colon between them.
    at: the setting that holds `spec`, for the message.

  Raises:
    ConfigError: it cannot be imported, or it is no plain function of one
      `WorkflowContext`.
  """
  build = load_function(spec, at)
  require(
      not inspect.iscoroutinefunction(build),
      at,
      spec,
      'a plain function of (context) that returns the coroutine function: this'
      ' is a coroutine function itself',
  )
  try:
    inspect.signature(build).bind(None)
  except (TypeError, ValueError) as error:  # ValueError: it has no signature
    raise ConfigError(
        f'{at} is {spec!r}, which cannot be called with (context): {error}'
    ) from error
  return build


def build_workflow(
    spec: str, context: WorkflowContext, at: str = 'config.rollout.workflow'
) -> Workflow:
  """Builds the workflow that a setting names.

  Raises:
    ConfigError: see `load_workflow`; or what it returned is no coroutine
      function of (draw, sample, admitted_version).
  """
  workflow = load_workflow(spec, at)(context)
  forms = (workflow, type(workflow).__call__ if callable(workflow) else None)
  require(
      any(inspect.iscoroutinefunction(form) for form in forms),
      at,
      spec,
      'a function that returns a coroutine function of (draw, sample,'
      f' admitted_version), and it returned {workflow!r}',
  )
  try:
    inspect.signature(workflow).bind(None, 0, 0)
  except TypeError as error:
    raise ConfigError(
        f'{at} is {spec!r}, and what it returned cannot be called with (draw,'
        f' sample, admitted_version): {error}'
    ) from error
  return workflow


def call_workflow(
    workflow: Workflow, draw: Draw, sample: int, admitted_version: int
) -> asyncio.Task[Trajectory]:
  """Starts a call of a workflow as a task of its own.

  So a `CancelledError` that the workflow raises, because a library in it has
  cancelled its own task, can be told from a cancellation of the caller. The
  task raises what `check_trajectory` refuses.
  """

  async def call() -> Trajectory:
    try:
      made = await workflow(draw, sample, admitted_version)
    except (SystemExit, KeyboardInterrupt) as error:
      # asyncio would end the event loop for these, and nobody would hear of it.
      raise RuntimeError(
          f'a workflow raised {type(error).__name__}: {error}'
      ) from error
    check_trajectory(made, draw, sample)
    return made

  purpose = draw.purpose.name.lower()
  place = f'{purpose} draw {draw.draw_index} sample {sample}'
  return asyncio.create_task(call(), name=f'workflow of {place}')


def check_trajectory(made: Any, draw: Draw, sample: int) -> None:
  """Refuses what training could not take from a workflow of the user's.

  Raises:
    TypeError: the workflow returned no `Trajectory`.
    ValueError: it is of another draw or sample, has no score, no sampled token,
      or arrays of different lengths.
  """
  if not isinstance(made, Trajectory):
    raise TypeError(f'a workflow returned {made!r}, wanted a Trajectory')
  seen = (made.draw_index, made.sample)
  if seen != (draw.draw_index, sample):
    raise ValueError(
        f'a workflow returned a trajectory of (draw_index, sample) = {seen},'
        f' wanted {(draw.draw_index, sample)}'
    )
  lengths = {
      name: len(getattr(made, name))
      for name in ('ids', 'loss_mask', 'logps', 'versions', 'turn_ids')
  }
  if len(set(lengths.values())) > 1:
    raise ValueError(
        f'a workflow returned a trajectory with arrays of lengths {lengths},'
        ' wanted one length'
    )
  if not made.sampled.any():
    raise ValueError(
        'a workflow returned a trajectory without a sampled token (versions is'
        ' -1 everywhere), wanted at least one'
    )
  if made.reward.status is not RewardStatus.OK:
    raise ValueError(
        'a workflow returned a trajectory whose reward has the status'
        f" {made.reward.status.value!r}, wanted 'ok'; raise MemberFailed where"
        ' there is no score'
    )


@dataclasses.dataclass(frozen=True)
class SingleTurn:
  """Prompt, answer, reward: the default of `rollout.workflow`.

  Attributes:
    context: see `WorkflowContext`.
  """

  context: WorkflowContext

  async def __call__(
      self,
      draw: Draw,
      sample: int,
      admitted_version: int,
      *,
      branch: int = 0,
  ) -> Trajectory:
    """Asks once and scores the answer.

    Args:
      draw: the problem.
      sample: number of the member in its group.
      admitted_version: version at which the draw was admitted.
      branch: names another random stream of the same sample: a workflow that
        asks again gets another answer only from another branch.

    Raises:
      MemberFailed: there is no answer, or no score.
      ValueError: see `require_trainable`.
    """
    run = self.context
    if draw.purpose is Purpose.TRAIN:
      require_trainable(run.sampling)
    started = run.clock()
    prompt = run.render(draw.problem)
    name = f'{draw.purpose.name.lower()}/{draw.draw_index}/{sample}'
    completion = await run.client.generate(
        Request(
            request_id=f'{name}/{branch}' if branch else name,
            prompt_ids=prompt,
            sampling=run.sampling,
            draw_index=draw.draw_index,
            sample=sample,
            branch=branch,
            purpose=draw.purpose,
        )
    )
    generated = run.clock()
    if completion.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
      raise MemberFailed(f'generation {completion.stop_reason.value}')
    text = run.decode(answer_of(completion))[: completion.text_end]
    reward = await run.score(draw, text)
    scored = trajectory(
        draw,
        sample,
        prompt,
        completion,
        reward,
        temperature=run.sampling.temperature,
        admitted_version=admitted_version,
        timestamps={
            'started': started,
            'generated': generated,
            'scored': run.clock(),
        },
    )
    if reward.status is not RewardStatus.OK:
      raise MemberFailed(
          f'reward {reward.status.value}: {reward.detail}', scored
      )
    return scored


def require_trainable(sampling: SamplingParams) -> None:
  """Refuses sampling whose log-probs training would compute wrongly.

  Raises:
    ValueError: with the settings.
  """
  if sampling.untrainable:
    used = {name: getattr(sampling, name) for name in sampling.untrainable}
    raise ValueError(
        f'training answers are sampled with {used}, wanted temperature alone:'
        ' the trainer computes their log-probs from logits and temperature, so'
        ' its ratios would be those of another distribution'
    )


def answer_of(completion: Completion) -> np.ndarray:
  """[T] ids of the answer without the stop id that ended it.

  A stop string is still in there: it may begin inside of a token.
  """
  if completion.stop_reason is StopReason.STOP:
    return completion.ids[:-1]
  return completion.ids


def trajectory(
    draw: Draw,
    sample: int,
    prompt: tuple[int, ...],
    completion: Completion,
    reward: RewardResult,
    *,
    temperature: float,
    admitted_version: int,
    timestamps: dict[str, float],
) -> Trajectory:
  """Lays a prompt and its completion out per token."""
  n = len(prompt)

  def after_prompt(filler, values, dtype):
    return np.concatenate([np.full(n, filler, dtype), values]).astype(dtype)

  ids = np.concatenate([np.asarray(prompt, np.int32), completion.ids])
  return Trajectory(
      draw_index=draw.draw_index,
      sample=sample,
      segments=tuple(segments_of(n, completion)),
      ids=ids.astype(np.int32),
      loss_mask=after_prompt(0, np.ones(len(completion.ids)), np.float32),
      logps=after_prompt(0, completion.logps, np.float32),
      versions=after_prompt(-1, completion.versions, np.int32),
      turn_ids=np.zeros(len(ids), np.int32),
      reward=reward,
      temperature=temperature,
      admitted_version=admitted_version,
      routing=completion.routing,
      timestamps=timestamps,
  )
