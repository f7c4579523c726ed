"""An asyncio event loop whose clock jumps: sleeping takes no time.

`run(coroutine)` runs under it. Time advances to the next timer as soon as
nothing can run, so a simulated hour of rollouts takes milliseconds and the
order of events is the same each time.
"""

import asyncio
import selectors


class _JumpingSelector(selectors.SelectSelector):
  """Advances the loop's clock by the time it was asked to wait."""

  loop: 'VirtualLoop'

  def select(self, timeout=None):
    ready = super().select(0)
    if not ready and timeout:
      self.loop.now += timeout
    if not ready and timeout is None:
      raise RuntimeError('every task waits and no timer is set: a deadlock')
    return ready


class VirtualLoop(asyncio.SelectorEventLoop):
  """An event loop that starts at second 0 and never waits."""

  def __init__(self):
    self.now = 0.0
    selector = _JumpingSelector()
    selector.loop = self
    super().__init__(selector)

  def time(self):
    return self.now


def run(coroutine):
  """Result of a coroutine under virtual time."""
  loop = VirtualLoop()
  try:
    return loop.run_until_complete(coroutine)
  finally:
    loop.run_until_complete(_cancel_others())
    loop.close()


async def _cancel_others():
  """Ends what still runs, so that nothing is left when the loop closes."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  for task in others:
    task.cancel()
  await asyncio.gather(*others, return_exceptions=True)
