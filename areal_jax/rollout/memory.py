"""What a rollout replica needs of its devices' memory, before it is allocated.

Counted from shapes: sets of weights and decode states, the two that grow with
the model and with the slots. The workspace of programs and whatever trains on
the same devices are not in it, so what is refused here cannot work; what passes
may still be too much.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import jax
import numpy as np

from areal_jax.config import ConfigError
from areal_jax.models import transformer
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine, cast_shapes


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes on each device of a replica.

  Attributes:
    weights: of one set of weights.
    weight_sets: sets held at once.
    decode_state: of one decode state.
    decode_states: states held at once.
    shared: of the frozen weights that all versions share.
  """

  weights: int
  weight_sets: int
  decode_state: int
  decode_states: int
  shared: int = 0

  @property
  def total(self) -> int:
    return (
        self.shared
        + self.weights * self.weight_sets
        + self.decode_state * self.decode_states
    )


def estimate(
    engine: Engine,
    dtype: str,
    *,
    trains: bool,
    pins: bool,
    merges: ModelConfig | None = None,
) -> Estimate:
  """What one replica holds at once.

  A decode state and weights to evaluate with; if it generates for training, the
  weights that arrive and a decode state more. With adapters, the base is there
  once beside the versions, which are adapters, or whole where those are merged.

  Args:
    engine: its programs and shapes.
    dtype: floating dtype of its weights; empty for the policy's own.
    trains: whether it generates for training.
    pins: whether evaluation goes on meanwhile, pinned to weights of its own.
    merges: the policy with adapters that arrives, where the engine runs it
      merged.
  """
  sent = merges or engine.config
  shapes = transformer.abstract_params(sent)
  shardings = transformer.param_shardings(sent, engine.mesh, engine.rules)
  stays = [transformer.partition(sent, t)[1] for t in (shapes, shardings)]
  shared = _bytes(cast_shapes(stays[0], dtype), stays[1])
  whole = weights_bytes(engine, dtype)
  return Estimate(
      weights=whole if merges else whole - shared,
      shared=shared,
      weight_sets=1 + trains + pins,
      decode_state=decode_state_bytes(engine),
      decode_states=1 + trains,
  )


def decode_state_bytes(engine: Engine) -> int:
  """Bytes of one decode state on each device of the engine's mesh."""
  return _bytes(engine.state_shapes, engine.state_shardings)


def weights_bytes(engine: Engine, dtype: str = '') -> int:
  """Bytes of one set of weights on each device of the engine's mesh."""
  return _bytes(engine.abstract_weights(dtype), engine.param_shardings)


def require_room(
    needed: Estimate, stats: Mapping[str, Any] | None, device: str
) -> None:
  """Refuses what a device cannot hold.

  Args:
    needed: what is going to be allocated on it.
    stats: what `jax.Device.memory_stats()` says; None, or without a
      'bytes_limit', where the device does not tell (a CPU).
    device: its name.

  Raises:
    ConfigError: with the numbers.
  """
  if not stats or 'bytes_limit' not in stats:
    return
  limit, used = stats['bytes_limit'], stats.get('bytes_in_use', 0)
  if needed.total > limit - used:
    frozen = f' beside {needed.shared:,} frozen' if needed.shared else ''
    raise ConfigError(
        f'config.rollout.engine and config.evaluation need {needed.total:,}'
        f' bytes on {device} ({needed.weight_sets} sets of weights of'
        f' {needed.weights:,}{frozen} and {needed.decode_states} decode states'
        f' of {needed.decode_state:,}), wanted at most {limit - used:,}: its'
        f' limit of {limit:,} less {used:,} in use; fewer slots, a smaller'
        ' max_length or evaluation.every=0 need less'
    )


def require_room_on_all(engine: Engine, needed: Estimate) -> None:
  """`require_room` on each device of the engine's mesh."""
  for device in engine.mesh.devices.flat:
    require_room(needed, device.memory_stats(), str(device))


def _bytes(shapes: Any, shardings: Any) -> int:
  """Bytes of a device's part of arrays, over a pytree of them."""
  parts = jax.tree.map(
      lambda x, sharding: int(np.prod(sharding.shard_shape(x.shape)))
      * np.dtype(x.dtype).itemsize,
      shapes,
      shardings,
  )
  return sum(jax.tree.leaves(parts))
