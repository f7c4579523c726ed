"""The policy loss by hand, cut in many ways, and against planted faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config
from areal_jax.losses import logprobs, policy, statistics
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from tests.closeness import assert_close


def _loss(settings=PolicyLoss(), **arrays):
  """The loss of literals; what is left out is neutral."""
  logps = jnp.asarray(arrays.pop('logps'), jnp.float32)
  inputs = dict(
      proximal_logps=logps,
      behavior_logps=logps,
      advantages=jnp.ones(logps.shape),
      mask=jnp.ones(logps.shape),
      denominator=1.0,
  )
  inputs.update(arrays)
  # One compilation, where eager operations would be compiled one by one.
  return jax.jit(
      lambda inputs: policy.policy_loss(**inputs, settings=settings)
  )(dict(inputs, logps=logps))


# Four tokens, ratio ρ and advantage A, clip at [0.8, 1.2]:
#   ρ = 1.5, A =  1 -> min( 1.5,  1.2) =  1.2, clipped
#   ρ = 1.5, A = -1 -> min(-1.5, -1.2) = -1.5
#   ρ = 0.5, A =  1 -> min( 0.5,  0.8) =  0.5
#   ρ = 0.5, A = -1 -> min(-0.5, -0.8) = -0.8, clipped
_RATIOS = np.array([1.5, 1.5, 0.5, 0.5])
_ADVANTAGES = np.array([1.0, -1.0, 1.0, -1.0])


def _four_tokens(settings=PolicyLoss(), **more):
  return _loss(
      settings,
      logps=np.log(_RATIOS),
      proximal_logps=np.zeros(4),
      behavior_logps=np.zeros(4),
      advantages=_ADVANTAGES,
      **more,
  )


def test_clip_by_hand():
  loss, stats = _four_tokens()
  np.testing.assert_allclose(loss, -(1.2 - 1.5 + 0.5 - 0.8), rtol=1e-6)
  assert stats['clipped_sum'] == 2
  assert stats['tokens_sum'] == 4
  np.testing.assert_allclose(stats['ratio_sum'], 4.0, rtol=1e-6)
  np.testing.assert_allclose(stats['ratio_max'], 1.5, rtol=1e-6)


def test_tokens_inside_the_trust_region_are_not_counted_as_clipped():
  _, stats = _loss(logps=np.log([1.0, 1.1, 0.9]), proximal_logps=np.zeros(3))
  assert stats['clipped_sum'] == 0


def test_distances_between_the_three_policies_by_hand():
  _, stats = _loss(logps=[0.0], proximal_logps=[-0.5], behavior_logps=[-1.5])
  # e^-d - 1 + d with d = proximal - policy = -0.5, behavior - proximal = -1.
  np.testing.assert_allclose(stats['update_kl_sum'], 0.1487213, rtol=1e-5)
  np.testing.assert_allclose(stats['behavior_kl_sum'], 0.7182818, rtol=1e-5)


def test_clip_high_moves_the_upper_edge_alone():
  loss, stats = _four_tokens(PolicyLoss(clip_high=0.28))
  np.testing.assert_allclose(loss, -(1.28 - 1.5 + 0.5 - 0.8), rtol=1e-6)
  assert stats['clipped_sum'] == 2


def test_clipped_tokens_get_no_gradient():
  gradient = jax.grad(
      lambda x: _loss(
          logps=x,
          proximal_logps=np.zeros(4),
          behavior_logps=np.zeros(4),
          advantages=_ADVANTAGES,
      )[0]
  )(jnp.log(jnp.asarray(_RATIOS, jnp.float32)))
  # dL/dlogp = -ρ A where the clip does not bind.
  np.testing.assert_allclose(gradient, [0.0, 1.5, -0.5, 0.0], rtol=1e-6)


def test_denominator_divides_the_sum():
  np.testing.assert_allclose(
      _four_tokens(denominator=8.0)[0], _four_tokens()[0] / 8, rtol=1e-6
  )


def test_importance_weight_is_always_on():
  """Proximal twice as likely as behavior: the token counts twice."""
  loss, stats = _loss(
      logps=[0.0], proximal_logps=[0.0], behavior_logps=[-np.log(2.0)]
  )
  np.testing.assert_allclose(loss, -2.0, rtol=1e-6)
  np.testing.assert_allclose(stats['importance_weight_sum'], 2.0, rtol=1e-6)
  np.testing.assert_allclose(
      stats['importance_weight_squared_sum'], 4.0, rtol=1e-6
  )
  assert stats['importance_capped_sum'] == 0


def test_a_rule_cuts_the_weight_down():
  loss, stats = _loss(
      PolicyLoss(weight_rules=(WeightRule(action='clamp', upper=5.0),)),
      logps=np.zeros(2),
      behavior_logps=[-np.log(2.0), -np.log(8.0)],
  )
  np.testing.assert_allclose(loss, -(2.0 + 5.0), rtol=1e-6)
  assert stats['importance_capped_sum'] == 1
  np.testing.assert_allclose(stats['used_weight_max'], 5.0)
  np.testing.assert_allclose(stats['importance_weight_max'], 8.0, rtol=1e-6)


def test_equals_the_first_form_of_the_paper():
  """Eq. (4): min(π_θ/π_behav A, π_prox/π_behav clip(π_θ/π_prox) A)."""
  random = np.random.default_rng(0)
  theta, proximal, behavior = random.normal(-1, 0.5, (3, 50))
  advantages = random.normal(size=50)
  loss, _ = _loss(
      logps=theta,
      proximal_logps=proximal,
      behavior_logps=behavior,
      advantages=advantages,
  )
  clipped = np.clip(np.exp(theta - proximal), 0.8, 1.2)
  objective = np.minimum(
      np.exp(theta - behavior) * advantages,
      np.exp(proximal - behavior) * clipped * advantages,
  )
  np.testing.assert_allclose(loss, -objective.sum(), rtol=1e-5)


def test_only_the_policy_gets_a_gradient():
  """With the same array for all three policies, as in a single update."""
  advantages = jnp.array([2.0, -3.0])
  gradient = jax.grad(lambda x: _loss(logps=x, advantages=advantages)[0])(
      jnp.array([-1.0, -2.0])
  )
  np.testing.assert_allclose(gradient, -advantages, rtol=1e-6)


def test_masked_nan_leaks_into_neither_loss_nor_gradient():
  """Case A2, in every array at once."""
  settings = PolicyLoss(kl_coefficient=0.5, entropy_coefficient=0.1)

  def loss(logps, mask, *others):
    names = (
        'proximal_logps',
        'behavior_logps',
        'reference_logps',
        'advantages',
        'entropy',
    )
    return _loss(
        settings, logps=logps, mask=mask, fresh=mask, **dict(zip(names, others))
    )

  value_and_grad = jax.value_and_grad(loss, has_aux=True)
  nan, inf = np.nan, np.inf
  (value, stats), gradient = value_and_grad(
      jnp.array([-1.0, nan, -2.0]),
      np.array([1, 0, 1]),
      np.array([-1.2, inf, -2.0]),
      np.array([-1.0, nan, -2.1]),
      np.array([-1.1, -inf, -2.0]),
      np.array([1.0, nan, -1.0]),
      np.array([0.3, nan, 0.4]),
  )
  (short, short_stats), short_gradient = value_and_grad(
      jnp.array([-1.0, -2.0]),
      np.ones(2),
      np.array([-1.2, -2.0]),
      np.array([-1.0, -2.1]),
      np.array([-1.1, -2.0]),
      np.array([1.0, -1.0]),
      np.array([0.3, 0.4]),
  )
  np.testing.assert_allclose(value, short, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, [short_gradient[0], 0.0, short_gradient[1]], rtol=1e-6
  )
  for name in short_stats:
    np.testing.assert_allclose(stats[name], short_stats[name], rtol=1e-6)


def test_nothing_in_the_mask_gives_a_loss_of_zero():
  """Case A4: all masked, so the denominator is 0 as well."""
  value, gradient = jax.value_and_grad(
      lambda x: _loss(logps=x, mask=jnp.zeros(2), denominator=0.0)[0]
  )(jnp.array([jnp.nan, -1.0]))
  assert value == 0.0
  np.testing.assert_array_equal(gradient, [0.0, 0.0])


def test_overflowing_ratios_are_clamped_and_counted():
  value_and_grad = jax.value_and_grad(
      lambda x: _loss(
          logps=x,
          proximal_logps=np.array([0.0, -90.0, 0.0]),
          behavior_logps=np.array([0.0, -90.0, -90.0]),
          advantages=-np.ones(3),
      ),
      has_aux=True,
  )
  (loss, stats), gradient = value_and_grad(jnp.array([0.0, 0.0, 0.0]))
  assert stats['clamped_sum'] == 2
  assert np.isfinite(loss) and np.all(np.isfinite(gradient))
  assert np.all(np.isfinite(list(stats.values())))


def test_kl_and_entropy_enter_with_their_sign():
  settings = PolicyLoss(
      kl_coefficient=0.5, kl_kind='k2', entropy_coefficient=0.1
  )
  loss, stats = _loss(
      settings, logps=[-1.0], reference_logps=[-3.0], entropy=[0.7]
  )
  # -(1 - 0.5 · 2² / 2 + 0.1 · 0.7)
  np.testing.assert_allclose(loss, -(1 - 1.0 + 0.07), rtol=1e-5)
  np.testing.assert_allclose(stats['reference_kl_sum'], 2.0)
  np.testing.assert_allclose(stats['entropy_sum'], 0.7)


def test_entropy_that_is_only_watched_does_not_touch_the_loss():
  loss, stats = _loss(logps=[-1.0], entropy=[np.nan])
  assert loss == -1.0 and np.isnan(stats['entropy_sum'])


def test_a_coefficient_without_its_array_is_refused():
  with pytest.raises(ValueError, match='reference_logps is None'):
    _loss(PolicyLoss(kl_coefficient=0.1), logps=[0.0])
  with pytest.raises(ValueError, match='entropy is None'):
    _loss(PolicyLoss(entropy_coefficient=0.1), logps=[0.0])


def test_fresh_gap_is_taken_over_fresh_sampled_tokens():
  _, stats = _loss(
      logps=np.zeros(4),
      behavior_logps=[0.1, -0.3, 5.0, 7.0],
      fresh=[1, 1, 0, 1],
      mask=[1, 1, 1, 0],
  )
  np.testing.assert_allclose(stats['fresh_gap_max'], 0.3, rtol=1e-6)
  np.testing.assert_allclose(stats['fresh_gap_sum'], 0.4, rtol=1e-6)
  assert stats['fresh_tokens_sum'] == 2


# Clips by the sign of the advantage, and the second bound.


def test_clips_are_counted_by_the_sign_of_the_advantage():
  _, stats = _four_tokens()
  assert stats['clipped_high_sum'] == 1  # ratio 1.5, A = 1
  assert stats['clipped_low_sum'] == 1  # ratio 0.5, A = -1
  assert stats['positive_sum'] == stats['negative_sum'] == 2


def test_dual_clip_by_hand():
  """A ratio of 5 with A = -1 costs at most 3, and teaches nothing then."""
  settings = PolicyLoss(dual_clip=3.0)

  def loss(logps):
    return _loss(
        settings,
        logps=logps,
        proximal_logps=np.zeros(3),
        behavior_logps=np.zeros(3),
        advantages=[-1.0, -1.0, 1.0],
    )

  (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.log(jnp.array([5.0, 2.0, 5.0]))
  )
  np.testing.assert_allclose(value, 3 + 2 - 1.2, rtol=1e-6)
  np.testing.assert_allclose(gradient, [0.0, 2.0, 0.0], rtol=1e-6)
  assert stats['dual_clipped_sum'] == 1


# Other objectives, on the four tokens.


def test_gate_by_hand():
  loss, stats = _four_tokens(
      PolicyLoss(objective='gate', gate_positive=1.0, gate_negative=2.0)
  )
  gate = lambda tau, ratio: 4 / tau / (1 + np.exp(-tau * (ratio - 1)))
  expected = gate(1, 1.5) - gate(2, 1.5) + gate(1, 0.5) - gate(2, 0.5)
  np.testing.assert_allclose(loss, -expected, rtol=1e-5)
  assert stats['clipped_sum'] == 0


def _gradient(settings, **arrays):
  logps = jnp.asarray(arrays.pop('logps'), jnp.float32)
  return jax.grad(lambda x: _loss(settings, logps=x, **arrays)[0])(logps)


def test_cispo_keeps_a_gradient_at_every_token():
  """A clipped ratio weighs ∇ log π; PPO's clip cuts two tokens off."""
  gradient = _gradient(
      PolicyLoss(objective='cispo'),
      logps=np.log(_RATIOS),
      proximal_logps=np.zeros(4),
      behavior_logps=np.zeros(4),
      advantages=_ADVANTAGES,
  )
  np.testing.assert_allclose(gradient, [-1.2, 1.2, -0.8, 0.8], rtol=1e-6)


