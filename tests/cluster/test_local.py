"""The event loop in a thread of its own, and how it ends."""

import asyncio
import threading

import pytest

from areal_jax.cluster.local import AsyncThread, Stalled


def test_loop_is_stopped_from_a_thread_that_has_a_running_loop():
  """As in a notebook, whose cells run on a loop of the kernel's."""
  ended = []

  async def endless():
    try:
      await asyncio.Event().wait()
    except asyncio.CancelledError:
      ended.append('cancelled')
      raise

  async def cell():
    thread = AsyncThread('controller')
    thread.spawn(endless())
    assert thread.call(lambda: 7) == 7
    thread.stop()

  asyncio.run(cell())
  assert ended == ['cancelled']


async def stubborn(gate):
  """Swallows every cancellation until the gate is open."""
  while not gate.is_set():
    try:
      await asyncio.sleep(0.01)
    except asyncio.CancelledError:
      pass


def test_task_that_swallows_its_cancellation_is_left_behind_by_name():
  told, gate = [], threading.Event()

  async def start():
    return asyncio.create_task(stubborn(gate), name='tool of draw 3')

  thread = AsyncThread('controller', told.append)
  thread.run(start(), timeout_s=60)
  thread.stop(limit_s=0.1)
  (text,) = told
  assert 'left behind' in text and 'tool of draw 3 (' in text
  assert 'test_local.py' in text  # and the line that it is at
  gate.set()
  thread.stop()
  assert len(told) == 1


def test_loop_that_a_task_holds_is_left_behind_by_the_name_of_the_task():
  told, gate, begun = [], threading.Event(), threading.Event()

  async def blocks():
    asyncio.current_task().set_name('scores draw 5')
    begun.set()
    gate.wait(60)

  thread = AsyncThread('controller', told.append)
  thread.spawn(blocks())
  assert begun.wait(60)
  thread.stop(limit_s=0.1)
  assert "loop 'controller' is left behind" in told[0]
  assert 'scores draw 5' in told[0]
  gate.set()
  thread.stop()  # it can be ended now
  assert len(told) == 1


def test_loop_that_a_task_has_ended_says_so_at_once():
  """`sys.exit` in a task ends the whole loop; nobody waits for its limit."""

  async def leaves():
    raise SystemExit(3)

  async def never():
    await asyncio.Event().wait()

  thread = AsyncThread('controller')
  waiting = thread.spawn(never())
  thread.spawn(leaves())
  with pytest.raises(Stalled, match="'controller' has ended: SystemExit"):
    thread.wait(waiting, timeout_s=600)
  with pytest.raises(Stalled, match='has ended: SystemExit'):
    thread.call(lambda: 7)
  thread.stop()
  with pytest.raises(Stalled, match='has ended: SystemExit'):
    thread.run(never(), timeout_s=600)


def test_time_in_which_a_program_is_compiled_does_not_count():
  thread, asked = AsyncThread('controller'), []
  ready = asyncio.Event()

  async def compiled():
    await ready.wait()
    return 'an answer'

  async def release():
    ready.set()

  def busy():  # longer than the limit, by far
    asked.append(len(asked))
    if len(asked) == 3:
      thread.spawn(release())
    return len(asked) <= 3

  try:
    answer = thread.run(compiled(), timeout_s=0.01, busy=busy)
    assert answer == 'an answer' and len(asked) >= 3
    with pytest.raises(Stalled, match='after 0.01 s'):
      thread.run(asyncio.Event().wait(), timeout_s=0.01, busy=lambda: False)
  finally:
    thread.stop()
