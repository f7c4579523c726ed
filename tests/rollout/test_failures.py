"""Policies by kind of failure under virtual time, and the circuit breaker."""

import asyncio
import collections

import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.rollout.failures import (
    Breaker,
    FailureSettings,
    TooManyFailures,
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
  assert controller.failed_members == 1


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


# The circuit breaker.


def test_breaker_waits_until_it_has_seen_enough():
  breaker = Breaker(FailureSettings(breaker_answers=10, breaker_ratio=0.8))
  for _ in range(9):
    breaker.record('draw 1 sample 0: reward error: LookupError')
  assert breaker.tripped() is None
  breaker.record(None)
  with pytest.raises(TooManyFailures, match=r'9 of the last 10 .*90%.*LookupE'):
    raise breaker.tripped()


def test_breaker_forgets_what_is_long_ago():
  breaker = Breaker(FailureSettings(breaker_answers=10, breaker_ratio=0.8))
  for _ in range(7):
    breaker.record('bad')
  for _ in range(100):
    breaker.record(None)
  assert breaker.tripped() is None
  for _ in range(7):
    breaker.record('bad')
  assert breaker.tripped() is None
  breaker.record('bad')
  assert breaker.tripped() is not None


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
        ('breaker_ratio', 0.0),
        ('breaker_ratio', 1.5),
        ('quiet_s', 0.0),
        ('quiet_s', float('inf')),
    ],
)
def test_settings_that_cannot_work_are_refused(field, value):
  with pytest.raises(ConfigError, match=f'{field} is'):
    resolve(FailureSettings(**{field: value}), 'config.failures')
