"""The event loop in a thread of its own, and how it ends."""

import asyncio

from areal_jax.cluster.local import AsyncThread


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
