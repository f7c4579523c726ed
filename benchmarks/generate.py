"""Generation against its bars: beside other systems, and against its floor.

  python -m benchmarks.generate --tunix=PYTHON --trl=PYTHON
  python -m benchmarks.generate --short

PYTHON are interpreters of environments of their own: one that has google-tunix
0.1.7, one that has torch and transformers (an environment for TRL has both).
Their part of the work is in `benchmarks/peers`; without an interpreter the rows
that compare with it are left out. `--short` runs a small policy on little work,
in under a minute: it shows that all of it runs, and its figures mean nothing.

The policy is a Qwen2 of 4.2 M parameters (4 layers, width 256, 512 tokens) with
random weights, in float32. Where answers end by themselves, its unembedding is
0 in all systems, so every token is as likely as any other, m of the V tokens
are stop ids, and lengths are geometric with mean V / m up to their limit: no
system is dealt easier answers than another.

*Tokens* are those that were asked for: sampled ones up to the limit or the stop
id, that one included. *Seconds* run from handing all requests over to the last
answer; other systems get their requests in batches of as many as we have slots,
in the same order. Systems take turns, round by round, and a ratio is the median
of the rounds' ratios.

*Slots busy* is the share of slots that drew a token in a decode step, as long
as requests wait. When none wait any more, slots must run empty one by one.

*The floor* of a decode step is what it cannot do without: its matrix products,
timed alone in one program (with activations and weights of the same shapes),
and reading the cached keys and values that its queries attend to, at the rate
at which a copy of an array of that size reads and writes, and the products of
attention at the rate of the others. Both alone find their arrays in the
processor's cache, which weights and cached keys together may not fit: the same
products and the same reading in one program, layer by layer, are told beside.

*Host* is the share of the time in which no program was under way.

*Interruption* runs the long tail with new weights each so many answers:
`recompute` rebuilds the caches and goes on, `drain` lets running answers end
first. The figures are of the time in which requests wait. The *gap* is
|log p (engine) - log p (policy of that version)| of tokens that were sampled
after a swap: `recompute` leaves rounding, `keep` goes on over old caches.

*The first token* is timed in a process of its own, from the end of its imports:
weights, programs and all, without and with a persistent compilation cache.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Callable, Mapping, Sequence

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import command
from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.loop import EngineLoop
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.types import Completion
from benchmarks import report, serving
from benchmarks.serving import Ours, Peer, Served, Work

OURS = 'ours'
_SCORED = 64  # answers whose log-probs are computed again

Params = Any


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is measured.

  Attributes:
    model: the policy.
    fixed: rows of fixed length.
    mean: answers that end by themselves, far below their limit.
    tail: the same with a limit that few reach.
    group: prompts that are long, and shared.
    swap_each: answers between two versions of the weights.
  """

  model: ModelConfig
  fixed: tuple[Work, ...]
  mean: Work
  tail: Work
  group: Work
  swap_each: int


def plan(short: bool) -> Plan:
  """The table of the top, or a small one."""
  small = dict(vocab_size=64, width=64, layers=2, head_size=16, mlp_width=128)
  model = ModelConfig(
      family='qwen2',
      **{
          'vocab_size': 512,
          'width': 256,
          'layers': 4,
          'heads': 4,
          'kv_heads': 2,
          'head_size': 64,
          'mlp_width': 1024,
          'qkv_bias': True,
          'tied_embeddings': False,
          **(small if short else {}),
      },
  )
  if short:
    return Plan(
        model,
        # All of them fit one engine.
        fixed=(Work('fixed 32, batch 8', 8, 8, limit=32),),
        mean=Work('mean 13 of 32', 8, 32, limit=32, stops=4),
        tail=Work('long tail', 8, 64, limit=32, stops=4),
        group=Work('8 samples of 64', 8, 16, prompt=64, limit=8),
        swap_each=16,
    )
  return Plan(
      model,
      fixed=tuple(
          Work(f'fixed 64, batch {b}', b, b, limit=64) for b in (32, 64)
      ),
      mean=Work('mean 25 of 64', 64, 512, limit=64, stops=19),
      tail=Work('long tail', 64, 512, limit=512, stops=8),
      group=Work('8 samples of 256', 64, 64, prompt=256, limit=64),
      swap_each=64,
  )


# Parts of the table.


