"""Sequences that share a row, by hand."""

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import segments

_X = np.array([[1.0, np.nan, 4.0, -2.0, np.inf]], np.float32)
_MASK = np.array([[1, 0, 1, 1, 0]])
_IDS = np.array([[2, 2, 2, 1, 0]])


def test_each_position_gets_the_number_of_its_own_sequence():
  for function, expected in (
      (segments.total, [5, 5, 5, -2, 0]),
      (segments.mean, [2.5, 2.5, 2.5, -2, 0]),
      (segments.largest, [4, 4, 4, -2, 0]),
  ):
    np.testing.assert_array_equal(function(_X, _MASK, _IDS), [expected])
  np.testing.assert_array_equal(segments.count(_MASK, _IDS), [[2, 2, 2, 1, 0]])


def test_rows_do_not_see_one_another():
  x, ids = np.ones((2, 3)), np.array([[1, 1, 2], [1, 2, 2]])
  np.testing.assert_array_equal(
      segments.total(x, x, ids), [[2, 2, 1], [1, 2, 2]]
  )


def test_masked_positions_get_no_gradient():
  gradient = jax.grad(lambda x: segments.mean(x, _MASK, _IDS)[0, 0])(
      jnp.asarray(_X)
  )
  np.testing.assert_array_equal(gradient, [[0.5, 0, 0.5, 0, 0]])
