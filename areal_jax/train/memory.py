"""What training needs of its devices' memory, before it is allocated.

Counted from shapes: parameters, optimizer moments and gradients of every
network that a run has; moments that `offload_optimizer` moves to the host are
there while a step goes on. Activations, the workspace of programs and whatever
generates on the same devices are not in it, so what is refused here cannot
work; what passes may still be too much.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping

import jax
from jax.sharding import Mesh
import numpy as np

from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.train.settings import TrainSettings
from areal_jax.train.trainer import build_steps


@dataclasses.dataclass(frozen=True)
class Estimate:
  """Bytes on each device of the train mesh.

  Attributes:
    roles: of each network, with its optimizer's state.
    gradients: of the one network that holds a gradient at a time.
    offloaded: of the optimizers' state that lies in the host's memory between
      steps.
  """

  roles: Mapping[str, int]
  gradients: int
  offloaded: int = 0

  @property
  def total(self) -> int:
    """Held during a step."""
    return sum(self.roles.values()) + self.gradients

  @property
  def resting(self) -> int:
    """Held between steps."""
    return sum(self.roles.values()) - self.offloaded


def check(
    config: ModelConfig,
    settings: TrainSettings,
    mesh: Mesh,
    rules: Rules,
    reference: ModelConfig | None,
    params: Any,
) -> None:
  """Refuses a trainer that the devices of its mesh cannot hold.

  Args:
    config, settings, mesh, rules, reference: see `estimate`.
    params: of the policy, which are there already.

  Raises:
    ConfigError: with the numbers.
  """
  devices = [d for d in mesh.devices.flat if d.memory_stats()]
  if devices:
    needed = estimate(config, settings, mesh, rules, reference)
    for device in devices:
      stats = device.memory_stats()
      require_room(needed, stats, str(device), _bytes(params))


def estimate(
    config: ModelConfig,
    settings: TrainSettings,
    mesh: Mesh,
    rules: Rules,
    reference: ModelConfig | None = None,
) -> Estimate:
  """Estimates what a trainer of these settings holds at once; see `Trainer`."""
  roles, gradients, offloaded = {}, 0, 0
  for step in build_steps(config, settings, mesh, rules, reference):
    if step is None:
      continue
    state = step.abstract_state
    roles |= {name: _bytes(role) for name, role in state.roles.items()}
    learner = state.roles[step.role]
    gradients = max(gradients, _bytes(learner.trainable))
    if settings.offload_optimizer:
      offloaded += _bytes([role.optimizer for role in state.roles.values()])
  return Estimate(roles, gradients, offloaded)


def require_room(
    needed: Estimate, stats: Mapping[str, Any], device: str, held: int = 0
) -> None:
  """Refuses what a device cannot hold.

  Args:
    needed: what is going to be allocated on it.
    stats: what `jax.Device.memory_stats()` says; without a 'bytes_limit' the
      device does not tell.
    device: its name.
    held: bytes of it that the device holds already.

  Raises:
    ConfigError: with the numbers.
  """
  if 'bytes_limit' not in stats:
    return
  room = stats['bytes_limit'] - stats.get('bytes_in_use', 0)
  if needed.total - held > room:
    parts = ', '.join(f'{n} {size:,}' for n, size in needed.roles.items())
    raise ConfigError(
        f'config.train needs {needed.total - held:,} more bytes on {device}'
        f' ({parts}, gradients {needed.gradients:,}, of which {held:,} are'
        f' there), wanted at most {room:,}; more fsdp devices, no critic'
        ' (advantages.critic) or no reference (the two kl_coefficients) need'
        ' less'
    )


def _bytes(shapes: Any) -> int:
  """Bytes of a device's part of arrays, over a pytree of them."""
  return sum(
      int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
      * np.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(shapes)
  )
