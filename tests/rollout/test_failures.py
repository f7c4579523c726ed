"""Policies by kind of failure under virtual time, and the circuit breaker."""

import asyncio
import collections
import dataclasses

import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.rollout.failures import (
    Breaker,
    FailureSettings,
    NothingParses,
    TooManyFailures,
    Unfinished,
)
from areal_jax.rollout.workflow import MemberFailed
from areal_jax.types import DropReason, RewardResult, RewardStatus
from tests import records, virtual_time
from tests.rollout.test_controller import build


def controller_of(ask, **settings):
  return build(ask, eta=0.0, failures=FailureSettings(**settings))


async def first_batch(controller):
  controller.start()
  return await controller.next_batch(4)


class Flaky:
  """Raises the first `times` times that sample 0 of draw 1 is asked for."""

  def __init__(self, error, times):
    self.error = error
    self.times = times
    self.asked = collections.Counter()
    self.attempts = []

  async def __call__(self, draw, sample, version):
    await asyncio.sleep(1)
    if (draw.draw_index, sample) == (1, 0):
      self.attempts.append(draw.attempt)
    self.asked[draw.draw_index, sample] += 1
    if self.asked[draw.draw_index, sample] <= self.times and (
        draw.draw_index, sample
    ) == (1, 0):  # fmt: skip
      raise self.error
    return records.trajectory(draw.draw_index, sample)


@pytest.mark.parametrize(
    'kind, error',
    [
        ('scoring', MemberFailed('reward timeout: killed after 2 s')),
        ('workflow', ConnectionError('the tool is down')),
    ],
)
def test_what_is_retried_comes_back_whole(kind, error):
  workflow = Flaky(error, times=2)
  controller = controller_of(workflow, **{kind: 'retry'}, retries=2)
  batch = virtual_time.run(first_batch(controller))
  assert all(len(group.trajectories) == 2 for group in batch)
  assert workflow.attempts == [0, 1, 2]  # and its siblings were asked once
  assert sum(workflow.asked.values()) == 8 + 2
  assert controller.retried_members == 2 and controller.failed_members == 0


@pytest.mark.parametrize('policy, asked', [('retry', 3), ('drop', 1)])
@pytest.mark.parametrize(
    'kind, error',
    [
        ('scoring', MemberFailed('reward error: ZeroDivisionError')),
        ('workflow', ConnectionError('the tool is down')),
    ],
)
def test_what_fails_for_good_leaves_its_group_with_the_reason(
    kind, error, policy, asked
):
  workflow = Flaky(error, times=99)
  controller = controller_of(workflow, **{kind: policy}, retries=2)
  batch = virtual_time.run(first_batch(controller))
  (short,) = [group for group in batch if group.failed]
  assert short.draw_index == 1 and len(short.trajectories) == 1
  ((sample, reason),) = short.failed
  assert sample == 0 and str(error) in reason
  assert len(workflow.attempts) == asked
  assert controller.failed_members == controller.failed_groups == 1


@pytest.mark.parametrize(
    'kind, error',
    [
        ('scoring', MemberFailed('reward error: LookupError')),
        ('workflow', ConnectionError('the tool is down')),
    ],
)
def test_what_stops_a_run_comes_with_type_message_traceback_and_place(
    kind, error
):
  controller = controller_of(Flaky(error, times=1), **{kind: 'stop'})
  with pytest.raises(type(error), match=str(error)) as caught:
    virtual_time.run(first_batch(controller))
  assert 'in draw 1 sample 0' in caught.value.__notes__
  assert any(entry.name == '__call__' for entry in caught.traceback)


def test_what_the_verifier_cannot_read_is_not_asked_again():

  async def workflow(draw, sample, version):
    said = records.trajectory(draw.draw_index, sample)
    if (draw.draw_index, sample) == (1, 0):
      asked.append(draw.attempt)
      unread = RewardResult(RewardStatus.UNPARSEABLE)
      raise MemberFailed(
          'reward unparseable',
          said.__class__(**{**vars(said), 'reward': unread}),
      )
    return said

  asked = []
  controller = controller_of(workflow, scoring='retry')
  virtual_time.run(first_batch(controller))
  assert asked == [0]


