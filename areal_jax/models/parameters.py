"""The parameters of a policy: made at random, described, and in other forms.

Outside of the modules parameters are a plain nested dict of arrays, with the
layers stacked along a leading axis, so that optax, orbax and `jax.device_put`
take them as they are. Here are their values at the start, their shapes, the
names of their axes, where they lie on a mesh, which of them learn, and the
forms in which decode and the loss read them fastest. Files: see `hf.py`.
"""

from __future__ import annotations

from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.mesh.rules import Rules
from areal_jax.models import lora
from areal_jax.models.config import ModelConfig
from areal_jax.models.layer_loop import place_of
from areal_jax.models.layout import Layout
from areal_jax.models.transformer import Transformer, abstract_module

Array = jax.Array
Mesh = jax.sharding.Mesh
Params = dict[str, Any]

# Of adapters, apart from the numbers of the base.
_ADAPTER_STREAM = 0x10A


def init_params(
    config: ModelConfig, seed: int, mesh: Mesh | None, rules: Rules | None
) -> Params:
  """Random parameters in float32, each created on the devices that hold it.

  Matrices are normal with standard deviation 1 / sqrt(inputs), those that add
  to the residual stream divided by sqrt(2 L) more; norms are 1 and biases 0.
  The values depend on the seed and the shapes alone, not on the mesh, and those
  of the base not on its adapters.
  """
  shardings = None if mesh is None else param_shardings(config, mesh, rules)

  def create(key):
    rngs = nnx.Rngs(key, adapters=jax.random.fold_in(key, _ADAPTER_STREAM))
    made = nnx.to_pure_dict(nnx.state(Transformer(config, rngs)))
    return _in_base_dtype(config, made)

  made = jax.jit(create, out_shardings=shardings)
  # Without it a device's part of an array depends on how it is cut.
  with jax.threefry_partitionable(True):
    return made(jax.random.key(seed))


