"""A sum of pauses that is right at every moment, also in the middle of one.

A sum that grows when a pause ends is too small until then, by the whole pause.
After a pause of 3 s, a moment of work and 4 s of a pause that goes on, such a
sum says 3 s. A `Stopwatch` says 7 s.
"""

from __future__ import annotations

import contextlib
import time
from typing import Callable, Iterator


class Stopwatch:
  """Adds up the seconds of pauses, the one under way included.

  One thread begins and ends the pauses; any thread may read.

  Args:
    clock: monotonic seconds.
  """

  def __init__(self, clock: Callable[[], float] = time.monotonic):
    self._clock = clock
    # Seconds of ended pauses and the begin of the one under way. It is replaced
    # as a whole, so that no reader sees a pause twice or not at all.
    self._so_far: tuple[float, float | None] = (0.0, None)

  @property
  def seconds(self) -> float:
    """Seconds of all pauses until now."""
    ended, begun = self._so_far
    return ended if begun is None else ended + self._clock() - begun

  def add(self, seconds: float) -> None:
    """Counts pauses of elsewhere in; not during a pause."""
    ended, begun = self._so_far
    self._so_far = (ended + seconds, begun)

  @contextlib.contextmanager
  def pause(self) -> Iterator[None]:
    """Counts the seconds in this context; it does not nest."""
    ended, begun = self._so_far[0], self._clock()
    self._so_far = (ended, begun)
    try:
      yield
    finally:
      self._so_far = (ended + self._clock() - begun, None)
