"""What asynchrony wins: one machine, the same work, in turn and side by side.

  python -m benchmarks.async_vs_sync
  python -m benchmarks.async_vs_sync --short

The arms train the same model (experiments/long_tail.py, warm-started once) on
the same problems, for as many steps, on as many devices:

  sync    eta 0, colocated: training and generation in turn on all devices
  eta 1   one device trains, the other one generates, one version ahead
  eta 4   the same, four versions ahead

Each has its best slot count and number of decode steps a dispatch, from the
sweep in `SWEEP`; those of eta 4 are those of eta 1. Arms alternate. A ratio is
the median over the rounds of the ratio within a round, since a machine's speed
drifts from one round to the next; the table shows the median run of each arm.

*Throughput* is effective: sampled tokens that updates consumed, a second of
wall time, over the steps after `--warm` of them. Updates are real ones, at a
learning rate so low that answers keep their lengths.

*The bound.* Both devices of a CPU are the same C cores, so asynchrony cannot
win what a second machine would. It can win what the synchronous run wastes:

  waiting   cores that have nothing to do: C · wall - others - spent
  waste     decode steps run for all slots of which few still speak:
            (1 - occupancy) · (processor seconds inside of decode dispatches)

  bound = (C · wall - others) / (spent - waste)

with `spent` the processor seconds of the synchronous run and its reward
workers, `others` those that other programs took, and occupancy the share of
slots that drew a token in a decode step. It is reached by a run that needs
nothing more, keeps every slot speaking and no core idle. Beside the bound stand
its two parts for each arm: tokens a processor second (less waste) and cores
kept busy (less waiting), whose product is the throughput.

On devices of their own (8 GPUs, 1.5B parameters, tables 7 and 8 of
https://arxiv.org/abs/2505.24298) eta 1 gave 1.76 and eta 16 gave 1.92 times the
synchronous throughput.

Other programs on the machine spoil all of it: the cores that they took are
printed, and should be near 0. Needs Linux.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import tempfile
from typing import Any, Callable, Mapping, Sequence

from absl import app, flags
import numpy as np

from areal_jax import command
from areal_jax.telemetry import run_folder
from benchmarks import report, runs
from benchmarks.runs import Interval, Run

CONFIG = 'experiments/long_tail.py'
# Tried for each arm: slots at the first k, then k at the best slots.
SWEEP = {'slots': (32, 16, 64), 'steps': (4, 1, 16)}
_SWEEP_STEPS, _SWEEP_WARM = 14, 4
_SHORT_STEPS, _SHORT_WARM, _SHORT_WARM_START = 14, 4, 150

Overrides = dict[str, Any]

SYNC: Overrides = {'rollout.eta': 0, 'mesh.colocated': True}
# What 'colocated on two devices' can mean where devices share their cores: one
# pretended device, whose programs may use all of them, or two.
LAYOUTS: Mapping[str, Overrides] = {
    'one device': {},
    'two devices': {'mesh.train.fsdp': 2, 'mesh.rollout.replicas': 2},
}
ARMS: Mapping[str, Overrides] = {
    'sync': SYNC,
    'eta 1': {'rollout.eta': 1},
    'eta 4': {'rollout.eta': 4},
}
# Spans that the phase table shows, by the loop whose time they are.
PHASES = {
    'train': ('step', 'wait', 'publish'),
    'engine': ('generate', 'prefill', 'rebuild', 'swap', 'idle'),
}


@dataclasses.dataclass(frozen=True)
class Measured:
  """One run over the steps after its warm-up.

  Attributes:
    steps: how many.
    wall: seconds that they took.
    tokens: sampled tokens that they consumed.
    spent: processor seconds of the run and its workers.
    elsewhere: processor seconds of everything else on the machine.
    decoding: processor seconds inside of decode dispatches; means something
      only where nothing runs beside them, in a synchronous run.
    occupancy: share of slots that drew a token, mean over decode steps.
    phases: seconds by kind of span, of one replica where there are several.
  """

  steps: int
  wall: float
  tokens: float
  spent: float
  elsewhere: float
  decoding: float
  occupancy: float
  phases: Mapping[str, float]

  @property
  def throughput(self) -> float:
    """Tokens consumed, a second."""
    return self.tokens / self.wall

  @property
  def thrift(self) -> float:
    """Tokens consumed, a processor second."""
    return self.tokens / self.spent

  @property
  def cores(self) -> float:
    """Cores kept busy, mean."""
    return self.spent / self.wall

  @property
  def waste(self) -> float:
    """Processor seconds of decode steps for slots that no longer speak."""
    return (1 - self.occupancy) * self.decoding


def bound(sync: Measured, cores: int) -> float:
  """The most that asynchrony could gain over this run; see the top."""
  to_be_had = cores * sync.wall - sync.elsewhere
  return to_be_had / (sync.spent - sync.waste)


def measure(run: Run, warm: int) -> Measured:
  """Reads a run over the steps after the first `warm` ones.

  Raises:
    ValueError: the run has no step after those.
  """
  steps = run.spans('step')
  if len(steps) <= warm:
    raise ValueError(
        f'{run.folder} has {len(steps)} steps, wanted more than warm={warm}'
    )
  ends = [step['mono'] + step['duration'] for step in steps]
  window: Interval = (ends[warm - 1], ends[-1]) if warm else (
      run.spans('wait')[0]['mono'], ends[-1]
  )  # fmt: skip
  settings = run.config
  replicas = settings['mesh']['rollout']['replicas']
  phases = {}
  inside: dict[str, list[Interval]] = {}
  for lane, kinds in PHASES.items():
    for kind in kinds:
      spans = [
          s for s in run.spans(kind) if not s['lane'].startswith('evaluate')
      ]
      parts = [runs.overlap(span, window) for span in spans]
      inside[kind] = [part for part in parts if part is not None]
      share = replicas if lane == 'engine' else 1
      phases[kind] = runs.seconds(inside[kind]) / share
  dispatches = [
      span['fields']
      for span in run.spans('generate')
      if not span['lane'].startswith('evaluate') and runs.overlap(span, window)
  ]
  slots = settings['rollout']['engine']['slots']
  places = slots * sum(d['steps'] for d in dispatches)
  return Measured(
      steps=len(steps) - warm,
      wall=window[1] - window[0],
      tokens=sum(step['fields']['tokens'] for step in steps[warm:]),
      spent=run.load.own_within([window]),
      elsewhere=run.load.elsewhere_within([window]),
      # Replicas decode side by side, and their time is spent once.
      decoding=run.load.own_within(runs.union(inside['generate'])),
      occupancy=sum(d['tokens'] for d in dispatches) / max(1, places),
      phases=phases,
  )


def median(measured: Sequence[Measured]) -> Measured:
  """The run of median throughput; of an even number the slower of the two."""
  ordered = sorted(measured, key=lambda m: m.throughput)
  return ordered[(len(ordered) - 1) // 2]


def times(arm: Sequence[Measured], base: Sequence[Measured]) -> float:
  """How many times the throughput of the base: the median over rounds."""
  ratios = [a.throughput / b.throughput for a, b in zip(arm, base, strict=True)]
  return float(np.median(ratios))


def best(
    values: Mapping[str, Sequence[Any]],
    layouts: Sequence[str],
    measure_one: Callable[[str, Mapping[str, Any]], float],
) -> tuple[str, dict[str, Any]]:
  """Sweeps one coordinate after another, layouts last; the best of all tried.

  Args:
    values: to try, by setting; the first of each is where the sweep starts.
    layouts: to try.
    measure_one: (layout, setting values) to a throughput.
  """
  chosen = {name: options[0] for name, options in values.items()}
  layout, top = layouts[0], measure_one(layouts[0], chosen)
  for name, options in values.items():
    for option in options[1:]:
      candidate = {**chosen, name: option}
      found = measure_one(layout, candidate)
      if found > top:
        chosen, top = candidate, found
  for other in layouts[1:]:
    found = measure_one(other, chosen)
    if found > top:
      layout, top = other, found
  return layout, chosen


class Bench:
  """Starts the runs of this benchmark, all from one warm start.

  Args:
    output: folder of the runs.
    warm_start: supervised updates.
    start: folder of a run whose warm start is taken instead, or None.
  """

  def __init__(
      self, output: pathlib.Path, warm_start: int, start: pathlib.Path | None
  ):
    self._output = output
    # Programs are built once and read by every later run of the same shapes.
    self._environment = {
        'JAX_COMPILATION_CACHE_DIR': str(output / 'compiled'),
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    self._count = 0
    self._start: Overrides = {'warm_start.steps': warm_start}
    if start is None:
      start = self.run({'steps': 1}).folder
    self._start = {
        'policy.path': start / run_folder.WARM_START,
        'tokenizer.path': start / run_folder.TOKENIZER,
        'warm_start.steps': 0,
    }

  def run(self, overrides: Overrides) -> Run:
    """One run; its settings are those of the experiment but for these."""
    self._count += 1
    return runs.run(
        CONFIG,
        self._output,
        f'{self._count:03d}',
        {'evaluation.show': 0, **self._start, **overrides},
        self._environment,
    )

  def tune(self, arm: str, layouts: Mapping[str, Overrides]) -> Overrides:
    """The best settings of an arm among those of the sweep."""

    def measure_one(layout: str, values: Mapping[str, Any]) -> float:
      tried = {**ARMS[arm], **layouts[layout], **engine(values)}
      run = self.run({**tried, 'steps': _SWEEP_STEPS})
      found = measure(run, _SWEEP_WARM).throughput
      print(f'sweep {arm}, {layout}, {values}: {found:.0f} tokens/s')
      return found

    layout, values = best(SWEEP, list(layouts), measure_one)
    return {**layouts[layout], **engine(values)}


def engine(values: Mapping[str, Any]) -> Overrides:
  """Overrides of the engine's settings."""
  return {f'rollout.engine.{name}': value for name, value in values.items()}


