"""Profiles on demand: what the devices did in some steps, what fills them.

A run is profiled for the steps that its settings name, and whenever it is asked
to by a signal while it goes on:

  kill -USR1 PID

Then the next step is traced, and what lies in device memory is written down at
the end of the step under way. Nothing is measured otherwise, and nothing costs
anything. Into `profile/` of the run's folder go

  steps-3-5/           the trace of steps 3 to 5: below it a `*.trace.json.gz`
                       for https://ui.perfetto.dev and a `*.xplane.pb` for
                       TensorBoard's profiler
  memory-step-5.prof   live buffers by the line that made them, after step 5;
                       `go tool pprof` reads it

`trace.json` of the run has the loops and who waits for whom, over the whole
run; a trace here has every program on every device, over a few steps. Writing
it holds up training for about a second and generation not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import dataclasses
import os
import pathlib
import signal
import threading
from typing import Any

import jax

from areal_jax.config import require


@dataclasses.dataclass
class ProfilingSettings:
  """Settings of profiling; steps count from 1, and 0 stands for none.

  Attributes:
    first_step: first step of the trace.
    last_step: last step of the trace.
    memory_step: step after which a device memory profile is written.
    signal_steps: steps that are traced after a SIGUSR1; 0 leaves that signal
      alone (it then ends the process, which is the system's default).
    python_calls: whether traces hold each call of a Python function as well;
      that slows all loops down while it is on.
  """

  first_step: int = 0
  last_step: int = 0
  memory_step: int = 0
  signal_steps: int = 1
  python_calls: bool = False

  def validate(self, at: str) -> None:
    for name in ('first_step', 'last_step', 'memory_step', 'signal_steps'):
      value = getattr(self, name)
      require(value >= 0, f'{at}.{name}', value, 'at least 0')
    if self.last_step:
      require(self.first_step >= 1, f'{at}.first_step', self.first_step,
              f'1 to last_step={self.last_step}')  # fmt: skip
    require(self.last_step >= self.first_step, f'{at}.last_step',
            self.last_step, f'at least first_step={self.first_step}'
            )  # fmt: skip


class Profiler:
  """Profiles steps of one run; entered and used in the trainer's thread.

  While it is entered in the main thread of a process, SIGUSR1 is its own; the
  handler before it is put back at the end. Elsewhere Python takes no signals,
  and only the settings count.

  Args:
    folder: where profiles go; made with the first of them.
    settings: see `ProfilingSettings`.
    note: called with a line of text for whoever watches the run.
  """

  def __init__(
      self,
      folder: str | os.PathLike,
      settings: ProfilingSettings,
      note: Callable[[str], None] = lambda text: None,
  ):
    self._folder = pathlib.Path(folder)
    self._settings = settings
    self._note = note
    self._before: Any = None  # the handler that was there
    self._handles_signal = False
    # Set by the signal, between any two instructions of the main thread.
    self._trace_asked = False
    self._memory_asked = False
    self._tracing: tuple[pathlib.Path, int] | None = None  # and its last step

  def __enter__(self) -> Profiler:
    main = threading.current_thread() is threading.main_thread()
    if main and self._settings.signal_steps and hasattr(signal, 'SIGUSR1'):
      self._before = signal.signal(signal.SIGUSR1, self._on_signal)
      self._handles_signal = True
    return self

  def __exit__(self, *exception: Any) -> None:
    """Gives the signal back and writes a trace that was cut short."""
    if self._handles_signal:
      signal.signal(signal.SIGUSR1, self._before)
      self._handles_signal = False
    if self._tracing is not None:
      self._stop()
    if self._trace_asked:
      self._note('no step came after the signal: nothing was traced')

  @contextlib.contextmanager
  def step(self, number: int) -> Iterator[None]:
    """Runs one training step, which is profiled if its number is up.

    A step that raises leaves its trace open; `__exit__` writes it.
    """
    if self._tracing is None:
      self._start_if_due(number)
    with jax.profiler.StepTraceAnnotation('step', step_num=number):
      yield
    if self._tracing is not None and number >= self._tracing[1]:
      self._stop()
    if self._memory_asked or number == self._settings.memory_step:
      self._memory_asked = False
      self._write_memory(number)

  def _on_signal(self, number: int, frame: Any) -> None:
    del number, frame
    self._trace_asked = self._memory_asked = True

  def _start_if_due(self, number: int) -> None:
    settings = self._settings
    if settings.first_step <= number <= settings.last_step:
      last = settings.last_step
    elif self._trace_asked:
      self._trace_asked = False
      last = number + settings.signal_steps - 1
    else:
      return
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = int(settings.python_calls)
    folder = self._folder / f'steps-{number}-{last}'
    folder.mkdir(parents=True, exist_ok=True)
    jax.profiler.start_trace(folder, profiler_options=options)
    self._tracing = (folder, last)

  def _stop(self) -> None:
    folder, _ = self._tracing
    self._tracing = None
    jax.profiler.stop_trace()
    self._note(f'profile: {folder}')

  def _write_memory(self, number: int) -> None:
    self._folder.mkdir(parents=True, exist_ok=True)
    path = self._folder / f'memory-step-{number}.prof'
    jax.profiler.save_device_memory_profile(path)
    self._note(f'device memory: {path}')
