"""What a rollout replica needs of its devices' memory, before it is allocated.

Counted from shapes: sets of weights and decode states, the two that grow with
the model and with the slots. The workspace of programs and whatever trains on
the same devices are not in it, so what is refused here cannot work; what passes
may still be too much.

Where training and generation take turns on the same devices, a replica with
nothing to do has let go of its cache, and new weights come while it has none.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import jax
import numpy as np

from areal_jax.config import ConfigError
from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_programs import cast_shapes


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes on each device of a replica.

  Attributes:
    weights: of one set of weights.
    weight_sets: sets held, while new weights arrive.
    decode_state: of one decode state.
    decode_states: states held, while it generates.
    shared: of the frozen weights that all versions share.
    turns: whether it has neither requests nor a decode state for them while
      others train, and gets new weights before it has either again.
  """

  weights: int
  weight_sets: int
  decode_state: int
  decode_states: int
  shared: int = 0
  turns: bool = False

  @property
  def total(self) -> int:
    """Most that is held at one time."""
    return max(self.generating, self.arriving)

  @property
  def generating(self) -> int:
    """Held while it generates."""
    return self._whole - (self.weights if self.turns else 0)

  @property
  def arriving(self) -> int:
    """Held while new weights arrive."""
    return self._whole - (self.decode_state if self.turns else 0)

  @property
  def resting(self) -> int:
    """Held while others train on the same devices.

    An evaluation of earlier weights may go on, with a decode state of its own.
    """
    return self._whole - (self.weights + self.decode_state if self.turns else 0)

  @property
  def _whole(self) -> int:
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
    turns: bool = False,
) -> Estimate:
  """Estimates what one replica holds at once.

  A decode state and weights; if it generates for training, the weights that
  arrive; if evaluation goes on meanwhile, weights and a decode state for that.
  With adapters, the base is there once beside the versions, which are adapters,
  or whole where those are merged.

  Args:
    engine: its programs and shapes.
    dtype: floating dtype of its weights; empty for the policy's own.
    trains: whether it generates for training.
    pins: whether evaluation goes on meanwhile, pinned to weights of its own.
    merges: the policy with adapters that arrives, where the engine runs it
      merged.
    turns: whether it and training take turns on the same devices.
  """
  sent = merges or engine.config
  shapes = parameters.abstract_params(sent)
  shardings = parameters.param_shardings(sent, engine.mesh, engine.rules)
  stays = [parameters.partition(sent, t)[1] for t in (shapes, shardings)]
  shared = _bytes(cast_shapes(stays[0], dtype), stays[1])
  whole = weights_bytes(engine, dtype)
  return Estimate(
      weights=whole if merges else whole - shared,
      shared=shared,
      weight_sets=1 + trains + pins,
      decode_state=decode_state_bytes(engine),
      decode_states=1 + (trains and pins),
      turns=turns,
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
    turns = ', the last of each in turn' if needed.turns else ''
    raise ConfigError(
        f'config.rollout.engine and config.evaluation need {needed.total:,}'
        f' bytes on {device} ({needed.weight_sets} sets of weights of'
        f' {needed.weights:,}{frozen} and {needed.decode_states} decode states'
        f' of {needed.decode_state:,}{turns}), wanted at most'
        f' {limit - used:,}: its limit of {limit:,} less {used:,} in use; fewer'
        ' slots, a smaller max_length or evaluation.every=0 need less'
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
