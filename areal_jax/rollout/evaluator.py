"""Evaluating one version beside whatever else the engines do.

An evaluator has an engine loop of its own for each rollout replica: the same
`Engine` and so the same compiled programs, but a decode state, a thread and
weights of its own. The weights are those that were published as a version, not
a copy; they are held as long as the evaluation runs, while training publishes
newer ones to its own loops. Draws of purpose EVAL have random streams of their
own, never meet the ledger or the buffer, and leave the order of the training
data alone.
"""

from __future__ import annotations

import asyncio
from typing import Any, Callable, Sequence

import numpy as np

from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.evaluation import (
    Answer,
    Evaluation,
    EvaluationSettings,
    Vote,
    evaluation_of,
)
from areal_jax.rollout.loop import EngineLoop, require_living, stop_all
from areal_jax.rollout.workflow import MemberFailed, Workflow, call_workflow
from areal_jax.types import (
    Draw,
    Problem,
    Purpose,
    RewardStatus,
    StopReason,
    Trajectory,
)

Params = Any

# Answers under way for each slot: enough that no slot waits for a reward, and
# few enough that a large evaluation does not fill the host with requests.
_WAITING_PER_SLOT = 2


class Evaluator:
  """Asks every evaluation problem under the weights of one version.

  Args:
    loops: one for each rollout replica, of swap mode 'drain': a request in
      mid-sentence never meets other weights.
    evicts: whether the others go on without a loop that is dead for good.
  """

  def __init__(self, loops: Sequence[EngineLoop], *, evicts: bool = True):
    self.loops = tuple(loops)
    self._evicts = evicts
    self.client = EngineClient(self.loops)

  def start(self) -> None:
    for loop in self.loops:
      loop.start()

  def stop(self) -> None:
    """Ends all loops; see `EngineLoop.stop`."""
    stop_all(self.loops)

  def explain(self) -> str:
    """Describes what each loop does and who waits for it, a line each."""
    return '\n  '.join(loop.explain() for loop in self.loops)

  def check(self) -> None:
    """Raises what ended a loop, if too few of them live to go on."""
    require_living(self.loops, self._evicts)

  async def evaluate(
      self,
      version: int,
      weights: Sequence[Params],
      problems: Sequence[Problem],
      workflow: Workflow,
      settings: EvaluationSettings,
      *,
      decode: Callable[[np.ndarray], str],
      vote: Vote = str.strip,
      wait_s: float = 600.0,
      busy: Callable[[], bool] = lambda: False,
  ) -> Evaluation:
    """Asks every problem `settings.samples` times, each exactly once.

    One evaluation at a time; the caller sees to that.

    Args:
      version: what the weights are called.
      weights: the parameters of that version on each loop's mesh.
      problems: what to ask; a problem's place is its draw index.
      workflow: answers by this evaluator's client, and scores.
      settings: samples, threshold and k.
      decode: token ids of an answer, without its stop id, to text.
      vote: what a text votes for in maj@k.
      wait_s: longest time without an answer; noticed after twice as long at
        the latest.
      busy: whether a program is being compiled, for which answers may wait.

    Raises:
      TimeoutError: no answer came for so long; says whose is missing.
      ValueError: no problem, or no answer could be scored.
      RuntimeError: an answer came from another version.
      EngineStopped: all loops ended before everything was answered.
    """
    if not problems:
      raise ValueError('0 evaluation problems, wanted at least 1')
    for loop, params in zip(self.loops, weights, strict=True):
      loop.set_weights(version, params, lambda taken: None)
    living = [loop for loop in self.loops if loop.health() != 'dead']
    slots = sum(loop.engine.settings.slots for loop in living or self.loops)
    room = asyncio.Semaphore(_WAITING_PER_SLOT * slots)
    total = len(problems) * settings.samples
    answers: list[Answer] = []
    waiting: dict[tuple[str, int], None] = {}  # in the order of asking

    async def ask(draw: Draw, sample: int) -> None:
      waiting[draw.problem.id, sample] = None
      try:
        answers.append(await _answer(workflow, draw, sample, version, decode))
      finally:
        room.release()
      del waiting[draw.problem.id, sample]
      if len(answers) == total:
        watcher.cancel()

    async def watch() -> None:
      came = -1
      while came < len(answers) or busy():
        came = len(answers)
        await asyncio.sleep(wait_s)
      missing = ', '.join(f'{p} sample {s}' for p, s in list(waiting)[:8])
      raise TimeoutError(
          f'evaluation of version {version}: no answer for {wait_s:g} s, {came}'
          f' of {total} came; it waits for {missing}'
      )

    try:
      async with asyncio.TaskGroup() as tasks:
        watcher = tasks.create_task(watch())
        for place, problem in enumerate(problems):
          draw = Draw(place, 0, problem, Purpose.EVAL)
          for sample in range(settings.samples):
            await room.acquire()
            tasks.create_task(ask(draw, sample))
    except BaseExceptionGroup as failures:
      # The others were cancelled for the first one.
      raise failures.exceptions[0] from failures
    finally:
      for loop in self.loops:
        loop.forget_weights()
    # In a thread: the controller's event loop has better things to do.
    return await asyncio.to_thread(
        evaluation_of, answers, version, settings, vote
    )


async def _answer(
    workflow: Workflow,
    draw: Draw,
    sample: int,
    version: int,
    decode: Callable[[np.ndarray], str],
) -> Answer:
  """Generates and scores one answer, or records why there is none."""
  detail, said = '', None
  call = call_workflow(workflow, draw, sample, version)
  try:
    await asyncio.wait([call])
  finally:  # also where we are cancelled ourselves
    call.cancel()
  try:
    said = call.result()
  except MemberFailed as failure:
    said, detail = failure.trajectory, str(failure)
  except asyncio.CancelledError:
    detail = 'the workflow was cancelled from within'
  if said is None:
    return Answer(
        draw.draw_index, draw.problem.id, draw.problem.source, sample,
        RewardStatus.ERROR, None, 0, None, '', detail,
    )  # fmt: skip
  sampled = said.versions[said.sampled]
  if set(sampled.tolist()) - {version}:
    raise RuntimeError(
        f'evaluation of version {version}: answer {sample} to'
        f' {draw.problem.id!r} is of versions {sorted(set(sampled.tolist()))}'
    )
  return Answer(
      draw_index=draw.draw_index,
      problem_id=draw.problem.id,
      source=draw.problem.source,
      sample=sample,
      status=said.reward.status,
      score=said.reward.score,
      length=len(sampled),
      stop_reason=said.stop_reason,
      text=_last_text(said, decode),
      detail=detail,
  )


def _last_text(
    trajectory: Trajectory, decode: Callable[[np.ndarray], str]
) -> str:
  """Returns the last answer, up to the stop id or stop string that ended it."""
  last = [s for s in trajectory.segments if s.kind == 'sampled'][-1]
  stopped = last.stop_reason is StopReason.STOP
  ids = trajectory.ids[last.start : last.start + last.length - stopped]
  return decode(ids)[: last.text_end]
