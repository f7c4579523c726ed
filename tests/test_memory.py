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
CONFIG = f"""
import pathlib
from tests.test_session import experiment

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
  held = np.array([row['rss_bytes'] for row in rows])
  assert len(held) == STEPS
  slope = np.polyfit(np.arange(200), held[-200:], 1)[0]
  assert slope < 20_000, json.dumps(held[::20].tolist())
