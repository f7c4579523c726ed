"""Workflows: the coroutine that turns one draw into one scored trajectory.

A workflow renders the prompt once, awaits the engine, awaits the reward and
lays everything out per token. It never sees threads, slots or versions other
than those that the completion carries.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Awaitable, Callable, Protocol

import numpy as np

from areal_jax.rollout.client import Client
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


class MemberFailed(Exception):
  """This sample has no score; the group goes on without it.

  `trajectory` is the answer with the status of its reward, None if there was
  no answer either.
  """

  def __init__(self, reason: str, trajectory: Trajectory | None = None):
    super().__init__(reason)
    self.trajectory = trajectory


class Workflow(Protocol):
  """One member of a group: a draw and a sample number to a trajectory."""

  async def __call__(
      self, draw: Draw, sample: int, admitted_version: int
  ) -> Trajectory:
    """Raises `MemberFailed` if this sample cannot be scored."""


def call_workflow(
    workflow: Workflow, draw: Draw, sample: int, admitted_version: int
) -> asyncio.Task[Trajectory]:
  """Starts a call of a workflow as a task of its own.

  So a `CancelledError` that the workflow raises, because a library in it has
  cancelled its own task, can be told from a cancellation of the caller.
  """

  async def call() -> Trajectory:
    try:
      return await workflow(draw, sample, admitted_version)
    except (SystemExit, KeyboardInterrupt) as error:
      # asyncio would end the event loop for these, and nobody would hear of it.
      raise RuntimeError(
          f'a workflow raised {type(error).__name__}: {error}'
      ) from error

  purpose = draw.purpose.name.lower()
  place = f'{purpose} draw {draw.draw_index} sample {sample}'
  return asyncio.create_task(call(), name=f'workflow of {place}')


@dataclasses.dataclass(frozen=True)
class SingleTurn:
  """Prompt, answer, reward.

  Attributes:
    client: who generates.
    render: prompt of a problem to token ids.
    decode: token ids of an answer, without its stop id, to text; a stop string
      is cut off here.
    score: who scores.
    sampling: how answers are sampled.
    clock: seconds, for timestamps.
  """

  client: Client
  render: Callable[[Problem], tuple[int, ...]]
  decode: Callable[[np.ndarray], str]
  score: Score
  sampling: SamplingParams
  clock: Callable[[], float]

  async def __call__(
      self, draw: Draw, sample: int, admitted_version: int
  ) -> Trajectory:
    if draw.purpose is Purpose.TRAIN:
      require_trainable(self.sampling)
    started = self.clock()
    prompt = self.render(draw.problem)
    completion = await self.client.generate(
        Request(
            request_id=(
                f'{draw.purpose.name.lower()}/{draw.draw_index}/{sample}'
            ),
            prompt_ids=prompt,
            sampling=self.sampling,
            draw_index=draw.draw_index,
            sample=sample,
            purpose=draw.purpose,
        )
    )
    generated = self.clock()
    if completion.stop_reason in (StopReason.ABORTED, StopReason.ERROR):
      raise MemberFailed(f'generation {completion.stop_reason.value}')
    text = self.decode(answer_of(completion))[: completion.text_end]
    reward = await self.score(draw, text)
    scored = trajectory(
        draw,
        sample,
        prompt,
        completion,
        reward,
        temperature=self.sampling.temperature,
        admitted_version=admitted_version,
        timestamps={
            'started': started,
            'generated': generated,
            'scored': self.clock(),
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
