"""The programs of an engine or a trainer, compiled before they are called.

A plan goes in: names of programs in the order in which a run will need them,
and for each a function that compiles it from shapes alone. One thread works it
off while weights are loaded and the first requests are served. Whoever is about
to call a program waits for that one, and what is waited for comes next. What no
first step needs is compiled when nothing else is to be, in any engine or
trainer of the process: they share the processors that compile. Which program is
called depends on what is ready in two cases, decode steps for few slots and
prompts one by one, which loops that repeat a run bit by bit do not have.

Nothing of a program is kept here: who plans one says where it stays. For an
engine `jitted.lower(shapes).compile()` leaves it where a call of `jitted` with
such arguments finds it (jax 0.10.2; a test would see a version that does not),
so calls cost what they always cost, and arguments that nobody planned for still
compile, and are counted as a defect. A trainer keeps what was compiled and
calls that.
"""

from __future__ import annotations

import concurrent.futures
import threading
import time
from typing import Any, Callable, Sequence

from areal_jax.telemetry import compilations

Name = tuple[str | int, ...]  # such as ('extend', 1, 16): rows, tokens
Compile = Callable[[], Any]


def text_of(name: Name) -> str:
  """A name for readers: 'extend 1 16'."""
  return ' '.join(map(str, name))


# All that follows is guarded by one lock: engines and trainers take turns.
_changed = threading.Condition()
_busy: set[Programs] = set()  # have something that comes first
_patient: set[Programs] = set()  # have something that comes behind it


class Programs:
  """The programs of an engine or trainer: compiled, compiling and planned."""

  def __init__(self):
    self._executor: concurrent.futures.ThreadPoolExecutor | None = None
    self._queue: dict[Name, Compile] = {}  # in the order of need
    self._soon: dict[Name, Compile] = {}  # the same, behind all of the process
    self._later: dict[Name, Compile] = {}  # not before somebody wants them
    # Begun or done. What is in neither was not planned, or is given up.
    self._begun: dict[Name, concurrent.futures.Future] = {}
    self._doing: tuple[Name, float] | None = None
    self._holds = False

  def plan(
      self,
      work: Sequence[tuple[Name, Compile]],
      soon: Sequence[tuple[Name, Compile]] = (),
      later: Sequence[tuple[Name, Compile]] = (),
  ) -> None:
    """Has programs compiled, in this order, behind those planned before.

    Args:
      work: names, each once, and what compiles them. A name planned before is
        compiled again, for other arguments.
      soon: those that can wait until no other `Programs` has `work` left, nor
        holds them back.
      later: those that a run can do without: compiled when they are wanted.
    """
    with _changed:
      self._queue.update(work)
      self._soon.update(soon)
      self._later.update(later)
      for name, _ in (*work, *soon, *later):
        self._begun.pop(name, None)
      self._start()

  def hold_back(self) -> None:
    """Lets nothing that is `soon` begin in the process, until `let_go`.

    For processors that compile have to compute a first step too.
    """
    with _changed:
      self._holds = True
      _busy.add(self)

  def let_go(self) -> None:
    """Ends `hold_back`, if there was one."""
    with _changed:
      self._holds = False
      if self._doing is None:
        self._rest()

  def want(self, name: Name) -> None:
    """Has a program of `later` compiled soon; waits for nothing."""
    with _changed:
      if name in self._later:
        self._soon[name] = self._later[name]
        del self._later[name]  # last, for `ready` takes no lock
        self._start()

  def ready(self, name: Name) -> bool:
    """Returns whether a call would not wait."""
    future = self._begun.get(name)
    if future:
      return future.done()
    held = self._later, self._soon, self._queue
    return not any(name in programs for programs in held)

  def wait(
      self, name: Name, given_up: Callable[[], bool] = lambda: False
  ) -> bool:
    """Waits for a program, which comes next.

    Args:
      name: of one that nobody planned, for which there is no wait, or another.
      given_up: whether to wait no longer; asked again at each `nudge`.

    Returns:
      Whether it is ready.

    Raises:
      Exception: what its compilation raised, as often as somebody asks.
    """
    if not self.ready(name):
      with _changed:
        for held in (self._queue, self._soon, self._later):
          if name in held:
            self._queue = {name: held[name], **self._queue}
            held.pop(name)  # last, for `ready` takes no lock
            self._start()
        _changed.wait_for(lambda: self.ready(name) or given_up())
        if not self.ready(name):
          return False
    future = self._begun.get(name)
    if future is not None:
      future.result()
    return True

  def wait_for_all(self) -> None:
    """Waits until everything planned is compiled; raises what went wrong."""
    with _changed:
      names = [*self._begun, *self._queue, *self._soon, *self._later]
    for name in names:
      self.wait(name)

  def nudge(self) -> None:
    """Has those who wait ask whether to wait no longer."""
    with _changed:
      _changed.notify_all()

  def close(self) -> None:
    """Gives up what has not begun, and waits for what has.

    Those who wait for what is given up go on, and would compile it themselves.
    """
    with _changed:
      self._give_up()
      _changed.notify_all()
      executor = self._executor
      if executor is None:
        self._rest()
    if executor is not None:
      executor.shutdown(wait=True)

  @property
  def done(self) -> int:
    """Programs compiled so far, or failed."""
    return sum(future.done() for future in list(self._begun.values()))

  @property
  def under_way(self) -> tuple[str, float] | None:
    """The program being compiled and since when, in monotonic seconds."""
    doing = self._doing
    return None if doing is None else (text_of(doing[0]), doing[1])

  def explain(self) -> str:
    """Describes what is being compiled and since when; empty if nothing is."""
    doing = self._doing
    if doing is None:
      return ''
    name, since = doing
    return (
        f'compiles {text_of(name)} for {time.monotonic() - since:.1f} s,'
        f' {len(self._queue) + len(self._soon)} programs to follow'
    )

  def _start(self) -> None:
    """Sets the thread to work; `_changed` is held."""
    if self._queue:
      _busy.add(self)
    if self._soon:
      _patient.add(self)
    if self._executor is None and (self._queue or self._soon):
      self._executor = concurrent.futures.ThreadPoolExecutor(
          1, thread_name_prefix='programs'
      )
      self._next()

  def _next(self) -> None:
    """Begins with the next program; `_changed` is held."""
    self._doing = future = None
    waits = self._holds or _busy - {self}
    work = self._queue or ({} if waits else self._soon)
    if work:
      name, compile_ = next(iter(work.items()))
      try:
        future = self._executor.submit(_compiled, compile_)
      except RuntimeError:  # the interpreter is about to end
        self._give_up()
      else:
        self._doing = (name, time.monotonic())
        self._begun[name] = future
        del work[name]  # last, for `ready` takes no lock
    if not self._soon:
      _patient.discard(self)
    if future is None or work is not self._queue:
      self._rest()
    if future is None:
      self._executor.shutdown(wait=False)
      self._executor = None
    else:  # last, for it may have ended
      future.add_done_callback(self._ended)

  def _rest(self) -> None:
    """Has nothing left that comes first; `_changed` is held."""
    if self in _busy and not self._holds:
      _busy.remove(self)
      if not _busy:
        for programs in [*_patient]:
          programs._start()

  def _give_up(self) -> None:
    """Forgets what has not begun; `_changed` is held."""
    self._holds = False
    self._queue.clear()
    self._soon.clear()
    self._later.clear()
    _patient.discard(self)

  def _ended(self, future: concurrent.futures.Future) -> None:
    del future
    with _changed:
      self._next()
      _changed.notify_all()


def _compiled(compile_: Compile) -> None:
  with compilations.ahead_of_time():
    compile_()
