"""Every preset: its settings hold, and its loss does not depend on the cut."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config
from areal_jax.losses import (
    advantages,
    aggregation,
    importance,
    policy,
    presets,
)
from areal_jax.losses import statistics as statistics_lib
from areal_jax.losses.presets import PRESETS
from tests.closeness import assert_close

_NAMES = sorted(PRESETS)
_LONGEST = 10


def _preset(name):
  return config.resolve(presets.preset(name, longest=_LONGEST), name)


@pytest.mark.parametrize('name', _NAMES)
def test_settings_hold_and_the_source_is_named(name):
  _preset(name)
  text = PRESETS[name].__doc__
  assert any(word in text for word in ('http', 'same source', 'verl')), text


def test_an_unknown_preset_is_refused_by_name():
  with pytest.raises(config.ConfigError, match="preset is 'grppo'"):
    presets.preset('grppo', longest=8)
  with pytest.raises(config.ConfigError, match='longest is 0'):
    presets.preset('grpo', longest=0)


def test_a_preset_is_open_and_of_its_own():
  one, other = (presets.preset('dapo', longest=50) for _ in range(2))
  one.loss.clip_high = 0.5
  assert other.loss.clip_high == 0.28
  assert (other.advantages.length_penalty.longest, one.dynamic_sampling) == (
      50,
      True,
  )


# Cutting a batch, case A3. Four sequences of 1, 3, 5 and 7 loss tokens behind a
# prompt of 2, two of them of one group; the log-prob of each token is a
# parameter, so that gradients of any layout can be compared.

_LENGTHS = (1, 3, 5, 7)
_PROMPT = 2
_TOKENS = sum(_LENGTHS) + _PROMPT * len(_LENGTHS)
_STARTS = np.cumsum([0] + [n + _PROMPT for n in _LENGTHS])


def _masks():
  return [np.r_[np.zeros(_PROMPT), np.ones(n)] for n in _LENGTHS]


@functools.cache
def _tokens():
  """One number a token, of each array that a loss takes."""
  random = np.random.default_rng(3)
  proximal = random.normal(-1.8, 0.3, _TOKENS)
  # One sequence far likelier now, one far less likely: rules drop them.
  drift = np.repeat([-0.8, 0.0, 0.5, 0.0], np.diff(_STARTS))
  return {
      'logps': (proximal + random.normal(0, 0.2, _TOKENS)).astype(np.float32),
      'proximal_logps': proximal,
      'behavior_logps': proximal + drift + random.normal(0, 0.3, _TOKENS),
      'reference_logps': random.normal(-1.8, 0.3, _TOKENS),
      'entropy': random.uniform(0, 2, _TOKENS),
      'ages': np.repeat([0, 2, 1, 4], np.diff(_STARTS)),
      'mask': np.concatenate(_masks()),
  }


def _batch(name):
  """What a preset makes of it: settings, token arrays, denominator."""
  settings, tokens = _preset(name), _tokens()
  loss = settings.loss
  more = {}
  if settings.advantages.critic:
    more['values'] = np.split(np.arange(_TOKENS) / 20.0, _STARTS[1:-1])
  if settings.advantages.kl_coefficient:
    more['token_rewards'] = advantages.kl_rewards(
        settings.advantages,
        np.split(tokens['behavior_logps'], _STARTS[1:-1]),
        np.split(tokens['reference_logps'], _STARTS[1:-1]),
        _masks(),
    )
  given = advantages.token_advantages(
      settings.advantages,
      np.array([1.0, 0.0, 0.5, -1.0]),
      np.array([7, 7, 3, 3]),
      _masks(),
      **more,
  ).advantages
  arrays = dict(tokens, advantages=np.concatenate(given))
  if loss.second_moment is not None:
    arrays['kept'] = importance.second_moment_keep(
        tokens['proximal_logps'],
        tokens['behavior_logps'],
        tokens['mask'],
        threshold=loss.second_moment,
    )
    assert 0 < arrays['kept'].sum() < sum(_LENGTHS)
  if not loss.kl_coefficient:
    del arrays['reference_logps']
  denominator = aggregation.denominator(
      loss.aggregation, _masks(), loss.constant_length
  )
  return loss, arrays, denominator


def _lay(packing, width):
  """Which token stands where [4, T], -1 for padding, and the segment ids.

  Always four rows, though some may be empty: one shape, compiled once.
  """
  place = np.full((4, width), -1)
  segment_ids = np.zeros(place.shape, np.int32)
  for row, members in enumerate(packing):
    at = 0
    for number, member in enumerate(members, start=1):
      length = _LENGTHS[member] + _PROMPT
      place[row, at : at + length] = _STARTS[member] + np.arange(length)
      segment_ids[row, at : at + length] = number
      at += length
  return place, segment_ids


def _step(loss, arrays, denominator, place, segment_ids, put=jnp.asarray):
  """Loss, statistics, and gradient of each token [_TOKENS]."""
  rows = {
      # Padding is NaN: it must not matter.
      name: put(np.where(place < 0, np.nan, x[place]).astype(np.float32))
      for name, x in arrays.items()
      if name not in ('logps', 'mask', 'ages')
  }
  rows['mask'] = put(np.where(place < 0, 0, arrays['mask'][place]))
  rows['ages'] = put(np.where(place < 0, 0, arrays['ages'][place]))
  index = put(np.maximum(place, 0))
  rows['segment_ids'] = put(segment_ids)

  def total(logps):
    return policy.policy_loss(
        logps[index],
        denominator=denominator,
        settings=loss,
        **rows,
    )

  # Eagerly: the primitives are compiled once for all presets.
  (value, stats), gradient = jax.value_and_grad(total, has_aux=True)(
      jnp.asarray(arrays['logps'])
  )
  return value, gradient, stats


def _added(results):
  """Results of parts: numbers added, statistics merged."""
  values, gradients, stats = zip(*results)
  return sum(values), sum(gradients), statistics_lib.merge_stats(stats)


_PADDED = [[0], [1], [2], [3]]


@functools.cache
def _whole(name):
  return _step(*_batch(name), *_lay(_PADDED, _TOKENS))


@functools.cache
def _singles(name):
  """Each sequence in a microbatch of its own."""
  batch = _batch(name)
  return [_step(*batch, *_lay([[i]], _TOKENS)) for i in range(4)]


def _finite(stats):
  return all(np.all(np.isfinite(value)) for value in stats.values())


def _assert_close(result, whole):
  assert_close(result, whole, size=0.1)


@pytest.mark.parametrize('name', _NAMES)
def test_loss_and_gradient_do_not_depend_on_the_cut(name):
  """Packed or padded, in one, two or four microbatches."""
  batch, whole = _batch(name), _whole(name)
  assert np.abs(whole[1]).max() > 1e-3
  _assert_close(_step(*batch, *_lay([[2, 1, 0, 3]], _TOKENS)), whole)
  halves = [_lay(half, _TOKENS) for half in ([[3]], [[0, 2], [1]])]
  _assert_close(_added([_step(*batch, *half) for half in halves]), whole)
  _assert_close(_added(_singles(name)), whole)


@pytest.mark.parametrize('shards', [2, 4])
@pytest.mark.parametrize('name', _NAMES)
def test_loss_and_gradient_do_not_depend_on_the_shards(name, shards):
  mesh = jax.sharding.Mesh(np.array(jax.devices()[:shards]), ('data',))
  rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec('data'))
  copies = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  loss, arrays, denominator = _batch(name)
  arrays = dict(arrays, logps=jax.device_put(arrays['logps'], copies))
  result = _step(
      loss,
      arrays,
      denominator,
      *_lay(_PADDED, _TOKENS),
      put=lambda x: jax.device_put(x, rows),
  )
  _assert_close(result, _whole(name))


def _worst(result, whole):
  return max(
      float(np.abs(one - other).max())
      for one, other in zip(result[:2], whole[:2])
  )


@pytest.mark.parametrize('name', _NAMES)
def test_a_denominator_of_the_part_alone_is_caught(name):
  """Planted fault, for every preset: each part divides by its own count."""
  loss, _, denominator = _batch(name)
  own = [
      aggregation.denominator(loss.aggregation, [mask], loss.constant_length)
      for mask in _masks()
  ]
  parts = [
      [x * denominator / count for x in part[:2]]
      for part, count in zip(_singles(name), own)
  ]
  # A mean over the parts is right by chance where each holds one sequence and
  # sequences are what counts; their sum is not.
  by_tokens = loss.aggregation == 'token_mean'
  result = [sum(x) / (4 if by_tokens else 1) for x in zip(*parts)]
  assert _worst(result, _whole(name)) > 1e-3


@pytest.mark.parametrize('name', ['gspo', 'mis', 'sequence_rejection', 'gmpo'])
def test_sequences_run_into_one_another_are_caught(name):
  """Planted fault: a row is taken for one sequence."""
  batch = _batch(name)
  place, segment_ids = _lay([[2, 1, 0, 3]], _TOKENS)
  result = _step(*batch, place, np.minimum(segment_ids, 1))
  assert _worst(result, _whole(name)) > 1e-3


def test_a_second_moment_of_the_part_alone_is_caught():
  """Planted fault: M2PO's mask taken of each microbatch."""
  loss, arrays, _ = _batch('m2po')
  own = np.zeros(_TOKENS, np.float32)
  for start, end in zip(_STARTS, _STARTS[1:]):
    own[start:end] = importance.second_moment_keep(
        arrays['proximal_logps'][start:end],
        arrays['behavior_logps'][start:end],
        arrays['mask'][start:end],
        threshold=loss.second_moment,
    )
  assert np.any(own != arrays['kept'])


