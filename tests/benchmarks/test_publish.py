"""What is counted as written when a version is published."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from areal_jax.mesh.crossing import Crossing
from areal_jax.mesh.slices import mesh_of
from benchmarks import publish


def test_parts_in_one_place_are_held_twice_and_written_once():
  four, two = (
      mesh_of(jax.devices()[: 2 * n], fsdp=n, tensor=2) for n in (2, 1)
  )
  # Computed, for what numpy has may be taken over where it happens to lie well.
  array = jax.jit(
      lambda: jnp.ones((8, 4)), out_shardings=NamedSharding(four, P('fsdp'))
  )()
  halves = NamedSharding(two, P(None, 'tensor'))
  crossing = Crossing([array], [[halves], [halves]], over_host=True)
  arrived = crossing([array])
  assert publish.held(arrived) == 2 * array.nbytes
  assert publish.written(arrived) == array.nbytes
  # Copies elsewhere are counted as often as they lie.
  assert publish.written([arrived, array]) == 3 * array.nbytes
