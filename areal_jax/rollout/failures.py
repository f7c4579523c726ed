"""What becomes of a failure, by its kind, and when there are too many of them.

Three kinds of thing fail while answers are made: scoring (the verifier raised,
ran out of time or its process died), a workflow (any other exception), and an
engine's thread. Each has a policy here. What is dropped is counted with its
reason and never scored 0; what is tried again is tried a bounded number of
times; and if most answers fail, whatever the policies, the run ends with the
ratio and the last reason. Pure: the controller applies all this.
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
    engine: an engine's thread that died. 'restart': it is started again with
      its current weights, and its requests begin again; one that has used up
      its restarts is evicted: the other replicas answer its requests, and the
      run ends when none is left. 'stop': the run ends.
    retries: times that one answer is tried again.
    engine_restarts: times that one engine is started again in a run; the next
      death is its last.
    breaker_answers: how many of the last answers the circuit breaker looks at;
      it waits until there are so many.
    breaker_ratio: share of them without a score that ends the run.
    quiet_s: seconds without any progress after which it is told, once, who
      waits for whom.
  """

  scoring: Policy = 'drop'
  workflow: Policy = 'stop'
  engine: Literal['restart', 'stop'] = 'restart'
  retries: int = 2
  engine_restarts: int = 3
  breaker_answers: int = 128
  breaker_ratio: float = 0.95
  quiet_s: float = 30.0

  def validate(self, at: str) -> None:
    for name, least in (
        ('retries', 0), ('engine_restarts', 0), ('breaker_answers', 1)
    ):  # fmt: skip
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')
    require(0 < self.breaker_ratio <= 1, f'{at}.breaker_ratio',
            self.breaker_ratio, 'above 0, at most 1')  # fmt: skip
    require(0 < self.quiet_s < math.inf, f'{at}.quiet_s', self.quiet_s,
            'more than 0 and finite: no wait is silent')  # fmt: skip

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


class Breaker:
  """Looks at the last answers and says when too few of them have a score."""

  def __init__(self, settings: FailureSettings):
    self._ratio = settings.breaker_ratio
    self._failed: collections.deque[bool] = collections.deque(
        maxlen=settings.breaker_answers
    )
    self.last = ''  # reason of the last failure

  def record(self, reason: str | None) -> None:
    """An answer came, with a score if there is no reason why not."""
    self._failed.append(reason is not None)
    self.last = reason or self.last

  def tripped(self) -> TooManyFailures | None:
    """What to end the run with; None as long as enough answers are scored."""
    seen, failed = len(self._failed), sum(self._failed)
    if seen < self._failed.maxlen or failed < self._ratio * seen:
      return None
    return TooManyFailures(
        f'{failed} of the last {seen} answers have no score'
        f' ({failed / seen:.0%}, wanted less than {self._ratio:.0%}); the last'
        f' one: {self.last}'
    )