def compare(bench: Bench, steps: int, warm: int, repeats: int, sweep: bool):
  """Runs the arms in turn; returns what was measured and all runs, by arm."""
  chosen = {arm: {} for arm in ARMS}
  if sweep:
    chosen['sync'] = bench.tune('sync', LAYOUTS)
    chosen['eta 1'] = bench.tune('eta 1', {'one and one': {}})
    chosen['eta 4'] = chosen['eta 1']
    for arm, settings in chosen.items():
      print(f'{arm} runs with {settings}')
  found: dict[str, list[Measured]] = {arm: [] for arm in ARMS}
  finished: dict[str, list[Run]] = {arm: [] for arm in ARMS}
  for _ in range(repeats):
    for arm, overrides in ARMS.items():
      run = bench.run({**overrides, **chosen[arm], 'steps': steps})
      finished[arm].append(run)
      found[arm].append(measure(run, warm))
      print(f'{arm}: {found[arm][-1].throughput:.0f} tokens/s')
  return found, finished


def rows(
    found: Mapping[str, Sequence[Measured]],
    finished: Mapping[str, Sequence[Run]],
    cores: int,
) -> list[report.Row]:
  """The figures that are reported."""
  sync = median(found['sync'])
  most = bound(sync, cores)
  lines = [report.Row('sync: tokens/s', sync.throughput)]
  for arm in list(ARMS)[1:]:
    ratio = times(found[arm], found['sync'])
    lines += [
        report.Row(f'{arm}: times sync', ratio),
        report.Row(f'{arm}: share of the bound', ratio / most),
    ]
  everything = [run for arm in finished.values() for run in arm]
  lengths = [len(s['logps']) for run in everything for s in run.samples]
  stopped = [
      s['stop_reason'] == 'stop' for run in everything for s in run.samples
  ]
  measured = [m for arm in found.values() for m in arm]
  recompiles = sum(r.summary['recompiles_after_warmup'] for r in everything)
  return [
      *lines,
      report.Row('bound on times sync', most),
      report.Row('answer tokens: mean', float(np.mean(lengths))),
      report.Row('answer tokens: p50', float(np.median(lengths))),
      report.Row('answer tokens: p99', float(np.percentile(lengths, 99))),
      report.Row('answer tokens: max', float(max(lengths))),
      report.Row('answers ended by a stop id', float(np.mean(stopped))),
      report.bounded('compilations after warm-up', recompiles, '<= 0'),
      report.Row(
          'cores taken by others',
          sum(m.elsewhere for m in measured) / sum(m.wall for m in measured),
      ),
  ]


