"""Does the reward score gold answers above corrupted ones?

A reward that is set up wrongly gives every answer the same, or none a score,
and nothing is learned; it is seen here before a device does anything. A gold
answer is written in a few ways that verifiers read; the best of them counts.
Corrupted are: the answer with a digit or letter changed, and an empty text.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Awaitable, Callable, Sequence

from areal_jax.rewards.base import BadReward
from areal_jax.types import Problem, RewardResult, RewardStatus

Score = Callable[[Problem, str], Awaitable[RewardResult]]

_WAYS = ('{}', '\\boxed{{{}}}', '#### {}', 'The answer is {}.')
_FAILED = (RewardStatus.ERROR, RewardStatus.TIMEOUT)


@dataclasses.dataclass(frozen=True)
class SelfTest:
  """The outcome of a self-test.

  Attributes:
    problems: that were tried.
    right: of which some way to write the gold answer scores above every
      corrupted one.
    gold: mean of the best scores of gold answers.
    corrupted: mean of the best scores of corrupted ones.
    scored: gold answers, in any way of writing, that got a score.
    failed: results without a score that were errors or timeouts.
    late: answers that were not scored within the limit.
    example: of a problem that is not right; empty if all are.
    error: detail of the first failure; empty without one. Its first line says
      what failed, a traceback may follow.
    unparsed: detail of the first gold answer that was unparseable.
  """

  problems: int
  right: int
  gold: float
  corrupted: float
  scored: int
  failed: int
  late: int
  example: str
  error: str
  unparsed: str

  @property
  def passed(self) -> bool:
    """Returns whether nine of ten problems are right and all ended well."""
    return self.right >= 0.9 * self.problems and not self.failed + self.late

  @property
  def why(self) -> str:
    """Says in one line what is wrong; empty if nothing is."""
    late = f'{self.late} answers were not scored in time' if self.late else ''
    return self.error.partition('\n')[0] or late or self.example

  def require_scores(self) -> None:
    """Ends a run whose reward scores no gold answer.

    Raises:
      BadReward: no gold answer got a score, in any way of writing.
    """
    undecided = self.late and not self.error
    if self.scored or undecided:
      return
    why = self.error or self.unparsed
    raise BadReward(
        f'none of {self.problems} gold answers gets a score:'
        f' {why.partition(chr(10))[0] or self.why}; reward.self_test=False'
        ' leaves this test out'
    )


async def self_test(
    score: Score,
    problems: Sequence[Problem],
    *,
    limit_s: float,
    tell: Callable[[int, int], None] = lambda done, total: None,
) -> SelfTest:
  """Scores gold and corrupted answers of the problems, all at once.

  Args:
    score: scores one text.
    problems: with their gold answers.
    limit_s: seconds for all of it; what has no result by then is late. Gold
      answers come first.
    tell: called with the number of results so far and that of all.

  Raises:
    ValueError: no problem.
  """
  if not problems:
    raise ValueError('0 problems, wanted at least 1')
  ways = [(w, True) for w in _WAYS] + [(w, False) for w in (*_WAYS, '')]
  tasks = {}
  for number, (way, is_gold) in enumerate(ways):
    for i, problem in enumerate(problems):
      answer = problem.answer if is_gold else corrupted(problem.answer)
      tasks[i, number, is_gold] = asyncio.ensure_future(
          score(problem, way.format(answer))
      )
  ended = []

  def count(task: asyncio.Future) -> None:
    ended.append(task)
    tell(len(ended), len(tasks))

  for task in tasks.values():
    task.add_done_callback(count)
  try:
    _, late = await asyncio.wait(tasks.values(), timeout=limit_s)
  finally:
    for task in tasks.values():
      task.cancel()
  await asyncio.gather(*late, return_exceptions=True)
  results = {k: t.result() for k, t in tasks.items() if t not in late}
  return _judged(problems, results, len(late))


def _judged(
    problems: Sequence[Problem],
    results: dict[tuple[int, int, bool], RewardResult],
    late: int,
) -> SelfTest:
  """Judges the results of a self-test.

  Args:
    problems: that were tried.
    results: by place of the problem, number of the way of writing, and whether
      the answer is gold.
    late: number of those that did not come.
  """
  right, sums, example = 0, [0.0, 0.0], ''
  for i, problem in enumerate(problems):
    best = []
    for is_gold in (True, False):
      scores = [
          r.score
          for (p, _, gold), r in results.items()
          if p == i and gold is is_gold and r.score is not None
      ]
      best.append(max(scores, default=None))
    gold, bad = best
    sums[0] += gold or 0.0
    sums[1] += bad or 0.0
    if gold is not None and (bad is None or gold > bad):
      right += 1
    elif not example:
      example = (
          f'{problem.id}: {problem.answer!r} scores {gold}, corrupted'
          f' {corrupted(problem.answer)!r} or nothing {bad}'
      )
  failures = [r for r in results.values() if r.status in _FAILED]
  golds = [r for (_, _, gold), r in results.items() if gold]
  unparsed = [r for r in golds if r.status is RewardStatus.UNPARSEABLE]
  count = len(problems)
  return SelfTest(
      problems=count,
      right=right,
      gold=sums[0] / count,
      corrupted=sums[1] / count,
      scored=sum(r.score is not None for r in golds),
      failed=len(failures),
      late=late,
      example=example,
      error=failures[0].detail if failures else '',
      unparsed=unparsed[0].detail if unparsed else '',
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
