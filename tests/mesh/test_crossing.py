"""Arrays that cross are equal and new, and pass through no third place."""

import gc

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from areal_jax.mesh import crossing as crossings
from areal_jax.mesh.crossing import Crossing
from areal_jax.mesh.slices import mesh_of

SHAPE = (4, 8, 12)
BOTH = pytest.mark.parametrize('over_host', [False, True], ids=str)


def on(mesh, *spec):
  return NamedSharding(mesh, P(*spec))


def train(**shape):
  return mesh_of(jax.devices()[: int(np.prod([*shape.values()]))], **shape)


def rollout(skip=4, **shape):
  size = int(np.prod([*shape.values()]))
  return mesh_of(jax.devices()[skip : skip + size], **shape)


def moved(array, source, target, **how):
  placed = jax.device_put(array, source)
  (arrived,) = Crossing({'x': placed}, [{'x': target}], **how)({'x': placed})
  return placed, arrived['x']


def memory(*arrays):
  """Where the parts of arrays lie."""
  return {
      shard.data.unsafe_buffer_pointer()
      for array in arrays
      for shard in array.addressable_shards
  }


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


# Axes of pairs of meshes, and the device that the second one begins with.
PAIRS = {
    'apart': (dict(fsdp=2, tensor=2), [dict(data=2, tensor=2)], 4),
    'one that both have': (dict(fsdp=4), [dict(tensor=3), dict(data=2)], 3),
    'the same': (dict(data=2, fsdp=2, tensor=2), [dict(fsdp=4, tensor=2)], 0),
    'thirds': (dict(data=2, fsdp=3), [dict(tensor=4), dict(tensor=2)], 4),
}
DTYPES = (np.float32, jnp.bfloat16, np.int32, np.bool_, np.float16)


def drawn(rng, mesh, shape):
  """A random layout: each axis of the mesh cuts an array's one, or none."""
  cut = [[] for _ in shape]
  sizes = list(shape)
  for axis in rng.permutation([a for a, n in mesh.shape.items() if n > 1]):
    axis = str(axis)
    along = rng.integers(-1, len(shape))
    if along >= 0 and sizes[along] % mesh.shape[axis] == 0:
      sizes[along] //= mesh.shape[axis]
      cut[along].append(axis)
  return on(mesh, *(tuple(axes) or None for axes in cut))


def random_trees(pair, seed, arrays):
  """Arrays of random shapes, dtypes and layouts, and where they are to go."""
  rng = np.random.default_rng(seed)
  here, there, skip = PAIRS[pair]
  source = train(**here)
  targets = [rollout(skip, **shape) for shape in there]
  values, placed, goals = {}, {}, [{} for _ in targets]
  for i in range(arrays):
    shape = rng.choice([1, 5, 12, 24], rng.integers(0, 4))
    dtype = DTYPES[i % len(DTYPES)]
    values[i] = np.asarray(rng.integers(0, 99, shape)).astype(dtype)
    placed[i] = jax.device_put(values[i], drawn(rng, source, shape))
    for goal, target in zip(goals, targets):
      goal[i] = drawn(rng, target, shape)
  return values, placed, goals


def require_equal(values, goals, arrived):
  for goal, tree in zip(goals, arrived, strict=True):
    for i, value in values.items():
      assert tree[i].sharding.is_equivalent_to(goal[i], value.ndim)
      for shard in tree[i].addressable_shards:  # copies too
        np.testing.assert_array_equal(shard.data, value[shard.index])


@pytest.mark.parametrize('pair', PAIRS)
@pytest.mark.parametrize('over_host, seeds', [(False, 1), (True, 12)], ids=str)
def test_any_layout_reaches_any_other_in_memory_of_its_own(
    pair, over_host, seeds
):
  for seed in range(seeds):
    values, placed, goals = random_trees(pair, seed, 12)
    arrived = Crossing(placed, goals, over_host=over_host)(placed)
    there = memory(*(x for tree in arrived for x in tree.values()))
    assert not memory(*placed.values()) & there
    jax.tree.map(lambda x: x.delete(), placed)
    require_equal(values, goals, arrived)


