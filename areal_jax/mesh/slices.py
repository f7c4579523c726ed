"""Cutting the devices into one train mesh and some rollout meshes.

In goes a list of devices and `MeshSettings`, whole numbers all of them; out
come `Slices`. Split, the train mesh takes the first devices and every rollout
replica the next ones; colocated, the train mesh and the replicas together cover
the same devices, for a synchronous run that uses all of them for either phase.

TPUs come in slices: fast links inside, the network of a data centre between
them. A train mesh over several of them has whole parts of its data axis on
each, so that one sum of gradients a step is all that crosses; a replica lies on
one. Inside a slice devices are put in an order that has neighbours on a link.

What an array looks like on a mesh is left to `rules.py`; moving arrays between
meshes to `crossing.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Any, Callable, Iterator, Sequence

import jax
from jax.experimental import mesh_utils
import numpy as np

from areal_jax.config import ConfigError, Mistakes, require, resolve
from areal_jax.mesh import host

# Every mesh has all of them (those that it does not use with size 1), so that
# one Rules serves any mesh. From the one that speaks least over its links to
# the one that speaks most: that is the order in which devices are laid out.
AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')
_MOST_PRETENDED = 64


@dataclasses.dataclass
class TrainMesh:
  """Shape of the mesh that trains; its devices are the product of all axes.

  Attributes:
    fsdp: shards batch rows, and parameters along the width.
    tensor: shards heads, MLP columns, experts and the vocabulary.
    data: shards batch rows alone: parameters are whole along it, and their
      gradients are summed over it once a microbatch.
    context: shards the tokens of each row, for sequences that are too long for
      one device.
    expert: shards experts, and batch rows everywhere else.
  """

  fsdp: int = 1
  tensor: int = 1
  data: int = 1
  context: int = 1
  expert: int = 1

  def validate(self, at: str) -> None:
    _require_sizes(self, at)

  @property
  def devices(self) -> int:
    return self.row_shards * self.context * self.tensor

  @property
  def row_shards(self) -> int:
    """Parts that the rows of a microbatch are cut into."""
    return self.data * self.fsdp * self.expert


@dataclasses.dataclass
class RolloutMesh:
  """Shape of the meshes that generate.

  Their devices are replicas · data · expert · tensor.

  Attributes:
    replicas: engines, each with the whole policy.
    tensor: devices of one engine that share heads, MLP columns and experts.
    expert: devices of one engine that share its experts beyond that; whatever
      is no expert is whole on each of them.
    data: parts that the slots and the cache of one engine are cut into; each
      has the whole policy, and they say nothing to each other.
  """

  replicas: int = 1
  tensor: int = 1
  expert: int = 1
  data: int = 1

  def validate(self, at: str) -> None:
    _require_sizes(self, at)

  @property
  def devices(self) -> int:
    return self.replicas * self.engine_devices

  @property
  def engine_devices(self) -> int:
    """Devices of one replica."""
    return self.data * self.expert * self.tensor


@dataclasses.dataclass
class MeshSettings:
  """Settings of the devices that train and of those that generate."""

  train: TrainMesh = dataclasses.field(default_factory=TrainMesh)
  rollout: RolloutMesh = dataclasses.field(default_factory=RolloutMesh)
  colocated: bool = False  # both phases on the same devices, in turn

  def validate(self, at: str) -> None:
    if self.colocated and self.train.devices != self.rollout.devices:
      raise ConfigError(
          f'{at}.colocated: {at}.train covers {_product(self.train)} devices'
          f' and {at}.rollout {_product(self.rollout)}, wanted the same number'
      )


@dataclasses.dataclass(frozen=True)
class Slices:
  """The meshes of a run, axes `AXES` each.

  Example: 8 devices with train fsdp 2 · tensor 2 and 2 replicas of tensor 2
  give a train mesh [1, 2, 1, 1, 2] over devices 0..3 and rollout meshes
  [1, 1, 1, 1, 2] over 4, 5 and 6, 7.
  """

  train: jax.sharding.Mesh
  rollout: tuple[jax.sharding.Mesh, ...]


def devices_needed(settings: MeshSettings) -> int:
  """Devices that `cut` takes: the sum when split, the maximum if colocated."""
  counts = settings.train.devices, settings.rollout.devices
  return max(counts) if settings.colocated else sum(counts)


def generation_only(rollout: RolloutMesh) -> MeshSettings:
  """Settings of a machine on which nothing trains: its devices generate."""
  return MeshSettings(TrainMesh(tensor=rollout.devices), rollout, True)


@contextlib.contextmanager
def devices_first(
    settings: MeshSettings,
    *,
    shape: Callable[[MeshSettings], MeshSettings] = lambda mesh: mesh,
    count: int | None = None,
    at: str = 'config.mesh',
) -> Iterator[None]:
  """Leads with too few devices where settings that name the mesh are refused.

  A mesh of the wrong size makes many other settings wrong as well. Devices are
  looked for only then, since that starts jax.

  Args:
    settings: of the mesh, open or resolved.
    shape: the part of the mesh that is used.
    count: devices that there are; None asks the machine.
    at: path of the settings.

  Raises:
    ConfigError: several processes; or what is raised inside, behind a line
      about devices if there are too few of them.
  """
  if jax.distributed.is_initialized():
    host.require_one_process()
  try:
    yield
  except ConfigError as error:
    if 'mesh.' not in str(error):
      raise
    mistakes = Mistakes()
    with mistakes:
      mesh = shape(resolve(settings, at))
      found = len(machine_devices(mesh)) if count is None else count
      _require_devices(found, mesh, at)
    mistakes.lines += error.mistakes
    mistakes.tell()


def machine_devices(settings: MeshSettings) -> Sequence[jax.Device]:
  """The machine's devices; on a CPU, as many pretended ones as are needed.

  At most 64 are pretended: each takes threads and memory.

  On a CPU, programs run from then on as `host.py` says.

  Has an effect only before jax starts: a process that has started it already
  (a notebook, a test) keeps its devices, and so does one with real ones.

  Raises:
    ConfigError: jax runs in several processes.
  """
  if max(settings.train.devices, settings.rollout.engine_devices) > 1:
    # Two slices that dispatch collectives side by side on a CPU deadlock in a
    # thread pool of the size that two cores give. Without collectives the
    # larger pool only costs: 1.6 times the time of a small train step.
    os.environ.setdefault('NPROC', str(max(16, 4 * devices_needed(settings))))
  forced = 'xla_force_host_platform_device_count'
  if forced not in os.environ.get('XLA_FLAGS', ''):
    with contextlib.suppress(RuntimeError):
      pretended = min(devices_needed(settings), _MOST_PRETENDED)
      jax.config.update('jax_num_cpu_devices', pretended)
  if host.computes():
    host.prepare()
  host.require_one_process()
  return jax.devices()


def cut(
    devices: Sequence[jax.Device], settings: MeshSettings, at: str = 'mesh'
) -> Slices:
  """Cuts the first `devices_needed` devices into slices; others stay idle.

  Raises:
    ConfigError: settings that no set of devices fits, too few devices, or a
      mesh that does not lie on TPU slices as it should.
  """
  for part, name in ((settings.train, 'train'), (settings.rollout, 'rollout')):
    part.validate(f'{at}.{name}')
  settings.validate(at)
  _require_devices(len(devices), settings, at)
  devices = sorted(devices, key=slice_of)  # stable: else as they came
  train, rollout = settings.train, settings.rollout
  start = 0 if settings.colocated else train.devices
  size, engines = rollout.engine_devices, []
  for replica in range(rollout.replicas):
    first = start + replica * size
    own = devices[first : first + size]
    shape = {a: getattr(rollout, a) for a in ('data', 'expert', 'tensor')}
    engines.append(mesh_of(own, f'{at}.rollout replica {replica}', **shape))
  own, shape = devices[: train.devices], dataclasses.asdict(train)
  return Slices(mesh_of(own, f'{at}.train', **shape), tuple(engines))


def _require_devices(count: int, settings: MeshSettings, at: str) -> None:
  """Refuses a mesh of more devices than there are."""
  needed = devices_needed(settings)
  if count < needed:
    how = 'max' if settings.colocated else 'sum'
    raise ConfigError(
        f'{at} needs {needed} devices ({how} of train'
        f' {settings.train.devices} and rollout {settings.rollout.devices}),'
        f' there are {count}'
    )


def mesh_of(
    devices: Sequence[jax.Device], at: str = 'mesh', **shape: int
) -> jax.sharding.Mesh:
  """A mesh over all these devices whose layouts the compiler completes (Auto).

  Args:
    devices: as many as the product of the shape.
    at: names the mesh in errors.
    **shape: sizes by name, of `AXES`; those that are not named have size 1.

  Raises:
    ConfigError: see `arrange`.
  """
  auto = (jax.sharding.AxisType.Auto,) * len(AXES)
  grid = arrange(devices, at, **shape)
  return jax.sharding.Mesh(grid, AXES, axis_types=auto)


def arrange(
    devices: Sequence[Any], at: str = 'mesh', **shape: int
) -> np.ndarray:
  """Arranges devices into an array with the axes `AXES`.

  Devices other than TPUs stand in the order in which they came. TPUs of one
  slice are laid along its links by `mesh_utils.create_device_mesh`, if they are
  a block of it; the data axis of a mesh over several slices has each of them in
  one piece (`create_hybrid_device_mesh`).

  Args:
    devices: or descriptions of some, with the attributes of `jax.Device`.
    at: names the mesh in errors.
    **shape: see `mesh_of`.

  Raises:
    ConfigError: another number of devices, slices that the mesh takes unequal
      parts of, or more of them than the data axis divides over.
  """
  sizes = tuple(shape.pop(axis, 1) for axis in AXES)
  if shape:
    raise ValueError(f'mesh axes {sorted(shape)}, wanted some of {AXES}')
  require(
      len(devices) == math.prod(sizes),
      f'{at}: the number of devices',
      len(devices),
      ' · '.join(f'{a} {n}' for a, n in zip(AXES, sizes)),
  )
  slices: dict[int, list[Any]] = {}
  for device in devices:
    slices.setdefault(slice_of(device), []).append(device)
  parts = list(slices.values())
  if len(parts) > 1:
    counts = {number: len(part) for number, part in slices.items()}
    require(
        len(set(counts.values())) == 1,
        f'{at}: the devices of each TPU slice',
        counts,
        'the same number of each, or a mesh on one slice',
    )
    require(
        sizes[0] % len(parts) == 0,
        f'{at}.data' if at.endswith('train') else f'{at}: its data axis',
        sizes[0],
        f'a multiple of the {len(parts)} TPU slices that it lies on, since no'
        ' other axis may cross them',
    )
  if not all(map(_is_block, parts)):
    grid = np.empty(len(devices), object)
    grid[:] = [device for part in parts for device in part]
    return grid.reshape(sizes)
  inside = (sizes[0] // len(parts), *sizes[1:])
  if len(parts) == 1:
    return mesh_utils.create_device_mesh(
        inside, list(devices), allow_split_physical_axes=True
    )
  return mesh_utils.create_hybrid_device_mesh(
      inside,
      (len(parts), *[1] * (len(sizes) - 1)),
      list(devices),
      allow_split_physical_axes=True,
  )


def slice_of(device: Any) -> int:
  """The TPU slice of a device; 0 of any that is no TPU.

  The runtime of GPUs counts hosts as slices, and those may share any axis.
  """
  return getattr(device, 'slice_index', 0) if device.platform == 'tpu' else 0


def _is_block(devices: Sequence[Any]) -> bool:
  """Returns whether the devices are TPUs that fill a box of coordinates."""
  if any(device.platform != 'tpu' for device in devices):
    return False
  places = {(*d.coords, d.core_on_chip) for d in devices}
  spans = (max(along) - min(along) + 1 for along in zip(*places))
  return len(places) == math.prod(spans) == len(devices)


def _require_sizes(shape: Any, at: str) -> None:
  for field in dataclasses.fields(shape):
    size = getattr(shape, field.name)
    require(size >= 1, f'{at}.{field.name}', size, 'at least 1')


def _product(shape: TrainMesh | RolloutMesh) -> str:
  """'fsdp 2 · tensor 2 = 4', with the axes that have more than one device."""
  sizes = {f.name: getattr(shape, f.name) for f in dataclasses.fields(shape)}
  used = {name: size for name, size in sizes.items() if size > 1}
  used = used or dict([next(iter(sizes.items()))])
  factors = ' · '.join(f'{name} {size}' for name, size in used.items())
  return f'{factors} = {shape.devices}'