def compare(
    work: Work,
    ours: Ours,
    peers: Mapping[str, Peer],
    bars: Mapping[str, str],
    rounds: int,
    beside: Callable[[], None] = lambda: None,
) -> tuple[list[report.Row], list[Served]]:
  """Serves a work by all systems in turn.

  Args:
    work: what to serve.
    ours: our engine for it.
    peers: other systems by name.
    bars: of the ratio to each of them.
    rounds: turns of each, behind one that warms up.
    beside: taken in turn with them.
  """
  served: list[Served] = []
  speeds: dict[str, list[float]] = {name: [] for name in (OURS, *peers)}
  tokens: dict[str, list[int]] = {name: [] for name in peers}
  batches = work.batches(ours.config.vocab_size)
  for turn in range(1 + rounds):
    found = ours.serve(work, ours.flat)
    beside()
    others = {name: peer.serve(batches) for name, peer in peers.items()}
    if turn:
      served.append(found)
      speeds[OURS].append(found.tokens / found.seconds)
      for name, (seconds, count) in others.items():
        speeds[name].append(count / seconds)
        tokens[name].append(count)
  at = f'{work.name}: '
  rows = [report.Row(f'{at}tokens/s', statistics.median(speeds[OURS]))]
  if work.stops:
    mean = statistics.mean(s.mean for s in served)
    rows.append(report.Row(f'{at}tokens an answer', mean))
  for name in peers:
    ratio = ratio_of(speeds[OURS], speeds[name])
    bar = bars.get(name, '')
    row = f'{at}times {name}'
    rows += [
        report.Row(f'{at}tokens/s, {name}', statistics.median(speeds[name])),
        report.bounded(row, ratio, bar) if bar else report.Row(row, ratio),
    ]
    if work.stops:
      mean = statistics.mean(tokens[name]) / work.requests
      rows.append(report.Row(f'{at}tokens an answer, {name}', mean))
  return rows, served


def ratio_of(ours: Sequence[float], others: Sequence[float]) -> float:
  """Median of the ratios of rounds; drift of the machine cancels in each."""
  return statistics.median(a / b for a, b in zip(ours, others, strict=True))


def steady_rows(work: Work, served: Sequence[Served]) -> list[report.Row]:
  """How well slots were used, and what the host cost."""
  busy = statistics.median(s.busy(work.slots) for s in served)
  whole = statistics.median(s.tokens / (s.steps * work.slots) for s in served)
  host = statistics.median(s.host for s in served)
  return [
      report.bounded(f'{work.name}: slots busy', busy, '>= 0.9'),
      report.Row(f'{work.name}: slots busy, to the last answer', whole),
      report.bounded(f'{work.name}: host', host, '<= 0.05'),
  ]


class Floor:
  """What a decode step of so many slots cannot do without.

  Args:
    config: of the policy.
    slots: S.
    context: cached tokens that a query attends to, mean.
  """

  steps = 16  # in one program, so that its dispatch does not count

  def __init__(self, config: ModelConfig, slots: int, context: float):
    self._config, self._slots, self._context = config, slots, context
    shapes = product_shapes(config)
    key = jax.random.key(0)
    normal = lambda i, shape: jax.random.normal(
        jax.random.fold_in(key, i), shape
    ) / np.sqrt(shape[0])
    weights = [
        [normal(100 * layer + i, s) for i, s in enumerate(shapes[:-1])]
        for layer in range(config.layers)
    ]
    self._weights = weights, normal(99, shapes[-1])
    self._start = normal(98, (slots, config.width))
    # Keys and values of all layers that the queries of a step read.
    entries = slots * context * config.kv_heads * config.head_size
    self._cached = 2 * config.layers * int(entries)
    self._cache = jnp.zeros(self._cached, jnp.float32)
    self._products = jax.jit(self._products_program)
    self._copy = jax.jit(lambda x: x + 1)
    self._together = jax.jit(self._together_program)
    self.times: list[tuple[float, float, float]] = []

  def measure(self) -> None:
    """Seconds of products, of reading the cache, of both in one program."""
    given = self._start, self._weights
    products = seconds_of(self._products, *given)
    # A copy reads and writes; attention reads.
    copy = seconds_of(self._copy, self._cache) / 2
    both = seconds_of(self._together, *given, self._cache)
    self.times.append((products / self.steps, copy, both / self.steps))

  def seconds(self) -> tuple[float, float, float, float]:
    """Medians: products, reading, both in one, attention's products."""
    products, copy, both = (statistics.median(t) for t in zip(*self.times))
    c, slots = self._config, self._slots
    plain = sum(2 * slots * a * b for a, b in product_shapes(c)[:-1])
    plain = plain * c.layers + 2 * slots * np.prod(product_shapes(c)[-1])
    own = 4 * c.layers * slots * c.heads * c.head_size * self._context
    return products, copy, both, products * own / plain

  def _products_program(self, start, weights):
    return self._together_program(start, weights, None)

  def _together_program(self, start, weights, cache):
    c = self._config
    layers, unembedding = weights
    queries = c.heads * c.head_size
    parts = None if cache is None else cache.reshape(len(layers), -1)

    def step(_, carry):
      x, read = carry
      # Begins anew each time, or values would drift out of range.
      x = start + 1e-6 * x
      for layer, (into, out, gate, up, down) in enumerate(layers):
        x = (x @ into)[:, :queries] @ out
        if parts is not None:  # a sum of its own in each turn
          read = 1e-9 * jnp.abs(parts[layer] + read).sum()
        x = (x @ gate - x @ up) @ down
      return x + (x @ unembedding)[:, :1], read

    return jax.lax.fori_loop(0, self.steps, step, (start, jnp.float32(0)))


