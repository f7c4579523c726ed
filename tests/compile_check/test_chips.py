"""Names of topologies: what they stand for, and what is refused in one line."""

import pytest

from areal_jax.compile_check.chips import (
    CHIPS,
    has_libtpu,
    in_own_slices,
    parse_topology,
)
from areal_jax.config import ConfigError
from areal_jax.mesh.slices import mesh_of, slice_of


@pytest.mark.parametrize(
    'name, chip, count, estimate',
    [
        ('v5e:2x2', 'v5e', 4, False),
        ('v6e:4x8', 'v6e', 32, False),
        ('v5p:4x4x8', 'v5p', 128, False),
        ('v5e:2x4*4', 'v5e', 32, False),
        ('gpu:h100:8', 'h100', 8, True),
    ],
)
def test_a_name_is_so_many_chips(name, chip, count, estimate):
  found = parse_topology(name)
  assert (found.chip, found.count) == (CHIPS[chip], count)
  assert found.is_estimate is estimate


@pytest.mark.parametrize(
    'name, wanted',
    [
        ('', 'v5p:4x4x4'),
        ('v5e', 'v5p:4x4x4'),
        ('v9:2x2', 'of v5e, v5p, v6e'),
        ('v5e:2x0', 'v5p:4x4x4'),
        ('v5e:2x4*', 'v5p:4x4x4'),
        ('v5p:4x4', '3 numbers: v5p is joined in so many dimensions'),
        ('v5e:2x2x1', '2 numbers'),
        ('gpu:h100', 'gpu:h100:8'),
        ('gpu:v100:8', 'of a100, h100, h200'),
        ('gpu:h100:0', 'gpu:h100:8'),
    ],
)
def test_another_name_is_refused_with_what_is_wanted(name, wanted):
  with pytest.raises(ConfigError, match=wanted) as caught:
    parse_topology(name)
  assert '\n' not in str(caught.value)
  assert f'--topology is {name!r}' in str(caught.value)


def test_more_gpus_than_pretended_devices_are_refused():
  with pytest.raises(ConfigError, match='at most the 8 pretended devices'):
    parse_topology('gpu:h100:64').devices()


def test_some_slices_of_a_topology_are_a_topology():
  found = parse_topology('v5e:2x4*4').with_slices(2)
  assert (found.name, found.count, found.slices) == ('v5e:2x4*2', 16, 2)


@pytest.mark.skipif(not has_libtpu(), reason='libtpu is not installed')
def test_a_mesh_is_moved_to_a_topology_of_its_own_slices():
  topology = parse_topology('v5e:2x2*4')
  devices = sorted(topology.devices(), key=slice_of)
  mesh = mesh_of(devices[8:], data=2, fsdp=4)  # slices 2 and 3
  moved = in_own_slices(mesh, topology)
  assert moved.shape == mesh.shape
  for here, there in zip(mesh.devices.flat, moved.devices.flat, strict=True):
    assert slice_of(there) == slice_of(here) - 2
    assert there.coords == here.coords
  alone = in_own_slices(mesh_of(devices[13:14]), topology)
  assert alone.devices.flat[0].coords == devices[13].coords
  whole = parse_topology('v5e:2x2')
  mesh = mesh_of(whole.devices(), fsdp=4)
  assert in_own_slices(mesh, whole) is mesh


@pytest.mark.skipif(has_libtpu(), reason='libtpu is installed')
def test_a_tpu_topology_asks_for_libtpu():
  with pytest.raises(ConfigError, match='requirements-dev.txt'):
    parse_topology('v5e:2x2').devices()
