"""Pause, resume, publish, save and evaluate in any order: CASES A13, A14.

Under virtual time a loop in which every task waits and no timer is set raises,
so a deadlock is found as one and not as a test that runs out of time. With real
engine loops it is threads that meet, a thousand operations of them.
"""

import asyncio
import dataclasses
import random
import threading
import time

import pytest

from areal_jax.buffer import GroupBuffer
from areal_jax.ledger import Ledger
from areal_jax.mesh.rules import Rules
from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.controller import Controller
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.loop import EngineLoop
from areal_jax.telemetry.events import EventLog
from areal_jax.types import Purpose
from tests import records, tiny, virtual_time
from tests.limits import WAIT_S, wait_until
from tests.rollout.test_loop import SETTINGS

BATCH = 3
LIMIT = 1e4  # virtual seconds that no wait comes near to


class Replica:
  """An engine loop in virtual time: answers after a while, may be aborted."""

  def __init__(self, seconds):
    self.seconds = seconds
    self.load = 0
    self.timers = {}

  def submit(self, request, answer):
    self.load += 1
    loop = asyncio.get_running_loop()

    ticket = object()

    def done():
      self.load -= 1
      del self.timers[ticket]
      answer(request)

    self.timers[ticket] = loop.call_later(self.seconds(), done)
    return ticket

  def health(self):
    return 'busy'

  def abort(self, tickets):
    for ticket in tickets:
      timer = self.timers.pop(ticket, None)
      if timer is not None:
        timer.cancel()
        self.load -= 1


class World:
  """One controller after another, a trainer, a saver and an evaluator."""

  def __init__(self, seed):
    self.random = random.Random(seed)
    self.client = EngineClient(
        [Replica(lambda: self.random.expovariate(1)) for _ in range(2)]
    )
    self.policy = self.random.choice(['soft', 'drop', 'mask', 'fifo'])
    self.eta = float(self.random.choice([0, 1, 4]))
    self.version = 0
    self.trained = []
    self.saved = self.paused = 0
    self.asked = self.answers = 0
    self.controller = self.build()

  def build(self):
    return Controller(
        draws=records.Draws(),
        workflow=self.answer,
        ledger=Ledger(BATCH, self.eta),
        buffer=GroupBuffer(self.policy, self.eta),
        group_size=2,
        max_running=1000,
        clock=lambda: asyncio.get_running_loop().time(),
    )

  async def answer(self, draw, sample, admitted_version):
    first = self.version
    name = f'{draw.draw_index}/{draw.attempt}/{sample}'
    await self.client.generate(tiny.request(name, draw=draw.draw_index))
    return records.trajectory(
        draw.draw_index, sample, versions=[first, self.version]
    )

  async def train(self):
    groups = await self.controller.next_batch(BATCH)
    self.trained += [group.draw_index for group in groups]
    await asyncio.sleep(self.random.choice([0, 0.1, 2]))
    self.version += 1
    self.controller.published(self.version)

  async def save(self):
    cut = self.controller.snapshot()
    held = len(cut.ready) + len(cut.running)
    assert cut.ledger.balanced() and cut.ledger.outstanding == held
    self.saved += 1

  async def pause_and_resume(self):
    """What a preemption does: everything under way is given up."""
    cut = self.controller.snapshot()
    await self.controller.stop()
    self.controller = self.build()
    self.controller.restore(cut)
    await asyncio.sleep(self.random.choice([0, 5]))
    self.controller.start()
    self.paused += 1

  async def evaluate(self):
    self.asked += 1
    requests = [
        dataclasses.replace(
            tiny.request(f'eval/{self.asked}/{i}', draw=i),
            purpose=Purpose.EVAL,
        )
        for i in range(3)
    ]
    await asyncio.gather(*(self.client.generate(r) for r in requests))
    self.answers += 3

  async def run(self, operations):
    """The trainer's operations in turn, others beside it when they come."""
    self.controller.start()
    beside = []
    for _ in range(operations):
      chosen = self.random.choice(
          [self.train, self.train, self.save, self.evaluate,
           self.pause_and_resume]
      )  # fmt: skip
      async with asyncio.timeout(LIMIT):
        if chosen == self.evaluate or self.random.random() < 0.2:
          beside.append(asyncio.create_task(self.evaluate()))
        else:
          await chosen()
    async with asyncio.timeout(LIMIT):
      await self.train()  # whatever came before, it goes on
      await asyncio.gather(*beside)
    await self.controller.stop()


