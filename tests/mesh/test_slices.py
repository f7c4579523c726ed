"""The devices are cut as the settings say, or refused with both numbers."""

import jax
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.slices import (
    MeshSettings,
    RolloutMesh,
    TrainMesh,
    cut,
    devices_needed,
)


def _ids(mesh):
  return [[d.id for d in row] for row in mesh.devices]


def test_train_takes_the_first_devices_and_each_replica_the_next():
  settings = MeshSettings(TrainMesh(2, 2), RolloutMesh(2, 2))
  slices = cut(jax.devices(), settings)
  assert devices_needed(settings) == 8
  assert _ids(slices.train) == [[0, 1], [2, 3]]
  assert [_ids(m) for m in slices.rollout] == [[[4, 5]], [[6, 7]]]


def test_all_meshes_have_the_same_axis_names_left_to_the_compiler():
  slices = cut(jax.devices(), MeshSettings(TrainMesh(2), RolloutMesh(1, 2)))
  for mesh in (slices.train, *slices.rollout):
    assert mesh.axis_names == ('fsdp', 'tensor')
    assert set(mesh.axis_types) == {jax.sharding.AxisType.Auto}
  assert dict(slices.train.shape) == {'fsdp': 2, 'tensor': 1}
  assert dict(slices.rollout[0].shape) == {'fsdp': 1, 'tensor': 2}


def test_colocated_meshes_cover_the_same_devices():
  settings = MeshSettings(TrainMesh(4, 2), RolloutMesh(4, 2), colocated=True)
  slices = cut(jax.devices(), settings)
  assert devices_needed(settings) == 8
  covered = [d for m in slices.rollout for d in m.devices.flat]
  assert covered == list(slices.train.devices.flat) == jax.devices()


def test_colocated_meshes_of_different_size_are_refused_with_both_numbers():
  settings = MeshSettings(TrainMesh(4, 2), RolloutMesh(3, 2), colocated=True)
  with pytest.raises(ConfigError, match=r'= 8 devices .* = 6, wanted the same'):
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
  assert _ids(slices.rollout[0]) == [[1]]


@pytest.mark.parametrize(
    'settings, field',
    [
        (MeshSettings(train=TrainMesh(fsdp=0)), 'config.train.fsdp is 0'),
        (MeshSettings(train=TrainMesh(tensor=-1)), 'config.train.tensor is -1'),
        (MeshSettings(rollout=RolloutMesh(0)), 'config.rollout.replicas is 0'),
        (MeshSettings(rollout=RolloutMesh(1, 0)), 'config.rollout.tensor is 0'),
    ],
)
def test_a_mesh_without_devices_is_refused_by_name(settings, field):
  with pytest.raises(ConfigError, match=field):
    resolve(settings)