def test_a_group_without_any_score_is_dropped_and_replaced():

  async def workflow(draw, sample, version):
    if draw.draw_index == 2:
      raise TypeError('no')
    return records.trajectory(draw.draw_index, sample)

  controller = controller_of(workflow, workflow='drop')
  batch = virtual_time.run(first_batch(controller))
  assert [group.draw_index for group in batch] == [0, 1, 3, 4]
  assert controller.ledger.dropped == {DropReason.FAILED: 1}
  assert controller.ledger.balanced()


# Answers that never come.


class Hangs:
  """Sample 0 of some draws never comes, the first `times` times of each."""

  def __init__(self, draws, how, times=99):
    self.draws = draws
    self.how = how
    self.times = times
    self.asked = collections.Counter()

  async def __call__(self, draw, sample, version):
    await asyncio.sleep(1)
    self.asked[draw.draw_index, sample] += 1
    hangs = draw.draw_index in self.draws and sample == 0
    if hangs and self.asked[draw.draw_index, sample] <= self.times:
      await self.how()
    return records.trajectory(
        draw.draw_index, sample, versions=[version, version]
    )


async def raises_cancelled():
  raise asyncio.CancelledError


async def cancels_itself():
  asyncio.current_task().cancel()
  await asyncio.sleep(1)


async def awaits_a_cancelled_task():
  task = asyncio.ensure_future(asyncio.sleep(1))
  task.cancel()
  await task


async def never_returns():
  await asyncio.Event().wait()


async def swallows_its_cancellation():
  """Goes on for hours, however often it is cancelled."""
  for _ in range(6):
    try:
      await asyncio.sleep(3000)
    except asyncio.CancelledError:
      pass


CANCELLED = [raises_cancelled, cancels_itself, awaits_a_cancelled_task]
UNFINISHED = [*CANCELLED, never_returns, swallows_its_cancellation]


def unending(workflow, *, policy='soft', eta=0.0, **settings):
  return build(
      workflow,
      eta=eta,
      policy=policy,
      group_s=40,
      failures=FailureSettings(**settings),
  )


@pytest.mark.parametrize('how', UNFINISHED)
@pytest.mark.parametrize('policy', ['soft', 'drop', 'mask', 'fifo'])
@pytest.mark.parametrize('eta', [0.0, 2.0])
def test_answer_that_never_comes_leaves_its_group_and_no_place_is_lost(
    how, policy, eta
):
  workflow = Hangs(range(0, 1000, 4), how)  # one of each batch
  controller = unending(workflow, policy=policy, eta=eta)

  async def go_on():
    controller.start()
    trained = []
    for version in range(12):
      trained += await controller.next_batch(4)
      await asyncio.sleep(10)
      controller.published(version + 1)
      assert controller.ledger.balanced()
    cut = controller.snapshot()
    held = len(cut.ready) + len(cut.running)
    assert cut.ledger.outstanding == held
    left = await controller.stop(5)
    assert bool(left) == (how is swallows_its_cancellation)
    return trained, cut

  trained, cut = virtual_time.run(go_on())
  short = [group for group in trained if group.draw_index % 4 == 0]
  assert len(trained) == 48
  # What was late may have become too old.
  assert short or controller.ledger.dropped[DropReason.STALE]
  for group in short:
    ((sample, reason),) = group.failed
    assert sample == 0
    assert ('cancelled' if how in CANCELLED else 'no answer for 40 s') in reason
  assert controller.unfinished_members >= max(1, len(short))
  # Of those drawn so long ago that their time is over none is left.
  assert all(draw.draw_index >= 12 for draw in cut.running)


@pytest.mark.parametrize('how', UNFINISHED)
def test_answer_that_never_came_may_be_asked_again(how):
  workflow = Hangs([1], how, times=2)
  controller = unending(workflow, unfinished='retry', retries=2)
  batch = virtual_time.run(first_batch(controller))
  assert all(len(group.trajectories) == 2 for group in batch)
  assert workflow.asked[1, 0] == 3 and controller.retried_members == 2
  assert controller.failed_members == 0


@pytest.mark.parametrize('how', UNFINISHED)
def test_answer_that_never_comes_may_end_the_run(how):
  controller = unending(Hangs([1], how), unfinished='stop')
  with pytest.raises(
      Unfinished, match='cancelled from|no answer for'
  ) as caught:
    virtual_time.run(first_batch(controller))
  assert 'in draw 1 sample 0' in caught.value.__notes__