@pytest.mark.parametrize('name', _NAMES)
def test_nothing_in_the_mask_gives_a_loss_of_zero(name):
  """Case A4: every answer was cut off and masked, the denominator is 0."""
  loss, arrays, _ = _batch(name)
  arrays = dict(arrays, mask=np.zeros(_TOKENS))
  place, segment_ids = _lay(_PADDED, _TOKENS)
  value, gradient, stats = _step(loss, arrays, 0.0, place, segment_ids)
  assert value == 0.0
  np.testing.assert_array_equal(gradient, np.zeros(_TOKENS))
  assert _finite(stats)


@pytest.mark.parametrize('name', _NAMES)
def test_log_probs_far_apart_give_finite_numbers(name):
  """Differences of ±100 nats, at which every ratio would overflow."""
  loss, arrays, denominator = _batch(name)
  signs = np.where(np.arange(_TOKENS) % 2, 100.0, -100.0)
  arrays = dict(arrays, behavior_logps=arrays['behavior_logps'] + signs)
  arrays['logps'] = (arrays['logps'] - signs).astype(np.float32)
  place, segment_ids = _lay(_PADDED, _TOKENS)
  value, gradient, stats = _step(loss, arrays, denominator, place, segment_ids)
  assert np.isfinite(value) and np.all(np.isfinite(gradient))
  assert _finite(stats)


