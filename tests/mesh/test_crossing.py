"""Arrays that cross are equal and new, and the host has no part in it."""

import jax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from areal_jax.mesh.crossing import Crossing
from areal_jax.mesh.slices import mesh_of

SHAPE = (4, 8, 12)


def on(mesh, *spec):
  return NamedSharding(mesh, P(*spec))


def train(**shape):
  return mesh_of(jax.devices()[: int(np.prod([*shape.values()]))], **shape)


def rollout(skip=4, **shape):
  size = int(np.prod([*shape.values()]))
  return mesh_of(jax.devices()[skip : skip + size], **shape)


def moved(array, source, target, **how):
  placed = jax.device_put(array, source)
  crossing = Crossing({'x': placed}, {'x': target}, **how)
  return placed, crossing({'x': placed})['x']


FOUR, GRID, TWO = train(fsdp=4), train(fsdp=2, tensor=2), rollout(tensor=2)


@pytest.mark.parametrize(
    'source, target',
    [
        (on(FOUR, None, 'fsdp'), on(TWO, None, None, 'tensor')),
        (on(GRID, 'tensor', 'fsdp'), on(rollout(tensor=1))),
        (on(GRID, None, 'fsdp', 'tensor'), on(TWO, 'tensor')),
        (on(FOUR, ('fsdp',)), on(TWO, 'tensor')),  # joined, never cut
        (on(train(fsdp=1)), on(TWO, None, 'tensor')),  # cut, never joined
        (on(FOUR, None, 'fsdp'), on(rollout(tensor=4), None, 'tensor')),
        (on(train(fsdp=3), None, None, 'fsdp'), on(TWO, None, None, 'tensor')),
        (on(GRID), on(TWO)),
    ],
    ids=[
        'cut and joined',
        'joined from a grid',
        'along three axes',
        'joined, never cut',
        'cut, never joined',
        'as many parts',
        'thirds to halves',
        'copies',
    ],
)
def test_what_arrives_is_what_was_sent(source, target):
  array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
  for over_host in (False, True):
    placed, arrived = moved(array, source, target, over_host=over_host)
    placed.delete()
    np.testing.assert_array_equal(arrived, array)
    assert arrived.sharding == target and arrived.committed


@pytest.mark.parametrize('spec', [(), (None, 'tensor')], ids=str)
def test_what_crosses_to_a_device_that_has_it_is_new_all_the_same(spec):
  mesh = train(tensor=2)
  array = np.ones(SHAPE, np.float32)
  source = on(mesh, *spec)
  placed, arrived = moved(array, source, source, over_host=True)
  placed.delete()
  np.testing.assert_array_equal(arrived, array)


def test_replicas_take_turns_in_sending():
  crossing = Crossing(
      {'x': jax.device_put(np.ones(8, np.float32), on(FOUR))},
      {'x': on(rollout(tensor=4))},
  )
  (route,) = crossing._routes
  assert len({here for here, _, _ in route.journeys}) == 4


def test_a_tree_crosses_in_two_programs_whatever_is_in_it():
  arrays = {
      'matrix': jax.device_put(np.arange(64.0).reshape(8, 8), on(FOUR, 'fsdp')),
      'norm': jax.device_put(np.arange(8.0), on(FOUR)),
      'ids': jax.device_put(np.arange(8), on(FOUR, 'fsdp')),
  }
  target = {
      'matrix': on(TWO, None, 'tensor'),
      'norm': on(TWO),
      'ids': on(TWO, 'tensor'),
  }
  crossing = Crossing(arrays, target)
  crossing(arrays)
  with jax.transfer_guard('disallow'):  # nothing goes over the host
    arrived = crossing(arrays)
  # Nor was anything collected there, where it would be kept.
  assert all(array._npy_value is None for array in arrays.values())
  for name, array in arrays.items():
    np.testing.assert_array_equal(arrived[name], array)
