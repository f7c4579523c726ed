"""What one update came to, as numbers on the host."""

from __future__ import annotations

import dataclasses
from typing import Mapping

import numpy as np


class NonFiniteError(FloatingPointError):
  """Too many updates in a row were skipped for a gradient without a value."""


@dataclasses.dataclass(frozen=True)
class UpdateOutcome:
  """The outcome of one minibatch, as numpy values.

  Attributes:
    applied: whether parameters moved.
    gradient_norm: before clipping; not finite if the update was skipped.
    update_norm: of the change of the parameters; 0 if nothing moved.
    learning_rate: of this update, applied or not.
    loss: of the minibatch, divided by its token count.
    idle_updates: without anything to learn, since the start of the run.
    skipped_updates: skipped since the start of the run.
    consecutive_skips: skipped in a row up to and with this one.
    nonfinite: names of the tensors whose gradient was not finite.
    stats: see the objective.
  """

  applied: bool
  gradient_norm: float
  update_norm: float
  learning_rate: float
  loss: float
  idle_updates: int
  skipped_updates: int
  consecutive_skips: int
  nonfinite: tuple[str, ...]
  stats: Mapping[str, float | np.ndarray]
