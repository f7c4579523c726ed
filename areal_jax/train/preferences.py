"""Learning from pairs of answers of which one is preferred.

Two ways over the same train step: `train_preferences` moves the policy itself
(DPO and IPO, against a frozen copy of where it started), `train_reward_model` a
network that scores answers (Bradley-Terry). A pair shares a row
(`packing.pack_pairs`), so its loss is whole in one microbatch, and a batch is
divided by its pairs, whatever the cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh

from areal_jax.config import require
from areal_jax.losses import masking, supervised
from areal_jax.losses.supervised import PreferenceKind
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.train import packing
from areal_jax.train.objectives import Batch, Objective, Scores
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.step import TrainStep
from areal_jax.train.supervised import batches, run_updates

# Prompt, preferred answer, other answer: token ids.
Pair = tuple[Sequence[int], Sequence[int], Sequence[int]]
Report = Callable[[int, float], None]


@dataclasses.dataclass
class PreferenceSettings:
  """Settings of learning from pairs.

  Attributes:
    kind: of the policy's loss, see `losses/supervised.py`.
    beta: β of the policy's loss, how strongly it is held to where it started.
    steps: updates.
    batch: pairs an update.
    seed: of the order of pairs, new in each epoch.
    report_every: updates between two reports.
    packing: shape of a microbatch; a row holds both answers of a pair, each
      with its prompt.
    optimizer: see there.
  """

  kind: PreferenceKind = 'sigmoid'
  beta: float = 0.1
  steps: int = 100
  batch: int = 32
  seed: int = 0
  report_every: int = 10
  packing: PackingSettings = dataclasses.field(default_factory=PackingSettings)
  optimizer: OptimizerSettings = dataclasses.field(
      default_factory=lambda: OptimizerSettings(learning_rate=1e-6)
  )

  def validate(self, at: str) -> None:
    for name in ('steps', 'batch', 'report_every'):
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    require(0 < self.beta < float('inf'), f'{at}.beta', self.beta,
            'more than 0 and finite')  # fmt: skip


def preference_objective(settings: PreferenceSettings) -> Objective:
  """DPO over the pairs of each row; divided by the pairs of the batch."""

  def objective(scores: Scores, batch: Batch):
    mask, segments = batch['loss_mask'], batch['segment_ids']
    chosen, rejected, pairs = by_pair(scores.logps, mask, segments)
    held = by_pair(scores.reference_logps, mask, segments)
    return supervised.preference_loss(
        chosen,
        rejected,
        denominator=batch['denominator'],
        kind=settings.kind,
        beta=settings.beta,
        reference_chosen=held[0],
        reference_rejected=held[1],
        mask=pairs,
    )

  return objective


def reward_objective(scores: Array, batch: Batch):
  """Bradley-Terry over the pairs of each row; divided by the batch's pairs."""
  everywhere = batch['segment_ids'] > 0
  chosen, rejected, pairs = by_pair(scores, everywhere, batch['segment_ids'])
  return supervised.reward_model_loss(
      chosen, rejected, denominator=batch['denominator'], mask=pairs
  )


def by_pair(
    values: Array, mask: Array, segment_ids: Array
) -> tuple[Array, Array, Array]:
  """Sums over the two answers of each pair of a row.

  Args:
    values: [B, T].
    mask: [B, T] positive where a value counts.
    segment_ids: [B, T] as `packing.pack_pairs` numbers them: the odd ones are
      preferred to the even ones behind them.

  Returns:
    Sums of the preferred and of the other answer, and 1 where there is a pair:
    [B, T // 2] each.
  """
  places = values.shape[1] // 2

  def sums(row, ids):
    return jax.ops.segment_sum(row, ids, num_segments=2 * places + 1)[1:]

  kept = jax.vmap(sums)(masking.keep(values, mask), segment_ids)
  there = jax.vmap(sums)(jnp.where(segment_ids > 0, 1.0, 0.0), segment_ids)
  return kept[:, 0::2], kept[:, 1::2], jnp.where(there[:, 0::2] > 0, 1.0, 0.0)


def train_preferences(
    config: ModelConfig,
    params: Any,
    pairs: Sequence[Pair],
    settings: PreferenceSettings,
    mesh: Mesh,
    rules: Rules,
    on_report: Report | None = None,
) -> Any:
  """Moves a policy towards the preferred answers.

  Args:
    config: the model.
    params: on the mesh; taken over, not to be used again by the caller. A copy
      of them is the reference.
    pairs: prompt, preferred and other answer, token ids.
    settings: see `PreferenceSettings`.
    mesh: the train mesh.
    rules: from logical axes to mesh axes.
    on_report: called with the updates done and the mean loss since the last
      report.

  Returns:
    The trained parameters, on the mesh.

  Raises:
    ConfigError: the settings are wrong.
    ValueError: fewer pairs than a batch, or one that is longer than a row.
    NonFiniteError: gradients without a value.
  """
  settings.validate('preferences')
  step = TrainStep(
      config,
      preference_objective(settings),
      settings.optimizer,
      mesh,
      rules,
      settings.packing,
      reference=config,
  )
  return _train(step, params, pairs, settings, on_report)


def train_reward_model(
    config: ModelConfig,
    params: Any,
    pairs: Sequence[Pair],
    settings: PreferenceSettings,
    mesh: Mesh,
    rules: Rules,
    on_report: Report | None = None,
) -> Any:
  """Trains a reward model to score preferred answers above the others.

  Args:
    config: the trunk.
    params: of `heads.with_head(config, 'reward', ...)`, on the mesh; taken
      over.
    pairs, settings, mesh, rules, on_report: see `train_preferences`; kind and
      beta are not looked at.

  Returns:
    The trained parameters, on the mesh, for `heads.scores`.

  Raises:
    ConfigError, ValueError, NonFiniteError: as `train_preferences`.
  """
  settings.validate('preferences')
  step = TrainStep(
      config,
      reward_objective,
      settings.optimizer,
      mesh,
      rules,
      settings.packing,
      kind='reward',
  )
  return _train(step, params, pairs, settings, on_report)


def _train(
    step: TrainStep,
    params: Any,
    pairs: Sequence[Pair],
    settings: PreferenceSettings,
    on_report: Report | None,
) -> Any:
  if len(pairs) < settings.batch:
    raise ValueError(
        f'{len(pairs)} pairs, wanted at least a batch of {settings.batch}'
    )
  packing.pack_pairs(pairs, settings.packing)  # refuses before any device work

  def packed():
    for chosen in batches(
        len(pairs), settings.steps, settings.batch, settings.seed
    ):
      of_batch = [pairs[index] for index in chosen]
      yield packing.pack_pairs(of_batch, settings.packing), settings.batch

  return run_updates(
      step, step.initial_state(params), packed(), settings.report_every,
      on_report,
  ).policy.params  # fmt: skip
