"""What it takes to publish a version: bytes and seconds, from mesh to mesh.

  python -m benchmarks.publish
  python -m benchmarks.publish --short

On eight pretended devices a policy is published from each train mesh to each
rollout mesh: one device to one, four that shard its width to two that shard its
heads, four that shard both to two engines that have all of it, and two meshes
over the same four devices. Three things take turns, and medians are shown:

  publish      until the last array of a version has arrived
  device_put   the same arrays by `jax.device_put`, a tree an engine
  plain copy   as many bytes as publishing writes, from one array into another
               by numpy

What is *held* counts every device's parts. What is *written* counts memory: on
pretended devices a part that several have may lie in one place. The rate is
that of what is written, and the bar half of the plain copy's, for what is
larger than a cache.

One arm publishes what learns of a policy with adapters behind a first version
with all of it: what a later version sends, and how long that takes.

In the last arm an engine answers requests all the while, and new versions come
one after another: how fast they arrive beside it, how long it takes the engine
from being handed one to running it, and the rate at which it goes on drawing
tokens, over its rate with nothing published.

The last line is one JSON object.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any, Callable, Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax import command
from areal_jax.config import resolve
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import (
    MeshSettings,
    RolloutMesh,
    Slices,
    TrainMesh,
    cut,
    machine_devices,
)
from areal_jax.models import parameters
from areal_jax.models.config import PROJECTIONS, LoraSettings, ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.loop import EngineLoop
from areal_jax.telemetry.events import EventLog
from areal_jax.types import Request, SamplingParams
from areal_jax.weights import Publisher, Target
from benchmarks import report

PAIRS = {
    '1 -> 1': MeshSettings(),
    'fsdp 4 -> tensor 2': MeshSettings(
        TrainMesh(fsdp=4), RolloutMesh(tensor=2)
    ),
    'fsdp 2 tensor 2 -> 2 replicas': MeshSettings(
        TrainMesh(fsdp=2, tensor=2), RolloutMesh(replicas=2)
    ),
    'colocated fsdp 4 -> 2 x tensor 2': MeshSettings(
        TrainMesh(fsdp=4), RolloutMesh(replicas=2, tensor=2), colocated=True
    ),
}
BUSY = 'fsdp 4 -> tensor 2'  # the pair of the last arm
# (width, layers, vocabulary) by name.
SIZES = {
    '4 M': (256, 4, 512),
    '33 M': (512, 8, 8192),
    '135 M': (576, 30, 49152),
}
SHORT = {'0.5 M': (128, 2, 256)}
WAIT_S = 300.0
_SLOTS = 16
_RANK = 16  # of adapters
_CACHE = 2**25  # bytes; less than that may never reach memory


def shape(width: int, layers: int, vocabulary: int) -> ModelConfig:
  """A policy of heads of 32 and the proportions of Llama."""
  heads = width // 32
  return resolve(
      ModelConfig(
          vocab_size=vocabulary,
          width=width,
          layers=layers,
          heads=heads,
          # Two devices share them.
          kv_heads=max(
              n for n in range(2, heads // 2 + 1, 2) if heads % n == 0
          ),
          head_size=32,
          mlp_width=8 * width // 3 // 16 * 16,
      )
  )


def plain_copy(size: int) -> float:
  """Seconds to copy so many bytes from one array into another."""
  source = np.ones(size // 4, np.float32)
  target = np.zeros_like(source)  # its pages are there
  target[:] = 0
  start = time.monotonic()
  np.copyto(target, source)
  return time.monotonic() - start


def held(params: Any) -> int:
  """Bytes that all devices together have."""
  return sum(shard.nbytes for shard in _parts(params))


def written(params: Any) -> int:
  """Bytes of the memory that this is, parts in one place counted once."""
  places = {part.unsafe_buffer_pointer(): part for part in _parts(params)}
  return sum(part.nbytes for part in places.values())


def _parts(params: Any) -> list[jax.Array]:
  return [
      shard.data
      for leaf in jax.tree.leaves(params)
      for shard in leaf.addressable_shards
  ]


def measure(
    name: str, config: ModelConfig, pair: str, repeats: int
) -> list[report.Row]:
  """Rows of one size and pair, nothing else going on."""
  slices = _slices(pair)
  params = parameters.init_params(config, 0, slices.train, Rules())
  shardings = _shardings(config, slices)
  publisher = _publisher(shardings)
  publisher.warm_up(params)
  jax.block_until_ready(params)
  seconds = {'publish': [], 'device_put': [], 'plain copy': []}
  for version in range(repeats + 1):
    # As in a run: each version has buffers of its own.
    fresh = _fresh(params)
    start = time.monotonic()
    publisher.publish(version, fresh)
    arrived = jax.block_until_ready(publisher.latest()[1])
    published = time.monotonic() - start
    fresh = _fresh(params)
    start = time.monotonic()
    jax.block_until_ready(
        [jax.device_put(fresh, there, may_alias=False) for there in shardings]
    )
    put = time.monotonic() - start
    size = written(arrived)
    copied = plain_copy(size)
    if version:  # the first one warms up
      seconds['publish'].append(published)
      seconds['device_put'].append(put)
      seconds['plain copy'].append(copied)
  took, put, copied = map(statistics.median, seconds.values())
  at = f'{name}, {pair}'
  return [
      report.Row(f'{at}: held, MB', held(arrived) / 1e6),
      report.Row(f'{at}: written, MB', size / 1e6),
      report.Row(f'{at}: ms', 1000 * took),
      report.Row(f'{at}: ms by device_put', 1000 * put),
      report.Row(f'{at}: GB/s', size / took / 1e9),
      # What a cache holds is copied faster than memory can be written.
      report.bounded(f'{at}: share of a plain copy', copied / took, '>= 0.5')
      if size > _CACHE
      else report.Row(f'{at}: share of a plain copy', copied / took),
  ]


def measure_adapters(
    name: str, config: ModelConfig, repeats: int
) -> list[report.Row]:
  """Rows of the arm in which adapters alone learn."""
  config = resolve(
      dataclasses.replace(
          config, lora=LoraSettings(projections=PROJECTIONS, rank=_RANK)
      )
  )
  slices = _slices(BUSY)
  params = parameters.init_params(config, 0, slices.train, Rules())
  learns, _ = parameters.partition(config, params)
  publisher = _publisher(_shardings(config, slices))
  first = publisher.publish(0, params)
  jax.block_until_ready(publisher.latest()[1])
  seconds = []
  for version in range(1, repeats + 2):
    fresh = _fresh(learns)
    start = time.monotonic()
    later = publisher.publish(version, fresh, 'adapter')
    jax.block_until_ready(publisher.latest()[1])
    seconds.append(time.monotonic() - start)
  at = f'{name}, {BUSY}, adapters of rank {_RANK}'
  return [
      report.Row(f'{at}: first version, MB', first.bytes / 1e6),
      report.Row(f'{at}: each later one, MB', later.bytes / 1e6),
      # The first of them warms up.
      report.Row(f'{at}: ms', 1000 * statistics.median(seconds[1:])),
  ]


class _Asking:
  """An engine loop that is never out of requests."""

  def __init__(self, loop: EngineLoop, config: ModelConfig, tokens: int):
    self._loop = loop
    self._config = config
    self._tokens = tokens
    self._count = 0
    self._ends = False
    self._failure: BaseException | None = None

  def ask(self, outcome: Any = None) -> None:
    """Called by whoever starts it, then with each answer."""
    if isinstance(outcome, BaseException):
      self._failure = outcome
      return
    if self._ends:
      return
    self._count += 1
    prompt = np.arange(8) * self._count % self._config.vocab_size
    self._loop.submit(
        Request(
            request_id=str(self._count),
            prompt_ids=tuple(prompt.tolist()),
            sampling=SamplingParams(max_new_tokens=self._tokens),
            draw_index=self._count,
        ),
        self.ask,
    )

  def stop(self) -> None:
    self._ends = True
    self._loop.stop()

  def check(self) -> None:
    """Raises what ended the loop."""
    if self._failure is not None and not self._ends:
      raise self._failure


def measure_busy(
    name: str, config: ModelConfig, seconds: float
) -> list[report.Row]:
  """Rows of the arm in which decoding goes on."""
  slices, rules = _slices(BUSY), Rules()
  params = parameters.init_params(config, 0, slices.train, rules)
  settings = EngineSettings(
      slots=_SLOTS, max_length=128, max_prompt_length=16, steps=8
  )
  (mesh,) = slices.rollout
  engine = Engine(config, settings, mesh, rules.for_rollout())
  # `keep`: what a rebuild of the caches costs is another benchmark's question.
  loop = EngineLoop(engine, '0', swap='keep', events=EventLog(None))
  target = Target('engine/0', engine.param_shardings, loop.set_weights)
  publisher = Publisher([target], events=EventLog(None))
  publisher.warm_up(params)
  publisher.publish(0, params)
  engine.warm_up(publisher.latest()[1]['engine/0'])
  asking = _Asking(loop, config, 96)
  loop.start()
  try:
    for _ in range(2 * _SLOTS):
      asking.ask()
    time.sleep(seconds / 4)
    alone, _ = _rate(loop, lambda: time.sleep(seconds))
    sent, swapped = [], []

    def publish() -> None:
      end = time.monotonic() + seconds
      while time.monotonic() < end:
        version = len(sent) + 1
        fresh = _fresh(params)
        start = time.monotonic()
        handle = publisher.publish(version, fresh)
        jax.block_until_ready(publisher.latest()[1])
        sent.append(time.monotonic() - start)
        handle.wait(WAIT_S)
        swapped.append(time.monotonic() - start)

    beside, busy = _rate(loop, publish)
    asking.check()
  finally:
    asking.stop()
  at = f'{name}, {BUSY}, decoding'
  return [
      report.Row(f'{at}: versions a second', len(sent) / busy),
      report.Row(f'{at}: ms to arrive', 1000 * statistics.median(sent)),
      report.Row(f'{at}: ms until it runs', 1000 * statistics.median(swapped)),
      report.Row(f'{at}: tokens/s with none published', alone),
      report.Row(f'{at}: share of them while published', beside / alone),
  ]


def _rate(
    loop: EngineLoop, meanwhile: Callable[[], None]
) -> tuple[float, float]:
  """Tokens a second that a loop draws while something runs, and its seconds."""
  before, start = loop.counts.tokens, time.monotonic()
  meanwhile()
  took = time.monotonic() - start
  return (loop.counts.tokens - before) / took, took


def _slices(pair: str) -> Slices:
  return cut(jax.devices(), PAIRS[pair])


def _shardings(config: ModelConfig, slices: Slices) -> list[Any]:
  rules = Rules().for_rollout()
  return [
      parameters.param_shardings(config, mesh, rules) for mesh in slices.rollout
  ]


def _publisher(shardings: Sequence[Any]) -> Publisher:
  """To engines that only take what arrives."""
  targets = [
      Target(f'engine/{i}', there, lambda *weights: None)
      for i, there in enumerate(shardings)
  ]
  return Publisher(targets, events=EventLog(None))


def _fresh(params: Any) -> Any:
  """The same in other memory."""
  return jax.block_until_ready(jax.tree.map(_copied, params))


@jax.jit
def _copied(x: jax.Array) -> jax.Array:
  return x + 0


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  machine_devices(MeshSettings(TrainMesh(fsdp=4), RolloutMesh(replicas=4)))
  short = flags.FLAGS.short
  repeats = 3 if short else 7
  rows = []
  for name, sizes in (SHORT if short else SIZES).items():
    for pair in PAIRS:
      rows += measure(name, shape(*sizes), pair, repeats)
    rows += measure_adapters(name, shape(*sizes), repeats)
  name, sizes = next(iter((SHORT if short else SIZES).items()))
  rows += measure_busy(name, shape(*sizes), 2.0 if short else 20.0)
  report.show('publish', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'A small policy, a few versions of it.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