def test_reinforce_has_no_ratio():
  gradient = _gradient(
      PolicyLoss(objective='reinforce', weight_level='none'),
      logps=np.log(_RATIOS),
      proximal_logps=np.zeros(4),
      behavior_logps=np.zeros(4),
      advantages=_ADVANTAGES,
  )
  np.testing.assert_allclose(gradient, -_ADVANTAGES, rtol=1e-6)


# Sequences: two in one row, of log-ratios (0.3, 0.1) and (-0.4), and padding.

_TWO = dict(
    logps=np.array([[0.3, 0.1, -0.4, 0.0]]),
    proximal_logps=np.zeros((1, 4)),
    behavior_logps=np.zeros((1, 4)),
    advantages=np.array([[1.0, 3.0, -1.0, 0.0]]),
    mask=np.array([[1, 1, 1, 0]]),
    segment_ids=np.array([[1, 1, 2, 0]]),
)


def test_ratio_of_a_sequence_by_hand():
  """exp(0.2) with A = 2 is cut at 1.1, exp(-0.4) with A = -1 at 0.9."""
  settings = PolicyLoss(ratio_level='sequence', clip=0.1)
  loss, stats = _loss(settings, **_TWO)
  np.testing.assert_allclose(loss, -(2 * 2 * 1.1 - 0.9), rtol=1e-6)
  assert stats['clipped_sum'] == 3
  wide = PolicyLoss(ratio_level='sequence', clip=0.9)
  # Both tokens carry half of Σ ρ A = 2 · 2 exp(0.2).
  np.testing.assert_allclose(
      _gradient(wide, **_TWO),
      [[-2 * np.exp(0.2), -2 * np.exp(0.2), np.exp(-0.4), 0.0]],
      rtol=1e-5,
  )


