"""Shapes of networks and optimizers, and where their arrays live."""

from __future__ import annotations

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, parameters
from areal_jax.models.config import ModelConfig

PyTree = Any
NetworkKind = Literal['policy', 'value', 'reward']


def moment_shardings(
    moments: PyTree, learns: PyTree, otherwise: NamedSharding
) -> PyTree:
  """Returns the shardings of an optimizer's state.

  Moments have the names of their parameters at the end of their own, whatever
  the optimizer. Those of the same shape lie as their parameter does; others
  (counts, rows and columns of a factored moment) are small and lie everywhere.

  Args:
    moments: the state, as shapes.
    learns: parameters as `jax.ShapeDtypeStruct`s with shardings.
    otherwise: of what has no parameter's shape.
  """
  known = dict(jax.tree.leaves_with_path(learns))

  def place(path, leaf):
    for start in range(len(path)):
      own = known.get(path[start:])
      if own is not None and own.shape == leaf.shape:
        return own.sharding
    return otherwise

  return jax.tree.map_with_path(place, moments)


def abstract_network(
    config: ModelConfig, kind: NetworkKind, mesh: Mesh, rules: Rules
) -> PyTree:
  """Shape and sharding of a network's parameters."""
  if kind == 'policy':
    shapes = parameters.abstract_params(config)
    return with_shardings(
        shapes, parameters.param_shardings(config, mesh, rules)
    )
  return with_shardings(
      heads.abstract_params(config, kind),
      heads.param_shardings(config, kind, mesh, rules),
  )


def zeros(shapes: PyTree) -> PyTree:
  """Arrays of zeros of these shapes."""
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def shardings_of(shapes: PyTree) -> PyTree:
  """Where shapes say that their arrays live."""
  return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Shapes that also say where they live."""
  return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding
      ),
      shapes,
      shardings,
  )