@pytest.mark.parametrize('how', [raises_cancelled, never_returns])
def test_group_of_which_no_answer_comes_is_dropped_and_replaced(how):
  events = []

  async def workflow(draw, sample, version):
    if draw.draw_index == 2:
      await how()
    return records.trajectory(draw.draw_index, sample)

  controller = unending(workflow)
  controller._observe = lambda kind, draw, **about: events.append((kind, draw))
  batch = virtual_time.run(first_batch(controller))
  assert [group.draw_index for group in batch] == [0, 1, 3, 4]
  assert controller.ledger.dropped == {DropReason.UNFINISHED: 1}
  assert controller.ledger.balanced() and controller.unfinished_members == 2
  # A group that failed wholly is a failed group, though it is never trained.
  assert controller.failed_groups == 1
  assert events.count(('unfinished', 2)) == 2 and ('drop', 2) in events


@pytest.mark.parametrize('policy', ['soft', 'fifo'])
def test_hanging_answer_of_before_a_restart_is_given_up_after_it(policy):
  workflow = Hangs([0], never_returns)
  before = unending(workflow, policy=policy)

  async def cut_short():
    before.start()
    await asyncio.sleep(20)
    cut = before.snapshot()
    await before.stop()
    return cut

  cut = virtual_time.run(cut_short())
  assert [draw.draw_index for draw in cut.running] == [0]
  after = unending(workflow, policy=policy)
  after.restore(dataclasses.replace(cut, failed_groups=7))
  batch = virtual_time.run(first_batch(after))
  assert [group.draw_index for group in batch] == [0, 1, 2, 3]
  assert [s for s, _ in batch[0].failed] == [0]
  assert after.failed_groups == 8  # since the start of the run


def test_long_answer_is_not_given_up_as_long_as_an_engine_works_for_it():
  async def workflow(draw, sample, version):
    await asyncio.sleep(5000 if (draw.draw_index, sample) == (1, 0) else 1)
    return records.trajectory(draw.draw_index, sample)

  controller = unending(workflow)
  controller._served = lambda draw: draw.draw_index == 1
  batch = virtual_time.run(first_batch(controller))
  assert all(len(group.trajectories) == 2 for group in batch)
  assert controller.unfinished_members == 0


def test_answers_given_up_at_the_end_are_no_failures():
  """Our own cancellation is told from one that a workflow raises."""
  controller = unending(Hangs(range(8), never_returns), unfinished='retry')

  async def cut_short():
    controller.start()
    await asyncio.sleep(10)
    left = await controller.stop()
    return left, controller.snapshot()

  left, cut = virtual_time.run(cut_short())
  assert left == [] and len(cut.running) == 4 and cut.ledger.balanced()
  assert controller.unfinished_members == controller.retried_members == 0
  assert controller.failed_members == 0


@pytest.mark.parametrize('leaves', [SystemExit('3'), KeyboardInterrupt()])
def test_workflow_that_exits_is_an_exception_and_does_not_end_the_loop(leaves):
  async def workflow(draw, sample, version):
    raise leaves

  controller = unending(workflow)
  name = type(leaves).__name__
  with pytest.raises(RuntimeError, match=f'a workflow raised {name}'):
    virtual_time.run(first_batch(controller))


def test_workflow_that_cancels_what_is_not_its_own_ends_the_run():
  async def workflow(draw, sample, version):
    await asyncio.sleep(1)
    for task in asyncio.all_tasks():
      if task.get_name() == 'group of draw 1':
        task.cancel()
    return records.trajectory(draw.draw_index, sample)

  controller = unending(workflow)
  with pytest.raises(RuntimeError, match="'group of draw 1' was cancelled"):
    virtual_time.run(first_batch(controller))


# The circuit breaker.


def test_breaker_waits_until_it_has_seen_enough():
  breaker = Breaker(FailureSettings(breaker_answers=10, breaker_ratio=0.8))
  for _ in range(9):
    breaker.record('scoring', 'draw 1 sample 0: reward error: LookupError')
  assert breaker.tripped() is None
  breaker.record(None)
  with pytest.raises(TooManyFailures, match=r'9 of the last 10 .*90%.*LookupE'):
    raise breaker.tripped()