def test_a_thousand_random_interleavings_end():
  saved = answers = paused = published = 0
  for seed in range(1000):
    world = World(seed)
    virtual_time.run(world.run(6))
    assert (
        len(world.trained) == len(set(world.trained)) == BATCH * world.version
    )
    assert world.controller.ledger.balanced()
    saved, answers = saved + world.saved, answers + world.answers
    paused, published = paused + world.paused, published + world.version
  # Of each kind about a thousand or more.
  assert min(saved, paused, published, answers // 3) > 800


def test_an_answer_that_never_comes_is_found_as_a_deadlock():
  """Planted fault: without it the test above could not fail."""
  world = World(0)

  async def never(draw, sample, admitted_version):
    await asyncio.Event().wait()

  world.answer = never
  world.controller = world.build()

  async def train():
    world.controller.start()
    await world.train()

  with pytest.raises(RuntimeError, match='a deadlock'):
    virtual_time.run(train())


def test_a_thousand_operations_on_real_loops_end():
  """Two loops of one engine: one trains, one evaluates; threads that meet."""
  engine = Engine(tiny.config(), SETTINGS, tiny.mesh(), Rules())
  turns = threading.Lock()
  loops = [
      EngineLoop(
          engine, name, swap=swap, events=EventLog(None), dispatch_lock=turns
      )
      for name, swap in (('0', 'recompute'), ('evaluate/0', 'drain'))
  ]
  weights = [tiny.params(0), tiny.params(1)]
  chosen = random.Random(0)
  lock, asked, answered = threading.Lock(), 0, []
  tickets = []
  for loop in loops:
    loop.set_weights(0, weights[0], lambda taken: None)
    loop.start()
  for number in range(1000):
    loop = chosen.choice(loops)
    operation = chosen.choice(['publish', 'ask', 'ask', 'abort', 'look'])
    if operation == 'publish':
      loop.set_weights(number, weights[number % 2], lambda taken: None)
    elif operation == 'ask':
      request = tiny.request(f'{number}', new=chosen.randint(1, 6), draw=number)

      def answer(outcome):
        with lock:
          answered.append(outcome)

      tickets.append((loop, loop.submit(request, answer)))
      asked += 1
    elif operation == 'abort':
      if tickets:
        loop, ticket = chosen.choice(tickets)
        loop.abort([ticket])
    else:
      loop.explain()
    if chosen.random() < 0.1:
      time.sleep(0.002)
  wait_until(lambda: len(answered) >= asked, 'an answer to each request')
  for loop in loops:
    loop.stop()
    assert loop.failure() is None
  assert len(answered) == asked > 300


def test_nobody_waits_for_a_loop_to_be_told(monkeypatch):
  """CASES A13: all that can be asked of a loop returns in mid-dispatch."""
  engine = Engine(tiny.config(), SETTINGS, tiny.mesh(), Rules())
  begun, gate = threading.Event(), threading.Event()
  decode = engine.generate_steps

  def held(*args):
    begun.set()
    assert gate.wait(WAIT_S)
    return decode(*args)

  monkeypatch.setattr(engine, 'generate_steps', held)
  loop = EngineLoop(engine, '0', swap='recompute', events=EventLog(None))
  weights, answered = [tiny.params(0), tiny.params(1)], []
  loop.set_weights(0, weights[0], lambda taken: None)
  loop.start()
  ticket = loop.submit(tiny.request('a', new=6), answered.append)
  assert begun.wait(WAIT_S)
  loop.submit(tiny.request('b', new=6, draw=1), answered.append)
  loop.set_weights(1, weights[1], lambda taken: None)
  loop.abort([ticket])
  assert loop.health() == 'busy' and loop.explain()
  assert not answered  # the dispatch is still under way
  gate.set()
  wait_until(lambda: len(answered) == 2, 'an answer to each request')
  loop.stop()
  assert loop.failure() is None
