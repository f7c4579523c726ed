"""Does every algorithm learn, and is it the reward that it learns from?

  python -m benchmarks.algorithms
  python -m benchmarks.algorithms --presets=grpo,ppo --seeds=1

The quickstart's task with shorter sums (two to four numbers), asynchronous with
η = 1. For each seed one supervised warm start, which all runs of that seed
begin from; for each preset a run from there, and its own control with learning
rate 0 (policy and critic), whose few steps are enough to see that nothing
moves. `--short` is one preset with a critic and one without, for one seed. The
last line is one JSON object with a row a claim.

All runs share this process and a cache of compiled programs, so a run costs
little more than its steps.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
from typing import Any, Sequence

from absl import app, flags
import jax

from areal_jax import command, session
from areal_jax.data import running_totals
from areal_jax.losses.presets import PRESETS
from areal_jax.settings.algorithm import use_algorithm
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.types import Problem
from benchmarks import report
from experiments import quickstart

# Without a teacher there is nothing to distil.
_ALL = sorted(set(PRESETS) - {'distillation'})

GOOD = 0.8  # held-out accuracy that is waited for
LENGTHS = (2, 4)
_STEPS = 60
_CONTROL_STEPS = 3
_SHORT_STEPS = 20
_SHORT_PRESETS = ('grpo', 'ppo')

# Where a preset's source asks for another rate or has to be told a size that is
# this task's own. Everything else is alike.
_OWN: dict[str, dict[str, Any]] = {}


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What one run came to.

  Attributes:
    accuracy: held-out, of the last version.
    steps: at which it was first at least `GOOD`; None if it never was.
    seconds: of training.
  """

  accuracy: float
  steps: int | None
  seconds: float


def problems(split: str, count: int, seed: int) -> list[Problem]:
  """The quickstart's problems, of `LENGTHS` numbers."""
  return running_totals.problems(split, count, seed, LENGTHS)


def demonstrations(count: int, seed: int) -> list[tuple[str, str]]:
  """Worked problems with the quickstart's bad habit, of `LENGTHS` numbers."""
  return running_totals.demonstrations(
      count, seed, running_totals.HABIT, LENGTHS
  )


def experiment(output: pathlib.Path, name: str, seed: int) -> Experiment:
  """The task, with no algorithm chosen."""
  made = quickstart.get_config()
  made.name, made.output, made.seed = name, str(output), seed
  made.task.problems = 'benchmarks.algorithms:problems'
  made.task.demonstrations = 'benchmarks.algorithms:demonstrations'
  made.task.train_problems = 1024
  made.task.eval_problems = 128
  made.task.demonstration_count = 20_000
  made.warm_start.steps = 1800
  made.rollout.max_new_tokens = 12
  made.rollout.eta = 1.0
  made.steps = _STEPS
  made.checkpoint.every, made.checkpoint.at_end = 0, False
  made.evaluation.every = 5
  made.evaluation.show = 0
  made.train.optimizer.learning_rate = 2e-4
  made.train.optimizer.schedule = 'constant'
  made.train.critic.optimizer = dataclasses.replace(
      made.train.optimizer, learning_rate=1e-3
  )
  return made


def warm_start(output: pathlib.Path, seed: int) -> pathlib.Path:
  """Trains what all runs of a seed begin from; returns its run's folder."""
  made = experiment(output, f'start-{seed}', seed)
  made.steps, made.evaluation.every = 1, 0
  made.train.optimizer.learning_rate = 0.0
  return session.run(made).folder


