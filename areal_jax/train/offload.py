"""Optimizer state in the host's memory while nobody trains.

Where training and generation take turns on the same devices, the moments lie
idle through a whole phase: twice the size of the policy in float32. They can be
moved to the host after a step and back before the next one. It costs two copies
a step, which are measured, and changes no bit.

Each device copies its own shards to pinned pages of the host, so they are
arrays as before, of the same sharding and another memory. Where devices are the
host's own cores both memories are the machine's, and nothing is won.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import jax

from areal_jax.train.state import TrainState

_PINNED = 'pinned_host'


@dataclasses.dataclass
class Offloaded:
  """Counts of the last move each way.

  Attributes:
    bytes: of all arrays, over all devices.
    out_s: seconds from the devices.
    in_s: seconds back to them.
  """

  bytes: int = 0
  out_s: float = 0.0
  in_s: float = 0.0

  def metrics(self) -> dict[str, float]:
    """Returns the counts by the names of the metrics."""
    return {
        'offloaded_bytes': self.bytes,
        'offload_s': self.out_s + self.in_s,
    }


def put_away(state: TrainState, told: Offloaded) -> TrainState:
  """The state with its optimizers in the host's memory; theirs is freed.

  Args:
    state: its optimizers' arrays are gone afterwards.
    told: takes bytes and seconds.
  """
  start = time.monotonic()
  held = {name: role.optimizer for name, role in state.roles.items()}
  places = jax.tree.map(
      lambda leaf: leaf.sharding.with_memory_kind(_PINNED), held
  )
  away = jax.block_until_ready(jax.device_put(held, places, may_alias=False))
  told.bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(away))
  for leaf in jax.tree.leaves(held):
    leaf.delete()
  told.out_s = time.monotonic() - start
  return _with_optimizers(state, away)


def bring_back(
    state: TrainState, shardings: TrainState, told: Offloaded
) -> TrainState:
  """The state with its optimizers on the devices again.

  Args:
    state: what `put_away` returned; its copies go when nobody holds it.
    shardings: of a state.
    told: takes the seconds.
  """
  start = time.monotonic()
  away = {name: role.optimizer for name, role in state.roles.items()}
  places = {name: shardings.roles[name].optimizer for name in away}
  back = jax.block_until_ready(jax.device_put(away, places, may_alias=False))
  told.in_s = time.monotonic() - start
  return _with_optimizers(state, back)


def _with_optimizers(state: TrainState, of: dict[str, Any]) -> TrainState:
  roles = {
      name: dataclasses.replace(role, optimizer=of[name])
      for name, role in state.roles.items()
  }
  return dataclasses.replace(state, roles=roles)