def product_shapes(c: ModelConfig) -> list[tuple[int, int]]:
  """[inputs, outputs] of the products of a layer; last the unembedding."""
  d, h, f = c.width, c.head_size, c.mlp_width
  into = (d, (c.heads + 2 * c.kv_heads) * h)
  layer = [into, (c.heads * h, d), (d, f), (d, f), (f, d)]
  return [*layer, (d, c.vocab_size)]


def seconds_of(program: Callable[..., Any], *arguments: Any) -> float:
  """Median of five calls, behind one that is not counted."""
  taken = []
  for _ in range(6):
    start = time.perf_counter()
    jax.block_until_ready(program(*arguments))
    taken.append(time.perf_counter() - start)
  return statistics.median(taken[1:])


def floor_rows(work: Work, served: Sequence[Served], floor: Floor):
  """The decode step and its share that is the floor."""
  step = statistics.median(s.step for s in served)
  products, copy, both, own = floor.seconds()
  at = f'{work.name}: '
  return [
      report.Row(f'{at}decode step, ms', 1000 * step),
      report.Row(f'{at}floor: products, ms', 1000 * products),
      report.Row(f'{at}floor: reading the cache, ms', 1000 * copy),
      report.Row(f'{at}floor: products of attention, ms', 1000 * own),
      report.bounded(
          f'{at}share of the step that is floor',
          (products + copy + own) / step,
          '>= 0.7',
      ),
      report.Row(f'{at}the same, both in one program', (both + own) / step),
  ]


def group_rows(work: Work, ours: Ours, rounds: int) -> list[report.Row]:
  """Shared prompts against prompts that are computed for each answer."""
  alone = dataclasses.replace(work, group=1)
  shared, apart = [], []
  for turn in range(1 + rounds):
    found = [ours.serve(each, ours.flat) for each in (work, alone)]
    if turn:
      shared.append(found[0])
      apart.append(found[1])
  at = f'{work.name}: '
  asked = work.requests * work.prompt
  seconds = lambda served: statistics.median(s.seconds for s in served)
  return [
      report.bounded(
          f'{at}prompt tokens asked for / computed',
          asked / shared[-1].prefilled,
          f'>= {work.group}',
      ),
      report.Row(f'{at}seconds', seconds(shared)),
      report.Row(f'{at}seconds, each prompt another', seconds(apart)),
  ]


