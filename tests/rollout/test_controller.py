"""The controller under virtual time: CASES A11, A16 and invariants 1 to 3."""

import asyncio
import collections
import random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import pytest

from areal_jax.buffer import GroupBuffer
from areal_jax.ledger import Ledger
from areal_jax.rollout.controller import Controller, TooManyFailures
from areal_jax.rollout.workflow import MemberFailed
from areal_jax.types import DropReason
from tests import records, virtual_time


class Engine:
  """Answers after a service time, with the versions of its start and end."""

  def __init__(self, service):
    self.version = 0
    self.service = service

  async def workflow(self, draw, sample, admitted_version):
    first = self.version
    await asyncio.sleep(self.service(draw.draw_index, sample))
    return records.trajectory(
        draw.draw_index, sample, versions=[first, self.version]
    )


def build(workflow, *, batch=4, eta=1.0, policy='soft', group=2, most=1000):
  return Controller(
      draws=records.Draws(),
      workflow=workflow,
      ledger=Ledger(batch, eta),
      buffer=GroupBuffer(policy, eta),
      group_size=group,
      max_running=most,
      clock=lambda: asyncio.get_running_loop().time(),
  )


async def train(controller, engine, steps, *, seconds=0.3, batch=4):
  """Trains `steps` batches; returns (version, group) pairs in order."""
  trained = []
  controller.start()
  for version in range(steps):
    groups = await controller.next_batch(batch)
    trained += [(version, g) for g in groups]
    await asyncio.sleep(seconds)
    engine.version = version + 1  # the engines swap first,
    controller.published(version + 1)  # then room is made
    assert controller.ledger.balanced()
  return trained


def ages(trained):
  return [version - group.head_version for version, group in trained]


def random_service(seed, slow=0.02):
  rng = random.Random(seed)
  times = collections.defaultdict(
      lambda: rng.expovariate(1) * (20 if rng.random() < slow else 1)
  )
  return lambda draw, sample: times[draw, sample]


@pytest.mark.parametrize('policy', ['soft', 'drop', 'fifo'])
@pytest.mark.parametrize('seed', range(3))
def test_eta_zero_trains_only_tokens_of_the_current_version(policy, seed):
  engine = Engine(random_service(seed))
  controller = build(engine.workflow, eta=0.0, policy=policy)
  trained = virtual_time.run(train(controller, engine, 20))
  for version, group in trained:
    for trajectory in group.trajectories:
      sampled = trajectory.versions[trajectory.loss_mask > 0]
      assert (sampled == version).all()


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(['drop', 'fifo']),
    eta=st.integers(0, 3),
    seed=st.integers(0, 10_000),
    seconds=st.sampled_from([0.0, 0.3, 3.0]),
)
def test_hard_policies_never_train_a_head_older_than_eta(
    policy, eta, seed, seconds
):
  engine = Engine(random_service(seed))
  controller = build(engine.workflow, eta=float(eta), policy=policy)
  trained = virtual_time.run(train(controller, engine, 12, seconds=seconds))
  assert max(ages(trained)) <= eta


def test_soft_exceeds_eta_where_fifo_does_not():
  # Why the hard policies exist; also shows that the property above can fail.
  engine = Engine(random_service(0))
  controller = build(engine.workflow, eta=1.0, policy='soft')
  trained = virtual_time.run(train(controller, engine, 40))
  assert max(ages(trained)) > 1


def test_room_made_before_publishing_breaks_the_bound():
  """Planted fault: the batch in training no longer counts as outstanding."""

  class Leaky(Ledger):

    @property
    def outstanding(self):
      return self.running + self.ready

  engine = Engine(random_service(1))
  controller = build(engine.workflow, eta=1.0, policy='fifo')
  controller.ledger = Leaky(4, 1.0)
  controller.start = lambda: None

  async def faulty():
    controller._admission = asyncio.create_task(controller._admit())
    trained = []
    for version in range(12):
      groups = await controller.next_batch(4)
      trained += [(version, g) for g in groups]
      controller._wake()
      await asyncio.sleep(2.0)
      engine.version = version + 1
      controller.published(version + 1)
    return trained

  assert max(ages(virtual_time.run(faulty()))) > 1


