"""What the four staleness policies promise: CASES A10, A12; under virtual time.

Service times are random and heavy-tailed, answers fail, the trainer pauses, and
the run is cut and goes on from the cut.
"""

import asyncio
import collections
import random

from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
import numpy as np
import pytest

from areal_jax.buffer import GroupBuffer
from areal_jax.ledger import Ledger
from areal_jax.rollout.controller import Controller
from areal_jax.rollout.failures import FailureSettings
from areal_jax.rollout.workflow import MemberFailed
from areal_jax.train.batch import mask_stale
from areal_jax.train.summary import record_metrics
from areal_jax.types import DropReason
from tests import records, virtual_time

BATCH = 4
POLICIES = ('soft', 'drop', 'mask', 'fifo')


class World:
  """Engines, a trainer and one controller after another.

  An answer has a token for each second that it took, each with the version that
  was out then, so long answers have old heads.
  """

  def __init__(self, policy, eta, seed, *, failing=0.0, ledger=Ledger):
    self.policy, self.eta = policy, eta
    self.random = random.Random(seed)
    self.failing = failing
    self.ledger = ledger
    self.published = [0.0]  # when each version came out
    self.trained = []  # (version, group)
    self.tokens = collections.Counter()  # in answers that came to an end
    self.controller = self.build()

  def build(self):
    return Controller(
        draws=records.Draws(),
        workflow=self.answer,
        ledger=self.ledger(BATCH, float(self.eta)),
        buffer=GroupBuffer(self.policy, float(self.eta)),
        group_size=2,
        max_running=1000,
        clock=self.now,
        failures=FailureSettings(workflow='retry', breaker_ratio=1.0),
    )

  def now(self):
    return asyncio.get_running_loop().time()

  def seconds(self, draw, sample):
    generator = random.Random(f'{draw.draw_index} {sample}')
    tail = 20 if generator.random() < 0.05 else 1
    return generator.expovariate(1) * tail

  async def answer(self, draw, sample, admitted_version):
    seconds = self.seconds(draw, sample)
    start = self.now()
    await asyncio.sleep(seconds)
    if self.random.random() < self.failing:
      raise MemberFailed('reward error: random')
    if self.random.random() < self.failing:
      raise ConnectionError('random')
    at = start + np.linspace(0, seconds, 2 + int(seconds))
    versions = np.searchsorted(self.published, at, side='right') - 1
    versions = np.maximum(versions, admitted_version)
    return records.trajectory(
        draw.draw_index, sample, answer=[9] * len(at), versions=versions
    )

  async def train(self, steps, pause=lambda: 0.3):
    start = len(self.trained) // BATCH
    self.controller.start()
    for version in range(start, start + steps):
      groups = await self.controller.next_batch(BATCH)
      self.trained += [(version, group) for group in groups]
      await asyncio.sleep(pause())
      self.published.append(self.now())
      self.controller.published(version + 1)
      ledger = self.controller.ledger
      assert ledger.balanced() and ledger.outstanding <= ledger.limit
    await self.controller.stop()

  async def train_and_resume(self, cuts, pause):
    """Trains `cuts` steps at a time; goes on from the cut after each."""
    for steps in cuts:
      await self.train(steps, pause)
      cut = self.controller.snapshot()
      self.controller = self.build()
      self.controller.restore(cut)

  def ages(self):
    """Of the oldest token of each trained group."""
    return [version - group.head_version for version, group in self.trained]

  def loss_ages(self):
    """Of every token that comes into a loss."""
    limit = self.eta if self.policy == 'mask' else float('inf')
    return [
        version - v
        for version, group in self.trained
        for t in mask_stale(group, version, limit).trajectories
        for v in t.versions[t.loss_mask > 0].tolist()
    ]