def swap_rows(
    work: Work, ours: Ours, swap_each: int, rounds: int
) -> list[report.Row]:
  """Interruption against draining, and what each way of swapping leaves."""
  count = work.requests // swap_each
  other = parameters.init_params(ours.config, 1, ours.mesh, Rules())
  # Answers end alike under all versions, which differ in all but the end.
  versions = [
      {**_moved(ours.params, other, 0.02 * (i + 1)),
       'unembedding': ours.flat['unembedding']}
      for i in range(count)
  ]  # fmt: skip
  found: dict[str, list[Served]] = {m: [] for m in ('recompute', 'drain')}
  for turn in range(1 + rounds):
    for mode, served in found.items():
      one = ours.serve(
          work, ours.flat, swap=mode, swap_each=swap_each, versions=versions
      )
      if turn:
        served.append(one)
  speed = {
      mode: [s.waiting[1] / s.waiting[0] for s in served]
      for mode, served in found.items()
  }
  swaps = [swap for s in found['recompute'] for swap in s.swaps]
  stalled = sum(seconds for seconds, _ in swaps)
  total = sum(s.seconds for s in found['recompute'])
  at = 'interruption: '
  rows = [
      report.bounded(
          f'{at}times drain',
          ratio_of(speed['recompute'], speed['drain']),
          '>= 1.12',
      ),
      report.Row(
          f'{at}stall of a swap, ms',
          1000 * statistics.median(s for s, _ in swaps),
      ),
      report.Row(
          f'{at}tokens rebuilt a swap', statistics.mean(t for _, t in swaps)
      ),
      report.Row(f'{at}share of the time', stalled / total),
  ]
  # Log-probs need a policy that prefers something.
  versions = [_moved(ours.params, other, 0.02 * (i + 1)) for i in range(count)]
  score = score_program(ours.config)
  for mode in ('recompute', 'keep'):
    served = ours.serve(
        work, ours.params, swap=mode, swap_each=swap_each, versions=versions
    )
    gaps = gaps_after_swaps(
        score,
        ours.config.vocab_size,
        work,
        served.answers,
        [ours.params, *versions],
    )
    name = f'{at}{mode}: mean gap, nats'
    rows.append(report.Row(name, float(gaps.mean())))
    name, largest = f'{at}{mode}: largest gap, nats', float(gaps.max())
    exact = mode == 'recompute'
    rows.append(
        report.bounded(name, largest, '<= 0.0001')
        if exact
        else report.Row(name, largest)
    )
  return rows


def _moved(params: Params, other: Params, share: float) -> Params:
  """Weights on the way to others."""
  moved = jax.tree.map(lambda a, b: a + share * (b - a), params, other)
  return jax.block_until_ready(moved)


def gaps_after_swaps(
    score: Callable[..., jax.Array],
    vocabulary: int,
    work: Work,
    answers: Sequence[Completion],
    versions: Sequence[Params],
) -> np.ndarray:
  """Gaps of tokens that were sampled after a swap; see the top.

  Args:
    score: the `score_program` of the policy.
    vocabulary: V.
    work: that was answered.
    answers: in order of its requests.
    versions: weights by version.
  """
  prompts = work.prompts(vocabulary)
  gaps = [np.zeros(0, np.float32)]
  swapped = [
      (prompt, answer)
      for prompt, answer in zip(prompts, answers)
      if len(np.unique(answer.versions)) > 1
  ]
  for prompt, answer in swapped[:_SCORED]:
    ids = np.zeros((1, work.prompt + work.limit), np.int32)
    end = len(prompt) + len(answer.ids)
    ids[0, :end] = [*prompt, *answer.ids.tolist()]
    for version in np.unique(answer.versions)[1:]:
      logps = np.asarray(score(versions[version], ids))[0, len(prompt) : end]
      after = answer.versions == version
      gaps.append(np.abs(logps - answer.logps)[after])
  return np.concatenate(gaps)


def score_program(config: ModelConfig) -> Callable[..., jax.Array]:
  """(weights, ids [1, T]) to log-probs [1, T] as the trainer has them."""

  @jax.jit
  def score(weights, ids):
    one = jnp.ones_like(ids)
    positions = jnp.arange(ids.shape[1])[None]
    logits = transformer.forward(config, weights, ids, positions, one)
    return logprobs.token_logps(logits, ids, one, one.astype(jnp.float32))[0]

  return score


