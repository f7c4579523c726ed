"""Arrays from the layout of one mesh to those of others, over no third place.

Between meshes that cut an array differently `jax.device_put` collects it on the
host, waiting until it is there, and cuts it anew (jax 0.10.2): it is written
twice, and read by strides. Here no array is ever whole anywhere.

An array whose parts are the same on both sides is copied from device to device.
Any other crosses in pieces that neither layout cuts any further. How depends on
where devices have their memory:

  Devices with memory of their own
    1. one program here cuts the part of each device into pieces;
    2. each piece is copied to the device that is to have it;
    3. one program there joins the pieces of each device.
  The first and the last fall away for arrays whose parts are one piece. Nobody
  waits: all of it is handed to the devices in one go. Every element crosses
  once for each copy that the target holds of it.

  Devices that a processor pretends
    The host can read their memory, and an array can be made of memory that the
    host has written. So the caller waits for the arrays, and every piece is
    copied once, straight to where it belongs. A part that several devices hold,
    of one target or of more, is written once and is theirs together: arrays
    are not written to again, and a program that is given one to overwrite
    takes memory of its own instead.

In the other form as in this one, no part there is ever a part here: the train
step overwrites its own.
"""

from __future__ import annotations

from concurrent import futures
import itertools
import math
import os
from typing import Any, Iterator, Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import NamedSharding
import numpy as np

from areal_jax.mesh import host

PyTree = Any
_Place = tuple[int, ...]  # of a piece in its array, in pieces
Box = tuple[tuple[int, int], ...]  # [start, stop) of each axis of an array

# A part in the host's memory, and what goes where in it.
_Job = tuple[np.ndarray, list[tuple[tuple[slice, ...], np.ndarray]]]

# Bytes of a bundle on a device; see `Crossing`.
_BUNDLE = 2**28
# What XLA wants of memory that is to be a buffer as it is.
_ALIGNED = 64
# Bytes that one thread has written before others are there.
_ALONE = 2**23


class Crossing:
  """Moves trees of arrays that are like one tree to where others say.

  Memory: between devices with memory of their own arrays cross in bundles of at
  most `bundle` bytes on any device (or one array, if that is more). A bundle's
  pieces, as many bytes as its parts, are let go of as soon as the program
  that joins them has been handed out, so that is what a crossing takes on each
  side beside what arrives. Over the host nothing is taken beside what arrives.

  Args:
    like: arrays or `jax.ShapeDtypeStruct`s, with `NamedSharding`s of one mesh.
    targets: the same trees of `NamedSharding`s, each of one mesh.
    over_host: whether the host reads and writes the memory of all devices, so
      that arrays which are cut differently cross over it.
    bundle: bytes, see above.
  """

  def __init__(
      self,
      like: PyTree,
      targets: Sequence[PyTree],
      *,
      over_host: bool = False,
      bundle: int = _BUNDLE,
  ):
    leaves, self._structure = jax.tree.flatten(like)
    shardings = [self._structure.flatten_up_to(t) for t in targets]
    self._targets = len(targets)
    # By target and array; those that cross over the host have no route.
    written: list[tuple[int, int]] = []
    sent: list[tuple[int, int, _Route]] = []
    for target, i in itertools.product(range(len(targets)), range(len(leaves))):
      route = _Route(leaves[i], shardings[target][i])
      if over_host and route.cuts * route.joins > 1:
        written.append((target, i))
      else:
        sent.append((target, i, route))
    self._bundles = list(_bundles(sent, bundle))
    self._written = []
    for i in dict.fromkeys(i for _, i in written):
      wanting = [target for target, j in written if j == i]
      parts = _Parts(leaves[i], [shardings[t][i] for t in wanting])
      self._written.append((i, wanting, parts))

  def __call__(self, tree: PyTree) -> list[PyTree]:
    """The same values in new arrays, on their way to each target."""
    arrays = self._structure.flatten_up_to(host.require_whole(tree, 'sent'))
    landed: list[list[Any]] = [
        [None] * len(arrays) for _ in range(self._targets)
    ]
    for bundle in self._bundles:
      for (target, i), array in zip(bundle.of, bundle(arrays)):
        landed[target][i] = array
    # Behind what needs no waiting.
    jobs: list[_Job] = []
    begun = [parts.begin(arrays[i], jobs) for i, _, parts in self._written]
    _write(jobs)
    for (i, wanting, parts), written in zip(self._written, begun):
      for target, array in zip(wanting, parts.land(written)):
        landed[target][i] = array
    return [self._structure.unflatten(of_target) for of_target in landed]


class _Bundle:
  """Arrays that cross from device to device together, to one target.

  Attributes:
    of: (target, array) by number.
  """

  def __init__(self, sent: Sequence[tuple[int, int, _Route]]):
    self.of = [(target, i) for target, i, _ in sent]
    self._routes = routes = [route for _, _, route in sent]
    cut = [r for r in routes if r.cuts > 1]
    joined = [r for r in routes if r.joins > 1]
    self._cut = jax.jit(lambda xs: [r.cut(x) for r, x in zip(cut, xs)])
    self._join = jax.jit(lambda xs: [r.join(x) for r, x in zip(joined, xs)])

  def __call__(self, arrays: Sequence[Array]) -> list[Array]:
    routes = self._routes
    pieces = [[arrays[i]] for _, i in self.of]
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


def _bundles(
    sent: Sequence[tuple[int, int, _Route]], limit: int
) -> Iterator[_Bundle]:
  """Neighbours of one target together, up to so many bytes on a device."""
  for _, of_target in itertools.groupby(sent, key=lambda one: one[0]):
    taken, size = [], 0
    for one in of_target:
      if taken and size + one[2].bytes > limit:
        yield _Bundle(taken)
        taken, size = [], 0
      taken.append(one)
      size += one[2].bytes
    yield _Bundle(taken)


