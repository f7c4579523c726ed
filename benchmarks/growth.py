"""How cost grows: with sequences' length, the policy and the microbatches.

  python -m benchmarks.growth --output=docs/growth.png
  python -m benchmarks.growth --short

Five series, each of points that differ in one number. The train step is that of
a run: loss and gradient of every microbatch, then one update of AdamW. Decode
is a dispatch of an engine whose slots are all at the end of long sequences;
what their caches hold does not matter for the cost, so it is never computed.

  train, length        one sequence of T tokens a row, one row, a narrow policy
  decode, length       8 slots of T tokens each, the same policy
  train, parameters    8 sequences of 128 tokens, two layers of rising width
  decode, parameters   8 slots of 256 tokens, the same policies
  train, microbatches  so many of 640 tokens each in one update

*Tokens* are those in the rows of a train step and those that a dispatch draws.
*Bytes* are those that a step has to hold at once, by what the compiler says of
its programs: arguments, results and temporary arrays, and beside them what lies
in memory meanwhile (moments, further microbatches). Tokens a second are the
median of seven calls; one of more than a second is made once.

An *exponent* is the slope of a line through the logarithms of the last three
points, where what does not grow has stopped to matter. The bars are those of
theory, with a margin for the measurement: attention's pairs make the time of a
train step quadratic in T at most, while nothing that it holds is more than
linear; a decode step reads its cache once; products are linear in parameters;
gradients are summed up in place, so microbatches take time alone.

`--short` leaves out the larger points, in about a minute.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
import statistics
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

from absl import app, flags
import jax
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
import numpy as np

from areal_jax import command
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.train import packing
from areal_jax.train.objectives import policy_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings, Shape
from areal_jax.train.step import TrainStep
from areal_jax.types import Microbatch, Request, SamplingParams
from benchmarks import report, serving

_LONG_S = 1.0  # a call of more is made once
_CALLS = 7
_FITTED = 3  # last points that an exponent is of
_SLOTS, _STEPS = 8, 8  # of decode: sequences, and tokens of each a dispatch
_COLORS = {'train': '#c05621', 'decode': '#2b6cb0'}
_MIB = 2**20


@dataclasses.dataclass(frozen=True)
class Point:
  """One measurement.

  Attributes:
    at: what the series varies.
    tokens: of a call.
    seconds: of a call.
    held: bytes at once.
  """

  at: int
  tokens: int
  seconds: float
  held: int


@dataclasses.dataclass(frozen=True, eq=False)
class Axis:
  """What a series varies, and how much cost may grow with it.

  Attributes:
    name: of it.
    unit: of its values.
    time: largest exponent of the seconds of a call, by what is measured.
    held: largest exponent of its bytes.
  """

  name: str
  unit: str
  time: Mapping[str, float]
  held: float


LENGTH = Axis('length', 'tokens', {'train': 2.1, 'decode': 1.1}, 1.1)
PARAMETERS = Axis('parameters', '', {'train': 1.1, 'decode': 1.1}, 1.1)
MICROBATCHES = Axis('microbatches', '', {'train': 1.1}, 0.05)


@dataclasses.dataclass(frozen=True)
class Series:
  """Points along an axis, of 'train' or 'decode'."""

  what: str
  axis: Axis
  points: tuple[Point, ...]

  @property
  def name(self) -> str:
    return f'{self.what}, {self.axis.name}'


@dataclasses.dataclass(frozen=True)
class Plan:
  """Where the points lie: tokens, widths, numbers of microbatches."""

  lengths: tuple[int, ...]
  widths: tuple[int, ...]
  microbatches: tuple[int, ...]


def plan(short: bool) -> Plan:
  """The series of the top, or the beginning of each."""
  if short:
    return Plan((1024, 2048, 4096), (64, 128, 256), (1, 2, 4))
  return Plan(
      tuple(1024 * 2**i for i in range(6)),
      (128, 256, 512, 1024),
      (1, 2, 4, 8, 16),
  )


def narrow(length: int) -> ModelConfig:
  """A policy whose cost is that of its attention, for long sequences."""
  return ModelConfig(
      family='qwen2',
      vocab_size=256,
      width=32,
      layers=1,
      heads=2,
      kv_heads=1,
      head_size=16,
      mlp_width=64,
      max_length=length,
      qkv_bias=True,
      tied_embeddings=False,
  )


def wide(width: int) -> ModelConfig:
  """A policy of two layers whose cost is that of its matrices."""
  return ModelConfig(
      family='qwen2',
      vocab_size=256,
      width=width,
      layers=2,
      heads=width // 32,
      kv_heads=max(1, width // 64),
      head_size=32,
      mlp_width=4 * width,
      max_length=256,
      qkv_bias=True,
      tied_embeddings=False,
  )


# What is measured.


class Training:
  """A train step with its state.

  Args:
    config: the policy.
    shape: of a microbatch.
    length: tokens of each sequence, a divisor of the shape's row.
  """

  def __init__(self, config: ModelConfig, shape: Shape, length: int):
    mesh = serving.one_device()
    self._shape = shape
    self._full = filled(shape, length, config.vocab_size)
    self._step = TrainStep(
        config,
        policy_objective(PolicyLoss()),
        OptimizerSettings(learning_rate=1e-5),
        mesh,
        Rules(),
        PackingSettings(shape.row_tokens, shape.rows),
    )
    self._state = self._step.initial_state(serving.init_params(config, mesh))
    self._step.warm_up()

  def point(self, count: int, at: int) -> Point:
    """An update from so many microbatches, all of them full."""
    tokens = count * self._shape.rows * self._shape.row_tokens
    batches = [self._step.place(self._full, tokens, 0) for _ in range(count)]

    def call() -> Any:
      total = self._step.accumulate(self._state, batches)
      self._state, outcome = self._step.apply(self._state, total, teaches=True)
      return self._state.policy.trainable, outcome

    seconds = seconds_of(call)
    return Point(at, tokens, seconds, self._held(_bytes(batches), count))

  def _held(self, placed: int, count: int) -> int:
    """Bytes at once, with `count` microbatches placed."""
    accumulate = self._step._program('accumulate', self._shape)
    moments = _bytes(self._state.policy.optimizer)
    others = placed - placed // count
    return max(
        _held(accumulate) + moments + others,
        _held(self._step._program('apply')) + placed,
    )


def decode_point(config: ModelConfig, length: int, at: int) -> Point:
  """A dispatch of an engine whose slots all end sequences of a length."""
  mesh = serving.one_device()
  settings = EngineSettings(
      slots=_SLOTS, max_length=length, max_prompt_length=length - 1,
      steps=_STEPS,
  )  # fmt: skip
  engine = Engine(config, settings, mesh, Rules())
  params = engine.lay_out(serving.init_params(config, mesh))
  left = _STEPS * (1 + _CALLS)
  prompt = (1,) * (length - left)
  requests = [
      Request(str(slot), prompt, SamplingParams(left), draw_index=slot)
      for slot in range(_SLOTS)
  ]
  state = engine.occupy(
      engine.init_decode_state(),
      range(_SLOTS),
      requests,
      [np.asarray(prompt, np.int32)] * _SLOTS,
  )
  tables = engine.own_tables()
  steps = np.int32(_STEPS)
  # Compiled by hand, for what the compiler says of it.
  traced = engine.jitted.trace_generate(params, tables.shape[1])
  program = traced.lower().compile()

  def call() -> Any:
    nonlocal state, result
    state, result = program(params, state, tables, steps, None)  # all slots
    return result

  result = None
  seconds = seconds_of(call)
  if not result.valid.all():
    raise RuntimeError(f'{length}: slots ended before {left} tokens')
  return Point(at, _SLOTS * _STEPS, seconds, _held(program))


def filled(shape: Shape, length: int, vocabulary: int) -> Microbatch:
  """Rows full of sequences of one length, all but their first token trained."""
  made = packing.empty(shape)
  arrays = made.arrays()
  places = np.arange(shape.row_tokens)
  rng = np.random.default_rng(0)
  arrays['ids'][:] = rng.integers(1, vocabulary, made.ids.shape)
  arrays['positions'][:] = places % length
  arrays['segment_ids'][:] = 1 + places // length
  arrays['loss_mask'][:] = places % length > 0
  arrays['behavior_logps'][:] = -math.log(vocabulary) * arrays['loss_mask']
  arrays['advantages'][:] = rng.normal(size=made.ids.shape)
  arrays['versions'][:] = 0
  return made


def seconds_of(call: Callable[[], Any]) -> float:
  """Median of some calls behind one that is not counted; see the top."""
  taken = []
  for _ in range(1 + _CALLS):
    start = time.perf_counter()
    jax.block_until_ready(call())
    taken.append(time.perf_counter() - start)
    if taken[0] > _LONG_S:
      return taken[0]
  return statistics.median(taken[1:])


def _held(program: jax.stages.Compiled) -> int:
  """Bytes that a program has in memory while it runs."""
  m = program.memory_analysis()
  held = m.argument_size_in_bytes + m.output_size_in_bytes
  return held + m.temp_size_in_bytes - m.alias_size_in_bytes


def _bytes(arrays: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(arrays))


def parameters(config: ModelConfig) -> int:
  """Of the matrices of all layers and the unembedding."""
  from_width = config.heads + 2 * config.kv_heads
  layer = config.width * from_width * config.head_size
  layer += config.heads * config.head_size * config.width
  layer += 3 * config.width * config.mlp_width
  return config.layers * layer + config.width * config.vocab_size


def measure(chosen: Plan) -> list[Series]:
  """All series, told point by point."""
  lengths, wides = chosen.lengths, [wide(w) for w in chosen.widths]
  training = functools.cache(
      lambda: Training(wides[0], Shape(8, 80), 80)
  )  # of all microbatches
  rising = Shape(8, 128)
  points: dict[tuple[str, Axis], list[Callable[[], Point]]] = {
      ('train', LENGTH): [
          lambda n=n: Training(narrow(n), Shape(1, n), n).point(1, n)
          for n in lengths
      ],
      ('decode', LENGTH): [
          lambda n=n: decode_point(narrow(n), n, n) for n in lengths
      ],
      ('train', PARAMETERS): [
          lambda c=c: Training(c, rising, 128).point(1, parameters(c))
          for c in wides
      ],
      ('decode', PARAMETERS): [
          lambda c=c: decode_point(c, 256, parameters(c)) for c in wides
      ],
      ('train', MICROBATCHES): [
          lambda n=n: training().point(n, n) for n in chosen.microbatches
      ],
  }
  found = []
  for (what, axis), calls in points.items():
    found.append(Series(what, axis, tuple(_told(what, axis, calls))))
  return found


def _told(
    what: str, axis: Axis, calls: Sequence[Callable[[], Point]]
) -> Iterator[Point]:
  for call in calls:
    point = call()
    print(
        f'{what}, {axis.name} {point.at:,}: {point.seconds:.4g} s,'
        f' {point.held / _MIB:.1f} MiB',
        flush=True,
    )
    yield point


# What is reported.


def exponent(at: Sequence[float], values: Sequence[float]) -> float:
  """b of values ~ a · at^b: least squares over logarithms of the last points.

  Raises:
    ValueError: fewer than two points.
  """
  if len(at) < 2:
    raise ValueError(f'{len(at)} points, wanted at least 2')
  x, y = (np.log(np.asarray(v[-_FITTED:], np.float64)) for v in (at, values))
  x = x - x.mean()
  return float((x * y).sum() / (x * x).sum())


def rows(series: Sequence[Series]) -> list[report.Row]:
  """Points and exponents of all series."""
  lines = []
  for one in series:
    for point in one.points:
      at = f'{one.name} {point.at:,}'
      lines += [
          report.Row(f'{at}: tokens/s', point.tokens / point.seconds),
          report.Row(f'{at}: MiB', point.held / _MIB),
      ]
  for one in series:
    at = [point.at for point in one.points]
    seconds = exponent(at, [point.seconds for point in one.points])
    held = exponent(at, [point.held for point in one.points])
    most = one.axis.time[one.what]
    lines += [
        report.bounded(f'{one.name}: exponent of time', seconds, f'<= {most}'),
        report.bounded(
            f'{one.name}: exponent of memory', held, f'<= {one.axis.held}'
        ),
    ]
  return lines


def draw(series: Sequence[Series], path: pathlib.Path) -> None:
  """Tokens a second above, memory below, an axis a column; into a PNG."""
  axes = list(dict.fromkeys(one.axis.name for one in series))
  figure = Figure(figsize=(10.0, 6.0), dpi=120, layout='constrained')
  FigureCanvasAgg(figure)
  panels = figure.subplots(
      2, len(axes), sharex='col', sharey='row', squeeze=False
  )
  for column, name in enumerate(axes):
    above, below = panels[:, column]
    own = [one for one in series if one.axis.name == name]
    for one in own:
      style = dict(color=_COLORS[one.what], label=one.what, marker='o')
      at = [point.at for point in one.points]
      above.plot(at, [p.tokens / p.seconds for p in one.points], **style)
      below.plot(at, [p.held / _MIB for p in one.points], **style)
    for panel in (above, below):
      panel.set_xscale('log', base=2)
      panel.set_yscale('log')
      panel.grid(color='#e2e8f0', linewidth=0.8)
      panel.set_axisbelow(True)
      panel.spines[['top', 'right']].set_visible(False)
    unit = own[0].axis.unit
    below.set_xlabel(f'{name} ({unit})' if unit else name)
    if max(p.at for one in own for p in one.points) <= 1024:
      below.xaxis.set_major_formatter('{x:g}')
  panels[0, 0].legend(frameon=False, fontsize=9)
  panels[0, 0].set_ylabel('tokens a second')
  panels[1, 0].set_ylabel('memory held at once (MiB)')
  path.parent.mkdir(parents=True, exist_ok=True)
  figure.savefig(path, format='png')


def main(argv: Sequence[str]) -> None:
  """Prints the points, the table and the JSON line; draws if asked."""
  del argv
  found = measure(plan(flags.FLAGS.short))
  if flags.FLAGS.output:
    draw(found, pathlib.Path(flags.FLAGS.output))
  report.show('growth', rows(found))


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'The smaller points alone.')
  flags.DEFINE_string('output', '', 'A PNG to draw into.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