@pytest.mark.parametrize('name', _NAMES)
def test_at_the_policy_itself_the_gradient_is_that_of_reinforce(name):
  """η = 0 and one update: all three policies are one, ratios and weights 1.

  Then whatever a preset clips, gates or masks, its gradient is A / D times what
  a token counts; GSPO's and GMPO's spread A over their sequences.
  """
  loss, arrays, denominator = _batch(name)
  loss = dataclasses.replace(loss, kl_coefficient=0.0)
  arrays.pop('reference_logps', None)
  for other in ('proximal_logps', 'behavior_logps'):
    arrays[other] = arrays['logps']
  if 'kept' in arrays:
    arrays['kept'] = np.ones(_TOKENS)
  place, segment_ids = _lay(_PADDED, _TOKENS)
  _, gradient, stats = _step(loss, arrays, denominator, place, segment_ids)
  counts = np.repeat([float(n) for n in _LENGTHS], np.diff(_STARTS))
  share = 1 / counts if 'means' in loss.aggregation else np.ones(_TOKENS)
  expected = -arrays['advantages'] * share * arrays['mask'] / denominator
  np.testing.assert_allclose(gradient, expected, rtol=1e-5, atol=1e-6)
  assert stats['rejected_sum'] == 0
  assert stats['importance_weight_sum'] == sum(_LENGTHS)
