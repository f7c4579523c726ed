"""The devices are cut as the settings say, or refused with both numbers."""

import types

import jax
from jax.experimental import mesh_utils
import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.slices import (
    AXES,
    MeshSettings,
    RolloutMesh,
    TrainMesh,
    arrange,
    cut,
    devices_needed,
    mesh_of,
)


def _ids(mesh):
  """By data, fsdp, ... and then by tensor, axes of one device left out."""
  grid = np.vectorize(lambda d: d.id)(mesh.devices)
  return grid.reshape([n for n in grid.shape[:-1] if n > 1] + [-1]).tolist()


def _sizes(mesh):
  """Those above 1."""
  return {axis: n for axis, n in mesh.shape.items() if n > 1}


def test_train_takes_the_first_devices_and_each_replica_the_next():
  settings = MeshSettings(TrainMesh(2, 2), RolloutMesh(2, 2))
  slices = cut(jax.devices(), settings)
  assert devices_needed(settings) == 8
  assert _ids(slices.train) == [[0, 1], [2, 3]]
  assert [_ids(m) for m in slices.rollout] == [[4, 5], [6, 7]]


def test_all_meshes_have_the_same_axis_names_left_to_the_compiler():
  slices = cut(jax.devices(), MeshSettings(TrainMesh(2), RolloutMesh(1, 2)))
  for mesh in (slices.train, *slices.rollout):
    assert mesh.axis_names == AXES
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  assert _sizes(slices.train) == {'fsdp': 2}
  assert _sizes(slices.rollout[0]) == {'tensor': 2}


def test_each_axis_of_the_settings_is_an_axis_of_the_mesh():
  settings = MeshSettings(
      TrainMesh(data=2, context=2), RolloutMesh(expert=2, tensor=2)
  )
  slices = cut(jax.devices(), settings)
  assert settings.train.row_shards == 2 and settings.train.devices == 4
  assert settings.rollout.devices == settings.rollout.engine_devices == 4
  assert _sizes(slices.train) == {'data': 2, 'context': 2}
  assert _sizes(slices.rollout[0]) == {'expert': 2, 'tensor': 2}
  # The axis that speaks most has neighbours.
  assert _ids(slices.rollout[0]) == [[4, 5], [6, 7]]


def test_a_replica_may_have_a_data_axis():
  settings = MeshSettings(rollout=RolloutMesh(replicas=2, data=2, tensor=1))
  slices = cut(jax.devices(), settings)
  assert settings.rollout.engine_devices == 2
  assert [_sizes(mesh) for mesh in slices.rollout] == [{'data': 2}] * 2


def test_colocated_meshes_cover_the_same_devices():
  settings = MeshSettings(TrainMesh(4, 2), RolloutMesh(4, 2), colocated=True)
  slices = cut(jax.devices(), settings)
  assert devices_needed(settings) == 8
  covered = [d for m in slices.rollout for d in m.devices.flat]
  assert covered == list(slices.train.devices.flat) == jax.devices()


def test_colocated_meshes_of_different_size_are_refused_with_both_numbers():
  settings = MeshSettings(
      TrainMesh(2, 2, context=2), RolloutMesh(3, 2), colocated=True
  )
  words = (
      r'train covers fsdp 2 · tensor 2 · context 2 = 8 devices .*rollout'
      r' replicas 3 · tensor 2 = 6, wanted the same'
  )
  with pytest.raises(ConfigError, match=words):
    resolve(settings, 'config.mesh')
  with pytest.raises(ConfigError, match=r'= 8 devices .* = 6'):
    cut(jax.devices(), settings)


def test_too_few_devices_are_refused_with_both_numbers():
  settings = MeshSettings(TrainMesh(4, 2), RolloutMesh(1, 1))
  with pytest.raises(ConfigError, match='mesh needs 9 devices .* there are 8'):
    cut(jax.devices(), settings)


def test_devices_beyond_the_need_stay_idle():
  slices = cut(jax.devices(), MeshSettings())
  assert slices.train.size == 1 and len(slices.rollout) == 1
  assert _ids(slices.rollout[0]) == [1]


@pytest.mark.parametrize(
    'settings, field',
    [
        (MeshSettings(train=TrainMesh(fsdp=0)), 'config.train.fsdp is 0'),
        (MeshSettings(train=TrainMesh(tensor=-1)), 'config.train.tensor is -1'),
        (MeshSettings(train=TrainMesh(data=0)), 'config.train.data is 0'),
        (MeshSettings(train=TrainMesh(context=0)), 'config.train.context is 0'),
        (MeshSettings(rollout=RolloutMesh(0)), 'config.rollout.replicas is 0'),
        (MeshSettings(rollout=RolloutMesh(1, 0)), 'config.rollout.tensor is 0'),
    ],
)
def test_a_mesh_without_devices_is_refused_by_name(settings, field):
  with pytest.raises(ConfigError, match=field):
    resolve(settings)


