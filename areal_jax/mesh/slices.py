"""Cutting the devices into one train mesh and some rollout meshes.

In goes a list of devices and `MeshSettings`, whole numbers all of them; out
come `Slices`. Split, the train mesh takes the first devices and every rollout
replica the next ones; colocated, the train mesh and the replicas together cover
the same devices, for a synchronous run that uses all of them for either phase.

What an array looks like on a mesh is left to `rules.py`; moving arrays between
meshes to `areal_jax.weights`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from typing import Sequence

import jax
import numpy as np

from areal_jax.config import ConfigError, require

# Every mesh has both axes (a rollout replica with fsdp 1), so that one Rules
# serves all of them.
AXES = ('fsdp', 'tensor')


@dataclasses.dataclass
class TrainMesh:
  """Shape of the mesh that trains: fsdp · tensor devices."""

  fsdp: int = 1  # shards batch rows, and parameters along the width
  tensor: int = 1  # shards heads, MLP columns and the vocabulary

  def validate(self, at: str) -> None:
    require(self.fsdp >= 1, f'{at}.fsdp', self.fsdp, 'at least 1')
    require(self.tensor >= 1, f'{at}.tensor', self.tensor, 'at least 1')

  @property
  def devices(self) -> int:
    return self.fsdp * self.tensor


@dataclasses.dataclass
class RolloutMesh:
  """Shape of the meshes that generate: replicas · tensor devices."""

  replicas: int = 1  # engines, each with the whole policy
  tensor: int = 1  # devices of one engine

  def validate(self, at: str) -> None:
    require(self.replicas >= 1, f'{at}.replicas', self.replicas, 'at least 1')
    require(self.tensor >= 1, f'{at}.tensor', self.tensor, 'at least 1')

  @property
  def devices(self) -> int:
    return self.replicas * self.tensor


@dataclasses.dataclass
class MeshSettings:
  """How many devices train and how many generate."""

  train: TrainMesh = dataclasses.field(default_factory=TrainMesh)
  rollout: RolloutMesh = dataclasses.field(default_factory=RolloutMesh)
  colocated: bool = False  # both phases on the same devices, in turn

  def validate(self, at: str) -> None:
    if self.colocated and self.train.devices != self.rollout.devices:
      raise ConfigError(
          f'{at}.colocated: {at}.train covers fsdp {self.train.fsdp} · tensor'
          f' {self.train.tensor} = {self.train.devices} devices and'
          f' {at}.rollout replicas {self.rollout.replicas} · tensor'
          f' {self.rollout.tensor} = {self.rollout.devices}, wanted the same'
          ' number'
      )


@dataclasses.dataclass(frozen=True)
class Slices:
  """The meshes of a run, axes ('fsdp', 'tensor') each.

  Example: 8 devices with train 2 × 2 and 2 replicas of tensor 2 give a train
  mesh [2, 2] over devices 0..3 and rollout meshes [1, 2] over 4, 5 and 6, 7.
  """

  train: jax.sharding.Mesh
  rollout: tuple[jax.sharding.Mesh, ...]


def devices_needed(settings: MeshSettings) -> int:
  """Devices that `cut` takes: the sum when split, the maximum if colocated."""
  counts = settings.train.devices, settings.rollout.devices
  return max(counts) if settings.colocated else sum(counts)


def machine_devices(settings: MeshSettings) -> Sequence[jax.Device]:
  """The machine's devices; on a CPU, as many pretended ones as are needed.

  Has an effect only before jax starts: a process that has started it already
  (a notebook, a test) keeps its devices, and so does one with real ones.
  """
  if max(settings.train.devices, settings.rollout.tensor) > 1:
    # Two slices that dispatch collectives side by side on a CPU deadlock in a
    # thread pool of the size that two cores give. Without collectives the
    # larger pool only costs: 1.6 times the time of a small train step.
    os.environ.setdefault('NPROC', str(max(16, 4 * devices_needed(settings))))
  forced = 'xla_force_host_platform_device_count'
  if forced not in os.environ.get('XLA_FLAGS', ''):
    with contextlib.suppress(RuntimeError):
      jax.config.update('jax_num_cpu_devices', devices_needed(settings))
  return jax.devices()


def cut(
    devices: Sequence[jax.Device], settings: MeshSettings, at: str = 'mesh'
) -> Slices:
  """Cuts the first `devices_needed` devices into slices; others stay idle.

  Raises:
    ConfigError: settings that no set of devices fits, or too few devices.
  """
  for part, name in ((settings.train, 'train'), (settings.rollout, 'rollout')):
    part.validate(f'{at}.{name}')
  settings.validate(at)
  needed = devices_needed(settings)
  if len(devices) < needed:
    how = 'max' if settings.colocated else 'sum'
    raise ConfigError(
        f'{at} needs {needed} devices ({how} of train'
        f' {settings.train.devices} and rollout {settings.rollout.devices}),'
        f' there are {len(devices)}'
    )
  train, rollout = settings.train, settings.rollout
  start = 0 if settings.colocated else train.devices
  engines = []
  for replica in range(rollout.replicas):
    first = start + replica * rollout.tensor
    engines.append(_mesh(devices[first : first + rollout.tensor], 1))
  return Slices(_mesh(devices[: train.devices], train.fsdp), tuple(engines))


def _mesh(devices: Sequence[jax.Device], fsdp: int) -> jax.sharding.Mesh:
  """A mesh [fsdp, tensor] whose layouts the compiler completes (Auto)."""
  grid = np.array(devices).reshape(fsdp, -1)
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  return jax.sharding.Mesh(grid, AXES, axis_types=auto)
