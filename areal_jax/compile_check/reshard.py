"""What crosses from the train mesh to rollout meshes, from shapes.

No program spans two meshes, so nothing can be compiled for it: a publish is
a copy from one sharding to others. Which part of an array lies where
is known, and with it what each device has to be sent.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any, Sequence

import jax
import numpy as np

from areal_jax.mesh.crossing import Box, boxes


@dataclasses.dataclass(frozen=True)
class Reshard:
  """Bytes of one publish.

  Attributes:
    total: that arrive at devices, all replicas together.
    received: by the device that receives most.
    sent: by the device that sends most, where a part that several hold is sent
      by all of them in equal shares.
  """

  total: int
  received: int
  sent: int


def reshard(shapes: Any, targets: Sequence[Any], dtype: str = '') -> Reshard:
  """Counts what a publish sends.

  Args:
    shapes: `jax.ShapeDtypeStruct`s with the shardings that they have.
    targets: trees like it of the shardings that they get, one a replica.
    dtype: floating dtype that they are sent in; empty for their own.
  """
  received: collections.Counter = collections.Counter()
  sent: collections.Counter = collections.Counter()
  for target in targets:
    for leaf, sharding in zip(
        jax.tree.leaves(shapes), jax.tree.leaves(target), strict=True
    ):
      _count(leaf, sharding, _itemsize(leaf, dtype), received, sent)
  return Reshard(
      total=sum(received.values()),
      received=max(received.values(), default=0),
      sent=math.ceil(max(sent.values(), default=0)),
  )


def _count(
    leaf: jax.ShapeDtypeStruct,
    sharding: jax.sharding.Sharding,
    itemsize: int,
    received: collections.Counter,
    sent: collections.Counter,
) -> None:
  """Adds one array's bytes by device."""
  holders = collections.defaultdict(list)
  for device, box in boxes(leaf.sharding, leaf.shape).items():
    holders[box].append(device)
  here = {d: box for box, devices in holders.items() for d in devices}
  for device, wanted in boxes(sharding, leaf.shape).items():
    # What it holds already does not travel.
    own = here.get(device)
    for box, devices in holders.items():
      common = _common(wanted, box)
      if own is not None:
        common -= _common(wanted, box, own)
      if common > 0:
        received[device] += common * itemsize
        for holder in devices:
          sent[holder] += common * itemsize / len(devices)


def _common(*parts: Box) -> int:
  """Elements that all parts have; 1 for parts of a scalar."""
  return math.prod(
      max(0, min(stop for _, stop in axis) - max(start for start, _ in axis))
      for axis in zip(*parts)
  )


def _itemsize(leaf: jax.ShapeDtypeStruct, dtype: str) -> int:
  floating = jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating)
  return np.dtype(dtype if dtype and floating else leaf.dtype).itemsize