def test_tokens_of_a_sequence_ratio_keep_their_own_advantage():
  wide = PolicyLoss(ratio_level='sequence_token', clip=0.9)
  loss, _ = _loss(wide, **_TWO)
  np.testing.assert_allclose(
      loss, -((1 + 3) * np.exp(0.2) - np.exp(-0.4)), rtol=1e-6
  )
  np.testing.assert_allclose(
      _gradient(wide, **_TWO),
      [[-np.exp(0.2), -3 * np.exp(0.2), np.exp(-0.4), 0.0]],
      rtol=1e-5,
  )


def test_geometric_mean_by_hand():
  """GMPO: 0.3 is held at 0.2; -0.4 with A < 0 at -0.2, where nothing moves."""
  settings = PolicyLoss(
      objective='geometric_mean', aggregation='sequence_mean_of_means'
  )
  loss, stats = _loss(settings, **_TWO)
  np.testing.assert_allclose(
      loss, -(2 * np.exp(0.15) - np.exp(-0.2)), rtol=1e-6
  )
  assert stats['clipped_sum'] == 2
  np.testing.assert_allclose(
      _gradient(settings, **_TWO),
      [[0.0, -np.exp(0.15), 0.0, 0.0]],
      rtol=1e-5,
      atol=1e-7,
  )


