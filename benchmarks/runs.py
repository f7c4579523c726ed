"""Runs of an experiment in processes of their own, timed from outside.

A run is started as a user starts it, `python -m areal_jax.run`, so it has its
own devices, threads and environment. What it did is read from its folder; how
much of the processors it and everything else took is sampled here, from Linux's
/proc. Moments are monotonic seconds, which Linux counts alike in all processes,
so samples and the run's own events share one axis.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys
import threading
import time
from typing import Any, Iterable, Mapping

import numpy as np

from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl

# A stretch of time: first and last moment in monotonic seconds.
Interval = tuple[float, float]

_SAMPLE_S = 0.02
_LOOK_S = 0.25  # how often new children are looked for
_TICKS = os.sysconf('SC_CLK_TCK')


@dataclasses.dataclass(frozen=True)
class Load:
  """Processor seconds spent up to each moment.

  Attributes:
    moments: [N] monotonic seconds, rising.
    own: [N] of the run and its reward workers.
    machine: [N] of everything on the machine, the run included.
  """

  moments: np.ndarray
  own: np.ndarray
  machine: np.ndarray

  def own_within(self, intervals: Iterable[Interval]) -> float:
    """Processor seconds of the run inside of intervals."""
    return _within(self.moments, self.own, intervals)

  def elsewhere_within(self, intervals: Iterable[Interval]) -> float:
    """Processor seconds of everything else inside of intervals."""
    return _within(self.moments, self.machine - self.own, intervals)


@dataclasses.dataclass(frozen=True)
class Run:
  """A finished run."""

  folder: pathlib.Path
  load: Load

  @functools.cached_property
  def summary(self) -> dict[str, Any]:
    return json.loads((self.folder / run_folder.SUMMARY).read_text())

  @functools.cached_property
  def config(self) -> dict[str, Any]:
    return json.loads((self.folder / run_folder.CONFIG).read_text())

  @functools.cached_property
  def events(self) -> list[dict[str, Any]]:
    return read_jsonl(self.folder / run_folder.EVENTS)

  @functools.cached_property
  def samples(self) -> list[dict[str, Any]]:
    rows = read_jsonl(self.folder / run_folder.SAMPLES)
    return [row for row in rows if 'completion' in row]

  def spans(self, kind: str) -> list[dict[str, Any]]:
    """Events of a kind that took time, in order of their start."""
    found = [e for e in self.events if e['kind'] == kind]
    found = [e for e in found if e['duration'] is not None]
    return sorted(found, key=lambda event: event['mono'])


def run(
    config: str,
    output: pathlib.Path,
    name: str,
    overrides: Mapping[str, Any],
    environment: Mapping[str, str] | None = None,
) -> Run:
  """Runs an experiment to its end in a process of its own.

  Args:
    config: its file.
    output: folder of the runs.
    name: of the run, not taken before.
    overrides: values of settings by dotted name.
    environment: variables to set.

  Raises:
    FileExistsError: the name is taken.
    RuntimeError: it failed; the end of what it printed is in the text.
  """
  if (output / name).exists():
    raise FileExistsError(f'{output / name} exists, wanted a new name')
  command = [
      sys.executable,
      '-m',
      'areal_jax.run',
      f'--config={config}',
      f'--config.output={output}',
      f'--config.name={name}',
      *(f'--config.{path}={value}' for path, value in overrides.items()),
  ]
  output.mkdir(parents=True, exist_ok=True)
  with open(output / f'{name}.log', 'w+b') as log:
    child = subprocess.Popen(
        command,
        stdout=log,
        stderr=subprocess.STDOUT,
        env={**os.environ, **(environment or {})},
        start_new_session=True,  # by which its children are found
    )
    try:
      load = _sample(child)
    finally:
      child.kill()  # nothing if it has ended
      child.wait()
    if child.returncode:
      log.seek(0)
      text = log.read().decode(errors='replace')[-2000:]
      raise RuntimeError(
          f'{" ".join(command)} ended with {child.returncode}: {text}'
      )
  return Run(output / name, load)


def overlap(span: Mapping[str, Any], window: Interval) -> Interval | None:
  """The part of a span that lies in a window; None if no part does."""
  first = max(span['mono'], window[0])
  last = min(span['mono'] + span['duration'], window[1])
  return (first, last) if last > first else None


def seconds(intervals: Iterable[Interval]) -> float:
  """Their lengths, added up."""
  return float(sum(last - first for first, last in intervals))


def union(intervals: Iterable[Interval]) -> list[Interval]:
  """The moments that lie in any of them, as intervals apart."""
  apart: list[Interval] = []
  for first, last in sorted(intervals):
    if apart and first <= apart[-1][1]:
      apart[-1] = (apart[-1][0], max(last, apart[-1][1]))
    else:
      apart.append((first, last))
  return apart


def _within(
    moments: np.ndarray, spent: np.ndarray, intervals: Iterable[Interval]
) -> float:
  edges = np.asarray(list(intervals), np.float64).reshape(-1, 2)
  at = np.interp(edges, moments, spent)
  return float((at[:, 1] - at[:, 0]).sum())


def _sample(child: subprocess.Popen) -> Load:
  """Samples processor time until the child ends."""
  rows = []
  spent: dict[int, float] = {}  # of each process of the run, gone ones too
  looked = -_LOOK_S
  ended = threading.Event()
  waiter = threading.Thread(target=lambda: (child.wait(), ended.set()))
  waiter.start()
  while True:
    now = time.monotonic()
    if now - looked >= _LOOK_S:
      looked = now
      for pid in _session(child.pid):
        spent.setdefault(pid, 0.0)
    for pid in spent:
      spent[pid] = max(spent[pid], _spent(pid))
    rows.append((now, sum(spent.values()), _spent_by_all()))
    if ended.wait(_SAMPLE_S):
      waiter.join()
      return Load(*np.asarray(rows).T)


def _session(leader: int) -> list[int]:
  """Processes of the session that a process leads."""
  found = []
  for entry in os.scandir('/proc'):
    if entry.name.isdecimal():
      fields = _stat(int(entry.name))
      if fields and int(fields[3]) == leader:
        found.append(int(entry.name))
  return found


def _spent(pid: int) -> float:
  """Processor seconds of a process, user and system; 0 if it is gone."""
  fields = _stat(pid)
  return (int(fields[11]) + int(fields[12])) / _TICKS if fields else 0.0


def _stat(pid: int) -> list[str]:
  """Fields of /proc/PID/stat from the third on; none if it is gone."""
  try:
    text = pathlib.Path(f'/proc/{pid}/stat').read_text()
  except (FileNotFoundError, ProcessLookupError):
    return []
  return text.rpartition(')')[2].split()  # the name may hold blanks


def _spent_by_all() -> float:
  """Processor seconds of all processes since the machine started."""
  with open('/proc/stat') as file:
    user, nice, system, _, _, *rest = map(int, file.readline().split()[1:])
  interrupts, soft, stolen = rest[:3]
  return (user + nice + system + interrupts + soft + stolen) / _TICKS
