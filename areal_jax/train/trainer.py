"""The trainer: finished groups in, the next version of the policy out.

It owns the train state. A step takes whole groups, gives every token its
advantage, packs minibatches, computes proximal log-probs where they are
needed, makes one update a minibatch and raises the version by one. It waits for
nothing and publishes nothing: whoever calls `step` brings the groups and takes
`params` to the engines.

All of a step's work is handed to the devices before the first number is read
back, and everything that is read comes in one transfer at its end.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Sequence

import jax
from jax.sharding import Mesh
import numpy as np

from areal_jax.config import require
from areal_jax.losses import advantages as advantages_lib
from areal_jax.losses import aggregation, policy
from areal_jax.losses.advantages import AdvantageSettings
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.train import packing
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.state import TrainState
from areal_jax.train.step import Outcome, TrainStep, policy_objective
from areal_jax.types import (
    Group,
    Microbatch,
    RewardStatus,
    StopReason,
    Trajectory,
)


@dataclasses.dataclass
class TrainSettings:
  """How a batch of groups becomes updates.

  Attributes:
    minibatches: updates a step; groups are dealt out to them in order. With
      more than one, proximal log-probs cost a forward pass more.
    max_consecutive_skips: minibatches in a row whose gradient may be without a
      value before the run ends with an error.
  """

  minibatches: int = 1
  max_consecutive_skips: int = 3
  packing: PackingSettings = dataclasses.field(default_factory=PackingSettings)
  advantages: AdvantageSettings = dataclasses.field(
      default_factory=AdvantageSettings
  )
  loss: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)
  optimizer: OptimizerSettings = dataclasses.field(
      default_factory=OptimizerSettings
  )

  def validate(self, at: str) -> None:
    for name, least in (('minibatches', 1), ('max_consecutive_skips', 0)):
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')


@dataclasses.dataclass(frozen=True)
class Minibatch:
  """The groups of one update, packed.

  Attributes:
    microbatches: of the static shape.
    denominator: what its loss is divided by, see `aggregation.py`.
    teaches: whether a loss token has an advantage. If none has, nothing is to
      be learned and the update is idle: without this, weight decay, momentum
      and the KL term would go on moving a policy that no reward holds.
  """

  microbatches: tuple[Microbatch, ...]
  denominator: float
  teaches: bool


class Trainer:
  """Owns the policy that learns.

  Args:
    config: the model.
    settings: see `TrainSettings`.
    mesh: the train mesh.
    rules: from logical axes to mesh axes.
    params: the policy to start from, on the train mesh. They are taken over:
      the arrays must not be used again by the caller.

  Attributes:
    state: the train state; `restore` takes a saved one over.
  """

  def __init__(
      self,
      config: ModelConfig,
      settings: TrainSettings,
      mesh: Mesh,
      rules: Rules,
      params: Any,
  ):
    self._settings = settings
    self._replayed = config.routing_shape if config.moe.replay else None
    self._step = TrainStep(
        config,
        policy_objective(settings.loss),
        settings.optimizer,
        mesh,
        rules,
        settings.packing,
        reference=settings.loss.kl_coefficient > 0,
        recompute_proximal=settings.minibatches > 1,
        max_consecutive_skips=settings.max_consecutive_skips,
        replayed=self._replayed,
    )
    self.state: TrainState = self._step.initial_state(params)

  @property
  def version(self) -> int:
    """Of `params`: steps taken over the run's lineage."""
    return int(self.state.version)

  @property
  def params(self) -> Any:
    """The policy to publish.

    Valid until the next `step`, whose updates take the buffers over: copy them
    (across meshes `jax.device_put` does; on one mesh it may alias).
    """
    return self.state.policy.params

  def state_shardings(self) -> TrainState:
    """Where the parts of the state live, to place a loaded one."""
    return self._step.state_shardings()

  def restore(self, load: Callable[[TrainState], TrainState]) -> None:
    """Takes over a saved state.

    Args:
      load: returns it, given what it has to be: a state of
        `jax.ShapeDtypeStruct` with shardings, and the version of this one. By
        then the arrays of this one are gone, so that memory holds one state.
    """
    arrays = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        (self.state.roles, self.state.counters),
        (self.state_shardings().roles, self.state_shardings().counters),
    )
    for leaf in jax.tree.leaves((self.state.roles, self.state.counters)):
      leaf.delete()
    self.state = load(TrainState(*arrays, version=self.version))

  def warm_up(self) -> None:
    """Compiles whatever a step will run."""
    self._step.warm_up()

  def step(self, groups: Sequence[Group]) -> dict[str, float]:
    """Trains one batch and raises the version.

    Args:
      groups: in any order; they are sorted by draw, and members by sample, so
        that the same groups give the same bits.

    Returns:
      Values of the metrics of `telemetry.metrics` that training can know, and
      `trained_tokens`. What was not measured is absent.

    Raises:
      ValueError: fewer groups than minibatches, a group twice, one without any
        trajectory, a trajectory without a score or longer than a row.
      NonFiniteError: too many updates in a row were skipped.
    """
    groups = _in_order(groups, self._settings.minibatches)
    version = self.version
    minibatches = prepare(groups, self._settings, self._replayed)
    placed = [
        [
            self._step.place(m, part.denominator, version)
            for m in part.microbatches
        ]
        for part in minibatches
    ]
    proximal: list[Any] = [None] * len(placed)
    if self._settings.minibatches > 1:
      # For the whole batch before the first update: all minibatches share one
      # centre of the trust region.
      proximal = [
          [self._step.proximal(self.state, batch) for batch in batches]
          for batches in placed
      ]
    state, outcomes = self.state, []
    for part, batches, logps in zip(minibatches, placed, proximal):
      total = self._step.accumulate(state, batches, logps)
      state, outcome = self._step.apply(state, total, teaches=part.teaches)
      outcomes.append(outcome)
    # Before reading back: the buffers of the state before are gone.
    self.state = dataclasses.replace(state, version=version + 1)
    fetched = self._step.fetch(outcomes, version)
    return {
        **describe(groups, version),
        **summarize(fetched, [part.denominator for part in minibatches]),
        'padding_fraction': packing.padding_fraction(
            [m for part in minibatches for m in part.microbatches]
        ),
    }