def test_rejected_tokens_leave_the_loss_and_not_the_denominator():
  """Case A4 the other way: what a rule drops goes on being counted."""
  settings = PolicyLoss(weight_rules=(WeightRule(upper=2.0),))
  loss, stats = _loss(
      settings,
      logps=np.zeros(4),
      behavior_logps=-np.log([1.0, 1.5, 3.0, 4.0]),
      denominator=4.0,
  )
  np.testing.assert_allclose(loss, -(1 + 1.5) / 4, rtol=1e-6)
  assert stats['rejected_sum'] == 2 and stats['tokens_sum'] == 4
  np.testing.assert_allclose(stats['used_weight_sum'], 2.5, rtol=1e-6)
  np.testing.assert_allclose(stats['importance_weight_sum'], 9.5, rtol=1e-6)


def test_ordinary_ppo_has_the_behavior_policy_at_its_centre():
  loss, stats = _loss(
      PolicyLoss(proximal='behavior'),
      logps=np.log([1.5]),
      proximal_logps=None,
      behavior_logps=[0.0],
  )
  np.testing.assert_allclose(loss, -1.2, rtol=1e-6)
  assert stats['importance_weight_sum'] == 1


def test_statistics_are_told_apart_by_age():
  _, stats = _loss(
      logps=np.zeros(5),
      behavior_logps=[0.0, -0.5, -0.25, -1.0, 9.0],
      ages=np.array([0, 1, 1, 7, 3]),
      mask=[1, 1, 1, 1, 0],
  )
  assert stats['age_tokens_sum'].tolist() == [1, 2, 0, 1]
  np.testing.assert_allclose(stats['age_gap_sum'], [0.0, 0.75, 0.0, 1.0])
  np.testing.assert_allclose(
      stats['age_weight_sum'][1], np.exp(0.5) + np.exp(0.25), rtol=1e-6
  )
  np.testing.assert_allclose(
      stats['age_weight_squared_sum'][1], np.exp(1) + np.exp(0.5), rtol=1e-6
  )
  # π_prox is likelier: log π_behav - log π_prox is -0.5 and -0.25.
  np.testing.assert_allclose(stats['age_k1_sum'][1], -0.75, rtol=1e-6)
  np.testing.assert_allclose(
      stats['age_k3_sum'][1],
      np.exp(0.5) - 1 - 0.5 + np.exp(0.25) - 1 - 0.25,
      rtol=1e-5,
  )
  assert stats['age_gap_max'].tolist() == [0.0, 0.5, 0.0, 1.0]


