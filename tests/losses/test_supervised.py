"""Losses without a reward, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.losses import supervised


def test_sft_loss_by_hand():
  logps, mask = jnp.array([[-1.0, np.nan], [-2.0, -4.0]]), [[1, 0], [1, 1]]
  mask = jnp.array(mask)
  loss, gradient = jax.value_and_grad(supervised.sft_loss)(
      logps, mask, denominator=3.0
  )
  np.testing.assert_allclose(loss, 7 / 3, rtol=1e-6)
  np.testing.assert_allclose(gradient, -mask / 3, rtol=1e-6)


# Pairs: margins h of 2 and -1, the third one masked.
_CHOSEN = jnp.array([-1.0, -5.0, np.nan])
_REJECTED = jnp.array([-4.0, -4.0, 1.0])
_REFERENCE = dict(
    reference_chosen=jnp.array([-2.0, -3.0, np.nan]),
    reference_rejected=jnp.array([-3.0, -3.0, np.inf]),
)
_MASK = jnp.array([1, 1, 0])


def _sigmoid(x):
  return 1 / (1 + np.exp(-x))


def test_dpo_by_hand():
  def loss(chosen):
    return supervised.preference_loss(
        chosen, _REJECTED, denominator=2.0, beta=0.5, mask=_MASK, **_REFERENCE
    )

  (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(_CHOSEN)
  # h: (-1 + 2) - (-4 + 3) = 2 and (-5 + 3) - (-4 + 3) = -1
  expected = -(np.log(_sigmoid(1.0)) + np.log(_sigmoid(-0.5))) / 2
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, [-_sigmoid(-1.0) / 4, -_sigmoid(0.5) / 4, 0.0], rtol=1e-6
  )
  assert stats == {'pairs_sum': 2, 'margin_sum': 0.5, 'correct_sum': 1}


def test_ipo_by_hand():
  value, _ = supervised.preference_loss(
      _CHOSEN,
      _REJECTED,
      denominator=2.0,
      kind='ipo',
      beta=0.5,
      mask=_MASK,
      **_REFERENCE,
  )
  # (2 - 1)² and (-1 - 1)², over 2
  np.testing.assert_allclose(value, 2.5, rtol=1e-6)


def test_an_unknown_preference_loss_is_refused():
  with pytest.raises(ValueError, match="kind is 'kto'"):
    supervised.preference_loss(_CHOSEN, _REJECTED, denominator=1.0, kind='kto')


def test_reward_model_by_hand():
  def loss(chosen):
    return supervised.reward_model_loss(
        chosen, jnp.array([0.0, 0.0, 1.0]), denominator=2.0, mask=_MASK
    )

  chosen = jnp.array([2.0, -1.0, np.nan])
  (value, stats), gradient = jax.value_and_grad(loss, has_aux=True)(chosen)
  expected = -(np.log(_sigmoid(2.0)) + np.log(_sigmoid(-1.0))) / 2
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, [-_sigmoid(-2.0) / 2, -_sigmoid(1.0) / 2, 0.0], rtol=1e-6
  )
  assert stats['correct_sum'] == 1 and stats['margin_sum'] == 1
