"""The evaluations of a run, one at a time, seen from the main thread.

One that is started goes on beside training, as a task on the event loop of the
controller; nobody waits for it but `wait`, before training and at the end. One
that falls due while another still runs is skipped and counted: to queue it
would hold the weights of one more version for each that waits, and evaluation
would never catch up.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Callable, Sequence

import numpy as np

from areal_jax.cluster.local import AsyncFuture, AsyncThread
from areal_jax.rollout.evaluation import Evaluation, EvaluationSettings, Vote
from areal_jax.rollout.evaluator import Evaluator
from areal_jax.rollout.workflow import Workflow
from areal_jax.telemetry.events import EventLog
from areal_jax.types import Problem


class Evaluations:
  """Starts evaluations, looks whether they are done, waits for the last.

  Args:
    evaluator: who asks; `start` and `stop` are the caller's.
    thread: whose event loop they run on.
    settings: what is evaluated.
    problems: what is asked.
    workflow: answers by the evaluator's client, and scores; not with the scorer
      of training, which would wait for it.
    decode: token ids of an answer to text.
    vote: what a text votes for.
    events: where spans go.
    done: called in the main thread with each result.
    wait_s: longest time that one goes on without an answer.
    busy: whether a program is being compiled, for which answers may wait.

  Attributes:
    skipped: how many were due while another one ran.
  """

  def __init__(
      self,
      evaluator: Evaluator,
      thread: AsyncThread,
      *,
      settings: EvaluationSettings,
      problems: Sequence[Problem],
      workflow: Workflow,
      decode: Callable[[np.ndarray], str],
      vote: Vote,
      events: EventLog,
      done: Callable[[Evaluation], None],
      wait_s: float,
      busy: Callable[[], bool] = lambda: False,
  ):
    self.skipped = 0
    self._evaluator = evaluator
    self._thread = thread
    self._events = events
    self._done = done
    self._running: AsyncFuture[Evaluation] | None = None
    self._evaluate = functools.partial(
        evaluator.evaluate,
        problems=problems,
        settings=settings,
        decode=decode,
        vote=vote,
        wait_s=wait_s,
        busy=busy,
        workflow=workflow,
    )

  def start(self, version: int, weights: Sequence[Any]) -> bool:
    """Starts to evaluate a version, or skips it if another one runs.

    Args:
      version: what the weights are called.
      weights: the parameters on each replica's mesh.

    Returns:
      Whether it was started.
    """
    self.look()
    if self._running is not None:
      self.skipped += 1
      self._events.instant(
          'skip', 'evaluate', version=version, reason='another one runs'
      )
      return False
    self._running = self._thread.spawn(self._spanned(version, weights))
    return True

  def look(self) -> None:
    """Hands over a result that has come.

    Raises:
      BaseException: what ended the evaluation.
    """
    if self._running is not None and self._running.done():
      done, self._running = self._running, None
      self._done(done.result())

  def wait(self) -> Evaluation | None:
    """Waits for the evaluation that runs and hands it over; None if none does.

    Raises:
      TimeoutError: no answer comes; says whose is missing.
      BaseException: what else ended the evaluation or one of its loops.
    """
    if self._running is None:
      return None
    running, self._running = self._running, None
    # It may take its time as long as answers come.
    result = self._thread.wait(
        running, timeout_s=math.inf, check=self._evaluator.check
    )
    self._done(result)
    return result

  def check(self) -> None:
    """Raises what ended a loop or the evaluation that runs, if anything did."""
    self._evaluator.check()
    running = self._running
    if running is not None and running.done() and running.exception():
      raise running.exception()

  async def _spanned(self, version: int, weights: Sequence[Any]) -> Evaluation:
    with self._events.span('evaluate', 'evaluate', version=version) as fields:
      result = await self._evaluate(version, weights)
      fields['accuracy'] = result.whole.accuracy
      fields['answers'] = result.whole.answers
    return result
