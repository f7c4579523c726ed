"""What becomes of a failure, by its kind, and when there are too many of them.

Four kinds of thing fail while answers are made: scoring (the verifier raised,
ran out of time or its process died), a workflow that raises anything else, a
workflow that does not finish (it takes too long, or a library cancels it), and
an engine's thread. Each has a policy here. What is dropped is counted with its
reason and never scored 0; what is tried again is tried a bounded number of
times; and if most answers fail, whatever the policies, the run ends with the
ratio and the last reason.

An answer that the verifier cannot parse has no score either, but nothing is
broken: the policy has not learned the form yet. It never counts as a failure.
Only a long row of answers without a single one that parses ends the run, with
another message. Pure: the controller applies all this.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Literal

from areal_jax.config import require

Policy = Literal['drop', 'retry', 'stop']


@dataclasses.dataclass
class FailureSettings:
  """Policies by kind, the circuit breaker, and when silence is told.

  Attributes:
    scoring: an answer without a score because scoring failed. 'drop': it leaves
      its group; 'retry': it is generated and scored again, then dropped;
      'stop': the run ends. What the verifier could not parse is dropped.
    workflow: any other exception while an answer is made; 'drop' hides faults
      of one's own code, all but its count.
    unfinished: an answer that never came: its workflow took longer than
      `rollout.group_s`, or raised `asyncio.CancelledError` although nobody here
      had cancelled it.
    engine: an engine's thread that died. 'restart': it is started again with
      its current weights, and its requests begin again; one that has used up
      its restarts is evicted: the other replicas answer its requests, and the
      run ends when none is left. 'stop': the run ends.
    retries: times that one answer is tried again.
    engine_restarts: times that one engine is started again in a run; the next
      death is its last.
    breaker_answers: how many of the last answers the circuit breaker looks at;
      it waits until there are so many.
    breaker_ratio: share of them without a score that ends the run, if failures
      and not unparseable answers are the cause.
    breaker_unparseable: answers in a row that the verifier could not parse,
      not one among them that it could, after which the run ends.
    quiet_s: seconds without any progress after which it is told, once, who
      waits for whom.
    step_s: seconds that one training step may take on the devices, and that the
      devices of an engine may take for its first weights. A step is no silence.
    compile_s: seconds that one compilation may take. No other limit of a wait
      counts the time in which a program is compiled.
  """

  scoring: Policy = 'drop'
  workflow: Policy = 'stop'
  unfinished: Policy = 'drop'
  engine: Literal['restart', 'stop'] = 'restart'
  retries: int = 2
  engine_restarts: int = 3
  breaker_answers: int = 128
  breaker_ratio: float = 0.95
  breaker_unparseable: int = 1024
  quiet_s: float = 30.0
  step_s: float = 3600.0
  compile_s: float = 3600.0

  def validate(self, at: str) -> None:
    for name, least in (
        ('retries', 0), ('engine_restarts', 0), ('breaker_answers', 1),
        ('breaker_unparseable', 1),
    ):  # fmt: skip
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')
    require(0 < self.breaker_ratio <= 1, f'{at}.breaker_ratio',
            self.breaker_ratio, 'above 0, at most 1')  # fmt: skip
    require(0 < self.quiet_s < math.inf, f'{at}.quiet_s', self.quiet_s,
            'more than 0 and finite: no wait is silent')  # fmt: skip
    for name in ('step_s', 'compile_s'):
      value = getattr(self, name)
      require(0 < value < math.inf, f'{at}.{name}', value,
              'more than 0 and finite: every wait ends')  # fmt: skip

  @property
  def restarts(self) -> int:
    """Times that an engine may be started again."""
    return self.engine_restarts if self.engine == 'restart' else 0

  @property
  def evicts(self) -> bool:
    """Whether the run goes on without an engine that is dead for good."""
    return self.engine == 'restart'


class TooManyFailures(RuntimeError):
  """Most answers fail; ratio and last reason are in the text."""


class NothingParses(TooManyFailures):
  """The policy writes nothing that the verifier can parse, for too long."""


class Unfinished(TimeoutError):
  """An answer that never came; the text says why it was given up."""


Kind = Literal['scoring', 'workflow', 'unfinished', 'unparseable']


@dataclasses.dataclass(frozen=True)
class Failed:
  """A sample that has no score.

  Attributes:
    sample: its number in its group.
    kind: what failed.
    reason: in words.
  """

  sample: int
  kind: Kind
  reason: str


class Breaker:
  """Looks at the last answers and says when too few of them have a score.

  Attributes:
    last: reason of the last failure, unparseable answers left out.
    unparseable_in_a_row: answers since the last one that was parsed.
  """

  def __init__(self, settings: FailureSettings):
    self.last = ''
    self.unparseable_in_a_row = 0
    self._ratio = settings.breaker_ratio
    self._longest_row = settings.breaker_unparseable
    self._last_unparseable = ''
    self._kinds: collections.deque[Kind | None] = collections.deque(
        maxlen=settings.breaker_answers
    )

  def record(self, kind: Kind | None, reason: str = '') -> None:
    """An answer came: with a score if `kind` is None, else it failed so."""
    self._kinds.append(kind)
    if kind == 'unparseable':
      self.unparseable_in_a_row += 1
      self._last_unparseable = reason
    elif kind is None:
      self.unparseable_in_a_row = 0
    else:
      self.last = reason

  def tripped(self) -> TooManyFailures | None:
    """What to end the run with; None as long as it may go on."""
    return self._broken() or self._nothing_parses()

  def _broken(self) -> TooManyFailures | None:
    """Too few of the last answers have a score, and failures are the cause.

    They are if hardly any of the answers that could be parsed has a score, and
    there are enough of them to tell.
    """
    seen = len(self._kinds)
    unparseable = self._kinds.count('unparseable')
    failed = seen - unparseable - self._kinds.count(None)
    unscored = failed + unparseable
    if seen < self._kinds.maxlen or unscored < self._ratio * seen:
      return None
    enough = min(self._ratio, 1 - self._ratio) * seen
    parsed = seen - unparseable
    if not failed or failed < max(enough, self._ratio * parsed):
      return None
    return TooManyFailures(
        f'{unscored} of the last {seen} answers have no score'
        f' ({unscored / seen:.0%}, wanted less than {self._ratio:.0%}):'
        f' {failed} failed, {unparseable} could not be parsed. Scoring or the'
        ' workflow is broken, whatever the policy writes; the last failure:'
        f' {self.last}'
    )

  def _nothing_parses(self) -> NothingParses | None:
    """No answer of a long row could be parsed."""
    if self.unparseable_in_a_row < self._longest_row:
      return None
    return NothingParses(
        f'{self.unparseable_in_a_row} answers in a row could not be parsed by'
        ' the verifier, so no group can be trained. Nothing is broken: the'
        ' policy does not write the form that the verifier reads. Show the form'
        ' in the prompt or by a warm start, raise rollout.max_new_tokens if'
        ' answers are cut off, or let the reward return 0 for such answers; the'
        f' last one: {self._last_unparseable}'
    )
