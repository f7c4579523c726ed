"""Evaluation: what is asked, what came back, and what follows from it.

Settings, records and statistics as pure functions of the answers. Who asks the
engines, and under which weights, is `evaluator.py`'s business.

An answer counts if its rightness is known: it was scored, or the verifier found
nothing in it that it could score (`unparseable`), which is wrong and has no
score. Answers that failed for reasons of the machine (the verifier raised or
ran out of time, generation was given up) count nowhere and are reported.
"""

from __future__ import annotations

import dataclasses
import math
from typing import (
    Any,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)

import numpy as np

from areal_jax.config import require
from areal_jax.rewards.base import BadReward
from areal_jax.sandbox.call import load_function
from areal_jax.types import SAMPLING_RULES, RewardStatus, StopReason

PERCENTILES = (50, 90, 99)

# What an answer's text votes for; None casts no vote.
Vote = Callable[[str], Hashable | None]


@dataclasses.dataclass
class EvaluationSettings:
  """Settings of evaluations before, during and after training.

  Attributes:
    every: steps from one evaluation to the next while training goes on; 0 for
      none between the first and the last.
    before: whether version 0 is evaluated before training; without, the
      summary's `eval_before` is None and the first step comes sooner.
    samples: n, answers a problem.
    ks: k of pass@k and maj@k, each at most `samples`; empty for `samples`
      itself.
    temperature: of the sampling; 0 is greedy.
    top_k: see `types.SamplingParams`, as for all up to `logit_bias`.
    top_p: the same.
    min_p: the same.
    min_new_tokens: the same.
    repetition_penalty: the same; penalties need
      `rollout.engine.sampling.penalties`.
    frequency_penalty: the same.
    presence_penalty: the same.
    logit_bias: the same; needs room in
      `rollout.engine.sampling.max_logit_bias`.
    threshold: least score that counts as a right answer.
    vote: 'package.module:function' from the text of an answer to what it votes
      for in maj@k, or None for no vote; empty for the text itself, stripped.
    show: answers to print.
  """

  every: int = 0
  before: bool = True
  samples: int = 1
  ks: tuple[int, ...] = ()
  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  min_new_tokens: int = 0
  repetition_penalty: float = 1.0
  frequency_penalty: float = 0.0
  presence_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  threshold: float = 1.0
  vote: str = ''
  show: int = 3

  def validate(self, at: str) -> None:
    require(self.every >= 0, f'{at}.every', self.every, 'at least 0')
    require(self.samples >= 1, f'{at}.samples', self.samples, 'at least 1')
    require(self.show >= 0, f'{at}.show', self.show, 'at least 0')
    for name, value in self.sampling.items():
      right, wanted = SAMPLING_RULES[name]
      require(right(value), f'{at}.{name}', value, wanted)
    require(
        math.isfinite(self.threshold), f'{at}.threshold', self.threshold,
        'a finite number',
    )  # fmt: skip
    require(
        self.samples == 1 or self.temperature > 0,
        f'{at}.samples',
        self.samples,
        '1 at temperature 0, where all samples are the same',
    )
    right = all(1 <= k <= self.samples for k in self.ks)
    require(
        right and len(set(self.ks)) == len(self.ks),
        f'{at}.ks',
        self.ks,
        f'different numbers from 1 to samples={self.samples}',
    )

  @property
  def sampling(self) -> dict[str, Any]:
    """Settings of `SamplingParams` by name."""
    names = ('temperature', 'top_k', 'top_p', 'min_p', 'min_new_tokens',
             'repetition_penalty', 'frequency_penalty', 'presence_penalty',
             'logit_bias')  # fmt: skip
    return {name: getattr(self, name) for name in names}

  def load_vote(self, at: str) -> Vote:
    """The function that `vote` names.

    Raises:
      ConfigError: it cannot be imported.
    """
    return load_function(self.vote, f'{at}.vote') if self.vote else str.strip

  @property
  def all_ks(self) -> tuple[int, ...]:
    """The k that are reported, in rising order."""
    return tuple(sorted(self.ks or {self.samples} - {1}))


@dataclasses.dataclass(frozen=True)
class Answer:
  """An answer of an evaluation.

  Attributes:
    draw_index: place of its problem among the evaluation problems.
    problem_id: the problem's id.
    source: the problem's source.
    sample: 0 to n - 1.
    status: of its scoring; `ERROR` as well where it was not generated.
    score: units of reward, None if there is none.
    length: sampled tokens, the stop id included.
    stop_reason: why it ended, None if it was not generated.
    text: what was said.
    detail: why there is no score.
  """

  draw_index: int
  problem_id: str
  source: str
  sample: int
  status: RewardStatus
  score: float | None
  length: int
  stop_reason: StopReason | None
  text: str
  detail: str = ''

  @property
  def counts(self) -> bool:
    """Returns whether the answer is known to be right or wrong."""
    return self.status in (RewardStatus.OK, RewardStatus.UNPARSEABLE)

  def right(self, threshold: float) -> bool:
    return self.score is not None and self.score >= threshold


