"""What is counted as written when a version is published."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from areal_jax.mesh.crossing import Crossing
from areal_jax.mesh.slices import mesh_of
from benchmarks import publish


def test_parts_in_one_place_are_held_twice_and_written_once():
  four, two = (
      mesh_of(jax.devices()[: 2 * n], fsdp=n, tensor=2) for n in (2, 1)
  )
  array = jax.device_put(
      np.ones((8, 4), np.float32), NamedSharding(four, P('fsdp'))
  )
  halves = NamedSharding(two, P(None, 'tensor'))
  crossing = Crossing([array], [[halves], [halves]], over_host=True)
  arrived = crossing([array])
  assert publish.held(arrived) == 2 * array.nbytes
  assert publish.written(arrived) == array.nbytes
  # Copies elsewhere are counted as often as they lie.
  assert publish.written([arrived, array]) == 3 * array.nbytes
