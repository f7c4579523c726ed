"""The train step against its bars: packed, beside other systems, and its peak.

  python -m benchmarks.train --tunix=PYTHON --trl=PYTHON
  python -m benchmarks.train --short

PYTHON are interpreters of environments of their own: one that has google-tunix
0.1.7, one that has torch and transformers (an environment for TRL has both).
Their part of the work is in `benchmarks/peers`; without an interpreter the rows
that compare with it are left out. `--short` runs a small policy on little work,
in under a minute: it shows that all of it runs, and its figures mean nothing.

The policy is a Qwen2 of 4.2 M parameters (4 layers, width 256, 512 tokens) with
random weights, in float32. A batch is 64 answers to prompts of 16 tokens; a
step packs it, computes loss and gradient and makes one update of AdamW, and
ends when the new parameters are there. *Tokens* are those of answers. Systems
take turns on the same batches, round by round, and a ratio is the median of the
rounds' ratios.

*Packed* compares rows that several answers share with the usual four
microbatches of 16 answers, one a row, each padded to its own longest answer (to
a multiple of 16 tokens), by the same compiled step.

*Beside other systems*: answers that all reach the limit of 64 tokens, and
answers that end by themselves after 25 in the mean, which others pad. Tunix's
step is that of its GRPO learner; torch's what TRL's trainer computes, without
its bookkeeping.

*Utilisation* is the rate of the step, in FLOP/s, at width 512, divided by the
rate of its own matrix products alone: each as one plain jitted product of the
same sizes, forward and both of the backward pass. Products of the layers and of
the unembedding count, and of attention the half that a causal mask leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import statistics
import time
from typing import Any, Callable, Mapping, Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax import command
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.train import packing
from areal_jax.train.objectives import policy_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings, Shape
from areal_jax.train.step import TrainStep
from areal_jax.types import (
    Microbatch,
    RewardResult,
    RewardStatus,
    Trajectory,
)
from benchmarks import generate, report, serving
from benchmarks.serving import Peer

OURS = 'ours'
_STEP = 16  # padded rows are a multiple of it

Cut = Callable[[Sequence[Trajectory], Sequence[np.ndarray]], list[Microbatch]]


@dataclasses.dataclass(frozen=True)
class Batch:
  """Answers of one step.

  Attributes:
    prompts: ids, all equally long.
    answers: ids.
    advantages: one an answer.
    limit: tokens that an answer may have.
    group: answers that have their prompt in common.
  """

  prompts: list[list[int]]
  answers: list[list[int]]
  advantages: list[float]
  limit: int
  group: int = 8

  @property
  def tokens(self) -> int:
    return sum(map(len, self.answers))

  def trajectories(self) -> list[Trajectory]:
    """The same as rollout would bring it, sampled under version 0."""
    found = []
    for i, (prompt, answer) in enumerate(zip(self.prompts, self.answers)):
      mask = np.r_[np.zeros(len(prompt)), np.ones(len(answer))]
      mask = mask.astype(np.float32)
      found.append(
          Trajectory(
              draw_index=i // self.group,
              sample=i % self.group,
              segments=(),
              ids=np.array(prompt + answer, np.int32),
              loss_mask=mask,
              logps=-6.0 * mask,
              versions=np.where(mask > 0, 0, -1).astype(np.int32),
              turn_ids=np.zeros(len(mask), np.int32),
              reward=RewardResult(RewardStatus.OK, 0.0),
              temperature=1.0,
              admitted_version=0,
          )
      )
    return found


@dataclasses.dataclass(frozen=True)
class Work:
  """Batches of one row of the table.

  Attributes:
    name: of the row.
    answers: in a batch.
    limit: tokens that an answer may have.
    stops: m of the V tokens end an answer, so that lengths are geometric with
      mean V / m up to the limit; 0 for answers that all reach it.
    packing: our shapes for it.
    prompt: tokens of each prompt.
  """

  name: str
  answers: int
  limit: int
  stops: int
  packing: PackingSettings
  prompt: int = 16

  def batch(self, vocabulary: int, turn: int) -> Batch:
    """The batch of a turn; another one each time where lengths vary."""
    rng = np.random.default_rng([self.stops, turn])
    lengths = np.full(self.answers, self.limit)
    if self.stops:
      drawn = rng.geometric(self.stops / vocabulary, self.answers)
      lengths = np.minimum(drawn, self.limit)
    draw = lambda n: rng.integers(1, vocabulary, n).tolist()
    return Batch(
        [draw(self.prompt) for _ in range(self.answers)],
        [draw(n) for n in lengths],
        rng.normal(size=self.answers).tolist(),
        self.limit,
    )


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is measured.

  Attributes:
    model: the policy.
    full: answers of the limit.
    mean: answers that end by themselves.
    tail: a long tail, for packing alone.
    wide: the policy of the utilisation, and its batch.
  """

  model: ModelConfig
  full: Work
  mean: Work
  tail: Work
  wide: tuple[ModelConfig, Work]


