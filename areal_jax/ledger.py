"""The admission arithmetic: how far generation may run ahead of training.

The unit is the group. A group is outstanding from its admission until the
version trained from it is *published* (not until training starts: releasing it
earlier shifts every age by one), or until it is dropped with a reason:

  outstanding = running + ready + training
  admit  iff  outstanding < (η + 1) · B

With every step taking exactly B groups this is the inequality
⌊(N_r - 1) / B⌋ ≤ i + η of https://arxiv.org/abs/2505.24298 eq. (3). Unlike the
cumulative count of the paper it also holds after a resume and when steps take
other numbers of groups than B.

One owner (the controller) calls it from one thread; it keeps no lock.
"""

from __future__ import annotations

import collections
import dataclasses
import math

from areal_jax.types import DropReason


@dataclasses.dataclass
class Ledger:
  """Counts of groups by where they are; every group is in one place.

  Args:
    batch_size: B, groups a step.
    eta: η, how many versions ahead generation may run; `inf` for no bound.
    version: version published last.
  """

  batch_size: int
  eta: float
  version: int = 0
  running: int = 0
  ready: int = 0
  training: int = 0
  drawn: int = 0
  trained: int = 0
  dropped: collections.Counter = dataclasses.field(
      default_factory=collections.Counter
  )

  def __post_init__(self):
    if self.batch_size < 1:
      raise ValueError(f'batch_size is {self.batch_size}, wanted at least 1')
    if math.isnan(self.eta) or self.eta < 0:
      raise ValueError(f'eta is {self.eta}, wanted at least 0')

  @property
  def outstanding(self) -> int:
    return self.running + self.ready + self.training

  @property
  def limit(self) -> float:
    """(η + 1) · B, groups that may be outstanding."""
    return (self.eta + 1) * self.batch_size

  def admits(self) -> bool:
    """Returns whether one more group may start now."""
    return self.outstanding < self.limit

  def admit(self) -> None:
    """A problem was drawn and its group starts."""
    if not self.admits():
      raise RuntimeError(
          f'a group was admitted at {self.outstanding} outstanding, the limit'
          f' is {self.limit}'
      )
    self.running += 1
    self.drawn += 1

  def finish(self) -> None:
    """A running group is complete and waits for training."""
    self._move('running', 1)
    self.ready += 1

  def drop(self, reason: DropReason, *, was: str) -> None:
    """A group leaves untrained; `was` is 'running' or 'ready'."""
    self._move(was, 1)
    self.dropped[reason] += 1

  def take(self, groups: int) -> None:
    """A step starts on `groups` ready groups. They stay outstanding."""
    self._move('ready', groups)
    self.training += groups

  def publish(self, version: int) -> None:
    """`version`, trained from the groups in training, went out to the engines.

    Raises:
      ValueError: the version does not follow the last one.
    """
    if version != self.version + 1:
      raise ValueError(f'version {version} published after {self.version}')
    self.trained += self.training
    self.training = 0
    self.version = version

  def balanced(self) -> bool:
    """Returns whether drawn = trained + dropped + in flight."""
    left = self.trained + sum(self.dropped.values())
    return self.drawn == left + self.outstanding

  def _move(self, place: str, groups: int) -> None:
    held = getattr(self, place)
    if groups > held:
      raise RuntimeError(f'{groups} groups leave {place!r}, which holds {held}')
    setattr(self, place, held - groups)
