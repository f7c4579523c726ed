"""From the names of an array's axes to the devices that hold its parts.

The model names the axes of each parameter and activation ('embed', 'heads',
...). `Rules` says which mesh axis each name is cut over, so that a model reads
the same on one device and on many. After `qwen3/model.py` of
https://github.com/jax-ml/jax-llm-examples.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import jax
from jax.sharding import NamedSharding, PartitionSpec

from areal_jax.config import ConfigError


@dataclasses.dataclass
class Rules:
  """The mesh axis of each logical axis; None keeps that axis whole."""

  # Parameters.
  layer: str | None = None
  vocab: str | None = 'tensor'
  embed: str | None = 'fsdp'  # model width D of a matrix
  norm: str | None = None  # scales of norms: small, and read by all
  heads: str | None = 'tensor'
  kv_heads: str | None = 'tensor'  # whole where it does not divide
  head: str | None = None
  mlp: str | None = 'tensor'
  # Experts are cut like heads: where tokens are whole, each device runs its own
  # on all of them. `expert_mlp` cuts their columns, for few experts.
  expert: str | None = 'tensor'
  expert_mlp: str | None = None
  scores: str | None = None  # columns of a router, one an expert
  rank: str | None = None  # of adapters: small
  # Activations and caches.
  batch: str | None = 'fsdp'  # rows B
  tokens: str | None = 'fsdp'  # rows · tokens, flattened
  time: str | None = None  # tokens T of one row
  width: str | None = None  # model width D of an activation
  pages: str | None = None
  page: str | None = None

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
    used = [p for p in parts if p is not None]
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
    axis = self._axis(name)
    return 1 if mesh is None or axis is None else self._size(name, axis, mesh)

  def _part(
      self, name: str | None, size: int, mesh: jax.sharding.Mesh
  ) -> str | None:
    axis = None if name is None else self._axis(name)
    if axis is None:
      return None
    parts = self._size(name, axis, mesh)
    if size % parts == 0:
      return axis
    if name == 'kv_heads':
      return None
    hint = ' (model.vocab_multiple pads it)' if name == 'vocab' else ''
    raise ConfigError(
        f'{name} of size {size} does not divide over the {parts} devices of'
        f' mesh axis {axis!r}{hint}'
    )

  def _axis(self, name: str) -> str | None:
    if name not in self.__dataclass_fields__:
      known = list(self.__dataclass_fields__)
      raise ValueError(
          f'logical axis {name!r} has no rule, wanted one of {known}'
      )
    return getattr(self, name)

  def _size(self, name: str, axis: str, mesh: jax.sharding.Mesh) -> int:
    if axis not in mesh.shape:
      raise ConfigError(
          f'rules.{name} is {axis!r}, wanted one of the mesh axes'
          f' {list(mesh.axis_names)}'
      )
    return mesh.shape[axis]