def plan(short: bool) -> Plan:
  """The table of the top, or a small one."""
  model = generate.plan(short).model
  if short:
    rows = PackingSettings(48, 8, fewer=(2, 4))
    few = Work('full', 8, 32, 0, PackingSettings(48, 8))
    return Plan(
        model,
        full=few,
        mean=Work('mean 13 of 32', 8, 32, 4, rows),
        tail=Work('long tail', 16, 32, 4, rows),
        wide=(dataclasses.replace(model, width=96), few),
    )
  return Plan(
      model,
      full=Work('full 64', 64, 64, 0, PackingSettings(80, 64)),
      mean=Work(
          'mean 25 of 64',
          64,
          64,
          19,
          PackingSettings(160, 20, fewer=(14, 15, 16, 17, 18, 19)),
      ),
      tail=Work(
          'long tail of 512',
          64,
          512,
          8,
          PackingSettings(528, 8, fewer=(1, 2, 4)),
      ),
      wide=(
          dataclasses.replace(
              model, width=512, heads=8, kv_heads=4, mlp_width=2048
          ),
          Work('width 512', 32, 64, 0, PackingSettings(80, 32)),
      ),
  )


class Ours:
  """Our step, for the shapes of one work.

  Args:
    config: of the policy.
    shapes: of its microbatches.
    cut: a batch into microbatches; None packs it.
  """

  def __init__(
      self,
      config: ModelConfig,
      shapes: PackingSettings,
      cut: Cut | None = None,
  ):
    mesh = serving.one_device()
    self._step = TrainStep(
        config,
        policy_objective(PolicyLoss()),
        OptimizerSettings(learning_rate=1e-5),
        mesh,
        Rules(),
        shapes,
    )
    self._cut = cut or (lambda t, a: packing.pack(t, a, shapes))
    self._step.warm_up()
    self._state = self._step.initial_state(serving.init_params(config, mesh))
    self.padding: list[float] = []

  def update(self, batch: Batch) -> tuple[float, int]:
    """Seconds and tokens of one step."""
    trajectories = batch.trajectories()
    start = time.perf_counter()
    advantages = [
        advantage * t.loss_mask
        for advantage, t in zip(batch.advantages, trajectories)
    ]
    microbatches = self._cut(trajectories, advantages)
    placed = [self._step.place(m, batch.tokens, 0) for m in microbatches]
    total = self._step.accumulate(self._state, placed)
    self._state, outcome = self._step.apply(self._state, total, teaches=True)
    jax.block_until_ready(self._state.policy.trainable)
    seconds = time.perf_counter() - start
    self._step.fetch([outcome], 0)
    self.padding.append(packing.padding_fraction(microbatches))
    return seconds, batch.tokens


def as_json(batch: Batch) -> dict[str, Any]:
  """The batch as other systems take it."""
  return dataclasses.asdict(batch)


# Packed or padded.