class _Route:
  """The plan by which one array crosses from devices to devices.

  Example: [8, 8], cut over 4 devices along the first dimension here and over 2
  along the second there, has pieces of [2, 4]. A part here is cut into 1 x 2 of
  them, one there is joined of 4 x 1.

  Attributes:
    cuts: pieces of a part here.
    joins: pieces of a part there.
    bytes: of a part, here or there, whichever is more.
    journeys: (device here, which of its pieces, device there) of each copy; the
      pieces of a device there stand together, those of the first device first.
  """

  def __init__(self, like: Any, target: NamedSharding):
    self._source, self._target = like.sharding, target
    here = self._source.shard_shape(like.shape)
    there = target.shard_shape(like.shape)
    # n / lcm(n / a, n / b) = gcd(a, b) where a and b divide n.
    piece = tuple(map(math.gcd, here, there))
    self._split = tuple(a // b for a, b in zip(here, piece))
    self._grid = tuple(a // b for a, b in zip(there, piece))
    self.cuts, self.joins = math.prod(self._split), math.prod(self._grid)
    most = max(math.prod(here), math.prod(there))
    self.bytes = most * np.dtype(like.dtype).itemsize
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
            self._shape, self._target, list(arrived[number :: self.joins])
        )
        for number in range(self.joins)
    ]

  def join(self, pieces: Sequence[Array]) -> Array:
    """The whole array there."""
    spec = self._target.spec

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
        mesh=self._target.mesh,
        in_specs=([spec] * self.joins,),
        out_specs=spec,
    )(list(pieces))


class _Parts:
  """The plan by which one array is assembled in the host's memory.

  Args:
    like: the array, or its shape, dtype and sharding.
    targets: where it goes; equal parts of all of them are written once.
  """

  def __init__(self, like: Any, targets: Sequence[NamedSharding]):
    self._shape = like.shape
    self._targets = targets
    # Parts that are copies of each other: any of them will do.
    here = {
        box: device for device, box in boxes(like.sharding, like.shape).items()
    }
    wanted = {
        box for target in targets for box in boxes(target, like.shape).values()
    }
    # By part: of which device's part what goes where in it.
    self._pieces = {
        box: [
            (device, _within(common, held), _within(common, box))
            for held, device in here.items()
            if (common := _common(held, box)) is not None
        ]
        for box in wanted
    }

  def begin(self, array: Array, jobs: list[_Job]) -> dict[Box, np.ndarray]:
    """Memory for each part, and what is to be written there, once it can be."""
    held = {
        shard.device: np.asarray(shard.data)  # waits, and copies nothing
        for shard in array.addressable_shards
    }
    parts = {}
    for box, pieces in self._pieces.items():
      part = _empty([stop - start for start, stop in box], array.dtype)
      jobs.append((part, [(put, held[at][taken]) for at, taken, put in pieces]))
      parts[box] = part
    return parts

  def land(self, parts: dict[Box, np.ndarray]) -> list[Array]:
    """The array there, one for each target."""
    # Nothing is sent: each part becomes the device's as it is.
    with jax.transfer_guard_host_to_device('allow'):
      return [
          jax.make_array_from_callback(
              self._shape, target, lambda index: parts[_box(index, self._shape)]
          )
          for target in self._targets
      ]


def _write(jobs: Sequence[_Job]) -> None:
  """Writes all parts, large ones side by side."""

  def write(job: _Job) -> None:
    part, pieces = job
    for put, piece in pieces:
      part[put] = piece

  if sum(part.nbytes for part, _ in jobs) < _ALONE:
    for job in jobs:
      write(job)
    return
  # One processor does not fill the memory's bandwidth.
  with futures.ThreadPoolExecutor(os.cpu_count()) as pool:
    list(pool.map(write, jobs))


def boxes(
    sharding: NamedSharding, shape: tuple[int, ...]
) -> dict[jax.Device, Box]:
  """Returns the part of an array on each device."""
  return {
      device: _box(index, shape)
      for device, index in sharding.devices_indices_map(shape).items()
  }


def _box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
  return tuple(part.indices(size)[:2] for part, size in zip(index, shape))


def _common(one: Box, other: Box) -> Box | None:
  """Returns the intersection of two boxes; None if it is empty."""
  common = tuple((max(a, c), min(b, d)) for (a, b), (c, d) in zip(one, other))
  return common if all(start < stop for start, stop in common) else None


def _within(inner: Box, outer: Box) -> tuple[slice, ...]:
  """Returns the position of a box inside a larger one."""
  return tuple(
      slice(start - first, stop - first)
      for (start, stop), (first, _) in zip(inner, outer)
  )


def _empty(shape: Sequence[int], dtype: Any) -> np.ndarray:
  """Memory that a CPU's device takes for its own as it is."""
  size = math.prod(shape) * np.dtype(dtype).itemsize
  room = np.empty(size + _ALIGNED, np.uint8)
  start = -room.ctypes.data % _ALIGNED
  return room[start : start + size].view(dtype).reshape(shape)


def _corners(
    sharding: NamedSharding, shape: tuple[int, ...], piece: tuple[int, ...]
) -> list[tuple[jax.Device, _Place]]:
  """The first piece of each device's part."""
  return [
      (device, tuple(start // n for (start, _), n in zip(box, piece)))
      for device, box in boxes(sharding, shape).items()
  ]


def _places(first: _Place, grid: tuple[int, ...]) -> list[_Place]:
  """Places of the pieces of a part, row by row."""
  return [
      tuple(map(sum, zip(first, more)))
      for more in itertools.product(*map(range, grid))
  ]