def with_adapters(
    config: ModelConfig,
    base: Params,
    seed: int,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Params:
  """The policy that begins as `base`: new adapters are put on it.

  Args:
    config: of the policy, with its adapters.
    base: the parameters without adapters, used as they are but for their dtype.
    seed: of the adapters, which are those of `init_params`.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.
  """
  if not config.lora.projections:
    return base
  shardings = None
  if mesh is not None:
    shardings, _ = partition(config, param_shardings(config, mesh, rules))

  def create(key):
    rngs = nnx.Rngs(key, adapters=jax.random.fold_in(key, _ADAPTER_STREAM))
    made = nnx.to_pure_dict(nnx.state(Transformer(config, rngs)))
    return partition(config, made)[0]

  with jax.threefry_partitionable(True):
    adapters = jax.jit(create, out_shardings=shardings)(jax.random.key(seed))
  return _in_base_dtype(config, lora.overlaid(base, adapters))


def partition(config: ModelConfig, tree: Params) -> tuple[Params, Params]:
  """Splits parameters, or a tree like them, into trainable and frozen parts.

  With adapters those are `nnx.LoRAParam`s and the others; without, everything
  learns. `lora.overlaid` puts the two together again.
  """
  if not config.lora.projections:
    return tree, {}
  _, state = abstract_module(config)
  learns, stays = nnx.split_state(state, nnx.LoRAParam, ...)
  return tuple(
      lora.part_of(tree, nnx.to_pure_dict(part)) for part in (learns, stays)
  )


def abstract_params(config: ModelConfig) -> Params:
  """The parameters as `jax.ShapeDtypeStruct`s."""
  _, state = abstract_module(config)
  return _in_base_dtype(config, nnx.to_pure_dict(state))


def logical_axes(config: ModelConfig) -> Params:
  """The parameters' axis names: tuples where the parameters have arrays."""
  _, state = abstract_module(config)
  return nnx.to_pure_dict(
      jax.tree.map(
          lambda p: p.axes, state, is_leaf=lambda p: isinstance(p, nnx.Variable)
      )
  )


def param_shardings(config: ModelConfig, mesh: Mesh, rules: Rules) -> Params:
  """A `NamedSharding` for every parameter.

  Raises:
    ConfigError: an axis that does not divide over its mesh axis.
  """
  return jax.tree.map(
      lambda p, axes: rules.sharding(axes, p.shape, mesh),
      abstract_params(config),
      logical_axes(config),
  )


def matrix_sides(config: ModelConfig) -> Params:
  """Finds the parameters that are stacks of matrices, for optimizers.

  Returns:
    Where the parameters have arrays: two tuples, the dimensions that a layer's
    product sums over and those that come out of it; what is in neither counts
    layers or experts. None for embeddings, routers, norms and biases.
  """

  def sides(path, axes):
    if path[0].key != 'blocks' or 'scores' in axes:
      return None
    inner = [i for i, a in enumerate(axes) if a not in ('layer', 'expert')]
    # Every product goes from the width or a rank, or to it.
    ends = ('embed', 'expert_embed', 'rank')
    first, last = (axes[inner[i]] in ends for i in (0, -1))
    if len(inner) < 2 or not (first or last):
      return None
    cut = 1 if first else len(inner) - 1
    return tuple(inner[:cut]), tuple(inner[cut:])

  return jax.tree.map_with_path(
      sides, logical_axes(config), is_leaf=lambda x: isinstance(x, tuple)
  )


def reads_apart(
    config: ModelConfig, mesh: Mesh | None, rules: Rules | None
) -> bool:
  """Returns whether `layers_apart` takes parameters apart."""
  on_cpu = Layout(mesh, rules).platform == 'cpu'
  return on_cpu and config.layer_loop != 'scan'


def layers_apart(
    config: ModelConfig,
    params: Params,
    mesh: Mesh | None,
    rules: Rules | None,
    cut: Callable[..., Params] | None = None,
) -> Params:
  """The same parameters in the form that a loop of `decode` reads fastest.

  XLA for CPU cuts a layer out of a stack by a copy, and does so again in each
  turn of a loop and in each dispatch. So an engine takes new weights apart once
  a version: 'blocks' becomes a tuple of one dict a layer. On one device, 'gate'
  of a layer then has 'up' beside it, [D, 2 F]: one product of few rows takes
  less time than two. Elsewhere, and a second time, they are returned as they
  are.

  Args:
    config: of the policy.
    params: of the policy.
    mesh: where they lie; None for one device.
    rules: how they lie there.
    cut: what does the work of `layer_apart`, of the same arguments: one program
      for every layer, where all in one would have a part for each.
  """
  blocks = params['blocks']
  if isinstance(blocks, tuple) or not reads_apart(config, mesh, rules):
    return params
  joins = Layout(mesh, rules).whole and not config.lora.projections
  layers = []
  for layer in range(config.layers):
    places = [place_of(config, name, layer) for name in sorted(blocks)]
    join = joins and layer in config.dense_layers
    layers.append((cut or layer_apart)(blocks, np.int32(places), join))
  return {**params, 'blocks': tuple(layers)}


def layer_apart(blocks: Params, places: Array, join: bool) -> Params:
  """Cuts one layer out, for `layers_apart`.

  Args:
    blocks: the stacks.
    places: [stacks] int32, where the layer lies in each, by their sorted names.
    join: whether 'gate' and 'up' become one, static.

  Returns:
    By name, each without its first dimension; 'gate' [D, 2 F] if joined.
  """
  layer = {}
  for place, (name, stacks) in zip(places, sorted(blocks.items())):
    layer[name] = jax.tree.map(
        lambda x, at=place: jax.lax.dynamic_index_in_dim(x, at, keepdims=False),
        stacks,
    )
  if join:
    layer['gate'] = jnp.concatenate([layer['gate'], layer.pop('up')], -1)
  return layer


def with_whole_unembedding(
    config: ModelConfig,
    params: Params,
    dtype: jax.typing.DTypeLike,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Params:
  """Parameters for an `unembed` that is called part by part.

  Where parameters are cut along the width, each call would gather the matrix
  anew, in every pass; here it is gathered once, in the dtype of the states.

  Args:
    config: of the policy.
    params: of the policy.
    dtype: of the states that are going to be unembedded.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.
  """
  name, axes = 'unembedding', ('width', 'vocab')
  if config.tied_embeddings:
    name, axes = 'embedding', ('vocab', 'width')
  matrix = Layout(mesh, rules)(params[name].astype(dtype), *axes)
  return {**params, name: matrix}


def _in_base_dtype(config: ModelConfig, params: Params) -> Params:
  """Parameters or their shapes, what is frozen in its own dtype."""
  if not config.lora.projections:
    return params
  dtype = config.lora.base_dtype

  def cast(leaf):
    if isinstance(leaf, jax.ShapeDtypeStruct):
      return jax.ShapeDtypeStruct(leaf.shape, dtype)
    return leaf.astype(dtype)

  learns, stays = partition(config, params)
  return lora.overlaid(jax.tree.map(cast, stays), learns)
