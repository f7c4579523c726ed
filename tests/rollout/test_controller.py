"""The controller under virtual time: CASES A10, A11, A16, A17."""

import asyncio
import collections
import dataclasses
import random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import pytest

from areal_jax import records as record_bytes
from areal_jax.buffer import GroupBuffer
from areal_jax.ledger import Ledger
from areal_jax.rollout.controller import Controller, Snapshot
from areal_jax.rollout.failures import TooManyFailures
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


def build(
    workflow,
    *,
    batch=4,
    eta=1.0,
    policy='soft',
    group=2,
    most=1000,
    ready=float('inf'),
    informative=None,
    limit=0,
    failures=None,
    group_s=float('inf'),
):
  return Controller(
      draws=records.Draws(),
      workflow=workflow,
      ledger=Ledger(batch, eta),
      buffer=GroupBuffer(policy, eta),
      group_size=group,
      max_running=most,
      max_ready=ready,
      clock=lambda: asyncio.get_running_loop().time(),
      informative=informative,
      uninformative_limit=limit,
      failures=failures,
      group_s=group_s,
  )


async def train(
    controller, engine, steps, *, seconds=0.3, batch=4, first=0, cuts=None
):
  """Trains up to version `steps`; returns (version, group) pairs in order.

  Puts the cut at each version into `cuts`.
  """
  trained = []
  controller.start()
  for version in range(first, steps):
    groups = await controller.next_batch(batch)
    trained += [(version, g) for g in groups]
    await asyncio.sleep(seconds)
    engine.version = version + 1  # the engines swap first,
    controller.published(version + 1)  # then room is made
    if cuts is not None:
      cuts[version + 1] = controller.snapshot()
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

  with pytest.raises(
      TooManyFailures, match='128 of the last 128 .* named sympy'
  ):
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


def test_one_long_answer_does_not_hold_the_room_of_its_siblings():
  asked, answered, most = 0, 0, 0

  async def workflow(draw, sample, version):
    nonlocal asked, answered, most
    asked += 1
    most = max(most, asked - answered)
    await asyncio.sleep(100 if sample == 0 else 1)
    answered += 1
    return records.trajectory(draw.draw_index, sample)

  controller = build(workflow, eta=float('inf'), group=8, most=2)

  async def look():
    controller.start()
    await asyncio.sleep(50)
    await controller.stop()

  virtual_time.run(look())
  # Room for 16 answers: two groups at first, another one for every seven that
  # are short, until eight answers of 100 seconds leave too little for a group.
  assert controller.ledger.running == 9
  assert most == 16


@pytest.mark.parametrize('policy', ['soft', 'drop', 'fifo'])
def test_waiting_groups_are_bounded_where_eta_is_not(policy):
  engine = Engine(random_service(3))
  waiting = []

  async def watched(draw, sample, admitted_version):
    waiting.append(controller.ledger.ready)
    return await engine.workflow(draw, sample, admitted_version)

  controller = build(watched, eta=float('inf'), policy=policy, most=3, ready=6)
  # Twenty batches of slow training: without the bound hundreds would wait.
  trained = virtual_time.run(train(controller, engine, 20, seconds=30.0))
  assert len(trained) == 80
  assert max(waiting) < 6
  assert controller.ready_pauses >= 10
  # Under way at a pause: two groups' worth of answers at one a group, one more.
  assert 6 <= controller.ledger.ready < 6 + 2 * 2 + 1

  free = build(engine.workflow, eta=float('inf'), policy='soft', most=3)
  engine.version = 0
  virtual_time.run(train(free, engine, 5, seconds=30.0))
  assert free.ledger.ready > 20 and free.ready_pauses == 0


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
  assert 'draw 2 waits for samples [0, 1] of 2, for 1.0 s' in text


def test_publishing_never_waits_for_a_rollout():
  # CASES A13: with all room taken by one that sleeps, it returns at once.
  engine = Engine(lambda draw, sample: 5.0 if draw == 3 else 0.5)
  controller = build(engine.workflow, eta=0.0, batch=3, most=4)

  async def publish():
    loop = asyncio.get_running_loop()
    controller.start()
    await controller.next_batch(3)
    start = loop.time()
    controller.published(1)
    await asyncio.sleep(0)
    return loop.time() - start

  assert virtual_time.run(publish()) < 0.1


