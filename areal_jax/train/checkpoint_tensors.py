"""The arrays of a checkpoint: their names, and reading them onto any mesh."""

from __future__ import annotations

from typing import Any, Mapping, Sequence

import jax
import orbax.checkpoint as ocp

from areal_jax.train.checkpoint import STATE, CheckpointError, Saved
from areal_jax.train.state import TrainState

Shapes = Mapping[str, jax.ShapeDtypeStruct]
_PARAMETERS = ('trainable', 'frozen')  # parts of a role, see `state.Role`


def restore_state(
    saved: Saved, like: TrainState, padded: Mapping[str, int] | None = None
) -> TrainState:
  """The train state, placed as `like` says, on any mesh.

  Args:
    saved: a whole checkpoint.
    like: `jax.ShapeDtypeStruct` with shardings in place of arrays.
    padded: axis by name of those parameters that may be padded to another
      length than when they were saved: the vocabulary is, so that it divides
      over a mesh. Zeros come or go at its end, and at that of the moments,
      those too that have one axis of their parameter only.

  Raises:
    CheckpointError: its tensors are not those of `like`; names the first.
  """
  wanted, tree = named_leaves(like)
  _require_tensors(saved, wanted, saved.tensors, padded or {})
  found = read_tensors(saved, wanted)
  roles = jax.tree.unflatten(tree, [found[name] for name in wanted])
  return TrainState(roles, version=saved.version)


def restore_params(
    saved: Saved,
    like: Mapping[str, Any],
    padded: Mapping[str, int] | None = None,
    *,
    matching: bool = False,
) -> tuple[dict[str, Any], tuple[str, ...]]:
  """The policy's parameters alone.

  Args:
    saved: a whole checkpoint.
    like: their `jax.ShapeDtypeStruct` with shardings.
    padded: see `restore_state`.
    matching: whether tensors that are missing or of another shape are left out
      instead of refused.

  Returns:
    Parameters by name ('blocks/query'), and the names that were left out.

  Raises:
    CheckpointError: a tensor is missing or has another shape or dtype.
  """
  leaves = jax.tree.leaves_with_path(like)
  saved_as = {}
  for path, leaf in leaves:
    name = name_of(path)
    where = f'roles/policy/trainable/{name}'
    if where not in saved.tensors:
      frozen = f'roles/policy/frozen/{name}'
      where = frozen if frozen in saved.tensors else where
    saved_as[where] = (name, leaf)
  wanted = {where: leaf for where, (_, leaf) in saved_as.items()}
  left = ()
  if matching:
    lengths = _padded_lengths(saved, wanted, padded or {})
    left = tuple(
        where
        for where, leaf in wanted.items()
        if _difference(saved, where, leaf, lengths)
    )
    wanted = {n: leaf for n, leaf in wanted.items() if n not in left}
  else:
    _require_tensors(saved, wanted, wanted, padded or {})
  found = read_tensors(saved, wanted)
  return (
      {saved_as[where][0]: array for where, array in found.items()},
      tuple(saved_as[where][0] for where in left),
  )


def _require_tensors(
    saved: Saved,
    wanted: Shapes,
    known: Mapping[str, Any],
    padded: Mapping[str, int],
) -> None:
  """Refuses tensors that differ from the wanted ones or have no place."""
  lengths = _padded_lengths(saved, wanted, padded)
  for name, leaf in wanted.items():
    difference = _difference(saved, name, leaf, lengths)
    if difference:
      raise CheckpointError(f'checkpoint {saved.path}: {difference}')
  extra = sorted(set(known) - set(wanted))
  if extra:
    raise CheckpointError(
        f'checkpoint {saved.path}: {len(extra)} tensors have no place in this'
        f' run: {", ".join(extra[:4])}'
    )


def _padded_lengths(
    saved: Saved, wanted: Shapes, padded: Mapping[str, int]
) -> dict[str, tuple[int, int]]:
  """Saved and wanted length of the padded axis, by name of the parameter."""
  lengths = {}
  for name, leaf in wanted.items():
    _, role, *_ = name.split('/')
    parameter = name.rpartition('/')[2]
    kinds = [f'roles/{role}/{kind}/{parameter}' for kind in _PARAMETERS]
    if name in kinds and name in saved.tensors and parameter in padded:
      axis, shape = padded[parameter], saved.tensors[name][1]
      if len(shape) == len(leaf.shape):
        lengths[parameter] = shape[axis], leaf.shape[axis]
  return lengths


def _difference(
    saved: Saved,
    name: str,
    leaf: jax.ShapeDtypeStruct,
    lengths: Mapping[str, tuple[int, int]],
) -> str:
  """Describes what is wrong with a saved tensor; empty if nothing is."""
  if name not in saved.tensors:
    return f'tensor {name} is missing'
  dtype, shape = saved.tensors[name]
  # A factored moment has the axes of its parameter but one, so the padded one
  # is known by its length.
  padding = lengths.get(name.rpartition('/')[2])
  right = len(shape) == len(leaf.shape) and all(
      one == other or (one, other) == padding
      for one, other in zip(shape, leaf.shape)
  )
  if right and dtype == str(leaf.dtype):
    return ''
  return (
      f'tensor {name} is {dtype} of shape {shape}, wanted {leaf.dtype} of shape'
      f' {tuple(leaf.shape)}'
  )


def read_tensors(saved: Saved, wanted: Shapes) -> dict[str, jax.Array]:
  """Arrays by name, cut or padded with zeros to their wanted shape."""
  if not wanted:
    return {}
  arguments = {
      name: ocp.ArrayRestoreArgs(
          sharding=leaf.sharding,
          global_shape=leaf.shape,
          dtype=leaf.dtype,
          strict=False,
      )
      for name, leaf in wanted.items()
  }
  with ocp.Checkpointer(handler()) as reader:
    found = reader.restore(
        saved.path / STATE,
        args=ocp.args.PyTreeRestore(
            item=nested(wanted),
            restore_args=nested(arguments),
            partial_restore=True,
        ),
    )
  return {name: _at(found, name) for name in wanted}


def handler() -> ocp.PyTreeCheckpointHandler:
  """Reads and writes arrays, each from one replica.

  By default orbax lets all replicas write a part, which it cuts out by a
  program that it compiles: in the middle of a run.
  """
  arrays = ocp.type_handlers.ArrayHandler(use_replica_parallel=False)
  return ocp.PyTreeCheckpointHandler(
      type_handler_registry=ocp.type_handlers.create_type_handler_registry(
          (jax.Array, arrays)
      )
  )


def named_leaves(state: TrainState) -> tuple[dict[str, Any], Any]:
  """Arrays of a state by name, such as 'roles/policy/trainable/embedding'."""
  leaves, structure = jax.tree_util.tree_flatten_with_path(state.roles)
  return {f'roles/{name_of(path)}': leaf for path, leaf in leaves}, structure


def name_of(path: Sequence[Any]) -> str:
  """A path in a tree as tensors are named: 'blocks/query'."""
  return jax.tree_util.keystr(tuple(path), simple=True, separator='/')


def nested(named: Mapping[str, Any]) -> dict[str, Any]:
  """{'a/b': x} -> {'a': {'b': x}}."""
  tree: dict[str, Any] = {}
  for name, leaf in named.items():
    *above, last = name.split('/')
    place = tree
    for part in above:
      place = place.setdefault(part, {})
    place[last] = leaf
  return tree


def _at(tree: Mapping[str, Any], name: str) -> Any:
  for part in name.split('/'):
    tree = tree[part]
  return tree
