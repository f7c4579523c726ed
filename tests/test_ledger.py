"""Admission: invariant 1, CASES A10 (admission half)."""

import math

from hypothesis import given
from hypothesis import strategies as st
import pytest

from areal_jax.ledger import Ledger
from areal_jax.types import DropReason


def admit_all(ledger, at_most=10_000):
  admitted = 0
  while ledger.admits() and admitted < at_most:
    ledger.admit()
    admitted += 1
  return admitted


def step(ledger):
  """Trains and publishes one full batch."""
  for _ in range(ledger.batch_size):
    ledger.finish()
  ledger.take(ledger.batch_size)
  ledger.publish(ledger.version + 1)


@pytest.mark.parametrize('eta, burst', [(0, 8), (1, 16), (2, 24), (0.5, 12)])
def test_first_burst_is_eta_plus_one_batches(eta, burst):
  assert admit_all(Ledger(8, eta)) == burst


def test_restored_at_version_100_admits_24_groups_not_824():
  # CASES A10: B = 8, η = 2; the cumulative rule of the paper, restarted with
  # a count of 0, would admit (100 + 2 + 1) * 8 = 824.
  assert admit_all(Ledger(8, 2, version=100)) == 24


def test_infinite_eta_always_admits():
  assert admit_all(Ledger(8, math.inf), at_most=500) == 500


@given(
    batch=st.integers(1, 6),
    eta=st.integers(0, 4),
    steps=st.integers(0, 12),
)
def test_equals_the_papers_inequality_with_full_batches(batch, eta, steps):
  ledger = Ledger(batch, eta)
  for _ in range(steps):
    admit_all(ledger)
    step(ledger)
  while ledger.admits():
    ledger.admit()
    generated = ledger.drawn  # N_r, the one just requested included
    assert (generated - 1) // batch <= ledger.version + eta
  assert ledger.drawn // batch > ledger.version + eta  # the next is refused


def test_batch_in_training_stays_outstanding_until_published():
  # The trap of PAPER.md 2.1: released when training starts, ages shift by one.
  ledger = Ledger(2, 0)
  admit_all(ledger)
  ledger.finish()
  ledger.finish()
  ledger.take(2)
  assert not ledger.admits()
  ledger.publish(1)
  assert admit_all(ledger) == 2


@given(
    st.lists(st.sampled_from(['admit', 'finish', 'drop', 'take']), max_size=60)
)
def test_drawn_is_trained_plus_dropped_plus_in_flight(actions):
  ledger = Ledger(3, 2)
  for action in actions:
    if action == 'admit' and ledger.admits():
      ledger.admit()
    elif action == 'finish' and ledger.running:
      ledger.finish()
    elif action == 'drop' and ledger.ready:
      ledger.drop(DropReason.STALE, was='ready')
    elif action == 'take' and ledger.ready and not ledger.training:
      ledger.take(min(ledger.ready, 3))
      ledger.publish(ledger.version + 1)
    assert ledger.balanced()
    assert ledger.outstanding <= ledger.limit


@pytest.mark.parametrize('eta', [-1, -0.5, math.nan])
def test_negative_eta_is_refused(eta):
  with pytest.raises(ValueError, match='eta is'):
    Ledger(8, eta)


def test_version_out_of_order_is_refused():
  with pytest.raises(ValueError, match='version 2 published after 0'):
    Ledger(1, 0).publish(2)


def test_group_that_is_not_there_cannot_leave():
  with pytest.raises(RuntimeError, match="leave 'ready', which holds 0"):
    Ledger(1, 0).take(1)
