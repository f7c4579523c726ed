"""The critic: a network of its own that says what a state is worth.

It starts from a copy of the policy's trunk with a new head (`models/heads.py`),
has its own optimizer, and learns from the same minibatches as the policy. What
it says comes into the advantages (`losses/advantages.py`); its loss is
`losses/value.py`. The trainer makes the updates.
"""

from __future__ import annotations

import dataclasses

from jax import Array

from areal_jax.config import require
from areal_jax.losses import value
from areal_jax.losses.value import ValueLoss
from areal_jax.train.objectives import Batch, Objective
from areal_jax.train.optimizer import OptimizerSettings


@dataclasses.dataclass
class CriticSettings:
  """Settings of the critic, which exists where `advantages.critic` is set.

  Attributes:
    warmup_steps: steps at the start of a run in which the critic learns alone:
      the policy is published as it was, and its updates count as idle.
    loss: see `ValueLoss`.
    optimizer: its own schedule; it counts the critic's updates.
  """

  warmup_steps: int = 0
  loss: ValueLoss = dataclasses.field(default_factory=ValueLoss)
  optimizer: OptimizerSettings = dataclasses.field(
      default_factory=lambda: OptimizerSettings(learning_rate=1e-5)
  )

  def validate(self, at: str) -> None:
    require(self.warmup_steps >= 0, f'{at}.warmup_steps', self.warmup_steps,
            'at least 0')  # fmt: skip


def value_objective(settings: ValueLoss) -> Objective:
  """The value loss; the batch has 'values' and 'returns', both [B, T]."""

  def objective(values: Array, batch: Batch):
    return value.value_loss(
        values,
        batch['values'],
        batch['returns'],
        batch['loss_mask'],
        denominator=batch['denominator'],
        settings=settings,
        segment_ids=batch['segment_ids'],
    )

  return objective
