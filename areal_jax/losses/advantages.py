"""From rewards to advantages: one way, whose stations are settings.

  rewards of sequences                   [N]
    -> shape      penalty on length, bias, scale, clip
    -> normalise  over sequences, by group or batch   (`sequences`)
    -> spread     back over the sampled tokens: GAE, with values or without
    -> normalise  over tokens, by group or batch      (`tokens`)
  advantages of tokens                   N × [T_i]

Which samples belong together is said by explicit group ids, never by position,
so groups may be uneven, interleaved, or lack members that failed. Everything
but `gae` runs on the host in numpy: its inputs change shape with every batch,
and nothing should compile for that. All stations work in float64, and only the
last one rounds to float32. Rewards of 1000 and 1000.00001 differ; rounded
before their mean is taken off, they would not.

How numbers are normalised (those of sequences, or those of tokens):

  A_i = (x_i - mean_i) / (std_i + epsilon)
  std² = Σ (x_j - mean_j)² / (n - 1)

mean_i is that of the group of i, of the batch, or 0, each without x_i itself
where `leave_one_out` is on; std_i sums over the group of i or the batch, with n
instead of n - 1 where `unbiased` is off. A group or batch whose mean is taken
and whose numbers are all equal, or which has one member, comes out as exactly
0: nothing can be learned from it, and a rounding error divided by epsilon is
not a signal. Numbers count as equal within `SAME` of their size.
`fraction_zero_variance` counts such groups.
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
from areal_jax.losses.kl import Kind

Level = Literal['none', 'group', 'batch']

# Numbers that differ by less, as a share of their size, are equal: sums of the
# same parts in another order differ so (0.1 + 0.2 and 0.3).
SAME = 1e-12
# Nats, the most that the KL of one token may take off its reward.
MAX_KL_REWARD = 10.0


@dataclasses.dataclass
class Normalization:
  """Settings of a normalization; the formula is at the top of this file.

  Attributes:
    mean: whose mean is taken off.
    std: whose standard deviation divides.
    leave_one_out: each number is compared with the mean of the others.
    unbiased: n - 1 in the standard deviation instead of n.
    epsilon: added to the standard deviation. verl has 1e-6, AReaL 1e-5.
  """

  mean: Level = 'none'
  std: Level = 'none'
  leave_one_out: bool = False
  unbiased: bool = True
  epsilon: float = 1e-6

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning or an effect."""
    levels = ('none', 'group', 'batch')
    for name in ('mean', 'std'):
      value = getattr(self, name)
      require(value in levels, f'{at}.{name}', value, f'one of {levels}')
    right = not (self.leave_one_out and self.mean == 'none')
    require(right, f'{at}.leave_one_out', self.leave_one_out,
            "False with mean 'none', which leaves no mean")  # fmt: skip
    right = 0 <= self.epsilon < math.inf
    require(right, f'{at}.epsilon', self.epsilon, 'at least 0 and finite')


