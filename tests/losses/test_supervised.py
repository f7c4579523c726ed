"""Losses without a reward, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import supervised


def test_sft_loss_by_hand():
  logps, mask = jnp.array([[-1.0, np.nan], [-2.0, -4.0]]), [[1, 0], [1, 1]]
  loss = supervised.sft_loss(logps, jnp.array(mask), denominator=3.0)
  np.testing.assert_allclose(loss, 7 / 3, rtol=1e-6)
  gradient = jax.grad(supervised.sft_loss)(
      logps, jnp.array(mask), denominator=3.0
  )
  np.testing.assert_allclose(gradient, -np.array(mask) / 3, rtol=1e-6)