@dataclasses.dataclass(frozen=True)
class Table:
  """Statistics of some answers; NaN where there are too few to tell.

  Means are over problems of their means over a problem's answers, and standard
  errors are those of a mean of independent problems: they hold the spread of
  the problems and that of the samples.

  Attributes:
    problems: problems asked.
    answers: answers that count.
    failed: answers that do not.
    unparseable: answers in which the verifier found nothing to score.
    accuracy: pass@1, mean share of right answers.
    standard_error: of the accuracy.
    score_mean: mean score of the scored answers, in units of reward.
    score_standard_error: of the mean score.
    pass_at: pass@k by k, see `pass_at_k`.
    majority_at: maj@k by k, see `majority_at_k`.
    length_mean: tokens an answer.
    length_percentiles: tokens, by percent.
    truncated_fraction: share of answers cut off by the limit of new tokens.
  """

  problems: int
  answers: int
  failed: int
  unparseable: int
  accuracy: float
  standard_error: float
  score_mean: float
  score_standard_error: float
  pass_at: Mapping[int, float]
  majority_at: Mapping[int, float]
  length_mean: float
  length_percentiles: Mapping[int, float]
  truncated_fraction: float


@dataclasses.dataclass(frozen=True)
class Evaluation:
  """Result of one evaluation.

  Attributes:
    version: the version that wrote all of its answers.
    whole: statistics of all problems.
    by_source: the same for the problems of each source, by its name.
    answers: every answer once, in the order of problem and sample.
  """

  version: int
  whole: Table
  by_source: Mapping[str, Table]
  answers: tuple[Answer, ...]

  def metrics(self) -> dict[str, float]:
    """The statistics of all problems under their names in the registry."""
    whole = self.whole
    values = {
        'eval_accuracy': whole.accuracy,
        'eval_standard_error': whole.standard_error,
        'eval_score_mean': whole.score_mean,
        'eval_length_mean': whole.length_mean,
        'eval_truncated_fraction': whole.truncated_fraction,
        'eval_failed': whole.failed,
    }
    for k, value in whole.pass_at.items():
      values[f'eval_pass_at_{k}'] = value
    for k, value in whole.majority_at.items():
      values[f'eval_maj_at_{k}'] = value
    # What too few problems leave open is not measured.
    return {k: v for k, v in values.items() if not math.isnan(v)}

  def rows(self) -> Iterator[dict[str, Any]]:
    """A row an answer, for a log."""
    for answer in self.answers:
      yield {'version': self.version, **dataclasses.asdict(answer)}

  def to_dict(self) -> dict[str, Any]:
    """The statistics as plain data, without the answers."""
    return {
        'version': self.version,
        **dataclasses.asdict(self.whole),
        'by_source': {
            name: dataclasses.asdict(table)
            for name, table in self.by_source.items()
        },
    }


def evaluation_of(
    answers: Iterable[Answer],
    version: int,
    settings: EvaluationSettings,
    vote: Vote = str.strip,
) -> Evaluation:
  """Puts answers in order and works out their statistics.

  Raises:
    BadReward: no answer counts.
    ValueError: one comes twice.
  """
  answers = sorted(answers, key=lambda a: (a.draw_index, a.sample))
  places = [(a.draw_index, a.sample) for a in answers]
  if len(set(places)) != len(places):
    raise ValueError(f'{len(places)} answers at {len(set(places))} places')
  if not any(a.counts for a in answers):
    last = answers[-1].detail if answers else 'no problem was asked'
    raise BadReward(
        f'0 of {len(answers)} evaluation answers could be scored;'
        f' {last.partition(chr(10))[0]}'
    )
  sources = sorted({a.source for a in answers})
  return Evaluation(
      version=version,
      whole=tabulate(answers, settings, vote),
      by_source={
          source: tabulate(
              [a for a in answers if a.source == source], settings, vote
          )
          for source in sources
      },
      answers=tuple(answers),
  )


def tabulate(
    answers: Sequence[Answer],
    settings: EvaluationSettings,
    vote: Vote = str.strip,
) -> Table:
  """Statistics of answers, given in the order of their samples."""
  by_problem: dict[int, list[Answer]] = {}
  for answer in answers:
    by_problem.setdefault(answer.draw_index, []).append(answer)
  counted = [a for a in answers if a.counts]
  problems = [[a for a in group if a.counts] for group in by_problem.values()]
  problems = [group for group in problems if group]
  right = [[a.right(settings.threshold) for a in group] for group in problems]
  scores = [
      [a.score for a in group if a.score is not None] for group in problems
  ]
  accuracy, standard_error = _mean(np.mean(r) for r in right)
  score_mean, score_error = _mean(np.mean(s) for s in scores if s)
  pass_at, majority_at = {}, {}
  for k in settings.all_ks:
    # A problem of which answers failed may have too few left for this k.
    enough = [(g, r) for g, r in zip(problems, right) if len(g) >= k]
    pass_at[k], _ = _mean(pass_at_k(len(r), sum(r), k) for _, r in enough)
    majority_at[k], _ = _mean(
        majority_at_k([_ballot(a, vote) for a in g], r, k) for g, r in enough
    )
  lengths = [a.length for a in counted]
  return Table(
      problems=len(by_problem),
      answers=len(counted),
      failed=len(answers) - len(counted),
      unparseable=sum(a.status is RewardStatus.UNPARSEABLE for a in answers),
      accuracy=accuracy,
      standard_error=standard_error,
      score_mean=score_mean,
      score_standard_error=score_error,
      pass_at=pass_at,
      majority_at=majority_at,
      length_mean=_mean(lengths)[0],
      length_percentiles={
          percent: float(np.percentile(lengths, percent)) if lengths else np.nan
          for percent in PERCENTILES
      },
      truncated_fraction=_mean(
          a.stop_reason is StopReason.LENGTH for a in counted
      )[0],
  )


