"""What training carries from one step to the next, and what a checkpoint saves.

`version` counts published policies; `counters.applied_updates` counts
optimizer updates of one network. They differ as soon as a step has several
minibatches, or one that was skipped.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax

from areal_jax.models.lora import overlaid

PyTree = Any


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=(
        'applied_updates',
        'idle_updates',
        'skipped_updates',
        'consecutive_skips',
    ),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Counters:
  """Minibatches by what came of them, int32 scalars on the device.

  Attributes:
    applied_updates: parameters moved; drives the learning-rate schedule.
    idle_updates: no trained token had an advantage; nothing moved.
    skipped_updates: the gradient was not finite; nothing moved.
    consecutive_skips: of the latter, since an update was last applied.
  """

  applied_updates: jax.Array
  idle_updates: jax.Array
  skipped_updates: jax.Array
  consecutive_skips: jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('trainable', 'frozen', 'optimizer', 'counters'),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Role:
  """A network: its trainable part, its frozen part and its optimizer.

  A policy has everything trainable, or its adapters alone; a critic everything.
  A reference has everything frozen, or its adapters, over the base of a policy.

  Attributes:
    trainable: parameters that the optimizer moves.
    frozen: parameters that stay.
    optimizer: its state; () if nothing is trainable.
    counters: of its updates; None if nothing is trainable.
  """

  trainable: dict[str, PyTree]
  frozen: dict[str, PyTree]
  optimizer: PyTree = ()
  counters: Counters | None = None

  @property
  def params(self) -> dict[str, PyTree]:
    """Both parts as the model takes them."""
    return overlaid(self.frozen, self.trainable)


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=('roles', 'version'),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
  """The whole state of training.

  Attributes:
    roles: 'policy'; 'reference' and 'critic' where the settings ask for them.
    version: policies published; version 0 is the one training starts from.
  """

  roles: dict[str, Role]
  version: int = 0

  @property
  def policy(self) -> Role:
    return self.roles['policy']


def with_no_skips(state: TrainState) -> TrainState:
  """A state that a run can go on from after `NonFiniteError`.

  Its counters of updates skipped in a row are 0. Nothing else changes: what was
  skipped has moved nothing.
  """

  def forgiven(role: Role) -> Role:
    if role.counters is None:
      return role
    row = role.counters.consecutive_skips
    counters = dataclasses.replace(role.counters, consecutive_skips=row - row)
    return dataclasses.replace(role, counters=counters)

  roles = {name: forgiven(role) for name, role in state.roles.items()}
  return dataclasses.replace(state, roles=roles)