def table(found: Mapping[str, Sequence[Measured]]) -> str:
  """Where the time of a step goes, arm by arm: milliseconds and shares."""
  medians = {arm: median(measured) for arm, measured in found.items()}
  lines = [('', *medians)]

  def line(name: str, value: Callable[[Measured], float], form: str) -> None:
    lines.append((name, *(f'{value(m):{form}}' for m in medians.values())))

  line('tokens/s', lambda m: m.throughput, '.0f')
  line('tokens/processor second', lambda m: m.thrift, '.0f')
  line('cores busy', lambda m: m.cores, '.2f')
  line('slots speaking', lambda m: m.occupancy, '.2f')
  line('step, ms', lambda m: 1000 * m.wall / m.steps, '.1f')
  line('spent a step, ms', lambda m: 1000 * m.spent / m.steps, '.1f')
  line('tokens a step', lambda m: m.tokens / m.steps, '.0f')
  for lane, kinds in PHASES.items():
    for kind in kinds:
      line(
          f'{lane}: {kind}, ms',
          lambda m, kind=kind: 1000 * m.phases[kind] / m.steps,
          '.1f',
      )
  widths = [max(map(len, column)) for column in zip(*lines)]
  return '\n'.join(
      '  '.join(
          [cells[0].ljust(widths[0])]
          + [c.rjust(w) for c, w in zip(cells[1:], widths[1:])]
      )
      for cells in lines
  )


