"""Advantages by hand, for uneven groups, and on host against device."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config
from areal_jax.losses import advantages
from areal_jax.losses.advantages import (
    AdvantageSettings,
    LengthPenalty,
    Normalization,
)
from tests.closeness import assert_close

# Two groups, interleaved and uneven: 7 has rewards 0, 1, 2 and 3 has 5, 9.
_REWARDS = np.array([0.0, 5.0, 1.0, 9.0, 2.0])
_GROUPS = np.array([7, 3, 7, 3, 7])


_GROUP = Normalization('group', 'group', epsilon=0.0)
_MEAN = Normalization('group')
_OTHERS = Normalization('group', leave_one_out=True)
_BATCH = Normalization('batch', 'batch', epsilon=0.0)
_PAPER = AdvantageSettings(sequences=Normalization(), tokens=_BATCH)


def _normalize(settings, rewards=_REWARDS, groups=_GROUPS):
  return advantages.normalize(rewards, groups, settings)


def test_normalised_in_the_group_by_hand():
  # Means 1 and 7; unbiased std 1 and √8.
  result = _normalize(_GROUP)
  expected = [-1.0, -2 / np.sqrt(8), 0.0, 2 / np.sqrt(8), 1.0]
  np.testing.assert_allclose(result, expected, rtol=1e-6)
  assert result.dtype == np.float64  # rounded once, at the end


def test_biased_std_divides_by_the_count():
  result = _normalize(
      Normalization('group', 'group', unbiased=False, epsilon=0.0)
  )
  deviation = np.sqrt(2 / 3)
  expected = [-1 / deviation, -1.0, 0.0, 1.0, 1 / deviation]
  np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_epsilon_is_added_to_the_std():
  result = _normalize(Normalization('group', 'group', epsilon=1.0))
  np.testing.assert_allclose(result[[0, 4]], [-0.5, 0.5], rtol=1e-6)


def test_without_std_only_the_mean_goes():
  np.testing.assert_array_equal(_normalize(_MEAN), [-1.0, -2.0, 0.0, 2.0, 1.0])


def test_normalised_in_the_batch_by_hand():
  settings = Normalization('batch', 'batch', epsilon=0.0)
  result = _normalize(settings, [1.0, 2.0, 3.0], [0, 1, 2])
  np.testing.assert_allclose(result, [-1.0, 0.0, 1.0], rtol=1e-6)


def test_mean_of_the_group_and_std_of_the_batch_by_hand():
  # Off the groups' means -1, -2, 0, 2, 1: squares add to 10, over 4.
  result = _normalize(Normalization('group', 'batch', epsilon=0.0))
  expected = np.array([-1.0, -2.0, 0.0, 2.0, 1.0]) / np.sqrt(2.5)
  np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_std_without_a_mean_is_taken_around_zero():
  # Squares 1 + 4 + 4, over 2.
  settings = Normalization(std='batch', epsilon=0.0)
  result = _normalize(settings, [1.0, 2.0, -2.0], [0, 0, 0])
  expected = np.array([1.0, 2.0, -2.0]) / np.sqrt(4.5)
  np.testing.assert_allclose(result, expected, rtol=1e-6)


def test_leave_one_out_by_hand():
  # Means of the others: (1 + 2)/2, 9, (0 + 2)/2, 5, (0 + 1)/2.
  np.testing.assert_array_equal(
      _normalize(_OTHERS), [-1.5, -4.0, 0.0, 4.0, 1.5]
  )


def _each_group_alone(settings, rewards, group_ids):
  """Slow plain version: every group is handed in by itself."""
  result = np.zeros(len(rewards), np.float32)
  for group in set(group_ids.tolist()):
    members = group_ids == group
    result[members] = _normalize(settings, rewards[members], group_ids[members])
  return result


@pytest.mark.parametrize('settings', [_GROUP, _MEAN, _OTHERS])
def test_other_groups_do_not_matter(settings):
  random = np.random.default_rng(0)
  group_ids = random.integers(-3, 5, 40)
  rewards = random.normal(size=40)
  np.testing.assert_allclose(
      _normalize(settings, rewards, group_ids),
      _each_group_alone(settings, rewards, group_ids),
      rtol=1e-6,
  )
  # A failed member of one group leaves every other group as it was.
  lost = np.flatnonzero(group_ids == group_ids[0])[0]
  others = group_ids != group_ids[lost]
  rest = np.delete(np.arange(40), lost)
  np.testing.assert_array_equal(
      _normalize(settings, rewards[rest], group_ids[rest])[others[rest]],
      _normalize(settings, rewards, group_ids)[others],
  )


def test_a_group_statistic_by_stride_is_caught():
  """Planted fault: groups of 4 by position, after one sample failed."""

  def by_stride(rewards, size):
    blocks = [rewards[i : i + size] for i in range(0, len(rewards), size)]
    return np.concatenate([b - b.mean() for b in blocks])

  rewards = np.array([0.0, 0, 1, 1, 5, 5, 6, 6])
  group_ids = np.repeat([0, 1], 4)
  full = _normalize(_MEAN, rewards, group_ids)
  np.testing.assert_array_equal(full, by_stride(rewards, 4))
  rewards, group_ids = np.delete(rewards, 0), np.delete(group_ids, 0)
  uneven = _normalize(_MEAN, rewards, group_ids)
  np.testing.assert_array_equal(uneven[3:], full[4:])
  assert np.abs(by_stride(rewards, 4)[3:] - full[4:]).max() > 1


@pytest.mark.parametrize('value', [0.3, 0.1, 1 / 3, 1e8])
@pytest.mark.parametrize('size', [1, 2, 3, 4, 7])
def test_equal_rewards_give_exactly_zero(value, size):
  """Case A5: no rounding error of the mean divided by epsilon."""
  rewards, group_ids = np.full(size, value), np.zeros(size, int)
  batch = Normalization('batch', 'batch', epsilon=0.0)
  mixed = Normalization('group', 'batch', epsilon=0.0)
  for settings in (_GROUP, _MEAN, _OTHERS, batch, mixed):
    result = _normalize(settings, rewards, group_ids)
    np.testing.assert_array_equal(result, np.zeros(size))


def test_groups_without_variance_are_counted():
  """Case A5, and a group of one, which has no others to compare with."""
  ones, thirds = [1.0] * 4, [0.3] * 3
  rewards = np.array(ones + thirds)
  group_ids = np.array([0] * 4 + [1] * 3)
  assert advantages.fraction_zero_variance(rewards, group_ids) == 1.0
  rewards = np.append(rewards, [0, 1, 5])
  group_ids = np.append(group_ids, [2, 2, 3])
  assert advantages.fraction_zero_variance(rewards, group_ids) == 0.75
  assert advantages.fraction_zero_variance([], []) == 0.0


@pytest.mark.parametrize('sampled', [0, 1])
def test_normalising_zero_or_one_token_is_finite(sampled):
  """Case A5: whitening over 0 or 1 valid token."""
  mask = np.array([0, sampled, 0])
  values = np.array([np.nan, 3.0, np.inf])
  (result,) = advantages.normalize_tokens([values], [0], [mask], _BATCH)
  np.testing.assert_array_equal(result, np.zeros(3))


def test_nothing_in_is_nothing_out():
  assert _normalize(_GROUP, [], []).shape == (0,)
  assert advantages.normalize_tokens([], [], [], _BATCH) == []
  empty = advantages.token_advantages(_PAPER, [], [], [])
  assert empty.advantages == [] and empty.returns == []


@pytest.mark.parametrize('bad', [np.nan, np.inf])
def test_a_reward_that_is_not_finite_is_refused(bad):
  with pytest.raises(ValueError, match=r'rewards\[1\] is'):
    _normalize(_GROUP, [0.0, bad], [0, 0])


def test_group_ids_of_another_length_are_refused():
  with pytest.raises(ValueError, match=r'group_ids have shape \(1,\)'):
    _normalize(_OTHERS, [0.0, 1.0], [0])


# The whole way.


def test_rewards_are_biased_scaled_and_clipped_in_this_order():
  settings = AdvantageSettings(
      reward_bias=-0.5, reward_scale=10.0, reward_clip=4.0
  )
  # 0, 1, 0.6 -> -5, 5, 1 -> -4, 4, 1
  result = advantages.shape_rewards(settings, [0.0, 1.0, 0.6])
  np.testing.assert_allclose(result, [-4, 4, 1], rtol=1e-6)


def test_penalty_on_length_by_hand():
  """Longest 10, over the last 4: nothing up to 6, half at 8, all from 10 on."""
  settings = AdvantageSettings(length_penalty=LengthPenalty(10, 4, 2.0))
  result = advantages.shape_rewards(
      settings, np.ones(5), np.array([3, 6, 8, 10, 99])
  )
  np.testing.assert_allclose(result, [1, 1, 0, -1, -1], rtol=1e-6)
  with pytest.raises(ValueError, match='lengths is None'):
    advantages.shape_rewards(settings, [1.0])
  # On the whole way the sampled tokens are counted.
  settings = dataclasses.replace(settings, sequences=Normalization())
  (row,) = advantages.token_advantages(
      settings, [1.0], [0], [[0, 0] + [1] * 8]
  ).advantages
  np.testing.assert_allclose(row, [0, 0] + [0] * 8, atol=1e-6)


def test_sequence_advantages_go_to_the_sampled_tokens():
  first, second = advantages.token_advantages(
      AdvantageSettings(sequences=_OTHERS),
      [0.0, 1.0],
      [4, 4],
      [[0, 1, 0, 1], [0, 0, 1]],
  ).advantages
  np.testing.assert_array_equal(first, [0, -1, 0, -1])
  np.testing.assert_array_equal(second, [0, 0, 1])
  assert first.dtype == second.dtype == np.float32


def test_the_papers_advantage_by_hand():
  """γ = λ = 1: every token has its reward, normalised over tokens."""
  short, long = advantages.token_advantages(
      _PAPER, [5.0, -5.0], [0, 1], [[0, 1], [0, 1, 1, 1]]
  ).advantages
  # Tokens 5, -5, -5, -5: mean -2.5, unbiased std 5.
  np.testing.assert_allclose(short, [0, 1.5], rtol=1e-6)
  np.testing.assert_allclose(long, [0, -0.5, -0.5, -0.5], rtol=1e-6)


def test_discount_counts_sampled_tokens_only():
  """Rewards 8 and 0; tokens 2, 4, 8 and 0 around a tool's two tokens."""
  settings = AdvantageSettings(
      sequences=Normalization(), gamma=0.5, tokens=Normalization('batch')
  )
  first, second = advantages.token_advantages(
      settings, [8.0, 0.0], [0, 0], [[0, 1, 1, 0, 0, 1, 0], [0, 1]]
  ).advantages
  np.testing.assert_allclose(first, [0, -1.5, 0.5, 0, 0, 4.5, 0], rtol=1e-6)
  np.testing.assert_allclose(second, [0, -3.5], rtol=1e-6)


