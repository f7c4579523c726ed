"""The schedule of a run: exact, torn anywhere, changed anywhere, bounded."""

import dataclasses

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import numpy as np
import pytest

from areal_jax.telemetry import jsonl
from areal_jax.telemetry.schedule import (
    Schedule,
    ScheduleError,
    ScheduleWriter,
)
from areal_jax.types import Problem, RewardResult, RewardStatus
from tests import records

RUN = {'seed': 1, 'config': {'rollout': {'eta': 'inf'}}}
LIMIT = 1_000_000


def groups_of(step):
  return [records.group(2 * step + i, version=step - 1) for i in range(2)]


def write(path, steps, limit=LIMIT, run=RUN):
  with ScheduleWriter(path, limit, run) as writer:
    for step in steps:
      writer.batch(step, groups_of(step))
      writer.outcome(step, {'loss': step / 3, 'gradient_norm': float('nan')})
  return path


def assert_equal(one, other):
  """Records are equal, arrays bit for bit."""
  if dataclasses.is_dataclass(one):
    assert type(one) is type(other)
    for field in dataclasses.fields(one):
      assert_equal(getattr(one, field.name), getattr(other, field.name))
  elif isinstance(one, np.ndarray):
    assert one.dtype == other.dtype
    assert one.tobytes() == other.tobytes() and one.shape == other.shape
  elif isinstance(one, (tuple, list)):
    assert len(one) == len(other)
    for a, b in zip(one, other):
      assert_equal(a, b)
  else:
    assert one == other


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  """A schedule of three steps, as bytes."""
  path = tmp_path_factory.mktemp('schedule') / 'schedule.bin'
  return write(path, (1, 2, 3)).read_bytes()


@pytest.fixture(scope='module')
def place(tmp_path_factory):
  return tmp_path_factory.mktemp('place') / 'schedule.bin'


def opened(path, data):
  path.write_bytes(data)
  return Schedule(path)


def held(schedule):
  """All that it holds, read."""
  found = {s: (schedule.batch(s), schedule.outcome(s)) for s in schedule.steps}
  schedule.close()
  return found


def test_batches_come_back_as_they_were(tmp_path):
  schedule = Schedule(write(tmp_path / 'schedule.bin', (1, 2)))
  assert schedule.steps == (1, 2) and schedule.full_at is None
  assert schedule.runs == (RUN,)
  for step in (1, 2):
    assert_equal(schedule.batch(step), tuple(groups_of(step)))
  outcome = schedule.outcome(2)
  assert outcome['loss'] == 2 / 3 and np.isnan(outcome['gradient_norm'])


FLOATS = st.floats(width=32, allow_nan=True, allow_infinity=True)


@hypothesis_settings(deadline=None, max_examples=30)
@given(
    logps=st.lists(FLOATS, min_size=1, max_size=6),
    score=st.floats(allow_nan=False, allow_infinity=False),
    text=st.text(max_size=20),
)
def test_any_number_and_text_comes_back(logps, score, text, place):
  place.unlink(missing_ok=True)
  member = records.trajectory(
      answer=range(len(logps)),
      logps=logps,
      score=score,
  )
  member = dataclasses.replace(
      member,
      reward=RewardResult(RewardStatus.OK, score, {'part': score}, text, 0.5),
      token_rewards=member.logps,
      routing=np.arange(2 * len(member.ids), dtype=np.int16).reshape(-1, 2, 1),
      timestamps={'begun': 1.0},
  )
  group = dataclasses.replace(
      records.group(0),
      draw=dataclasses.replace(
          records.draw(0), problem=Problem('p', 's', text, text, {'n': [1]})
      ),
      trajectories=(member,),
  )
  with ScheduleWriter(place, LIMIT, RUN) as writer:
    writer.batch(1, [group])
  without = dataclasses.replace(member, timestamps={})
  schedule = Schedule(place)
  assert_equal(
      schedule.batch(1),
      (dataclasses.replace(group, trajectories=(without,)),),
  )
  schedule.close()