@hypothesis_settings(max_examples=60, deadline=None)
@given(
    policy=st.sampled_from(POLICIES),
    eta=st.integers(0, 3),
    seed=st.integers(0, 10_000),
    failing=st.sampled_from([0.0, 0.1, 0.3]),
    pauses=st.lists(st.sampled_from([0.0, 0.3, 3.0]), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
def test_what_each_policy_promises(policy, eta, seed, failing, pauses, cuts):
  world = World(policy, eta, seed, failing=failing)
  turn = iter(range(10**6))
  virtual_time.run(
      world.train_and_resume(cuts, lambda: pauses[next(turn) % len(pauses)])
  )
  ledger = world.controller.ledger
  indices = [group.draw_index for _, group in world.trained]
  # All four: whole batches, no draw twice, everything has one place.
  assert len(indices) == len(set(indices)) == BATCH * sum(cuts)
  assert ledger.trained == len(indices) and ledger.balanced()
  stale = ledger.dropped[DropReason.STALE]
  if policy == 'drop':
    assert max(world.ages()) <= eta
  elif policy == 'fifo':
    assert max(world.ages()) <= eta and stale == 0
    assert indices == sorted(indices)
  elif policy == 'mask':
    assert max(world.loss_ages(), default=0) <= eta and stale == 0
  else:
    assert stale == 0
  if eta == 0:
    assert set(world.ages()) == {0}
  # What `soft` may exceed is reported.
  for version in range(sum(cuts)):
    groups = [g for v, g in world.trained if v == version]
    limit = eta if policy == 'mask' else float('inf')
    masked = [mask_stale(group, version, limit) for group in groups]
    told = record_metrics(
        groups, version, [[t for g in masked for t in g.trajectories]]
    )
    ages = [version - g.head_version for g in groups]
    assert told['head_staleness_max'] == max(ages)
    if policy == 'mask':
      assert told.get('staleness_max', 0) <= eta


@pytest.mark.parametrize('policy', ['soft', 'mask'])
def test_heads_older_than_eta_do_come_under(policy):
  """So the promises above are not kept by a world that never tests them."""
  world = World(policy, 1, 0)
  virtual_time.run(world.train(30))
  assert max(world.ages()) > 1
  if policy == 'mask':
    masked = [
        sum(int((t.loss_mask > 0).sum()) for t in group.trajectories)
        - sum(
            int((t.loss_mask > 0).sum())
            for t in mask_stale(group, version, 1).trajectories
        )
        for version, group in world.trained
    ]
    assert sum(masked) > 0
    # The answers stay, rewards and all: only tokens leave the loss.
    assert all(len(group.trajectories) == 2 for _, group in world.trained)


class Leaky(Ledger):
  """Planted fault: a batch stops counting when its training starts."""

  @property
  def outstanding(self):
    return self.running + self.ready

  def admits(self):
    return self.outstanding < self.limit


def test_room_made_when_training_starts_shifts_every_age_by_one():
  """The off-by-one trap: `fifo` then trains tokens η + 1 versions old."""

  def oldest(ledger):
    world = World('fifo', 2, 3, ledger=ledger)
    virtual_time.run(world.train(30, lambda: 2.0))
    return max(world.ages())

  assert oldest(Ledger) == 2
  assert oldest(Leaky) == 3


def test_mask_is_by_the_token_and_leaves_the_group():
  group = records.group(0)
  old = records.trajectory(0, 0, answer=[1, 2, 3], versions=[3, 4, 5])
  new = records.trajectory(0, 1, answer=[1, 2], versions=[5, 5])
  group = group.__class__(**{**vars(group), 'trajectories': (old, new)})
  masked = mask_stale(group, 6, 1)
  assert masked.trajectories[0].loss_mask.tolist() == [0, 0, 0, 0, 1]
  assert masked.trajectories[1].loss_mask.tolist() == [0, 0, 1, 1]
  assert masked.trajectories[0].reward == old.reward
  assert masked.trajectories[0].loss_mask.dtype == np.float32
  assert mask_stale(group, 6, 3) is group  # nothing is too old
  # Planted fault: counting an age one too low lets version 4 through.
  assert mask_stale(group, 5, 1).trajectories[0].loss_mask.tolist() != (
      masked.trajectories[0].loss_mask.tolist()
  )


# CASES A12: what is generated is what is trained.


class SlowPrompt(World):
  """Ten prompts; the eighth takes five times as long as a step."""

  def seconds(self, draw, sample):
    return 5.0 if draw.draw_index % 10 == 7 else 0.5


@pytest.mark.parametrize('policy', POLICIES)
def test_slow_prompt_is_trained_or_the_difference_is_told(policy):
  world = SlowPrompt(policy, 1, 0)
  virtual_time.run(world.train(100, lambda: 1.0))
  lengths = [
      int((t.versions >= 0).sum())
      for _, group in world.trained
      for t in group.trajectories
  ]
  slow = [g.draw_index for _, g in world.trained if g.draw_index % 10 == 7]
  costs, ledger = world.controller.costs, world.controller.ledger
  assert costs.trained_tokens == sum(lengths)
  if policy == 'drop':
    assert not slow
    assert ledger.dropped[DropReason.STALE] >= 20
    assert costs.dropped_tokens >= 20 * 2 * 7
    assert costs.length_bias < -0.1
    return
  epochs = {index // 10 for index in slow}
  done = max(g.draw_index for _, g in world.trained) // 10
  # Once an epoch; what is under way at the end may be missing.
  assert set(range(done - 2)) <= epochs
  assert costs.dropped_tokens == 0 and costs.length_bias == 0
  assert ledger.dropped.total() == 0
  share = np.mean([length > 3 for length in lengths])
  assert share == pytest.approx(0.1, abs=0.02)
