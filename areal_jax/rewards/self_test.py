"""Does the reward score gold answers above corrupted ones?

A reward that is set up wrongly gives every answer the same, and nothing is
learned; it is seen here before a device does anything. A gold answer is written
in a few ways that verifiers read; the best of them counts. Corrupted are: the
answer with a digit or letter changed, and an empty text.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Awaitable, Callable, Sequence

from areal_jax.types import Problem, RewardResult, RewardStatus

Score = Callable[[Problem, str], Awaitable[RewardResult]]

_WAYS = ('{}', '\\boxed{{{}}}', '#### {}', 'The answer is {}.')


@dataclasses.dataclass(frozen=True)
class SelfTest:
  """What came of it.

  Attributes:
    problems: that were tried.
    right: of which some way to write the gold answer scores above every
      corrupted one.
    gold: mean of the best scores of gold answers.
    corrupted: mean of the best scores of corrupted ones.
    failed: results without a score that were errors or timeouts.
    example: of a problem that is not right; empty if all are.
    error: detail of the last failure; empty without one.
  """

  problems: int
  right: int
  gold: float
  corrupted: float
  failed: int
  example: str
  error: str

  @property
  def passed(self) -> bool:
    """Whether nine problems of ten are right and nothing failed."""
    return self.right >= 0.9 * self.problems and not self.failed


async def self_test(score: Score, problems: Sequence[Problem]) -> SelfTest:
  """Scores gold and corrupted answers of the problems.

  Raises:
    ValueError: no problem.
  """
  if not problems:
    raise ValueError('0 problems, wanted at least 1')
  right, gold_sum, bad_sum = 0, 0.0, 0.0
  failed, example, error = 0, '', ''
  for problem in problems:
    golds = [way.format(problem.answer) for way in _WAYS]
    bads = [way.format(corrupted(problem.answer)) for way in _WAYS] + ['']
    results = await asyncio.gather(*(score(problem, t) for t in golds + bads))
    for result in results:
      if result.status in (RewardStatus.ERROR, RewardStatus.TIMEOUT):
        failed += 1
        error = f'{result.status.value}: {result.detail}'
    best = [
        max((r.score for r in part if r.score is not None), default=None)
        for part in (results[: len(golds)], results[len(golds) :])
    ]
    gold, bad = best
    gold_sum += gold or 0.0
    bad_sum += bad or 0.0
    if gold is not None and (bad is None or gold > bad):
      right += 1
    elif not example:
      example = (
          f'{problem.id}: {problem.answer!r} scores {gold}, corrupted'
          f' {corrupted(problem.answer)!r} or nothing {bad}'
      )
  count = len(problems)
  return SelfTest(
      count, right, gold_sum / count, bad_sum / count, failed, example, error
  )


def corrupted(answer: str) -> str:
  """The answer with its last digit, or else its last letter, made another."""
  for kind, other, another in (
      (str.isdigit, '1', '7'),
      (str.isalpha, 'q', 'x'),
  ):
    places = [i for i, letter in enumerate(answer) if kind(letter)]
    if places:
      at = places[-1]
      changed = another if answer[at] == other else other
      return answer[:at] + changed + answer[at + 1 :]
  return answer + ' 7'
