"""Counts every XLA compilation of the process, not only our own functions'.

Static shapes are a promise of this project, and a compilation after warm-up
breaks it: generation or training stands still meanwhile. jax reports each
compilation to `jax.monitoring`; this file listens. Eager operations that build
a small program of their own are counted too, as they should be.

jax 0.10 sends '/jax/core/compile/backend_compile_duration' with `fun_name` for
each program, also when the program came from the persistent cache. In that case
'/jax/compilation_cache/cache_hits' was sent just before by the same thread,
which is how the two are told apart.

What a thread compiles `ahead_of_time` is part of the warm-up, however long that
goes on beside the run; it is counted in the totals alone.
"""

from __future__ import annotations

import contextlib
import threading
from typing import Any, Iterator

from jax import monitoring

_BUILT = '/jax/core/compile/backend_compile_duration'
_CACHE_HIT = '/jax/compilation_cache/cache_hits'
_KEPT_NAMES = 1000

_here = threading.local()  # .ahead: what this thread compiles is warm-up


@contextlib.contextmanager
def ahead_of_time() -> Iterator[None]:
  """Counts compilations of this thread as warm-up, for every counter."""
  _here.ahead = True
  try:
    yield
  finally:
    _here.ahead = False


class CompilationCounter:
  """Counts from `install` to `uninstall`; safe among threads.

  Attributes:
    total: programs compiled by XLA.
    cached: programs loaded from the persistent cache instead.
    seconds: wall time spent on both.
    since_warm: programs built since `mark_warm`, but for those built ahead of
      time; 0 before it was called. Those loaded from the persistent cache
      count: they too are shapes that the warm-up missed, and on another machine
      they would have been compiled.
    names_since_warm: what they are, in order, such as 'jit(train_step)'; the
      first 1,000.
  """

  def __init__(self):
    self.total = 0
    self.cached = 0
    self.seconds = 0.0
    self.since_warm = 0
    self.names_since_warm: list[str] = []
    self._warm = False
    self._lock = threading.Lock()
    self._thread = threading.local()  # .hit: this thread's program was cached
    self._installed = False

  def install(self) -> CompilationCounter:
    """Starts to listen; a second call changes nothing."""
    if not self._installed:
      monitoring.register_event_listener(self._on_event)
      monitoring.register_event_duration_secs_listener(self._on_duration)
      self._installed = True
    return self

  def uninstall(self) -> None:
    """Stops listening and keeps the counts; a second call changes nothing."""
    if self._installed:
      monitoring.unregister_event_listener(self._on_event)
      monitoring.unregister_event_duration_listener(self._on_duration)
      self._installed = False

  def mark_warm(self) -> None:
    """Ends warm-up: later compilations of unplanned shapes are counted."""
    with self._lock:
      self._warm = True
      self.since_warm = 0
      self.names_since_warm = []

  def _on_event(self, event: str, **_: Any) -> None:
    if event == _CACHE_HIT:
      self._thread.hit = True

  def _on_duration(self, event: str, duration: float, **fields: Any) -> None:
    if event != _BUILT:
      return
    hit = getattr(self._thread, 'hit', False)
    self._thread.hit = False
    with self._lock:
      self.seconds += duration
      if hit:
        self.cached += 1
      else:
        self.total += 1
      if not self._warm or getattr(_here, 'ahead', False):
        return
      self.since_warm += 1
      if len(self.names_since_warm) < _KEPT_NAMES:
        self.names_since_warm.append(str(fields.get('fun_name', 'unnamed')))