@pytest.mark.parametrize(
    'settings, name',
    [
        (PolicyLoss(ratio_level='sequence'), 'segment_ids'),
        (PolicyLoss(proximal='loglinear'), 'ages'),
        (PolicyLoss(second_moment=0.04), 'kept'),
    ],
)
def test_what_the_settings_need_is_asked_for(settings, name):
  with pytest.raises(ValueError, match=f'{name} is None'):
    _loss(settings, logps=[[0.0]])


# Cutting a batch, case A3: four sequences of 1, 3, 5 and 7 loss tokens after a
# prompt of 2, under a policy whose logits depend on the token before alone.

_LENGTHS = (1, 3, 5, 7)
_VOCABULARY = 6
_SETTINGS = PolicyLoss(kl_coefficient=0.1, entropy_coefficient=0.01)


def _sequences():
  random = np.random.default_rng(3)
  return [
      dict(
          ids=random.integers(0, _VOCABULARY, 2 + n).astype(np.int32),
          mask=np.array([0, 0] + [1] * n, np.float32),
          advantages=random.normal(size=2 + n).astype(np.float32),
          behavior_logps=random.normal(-1.8, 0.3, 2 + n).astype(np.float32),
          proximal_logps=random.normal(-1.8, 0.1, 2 + n).astype(np.float32),
          reference_logps=random.normal(-1.8, 0.3, 2 + n).astype(np.float32),
          temperatures=np.full(2 + n, 0.7, np.float32),
      )
      for n in _LENGTHS
  ]


