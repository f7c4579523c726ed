"""The watchdog: notices that nothing moves, and says once who waits for whom.

It looks at counters that everybody keeps anyway (tokens, answers, groups,
versions) from a thread of its own, and so does not depend on the loops that it
watches. Silence is told once, with the report that it is given; what comes
after is told again only when there was progress in between. If silence lasts,
it calls for the end of the run.

No counter moves while devices train a step or while a program is compiled. Both
are `Work`: they have begun, it is known what they are, and each has a limit of
its own. Silence ends no run as long as a work is within its limit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import time
from typing import Any, Callable, Hashable, Iterator, Sequence


@dataclasses.dataclass(frozen=True)
class Work:
  """Something that has begun and that no counter follows.

  Attributes:
    what: in words, as 'trains step 3'.
    since: second of the watchdog's clock at which it began.
    limit_s: seconds that it may take.
    setting: where the limit comes from.
  """

  what: str
  since: float
  limit_s: float
  setting: str

  def text(self, now: float) -> str:
    """What it is, how long it takes and how long it may."""
    return (
        f'{self.what} for {now - self.since:.1f} s, of'
        f' {self.limit_s:g} s that it may take ({self.setting})'
    )


class Watchdog:
  """Looks every now and then, between `start` and `stop`.

  Args:
    progress: what changes whenever something moves; called in its thread.
    report: who waits for whom, in lines; called in its thread.
    tell: called with a text, once a silence.
    expire: called with a text when it has lasted too long, once.
    quiet_s: seconds of silence that are told.
    limit_s: seconds of silence after which `expire` is called.
    compiling: the compilations that are under way; called in its thread.
    clock: monotonic seconds.

  Attributes:
    told: how many silences without any work were told.
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
      compiling: Callable[[], Sequence[Work]] = tuple,
      clock: Callable[[], float] = time.monotonic,
  ):
    self.told = 0
    self._progress = progress
    self._report = report
    self._tell = tell
    self._expire = expire
    self._quiet_s = quiet_s
    self._limit_s = limit_s
    self._compiling = compiling
    self._clock = clock
    self._doing = ('nothing yet', clock())
    self._works: tuple[Work, ...] = ()  # of the main thread, which replaces it
    self._seen: Hashable = None
    self._since = clock()
    self._compiled = (
        clock()
    )  # when a compilation was last seen within its limit
    self._silent = self._expired = False
    self._known: set[str] = set()  # settings of works that were told
    self._ended = threading.Event()
    self._thread: threading.Thread | None = None

  def at(self, doing: str) -> None:
    """Tells what the main thread begins to do; counts as progress."""
    self._doing = (doing, self._clock())

  @contextlib.contextmanager
  def working(self, what: str, limit_s: float, setting: str) -> Iterator[None]:
    """Tells that the main thread is at a work with a limit of its own.

    Time in which a program is compiled does not count: the work may wait for
    it, and compilations have their own limit. Beyond the limit the run ends,
    whatever else moves.

    Args:
      what: in words, as 'trains step 3'.
      limit_s: seconds that it may take.
      setting: where the limit comes from.
    """
    self.at(what)
    work = Work(what, self._clock(), limit_s, setting)
    before, self._works = self._works, (*self._works, work)
    try:
      yield
    finally:
      self._works = before

  def look(self) -> None:
    """Compares with the last look, and tells."""
    now, works, compiling = self._clock(), self._works, tuple(self._compiling())
    within = [c for c in compiling if now - c.since < c.limit_s]
    if within:
      self._compiled = now
    seen = (self._doing, self._progress(), works, compiling)
    if seen != self._seen:
      self._seen, self._since = seen, now
      self._silent = False
    silence = now - self._since
    late = [w for w in works if now - max(w.since, self._compiled) >= w.limit_s]
    if late:
      self._end(f'{late[0].text(now)}: too long\n{self.explain(silence)}')
    if silence >= self._quiet_s and not self._silent:
      self._silent = True
      self._say(now, silence, [*within, *works])
    over = [c for c in compiling if c not in within and silence >= c.limit_s]
    if over and not works:
      self._end(f'{over[0].text(now)}: too long\n{self.explain(silence)}')
    if silence >= self._limit_s and not (within or works or compiling):
      self._end(self.explain(silence))

  def _say(self, now: float, silence: float, known: Sequence[Work]) -> None:
    """Tells a silence: in one line and once a run where its cause is known."""
    if not known:
      self.told += 1
      self._tell(self.explain(silence))
    elif known[0].setting not in self._known:
      self._known.add(known[0].setting)
      self._tell(f'nothing else moves: {known[0].text(now)}')

  def _end(self, text: str) -> None:
    if not self._expired:
      self._expired = True
      self._expire(text)

  def explain(self, silence: float) -> str:
    """Says what the main thread does and who waits for whom, in lines."""
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