@dataclasses.dataclass
class LengthPenalty:
  """DAPO's soft penalty on long answers, https://arxiv.org/abs/2503.14476.

    penalty = -factor · clip((n - (longest - buffer)) / buffer, 0, 1)

  for n sampled tokens, added to the reward before bias, scale and clip.

  Attributes:
    longest: tokens from which on the penalty is whole; 0 for no penalty.
    buffer: over how many tokens before that it grows from 0.
    factor: the whole penalty, in units of reward.
  """

  longest: int = 0
  buffer: int = 0
  factor: float = 1.0

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning or an effect."""
    require(self.longest >= 0, f'{at}.longest', self.longest, 'at least 0')
    least = 1 if self.longest else 0
    right = least <= self.buffer <= self.longest
    require(right, f'{at}.buffer', self.buffer,
            f'1 to longest={self.longest}, or 0 without a penalty')  # fmt: skip
    right = 0 < self.factor < math.inf
    require(right, f'{at}.factor', self.factor, 'more than 0 and finite')


@dataclasses.dataclass
class AdvantageSettings:
  """Settings of the way from rewards to advantages. The default is GRPO.

  Attributes:
    reward_scale, reward_bias, reward_clip: the reward used is
      clip((reward + bias) · scale, ± clip); None does not clip.
    length_penalty: see `LengthPenalty`.
    sequences: how rewards of sequences are normalised.
    gamma, lam: discount and λ of a token.
    turn_discount: what follows a turn counts this much less in that turn, once
      for each turn in between.
    critic: whether values of a critic are the baseline of a token.
    kl_coefficient: weight of the KL to a reference policy that is taken off the
      reward of each token (`kl_rewards`); 0 for none.
    kl_kind: its estimator; k1 is the one whose sum is the KL of the sequence.
    tokens: how advantages of tokens are normalised.
  """

  reward_scale: float = 1.0
  reward_bias: float = 0.0
  reward_clip: float | None = None
  length_penalty: LengthPenalty = dataclasses.field(
      default_factory=LengthPenalty
  )
  sequences: Normalization = dataclasses.field(
      default_factory=lambda: Normalization('group', 'group')
  )
  gamma: float = 1.0
  lam: float = 1.0
  turn_discount: float = 1.0
  critic: bool = False
  kl_coefficient: float = 0.0
  kl_kind: Kind = 'k1'
  tokens: Normalization = dataclasses.field(default_factory=Normalization)

  def validate(self, at: str) -> None:
    """Raises `ConfigError` on a value without a meaning."""
    for name in ('gamma', 'lam', 'turn_discount'):
      value = getattr(self, name)
      require(0 <= value <= 1, f'{at}.{name}', value, 'between 0 and 1')
    for name in ('reward_scale', 'reward_bias'):
      value = getattr(self, name)
      require(math.isfinite(value), f'{at}.{name}', value, 'a finite number')
    clip = self.reward_clip
    right = clip is None or clip > 0
    require(right, f'{at}.reward_clip', clip, 'None or a number above 0')
    right = 0 <= self.kl_coefficient < math.inf
    require(right, f'{at}.kl_coefficient', self.kl_coefficient,
            'at least 0 and finite')  # fmt: skip


@dataclasses.dataclass(frozen=True)
class TokenAdvantages:
  """The result of `token_advantages`: N arrays [T_i] float32 of each.

  Attributes:
    advantages: 0 where not sampled.
    returns: what a critic should have said, advantage + value before the
      tokens were normalised; 0 where not sampled.
  """

  advantages: list[np.ndarray]
  returns: list[np.ndarray]


def token_advantages(
    settings: AdvantageSettings,
    rewards: np.ndarray,
    group_ids: np.ndarray,
    sampled: Sequence[np.ndarray],
    *,
    values: Sequence[np.ndarray] | None = None,
    token_rewards: Sequence[np.ndarray] | None = None,
    turn_ids: Sequence[np.ndarray] | None = None,
) -> TokenAdvantages:
  """The whole way from rewards to advantages.

  The reward of a sequence stands at its last sampled token and is spread back
  as `gae` says; with a gamma, lam and turn_discount of 1 and neither values nor
  token_rewards every sampled token gets it whole. Tokens that were not sampled
  (tool output between turns) neither receive an advantage nor count as a step.

  Args:
    settings: see `AdvantageSettings`.
    rewards: [N] finite.
    group_ids: [N] integers, equal for samples of one problem.
    sampled: N arrays [T_i], positive on sampled tokens, unshifted. Tokens that
      the loss leaves out (stale or truncated ones) are among them: what an
      answer is worth does not depend on what is trained of it.
    values: N arrays [T_i] of the critic at these tokens, before they were
      sampled; others may be NaN. Given iff `settings.critic`.
    token_rewards: N arrays [T_i], added where sampled: `kl_rewards`, rewards of
      turns. They are neither shaped nor normalised.
    turn_ids: N arrays [T_i] of integers; needed with a turn_discount below 1.

  Raises:
    ConfigError: the settings are wrong.
    ValueError: lengths that differ, a number that is not finite, or one of the
      optional arrays against the settings.
  """
  settings.validate('advantages')
  masks = [np.asarray(mask) > 0 for mask in sampled]
  _check_count('rewards', np.size(rewards), masks)
  if (values is not None) != settings.critic:
    raise ValueError(
        f'values given: {values is not None}, wanted critic={settings.critic}'
    )
  if settings.turn_discount != 1 and turn_ids is None:
    raise ValueError(
        f'turn_ids is None with turn_discount {settings.turn_discount}, wanted'
        ' N arrays [T_i]'
    )
  for name, x in (
      ('values', values),
      ('token_rewards', token_rewards),
      ('turn_ids', turn_ids),
  ):
    _check_shapes(name, x, masks)
  lengths = np.array([np.count_nonzero(mask) for mask in masks], np.int64)
  shaped = shape_rewards(settings, rewards, lengths)
  sequence = normalize(shaped, group_ids, settings.sequences)
  undiscounted = settings.gamma == settings.lam == settings.turn_discount == 1
  if undiscounted and values is None and token_rewards is None:
    # The whole batch at once: one sequence after another takes the host longer
    # than it takes a small policy to decode as many tokens.
    whole = _everywhere(sequence, masks)
    return _rounded(settings, whole, whole, group_ids, masks)
  raw, returns = [], []
  for index, mask in enumerate(masks):
    given = [
        None if x is None else x[index]
        for x in (values, token_rewards, turn_ids)
    ]
    advantage, result = _spread(settings, float(sequence[index]), mask, *given)
    raw.append(advantage)
    returns.append(result)
  return _rounded(settings, raw, returns, group_ids, masks)


def _rounded(
    settings: AdvantageSettings,
    raw: list[np.ndarray],
    returns: list[np.ndarray],
    group_ids: np.ndarray,
    masks: list[np.ndarray],
) -> TokenAdvantages:
  """Normalises advantages of tokens, and rounds all to float32."""
  if not settings.tokens.mean == settings.tokens.std == 'none':
    raw = normalize_tokens(raw, group_ids, masks, settings.tokens)
  single = lambda rows: [row.astype(np.float32) for row in rows]
  return TokenAdvantages(single(raw), single(returns))


def shape_rewards(
    settings: AdvantageSettings,
    rewards: np.ndarray,
    lengths: np.ndarray | None = None,
) -> np.ndarray:
  """clip((reward - penalty on length + bias) · scale, ± clip), [N] float64.

  Args:
    settings: see `AdvantageSettings`.
    rewards: [N] finite.
    lengths: [N] sampled tokens; needed with a length penalty.

  Raises:
    ValueError: a reward that is not finite, or no lengths.
  """
  rewards = _finite(rewards)
  penalty = settings.length_penalty
  if penalty.longest:
    if lengths is None:
      raise ValueError(
          f'lengths is None with length_penalty.longest {penalty.longest},'
          ' wanted [N] tokens'
      )
    over = np.asarray(lengths) - (penalty.longest - penalty.buffer)
    rewards = rewards - penalty.factor * np.clip(over / penalty.buffer, 0, 1)
  rewards = (rewards + settings.reward_bias) * settings.reward_scale
  if settings.reward_clip is not None:
    rewards = np.clip(rewards, -settings.reward_clip, settings.reward_clip)
  return rewards


def kl_rewards(
    settings: AdvantageSettings,
    logps: Sequence[np.ndarray],
    reference_logps: Sequence[np.ndarray],
    sampled: Sequence[np.ndarray],
) -> list[np.ndarray]:
  """-kl_coefficient · KL of each token, N arrays [T_i] float32, 0 if masked.

  See `kl.py` for the estimators, which are held within ±10 as in AReaL: one
  token must not outweigh all rewards. The log-probs are data here, so that k1,
  whose sum over a sequence is its log-ratio, is the natural one.

  Args:
    settings: its kl_coefficient and kl_kind count.
    logps: N arrays [T_i] nats, of the policy that sampled; masked may be NaN.
    reference_logps: N arrays [T_i] nats, of the reference policy.
    sampled: N arrays [T_i], positive on sampled tokens.
  """
  bound = MAX_KL_REWARD
  result = []
  for own, reference, mask in zip(logps, reference_logps, sampled, strict=True):
    counts = np.asarray(mask) > 0
    d = np.where(counts, np.asarray(own, np.float64), 0)
    d = d - np.where(counts, np.asarray(reference, np.float64), 0)
    if settings.kl_kind == 'k2':
      d = np.square(d) / 2
    elif settings.kl_kind == 'k3':
      d = np.maximum(d, -masking.MAX_LOG_RATIO)
      d = np.expm1(-d) + d
    d = np.clip(d, -bound, bound)
    result.append((-settings.kl_coefficient * d).astype(np.float32))
  return result


def normalize(
    x: np.ndarray, group_ids: np.ndarray, settings: Normalization
) -> np.ndarray:
  """Numbers compared with one another; formula at the top.

  GRPO (https://arxiv.org/abs/2402.03300) has mean and std of the group, Dr.GRPO
  (https://arxiv.org/abs/2503.20783) its mean alone, RLOO
  (https://arxiv.org/abs/2402.14740) the mean of the others, LitePPO
  (https://arxiv.org/abs/2508.08221) mean of the group and std of the batch.

  Args:
    x: [N] finite.
    group_ids: [N] integers; groups of any sizes in any order.
    settings: see `Normalization`.

  Returns:
    [N] float64.

  Raises:
    ValueError: shapes that differ, or a number that is not finite.
  """
  x, group, sizes = _grouped(x, group_ids)
  everything = np.zeros_like(group)
  centred = x
  if settings.mean != 'none':
    one = group if settings.mean == 'group' else everything
    centred = _centred(x, one, settings.leave_one_out)
  if settings.std != 'none':
    one = group if settings.std == 'group' else everything
    counts = np.bincount(one)
    squares = np.bincount(one, centred**2)
    freedom = counts - 1 if settings.unbiased else counts
    std = np.sqrt(squares / np.maximum(freedom, 1))
    # One number has no spread around its mean: 1, so that it stays as it is.
    std = np.where(freedom > 0, std, 1.0)[one] + settings.epsilon
    centred = np.divide(
        centred, std, out=np.zeros_like(centred), where=centred != 0
    )
  return centred


def normalize_tokens(
    values: Sequence[np.ndarray],
    group_ids: np.ndarray,
    masks: Sequence[np.ndarray],
    settings: Normalization,
) -> list[np.ndarray]:
  """Values of tokens against those of all tokens of the group or batch.

  Every sampled token counts once, so long sequences weigh more than short ones.

  Args:
    values: N arrays [T_i]; masked ones may hold NaN.
    group_ids: [N] integers, of the sequences.
    masks: N arrays [T_i], positive on sampled tokens.
    settings: see `Normalization`.

  Returns:
    N arrays [T_i] float64, 0 where masked.

  Raises:
    ValueError: a sampled value that is not finite.
  """
  masks = [np.asarray(mask) > 0 for mask in masks]
  if not masks:
    return []
  lengths = [mask.sum() for mask in masks]
  normal = normalize(
      np.concatenate([np.asarray(v)[m] for v, m in zip(values, masks)]),
      np.repeat(np.asarray(group_ids), lengths),
      settings,
  )
  result = []
  for mask, part in zip(masks, np.split(normal, np.cumsum(lengths)[:-1])):
    row = np.zeros(mask.shape)
    row[mask] = part
    result.append(row)
  return result


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
  return float(1 - _varied(rewards, group).mean())


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


def _spread(
    settings: AdvantageSettings,
    reward: float,
    mask: np.ndarray,
    values: np.ndarray | None,
    token_rewards: np.ndarray | None,
    turn_ids: np.ndarray | None,
) -> tuple[np.ndarray, np.ndarray]:
  """`gae` of one sequence on the host: advantages and returns, [T] float64."""
  places = np.flatnonzero(mask)
  count = places.size
  advantages, returns = np.zeros(mask.shape), np.zeros(mask.shape)
  if not count:
    return advantages, returns
  # Discount of what follows a token, from one sampled token to the next.
  step = np.full(count, settings.gamma)
  if turn_ids is not None and settings.turn_discount != 1:
    new_turn = np.diff(np.asarray(turn_ids)[places]) != 0
    step[:-1] *= np.where(new_turn, settings.turn_discount, 1.0)
  delta = np.zeros(count)
  if token_rewards is not None:
    delta += np.asarray(token_rewards, np.float64)[places]
  delta[-1] += reward
  own = np.zeros(count)
  if values is not None:
    own = np.asarray(values, np.float64)[places]
    delta[:-1] += step[:-1] * own[1:]
    delta -= own
  if np.any(delta[:-1]) or np.any(step[:-1] * settings.lam != 1):
    result, after = np.empty(count), 0.0
    for at in range(count - 1, -1, -1):
      after = delta[at] + step[at] * settings.lam * after
      result[at] = after
  else:  # the reward alone, not discounted
    result = np.full(count, delta[-1])
  advantages[places], returns[places] = result, result + own
  return advantages, returns


def _everywhere(x: np.ndarray, masks: Sequence[np.ndarray]) -> list[np.ndarray]:
  """x [N] on every token of its mask, else 0; N arrays [T_i] float64."""
  if not masks:
    return []
  sizes = [mask.size for mask in masks]
  joined = np.where(np.concatenate(masks), np.repeat(x, sizes), 0.0)
  return np.split(joined, np.cumsum(sizes)[:-1])


def _check_shapes(
    name: str, x: Sequence[np.ndarray] | None, masks: Sequence[np.ndarray]
) -> None:
  for index, mask in enumerate(masks if x is not None else ()):
    if np.shape(x[index]) != mask.shape:
      raise ValueError(
          f'{name}[{index}] has shape {np.shape(x[index])}, wanted that of its'
          f' sampled, {mask.shape}'
      )


def _centred(x: np.ndarray, group: np.ndarray, others: bool) -> np.ndarray:
  """x less the mean of its group, or of the others of it; [N].

  Exactly 0 where all of a group are equal: the mean of equal numbers may be off
  by a rounding error.
  """
  sizes = np.bincount(group)
  means = np.bincount(group, x) / np.maximum(sizes, 1)
  centred = x - means[group]
  if others:  # x - Σ_{j≠i} x_j / (n - 1) = n / (n - 1) · (x - mean)
    centred *= (sizes / np.maximum(sizes - 1, 1))[group]
  return np.where(_varied(x, group)[group], centred, 0.0)


def _varied(x: np.ndarray, group: np.ndarray) -> np.ndarray:
  """[groups] whether the numbers of a group differ by more than rounding."""
  groups = int(group.max(initial=-1)) + 1
  highest, lowest = np.full(groups, -np.inf), np.full(groups, np.inf)
  np.maximum.at(highest, group, x)
  np.minimum.at(lowest, group, x)
  size = np.maximum(np.abs(highest), np.abs(lowest))
  return highest - lowest > SAME * size


def _check_count(name: str, count: int, masks: Sequence[np.ndarray]) -> None:
  if count != len(masks):
    raise ValueError(
        f'{len(masks)} masks with {count} {name}, wanted as many of one as'
        ' of the other'
    )


def _finite(x: np.ndarray) -> np.ndarray:
  """[N] float64, checked."""
  x = np.asarray(x, np.float64)
  if x.ndim != 1:
    raise ValueError(f'rewards have shape {x.shape}, wanted [N]')
  wrong = np.flatnonzero(~np.isfinite(x))
  if wrong.size:
    at = wrong[0]
    raise ValueError(f'rewards[{at}] is {x[at]}, wanted a finite number')
  return x


def _grouped(
    x: np.ndarray, group_ids: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Numbers [N], group of each from 0 on [N], size of each group."""
  x, group_ids = _finite(x), np.asarray(group_ids)
  if x.shape != group_ids.shape:
    raise ValueError(
        f'group_ids have shape {group_ids.shape}, wanted that of rewards,'
        f' {x.shape}'
    )
  _, group, sizes = np.unique(
      group_ids, return_inverse=True, return_counts=True
  )
  return x, group.astype(np.int64), sizes
