"""From rewards to advantages: one a sequence, then one a token.

Which samples belong together is said by explicit group ids, never by position,
so groups may be uneven, interleaved, or lack members that failed. Everything
but `gae` runs on the host in numpy, in float64 inside and float32 outside: its
inputs change shape with every batch, and nothing should compile for that.

How a set of n numbers is normalised (a group, a batch, the tokens of a batch):

  A = (x - mean) / (std + epsilon),  std² = Σ (x - mean)² / (n - 1)

with n instead of n - 1 where `unbiased` is off, and with no division where
`std` is off. GRPO as commonly trained is unbiased; verl adds an epsilon of
1e-6, AReaL one of 1e-5. A set without variance (all equal, or one member) has
advantages of exactly 0: nothing can be learned from it, and a rounding error
divided by epsilon is not a signal. `fraction_zero_variance` counts such groups.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, Sequence

import jax
from jax import Array
import jax.numpy as jnp
import numpy as np

from areal_jax.config import require
from areal_jax.losses import masking

Kind = Literal['group', 'batch', 'leave_one_out', 'gae']


@dataclasses.dataclass
class AdvantageSettings:
  """How rewards become advantages.

  kind: 'group', GRPO, against the other samples of the same problem; 'batch',
    against all sequences of the batch; 'leave_one_out', RLOO, minus the mean of
    the *other* samples; 'gae', the reward discounted back over the tokens of
    its answer, then normalised over all tokens of the batch (no critic: values
    of 0). The AReaL paper is 'gae' with gamma and lam of 1.
  std: whether to divide by the standard deviation; off is Dr.GRPO. RLOO has no
    such division.
  unbiased: n - 1 in the standard deviation instead of n.
  epsilon: added to the standard deviation.
  gamma, lam: discount and λ of 'gae'.
  reward_scale, reward_bias, reward_clip: the reward used is
    clip((reward + bias) · scale, ± clip); None does not clip.
  """

  kind: Kind = 'group'
  std: bool = True
  unbiased: bool = True
  epsilon: float = 1e-6
  gamma: float = 1.0
  lam: float = 1.0
  reward_scale: float = 1.0
  reward_bias: float = 0.0
  reward_clip: float | None = None

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning or an effect."""
    kinds = ('group', 'batch', 'leave_one_out', 'gae')
    require(self.kind in kinds, f'{at}.kind', self.kind, f'one of {kinds}')
    require(
        not (self.std and self.kind == 'leave_one_out'),
        f'{at}.std',
        self.std,
        "False with kind 'leave_one_out', which divides by nothing",
    )
    right = 0 <= self.epsilon < math.inf
    require(right, f'{at}.epsilon', self.epsilon, 'at least 0 and finite')
    for name in ('gamma', 'lam'):
      value = getattr(self, name)
      require(0 <= value <= 1, f'{at}.{name}', value, 'between 0 and 1')
      right = self.kind == 'gae' or value == 1
      require(right, f'{at}.{name}', value, f'1 with kind {self.kind!r}')
    for name in ('reward_scale', 'reward_bias'):
      value = getattr(self, name)
      require(math.isfinite(value), f'{at}.{name}', value, 'a finite number')
    clip = self.reward_clip
    right = clip is None or clip > 0
    require(right, f'{at}.reward_clip', clip, 'None or a number above 0')


def sequence_advantages(
    settings: AdvantageSettings, rewards: np.ndarray, group_ids: np.ndarray
) -> np.ndarray:
  """One advantage a sequence.

  Args:
    settings: of any kind but 'gae', which has no advantage of a sequence.
    rewards: [N] finite.
    group_ids: [N] integers, equal for samples of one problem.

  Returns:
    [N] float32 in units of reward, or of standard deviations with `std`.

  Raises:
    ConfigError: the settings are wrong.
    ValueError: kind 'gae', shapes that differ, or a reward that is not finite.
  """
  settings.validate('advantages')
  rewards = shape_rewards(settings, rewards)
  scale = dict(
      std=settings.std, unbiased=settings.unbiased, epsilon=settings.epsilon
  )
  if settings.kind == 'group':
    return group_normalized(rewards, group_ids, **scale)
  if settings.kind == 'batch':
    _grouped(rewards, group_ids)
    return batch_normalized(rewards, **scale)
  if settings.kind == 'leave_one_out':
    return leave_one_out(rewards, group_ids)
  raise ValueError(
      f'kind is {settings.kind!r}, wanted one with an advantage a sequence;'
      ' token_advantages serves all kinds'
  )


