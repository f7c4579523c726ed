"""The folder that a run leaves behind, and files written into it whole.

A saved run is never overwritten: a second run of the same name gets a folder
of its own. JSON files appear complete or not at all.
"""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import resource
import sys
import tempfile
from typing import Any

from areal_jax.config import ConfigError, require
from areal_jax.telemetry import jsonl

# What lies in the folder of a run.
CONFIG = 'config.json'  # the resolved settings, secrets redacted
METRICS = 'metrics.jsonl'  # a row a step; `telemetry.metric_writer`
EVENTS = 'events.jsonl'  # `telemetry.events`
TRACE = 'trace.json'  # the same for Perfetto; `telemetry.trace`
SAMPLES = 'samples.jsonl'  # `telemetry.samples`
EVALUATIONS = 'evaluations.jsonl'  # a row an evaluated answer
REWARD_ERRORS = 'reward_errors.log'  # why answers have no score, tracebacks
REWARD_OUTPUT = 'reward_output.log'  # what the reward function printed
SCHEDULE = 'schedule.bin'  # every batch that was trained; `telemetry.schedule`
CURVES = 'curves.png'  # `telemetry.plots`
SUMMARY = 'summary.json'
TENSORBOARD = 'tensorboard'  # a folder of event files
TOKENIZER = 'tokenizer.model'  # the sentencepiece model, or instead of it
TOKENIZER_FILES = 'tokenizer'  # the files of a Hugging Face tokenizer
WARM_START = 'warm_start'  # the policy that reinforcement learning starts from
POLICY = 'policy'  # the trained policy, in the Hugging Face layout
ADAPTER = 'adapter'  # the trained adapters alone, in PEFT's layout
BEST = 'best'  # the one whose metric was highest; `CheckpointSettings`
CHECKPOINTS = 'checkpoints'  # `train.checkpoint`
CRASH = 'crash'  # the batch and the state at which training had no number
PROFILE = 'profile'  # `telemetry.profiling`
STACKS = 'stacks.txt'  # what each thread did when the run was given up


def new_run_folder(root: str | os.PathLike, name: str) -> pathlib.Path:
  """Makes `root/name`, or `name-2`, `name-3`, ... where one holds anything.

  Raises:
    ConfigError: the name is no single path component, or the root cannot be
      written.
  """
  single = name not in ('', '.', '..') and not set(name) & {'/', '\\', '\0'}
  require(single, 'run name', name, 'one folder name')
  root = pathlib.Path(root)
  try:
    root.mkdir(parents=True, exist_ok=True)
    for number in itertools.count(1):
      folder = root / (name if number == 1 else f'{name}-{number}')
      try:
        folder.mkdir()
        return folder
      except FileExistsError:
        if folder.is_dir() and not any(folder.iterdir()):
          # Ours only if it can be written, which a file shows for certain.
          with tempfile.TemporaryFile(dir=folder):
            return folder
  except OSError as error:
    raise ConfigError(
        f'run folder {str(root / name)!r} cannot be made ({error}), wanted a'
        ' folder that can be written'
    ) from error


def write_json(path: str | os.PathLike, value: Any) -> None:
  """Writes a JSON file in one piece: readers see the old one or the new one.

  Infinities become 'inf' or '-inf' and NaN null; numpy scalars and arrays,
  paths and enumerations are taken as they are (`jsonl.plain`).

  Raises:
    TypeError: a value that JSON cannot hold.
  """
  path = pathlib.Path(path)
  text = json.dumps(jsonl.plain(value), indent=2, ensure_ascii=False)
  part = path.with_name(f'.{path.name}.{os.getpid()}.part')
  try:
    part.write_text(text + '\n', encoding='utf-8')
    os.replace(part, path)
  finally:
    part.unlink(missing_ok=True)


def rss_bytes() -> int:
  """Returns the resident memory of this process in bytes, without children."""
  pages = pathlib.Path('/proc/self/statm')
  if pages.exists():
    return int(pages.read_text().split()[1]) * os.sysconf('SC_PAGE_SIZE')
  return peak_rss_bytes()  # no procfs (macOS)


def heap_bytes() -> int:
  """The part of `rss_bytes` that is no page of a file.

  Pages of libraries come and go as the kernel sees fit, a hundred MB of them;
  what a program keeps by mistake is never among them.
  """
  status = pathlib.Path('/proc/self/status')
  if status.exists():
    for text in status.read_text().splitlines():
      if text.startswith('RssAnon:'):
        return int(text.split()[1]) * 1024
  return rss_bytes()


def peak_rss_bytes() -> int:
  """The most memory this process has held resident so far, in bytes.

  Children (reward workers) are not in it.
  """
  status = pathlib.Path('/proc/self/status')
  if status.exists():
    for text in status.read_text().splitlines():
      if text.startswith('VmHWM:'):
        return int(text.split()[1]) * 1024
  # No procfs (macOS) or one without the line (some sandboxes).
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == 'darwin' else peak * 1024