_RAW = AdvantageSettings(sequences=Normalization())


def test_a_turn_counts_less_for_each_turn_after_it():
  """Reward 8 in the third turn of two, one and two sampled tokens."""
  settings = dataclasses.replace(_RAW, turn_discount=0.5)
  (row,) = advantages.token_advantages(
      settings,
      [8.0],
      [0],
      [[0, 1, 1, 0, 1, 0, 1, 1]],
      turn_ids=[[0, 0, 0, 1, 1, 2, 2, 2]],
  ).advantages
  np.testing.assert_allclose(row, [0, 2, 2, 0, 4, 0, 8, 8])
  with pytest.raises(ValueError, match='turn_ids is None'):
    advantages.token_advantages(settings, [8.0], [0], [[1]])


def test_rewards_of_tokens_count_for_the_tokens_before_them():
  (row,) = advantages.token_advantages(
      _RAW, [8.0], [0], [[0, 1, 1, 0, 1]], token_rewards=[[9, 0, 1, 9, -2]]
  ).advantages
  np.testing.assert_allclose(row, [0, 7, 7, 0, 6])


def test_values_are_the_baseline_of_a_token():
  """As `test_gae_by_hand`; returns are those before normalising."""
  settings = AdvantageSettings(
      sequences=Normalization(),
      gamma=0.5,
      lam=0.5,
      critic=True,
      tokens=Normalization('batch'),
  )
  result = advantages.token_advantages(
      settings, [8.0], [0], [[1, 1, 0, 1]], values=[[1.0, 2.0, np.nan, 4.0]]
  )
  raw = np.array([0.25, 1.0, 4.0])
  np.testing.assert_allclose(
      result.advantages[0][[0, 1, 3]], raw - raw.mean(), rtol=1e-6
  )
  np.testing.assert_allclose(result.returns[0], [1.25, 3.0, 0.0, 8.0])


