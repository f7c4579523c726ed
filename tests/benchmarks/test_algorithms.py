"""What the benchmark of algorithms makes of its runs."""

import pathlib

from areal_jax.config import resolve
from areal_jax.prepare.prepared import prepare
from areal_jax.settings.algorithm import use_algorithm
from benchmarks import algorithms as lib
from benchmarks.algorithms import Outcome


def test_a_preset_has_to_beat_its_control_in_every_seed():
  seen = [
      (Outcome(0.1, None, 1.0), Outcome(0.9, 20, 9.0)),
      (Outcome(0.2, None, 1.0), Outcome(0.25, None, 9.0)),
  ]
  rows = {row.row: row for row in lib.summarize('grpo', (1, 2), seen)}
  assert rows['grpo seed 1: above control'].met
  assert not rows['grpo seed 2: above control'].met
  assert rows['grpo seed 1: steps to 0.8'].value == 20
  assert rows['grpo seed 2: steps to 0.8'].value == -1
  line = lib.table_line('grpo', seen)
  assert line.split() == ['grpo', '0.150', '0.900', '0.250', '20', '-']


def test_every_preset_fits_the_task(tmp_path: pathlib.Path):
  for name in lib._ALL:
    resolve(use_algorithm(lib.experiment(tmp_path, 'x', 1), name))
  made = lib.experiment(tmp_path, 'x', 1)
  made.warm_start.steps = 0
  longest = max(len(ids) for ids in prepare(made).prompts.values())
  assert longest <= made.rollout.engine.max_prompt_length