def prepare(
    groups: Sequence[Group],
    settings: TrainSettings,
    replayed: tuple[int, int] | None = None,
) -> list[Minibatch]:
  """Advantages over the whole batch, then packed minibatches of groups.

  Args:
    groups: sorted by draw, members by sample.
    settings: of the trainer.
    replayed: see `packing.pack`.

  Raises:
    ValueError: a trajectory without a score, or longer than a row.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  values = iter(
      advantages_lib.token_advantages(
          settings.advantages,
          np.array([_score(t) for t in trajectories]),
          np.array([t.draw_index for t in trajectories]),
          [t.loss_mask for t in trajectories],
          turn_ids=[t.turn_ids for t in trajectories],
      ).advantages
  )
  minibatches = []
  # Sizes differ by one group at most, the larger ones first.
  for part in np.array_split(np.arange(len(groups)), settings.minibatches):
    members = [t for index in part for t in groups[index].trajectories]
    given = [next(values) for _ in members]
    minibatches.append(
        Minibatch(
            tuple(packing.pack(members, given, settings.packing, replayed)),
            aggregation.denominator(
                settings.loss.aggregation,
                [t.loss_mask for t in members],
                settings.loss.constant_length,
            ),
            any(
                np.any(np.asarray(t.loss_mask) * advantage)
                for t, advantage in zip(members, given)
            ),
        )
    )
  return minibatches


def describe(groups: Sequence[Group], version: int) -> dict[str, float]:
  """Metrics that the records alone tell.

  Args:
    groups: of one step.
    version: V, the version that the step started from. A token is V - (its
      version) old, and an answer is mixed if its tokens have two versions.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  sampled = [t.versions[t.loss_mask > 0] for t in trajectories]
  ages = version - np.concatenate(sampled)
  scores = np.array([_score(t) for t in trajectories])
  draws = np.array([t.draw_index for t in trajectories])
  values = {
      'reward_mean': scores.mean(),
      'reward_std': scores.std(),
      'zero_variance_fraction': advantages_lib.fraction_zero_variance(
          scores, draws
      ),
      'response_length_mean': np.mean([len(v) for v in sampled]),
      'truncated_fraction': np.mean(
          [t.stop_reason is StopReason.LENGTH for t in trajectories]
      ),
      'mixed_version_fraction': np.mean(
          [len(set(v.tolist())) > 1 for v in sampled]
      ),
      'head_staleness_max': max(version - g.head_version for g in groups),
  }
  if ages.size:
    values |= {'staleness_mean': ages.mean(), 'staleness_max': ages.max()}
  return {name: float(value) for name, value in values.items()}


