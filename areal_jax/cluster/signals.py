"""SIGTERM and SIGINT: the first ends a run in order, the second at once.

While training goes on, the first signal is only remembered; the loop looks at
it between steps and while it waits, saves, and leaves. Before and after that
there is nothing to save, and it raises where the program stands. The second
one ends the process without another word. Whoever sees that nothing moves any
more may have the main thread raise from outside, too (`expire`).

No lock is taken in a handler: the main thread may hold it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from typing import Any, Callable, Iterator

SIGNALS = (signal.SIGTERM, signal.SIGINT)
STUCK = 70  # exit code where even the main thread does not answer


class Interrupted(KeyboardInterrupt):
  """A signal ended the run; `code` is the exit code, 128 and its number."""

  def __init__(self, number: int):
    super().__init__(f'ended by {signal.Signals(number).name}')
    self.code = 128 + number


class Signals:
  """Entered around a run, in the main thread; elsewhere it does nothing.

  Handlers of before are put back at the end.

  Args:
    grace_s: seconds for the main thread to leave in, after `expire`.

  Attributes:
    told: called in the handler when it has written a line to standard error; it
      may take no lock.
  """

  def __init__(self, grace_s: float = 30.0) -> None:
    self.installed = False
    self.told: Callable[[], None] = lambda: None
    self._grace_s = grace_s
    self._before: dict[int, Any] = {}
    self._received: int | None = None
    self._held = False
    self._expired: BaseException | None = None
    self._patient_until = 0.0  # monotonic second

  def __enter__(self) -> Signals:
    if threading.current_thread() is threading.main_thread():
      for number in SIGNALS:
        self._before[number] = signal.signal(number, self._on_signal)
      self.installed = True
    return self

  def __exit__(self, *exception: Any) -> None:
    for number, handler in self._before.items():
      signal.signal(number, handler)
    self._before.clear()
    self.installed = False

  @contextlib.contextmanager
  def held(self) -> Iterator[None]:
    """Within, a first signal waits for `check`.

    Raises:
      Interrupted: one came and nobody has looked.
    """
    self._held = True
    try:
      yield
    finally:
      self._held = False
    self.check()

  def check(self) -> None:
    """Raises `Interrupted` if a signal has come."""
    if self._received is not None:
      raise Interrupted(self._received)

  def expire(self, error: BaseException) -> None:
    """Has the main thread raise; called from another one.

    It can only where Python runs. If it has not left half a minute later, or
    leaves and then waits at the end of the program for a thread that hangs, the
    process ends with exit code `STUCK`.
    """
    if not self.installed:
      return
    self._expired = error
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
    threading.Thread(target=self._end, daemon=True).start()

  @contextlib.contextmanager
  def patient(self, limit_s: float) -> Iterator[None]:
    """Gives the main thread time to save in, after `expire`.

    Args:
      limit_s: seconds that do not count as time to leave in.
    """
    self._patient_until = time.monotonic() + limit_s
    try:
      yield
    finally:
      self._patient_until = 0.0

  def _end(self) -> None:
    """Ends the process as soon as its main thread cannot, after a while."""
    seen = 0
    while seen < 2:  # twice in a row: every program ends for a moment
      time.sleep(self._grace_s / 2)
      if time.monotonic() < self._patient_until:
        seen = 0
      else:
        seen = seen + 1 if self.installed or _waits_for_threads() else 0
    os._exit(STUCK)

  def _on_signal(self, number: int, frame: Any) -> None:
    del frame
    if self._expired is not None:
      error, self._expired = self._expired, None
      raise error
    if self._received is not None:
      os._exit(128 + number)
    self._received = number
    name = signal.Signals(number).name
    then = 'saves and ends' if self._held else 'ends'
    os.write(2, f'\n{name}: the run {then}; once more ends it now\n'.encode())
    self.told()
    if not self._held:
      raise Interrupted(number)


def _waits_for_threads() -> bool:
  """Returns whether only threads still keep the program from ending."""
  frame = sys._current_frames().get(threading.main_thread().ident)
  while frame is not None:
    if (frame.f_globals.get('__name__'), frame.f_code.co_name) == (
        'threading',
        '_shutdown',
    ):
      return True
    frame = frame.f_back
  return False