def test_cut_anywhere_it_holds_the_steps_before(written, place):
  """A writer that is killed leaves the front of what it wrote."""
  whole = held(opened(place, written))
  start = write(place.with_name('start.bin'), ()).stat().st_size
  reached = 0
  for length in range(0, len(written) + 1, 13):
    if length < start:
      with pytest.raises(ScheduleError, match='is empty, wanted the schedule'):
        opened(place, written[:length])
      continue
    found = held(opened(place, written[:length]))
    assert list(found) == list(range(1, len(found) + 1))
    for step, (batch, outcome) in found.items():
      assert_equal(batch, whole[step][0])
      assert outcome is None or outcome['loss'] == whole[step][1]['loss']
    assert len(found) >= reached
    reached = len(found)
  assert reached == 3


def test_changed_anywhere_it_is_refused_by_place(written, place):
  for at in range(0, len(written), 17):
    changed = bytearray(written)
    changed[at] ^= 0x10
    with pytest.raises(ScheduleError, match='schedule.bin at byte'):
      held(opened(place, bytes(changed)))


def test_planted_change_with_a_right_checksum_is_another_batch(tmp_path):
  """So the tests above can fail: nothing but the checksums sees it."""
  path = write(tmp_path / 'schedule.bin', (1,))
  other = write(tmp_path / 'other.bin', (2,))
  with pytest.raises(AssertionError):
    assert_equal(Schedule(path).batch(1), Schedule(other).batch(2))


def test_goes_on_behind_the_last_whole_frame(written, place):
  place.write_bytes(written[:-5])  # half the outcome of step 3
  write(place, (4,), run={**RUN, 'attempt': 1})
  schedule = Schedule(place)
  assert schedule.steps == (1, 2, 3, 4) and len(schedule.runs) == 2
  assert schedule.outcome(3) is None
  assert_equal(schedule.batch(4), tuple(groups_of(4)))
  schedule.close()


def test_goes_on_at_the_offset_of_a_checkpoint(tmp_path):
  path = tmp_path / 'schedule.bin'
  with ScheduleWriter(path, LIMIT, RUN) as writer:
    writer.batch(1, groups_of(1))
    writer.outcome(1, {'loss': 0.5})
    offset = writer.offset()
    assert path.stat().st_size == offset
    writer.batch(2, groups_of(7))  # of a line that is left
  assert jsonl.cut(path, offset)
  write(path, (2, 3))
  schedule = Schedule(path)
  assert schedule.steps == (1, 2, 3)
  assert_equal(schedule.batch(2), tuple(groups_of(2)))


def test_step_that_comes_twice_is_refused(tmp_path):
  path = write(tmp_path / 'schedule.bin', (1, 2))
  write(path, (2,))  # nobody cut it back
  with pytest.raises(ScheduleError, match='holds step 2 after 2, wanted each'):
    Schedule(path)


def test_limit_ends_it_and_is_told_once(tmp_path):
  path = tmp_path / 'schedule.bin'
  limit = 5_000
  told = []
  with ScheduleWriter(path, limit, RUN, told.append) as writer:
    for step in range(1, 40):
      writer.batch(step, groups_of(step))
    writer.offset()
    full_at = writer.full_at
  assert told == [full_at]
  assert path.stat().st_size <= limit
  schedule = Schedule(path)
  assert schedule.full_at == full_at
  assert schedule.steps == tuple(range(1, full_at))
  size = path.stat().st_size
  with ScheduleWriter(path, limit, RUN, told.append) as writer:  # later
    assert writer.full_at == full_at
    writer.batch(40, groups_of(40))
  assert path.stat().st_size == size and len(told) == 1


def test_limit_of_zero_writes_nothing(tmp_path):
  path = write(tmp_path / 'schedule.bin', (1,), limit=0)
  assert not path.exists()
  with ScheduleWriter(path, 0, RUN) as writer:
    assert writer.offset() == 0


def test_disk_that_is_full_is_an_error_of_the_next_call(tmp_path):
  writer = ScheduleWriter('/dev/full', LIMIT, RUN)
  with pytest.raises(OSError, match='No space left'):
    writer.batch(1, groups_of(1))
  writer.close()


def test_other_files_are_refused_by_name(tmp_path):
  path = tmp_path / 'schedule.bin'
  path.write_bytes(b'{"step": 1, "version": 1, "wall": 1}\n')
  with pytest.raises(ScheduleError, match='at byte 0 has .*, wanted a frame'):
    Schedule(path)