def token_advantages(
    settings: AdvantageSettings,
    rewards: np.ndarray,
    group_ids: np.ndarray,
    loss_masks: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """One advantage a token, of any kind.

  A sequence's advantage goes to each of its sampled tokens. With 'gae' the
  reward stands at the last sampled token and

    A_t = (gamma · lam)^(sampled tokens after t) · reward

  which is generalised advantage estimation (https://arxiv.org/abs/1506.02438)
  with values of 0; these are then normalised over the sampled tokens of the
  batch. Tokens that were not sampled (tool output between turns) neither
  receive an advantage nor count as a step.

  Args:
    settings: see `AdvantageSettings`.
    rewards: [N] finite.
    group_ids: [N] integers, equal for samples of one problem.
    loss_masks: N arrays [T_i], positive on sampled tokens, unshifted.

  Returns:
    N arrays [T_i] float32, 0 where not sampled.

  Raises:
    ConfigError: the settings are wrong.
    ValueError: lengths that differ, or a reward that is not finite.
  """
  settings.validate('advantages')
  masks = [np.asarray(mask) > 0 for mask in loss_masks]
  if len(masks) != np.size(rewards):
    raise ValueError(
        f'{len(masks)} loss_masks with {np.size(rewards)} rewards, wanted as'
        ' many of one as of the other'
    )
  if settings.kind != 'gae':
    sequence = sequence_advantages(settings, rewards, group_ids)
    return [
        np.where(mask, advantage, 0).astype(np.float32)
        for mask, advantage in zip(masks, sequence)
    ]
  rewards = shape_rewards(settings, rewards)
  _grouped(rewards, group_ids)
  decay = settings.gamma * settings.lam
  raw = []
  for mask, reward in zip(masks, rewards):
    after = np.cumsum(mask[::-1])[::-1] - mask
    raw.append(reward * decay ** after.astype(np.float64))
  return token_normalized(
      raw,
      masks,
      std=settings.std,
      unbiased=settings.unbiased,
      epsilon=settings.epsilon,
  )


def shape_rewards(
    settings: AdvantageSettings, rewards: np.ndarray
) -> np.ndarray:
  """clip((reward + bias) · scale, ± clip), [N] to [N] float32.

  Raises:
    ValueError: a reward that is not finite.
  """
  rewards = _finite(rewards)
  rewards = (rewards + settings.reward_bias) * settings.reward_scale
  if settings.reward_clip is not None:
    rewards = np.clip(rewards, -settings.reward_clip, settings.reward_clip)
  return rewards.astype(np.float32)


def group_normalized(
    rewards: np.ndarray,
    group_ids: np.ndarray,
    *,
    std: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:
  """Each reward against those of its own group (formula at the top).

  GRPO, https://arxiv.org/abs/2402.03300; without `std` Dr.GRPO,
  https://arxiv.org/abs/2503.20783.

  Args:
    rewards: [N] finite.
    group_ids: [N] integers; groups of any sizes in any order.
    std: whether to divide by the standard deviation of the group.
    unbiased: n - 1 in it instead of n.
    epsilon: added to it.

  Returns:
    [N] float32, exactly 0 in a group of equal rewards and in a group of one.
  """
  rewards, group, sizes = _grouped(rewards, group_ids)
  varied = _varied(rewards, group, len(sizes))
  centred = rewards - _group_means(rewards, group, sizes)[group]
  if std:
    freedom = np.maximum(sizes - 1, 1) if unbiased else sizes
    squares = np.bincount(group, centred**2, minlength=len(sizes))
    divisor = np.where(varied, np.sqrt(squares / freedom) + epsilon, 1)
    centred = centred / divisor[group]
  return np.where(varied[group], centred, 0).astype(np.float32)


def batch_normalized(
    rewards: np.ndarray,
    *,
    std: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-6,
) -> np.ndarray:
  """Each reward against all of them; see `group_normalized`. [N] to [N]."""
  one_group = np.zeros(np.shape(rewards), np.int64)
  return group_normalized(
      rewards, one_group, std=std, unbiased=unbiased, epsilon=epsilon
  )


def leave_one_out(rewards: np.ndarray, group_ids: np.ndarray) -> np.ndarray:
  """Each reward minus the mean of the others of its group.

  A_i = r_i - Σ_{j≠i} r_j / (n - 1) = n / (n - 1) · (r_i - mean)

  RLOO, https://arxiv.org/abs/2402.14740.

  Args:
    rewards: [N] finite.
    group_ids: [N] integers; groups of any sizes in any order.

  Returns:
    [N] float32, exactly 0 in a group of equal rewards and in a group of one,
    which has no others.
  """
  rewards, group, sizes = _grouped(rewards, group_ids)
  centred = rewards - _group_means(rewards, group, sizes)[group]
  factor = sizes / np.maximum(sizes - 1, 1)
  varied = _varied(rewards, group, len(sizes))
  return np.where(varied[group], factor[group] * centred, 0).astype(np.float32)


def fraction_zero_variance(rewards: np.ndarray, group_ids: np.ndarray) -> float:
  """Share of the groups that teach nothing: all rewards equal, or one member.

  Args:
    rewards: [N] finite.
    group_ids: [N] integers.

  Returns:
    Between 0 and 1; 0 without any group.
  """
  rewards, group, sizes = _grouped(rewards, group_ids)
  if not len(sizes):
    return 0.0
  return float(1 - _varied(rewards, group, len(sizes)).mean())


def token_normalized(
    values: Sequence[np.ndarray],
    masks: Sequence[np.ndarray],
    *,
    std: bool = True,
    unbiased: bool = True,
    epsilon: float = 1e-6,
) -> list[np.ndarray]:
  """Values of tokens against those of all tokens of the batch.

  Every sampled token counts once, so long sequences weigh more than short ones.

  Args:
    values: N arrays [T_i]; masked ones may hold NaN.
    masks: N arrays [T_i], positive on sampled tokens.
    std, unbiased, epsilon: see `group_normalized`.

  Returns:
    N arrays [T_i] float32, 0 where masked, and everywhere exactly 0 where the
    batch has fewer than two sampled tokens or all of them are equal.

  Raises:
    ValueError: a sampled value that is not finite.
  """
  masks = [np.asarray(mask) > 0 for mask in masks]
  if not masks:
    return []
  sampled = np.concatenate([np.asarray(v)[m] for v, m in zip(values, masks)])
  normal = batch_normalized(
      sampled, std=std, unbiased=unbiased, epsilon=epsilon
  )
  ends = np.cumsum([mask.sum() for mask in masks])
  result = []
  for mask, end in zip(masks, ends):
    row = np.zeros(mask.shape, np.float32)
    row[mask] = normal[end - mask.sum() : end]
    result.append(row)
  return result


@jax.jit
def gae(
    rewards: Array,
    values: Array,
    mask: Array,
    segment_ids: Array,
    *,
    gamma: float,
    lam: float,
) -> tuple[Array, Array]:
  """Generalised advantage estimation over the sampled tokens of each segment.

  δ_t = r_t + γ V_next - V_t,  A_t = δ_t + γ λ A_next,  returns = A + V

  where next is the next *sampled* token of the same segment, and both are 0
  after the last one (no bootstrap). See https://arxiv.org/abs/1506.02438.

  A reward counts at a sampled token only: hand in a final reward at the last
  sampled token, not at the end of the tool output behind it. Masked positions
  may hold NaN or infinity.

  Args:
    rewards: [B, T].
    values: [B, T] of a critic, at the same positions; 0.0 without one.
    mask: [B, T] positive on sampled tokens.
    segment_ids: [B, T] 1, 2, ... for the sequences of a row, 0 for padding.
    gamma: discount a token.
    lam: λ, 0 for one-step and 1 for Monte-Carlo advantages.

  Returns:
    advantages and returns, [B, T] float32, 0 where masked.
  """
  values = jnp.broadcast_to(jnp.asarray(values), jnp.shape(rewards))
  rewards, values = masking.keep(rewards, mask), masking.keep(values, mask)
  mask, segment_ids = jnp.asarray(mask) > 0, jnp.asarray(segment_ids)

  def step(carry, token):  # all [B]
    next_value, next_advantage, next_segment = carry
    reward, value, sampled, segment = token
    same = segment == next_segment
    next_value = jnp.where(same, next_value, 0.0)
    next_advantage = jnp.where(same, next_advantage, 0.0)
    delta = reward + gamma * next_value - value
    advantage = delta + gamma * lam * next_advantage
    carry = (
        jnp.where(sampled, value, next_value),
        jnp.where(sampled, advantage, next_advantage),
        segment,
    )
    return carry, jnp.where(sampled, advantage, 0.0)

  nothing = jnp.zeros_like(rewards[:, -1])
  tokens = (rewards.T, values.T, mask.T, segment_ids.T)
  _, advantages = jax.lax.scan(
      step, (nothing, nothing, segment_ids[:, -1]), tokens, reverse=True
  )
  advantages = advantages.T
  return advantages, advantages + values


def _finite(rewards: np.ndarray) -> np.ndarray:
  """[N] float64, checked."""
  rewards = np.asarray(rewards, np.float64)
  if rewards.ndim != 1:
    raise ValueError(f'rewards have shape {rewards.shape}, wanted [N]')
  wrong = np.flatnonzero(~np.isfinite(rewards))
  if wrong.size:
    at = wrong[0]
    raise ValueError(f'rewards[{at}] is {rewards[at]}, wanted a finite number')
  return rewards


def _grouped(
    rewards: np.ndarray, group_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Rewards [N], group of each from 0 on [N], size of each group."""
  rewards, group_ids = _finite(rewards), np.asarray(group_ids)
  if rewards.shape != group_ids.shape:
    raise ValueError(
        f'group_ids have shape {group_ids.shape}, wanted that of rewards,'
        f' {rewards.shape}'
    )
  _, group, sizes = np.unique(
      group_ids, return_inverse=True, return_counts=True
  )
  return rewards, group.astype(np.int64), sizes


def _group_means(rewards, group, sizes) -> np.ndarray:
  return np.bincount(group, rewards, minlength=len(sizes)) / sizes


def _varied(rewards: np.ndarray, group: np.ndarray, groups: int) -> np.ndarray:
  """[groups] whether the rewards of a group differ.

  Compared directly: the mean of equal numbers may be off by a rounding error.
  """
  highest = np.full(groups, -np.inf)
  lowest = np.full(groups, np.inf)
  np.maximum.at(highest, group, rewards)
  np.minimum.at(lowest, group, rewards)
  return highest > lowest
