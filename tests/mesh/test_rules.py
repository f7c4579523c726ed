"""Logical axes become mesh axes, or an error that has the numbers."""

import jax
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import MeshSettings, RolloutMesh, TrainMesh, cut


def _mesh(fsdp, tensor, **more):
  settings = MeshSettings(TrainMesh(fsdp, tensor, **more), RolloutMesh())
  return cut(jax.devices() * 2, settings).train


DENSE = ('fsdp', 'expert')  # axes that cut the width of dense matrices


QUERY = ('layer', 'embed', 'heads', 'head')
KEY = ('layer', 'embed', 'kv_heads', 'head')


def test_parameters_are_cut_by_width_and_by_heads():
  spec = Rules().spec(QUERY, (2, 96, 4, 24), _mesh(2, 4))
  assert spec == P(None, DENSE, 'tensor', None)


def test_a_part_of_an_array_lies_on_the_device_that_the_spec_says():
  mesh = _mesh(2, 2)
  x = np.arange(16.0).reshape(4, 4)
  placed = jax.device_put(x, Rules().sharding(('embed', 'mlp'), x.shape, mesh))
  parts = {s.device: np.asarray(s.data) for s in placed.addressable_shards}
  place = mesh.devices[0, 1, 0, 0, 0]  # the second of fsdp
  np.testing.assert_array_equal(parts[place], x[2:, :2])


@pytest.mark.parametrize(
    'kv_heads, tensor, cut_over',
    [(4, 2, 'tensor'), (4, 4, 'tensor'), (2, 4, None), (3, 2, None)],
)
def test_kv_heads_are_replicated_exactly_where_they_do_not_divide(
    kv_heads, tensor, cut_over
):
  spec = Rules().spec(KEY, (2, 96, kv_heads, 24), _mesh(1, tensor))
  assert spec == P(None, DENSE, cut_over, None)


def test_another_axis_that_does_not_divide_is_refused_with_the_numbers():
  with pytest.raises(
      ConfigError, match="heads of size 6 .* the 4 devices .* 'tensor'"
  ):
    Rules().spec(QUERY, (2, 96, 6, 24), _mesh(1, 4))
  with pytest.raises(ConfigError, match='vocab of size 211 .*vocab_multiple'):
    Rules().spec(('vocab', 'embed'), (211, 64), _mesh(1, 2))


def test_a_mesh_axis_is_used_once_in_a_spec():
  with pytest.raises(ConfigError, match='each mesh axis once'):
    Rules(head='tensor').spec(QUERY, (2, 96, 4, 24), _mesh(1, 2))


def test_an_axis_that_the_mesh_lacks_is_refused_by_name():
  with pytest.raises(ConfigError, match="rules.mlp is 'model'.*'tensor'"):
    Rules(mlp='model').spec(('embed', 'mlp'), (8, 8), _mesh(1, 2))


def test_a_name_without_a_rule_is_an_error_that_lists_the_known_ones():
  with pytest.raises(ValueError, match="'colour' has no rule.*'kv_heads'"):
    Rules().spec(('colour',), (8,), _mesh(1, 2))


def test_parts_counts_the_devices_of_an_axis():
  assert Rules().parts('heads', _mesh(2, 4)) == 4
  assert Rules().parts('head', _mesh(2, 4)) == 1
  assert Rules().parts('heads', None) == 1


def test_resolved_rules_serve_as_the_open_ones_do():
  spec = resolve(Rules()).spec(('batch', 'time'), (4, 3), _mesh(2, 1))
  assert spec == P(('data', 'fsdp', 'expert'), 'context')


def test_rows_are_cut_over_all_axes_that_hold_rows_and_parameters_are_not():
  mesh = _mesh(2, 1, data=2, expert=2)
  rules = Rules()
  assert rules.parts('batch', mesh) == rules.parts('tokens', mesh) == 8
  assert rules.parts('embed', mesh) == 4  # whole along the data axis
  with pytest.raises(
      ConfigError, match="batch of size 12 .* 8 devices of mesh axes 'data',"
  ):
    rules.spec(('batch', 'time'), (12, 4), mesh)


def test_an_experts_matrix_is_cut_by_expert_and_by_the_axis_of_the_rest():
  axes = ('expert', 'expert_embed', 'expert_mlp')
  spec = Rules().spec(axes, (4, 8, 6), _mesh(2, 2, expert=2))
  assert spec == P(('expert', 'tensor'), 'fsdp', None)


def test_each_part_along_an_axis_has_the_rest_of_the_rules():
  rules = Rules().inside(['data'])
  mesh = _mesh(2, 2, data=2)
  assert rules.slots is None and rules.pages is None
  assert rules.batch == ('fsdp', 'expert') and rules.heads == 'tensor'
  assert rules.parts('batch', mesh) == 2 and rules.parts('slots', mesh) == 1
  assert Rules().parts('slots', mesh) == 2


def test_where_a_policy_generates_tokens_and_widths_are_whole():
  mesh = _mesh(2, 2, expert=2)
  rules = Rules().for_rollout()
  assert rules.spec(('embed', 'heads'), (8, 4), mesh) == P(None, 'tensor')
  assert rules.spec(('batch', 'time'), (1, 1), mesh) == P(None, None)
  assert rules.parts('expert', mesh) == 4
