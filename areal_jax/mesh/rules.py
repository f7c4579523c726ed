"""From the names of an array's axes to the devices that hold its parts.

The model names the axes of each parameter and activation ('embed', 'heads',
...). `Rules` says which mesh axis each name is cut over, so that a model reads
the same on one device and on many. After `qwen3/model.py` of
https://github.com/jax-ml/jax-llm-examples.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Iterable, Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.config import ConfigError

# One mesh axis, or several that cut a dimension together, the first outermost.
Cut = str | tuple[str, ...] | None


@dataclasses.dataclass
class Rules:
  """The mesh axes of each logical axis; None keeps that axis whole."""

  # Parameters. The data axis is in none: they are whole along it.
  layer: Cut = None
  vocab: Cut = 'tensor'
  # Model width D of a matrix. Those that are no experts lie over the expert
  # axis too, or each of its devices would have a copy and its moments.
  embed: Cut = ('fsdp', 'expert')
  expert_embed: Cut = 'fsdp'  # D of an expert's matrix
  norm: Cut = None  # scales of norms: small, and read by all
  heads: Cut = 'tensor'
  kv_heads: Cut = 'tensor'  # whole where it does not divide
  head: Cut = None
  mlp: Cut = 'tensor'
  # Over the tensor axis experts are cut like heads: tokens are whole there, and
  # each device runs its own experts on all of them. `expert_mlp` cuts their
  # columns, for few experts.
  expert: Cut = ('expert', 'tensor')
  expert_mlp: Cut = None
  scores: Cut = None  # columns of a router, one an expert
  rank: Cut = None  # of adapters: small
  # Activations and caches.
  batch: Cut = ('data', 'fsdp', 'expert')  # rows B
  time: Cut = 'context'  # tokens T of one row
  tokens: Cut = ('data', 'fsdp', 'expert', 'context')  # B · T, flattened
  width: Cut = None  # model width D of an activation
  slots: Cut = 'data'  # of an engine, S
  pages: Cut = 'data'  # of its cache: where the slots are that read them
  page: Cut = None

  def for_rollout(self) -> Rules:
    """These rules on a mesh that generates.

    Few tokens are under way at a time there, and whole on every device. So are
    parameters along the width: gathering them for each token would cost more
    than the token.
    """
    return dataclasses.replace(
        self,
        embed=None,
        expert_embed=None,
        batch=None,
        time=None,
        tokens=None,
    )

  def inside(self, axes: Iterable[str]) -> Rules:
    """These rules for what each part along some mesh axes does by itself."""
    left = {}
    for name in self.__dataclass_fields__:
      cut = tuple(a for a in mesh_axes(getattr(self, name)) if a not in axes)
      left[name] = cut[0] if len(cut) == 1 else cut or None
    return Rules(**left)

  def spec(
      self,
      axes: Sequence[str | None],
      shape: Sequence[int],
      mesh: jax.sharding.Mesh,
  ) -> PartitionSpec:
    """The partition of an array, one logical name (or None) a dimension.

    Key/value heads that the mesh axis exceeds or does not divide are
    replicated: each device of a group of query heads needs its own copy anyway.

    Raises:
      ConfigError: a dimension that does not divide over its mesh axis, a mesh
        without that axis, or one mesh axis for two dimensions.
      ValueError: a name without a rule, or names that do not match the shape.
    """
    if len(axes) != len(shape):
      raise ValueError(f'axes {tuple(axes)} name the shape {tuple(shape)}')
    parts = [self._part(n, s, mesh) for n, s in zip(axes, shape)]
    used = [axis for part in parts for axis in mesh_axes(part)]
    if len(set(used)) < len(used):
      raise ConfigError(
          f'rules cut two of the axes {tuple(axes)} over one mesh axis:'
          f' {parts}, wanted each mesh axis once'
      )
    return PartitionSpec(*parts)

  def sharding(
      self,
      axes: Sequence[str | None],
      shape: Sequence[int],
      mesh: jax.sharding.Mesh,
  ) -> NamedSharding:
    """`spec` on its mesh."""
    return NamedSharding(mesh, self.spec(axes, shape, mesh))

  def parts(self, name: str, mesh: jax.sharding.Mesh | None) -> int:
    """Devices that the logical axis `name` is cut over; 1 without a mesh."""
    cut = self._cut(name)
    return 1 if mesh is None else self._size(name, cut, mesh)

  def _part(self, name: str | None, size: int, mesh: jax.sharding.Mesh) -> Cut:
    cut = None if name is None else self._cut(name)
    parts = 1 if name is None else self._size(name, cut, mesh)
    if size % parts == 0:
      return cut
    if name == 'kv_heads':
      return None
    hint = ' (model.vocab_multiple pads it)' if name == 'vocab' else ''
    used = mesh_axes(cut)
    axes = 'mesh axis' if len(used) == 1 else 'mesh axes'
    raise ConfigError(
        f'{name} of size {size} does not divide over the {parts} devices of'
        f' {axes} {", ".join(map(repr, used))}{hint}'
    )

  def _cut(self, name: str) -> Cut:
    if name not in self.__dataclass_fields__:
      known = list(self.__dataclass_fields__)
      raise ValueError(
          f'logical axis {name!r} has no rule, wanted one of {known}'
      )
    return getattr(self, name)

  def _size(self, name: str, cut: Cut, mesh: jax.sharding.Mesh) -> int:
    for axis in mesh_axes(cut):
      if axis not in mesh.shape:
        raise ConfigError(
            f'rules.{name} is {cut!r}, wanted one of the mesh axes'
            f' {list(mesh.axis_names)}'
        )
    return math.prod(mesh.shape[axis] for axis in mesh_axes(cut))


def free_axes(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> set[str]:
  """The axes over which `jax.shard_map` may still cut.

  All of them, but for those along which each part works by itself already.
  """
  manual = jax.sharding.AxisType.Manual
  return {a for a, t in zip(mesh.axis_names, mesh.axis_types) if t != manual}


def platform_of(mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh) -> str:
  """'cpu', 'gpu' or 'tpu'."""
  if isinstance(mesh, jax.sharding.AbstractMesh):
    return mesh.abstract_device.platform
  return mesh.devices.flat[0].platform


def mesh_axes(cut: Cut) -> tuple[str, ...]:
  """The mesh axes of a rule, outermost first."""
  if cut is None:
    return ()
  return (cut,) if isinstance(cut, str) else tuple(cut)
