"""Does it learn, and is it the reward that it learns from?

  python -m benchmarks.learning --task=quickstart
  python -m benchmarks.learning --task=stories --data=DATA
  python -m benchmarks.learning --task=smollm2 --policy=SmolLM2-135M-Instruct \
    --short

For each seed: the experiment itself, and from the same start a run with
learning rate 0 and one with shuffled rewards, which must stay where they
began (smollm2, which takes minutes, has the former alone). `--data` is the
folder that holds models/stories260K, `--policy` a Hugging Face folder with its
tokenizer. `--short` is one seed of each. The last line is one JSON object with
a row a claim.

Stories are judged by more than their reward, since gibberish can meet it: by
the share of their words that the start writes at least twice in the samples of
the learning-rate-0 run, and by the KL divergence from the start.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys
import tempfile
from typing import Any, Sequence

from absl import app, flags
import numpy as np

from areal_jax import command
from areal_jax.rewards import english
from areal_jax.telemetry.jsonl import read_jsonl
from benchmarks import report

_TASKS = ['quickstart', 'stories', 'smollm2']

LAST_STEPS = 5  # steps whose mean reward is the reward at the end


def quickstart(seeds: Sequence[int], output: pathlib.Path) -> list[report.Row]:
  """Held-out accuracy of the quickstart and of its two controls."""
  rows = []
  for seed in seeds:
    trained = run('quickstart', output, seed, 'trained')
    start = output / f'trained-{seed}'
    from_start = [
        f'--config.policy.path={start}/warm_start',
        f'--config.tokenizer.path={start}/tokenizer.model',
        '--config.warm_start.steps=0',
    ]
    rows += [
        row(seed, 'held-out accuracy before', trained['eval_before'], '<= 0.5'),
        row(seed, 'held-out accuracy after', trained['eval_after'], '>= 0.9'),
        row(seed, 'wall seconds', trained['wall_s'], '<= 300'),
        row(seed, 'peak GB', trained['peak_rss_bytes'] / 1e9, '<= 3'),
        row(seed, 'mean staleness', trained['staleness_mean'], '>= 0.3'),
        row(
            seed,
            'share of answers with two versions',
            trained['mixed_version_fraction'],
            '>= 0.1',
        ),
        row(
            seed,
            'log-prob gap of fresh tokens',
            trained['engine_trainer_logprob_gap_max'],
            '<= 0.0001',
        ),
        row(
            seed,
            'compilations after warm-up',
            trained['recompiles_after_warmup'],
            '<= 0',
        ),
    ]
    for control, override in CONTROLS.items():
      summary = run(
          'quickstart', output, seed, control, [*from_start, override]
      )
      moved = abs(summary['eval_after'] - trained['eval_before'])
      rows.append(row(seed, f'{control}: accuracy moved by', moved, '<= 0.03'))
  return rows


def stories(
    seeds: Sequence[int], output: pathlib.Path, data: pathlib.Path
) -> list[report.Row]:
  """Reward, English and KL of the stories, against two controls."""
  model = data / 'models' / 'stories260K'
  inputs = [
      f'--config.policy.path={model}/hf',
      f'--config.tokenizer.path={model}/tok512.model',
  ]
  rows = []
  for seed in seeds:
    trained = run('stories260k', output, seed, 'trained', inputs)
    still = {
        control: run(
            'stories260k', output, seed, control, [*inputs, override]
        )
        for control, override in CONTROLS.items()
    }
    known = english.vocabulary_of(
        sample['completion'] for sample in samples(output, 'rate 0', seed)
    )
    last = [
        sample['completion']
        for sample in samples(output, 'trained', seed)
        if sample['step'] > trained['steps'] - LAST_STEPS
    ]
    end = metrics(output, 'trained', seed)[-LAST_STEPS:]
    ended = np.mean([m['reward_mean'] for m in end])
    control = metrics(output, 'rate 0', seed)[-LAST_STEPS:]
    rested = [m['reward_mean'] for m in control]
    errors = (ended - np.mean(rested)) / standard_error(output, seed)
    rows += [
        row(seed, 'reward of the last five steps', ended, '>= 0.85'),
        row(seed, 'above rate 0, in standard errors', errors, '>= 3'),
        row(seed, 'unseen openings', trained['eval_score_after'], '>= 0.8'),
        row(
            seed, 'share of known words', english.word_share(last, known),
            '>= 0.9',
        ),  # fmt: skip
        row(
            seed,
            'KL to the start, nats a token',
            np.mean([m['kl_reference'] for m in end]),
            '<= 0.5',
        ),
    ]
    for name, summary in still.items():
      moved = abs(summary['eval_score_after'] - trained['eval_score_before'])
      rows.append(row(seed, f'{name}: unseen moved by', moved, '<= 0.05'))
  return rows


def smollm2(
    seeds: Sequence[int], output: pathlib.Path, policy: str
) -> list[report.Row]:
  """Reward and held-out accuracy of a real policy, against rate 0."""
  inputs = [
      f'--config.policy.path={policy}',
      f'--config.tokenizer.path={policy}',
  ]
  rows = []
  for seed in seeds:
    trained = run('smollm2', output, seed, 'trained', inputs)
    control = 'rate 0'
    still = run(
        'smollm2', output, seed, control, [*inputs, CONTROLS[control]]
    )
    rewards = {
        name: [m['reward_mean'] for m in metrics(output, name, seed)]
        for name in ('trained', control)
    }
    first, last = rewards['trained'][0], rewards['trained'][-LAST_STEPS:]
    moved = abs(still['eval_after'] - still['eval_before'])
    rows += [
        row(seed, 'reward of the first step', first),
        row(seed, 'reward of the last five steps', np.mean(last), '>= 0.85'),
        row(
            seed,
            f'{control}: reward of the last five steps',
            np.mean(rewards[control][-LAST_STEPS:]),
            '<= 0.3',
        ),
        row(seed, 'held-out accuracy before', trained['eval_before']),
        row(seed, 'held-out accuracy after', trained['eval_after'], '>= 0.7'),
        row(seed, f'{control}: held-out accuracy moved by', moved, '<= 0.1'),
        row(seed, 'wall seconds', trained['wall_s'], '<= 1200'),
        row(seed, 'peak GB', trained['peak_rss_bytes'] / 1e9, '<= 8'),
        row(seed, 'mean staleness', trained['staleness_mean']),
        row(
            seed,
            'log-prob gap of fresh tokens',
            trained['engine_trainer_logprob_gap_max'],
        ),
        row(
            seed,
            'compilations after warm-up',
            trained['recompiles_after_warmup'],
            '<= 0',
        ),
    ]
  return rows


# What is taken away, by the setting that does it.
CONTROLS = {
    'rate 0': '--config.train.optimizer.learning_rate=0',
    'shuffled': '--config.shuffle_rewards=true',
}


def run(
    experiment: str,
    output: pathlib.Path,
    seed: int,
    name: str,
    overrides: Sequence[str] = (),
) -> dict[str, Any]:
  """Runs an experiment in a process of its own; returns its summary."""
  folder = f'{name}-{seed}'.replace(' ', '_')
  subprocess.run(
      [
          sys.executable,
          '-m',
          'areal_jax.run',
          f'--config=experiments/{experiment}.py',
          f'--config.output={output}',
          f'--config.name={folder}',
          f'--config.seed={seed}',
          '--config.evaluation.show=0',
          *overrides,
      ],
      check=True,
      stdout=sys.stderr,
  )
  return json.loads((output / folder / 'summary.json').read_text())


def samples(output: pathlib.Path, name: str, seed: int) -> list[dict[str, Any]]:
  """What a run has trained on, answer by answer."""
  folder = f'{name}-{seed}'.replace(' ', '_')
  return [
      row
      for row in read_jsonl(output / folder / 'samples.jsonl')
      if 'completion' in row
  ]


def metrics(output: pathlib.Path, name: str, seed: int) -> list[dict[str, Any]]:
  """The rows of a run's training steps."""
  folder = f'{name}-{seed}'.replace(' ', '_')
  return [
      row
      for row in read_jsonl(output / folder / 'metrics.jsonl')
      if 'reward_mean' in row
  ]