@pytest.mark.parametrize('critic', [True, False])
def test_values_against_the_settings_are_refused(critic):
  settings = dataclasses.replace(_RAW, critic=critic)
  values = None if critic else [[1.0]]
  with pytest.raises(ValueError, match=f'wanted critic={critic}'):
    advantages.token_advantages(settings, [1.0], [0], [[1]], values=values)


def test_an_array_of_another_length_is_refused_by_name():
  with pytest.raises(ValueError, match=r'token_rewards\[0\] has shape'):
    advantages.token_advantages(_RAW, [1.0], [0], [[1, 1]], token_rewards=[[1]])


@pytest.mark.parametrize(
    'kind, expected', [('k1', 0.5), ('k2', 0.125), ('k3', np.exp(-0.5) - 0.5)]
)
def test_kl_in_the_reward_by_hand(kind, expected):
  settings = AdvantageSettings(kl_coefficient=2.0, kl_kind=kind)
  (row,) = advantages.kl_rewards(
      settings, [[-1.0, np.nan]], [[-1.5, np.inf]], [[1, 0]]
  )
  np.testing.assert_allclose(row, [-2 * expected, 0], rtol=1e-6)
  (row,) = advantages.kl_rewards(settings, [[20.0]], [[-30.0]], [[1]])
  np.testing.assert_allclose(row, [-2 * 10.0])


