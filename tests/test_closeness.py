"""Sums are compared by the size of what is summed; faults are still seen."""

import numpy as np
import pytest

from tests.closeness import assert_close

# As a table of embeddings has it: sums of 26, beside some that cancel.
WANTED = {'table': np.array([26.0, -3.0, 1e-3, 0.0], np.float32)}


def moved(by, at=3):
  table = WANTED['table'].copy()
  table[at] += by
  return {'table': table}


def test_roundings_of_the_largest_element_are_allowed_in_all():
  """3.4e-5 beside 26: what a processor without AVX-512 makes of it."""
  for at in range(4):
    assert_close(moved(3.4e-5, at), WANTED)


def test_a_difference_of_another_kind_is_seen_and_its_tensor_named():
  for at in range(4):
    with pytest.raises(AssertionError, match="'table'"):
      assert_close(moved(1e-3, at), WANTED)


def test_each_tensor_has_a_size_of_its_own():
  wanted = {**WANTED, 'bias': np.array([1e-3], np.float32)}
  with pytest.raises(AssertionError, match="'bias'"):
    assert_close({**wanted, 'bias': np.array([1.1e-3])}, wanted)


def test_terms_that_cancel_need_their_size():
  with pytest.raises(AssertionError):
    assert_close(1e-7, 0.0)
  assert_close(1e-7, 0.0, size=1.0)


def test_other_trees_and_numbers_that_are_none_are_seen():
  with pytest.raises(AssertionError):
    assert_close({'chair': WANTED['table']}, WANTED)
  with pytest.raises(AssertionError):
    assert_close(moved(np.nan), WANTED)
