"""Arrays from the layout of one mesh to that of another, over no third place.

Between meshes that cut an array differently `jax.device_put` collects it on the
host, waiting until it is there, and cuts it anew (jax 0.10.2). That is the
fastest way where devices are pretended and lie in the memory of the host
(`benchmarks/publish.py`).
Elsewhere an array crosses in pieces that neither layout cuts any further:

  1. one program here cuts the part of each device into pieces;
  2. each piece is copied to the device that is to have it;
  3. one program there joins the pieces of each device.

The first and the last fall away for arrays whose parts are one piece. Nobody
waits: all of it is handed to the devices in one go. Every element crosses once
for each copy that the target holds of it.
"""

from __future__ import annotations

import itertools
import math
from typing import Any, Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import NamedSharding

PyTree = Any
_Place = tuple[int, ...]  # of a piece in its array, in pieces


class Crossing:
  """Moves trees of arrays that are like one tree to where another says.

  Args:
    like: arrays or `jax.ShapeDtypeStruct`s, with `NamedSharding`s of one mesh.
    target: the same tree of `NamedSharding`s of one mesh.
    over_host: whether arrays that are cut differently cross over the host.
  """

  def __init__(self, like: PyTree, target: PyTree, *, over_host: bool = False):
    self._over_host = over_host
    leaves, self._structure = jax.tree.flatten(like)
    shardings = self._structure.flatten_up_to(target)
    self._routes = [_Route(x, s) for x, s in zip(leaves, shardings)]
    cut = [r for r in self._routes if r.cuts > 1]
    joined = [r for r in self._routes if r.joins > 1]
    self._cut = jax.jit(lambda xs: [r.cut(x) for r, x in zip(cut, xs)])
    self._join = jax.jit(lambda xs: [r.join(x) for r, x in zip(joined, xs)])

  def __call__(self, tree: PyTree) -> PyTree:
    """The same values in new arrays, on their way to the target."""
    arrays = self._structure.flatten_up_to(tree)
    collected = [
        i
        for i, route in enumerate(self._routes)
        if self._over_host and route.cuts * route.joins > 1
    ]
    # Never an alias: no part there is a part here.
    moved = jax.device_put(
        [arrays[i] for i in collected],
        [self._routes[i].target for i in collected],
    )
    landed = dict(zip(collected, moved))
    rest = [i for i in range(len(arrays)) if i not in landed]
    landed |= zip(rest, self._in_pieces(rest, [arrays[i] for i in rest]))
    return self._structure.unflatten([landed[i] for i in range(len(arrays))])

  def _in_pieces(
      self, numbers: Sequence[int], arrays: Sequence[Array]
  ) -> list[Array]:
    """Arrays of these routes there."""
    routes = [self._routes[i] for i in numbers]
    pieces = [[x] for x in arrays]
    cut = [i for i, route in enumerate(routes) if route.cuts > 1]
    if cut:
      for i, of_array in zip(cut, self._cut([pieces[i][0] for i in cut])):
        pieces[i] = of_array
    sent, devices, alias = [], [], []
    for route, of_array in zip(routes, pieces):
      held = [
          {shard.device: shard.data for shard in piece.addressable_shards}
          for piece in of_array
      ]
      for here, number, there in route.journeys:
        sent.append(held[number][here])
        devices.append(there)
        # What was cut, or is going to be joined, is new anyway.
        alias.append(route.cuts * route.joins > 1)
    arrived = jax.device_put(sent, devices, may_alias=alias)
    landed, start = [], 0
    for route in routes:
      end = start + len(route.journeys)
      landed.append(route.land(arrived[start:end]))
      start = end
    joined = [i for i, route in enumerate(routes) if route.joins > 1]
    if joined:
      for i, array in zip(joined, self._join([landed[i] for i in joined])):
        landed[i] = [array]
    return [array for (array,) in landed]


class _Route:
  """How one array crosses.

  Example: [8, 8], cut over 4 devices along the first dimension here and over 2
  along the second there, has pieces of [2, 4]. A part here is cut into 1 x 2 of
  them, one there is joined of 4 x 1.

  Attributes:
    target: where it goes.
    cuts: pieces of a part here.
    joins: pieces of a part there.
    journeys: (device here, which of its pieces, device there) of each copy; the
      pieces of a device there stand together, those of the first device first.
  """

  def __init__(self, like: Any, target: NamedSharding):
    self._source, self.target = like.sharding, target
    here = self._source.shard_shape(like.shape)
    there = target.shard_shape(like.shape)
    # n / lcm(n / a, n / b) = gcd(a, b) where a and b divide n.
    piece = tuple(map(math.gcd, here, there))
    self._split = tuple(a // b for a, b in zip(here, piece))
    self._grid = tuple(a // b for a, b in zip(there, piece))
    self.cuts, self.joins = math.prod(self._split), math.prod(self._grid)
    parts = (n // a for n, a in zip(like.shape, there))
    self._shape = tuple(n * p for n, p in zip(piece, parts))
    holders: dict[_Place, list[tuple[jax.Device, int]]] = {}
    for device, first in _corners(self._source, like.shape, piece):
      for number, place in enumerate(_places(first, self._split)):
        holders.setdefault(place, []).append((device, number))
    self.journeys = []
    for i, (there, first) in enumerate(_corners(target, like.shape, piece)):
      for place in _places(first, self._grid):
        have = holders[place]
        # Itself, if it has the piece; of others each in turn.
        have = [h for h in have if h[0] == there] or have
        self.journeys.append((*have[i % len(have)], there))

  def cut(self, array: Array) -> list[Array]:
    """Pieces, each an array of which every device here has one."""
    spec = self._source.spec

    def split(part: Array) -> list[Array]:
      parts = [part]
      for axis, count in enumerate(self._split):
        parts = [p for x in parts for p in jnp.split(x, count, axis)]
      return parts

    return jax.shard_map(
        split,
        mesh=self._source.mesh,
        in_specs=spec,
        out_specs=[spec] * self.cuts,
    )(array)

  def land(self, arrived: Sequence[Array]) -> list[Array]:
    """The same there, from what was copied to each device."""
    return [
        jax.make_array_from_single_device_arrays(
            self._shape, self.target, list(arrived[number :: self.joins])
        )
        for number in range(self.joins)
    ]

  def join(self, pieces: Sequence[Array]) -> Array:
    """The whole array there."""
    spec = self.target.spec

    def whole(pieces: Sequence[Array]) -> Array:
      pieces = list(pieces)
      for axis in reversed(range(len(self._grid))):
        count = self._grid[axis]
        pieces = [
            jnp.concatenate(pieces[i : i + count], axis)
            for i in range(0, len(pieces), count)
        ]
      return pieces[0]

    return jax.shard_map(
        whole,
        mesh=self.target.mesh,
        in_specs=([spec] * self.joins,),
        out_specs=spec,
    )(list(pieces))


def _corners(
    sharding: NamedSharding, shape: tuple[int, ...], piece: tuple[int, ...]
) -> list[tuple[jax.Device, _Place]]:
  """The first piece of each device's part."""
  return [
      (device, tuple((s.start or 0) // n for s, n in zip(index, piece)))
      for device, index in sharding.devices_indices_map(shape).items()
  ]


def _places(first: _Place, grid: tuple[int, ...]) -> list[_Place]:
  """Places of the pieces of a part, row by row."""
  return [
      tuple(map(sum, zip(first, more)))
      for more in itertools.product(*map(range, grid))
  ]