def _rows(packing, width):
  """Sequences of `packing`, a list of lists of indices, laid into rows."""
  sequences = _sequences()
  batch = {
      name: np.zeros((len(packing), width), array.dtype)
      for name, array in sequences[0].items()
  }
  batch['segment_ids'] = np.zeros((len(packing), width), np.int32)
  for row, members in enumerate(packing):
    at = 0
    for number, member in enumerate(members, start=1):
      length = len(sequences[member]['ids'])
      for name, array in sequences[member].items():
        batch[name][row, at : at + length] = array
      batch['segment_ids'][row, at : at + length] = number
      at += length
  return batch


@jax.jit
def _step(table, batch):
  def loss(table):
    logps, entropy = logprobs.token_logps(
        table[batch['ids']],
        batch['ids'],
        batch['segment_ids'],
        batch['temperatures'],
    )
    return policy.policy_loss(
        logps,
        batch['proximal_logps'],
        batch['behavior_logps'],
        batch['advantages'],
        batch['mask'],
        denominator=float(sum(_LENGTHS)),
        settings=_SETTINGS,
        reference_logps=batch['reference_logps'],
        entropy=entropy,
        fresh=batch['mask'],
    )

  (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(table)
  return value, stats, gradient


def _table():
  random = np.random.default_rng(4)
  return random.normal(size=(_VOCABULARY, _VOCABULARY)).astype(np.float32)


def _in_parts(parts):
  """The step over several batches: results added, statistics merged."""
  results = [_step(_table(), part) for part in parts]
  return (
      sum(value for value, _, _ in results),
      statistics.merge_stats([stats for _, stats, _ in results]),
      sum(gradient for _, _, gradient in results),
  )


def _assert_equal(result, whole):
  assert_close(result, whole, size=0.1)


@pytest.fixture(scope='module')
def whole():
  return _step(_table(), _rows([[0], [1], [2], [3]], 9))


@pytest.mark.parametrize(
    'parts',
    [
        [_rows([[0], [1]], 9), _rows([[2], [3]], 9)],
        [_rows([[i]], 9) for i in range(4)],
        [_rows([[3], [0, 1], [2]], 9)],
        [_rows([[2, 1, 0, 3]], 24)],
        [_rows([[3]], 9), _rows([[0, 2, 1]], 24)],
    ],
    ids=['two', 'four', 'packed', 'one_row', 'packed_in_two'],
)
def test_loss_and_gradient_do_not_depend_on_the_cut(parts, whole):
  _assert_equal(_in_parts(parts), whole)


@pytest.mark.parametrize('shards', [2, 4])
def test_loss_and_gradient_do_not_depend_on_the_shards(shards, whole):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ('data',))
  split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  copied = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  batch = jax.device_put(_rows([[0], [1], [2], [3]], 9), split)
  _assert_equal(_step(jax.device_put(_table(), copied), batch), whole)


def test_a_denominator_of_the_part_alone_is_caught(whole):
  """Planted fault: each microbatch divides by its own tokens."""
  results = [_step(_table(), _rows([[i]], 9)) for i in range(4)]
  tokens = sum(_LENGTHS)
  own_means = [v * tokens / n for (v, _, _), n in zip(results, _LENGTHS)]
  assert abs(sum(own_means) / 4 - whole[0]) > 1e-3


def test_a_mask_shifted_by_one_is_caught(whole):
  """Planted fault: invariant 7 fails as soon as a part shifts its mask."""
  batch = _rows([[0], [1], [2], [3]], 9)
  batch['mask'] = np.roll(batch['mask'], -1, axis=1)
  value, _, gradient = _step(_table(), batch)
  assert abs(value - whole[0]) > 1e-3
  assert np.abs(gradient - whole[2]).max() > 1e-3