def standard_error(output: pathlib.Path, seed: int) -> float:
  """Of the difference of mean rewards at the ends of trained and rate 0.

  Answers of one group share an opening, so groups and not answers are counted
  as independent.
  """
  variance = 0.0
  for name in ('trained', 'rate 0'):
    by_group: dict[int, list[float]] = {}
    rows = samples(output, name, seed)
    final = max(r['step'] for r in rows) - LAST_STEPS
    for sample in rows:
      if sample['step'] > final:
        by_group.setdefault(sample['draw_index'], []).append(sample['reward'])
    means = [np.mean(rewards) for rewards in by_group.values()]
    variance += np.var(means, ddof=1) / len(means)
  return float(np.sqrt(variance))


def row(seed: int, what: str, value: float, bar: str = '') -> report.Row:
  """A row whose bar reads '<= x' or '>= x', or one without."""
  name = f'seed {seed}: {what}'
  if not bar:
    return report.Row(name, float(value))
  return report.bounded(name, float(value), bar)


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line of the chosen task."""
  del argv
  seeds = [int(seed) for seed in flags.FLAGS.seeds]
  if flags.FLAGS.short:
    seeds = seeds[:1]
  with tempfile.TemporaryDirectory() as scratch:
    output = pathlib.Path(flags.FLAGS.output or scratch)
    if flags.FLAGS.task == 'quickstart':
      rows = quickstart(seeds, output)
    elif flags.FLAGS.task == 'smollm2':
      rows = smollm2(seeds, output, flags.FLAGS.policy)
    else:
      rows = stories(seeds, output, pathlib.Path(flags.FLAGS.data))
  report.show(f'learning/{flags.FLAGS.task}', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_enum('task', _TASKS[0], _TASKS, 'What is learnt.')
  flags.DEFINE_list('seeds', ['1', '2', '3'], 'Seeds, a run each.')
  flags.DEFINE_bool('short', False, 'The first seed alone.')
  flags.DEFINE_string('data', '', 'Folder with models/stories260K.')
  flags.DEFINE_string('policy', '', 'Folder of SmolLM2-135M-Instruct.')
  flags.DEFINE_string('output', '', 'Folder of the runs; kept.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