def learn(
    start: pathlib.Path, preset: str, seed: int, steps: int, *, rate: float = 1
) -> Outcome:
  """Runs a preset from a warm start.

  Args:
    start: folder of the run that made it.
    preset: name of the algorithm.
    seed: of the run.
    steps: of training.
    rate: factor of all learning rates; 0 is the control.
  """
  kind = 'trained' if rate else 'control'
  made = experiment(start.parent, f'{preset}-{kind}-{seed}', seed)
  made.policy.path = str(start / 'warm_start')
  made.tokenizer.path = str(start / 'tokenizer.model')
  made.warm_start.steps = 0
  made.steps = steps
  use_algorithm(made, preset)
  for path, value in _OWN.get(preset, {}).items():
    *above, last = path.split('.')
    place = made
    for name in above:
      place = getattr(place, name)
    setattr(place, last, value)
  for optimizer in (made.train.optimizer, made.train.critic.optimizer):
    optimizer.learning_rate *= rate
  finished = session.run(made)
  reached = [
      row['step']
      for row in read_jsonl(finished.folder / 'metrics.jsonl')
      if row.get('eval_accuracy', 0.0) >= GOOD
  ]
  return Outcome(
      finished.summary['eval_after'],
      min(reached, default=None),
      finished.summary['train_wall_s'],
  )


def compare(
    output: pathlib.Path,
    presets: Sequence[str],
    seeds: Sequence[int],
    steps: int,
) -> list[report.Row]:
  """All rows; the table of each preset is printed as it comes."""
  starts = {seed: warm_start(output, seed) for seed in seeds}
  rows = []
  header = f'{"preset":<22} {"control":>8} {"accuracy":>24} {"steps":>12}'
  print(header, file=sys.stderr, flush=True)
  for preset in presets:
    seen = [
        (
            learn(starts[seed], preset, seed, _CONTROL_STEPS, rate=0),
            learn(starts[seed], preset, seed, steps),
        )
        for seed in seeds
    ]
    rows += summarize(preset, seeds, seen)
    print(table_line(preset, seen), file=sys.stderr, flush=True)
  return rows


def summarize(
    preset: str,
    seeds: Sequence[int],
    seen: Sequence[tuple[Outcome, Outcome]],
) -> list[report.Row]:
  """The claims about one preset, from (control, trained) of each seed."""
  rows = []
  for seed, (control, trained) in zip(seeds, seen, strict=True):
    gain = trained.accuracy - control.accuracy
    rows += [
        report.bounded(f'{preset} seed {seed}: above control', gain, '>= 0.1'),
        report.Row(f'{preset} seed {seed}: accuracy', trained.accuracy),
        report.Row(
            f'{preset} seed {seed}: steps to {GOOD}',
            -1 if trained.steps is None else trained.steps,
        ),
    ]
  return rows


def table_line(preset: str, seen: Sequence[tuple[Outcome, Outcome]]) -> str:
  """One line of the table: control, accuracies, steps to `GOOD`."""
  controls = sum(control.accuracy for control, _ in seen) / len(seen)
  reached = ' '.join(f'{trained.accuracy:.3f}' for _, trained in seen)
  steps = ' '.join(
      '-' if trained.steps is None else str(trained.steps)
      for _, trained in seen
  )
  return f'{preset:<22} {controls:>8.3f} {reached:>24} {steps:>12}'


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  seeds = [int(seed) for seed in flags.FLAGS.seeds]
  presets, steps = flags.FLAGS.presets, _STEPS
  if flags.FLAGS.short:
    seeds, presets, steps = seeds[:1], _SHORT_PRESETS, _SHORT_STEPS
  unknown = sorted(set(presets) - set(_ALL))
  if unknown:
    raise app.UsageError(f'--presets has {unknown}, wanted some of {_ALL}')
  with tempfile.TemporaryDirectory() as scratch:
    jax.config.update('jax_compilation_cache_dir', f'{scratch}/compiled')
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
    output = pathlib.Path(flags.FLAGS.output or scratch)
    rows = compare(output, presets, seeds, steps)
  report.show('algorithms', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_list('presets', _ALL, 'Which ones.')
  flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds, runs of each.')
  flags.DEFINE_bool('short', False, 'Two presets, one seed, few steps.')
  flags.DEFINE_string('output', '', 'Folder of the runs; kept.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