@pytest.mark.parametrize(
    'values, field',
    [
        (dict(clip=0.0), 'loss.clip '),
        (dict(clip=1.1), 'loss.clip '),
        (dict(clip_high=0.0), 'loss.clip_high'),
        (dict(dual_clip=0.5), 'loss.dual_clip'),
        (dict(dual_clip=3.0, objective='gate'), 'loss.dual_clip'),
        (dict(objective='cispo', ratio_level='sequence'), 'loss.ratio_level'),
        (dict(aggregation='constant'), 'loss.constant_length'),
        (dict(constant_length=8), 'loss.constant_length'),
        (dict(proximal='behavior', second_moment=0.1), 'loss.proximal'),
        (
            dict(
                weight_level='none',
                weight_rules=(WeightRule(action='clamp'),),
            ),
            'loss.weight_rules',
        ),
        (dict(weight_rules=(WeightRule(upper=None),)), 'weight_rules.0..upper'),
        (
            dict(weight_rules=(WeightRule(lower=2.0, upper=1.0),)),
            'weight_rules.0..upper',
        ),
        (
            dict(weight_rules=(WeightRule(action='clamp', metric='k2'),)),
            'weight_rules.0..metric',
        ),
        (dict(kl_coefficient=-0.1), 'loss.kl_coefficient'),
        (dict(kl_kind='k4'), 'loss.kl_kind'),
        (dict(entropy_coefficient=float('nan')), 'loss.entropy_coefficient'),
    ],
)
def test_wrong_settings_are_refused_by_name(values, field):
  with pytest.raises(config.ConfigError, match=field):
    config.resolve(PolicyLoss(**values), 'loss')


def test_resolved_settings_serve_as_the_open_ones_do():
  frozen = config.resolve(PolicyLoss(clip_high=0.28), 'loss')
  assert _four_tokens(frozen)[0] == _four_tokens(PolicyLoss(clip_high=0.28))[0]


@pytest.mark.parametrize('raw', [4.0, 1e8])
def test_raw_weights_are_told_beside_those_that_a_clamp_left(raw):
  settings = PolicyLoss(weight_rules=(WeightRule(action='clamp', upper=2.0),))
  _, stats = _loss(
      settings, logps=np.zeros(2), behavior_logps=[0.0, -np.log(raw)]
  )
  np.testing.assert_allclose(stats['importance_weight_max'], raw, rtol=1e-5)
  np.testing.assert_allclose(stats['importance_weight_sum'], 1 + raw, rtol=1e-5)
  np.testing.assert_allclose(stats['used_weight_max'], 2.0)
  np.testing.assert_allclose(stats['used_weight_squared_sum'], 5.0)


# The KL term on tokens of an older policy, by exact expectation: each token of
# a small vocabulary counts with the probability that the older policy gives it.
_VOCABULARY = 6
_RANDOM = np.random.default_rng(3)
_REFERENCE, _OLDER, _START, _NOW = _RANDOM.normal(size=(4, _VOCABULARY))


def _expected_gradient(settings, now, start, older):
  """∇ of the loss over all tokens of `older`, with no advantage anywhere."""
  log = lambda x: jax.nn.log_softmax(jnp.asarray(x, jnp.float32))
  behavior = log(older)

  def loss(logits):
    per_token = lambda token: policy.policy_loss(
        log(logits)[token].reshape(1, 1),
        log(start)[token].reshape(1, 1),
        behavior[token].reshape(1, 1),
        jnp.zeros((1, 1)),
        jnp.ones((1, 1)),
        denominator=1.0,
        settings=settings,
        reference_logps=log(_REFERENCE)[token].reshape(1, 1),
    )[0]
    losses = jax.vmap(per_token)(jnp.arange(_VOCABULARY))
    return jnp.sum(jnp.exp(behavior) * losses)

  return np.asarray(jax.jit(jax.grad(loss))(jnp.asarray(now, jnp.float32)))


