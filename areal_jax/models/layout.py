"""Where the activations of the Transformer lie on a mesh: `Layout`.

Where parameters lie says `parameters.param_shardings`.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.mesh.rules import Rules, platform_of

Array = jax.Array
Mesh = jax.sharding.Mesh


class Layout:
  """Constrains activations to a mesh by their logical axes.

  Dense layers take flat tokens [M], M = B · T. Where both rows and the tokens
  of a row are cut, no cut of plainly flattened rows leaves every token where it
  is, so the flat order is another one: those of the first device, then those of
  the next. Only `flat` and `rows` know about it.
  """

  def __init__(self, mesh: Mesh | None, rules: Rules | None):
    self.mesh = mesh
    self.rules = rules
    self.platform = (
        jax.devices()[0].platform if mesh is None else platform_of(mesh)
    )
    self.whole = mesh is None or mesh.size == 1  # on one device
    self.context = 1 if mesh is None else rules.parts('time', mesh)

  def flat(self, x: Array, *axes: str | None) -> Array:
    """[B, T, ..., *axes] as [M, *axes], without moving anything.

    The second dimension is that which is cut by the rule of 'time'.
    """
    lead = x.ndim - len(axes)
    after = x.shape[lead:]
    if self.context == 1 or lead == 1:
      return x.reshape(-1, *after)
    shape = math.prod(x.shape[:lead]), *after
    return jax.shard_map(
        lambda part: part.reshape(-1, *part.shape[lead:]),
        mesh=self.mesh,
        in_specs=self._spec(_row_axes(lead) + axes, x.shape),
        out_specs=self._spec(('tokens', *axes), shape),
    )(x)

  def rows(self, x: Array, shape: tuple[int, ...], *axes: str | None) -> Array:
    """The inverse: [M, *axes] as [*shape, *axes]."""
    whole = (*shape, *x.shape[1:])
    if self.context == 1 or len(shape) == 1:
      return x.reshape(whole)
    rows = self._spec(_row_axes(len(shape)) + axes, whole)
    part = jax.sharding.NamedSharding(self.mesh, rows).shard_shape(whole)
    return jax.shard_map(
        lambda x: x.reshape(part),
        mesh=self.mesh,
        in_specs=self._spec(('tokens', *axes), x.shape),
        out_specs=rows,
    )(x)

  def computed(self, x: Any, positions: Array) -> Any:
    """Values of positions [M], computed once for all that read them.

    XLA for CPU computes a cosine anew in each operation that multiplies by it,
    for every head of every layer, and takes barriers away. It leaves results of
    branches alone.
    """
    if self.platform != 'cpu' or (self.mesh is not None and self.mesh.size > 1):
      return x
    always = positions.max() >= 0
    zeros = lambda: jax.tree.map(jnp.zeros_like, x)
    return jax.lax.cond(always, lambda: x, zeros)

  def _spec(self, axes, shape) -> jax.sharding.PartitionSpec:
    return self.rules.spec(axes, shape, self.mesh)

  def __call__(self, x: Array, *axes: str) -> Array:
    if self.mesh is None or self.mesh.size == 1:
      return x
    sharding = self.rules.sharding(axes, x.shape, self.mesh)
    return jax.lax.with_sharding_constraint(x, sharding)


def _row_axes(count: int) -> tuple[str | None, ...]:
  """Logical axes of [B, T, ...], `count` of them."""
  return ('batch', 'time', *[None] * (count - 2))
