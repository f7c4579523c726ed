"""The critic's loss by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax import config
from areal_jax.losses import value
from areal_jax.losses.value import ValueLoss


def _loss(settings, **more):
  """Return 1; values move from 0 to 0.5, -1 and 3; the last is masked."""
  nan = np.nan

  def loss(values):
    return value.value_loss(
        values,
        np.array([[0.0, 0.0, 0.0, nan]]),
        np.array([[1.0, 1.0, 1.0, nan]]),
        np.array([[1, 1, 1, 0]]),
        denominator=3.0,
        settings=settings,
        **more,
    )

  (total, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.array([[0.5, -1.0, 3.0, nan]])
  )
  return total, stats, gradient


def test_clipped_value_loss_by_hand():
  """0.5 counts as 0.2; -1 is worse than its bound; so is 3."""
  total, stats, gradient = _loss(ValueLoss(clip=0.2))
  np.testing.assert_allclose(total, (0.8**2 + 4 + 4) / 6, rtol=1e-6)
  np.testing.assert_allclose(gradient, [[0, -2 / 3, 2 / 3, 0]], rtol=1e-6)
  assert stats['value_clipped_sum'] == 1 and stats['tokens_sum'] == 3
  np.testing.assert_allclose(stats['value_error_sum'], -0.5 - 2 + 2)


def test_value_loss_without_a_clip_is_half_the_squared_error():
  total, stats, _ = _loss(ValueLoss(clip=None))
  np.testing.assert_allclose(total, (0.25 + 4 + 4) / 6, rtol=1e-6)
  assert stats['value_clipped_sum'] == 0


def test_huber_goes_on_in_a_straight_line():
  total, _, gradient = _loss(
      ValueLoss(clip=None, kind='huber', huber_delta=1.0)
  )
  np.testing.assert_allclose(total, (0.125 + 1.5 + 1.5) / 3, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, [[-0.5 / 3, -1 / 3, 1 / 3, 0]], rtol=1e-5
  )


def test_means_of_sequences_need_to_know_them():
  with pytest.raises(ValueError, match='segment_ids is None'):
    _loss(ValueLoss(aggregation='sequence_mean_of_means'))
  total, _, _ = _loss(
      ValueLoss(clip=None, aggregation='sequence_mean_of_means'),
      segment_ids=np.array([[1, 1, 2, 0]]),
  )
  np.testing.assert_allclose(total, ((0.25 + 4) / 4 + 4 / 2) / 3, rtol=1e-6)


@pytest.mark.parametrize(
    'values, field',
    [
        (dict(clip=0.0), 'value.clip'),
        (dict(huber_delta=-1.0), 'value.huber_delta'),
        (dict(aggregation='constant'), 'value.constant_length'),
    ],
)
def test_wrong_settings_are_refused_by_name(values, field):
  with pytest.raises(config.ConfigError, match=field):
    config.resolve(ValueLoss(**values), 'value')