def first_token_rows(model: ModelConfig) -> list[report.Row]:
  """Seconds to the first token, without and with a cache of programs."""
  command = [
      sys.executable,
      '-c',
      'import sys; from benchmarks import generate;'
      ' print(generate.first_token(sys.argv[1]))',
      # Numbers and words; what else there is stays as it is by default.
      json.dumps({n: x for n, x in vars(model).items() if not _nested(x)}),
  ]
  with tempfile.TemporaryDirectory() as folder:
    environment = {
        **os.environ,
        'JAX_COMPILATION_CACHE_DIR': folder,
        'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
        'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    }
    seconds = [
        float(
            subprocess.run(
                command, env=environment, stdout=subprocess.PIPE, check=True
            ).stdout
        )
        for _ in range(2)
    ]
  name = 'first token: seconds after imports'
  return [
      report.bounded(name, seconds[0], '<= 5'),
      report.Row(f'{name}, programs cached', seconds[1]),
  ]


def _nested(value: Any) -> bool:
  return dataclasses.is_dataclass(value) or isinstance(value, tuple)


def first_token(shape: str) -> float:
  """Seconds until an engine that does not exist yet says its first token.

  Args:
    shape: settings of the policy as JSON.
  """
  start = time.monotonic()
  work = Work('first token', 64, 1, group=1)
  mesh = serving.one_device()
  config = ModelConfig(**json.loads(shape))
  engine = Engine(config, serving.engine_settings(work), mesh, Rules())
  engine.compile_ahead(engine.abstract_weights())
  loop = EngineLoop(engine, '0', swap='recompute', events=EventLog(None))
  loop.set_weights(0, serving.init_params(config, mesh), lambda version: None)
  loop.start()
  came = threading.Event()
  one = dataclasses.replace(work, limit=1)
  loop.submit(
      *serving.requests(one, config.vocab_size), lambda outcome: came.set()
  )
  if not came.wait(serving.WAIT_S):
    raise TimeoutError(f'no token after {serving.WAIT_S} s')
  seconds = time.monotonic() - start
  loop.stop()
  engine.programs.close()
  return seconds


# The whole.


def measure(
    plan: Plan, peers: Mapping[str, Peer], rounds: int, only: Sequence[str]
) -> list[report.Row]:
  """All rows, part by part.

  Args:
    plan: what to measure.
    peers: other systems by name.
    rounds: turns of each.
    only: names of `PARTS` to run.
  """
  counter = CompilationCounter().install()
  engines: dict[tuple[Any, ...], Ours] = {}

  def ours(*works: Work) -> Ours:
    shapes = dataclasses.astuple(serving.engine_settings(*works))
    if shapes not in engines:
      engines[shapes] = Ours(plan.model, works, counter)
    return engines[shapes]

  rows: list[report.Row] = []
  for part in only:
    rows += PARTS[part](plan, ours, peers, rounds)
  counter.uninstall()
  compiled = sum(engine.compiled for engine in engines.values())
  rows.append(report.bounded('compilations after warm-up', compiled, '<= 0'))
  return rows


def _fixed(plan, ours, peers, rounds) -> list[report.Row]:
  rows = []
  bars = {'Tunix': '>= 1.2', 'transformers': '>= 1.5'}
  for work in plan.fixed:
    floor = Floor(plan.model, work.slots, work.prompt + work.limit / 2)
    floor.measure()  # compiles
    floor.times.clear()
    found, served = compare(
        work, ours(work), peers, bars, rounds, floor.measure
    )
    rows += [*found, *floor_rows(work, served, floor)]
  return rows


def _mean(plan, ours, peers, rounds) -> list[report.Row]:
  bars = {'Tunix': '>= 2.4'}
  return compare(plan.mean, ours(plan.mean), peers, bars, rounds)[0]


def _tail(plan, ours, peers, rounds) -> list[report.Row]:
  bars = {'Tunix': '>= 4'}
  rows, served = compare(plan.tail, ours(plan.tail), peers, bars, rounds)
  return [*rows, *steady_rows(plan.tail, served)]


def _group(plan, ours, peers, rounds) -> list[report.Row]:
  del peers
  return group_rows(plan.group, ours(plan.group), rounds)


def _swap(plan, ours, peers, rounds) -> list[report.Row]:
  del peers
  return swap_rows(plan.tail, ours(plan.tail), plan.swap_each, rounds)


def _first(plan, ours, peers, rounds) -> list[report.Row]:
  del ours, peers, rounds
  return first_token_rows(plan.model)


PARTS = {
    'fixed': _fixed,
    'mean': _mean,
    'tail': _tail,
    'group': _group,
    'swap': _swap,
    'first': _first,
}


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  chosen = plan(flags.FLAGS.short)
  scripts = {
      'Tunix': 'tunix_sampler.py',
      'transformers': 'transformers_sampler.py',
  }
  serving.show_parts(
      'generate',
      PARTS,
      chosen.model,
      scripts,
      functools.partial(measure, chosen),
  )


if __name__ == '__main__':
  serving.define_flags()
  app.run(main, flags_parser=command.read_own_flags)
