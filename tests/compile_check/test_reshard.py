"""Bytes of a publish, against counts made by hand."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np

from areal_jax.compile_check.reshard import Reshard, reshard


def mesh(first: int, *shape: int) -> jax.sharding.Mesh:
  count = int(np.prod(shape))
  devices = np.asarray(jax.devices()[first : first + count]).reshape(shape)
  return jax.sharding.Mesh(devices, ('fsdp', 'tensor')[: len(shape)])


def array(on: jax.sharding.Mesh, *axes, shape=(8, 6)) -> jax.ShapeDtypeStruct:
  sharding = NamedSharding(on, P(*axes))
  return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)


def test_each_replica_gets_the_whole_and_each_shard_sends_its_part():
  train = array(mesh(0, 4), 'fsdp')
  replicas = [NamedSharding(mesh(n, 1), P()) for n in (4, 5)]
  size = 8 * 6 * 4
  assert reshard(train, replicas) == Reshard(2 * size, size, 2 * size // 4)


def test_half_precision_sends_half():
  train = array(mesh(0, 4), 'fsdp')
  replicas = [NamedSharding(mesh(4, 1), P())]
  assert reshard(train, replicas, 'bfloat16').total == 8 * 6 * 2


def test_integers_keep_their_size():
  train = jax.ShapeDtypeStruct(
      (3,), jnp.int32, sharding=NamedSharding(mesh(0, 2), P())
  )
  replicas = [NamedSharding(mesh(2, 1), P())]
  assert reshard(train, replicas, 'bfloat16').total == 3 * 4


def test_what_several_hold_is_sent_in_equal_shares():
  train = array(mesh(0, 2, 2), 'fsdp')  # each half lies on two devices
  replicas = [NamedSharding(mesh(4, 2, 2), P(None, 'tensor'))]
  found = reshard(train, replicas)
  half = 8 * 3 * 4  # columns of one device
  assert found == Reshard(4 * half, half, half)


def test_what_lies_there_already_does_not_travel():
  train = array(mesh(0, 2), 'fsdp')
  same = [NamedSharding(mesh(0, 2), P('fsdp'))]
  assert reshard(train, same) == Reshard(0, 0, 0)
  # One of the two halves is missing on each.
  whole = [NamedSharding(mesh(0, 2), P())]
  half = 4 * 6 * 4
  assert reshard(train, whole) == Reshard(2 * half, half, half)