def main(argv: Sequence[str]) -> None:
  """Prints the sweep, the runs, the table and the JSON line."""
  del argv
  short = flags.FLAGS.short
  cores = len(os.sched_getaffinity(0))
  with tempfile.TemporaryDirectory() as scratch:
    bench = Bench(
        pathlib.Path(flags.FLAGS.output or scratch),
        _SHORT_WARM_START if short else flags.FLAGS.warm_start,
        pathlib.Path(flags.FLAGS.start) if flags.FLAGS.start else None,
    )
    found, finished = compare(
        bench,
        _SHORT_STEPS if short else flags.FLAGS.steps,
        _SHORT_WARM if short else flags.FLAGS.warm,
        1 if short else flags.FLAGS.repeats,
        sweep=not short,
    )
    print(table(found))
    report.show('async_vs_sync', rows(found, finished, cores))


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool(
      'short', False, 'Under a minute: no sweep, one repeat, few steps.'
  )
  flags.DEFINE_integer('steps', 60, 'Training steps of a run.')
  flags.DEFINE_integer('warm', 10, 'Steps before the clock starts.')
  flags.DEFINE_integer('repeats', 5, 'Runs of each arm.')
  flags.DEFINE_integer('warm_start', 500, 'Supervised updates.')
  flags.DEFINE_string(
      'start', '', 'An earlier run of the experiment, to start from its start.'
  )
  flags.DEFINE_string('output', '', 'Folder of the runs; kept.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