def one_a_row(rows: int) -> Cut:
  """Microbatches of `rows` answers in order, padded to the longest of each."""

  def cut(trajectories, advantages):
    made = []
    for first in range(0, len(trajectories), rows):
      own = trajectories[first : first + rows]
      longest = max(len(t.ids) for t in own)
      shape = Shape(rows, -(-longest // _STEP) * _STEP)
      padded = packing.empty(shape)
      arrays = padded.arrays()
      for row, (one, advantage) in enumerate(
          zip(own, advantages[first : first + rows], strict=True)
      ):
        at = (row, slice(0, len(one.ids)))
        arrays['ids'][at] = one.ids
        arrays['loss_mask'][at] = one.loss_mask
        arrays['behavior_logps'][at] = one.logps
        arrays['advantages'][at] = advantage
        arrays['versions'][at] = one.versions
        arrays['positions'][at] = np.arange(len(one.ids))
        arrays['segment_ids'][at] = 1
      made.append(padded)
    return made

  return cut


def packing_rows(
    config: ModelConfig, work: Work, rounds: int, microbatches: int = 4
) -> list[report.Row]:
  """Trained tokens a second of packed rows and of padded microbatches."""
  batches = [work.batch(config.vocab_size, turn) for turn in range(2)]
  rows = work.answers // microbatches
  cut = one_a_row(rows)
  lengths = sorted(
      {
          m.ids.shape[1]
          for batch in batches
          for m in cut(batch.trajectories(), _no_advantages(batch))
      }
  )
  shapes = PackingSettings(lengths[-1], rows, shorter=tuple(lengths[:-1]))
  packed, padded = Ours(config, work.packing), Ours(config, shapes, cut)
  speeds: dict[str, list[float]] = {'packed': [], 'padded': []}
  for turn in range(1 + rounds):
    for name, system in (('packed', packed), ('padded', padded)):
      seconds, tokens = system.update(batches[turn % 2])
      if turn:
        speeds[name].append(tokens / seconds)
  at = f'{work.name}: '
  found = [
      report.Row(f'{at}tokens/s, {name}', statistics.median(speeds[name]))
      for name in speeds
  ]
  found += [
      report.Row(f'{at}padding, {name}', statistics.mean(system.padding))
      for name, system in (('packed', packed), ('padded', padded))
  ]
  ratio = generate.ratio_of(speeds['packed'], speeds['padded'])
  return [*found, report.bounded(f'{at}packed / padded', ratio, '>= 1.3')]


def _no_advantages(batch: Batch) -> list[np.ndarray]:
  return [np.zeros(len(t.ids)) for t in batch.trajectories()]


# Beside other systems.


def compare(
    config: ModelConfig,
    work: Work,
    peers: Mapping[str, Peer],
    bars: Mapping[str, str],
    rounds: int,
) -> list[report.Row]:
  """One step of every system in turn, on the same batches."""
  ours = Ours(config, work.packing)
  seconds: dict[str, list[float]] = {name: [] for name in (OURS, *peers)}
  tokens: list[int] = []
  # The second call of others may compile again.
  for turn in range(2 + rounds):
    batch = work.batch(config.vocab_size, turn)
    taken = {OURS: ours.update(batch)}
    taken |= {name: p.serve(as_json(batch)) for name, p in peers.items()}
    if len({count for _, count in taken.values()}) > 1:
      raise RuntimeError(f'{work.name}: tokens differ: {taken}')
    if turn >= 2:
      tokens.append(batch.tokens)
      for name, (spent, _) in taken.items():
        seconds[name].append(spent)
  at = f'{work.name}: '
  speed = statistics.median(
      n / s for n, s in zip(tokens, seconds[OURS], strict=True)
  )
  rows = [
      report.Row(f'{at}tokens/s', speed),
      report.Row(f'{at}step, s', statistics.median(seconds[OURS])),
      report.Row(f'{at}padding', statistics.mean(ours.padding)),
  ]
  for name in peers:
    ratio = generate.ratio_of(seconds[name], seconds[OURS])
    rows += [
        report.Row(f'{at}step, s, {name}', statistics.median(seconds[name])),
        report.bounded(f'{at}times {name}', ratio, bars[name]),
    ]
  return rows


# Utilisation.


def products(config: ModelConfig, tokens: int) -> list[tuple[int, ...]]:
  """[rows, inner, columns] of every matrix product of a step."""
  *layer, last = generate.product_shapes(config)
  found = []
  for a, b in [*layer * config.layers, last]:
    found += [(tokens, a, b), (tokens, b, a), (a, tokens, b)]
  return found


def flops(config: ModelConfig, tokens: int, length: int) -> float:
  """Of a step on sequences of one length; see the top.

  A token at place t of its sequence attends to t + 1 others, by two products
  forward and four backward, of 2 N H operations each.
  """
  dense = sum(2 * m * k * n for m, k, n in products(config, tokens))
  seen = tokens * (length + 1) / 2
  return dense + 12 * config.layers * config.heads * config.head_size * seen


def utilisation_rows(
    config: ModelConfig, work: Work, rounds: int
) -> list[report.Row]:
  """The step's rate and that of its products alone, in turn."""
  ours = Ours(config, work.packing)
  batch = work.batch(config.vocab_size, 0)
  length = work.prompt + work.limit
  tokens = work.answers * length
  shapes = products(config, tokens)
  multiply = jax.jit(lambda a, b: a @ b)
  key = jax.random.key(0)
  operands = {
      (m, k, n): (
          jax.random.normal(key, (m, k)),
          jax.random.normal(key, (k, n)),
      )
      for m, k, n in set(shapes)
  }
  dense = sum(2 * m * k * n for m, k, n in shapes)
  rates: dict[str, list[float]] = {'step': [], 'products': []}
  for turn in range(1 + rounds):
    step = flops(config, tokens, length) / ours.update(batch)[0]
    alone = {s: generate.seconds_of(multiply, *operands[s]) for s in operands}
    if turn:
      rates['step'].append(step)
      rates['products'].append(dense / sum(alone[s] for s in shapes))
  found = [
      report.Row(
          f'{work.name}: GFLOP/s, {name}', statistics.median(rates[name]) / 1e9
      )
      for name in rates
  ]
  share = generate.ratio_of(rates['step'], rates['products'])
  return [
      *found,
      report.bounded(f'{work.name}: utilisation', share, '>= 0.6'),
  ]


# The whole.


def _packing(chosen, peers, rounds) -> list[report.Row]:
  del peers
  return [
      row
      for work in (chosen.mean, chosen.tail)
      for row in packing_rows(chosen.model, work, rounds)
  ]


def _step(chosen, peers, rounds) -> list[report.Row]:
  full = {'Tunix': '>= 1.7', 'torch': '>= 1'}
  mean = {'Tunix': '>= 3', 'torch': '>= 1.7'}
  return [
      *compare(chosen.model, chosen.full, peers, full, rounds),
      *compare(chosen.model, chosen.mean, peers, mean, rounds),
  ]


def _utilisation(chosen, peers, rounds) -> list[report.Row]:
  del peers
  return utilisation_rows(*chosen.wide, rounds)


PARTS = {'packing': _packing, 'step': _step, 'utilisation': _utilisation}


def measure(
    chosen: Plan, peers: Mapping[str, Peer], rounds: int, only: Sequence[str]
) -> list[report.Row]:
  """All rows, part by part.

  Args:
    chosen: what to measure.
    peers: other systems by name.
    rounds: turns of each.
    only: names of `PARTS` to run.
  """
  return [row for part in only for row in PARTS[part](chosen, peers, rounds)]


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  chosen = plan(flags.FLAGS.short)
  scripts = {'Tunix': 'tunix_trainer.py', 'torch': 'torch_trainer.py'}
  serving.show_parts(
      'train', PARTS, chosen.model, scripts, functools.partial(measure, chosen)
  )


if __name__ == '__main__':
  serving.define_flags()
  app.run(main, flags_parser=command.read_own_flags)
