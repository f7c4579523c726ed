"""CASES A17 with real processes, killed where a save is most easily broken."""

import os
import pathlib
import signal
import subprocess
import sys

import pytest

from areal_jax import replay
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.telemetry.schedule import Schedule
from areal_jax.train import checkpoint
from tests import killed_run
from tests.limits import WAIT_S
from tests.test_resume import state_of
from tests.test_session import assert_same_bits

ROOT = pathlib.Path(__file__).resolve().parent.parent


def start(folder, kill=''):
  """One attempt in a process of its own; returns its exit code."""
  done = subprocess.run(
      [sys.executable, '-m', 'areal_jax.run', '--config=tests/killed_run.py'],
      cwd=ROOT,
      env={
          **os.environ,
          'PYTHONPATH': str(ROOT),
          'AREAL_KILL': kill,
          'AREAL_KILLED': str(folder),
      },
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  if done.returncode not in (0, -signal.SIGKILL):
    raise AssertionError(done.stderr)
  return done.returncode


@pytest.mark.slow  # a minute on two cores: four processes that compile
def test_run_killed_in_its_saves_trains_an_epoch_once(tmp_path, monkeypatch):
  """Before the first marker, before a later manifest, and while an old one is
  deleted. When a save falls due the one before may still be written, so their
  steps are not known beforehand."""
  killed = -signal.SIGKILL
  folder = tmp_path / 'run'
  whole = []
  for kill in (
      'write COMMITTED 1',
      'write manifest.json 2',
      'remove COMMITTED 1',
  ):
    assert start(tmp_path, kill) == killed
    saved, _ = checkpoint.latest(folder / 'checkpoints')
    whole.append(saved and saved.step)
  assert whole[0] is None and 0 < whole[1] < whole[2]
  # The third died when it was about to delete: the old one is still whole.
  old = checkpoint.at_step(folder / 'checkpoints', whole[1])
  assert checkpoint.verify(old).step == whole[1]
  assert start(tmp_path) == 0
  steps = killed_run.STEPS
  samples = read_jsonl(folder / 'samples.jsonl')
  trained = [(row['draw_index'], row['sample']) for row in samples]
  assert len(trained) == len(set(trained)) == 16 * steps
  assert {index for index, _ in trained} == set(range(4 * steps))
  prompts = [row['prompt'] for row in samples if row['sample'] == 0]
  assert len(prompts) == 4 * steps
  rows = [r for r in read_jsonl(folder / 'metrics.jsonl') if 'loss' in r]
  assert [row['step'] for row in rows] == list(range(1, steps + 1))
  assert max(row['head_staleness_max'] for row in rows) <= 2
  schedule = Schedule(folder / 'schedule.bin')
  assert schedule.steps == tuple(range(1, steps + 1))
  # The first attempt left nothing, so the second began anew.
  assert [run['attempt'] for run in schedule.runs] == [0, 1, 2]
  draws = [g.draw_index for s in schedule.steps for g in schedule.batch(s)]
  assert draws == list(range(4 * steps))
  problems = {
      g.draw.problem.id for s in schedule.steps for g in schedule.batch(s)
  }
  assert len(problems) == 4 * steps  # every one of the epoch, once
  schedule.close()
  monkeypatch.setenv('AREAL_KILLED', str(tmp_path))
  config = killed_run.get_config()
  config.name, config.resume, config.replay = 'again', '', str(folder)
  again = replay.run(config)
  assert again.summary['differing_steps'] == 0
  assert_same_bits(state_of(again.folder)[1], state_of(folder)[1])