def test_answer_that_never_comes_is_named():
  # CASES A15 (b): the explanation names what is missing, and for how long.
  async def workflow(draw, sample, version):
    if (draw.draw_index, sample) == (1, 1):
      await asyncio.Event().wait()
    return records.trajectory(draw.draw_index, sample)

  controller = build(workflow, eta=0.0, policy='fifo')

  async def look():
    controller.start()
    await asyncio.wait([asyncio.create_task(controller.next_batch(4))],
                       timeout=40)  # fmt: skip
    return controller.explain()

  text = virtual_time.run(look())
  assert '1 groups running (draws 1), 3 ready' in text
  assert 'draw 1 waits for samples [1] of 2, for 40.0 s' in text


# Going on from a cut: CASES A10, A17.


def saved_and_read(cut):
  """A cut as a checkpoint brings it back: another object in every part."""
  kept = record_bytes.loads(
      record_bytes.dumps({'ready': cut.ready, 'running': cut.running})
  )
  return dataclasses.replace(cut, **kept, data=dict(cut.data))


def cut_at(version, *, batch=8, eta=2.0, ready=0, running=0):
  """A balanced cut late in a run."""
  drawn = version * batch + ready + running
  first = version * batch
  return Snapshot(
      ledger=Ledger(
          batch,
          eta,
          version=version,
          running=running,
          ready=ready,
          drawn=drawn,
          trained=version * batch,
      ),
      ready=tuple(
          records.group(first + i, version=version) for i in range(ready)
      ),
      running=tuple(records.draw(first + ready + i) for i in range(running)),
      data={'next': drawn},
  )


@pytest.mark.parametrize(
    'ready, running, admitted', [(0, 0, 24), (5, 3, 16), (0, 24, 0)]
)
def test_first_burst_after_a_restart_is_bounded(ready, running, admitted):
  # CASES A10: η=2, B=8, restored at version 100; counting from 0 admits 824.
  started = []

  async def workflow(draw, sample, version):
    started.append((draw.draw_index, draw.attempt, version))
    await asyncio.sleep(1000)

  controller = build(workflow, batch=8, eta=2.0, group=1)
  controller.restore(saved_and_read(cut_at(100, ready=ready, running=running)))

  async def look():
    controller.start()
    await asyncio.sleep(1)
    await controller.stop()

  virtual_time.run(look())
  again = [s for s in started if s[1] == 1]
  assert started[: len(again)] == again  # those of before come first
  assert [index for index, _, _ in again] == [
      800 + ready + i for i in range(running)
  ]
  assert len(started) - len(again) == admitted
  assert {version for _, _, version in started} == {100}
  assert controller.ledger.outstanding == 24 and controller.ledger.balanced()


def test_planted_ledger_that_counts_from_zero_admits_too_many():
  """The fault of CASES A10: versions go on, accepted groups start at 0."""

  class Cumulative(Ledger):

    def admits(self):
      return self.drawn < (self.version + self.eta + 1) * self.batch_size

  ledger = Cumulative(8, 2.0, version=100)
  admitted = 0
  while ledger.admits():
    ledger.admit()
    admitted += 1
  assert admitted == 824


@pytest.mark.parametrize('policy', ['drop', 'fifo'])
@pytest.mark.parametrize('seed', range(3))
def test_bound_holds_after_a_restart(policy, seed):
  engine = Engine(random_service(seed))
  controller = build(engine.workflow, eta=2.0, policy=policy)
  virtual_time.run(train(controller, engine, 7))
  engine = Engine(random_service(seed + 1))
  engine.version = 7
  resumed = build(engine.workflow, eta=2.0, policy=policy)
  resumed.restore(saved_and_read(controller.snapshot()))
  trained = virtual_time.run(train(resumed, engine, 57, first=7))
  assert len(trained) == 50 * 4
  assert max(ages(trained)) <= 2


def test_kills_lose_and_repeat_no_problem():
  """CASES A17: 64 problems, B=4, killed at steps 3, 7 and 11.

  What was done since the last cut, a step or more, is gone with the process.
  """
  lineage, cut, seed = [], None, 0
  for first, last in ((0, 3), (2, 7), (6, 11), (9, 16)):
    engine = Engine(random_service(seed := seed + 1, slow=0.2))
    engine.version = first
    controller = build(engine.workflow, eta=1.0)
    if cut is not None:
      controller.restore(saved_and_read(cut))
    cuts = {}
    trained = virtual_time.run(
        train(controller, engine, last, first=first, cuts=cuts)
    )
    following = {3: 2, 7: 6, 11: 9, 16: 16}[last]  # the last cut before
    cut = cuts[following]
    lineage += [g for version, g in trained if version < following]
  done = [g.draw_index for g in lineage]
  assert len(done) == len(set(done)) == 64
  waiting = [g.draw_index for g in cut.ready]
  waiting += [d.draw_index for d in cut.running]
  assert sorted(done + waiting) == list(range(cut.data['next']))
  assert any(g.draw.attempt for g in lineage)  # some were generated again
  assert cut.ledger.trained == 64 and cut.ledger.balanced()


