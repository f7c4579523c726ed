"""Evaluation on problems that are never trained on.

Draws of purpose EVAL go through the same client, workflow and reward as
training, but past the controller: off the ledger, never in the buffer, with
random streams of their own. A caller that wants one version's accuracy calls
it while nothing is published.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Callable, Sequence

import numpy as np

from areal_jax.config import require
from areal_jax.rollout.workflow import MemberFailed, Workflow
from areal_jax.types import Draw, Problem, Purpose, StopReason, Trajectory


@dataclasses.dataclass
class EvaluationSettings:
  """What is evaluated, before the first update and at the end.

  Attributes:
    samples: answers a problem.
    temperature: of their sampling; 0 is greedy.
    threshold: least score that counts as a right answer.
    show: answers to print.
  """

  samples: int = 1
  temperature: float = 0.0
  threshold: float = 1.0
  show: int = 3

  def validate(self, at: str) -> None:
    require(self.samples >= 1, f'{at}.samples', self.samples, 'at least 1')
    require(self.show >= 0, f'{at}.show', self.show, 'at least 0')
    require(
        self.temperature >= 0, f'{at}.temperature', self.temperature,
        'at least 0',
    )  # fmt: skip
    require(
        self.samples == 1 or self.temperature > 0,
        f'{at}.samples',
        self.samples,
        '1 at temperature 0, where all samples are the same',
    )


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Result of one evaluation.

  Attributes:
    accuracy: share of scored answers at or above the threshold.
    score_mean: mean score.
    standard_error: of the mean score, over problems.
    problems: problems asked.
    scored: answers with a score; the rest failed and are not in the means.
    truncated_fraction: share of scored answers cut off by the length limit.
    versions: the versions that wrote the answers.
    trajectories: the scored answers, in order of problem and sample.
  """

  accuracy: float
  score_mean: float
  standard_error: float
  problems: int
  scored: int
  truncated_fraction: float
  versions: tuple[int, ...]
  trajectories: tuple[Trajectory, ...]


async def evaluate(
    problems: Sequence[Problem],
    workflow: Workflow,
    settings: EvaluationSettings,
    version: int,
    observe: Callable[[Problem, Trajectory], None] = lambda problem, t: None,
) -> Evaluation:
  """Asks every problem `settings.samples` times, each exactly once.

  Args:
    problems: what to ask; a problem's place is its draw index.
    workflow: answers and scores, at the temperature it was built with.
    settings: samples and threshold.
    version: version that the weights are expected to have.
    observe: called with each scored answer.

  Raises:
    ValueError: no problem, or no answer could be scored.
  """
  if not problems:
    raise ValueError('0 evaluation problems, wanted at least 1')

  async def ask(index: int, problem: Problem, sample: int):
    draw = Draw(index, 0, problem, Purpose.EVAL)
    try:
      scored = await workflow(draw, sample, version)
    except MemberFailed:
      return None
    observe(problem, scored)
    return scored

  async with asyncio.TaskGroup() as group:
    tasks = [
        group.create_task(ask(i, problem, sample))
        for i, problem in enumerate(problems)
        for sample in range(settings.samples)
    ]
  scored = [t.result() for t in tasks if t.result() is not None]
  if not scored:
    raise ValueError(f'0 of {len(tasks)} evaluation answers could be scored')
  scores = np.asarray([t.reward.score for t in scored])
  truncated = [t.stop_reason is StopReason.LENGTH for t in scored]
  versions = {int(v) for t in scored for v in t.versions[t.loss_mask > 0]}
  return Evaluation(
      accuracy=float(np.mean(scores >= settings.threshold)),
      score_mean=float(scores.mean()),
      standard_error=_standard_error(scored),
      problems=len(problems),
      scored=len(scored),
      truncated_fraction=float(np.mean(truncated)),
      versions=tuple(sorted(versions)),
      trajectories=tuple(scored),
  )


def _standard_error(scored: Sequence[Trajectory]) -> float:
  """Standard error of the mean score, problems being independent."""
  by_problem: dict[int, list[float]] = {}
  for t in scored:
    by_problem.setdefault(t.draw_index, []).append(t.reward.score)
  means = np.asarray([np.mean(s) for s in by_problem.values()])
  if len(means) < 2:
    return 0.0
  return float(means.std(ddof=1) / np.sqrt(len(means)))
