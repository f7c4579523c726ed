"""Scoring beside generation: a reward function in killable processes.

The controller gets a `Scorer` as a plain async function from a problem and a
text to a `RewardResult`. An answer that hangs, crashes or confuses the verifier
costs one result of status timeout, error or unparseable, counted, and never a
score.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
import time

from areal_jax.config import require
from areal_jax.rewards import base
from areal_jax.sandbox.pool import KillablePool
from areal_jax.types import Problem, RewardResult, RewardStatus


@dataclasses.dataclass
class RewardSettings:
  """Settings of the reward function and of its workers.

  Attributes:
    function: 'package.module:function', see `base.py`.
    workers: processes; one scores some thousand short answers a second.
    timeout_s: seconds that scoring one answer may take.
    self_test: whether a run scores some gold answers at its start, and ends if
      none of them gets a score. False for answers in a form that only the
      policy's prompt knows.
  """

  function: str
  workers: int = 1
  timeout_s: float = 10.0
  self_test: bool = True

  def validate(self, at: str) -> None:
    require(self.workers >= 1, f'{at}.workers', self.workers, 'at least 1')
    require(
        0 < self.timeout_s < math.inf,
        f'{at}.timeout_s',
        self.timeout_s,
        'more than 0 seconds and finite: an answer may hang its verifier',
    )

  def check(self, at: str) -> None:
    """Imports the function.

    Apart from `validate`, so that a config can be read where the reward's
    libraries are not installed.

    Raises:
      ConfigError: see `base.load_reward`.
    """
    base.load_reward(self.function, f'{at}.function')


class Scorer:
  """`await scorer(problem, text)` is the `RewardResult` of the text.

  `counts` has the number of results of each status, by its value: 'ok',
  'error', 'timeout', 'unparseable'.

  Args:
    spec: 'package.module:function'.
    workers: processes.
    timeout_s: seconds that scoring one answer may take.
    output: file that gets what the function prints; None leaves it alone.

  Raises:
    ConfigError: the spec names no reward function.
  """

  def __init__(
      self,
      spec: str,
      workers: int = 1,
      timeout_s: float = 10.0,
      output: str | os.PathLike | None = None,
  ):
    base.load_reward(spec)
    self.spec = spec
    self.counts = {status.value: 0 for status in RewardStatus}
    # What is scored, and since when, in the order of asking.
    self._jobs: dict[int, tuple[str, float]] = {}
    self._numbers = itertools.count()
    self._counting = threading.Lock()  # several event loops may share a scorer
    # The reward's module may take seconds to import; the fork server does it
    # once, so that a worker that replaces a killed one has it at once.
    self._pool = KillablePool(
        workers,
        timeout_s,
        preload=(base.__name__, spec.partition(':')[0]),
        output=output,
    )

  def start(self) -> None:
    """Starts the workers; without it the first call does, in 0.2 to 0.4 s."""
    self._pool.start()

  async def __call__(self, problem: Problem, text: str) -> RewardResult:
    """Scores the text that the policy wrote, without the prompt."""
    job = next(self._numbers)
    self._jobs[job] = (problem.id, time.monotonic())
    try:
      outcome = await self._pool.run(base.apply, self.spec, problem, text)
    finally:
      del self._jobs[job]
    if outcome.status == 'ok':
      status, score, parts, detail = outcome.value
    else:
      status, score, parts = outcome.status, None, {}
      detail = f'{self.spec}: {outcome.detail}'
      if status == 'timeout':
        limit = f'reward.timeout_s={self._pool.timeout_s:g}'
        detail = f'{self.spec} took longer than {limit} and was killed'
    with self._counting:
      self.counts[status] += 1
    return RewardResult(
        RewardStatus(status), score, parts, detail, outcome.seconds
    )

  def explain(self) -> str:
    """Describes what is being scored, oldest first; any thread may call it."""
    now = time.monotonic()
    jobs = list(self._jobs.values())
    oldest = ', '.join(f'{p} for {now - since:.1f} s' for p, since in jobs[:8])
    return (
        f'{len(jobs)} reward jobs of {self.spec} waiting or running (each may'
        f' run {self._pool.timeout_s:g} s){": " if jobs else ""}{oldest}'
    )

  def close(self) -> None:
    """Ends the workers."""
    self._pool.close()
