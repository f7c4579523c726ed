"""Makes packed minibatches of finished groups.

Groups of one step come in, with what critic and reference say of them
(`BatchScores`). Tokens that are too old or of truncated answers leave the loss
mask, every token gets its advantage over the whole batch, groups are dealt out
to minibatches, and each minibatch is packed into microbatches. All of it is
numpy on the host.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import numpy as np

from areal_jax.losses import advantages as advantages_lib
from areal_jax.losses import aggregation
from areal_jax.models.config import ModelConfig
from areal_jax.train import packing
from areal_jax.train.settings import TrainSettings
from areal_jax.types import (
    Group,
    Microbatch,
    RewardStatus,
    StopReason,
    Trajectory,
)


@dataclasses.dataclass(frozen=True)
class Minibatch:
  """The groups of one update, packed.

  Attributes:
    microbatches: of the static shapes.
    tokens: loss tokens.
    denominator: what the loss of the policy is divided by.
    critic_denominator: what that of the critic is divided by.
    teaches: whether some term of the loss has a gradient: a loss token has an
      advantage, or there are loss tokens and a term that needs none (KL,
      entropy, balance of experts). If not, nothing is to be learned and the
      update is idle: weight decay and momentum would go on moving the policy.
    values: [B, T] of each microbatch, what the critic said; () without one.
    returns: [B, T] of each microbatch, what it should have said.
  """

  microbatches: tuple[Microbatch, ...]
  tokens: float
  denominator: float
  critic_denominator: float
  teaches: bool
  values: tuple[np.ndarray, ...] = ()
  returns: tuple[np.ndarray, ...] = ()


@dataclasses.dataclass(frozen=True)
class BatchScores:
  """Log-probs and values of a batch before it is trained on.

  Attributes:
    values: [T_i] of the critic for each trajectory; None without one.
    reference_logps: [T_i] nats, of the reference; None without a KL in the
      reward.
  """

  values: list[np.ndarray] | None = None
  reference_logps: list[np.ndarray] | None = None


def mask_stale(group: Group, version: int, max_age: float) -> Group:
  """The group with tokens older than `max_age` versions out of the loss mask.

  Age is the version that the step starts from, less that of the weights that
  sampled the token. Rewards, and so the group's comparison, stay whole.
  """
  if version - group.head_version <= max_age:
    return group
  return dataclasses.replace(
      group,
      trajectories=tuple(
          dataclasses.replace(
              t, loss_mask=t.loss_mask * (version - t.versions <= max_age)
          )
          for t in group.trajectories
      ),
  )


def minibatches_of(
    groups: Sequence[Group],
    settings: TrainSettings,
    replayed: tuple[int, int] | None = None,
    *,
    scores: BatchScores = BatchScores(),
    balances: bool = False,
) -> list[Minibatch]:
  """Advantages over the whole batch, then packed minibatches of groups.

  Args:
    groups: sorted by draw, members by sample.
    settings: of the trainer.
    replayed: see `packing.pack`.
    scores: what networks say of these groups.
    balances: whether the loss has a term that balances experts.

  Raises:
    ValueError: a trajectory without a score, or longer than a row.
  """
  dealt = deal(groups, settings)
  trajectories = [t for members in dealt for t in members]
  masks = [t.loss_mask for t in trajectories]
  loss = settings.loss
  always = balances or loss.kl_coefficient > 0 or loss.entropy_coefficient > 0
  token_rewards = _token_rewards(trajectories, scores, settings)
  found = advantages_lib.token_advantages(
      settings.advantages,
      np.array([score_of(t) for t in trajectories]),
      np.array([t.draw_index for t in trajectories]),
      [t.sampled for t in trajectories],
      values=scores.values,
      token_rewards=token_rewards,
      turn_ids=[t.turn_ids for t in trajectories],
  )
  minibatches, start = [], 0
  for members in dealt:
    own = slice(start, start + len(members))
    start = own.stop
    # What is left out of the loss has no part in it, whatever it is worth.
    given = [
        advantage * (t.loss_mask > 0)
        for t, advantage in zip(members, found.advantages[own])
    ]
    rows = {}
    if scores.values is not None:
      layout = packing.lay([len(t.ids) for t in members], settings.packing)
      for name, per_token in (
          ('values', scores.values[own]),
          ('returns', found.returns[own]),
      ):
        rows[name] = tuple(packing.scatter(per_token, layout))
    minibatches.append(
        Minibatch(
            tuple(packing.pack(members, given, settings.packing, replayed)),
            float(sum(np.count_nonzero(t.loss_mask) for t in members)),
            *(
                aggregation.denominator(
                    loss.aggregation, masks[own], loss.constant_length
                )
                for loss in (settings.loss, settings.critic.loss)
            ),
            any(
                np.any(t.loss_mask if always else t.loss_mask * advantage)
                for t, advantage in zip(members, given)
            ),
            **rows,
        )
    )
  return minibatches


def replayed_routing(config: ModelConfig) -> tuple[int, int] | None:
  """(L, k) of recorded choices of experts, where they are replayed."""
  return config.routing_shape if config.moe.replay else None


def deal(
    groups: Sequence[Group], settings: TrainSettings
) -> list[list[Trajectory]]:
  """The trajectories of each minibatch, whole groups in order.

  Sizes differ by one group at most, the larger ones first.
  """
  dealt = []
  for part in np.array_split(np.arange(len(groups)), settings.minibatches):
    members = [t for index in part for t in groups[index].trajectories]
    if settings.mask_truncated:
      members = [
          dataclasses.replace(t, loss_mask=np.zeros_like(t.loss_mask))
          if t.stop_reason is StopReason.LENGTH
          else t
          for t in members
      ]
    dealt.append(members)
  return dealt


def _token_rewards(
    trajectories: Sequence[Trajectory],
    scores: BatchScores,
    settings: TrainSettings,
) -> list[np.ndarray] | None:
  """Rewards of single tokens: those of the record, and the KL's."""
  found = None
  if any(t.token_rewards is not None for t in trajectories):
    found = [
        np.zeros(len(t.ids), np.float32)
        if t.token_rewards is None
        else t.token_rewards
        for t in trajectories
    ]
  if scores.reference_logps is None:
    return found
  kl = kl_token_rewards(trajectories, scores, settings)
  return kl if found is None else [a + b for a, b in zip(found, kl)]


def kl_token_rewards(
    trajectories: Sequence[Trajectory],
    scores: BatchScores,
    settings: TrainSettings,
) -> list[np.ndarray]:
  """Rewards of single tokens that charge for the KL to the reference."""
  return advantages_lib.kl_rewards(
      settings.advantages,
      [t.logps for t in trajectories],  # of the policies that sampled
      scores.reference_logps,
      [t.sampled for t in trajectories],
  )


def in_order(groups: Sequence[Group], minibatches: int) -> list[Group]:
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


def score_of(trajectory: Trajectory) -> float:
  """The score of an answer; raises ValueError where it has none."""
  if trajectory.reward.status is not RewardStatus.OK:
    raise ValueError(
        f'draw {trajectory.draw_index} sample {trajectory.sample} has reward'
        f" status {trajectory.reward.status.value!r}, wanted 'ok'"
    )
  return trajectory.reward.score