def test_lengths_that_differ_are_refused():
  with pytest.raises(ValueError, match='1 masks with 2 rewards'):
    advantages.token_advantages(AdvantageSettings(), [0.0, 1.0], [0, 0], [[1]])


@pytest.mark.parametrize('gamma, lam', [(1.0, 1.0), (0.9, 0.8), (1.0, 0.0)])
def test_gae_on_the_host_is_gae_on_the_device(gamma, lam):
  random = np.random.default_rng(2)
  lengths = [3, 9, 6, 1]
  masks = [(random.random(n) < 0.6).astype(np.float32) for n in lengths]
  rewards = random.normal(size=4).astype(np.float32)
  settings = dataclasses.replace(_PAPER, gamma=gamma, lam=lam)
  host = advantages.token_advantages(settings, rewards, np.arange(4), masks)
  host = host.advantages

  # All four packed into one row of 20 with the reward at the last sampled one.
  packed = np.zeros((3, 1, 20), np.float32)  # rewards, mask, segment ids
  at = 0
  for number, (mask, reward) in enumerate(zip(masks, rewards), start=1):
    last = np.flatnonzero(mask)[-1:]
    packed[0, 0, at + last] = reward
    packed[1, 0, at : at + len(mask)] = mask
    packed[2, 0, at : at + len(mask)] = number
    at += len(mask)
  row, _ = advantages.gae(packed[0], 0.0, *packed[1:], gamma=gamma, lam=lam)
  device = np.split(np.asarray(row)[0], np.cumsum(lengths))[:4]
  device = advantages.normalize_tokens(device, np.arange(4), masks, _BATCH)
  for one, other in zip(host, device):
    assert_close(one, other, size=0.1)


# GAE on the device.


def _gae(rewards, values, mask, segment_ids, gamma=0.5, lam=0.5):
  arrays = [jnp.atleast_2d(jnp.asarray(x)) for x in (rewards, values, mask)]
  result = advantages.gae(
      *arrays, jnp.atleast_2d(jnp.asarray(segment_ids)), gamma=gamma, lam=lam
  )
  return [np.asarray(x)[0] for x in result]


def test_gae_by_hand():
  # δ = [0 + .5·2 - 1, 0 + .5·4 - 2, 8 - 4] = [0, 0, 4]; A = [.25, 1, 4]
  result, returns = _gae([0.0, 0.0, 8.0], [1.0, 2.0, 4.0], [1, 1, 1], [1, 1, 1])
  np.testing.assert_allclose(result, [0.25, 1.0, 4.0])
  np.testing.assert_allclose(returns, [1.25, 3.0, 8.0])


def test_gae_passes_over_masked_tokens_whatever_they_hold():
  plain, plain_returns = _gae(
      [0.0, 0.0, 8.0], [1.0, 2.0, 4.0], [1, 1, 1], [1, 1, 1]
  )
  nan = np.nan
  result, returns = _gae(
      [nan, 0.0, 0.0, nan, nan, 8.0, nan],
      [nan, 1.0, 2.0, np.inf, nan, 4.0, nan],
      [0, 1, 1, 0, 0, 1, 0],
      [1, 1, 1, 1, 1, 1, 0],
  )
  sampled = [1, 2, 5]
  np.testing.assert_array_equal(result[sampled], plain)
  np.testing.assert_array_equal(returns[sampled], plain_returns)
  np.testing.assert_array_equal(np.delete(result, sampled), np.zeros(4))


