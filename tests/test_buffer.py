"""Order of leaving under the staleness policies; CASES A16."""

from areal_jax.buffer import GroupBuffer
from tests import records


def filled(policy, order, *, eta=1.0, expected=None, version=0):
  buffer = GroupBuffer(policy, eta)
  for index in sorted(expected if expected is not None else order):
    buffer.expect(index)
  for index in order:
    buffer.put(records.group(index, version=version))
  return buffer


def indices(groups):
  return [g.draw_index for g in groups]


def test_thirteen_groups_leave_in_two_batches_and_none_is_lost():
  buffer = filled('soft', range(13))
  assert indices(buffer.take(8)) == list(range(8))
  assert buffer.take(8) is None
  for index in range(13, 16):
    buffer.expect(index)
    buffer.put(records.group(index))
  assert indices(buffer.take(8)) == list(range(8, 16))
  assert len(buffer) == 0


def test_soft_takes_the_oldest_finished_first_sorted_by_draw():
  buffer = filled('soft', [5, 2, 7, 0])
  assert indices(buffer.take(2)) == [2, 5]
  assert indices(buffer.take(2)) == [0, 7]


def test_fifo_waits_for_the_slow_head():
  buffer = filled('fifo', [1, 2, 3], expected=range(5))
  assert buffer.take(2) is None  # draw 0 is not there
  buffer.put(records.group(0))
  assert indices(buffer.take(2)) == [0, 1]
  assert indices(buffer.take(2)) == [2, 3]


def test_fifo_does_not_wait_for_a_forgotten_draw():
  buffer = filled('fifo', [1, 2], expected=range(3))
  buffer.forget(0)
  assert indices(buffer.take(2)) == [1, 2]


def test_drop_removes_groups_older_than_eta_only():
  buffer = filled('drop', [0, 1], eta=1.0, version=3)
  assert buffer.stale(4) == []
  assert indices(buffer.stale(5)) == [0, 1]
  assert len(buffer) == 0


def test_soft_never_drops():
  buffer = filled('soft', [0], eta=0.0)
  assert buffer.stale(100) == []
