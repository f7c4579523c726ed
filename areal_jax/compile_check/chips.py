"""Accelerators: what one chip holds and how fast it is, and topologies of them.

A topology is a name such as 'v5p:4x4x4', 'v5e:2x4*4' (four slices of eight) or
'gpu:h100:8'. For TPUs it becomes devices that programs can be compiled for by
libtpu, on a machine without any. For GPUs nothing of the kind exists, so that
programs are compiled for as many pretended CPU devices and what they say is an
estimate.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import math
import os
import re
from typing import Sequence

import jax
from jax.experimental import topologies
import numpy as np

from areal_jax.config import ConfigError, require
from areal_jax.mesh.slices import slice_of


@dataclasses.dataclass(frozen=True)
class Chip:
  """The figures of one accelerator, in bytes and seconds.

  Attributes:
    name: as topologies call it.
    flops: bfloat16 operations a second of its matrix units, at most.
    hbm: bytes that programs may use.
    hbm_rate: bytes a second from and to it.
    link_rate: bytes a second that leave a chip along one ring, both directions
      together.
    dimensions: of the torus; 0 for GPUs, which a switch joins.
  """

  name: str
  flops: float
  hbm: float
  hbm_rate: float
  link_rate: float
  dimensions: int = 0


_GIB = 2**30

# TPUs: https://jax-ml.github.io/scaling-book/tpus for the rates; for HBM what
# libtpu leaves of it, in the words of its own message ('of 15.75G hbm').
# GPUs: NVIDIA's data sheets of A100 80GB SXM, H100 SXM and H200 SXM: dense
# bfloat16, and NVLink both directions together; of HBM what is left beside the
# context and buffers of CUDA and NCCL, 94 % or so.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip('v5e', 1.97e14, 15.75 * _GIB, 8.1e11, 9e10, 2),
        Chip('v5p', 4.59e14, 95.74 * _GIB, 2.8e12, 1.8e11, 3),
        Chip('v6e', 9.2e14, 31.25 * _GIB, 1.6e12, 1.8e11, 2),
        Chip('a100', 3.12e14, 75e9, 2.0e12, 6e11),
        Chip('h100', 9.89e14, 75e9, 3.35e12, 9e11),
        Chip('h200', 9.89e14, 132e9, 4.8e12, 9e11),
    )
}
_NO_MACHINE = {
    'TPU_SKIP_MDS_QUERY': '1',
    'TPU_ACCELERATOR_TYPE': 'v5litepod-4',
    'TPU_WORKER_HOSTNAMES': 'localhost',
    'ALLOW_MULTIPLE_LIBTPU_LOAD': '1',
}
_TPUS = tuple(name for name, chip in CHIPS.items() if chip.dimensions)
_GPUS = tuple(name for name, chip in CHIPS.items() if not chip.dimensions)
_WANTED = (
    f"a TPU topology such as 'v5p:4x4x4' or 'v5e:2x4*4' (of"
    f" {', '.join(_TPUS)}) or 'gpu:h100:8' (of {', '.join(_GPUS)})"
)


@dataclasses.dataclass(frozen=True)
class Topology:
  """Chips of one kind that are joined.

  Attributes:
    name: 'v5e:4x2' or 'gpu:h100:8'.
    chip: of which kind.
    count: how many.
    slices: that they are in; the network of a data centre joins those.
  """

  name: str
  chip: Chip
  count: int
  slices: int = 1

  @property
  def is_estimate(self) -> bool:
    """Returns whether the figures come from programs for other devices."""
    return not self.chip.dimensions

  def with_slices(self, slices: int) -> Topology:
    """Returns the topology with other slices: 'v5e:2x4*4' to 'v5e:2x4*1'."""
    name = f'{self.name.partition("*")[0]}*{slices}'
    count = self.count // self.slices * slices
    return dataclasses.replace(self, name=name, count=count, slices=slices)

  def devices(self) -> Sequence[jax.Device]:
    """Devices that programs can be compiled for; none of them can run any.

    Pretended CPU devices are made here, before jax has any; where it has, there
    must be enough.

    Raises:
      ConfigError: libtpu is missing or knows no such topology, or there are
        too few pretended devices.
    """
    return self._pretended() if self.is_estimate else self._compile_only()

  def _compile_only(self) -> Sequence[jax.Device]:
    require(has_libtpu(), '--topology', self.name,
            "a machine with libtpu: pip install -r requirements-dev.txt, or a"
            " 'gpu:' topology")  # fmt: skip
    # The library asks Google's metadata server what machine it is on, which
    # takes minutes where there is none, complains about each answer that it
    # does not get, and lets one process at a time have the chips. Nothing that
    # is compiled depends on any of it.
    for name, value in _NO_MACHINE.items():
      os.environ.setdefault(name, value)
    try:
      found = topologies.get_topology_desc(
          self.name.partition('*')[0], platform='tpu', num_slices=self.slices
      ).devices
    except jax.errors.JaxRuntimeError as error:
      said = str(error).partition('\n')[0]
      raise ConfigError(
          f'--topology is {self.name!r}, which libtpu refuses: {said}'
      ) from error
    require(len(found) == self.count, '--topology', self.name,
            f'{self.count} chips, libtpu has {len(found)}')  # fmt: skip
    return found

  def _pretended(self) -> Sequence[jax.Device]:
    # Both together are refused; neither has an effect once jax has started.
    forced = 'xla_force_host_platform_device_count'
    if forced not in os.environ.get('XLA_FLAGS', ''):
      with contextlib.suppress(RuntimeError):
        jax.config.update('jax_num_cpu_devices', self.count)
    found = jax.devices('cpu')
    require(
        len(found) >= self.count,
        '--topology',
        self.name,
        f'at most the {len(found)} pretended devices that jax has started with',
    )
    return found[: self.count]


def in_own_slices(
    mesh: jax.sharding.Mesh, topology: Topology
) -> jax.sharding.Mesh:
  """The same mesh in a topology of no other slices than it lies on.

  The compiler is told of all slices of a topology, and a program on one takes
  the others for empty; on several but not all, libtpu ends in an error or takes
  the whole process with it (found by compiling for v5e:2x2*4).

  Args:
    mesh: of some of the devices of the topology, whose slices are alike.
    topology: as a whole.
  """
  if topology.slices == 1:
    return mesh
  numbers = sorted({slice_of(device) for device in mesh.devices.flat})
  ranks = {number: rank for rank, number in enumerate(numbers)}
  place = lambda d: (*d.coords, d.core_on_chip)
  own = {
      (slice_of(device), *place(device)): device
      for device in topology.with_slices(len(ranks)).devices()
  }
  moved = np.empty(mesh.size, object)
  moved[:] = [own[ranks[slice_of(d)], *place(d)] for d in mesh.devices.flat]
  grid = moved.reshape(mesh.devices.shape)
  return jax.sharding.Mesh(grid, mesh.axis_names, axis_types=mesh.axis_types)


def has_libtpu() -> bool:
  """Returns whether programs can be compiled for TPUs on this machine."""
  return importlib.util.find_spec('libtpu') is not None


def parse_topology(name: str) -> Topology:
  """Reads the name of a topology.

  Examples: 'v5e:2x4' is 8 chips in two dimensions, 'v5e:2x4*4' four slices of
  those, 'gpu:h100:8' 8 GPUs.

  Raises:
    ConfigError: another form, another chip, or a torus of other dimensions.
  """
  kind, _, rest = name.partition(':')
  if kind == 'gpu':
    gpu, _, count = rest.partition(':')
    right = gpu in _GPUS and bool(re.fullmatch(r'[1-9]\d*', count))
    require(right, '--topology', name, _WANTED)
    return Topology(name, CHIPS[gpu], int(count))
  form = re.fullmatch(r'([1-9]\d*(?:x[1-9]\d*)+)(?:\*([1-9]\d*))?', rest)
  require(kind in _TPUS and form is not None, '--topology', name, _WANTED)
  chip, slices = CHIPS[kind], int(form[2] or 1)
  sizes = [int(size) for size in form[1].split('x')]
  require(
      len(sizes) == chip.dimensions,
      '--topology',
      name,
      f'{chip.dimensions} numbers: {kind} is joined in so many dimensions',
  )
  return Topology(name, chip, slices * math.prod(sizes), slices)
