"""Finished groups that wait for training, and the order in which they leave.

Four staleness policies, all bounded by the ledger at admission:

* `soft`: oldest finished group first. Fast; ages may exceed η (a slow group is
  overtaken), the excess is reported.
* `drop`: the same, but a group whose oldest token is more than η versions old
  leaves untrained, counted as stale.
* `mask`: like `soft`, and the trainer takes tokens that are more than η
  versions old out of the loss; their group is trained with what is left of it,
  and its rewards are compared as they are.
* `fifo`: strictly in the order of admission. No token older than η, at the
  price of waiting for the slowest.

`put` never blocks; how much can wait here is the affair of the ledger and of
the controller (`max_ready`).
"""

from __future__ import annotations

import collections
from typing import Literal

from areal_jax.types import Group

StalenessPolicy = Literal['soft', 'drop', 'mask', 'fifo']


class GroupBuffer:
  """Owned by the controller and used on its event loop alone."""

  def __init__(self, policy: StalenessPolicy, eta: float):
    self.policy = policy
    self.eta = eta
    self._ready: list[Group] = []  # in the order in which they finished
    self._expected: collections.deque[int] = collections.deque()

  def __len__(self) -> int:
    return len(self._ready)

  @property
  def groups(self) -> tuple[Group, ...]:
    """The waiting groups, oldest finished first."""
    return tuple(self._ready)

  def expect(self, draw_index: int) -> None:
    """A draw was admitted; under `fifo` its turn is after all before it."""
    self._expected.append(draw_index)

  def forget(self, draw_index: int) -> None:
    """An expected draw will not come."""
    self._expected.remove(draw_index)

  def put(self, group: Group) -> None:
    self._ready.append(group)

  def stale(self, version: int) -> list[Group]:
    """Removes and returns the groups that `drop` does not train at `version`.

    Age is the trainer's version at the start of the step minus the version of
    the group's oldest token.
    """
    if self.policy != 'drop':
      return []
    old = [g for g in self._ready if version - g.head_version > self.eta]
    self._leave(old)
    return old

  def take(self, groups: int) -> list[Group] | None:
    """Removes and returns `groups` groups, or None as long as there are fewer.

    They come sorted by draw index: the order of training is the order of the
    data, whatever finished first.
    """
    if self.policy == 'fifo':
      by_draw = {g.draw_index: g for g in self._ready}
      turn = [by_draw[d] for d in list(self._expected)[:groups] if d in by_draw]
    else:
      turn = self._ready[:groups]
    if len(turn) < groups:
      return None
    self._leave(turn)
    return sorted(turn, key=lambda g: g.draw_index)

  def _leave(self, groups: list[Group]) -> None:
    gone = {g.draw_index for g in groups}
    self._ready = [g for g in self._ready if g.draw_index not in gone]
    self._expected = collections.deque(
        d for d in self._expected if d not in gone
    )
