"""What adapters save: bytes that training holds, and bytes a version sends.

  python -m benchmarks.adapters
  python -m benchmarks.adapters --width=256 --layers=4

Three arms hold the train state of one policy (by default of the shape of
SmolLM2-135M, with random weights) and publish two versions of it to one engine:
everything learns; adapters of rank 16 on all seven projections; the same on a
frozen base in bfloat16. Bytes are those of the arrays that really exist once a
trainer is built, and of what the publisher really sent; a gradient, which is as
large as what learns, and activations come on top. Nothing is trained. `--short`
takes a small policy; the last line is one JSON object.
"""

from __future__ import annotations

import time
from typing import Any, Sequence

from absl import app, flags
import jax

from areal_jax import command
from areal_jax.config import resolve
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import MeshSettings, cut, machine_devices
from areal_jax.models import parameters
from areal_jax.models.config import PROJECTIONS, LoraSettings, ModelConfig
from areal_jax.telemetry.events import EventLog
from areal_jax.train.settings import TrainSettings
from areal_jax.train.trainer import Trainer
from areal_jax.weights import Publisher, Target
from benchmarks import report

ARMS = {
    'all': LoraSettings(),
    'adapters': LoraSettings(projections=PROJECTIONS),
    'adapters, base in bfloat16': LoraSettings(
        projections=PROJECTIONS, base_dtype='bfloat16'
    ),
}


def measure(config: ModelConfig) -> dict[str, float]:
  """Bytes and seconds of one arm.

  Returns:
    'learns', 'state', 'first' and 'later' in bytes, 'later_s' in seconds.
  """
  settings, rules = MeshSettings(), Rules()
  slices = cut(machine_devices(settings), settings)
  (mesh,) = slices.rollout
  params = parameters.init_params(config, 0, slices.train, rules)
  trainer = Trainer(config, TrainSettings(), slices.train, rules, params)
  del params  # taken over
  shardings = parameters.param_shardings(config, mesh, rules)
  target = Target('engine', shardings, lambda *weights: None)
  publisher = Publisher([target], events=EventLog(None))
  kind = 'adapter' if config.lora.projections else 'full'
  first = publisher.publish(0, trainer.params)
  jax.block_until_ready(publisher.latest())
  start = time.monotonic()
  later = publisher.publish(1, trainer.trainable, kind)
  jax.block_until_ready(publisher.latest())
  seconds = time.monotonic() - start
  return {
      'learns': _bytes(trainer.trainable),
      'state': _bytes(trainer.state.roles),
      'first': first.bytes,
      'later': later.bytes,
      'later_s': seconds,
  }


def shape(
    width: int, layers: int, vocabulary: int, lora: LoraSettings
) -> ModelConfig:
  """The policy of an arm; head size 64 and SmolLM2-135M's proportions."""
  heads = width // 64
  return resolve(
      ModelConfig(
          vocab_size=vocabulary,
          width=width,
          layers=layers,
          heads=heads,
          kv_heads=max(n for n in range(1, heads // 2 + 1) if heads % n == 0),
          head_size=64,
          mlp_width=8 * width // 3,
          lora=lora,
      )
  )


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  sizes = flags.FLAGS.width, flags.FLAGS.layers, flags.FLAGS.vocabulary
  if flags.FLAGS.short:
    sizes = 128, 2, 1024
  rows = []
  for name, lora in ARMS.items():
    found = measure(shape(*sizes, lora))
    for part, what in (
        ('learns', 'what learns, MB'),
        ('state', 'train state, MB'),
        ('first', 'first version, MB'),
        ('later', 'each later version, MB'),
    ):
      rows.append(report.Row(f'{name}: {what}', found[part] / 1e6))
    rows.append(report.Row(f'{name}: to publish, s', found['later_s']))
  report.show('adapters', rows)


def _bytes(tree: Any) -> int:
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_integer('width', 576, 'D.')
  flags.DEFINE_integer('layers', 30, 'L.')
  flags.DEFINE_integer('vocabulary', 49152, 'V.')
  flags.DEFINE_bool('short', False, 'A policy of two layers.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
