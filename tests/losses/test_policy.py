"""The policy loss by hand, cut in many ways, and against planted faults."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config
from areal_jax.losses import logprobs, policy
from areal_jax.losses.policy import PolicyLoss, WeightRule


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
  np.testing.assert_allclose(stats['importance_weight_max'], 5.0)


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
      policy.merge_stats([stats for _, stats, _ in results]),
      sum(gradient for _, _, gradient in results),
  )


def _assert_equal(result, whole):
  jax.tree.map(
      lambda one, other: np.testing.assert_allclose(
          one, other, rtol=1e-5, atol=1e-6
      ),
      result,
      whole,
  )


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


def test_maxima_merge_by_the_larger_and_sums_add():
  merged = policy.merge_stats(
      [{'a_sum': 1.0, 'b_max': 3.0}, {'a_sum': 2.0, 'b_max': 0.5}]
  )
  assert merged == {'a_sum': 3.0, 'b_max': 3.0}


@pytest.mark.parametrize(
    'parts, message',
    [
        ([], 'parts is empty'),
        ([{'a_sum': 1.0}, {'b_sum': 1.0}], 'wanted one set'),
        ([{'mean': 1.0}], "statistic 'mean'"),
    ],
)
def test_statistics_that_cannot_be_merged_are_refused(parts, message):
  with pytest.raises(ValueError, match=message):
    policy.merge_stats(parts)


@pytest.mark.parametrize(
    'values, field',
    [
        (dict(clip=0.0), 'loss.clip '),
        (dict(clip=1.1), 'loss.clip '),
        (dict(clip_high=0.0), 'loss.clip_high'),
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