def _true_gradient(kind, now):
  """∇ KL(π ‖ reference) for k2, ∇ KL(reference ‖ π) for k3."""

  def divergence(logits):
    own, other = jax.nn.log_softmax(logits), jax.nn.log_softmax(_REFERENCE)
    first, second = (own, other) if kind == 'k2' else (other, own)
    return jnp.sum(jnp.exp(first) * (first - second))

  return np.asarray(jax.grad(divergence)(jnp.asarray(now, jnp.float32)))


def _cosine_and_norm(one, other):
  lengths = np.linalg.norm(one), np.linalg.norm(other)
  return one @ other / np.prod(lengths), lengths[0] / lengths[1]


@pytest.mark.parametrize('kind', ['k2', 'k3'])
@pytest.mark.parametrize('proximal', ['exact', 'behavior'])
@pytest.mark.parametrize('updates', [0, 1], ids=['first', 'later'])
def test_gradient_of_the_kl_on_stale_tokens_is_that_of_the_kl(
    kind, proximal, updates
):
  start = _NOW if updates == 0 else _START
  settings = PolicyLoss(kl_coefficient=1.0, kl_kind=kind, proximal=proximal)
  found = _expected_gradient(settings, _NOW, start, _OLDER)
  cosine, norm = _cosine_and_norm(found, _true_gradient(kind, _NOW))
  np.testing.assert_allclose([cosine, norm], [1.0, 1.0], rtol=1e-4)


@pytest.mark.parametrize('kind', ['k2', 'k3'])
def test_a_kl_without_the_weight_is_seen_on_stale_tokens(kind):
  """The planted fault: `weight_level` 'none' leaves π_prox / π_behav out."""
  settings = PolicyLoss(kl_coefficient=1.0, kl_kind=kind, weight_level='none')
  found = _expected_gradient(settings, _NOW, _NOW, _OLDER)
  cosine, norm = _cosine_and_norm(found, _true_gradient(kind, _NOW))
  assert cosine < 0.95 or abs(norm - 1) > 0.05


def test_rejected_tokens_have_no_part_in_the_kl():
  settings = PolicyLoss(
      kl_coefficient=1.0, kl_kind='k2', weight_rules=(WeightRule(upper=2.0),)
  )
  loss, stats = _loss(
      settings,
      logps=[-1.0, -1.0],
      behavior_logps=[-1.0, -3.0],
      reference_logps=jnp.array([-2.0, -2.0]),
      advantages=jnp.zeros(2),
  )
  np.testing.assert_allclose(loss, 0.5, rtol=1e-6)
  np.testing.assert_allclose(stats['reference_kl_sum'], 0.5, rtol=1e-6)


def test_tokens_at_which_k3_has_no_gradient_are_counted():
  arrays = dict(
      logps=[-25.0, -21.0, -1.0, -30.0],
      reference_logps=jnp.array([-1.0, -1.0, -1.0, -1.0]),
      advantages=jnp.zeros(4),
      mask=jnp.array([1, 1, 1, 0]),
  )
  k3 = PolicyLoss(kl_coefficient=1.0, kl_kind='k3')
  _, stats = _loss(k3, **arrays)
  assert stats['reference_saturated_sum'] == 2
  gradient = jax.grad(lambda x: _loss(k3, **dict(arrays, logps=x))[0])(
      jnp.asarray(arrays['logps'])
  )
  np.testing.assert_array_equal(gradient, 0.0)
  _, stats = _loss(PolicyLoss(kl_coefficient=1.0, kl_kind='k2'), **arrays)
  assert stats['reference_saturated_sum'] == 0


def test_k1_in_the_loss_is_refused_with_the_place_where_it_belongs():
  with pytest.raises(
      config.ConfigError, match="kl_kind.*k1.*train.advantages.kl_kind='k1'"
  ):
    PolicyLoss(kl_coefficient=0.1, kl_kind='k1').validate('config.train.loss')
  PolicyLoss(kl_kind='k1').validate('config.train.loss')  # nothing uses it