def summarize(
    outcomes: Sequence[Outcome], denominators: Sequence[float]
) -> dict[str, float]:
  """Metrics of a step from the sums of its updates.

  Args:
    outcomes: one an update.
    denominators: of the loss of each, which is a mean over that many.
  """
  stats = {
      # Plain Python: an eager jax operation here would compile in a step.
      name: (max if name.endswith('_max') else sum)(
          outcome.stats[name] for outcome in outcomes
      )
      for name in outcomes[0].stats
  }
  # A step whose answers are all masked has sums of 0 over 0 tokens.
  count = max(1.0, stats['tokens_sum'])
  norms = [o.gradient_norm for o in outcomes if math.isfinite(o.gradient_norm)]
  weights = stats['importance_weight_sum']
  squares = stats['importance_weight_squared_sum']
  losses = [o.loss * part for o, part in zip(outcomes, denominators)]
  values = {
      'loss': sum(losses) / max(1.0, sum(denominators)),
      'gradient_norm': np.mean(norms) if norms else math.nan,
      'learning_rate': outcomes[-1].learning_rate,
      'skipped_steps': outcomes[-1].idle_updates + outcomes[-1].skipped_updates,
      'entropy': stats['entropy_sum'] / count,
      'clip_fraction': stats['clipped_sum'] / count,
      'importance_weight_mean': weights / count,
      'importance_weight_max': stats['importance_weight_max'],
      'logprob_gap_mean': stats['gap_sum'] / count,
      'trained_tokens': stats['tokens_sum'],
  }
  for age in policy.AGES:
    tokens_of_age = stats[f'age_{age}_tokens_sum']
    values[f'staleness_{age}_fraction'] = tokens_of_age / count
    if tokens_of_age:
      gap = stats[f'age_{age}_gap_sum'] / tokens_of_age
      values[f'logprob_gap_staleness_{age}'] = gap
  if squares:
    values['effective_sample_size'] = weights**2 / (count * squares)
  if stats['fresh_tokens_sum']:
    values['logprob_gap_fresh_max'] = stats['fresh_gap_max']
  routers = [name for name in outcomes[0].stats if name.startswith('router_')]
  for name in routers:  # of a minibatch each, and means already
    values[name] = np.mean([outcome.stats[name] for outcome in outcomes])
  if 'reference_kl_sum' in stats:
    values['kl_reference'] = stats['reference_kl_sum'] / count
  return {name: float(value) for name, value in values.items()}


def _in_order(groups: Sequence[Group], minibatches: int) -> list[Group]:
  """Groups by draw and members by sample, checked."""
  if len(groups) < minibatches:
    raise ValueError(
        f'{len(groups)} groups for train.minibatches={minibatches}, wanted at'
        ' least as many'
    )
  ordered = sorted(groups, key=lambda group: group.draw_index)
  for one, other in zip(ordered, ordered[1:]):
    if one.draw_index == other.draw_index:
      raise ValueError(f'draw {one.draw_index} comes twice, wanted once')
  for group in ordered:
    if not group.trajectories:
      raise ValueError(f'group of draw {group.draw_index} has no trajectories')
  return [
      dataclasses.replace(
          group,
          trajectories=tuple(
              sorted(group.trajectories, key=lambda t: t.sample)
          ),
      )
      for group in ordered
  ]


def _score(trajectory: Trajectory) -> float:
  if trajectory.reward.status is not RewardStatus.OK:
    raise ValueError(
        f'draw {trajectory.draw_index} sample {trajectory.sample} has reward'
        f" status {trajectory.reward.status.value!r}, wanted 'ok'"
    )
  return trajectory.reward.score