def test_gae_starts_anew_in_each_segment():
  first = ([0.0, 1.0], [0.5, 0.25], [1, 1], [1, 1])
  second = ([0.0, 9.0, 2.0], [3.0, 4.0, 5.0], [0, 1, 1], [1, 1, 1])
  packed = [np.concatenate([a, b]) for a, b in zip(first, second)]
  packed[3] = np.array([1, 1, 2, 2, 2])
  result, returns = _gae(*packed)
  parts = [_gae(*first), _gae(*second)]
  np.testing.assert_array_equal(result, np.concatenate([p[0] for p in parts]))
  np.testing.assert_array_equal(returns, np.concatenate([p[1] for p in parts]))


def test_gae_with_lambda_one_is_return_minus_value():
  rewards, values = [1.0, 2.0, 3.0], [0.1, 0.2, 0.3]
  result, returns = _gae(rewards, values, [1] * 3, [1] * 3, gamma=1.0, lam=1.0)
  np.testing.assert_allclose(returns, [6.0, 5.0, 3.0], rtol=1e-6)
  np.testing.assert_allclose(result, returns - np.array(values), rtol=1e-6)


@pytest.mark.parametrize(
    'values, field',
    [
        (dict(sequences=Normalization('all')), 'sequences.mean'),
        (dict(tokens=Normalization(leave_one_out=True)), 'leave_one_out'),
        (dict(tokens=Normalization(epsilon=-1.0)), 'tokens.epsilon'),
        (dict(length_penalty=LengthPenalty(5)), 'length_penalty.buffer'),
        (dict(length_penalty=LengthPenalty(5, 6)), 'length_penalty.buffer'),
        (dict(gamma=1.5), 'advantages.gamma'),
        (dict(turn_discount=-0.1), 'advantages.turn_discount'),
        (dict(kl_coefficient=-1.0), 'advantages.kl_coefficient'),
        (dict(reward_clip=0.0), 'advantages.reward_clip'),
        (dict(reward_scale=float('nan')), 'advantages.reward_scale'),
    ],
)
def test_wrong_settings_are_refused_by_name(values, field):
  with pytest.raises(config.ConfigError, match=field):
    config.resolve(AdvantageSettings(**values), 'advantages')


@pytest.mark.parametrize('level', ['sequences', 'tokens'])
def test_rewards_are_centred_before_they_are_rounded(level):
  """1000 and 1000.00001 in float32 are one number."""
  nothing = Normalization()
  settings = AdvantageSettings(
      **{
          'sequences': nothing,
          level: Normalization('group', 'group', epsilon=1e-6),
      }
  )
  masks = [np.ones(2), np.ones(2)]
  found = advantages.token_advantages(
      settings, np.array([1000.0, 1000.00001]), np.zeros(2, int), masks
  ).advantages
  std = 5e-6 * np.sqrt(2 if level == 'sequences' else 4 / 3)
  wanted = 5e-6 / (std + 1e-6)
  if level == 'sequences':
    np.testing.assert_allclose(wanted, 0.6195, atol=1e-4)
  np.testing.assert_allclose(found, [[-wanted] * 2, [wanted] * 2], rtol=1e-4)
  assert found[0].dtype == np.float32


def test_rounding_errors_of_rewards_are_no_difference():
  """0.1 + 0.2 is not 0.3; without an epsilon the two would be ±0.7."""
  rewards = np.array([0.1 + 0.2, 0.3])
  settings = Normalization('group', 'group', epsilon=0.0)
  np.testing.assert_array_equal(
      advantages.normalize(rewards, np.zeros(2, int), settings), 0.0
  )
  assert advantages.fraction_zero_variance(rewards, np.zeros(2, int)) == 1.0


def test_tokens_left_out_of_the_loss_count_in_what_an_answer_is_worth():
  """A discount and a penalty by length see all that was sampled."""
  settings = AdvantageSettings(
      sequences=Normalization(),
      gamma=0.5,
      length_penalty=LengthPenalty(longest=4, buffer=2, factor=8.0),
  )
  (found,) = advantages.token_advantages(
      settings, np.array([16.0]), np.zeros(1, int), [np.array([0, 1, 1, 1, 1])]
  ).advantages
  np.testing.assert_allclose(found, [0.0, 1.0, 2.0, 4.0, 8.0])
