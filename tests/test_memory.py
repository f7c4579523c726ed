"""Resident memory stands still over hundreds of small steps."""

import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.telemetry.jsonl import read_jsonl

ROOT = pathlib.Path(__file__).resolve().parent.parent
STEPS = 300
# What the allocator keeps for later is given back before each look. Otherwise
# that happens in jumps (protobuf, which TensorBoard's events are made of, trims
# the heap after so many frees) and the slope is that of a saw's tooth.
CONFIG = f"""
import ctypes
import pathlib
from areal_jax.telemetry import run_folder
from tests.test_session import experiment

look, trim = run_folder.heap_bytes, ctypes.CDLL(None).malloc_trim


def trimmed():
  trim(0)
  return look()


run_folder.heap_bytes = trimmed


def get_config():
  return experiment(
      pathlib.Path(__file__).parent, steps={STEPS}, rollout__eta=2.0
  )
"""


@pytest.mark.slow  # a minute on two cores
def test_memory_is_flat_over_three_hundred_steps(tmp_path):
  (tmp_path / 'config.py').write_text(CONFIG)
  subprocess.run(
      [sys.executable, '-m', 'areal_jax.run', f'--config={tmp_path}/config.py'],
      cwd=ROOT,
      check=True,
      timeout=600,
      env={**os.environ, 'PYTHONPATH': str(ROOT)},
  )
  rows = [r for r in read_jsonl(tmp_path / 'run/metrics.jsonl') if 'loss' in r]
  # Without pages of files, which the kernel takes back and reads again.
  held = np.array([row['heap_bytes'] for row in rows])
  assert len(held) == STEPS
  slope = np.polyfit(np.arange(200), held[-200:], 1)[0]
  print(f'{slope:.0f} bytes a step')
  assert slope < 20_000, json.dumps(held[::20].tolist())