def test_a_mesh_names_its_axes_and_takes_all_that_it_is_given():
  assert _sizes(mesh_of(jax.devices(), context=2, fsdp=4)) == {
      'fsdp': 4,
      'context': 2,
  }
  with pytest.raises(ValueError, match="mesh axes .'model'., wanted some of"):
    mesh_of(jax.devices(), model=8)
  with pytest.raises(ConfigError, match='devices is 8, wanted .*fsdp 3'):
    mesh_of(jax.devices(), fsdp=3)


# TPUs, described by what the runtime says of them.


def _chips(slice_index, *, x=2, y=2, kind='TPU v4'):
  """The chips of one slice, row by row."""
  return [
      types.SimpleNamespace(
          platform='tpu',
          device_kind=kind,
          id=100 * slice_index + i,
          slice_index=slice_index,
          coords=(i % x, i // x, 0),
          core_on_chip=0,
      )
      for i in range(x * y)
  ]


def _slices_along(grid, axis):
  """Slices that a line of devices along an axis lies on, over all lines."""
  lines = np.moveaxis(grid, AXES.index(axis), -1)
  lines = lines.reshape(-1, lines.shape[-1])
  return {tuple(d.slice_index for d in line) for line in lines}


def test_only_the_data_axis_crosses_slices():
  grid = arrange(
      [*_chips(0), *_chips(1)], 'mesh.train', data=4, fsdp=1, tensor=2
  )
  assert grid.shape == (4, 1, 1, 1, 2)
  assert _slices_along(grid, 'data') == {(0, 0, 1, 1)}
  assert _slices_along(grid, 'tensor') == {(0, 0), (1, 1)}
  assert len({d.id for d in grid.flat}) == 8


def test_slices_in_any_order_come_out_in_their_own():
  mixed = [d for pair in zip(_chips(1), _chips(0)) for d in pair]
  grid = arrange(sorted(mixed, key=lambda d: d.slice_index), data=2, fsdp=4)
  assert _slices_along(grid, 'data') == {(0, 1)}


def test_more_slices_than_the_data_axis_divides_over_are_refused():
  chips = [*_chips(0), *_chips(1)]
  words = 'mesh.train.data is 1, wanted a multiple of the 2 TPU slices'
  with pytest.raises(ConfigError, match=words):
    arrange(chips, 'mesh.train', fsdp=8)
  with pytest.raises(ConfigError, match='slice is {0: 4, 1: 2}, wanted the'):
    arrange(chips[:6], 'mesh.train', data=2, fsdp=3)


def test_the_devices_of_a_mesh_are_neighbours_on_their_slice():
  """A ring of four chips on a square is no walk row by row."""
  grid = arrange(_chips(0, kind='TPU v5 lite'), tensor=4)
  places = [d.coords for d in grid.flat]
  steps = np.abs(np.diff([*places, places[0]], axis=0)).sum(1)
  np.testing.assert_array_equal(steps, 1)


def test_chips_that_are_no_block_stay_in_their_order():
  chips = _chips(0, x=3)
  ragged = [chips[0], chips[1], chips[4], chips[5]]
  assert list(arrange(ragged, fsdp=4).flat) == ragged


def test_hosts_of_gpus_are_no_slices():
  gpus = [
      types.SimpleNamespace(platform='gpu', slice_index=i // 2, id=i)
      for i in range(4)
  ]
  assert list(arrange(gpus, fsdp=4).flat) == gpus


def test_what_is_relied_on_of_the_hybrid_mesh_of_jax_holds():
  """It looks at `slice_index`, and the outer shape has to count the slices."""
  chips = [*_chips(1), *_chips(0)]
  grid = mesh_utils.create_hybrid_device_mesh((1, 4), (2, 1), chips)
  assert [[d.slice_index for d in row] for row in grid] == [[0] * 4, [1] * 4]
  with pytest.raises(ValueError, match='slices 2 must equal'):
    mesh_utils.create_hybrid_device_mesh((2, 4), (1, 1), chips)
  with pytest.raises(ValueError, match='must equal the product'):
    mesh_utils.create_hybrid_device_mesh((1, 3), (2, 1), chips[:6])