def pass_at_k(n: int, c: int, k: int) -> float:
  """Chance that some of k answers is right, if c of n are: unbiased.

  1 - C(n - c, k) / C(n, k), see https://arxiv.org/abs/2107.03374.

  Raises:
    ValueError: k is not in 1..n, or c not in 0..n.
  """
  if not (1 <= k <= n and 0 <= c <= n):
    raise ValueError(f'pass@{k} of {c} right in {n}, wanted k in 1..n, c <= n')
  return 1 - math.comb(n - c, k) / math.comb(n, k)


def majority_at_k(
    ballots: Sequence[Hashable | None], right: Sequence[bool], k: int
) -> float:
  """Chance that what most of k answers vote for is right.

  The mean over the n runs of k successive answers (behind the last comes the
  first again). Samples are independent, so each run is a fair draw of k and the
  mean is unbiased; all n answers weigh the same and no random choice is made.
  Where several votes lead, one of them wins by lot, of which the chance is
  taken; a vote is right in the share of its answers that are right (verifiers
  may judge two answers of one vote differently).

  Args:
    ballots: [n] what each answer votes for, None for nothing.
    right: [n] whether it is right.
    k: voters, 1..n.

  Returns:
    A share, 0 in runs in which nobody votes.

  Raises:
    ValueError: k is not in 1..n.
  """
  n = len(ballots)
  if not 1 <= k <= n:
    raise ValueError(f'maj@{k} of {n} answers, wanted k in 1..n')
  starts = range(n) if k < n else (0,)
  runs = [[(start + i) % n for i in range(k)] for start in starts]
  return float(np.mean([_elected(run, ballots, right) for run in runs]))


def _elected(
    voters: Sequence[int],
    ballots: Sequence[Hashable | None],
    right: Sequence[bool],
) -> float:
  votes: dict[Hashable, list[bool]] = {}
  for voter in voters:
    if ballots[voter] is not None:
      votes.setdefault(ballots[voter], []).append(right[voter])
  if not votes:
    return 0.0
  most = max(map(len, votes.values()))
  return float(np.mean([np.mean(r) for r in votes.values() if len(r) == most]))


def _ballot(answer: Answer, vote: Vote) -> Hashable | None:
  """An answer in which the verifier finds nothing has nothing to vote for."""
  return vote(answer.text) if answer.status is RewardStatus.OK else None


def _mean(values: Iterable[float]) -> tuple[float, float]:
  """Mean and its standard error; NaN for what no value, or one, can tell."""
  array = np.asarray(list(values), np.float64)
  if not array.size:
    return math.nan, math.nan
  if array.size == 1:
    return float(array[0]), math.nan
  return float(array.mean()), float(array.std(ddof=1) / math.sqrt(array.size))


def table_text(evaluation: Evaluation) -> str:
  """The statistics as a plain text table: a row a source, and one for all."""
  rows = dict(evaluation.by_source)
  if len(rows) != 1:
    rows['all'] = evaluation.whole
  ks = list(evaluation.whole.pass_at)
  header = ['source', 'problems', 'answers', 'failed', 'pass@1', '±']
  header += [f'pass@{k}' for k in ks] + [f'maj@{k}' for k in ks]
  header += ['score', 'length', *(f'p{p}' for p in PERCENTILES), 'truncated']
  lines = [header]
  for name, t in rows.items():
    lines.append([
        name, str(t.problems), str(t.answers), str(t.failed),
        f'{t.accuracy:.3f}', f'{t.standard_error:.3f}',
        *(f'{t.pass_at[k]:.3f}' for k in ks),
        *(f'{t.majority_at[k]:.3f}' for k in ks),
        f'{t.score_mean:.3f}', f'{t.length_mean:.1f}',
        *(f'{t.length_percentiles[p]:.0f}' for p in PERCENTILES),
        f'{t.truncated_fraction:.3f}',
    ])  # fmt: skip
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join(
      '  '.join(
          cell.ljust(width) if i == 0 else cell.rjust(width)
          for i, (cell, width) in enumerate(zip(line, widths))
      ).rstrip()
      for line in lines
  )