def test_every_draw_is_trained_once_or_in_flight():
  engine = Engine(random_service(5))
  controller = build(engine.workflow, eta=2.0)
  trained = virtual_time.run(train(controller, engine, 15))
  indices = [g.draw_index for _, g in trained]
  assert len(indices) == len(set(indices)) == 60
  cut = controller.snapshot()
  waiting = [g.draw_index for g in cut.ready] + [
      d.draw_index for d in cut.running
  ]
  assert sorted(indices + waiting) == list(range(cut.data['next']))
  assert cut.ledger.drawn == cut.data['next']


def test_batches_are_sorted_by_draw():
  engine = Engine(random_service(2))
  controller = build(engine.workflow)
  trained = virtual_time.run(train(controller, engine, 5))
  for start in range(0, 20, 4):
    batch = [g.draw_index for _, g in trained[start : start + 4]]
    assert batch == sorted(batch)


def test_dropped_groups_are_counted_with_their_reason():
  engine = Engine(random_service(3, slow=0.2))
  controller = build(engine.workflow, eta=0.0 + 1, policy='drop')
  virtual_time.run(train(controller, engine, 30, seconds=0.1))
  ledger = controller.ledger
  assert ledger.dropped[DropReason.STALE] > 0
  assert ledger.balanced()


def test_failed_member_leaves_and_its_group_goes_on():
  engine = Engine(lambda draw, sample: 1.0)

  async def workflow(draw, sample, version):
    if draw.draw_index == 1 and sample == 0:
      raise MemberFailed('reward timeout: 2 s')
    return await engine.workflow(draw, sample, version)

  controller = build(workflow, eta=0.0)
  trained = virtual_time.run(train(controller, engine, 1))
  group = next(g for _, g in trained if g.draw_index == 1)
  assert group.size == 2 and len(group.trajectories) == 1
  assert group.failed == ((0, 'reward timeout: 2 s'),)
  assert group.trajectories[0].sample == 1


def test_group_without_a_score_is_dropped_and_replaced():
  engine = Engine(lambda draw, sample: 1.0)

  async def workflow(draw, sample, version):
    if draw.draw_index % 2:
      raise MemberFailed('reward error: ZeroDivisionError')
    return await engine.workflow(draw, sample, version)

  controller = build(workflow)
  trained = virtual_time.run(train(controller, engine, 3))
  assert all(g.draw_index % 2 == 0 for _, g in trained)
  assert controller.ledger.dropped[DropReason.FAILED] >= 10


def test_endless_failure_ends_the_run_with_its_reason():

  async def workflow(draw, sample, version):
    raise MemberFailed('reward error: no module named sympy')

  controller = build(workflow)

  async def wait():
    controller.start()
    await controller.next_batch(4)

  with pytest.raises(TooManyFailures, match='16 groups .* named sympy'):
    virtual_time.run(wait())


def test_exception_of_a_workflow_reaches_the_trainer():

  async def workflow(draw, sample, version):
    await asyncio.sleep(1)
    raise KeyError('answer')

  controller = build(workflow)

  async def wait():
    controller.start()
    start = asyncio.get_running_loop().time()
    try:
      await controller.next_batch(4)
    finally:
      assert asyncio.get_running_loop().time() - start < 2

  with pytest.raises(KeyError, match='answer'):
    virtual_time.run(wait())


def test_running_groups_are_limited_whatever_eta_admits():
  seen = []

  async def workflow(draw, sample, version):
    seen.append(controller.ledger.running)
    await asyncio.sleep(1)
    return records.trajectory(draw.draw_index, sample)

  controller = build(workflow, eta=float('inf'), most=3)
  engine = Engine(None)
  virtual_time.run(train(controller, engine, 4))
  assert max(seen) == 3


def test_stop_leaves_running_draws_in_flight():
  engine = Engine(lambda draw, sample: 5.0)
  controller = build(engine.workflow)

  async def cut_short():
    controller.start()
    await asyncio.sleep(1)
    await controller.stop()

  virtual_time.run(cut_short())
  assert controller.ledger.outstanding == 8
  assert len(controller.snapshot().running) == 8
  assert controller.ledger.balanced()


def test_explanation_names_the_running_draws():
  engine = Engine(lambda draw, sample: 5.0)
  controller = build(engine.workflow, eta=0.0)

  async def look():
    controller.start()
    await asyncio.sleep(1)
    return controller.explain()

  text = virtual_time.run(look())
  assert '4 groups running (draws 0, 1, 2, 3)' in text and 'limit 4' in text
