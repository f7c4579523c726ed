"""What proximal log-probs cost, and what it saves to need fewer of them.

  python -m benchmarks.proximal

A training step of the quickstart's policy on random answers, cut into one, two
and four minibatches, three ways: with a forward pass over all of the batch
before the first update, as implementations commonly do; with the first
minibatch giving its own, as `train/trainer.py` does; and interpolated
(`loss.proximal='loglinear'`), without any. The first two end in the same
parameters, which is checked. `--short` takes fewer repetitions. The last line
is one JSON object.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax import command
from areal_jax.config import resolve
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut, machine_devices
from areal_jax.models import parameters
from areal_jax.train.batch import minibatches_of
from areal_jax.train.objectives import Batch
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.state import TrainState
from areal_jax.train.step import TrainStep
from areal_jax.train.trainer import build_steps
from areal_jax.types import (
    Draw,
    Group,
    Problem,
    RewardResult,
    RewardStatus,
    Segment,
    StopReason,
    Trajectory,
)
from benchmarks import report
from experiments import quickstart

_GROUPS, _SIZE, _TOKENS = 16, 8, 24
_VOCABULARY = 18
WAYS = ('all', 'free', 'loglinear')


def groups(seed: int = 0) -> list[Group]:
  """Random answers of random scores; one batch of the quickstart."""
  random = np.random.default_rng(seed)
  made = []
  for draw in range(_GROUPS):
    members = []
    for sample in range(_SIZE):
      length = int(random.integers(12, _TOKENS + 1))
      mask = (np.arange(length) >= 8).astype(np.float32)
      members.append(
          Trajectory(
              draw_index=draw,
              sample=sample,
              segments=(
                  Segment('prompt', 0, 8),
                  Segment('sampled', 8, length - 8, StopReason.STOP),
              ),
              ids=random.integers(0, _VOCABULARY, length).astype(np.int32),
              loss_mask=mask,
              logps=(-2.9 * mask).astype(np.float32),
              versions=np.where(mask > 0, 0, -1).astype(np.int32),
              turn_ids=np.zeros(length, np.int32),
              reward=RewardResult(RewardStatus.OK, float(random.integers(2))),
              temperature=1.0,
              admitted_version=0,
          )
      )
    problem = Problem(f'p{draw}', 'random', '', '')
    made.append(Group(Draw(draw, 0, problem), _SIZE, tuple(members), (), 0))
  return made


def train(
    step: TrainStep, state: TrainState, placed: Sequence[list[Batch]], way: str
) -> TrainState:
  """One training step, its proximal log-probs found in one of the `WAYS`."""
  proximal: list[Any] = [None] * len(placed)
  for index, batches in enumerate(placed):
    if way == 'all' or (way == 'free' and index):
      proximal[index] = [step.score(state, batch) for batch in batches]
  for batches, logps in zip(placed, proximal):
    total = step.accumulate(state, batches, logps)
    state, _ = step.apply(state, total, teaches=True)
  return state


def measure(minibatches: int, repeats: int) -> dict[str, float]:
  """Seconds of a step by way, the median of alternating repetitions."""
  made = quickstart.get_config()
  config = resolve(
      dataclasses.replace(made.policy.model, vocab_size=_VOCABULARY)
  )
  mesh = cut(machine_devices(made.mesh), made.mesh).train
  rules, seconds, ready = Rules(), {way: [] for way in WAYS}, {}
  for way in WAYS:
    proximal = 'loglinear' if way == 'loglinear' else 'exact'
    settings = resolve(
        TrainSettings(
            minibatches=max(2, minibatches),  # so that all programs are there
            packing=PackingSettings(row_tokens=96, rows=14),
            loss=PolicyLoss(proximal=proximal),
        )
    )
    step, _ = build_steps(config, settings, mesh, rules)
    dealt = dataclasses.replace(
        made.train, minibatches=minibatches, packing=settings.packing
    )
    placed = [
        [step.place(m, part.denominator, 0) for m in part.microbatches]
        for part in minibatches_of(groups(), dealt)
    ]
    ready[way] = step, placed
  ends = {}
  for repeat in range(repeats + 1):  # the first one compiles
    for way, (step, placed) in ready.items():
      params = parameters.init_params(config, 0, mesh, rules)
      state = jax.block_until_ready(step.initial_state(params))
      start = time.perf_counter()
      state = jax.block_until_ready(train(step, state, placed, way))
      if repeat:
        seconds[way].append(time.perf_counter() - start)
      ends[way] = state.policy.trainable
  for one, other in zip(*(jax.tree.leaves(ends[w]) for w in WAYS[:2])):
    np.testing.assert_allclose(one, other, atol=1e-6)
  return {way: float(np.median(found)) for way, found in seconds.items()}


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  rows = []
  for minibatches in (1, 2, 4):
    found = measure(minibatches, 3 if flags.FLAGS.short else 15)
    for way, seconds in found.items():
      rows.append(report.Row(f'{minibatches} minibatches, {way}: s', seconds))
    saved = 1 - found['free'] / found['all']
    name = f'{minibatches} minibatches: share of the step saved'
    rows.append(report.bounded(name, saved, '>= 0'))
  report.show('proximal', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'Fewer repetitions.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