def test_planted_piece_at_the_wrong_place_is_seen(monkeypatch):
  within = crossings._within

  def planted(inner, outer):
    # Every piece is written to, and read from, the beginning of its part.
    return tuple(slice(0, s.stop - s.start) for s in within(inner, outer))

  monkeypatch.setattr(crossings, '_within', planted)
  values, placed, goals = random_trees('apart', 0, 12)
  arrived = Crossing(placed, goals, over_host=True)(placed)
  with pytest.raises(AssertionError):
    require_equal(values, goals, arrived)


def test_a_plain_copy_would_share_memory_with_what_was_sent():
  """Why `device_put` alone will not do, and that `memory` sees it."""
  source, target = on(FOUR), on(train(tensor=2))
  array = jax.device_put(np.ones(SHAPE, np.float32), source)
  plain = jax.device_put(array, target, may_alias=False)
  assert memory(array) & memory(plain)


@BOTH
@pytest.mark.parametrize('spec', [(), (None, 'tensor')], ids=str)
def test_what_crosses_to_a_device_that_has_it_is_new_all_the_same(
    spec, over_host
):
  mesh = train(tensor=2)
  array = np.ones(SHAPE, np.float32)
  source = on(mesh, *spec)
  placed, arrived = moved(array, source, source, over_host=over_host)
  placed.delete()
  np.testing.assert_array_equal(arrived, array)


def test_replicas_take_turns_in_sending():
  crossing = Crossing(
      {'x': jax.device_put(np.ones(8, np.float32), on(FOUR))},
      [{'x': on(rollout(tensor=4))}],
  )
  (bundle,) = crossing._bundles
  (route,) = bundle._routes
  assert len({here for here, _, _ in route.journeys}) == 4


def three():
  """A matrix, a norm and integers on four devices, and where two want them."""
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
  return arrays, target


@BOTH
def test_nothing_is_collected_and_nothing_is_sent_unasked(over_host):
  arrays, target = three()
  crossing = Crossing(arrays, [target], over_host=over_host)
  crossing(arrays)
  with jax.transfer_guard('disallow'):
    (arrived,) = crossing(arrays)
  # Nor was anything collected on the host, where it would be kept.
  assert all(array._npy_value is None for array in arrays.values())
  for name, array in arrays.items():
    np.testing.assert_array_equal(arrived[name], array)


def test_a_tree_crosses_in_bundles_of_bounded_size():
  arrays, target = three()
  # Parts of 64 here, 128 bytes there; 32 and 32; 8 and 16.
  for limit, of in ((1000, [[0, 1, 2]]), (160, [[0, 1], [2]]), (1, None)):
    crossing = Crossing(arrays, [target], bundle=limit)
    names = [[i for _, i in bundle.of] for bundle in crossing._bundles]
    assert names == (of or [[0], [1], [2]])
    (arrived,) = crossing(arrays)
    jax.tree.map(np.testing.assert_array_equal, arrived, arrays)


@BOTH
def test_pieces_are_let_go_of(over_host):
  arrays, target = three()
  crossing = Crossing(arrays, [target], over_host=over_host)
  crossing(arrays)
  gc.collect()
  before = len(jax.live_arrays())
  (arrived,) = crossing(arrays)
  assert len(jax.live_arrays()) - before == len(arrived)


def test_equal_parts_over_the_host_are_written_once_and_not_overwritten():
  array = np.arange(np.prod(SHAPE), dtype=np.float32).reshape(SHAPE)
  placed = jax.device_put(array, on(FOUR, None, 'fsdp'))
  halves = [
      on(rollout(skip, tensor=2), None, None, 'tensor') for skip in (4, 6)
  ]
  goals = [{'x': sharding} for sharding in (*halves, on(rollout(7)))]
  one, other, whole = (
      tree['x']
      for tree in Crossing({'x': placed}, goals, over_host=True)({'x': placed})
  )
  assert memory(one) == memory(other) and len(memory(one, whole)) == 3
  jax.jit(lambda x: x * 0 - 7, donate_argnums=0)(one).block_until_ready()
  np.testing.assert_array_equal(other, array)
