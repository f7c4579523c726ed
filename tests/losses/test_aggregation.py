"""Denominators and shares by hand: sequences of 1 and 3 loss tokens."""

import numpy as np
import pytest

from areal_jax.losses import aggregation

_MASKS = [np.array([0, 1]), np.array([0, 1, 1, 1]), np.array([0, 0])]
_ROW = np.concatenate(_MASKS)[None]
_SEGMENTS = np.array([[1, 1, 2, 2, 2, 2, 3, 3]])


@pytest.mark.parametrize(
    'kind, expected',
    [
        # Case A3: losses 1 and 2, 2, 2 have a token mean of 1.75.
        ('token_mean', 7 / 4),
        ('sequence_mean_of_sums', 7 / 2),
        ('sequence_mean_of_means', 3 / 2),
        ('constant', 7 / (2 * 10)),
    ],
)
def test_each_kind_by_hand(kind, expected):
  losses = np.array([[9, 1, 9, 2, 2, 2, 9, 9]])
  shares = aggregation.shares(kind, _ROW, _SEGMENTS)
  whole = aggregation.denominator(kind, _MASKS, 10)
  np.testing.assert_allclose(
      (shares * losses * _ROW).sum() / whole, expected, rtol=1e-6
  )


def test_a_batch_without_tokens_has_a_denominator_of_zero():
  for kind in ('token_mean', 'sequence_mean_of_sums', 'constant'):
    assert aggregation.denominator(kind, [np.zeros(3)], 10) == 0