def test_breaker_forgets_what_is_long_ago():
  breaker = Breaker(FailureSettings(breaker_answers=10, breaker_ratio=0.8))
  for _ in range(7):
    breaker.record('scoring', 'bad')
  for _ in range(100):
    breaker.record(None)
  assert breaker.tripped() is None
  for _ in range(7):
    breaker.record('scoring', 'bad')
  assert breaker.tripped() is None
  breaker.record('scoring', 'bad')
  assert breaker.tripped() is not None


def outcomes(breaker, **counts):
  """Takes in so many answers of each kind, those with a score last."""
  scored = counts.pop('scored', 0)
  for kind, count in counts.items():
    for _ in range(count):
      breaker.record(kind, f'of kind {kind}')
  for _ in range(scored):
    breaker.record(None)
  return breaker.tripped()


@pytest.mark.parametrize(
    'counts, broken',
    [
        ({'unparseable': 20}, False),  # the policy has not learned the form
        ({'unparseable': 19, 'scored': 1}, False),
        ({'unparseable': 19, 'scoring': 1}, False),  # too few to tell
        ({'unparseable': 10, 'scoring': 10}, True),  # all that could be parsed
        ({'unparseable': 17, 'scoring': 3}, True),
        ({'unparseable': 15, 'scoring': 3, 'scored': 2}, False),
        ({'scoring': 18, 'scored': 2}, True),
        ({'workflow': 10, 'unfinished': 8, 'scored': 2}, True),
        ({'scoring': 17, 'scored': 3}, False),
    ],
)
def test_breaker_tells_a_broken_reward_from_answers_that_do_not_parse(
    counts, broken
):
  settings = FailureSettings(breaker_answers=20, breaker_ratio=0.9)
  found = outcomes(Breaker(settings), **counts)
  assert (found is not None) == broken
  if broken:
    assert 'is broken, whatever the policy writes' in str(found)
    assert 'of kind unparseable' not in str(found)  # names the failure


def test_long_row_of_unparseable_answers_ends_the_run_and_blames_the_policy():
  settings = FailureSettings(breaker_answers=20, breaker_unparseable=100)
  assert outcomes(Breaker(settings), unparseable=99, scored=1) is None
  breaker = Breaker(settings)
  outcomes(breaker, scored=50)
  assert outcomes(breaker, unparseable=99) is None
  breaker.record('unparseable', 'no number in it')
  with pytest.raises(NothingParses, match='100 answers in a row.*Nothing is b'):
    raise breaker.tripped()


def test_policy_that_learns_the_form_late_is_not_ended():
  """Under the ratio alone this run would end with its first 128 answers."""

  async def workflow(draw, sample, version):
    said = records.trajectory(draw.draw_index, sample)
    if draw.draw_index < 100:
      unread = RewardResult(RewardStatus.UNPARSEABLE)
      raise MemberFailed(
          'reward unparseable', dataclasses.replace(said, reward=unread)
      )
    return said

  controller = controller_of(workflow)
  batch = virtual_time.run(first_batch(controller))
  assert [group.draw_index for group in batch] == [100, 101, 102, 103]
  assert controller.ledger.dropped == {DropReason.FAILED: 100}


def test_ratio_below_the_limit_never_ends_a_run():
  async def workflow(draw, sample, version):
    if sample == 0:
      raise MemberFailed('reward error: half of them')
    return records.trajectory(draw.draw_index, sample)

  controller = controller_of(workflow, breaker_answers=8, breaker_ratio=0.6)

  async def go_on():
    controller.start()
    for version in range(20):
      await controller.next_batch(4)
      controller.published(version + 1)

  virtual_time.run(go_on())
  assert controller.failed_members >= 80


@pytest.mark.parametrize(
    'field, value',
    [
        ('retries', -1),
        ('engine_restarts', -1),
        ('breaker_answers', 0),
        ('breaker_unparseable', 0),
        ('breaker_ratio', 0.0),
        ('breaker_ratio', 1.5),
        ('quiet_s', 0.0),
        ('quiet_s', float('inf')),
    ],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f'{field} is'):
    resolve(FailureSettings(**{field: value}), 'config.failures')
