"""The live line of a run: how far it is, how well it does, how long it takes.

On a terminal one line is rewritten in place and cut to its width. Anywhere else
(a file, a CI log) plain lines are printed, at most one every few seconds, and
always the last.
"""

from __future__ import annotations

import collections
from collections.abc import Callable
import os
import sys
import threading
import time
from typing import TextIO

_WINDOW = 20  # updates over which the pace is taken: early ones compile


class Progress:
  """Shows updates on a stream; safe among threads.

  Args:
    total_steps: the step at which the run is done.
    stream: where to write, standard error by default.
    clock: monotonic seconds.
    every: least seconds between two lines where the stream is no terminal.
  """

  def __init__(
      self,
      total_steps: int,
      stream: TextIO | None = None,
      *,
      clock: Callable[[], float] = time.monotonic,
      every: float = 5.0,
  ):
    self._total = total_steps
    self._stream = sys.stderr if stream is None else stream
    self._clock = clock
    self._every = every
    self._live = self._stream.isatty()
    self._lock = threading.Lock()
    self._paces = collections.deque(maxlen=_WINDOW)  # (clock, step)
    self._line = ''  # the latest
    self._shown = ''  # what stands on the terminal, or was printed last
    self._printed_at: float | None = None
    self._broken = False  # somebody else has written below the live line

  def update(
      self,
      *,
      step: int,
      version: int,
      reward: float | None = None,
      staleness: float | None = None,
      rollout_tokens_per_s: float | None = None,
      trained_tokens_per_s: float | None = None,
      **others: float | None,
  ) -> None:
    """Shows where the run is. What is None is left out.

    Args:
      step: steps done.
      version: version published last.
      reward: mean reward of the step.
      staleness: mean age of its tokens in versions.
      rollout_tokens_per_s: sampled tokens a second.
      trained_tokens_per_s: trained tokens a second.
      **others: further numbers, shown under their names.
    """
    with self._lock:
      self._look_below()
      now = self._clock()
      self._paces.append((now, step))
      # What matters most comes first: a narrow terminal loses the others.
      parts = [
          f'step {step}/{self._total}',
          self._time_left(step),
          _part('reward', reward, '.3f'),
          f'version {version}',
          _part('staleness', staleness, '.2f'),
          _rate('rollout', rollout_tokens_per_s),
          _rate('train', trained_tokens_per_s),
          *(_part(name, value, '.4g') for name, value in others.items()),
      ]
      self._line = _fit([p for p in parts if p], self._width())
      if self._live:
        self._rewrite(self._line)
      elif self._due(now) or step >= self._total:
        self._print(now)

  def leave_line(self) -> None:
    """Leaves the live line where it is: others have written below it.

    It would be printed a second time below. No lock is taken, so that a signal
    handler may call this.
    """
    self._broken = True

  def note(self, text: str) -> None:
    """Prints text on lines of its own, above the live line."""
    with self._lock:
      self._look_below()
      if self._live and self._shown:
        live = self._shown
        self._rewrite('')
        self._stream.write(f'\r{text}\n')
        self._rewrite(live)
      else:
        self._stream.write(f'{text}\n')
        self._stream.flush()

  def close(self) -> None:
    """Leaves the last line standing. A second call does nothing."""
    with self._lock:
      self._look_below()
      if self._live:
        if self._shown:
          self._stream.write('\n')
          self._stream.flush()
          self._shown = ''
      elif self._line != self._shown:
        self._print(self._clock())

  def _look_below(self) -> None:
    if self._broken and self._live:
      self._shown = ''
    self._broken = False

  def _time_left(self, step: int) -> str:
    then, before = self._paces[0]
    if step >= self._total or step <= before:
      return ''
    pace = (self._paces[-1][0] - then) / (step - before)
    return f'{_duration(pace * (self._total - step))} left'

  def _due(self, now: float) -> bool:
    return self._printed_at is None or now - self._printed_at >= self._every

  def _print(self, now: float) -> None:
    self._stream.write(f'{self._line}\n')
    self._stream.flush()
    self._shown = self._line
    self._printed_at = now

  def _rewrite(self, line: str) -> None:
    """Replaces the live line; blanks cover what the old one had more."""
    blanks = ' ' * (len(self._shown) - len(line))
    self._stream.write(f'\r{line}{blanks}')
    self._stream.flush()
    self._shown = line

  def _width(self) -> int | None:
    """Columns that may be used; the last stays free, or the cursor wraps."""
    if not self._live:
      return None
    try:
      columns = os.get_terminal_size(self._stream.fileno()).columns
    except OSError:  # a terminal that is not the system's, as in a notebook
      columns = 0
    return (columns or 80) - 1


def _fit(parts: list[str], width: int | None) -> str:
  """Joins as many parts as fit, from the first."""
  while width is not None and len(parts) > 1 and len(' | '.join(parts)) > width:
    parts = parts[:-1]
  return ' | '.join(parts)[:width]


def _part(name: str, value: float | None, form: str) -> str:
  return '' if value is None else f'{name} {value:{form}}'


def _rate(name: str, value: float | None) -> str:
  """Tokens a second in a few characters: 812, 5.2k, 1.3M."""
  if value is None:
    return ''
  for size, unit in ((1e6, 'M'), (1e3, 'k')):
    if value >= size:
      return f'{name} {value / size:.1f}{unit} tok/s'
  return f'{name} {value:.0f} tok/s'


def _duration(seconds: float) -> str:
  """45s, 3:07 or 2:03:07."""
  whole = round(seconds)
  minutes, left = divmod(whole, 60)
  hours, minutes = divmod(minutes, 60)
  if hours:
    return f'{hours}:{minutes:02}:{left:02}'
  return f'{minutes}:{left:02}' if minutes else f'{left}s'