def test_groups_in_training_come_back_ready():
  engine = Engine(lambda draw, sample: 1.0)
  controller = build(engine.workflow, eta=1.0)

  async def cut_in_a_step():
    controller.start()
    batch = await controller.next_batch(4)
    return batch, controller.snapshot()

  batch, cut = virtual_time.run(cut_in_a_step())
  assert list(cut.ready[:4]) == batch
  assert cut.ledger.training == 0 and cut.ledger.balanced()
  resumed = build(engine.workflow, eta=1.0)
  resumed.restore(cut)
  again = virtual_time.run(resumed.next_batch(4))
  assert [g.draw_index for g in again] == [g.draw_index for g in batch]


def test_fifo_after_a_restart_waits_for_what_was_running():
  cut = cut_at(3, batch=4, ready=3, running=2)
  # Draws 12..14 wait behind 10 and 11, which were under way.
  cut = dataclasses.replace(cut, running=(records.draw(11), records.draw(10)))
  engine = Engine(lambda draw, sample: 5.0)
  engine.version = 3
  controller = build(engine.workflow, batch=4, eta=2.0, policy='fifo')
  controller.restore(cut)
  trained = virtual_time.run(train(controller, engine, 4, first=3))
  assert [g.draw_index for _, g in trained] == [10, 11, 12, 13]


def test_smaller_bound_after_a_restart_drains_first():
  controller = build(None, batch=8, eta=0.0)
  controller.restore(cut_at(5, ready=12, running=4))
  assert controller.ledger.limit == 8
  assert not controller.ledger.admits()


def test_cut_whose_counts_are_not_its_groups_is_refused():
  cut = cut_at(3, ready=2)
  with pytest.raises(ValueError, match=r'\(0, 2, 0\).*its groups are \(0, 1'):
    build(None).restore(dataclasses.replace(cut, ready=cut.ready[:1]))


def every_third(group):
  return group.draw_index % 3 == 0


@hypothesis_settings(max_examples=25, deadline=None)
@given(
    policy=st.sampled_from(['soft', 'drop', 'fifo']),
    eta=st.integers(0, 3),
    seed=st.integers(0, 10_000),
)
def test_batches_are_filled_with_informative_groups_alone(policy, eta, seed):
  """The others are counted, the bounds hold, every draw has one place."""
  engine = Engine(random_service(seed))
  controller = build(
      engine.workflow,
      eta=float(eta),
      policy=policy,
      informative=every_third,
      limit=1000,
  )
  cuts = {}
  trained = virtual_time.run(train(controller, engine, 10, cuts=cuts))
  assert len(trained) == 40
  assert all(every_third(group) for _, group in trained)
  if policy != 'soft':
    assert max(ages(trained)) <= eta
  ledger = cuts[10].ledger
  assert ledger.dropped[DropReason.UNINFORMATIVE] > 0
  for cut in cuts.values():
    assert cut.ledger.balanced()
    assert cut.ledger.outstanding <= cut.ledger.limit


def test_at_eta_zero_the_data_alone_say_which_groups_are_trained():
  seen = set()
  for seed in range(4):
    engine = Engine(random_service(seed))
    controller = build(
        engine.workflow, eta=0.0, informative=every_third, limit=3, most=2
    )
    trained = virtual_time.run(train(controller, engine, 6))
    seen.add(tuple((v, group.draw_index) for v, group in trained))
  assert len(seen) == 1


def test_endless_uninformative_groups_do_not_hold_a_step_up():
  """After the limit they are trained as they are; B more may be under way."""
  engine = Engine(lambda draw, sample: 1.0)
  controller = build(
      engine.workflow, eta=0.0, informative=lambda group: False, limit=8
  )
  trained = virtual_time.run(train(controller, engine, 3))
  assert [version for version, _ in trained] == [0] * 4 + [1] * 4 + [2] * 4
  dropped = controller.ledger.dropped[DropReason.UNINFORMATIVE]
  assert 8 * 3 <= dropped <= (8 + 4) * 3


def test_without_a_limit_on_drops_such_a_step_would_not_end():
  engine = Engine(lambda draw, sample: 1.0)
  controller = build(
      engine.workflow, eta=0.0, informative=lambda group: False, limit=10**9
  )

  async def step():
    controller.start()
    async with asyncio.timeout(1000):
      await controller.next_batch(4)

  with pytest.raises(TimeoutError):
    virtual_time.run(step())
