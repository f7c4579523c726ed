"""The watchdog: notices that nothing moves, and says once who waits for whom.

It looks at counters that everybody keeps anyway (tokens, answers, groups,
versions) from a thread of its own, and so does not depend on the loops that it
watches. Silence is told once, with the report that it is given; what comes
after is told again only when there was progress in between. If silence lasts,
it calls for the end of the run: each wait has a limit of its own, and this one
is for what has none, such as a program that never comes back from a device.
"""

from __future__ import annotations

import threading
import time
from typing import Any, Callable, Hashable


class Watchdog:
  """Looks every now and then, between `start` and `stop`.

  Args:
    progress: what changes whenever something moves; called in its thread.
    report: who waits for whom, in lines; called in its thread.
    tell: called with a text, once a silence.
    expire: called with a text when it has lasted too long, once.
    quiet_s: seconds of silence that are told.
    limit_s: seconds of silence after which `expire` is called.
    clock: monotonic seconds.

  Attributes:
    told: how many silences were told.
  """

  def __init__(
      self,
      *,
      progress: Callable[[], Hashable],
      report: Callable[[], str],
      tell: Callable[[str], None],
      expire: Callable[[str], None],
      quiet_s: float,
      limit_s: float,
      clock: Callable[[], float] = time.monotonic,
  ):
    self.told = 0
    self._progress = progress
    self._report = report
    self._tell = tell
    self._expire = expire
    self._quiet_s = quiet_s
    self._limit_s = limit_s
    self._clock = clock
    self._doing = ('nothing yet', clock())
    self._seen: Hashable = None
    self._since = clock()
    self._silent = self._expired = False
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None

  def at(self, doing: str) -> None:
    """What the main thread begins to do; counts as progress."""
    self._doing = (doing, self._clock())

  def look(self) -> None:
    """Compares with the last look, and tells."""
    now = self._clock()
    seen = (self._doing, self._progress())
    if seen != self._seen:
      self._seen, self._since = seen, now
      self._silent = self._expired = False
      return
    silence = now - self._since
    if silence >= self._quiet_s and not self._silent:
      self._silent = True
      self.told += 1
      self._tell(self.explain(silence))
    if silence >= self._limit_s and not self._expired:
      self._expired = True
      self._expire(self.explain(silence))

  def explain(self, silence: float) -> str:
    doing, since = self._doing
    return (
        f'nothing has moved for {silence:.1f} s\n'
        f'  main thread: {doing}, for {self._clock() - since:.1f} s\n'
        f'{self._report()}'
    )

  def start(self) -> None:
    self._thread = threading.Thread(
        target=self._run, name='watchdog', daemon=True
    )
    self._thread.start()

  def stop(self) -> None:
    """Ends it; a second call, or one without `start`, does nothing."""
    self._ended.set()
    if self._thread is not None:
      self._thread.join()
      self._thread = None

  def __enter__(self) -> Watchdog:
    self.start()
    return self

  def __exit__(self, *exception: Any) -> None:
    self.stop()

  def _run(self) -> None:
    while not self._ended.wait(min(1.0, self._quiet_s / 4)):
      self.look()
