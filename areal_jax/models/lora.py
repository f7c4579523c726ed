"""Low-rank adapters: a small product beside a frozen matrix.

An adapted projection is x W + s (x A) B with A [inputs, r] and B [r, outputs];
s is alpha / r, or alpha / sqrt(r) with `rslora`. B begins at 0, so a policy
begins as its base. See https://arxiv.org/abs/2106.09685, and for the root
https://arxiv.org/abs/2312.03732.

What lives here: the modules, which `block.Block` has as its `adapters`
where the settings name projections, and trees of parameters taken apart and put
together. Adapters are `nnx.LoRAParam`s: `parameters.partition` asks for that
type to say what learns. Files in PEFT's layout are left to `peft.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.config import LoraSettings, ModelConfig

Array = jax.Array
Params = dict[str, Any]

ADAPTERS = 'adapters'  # their place in the parameters of the blocks


class Adapter(nnx.Module):
  """A and B beside one projection, for all layers."""

  def __init__(self, config: ModelConfig, projection: str, rngs: nnx.Rngs):
    rank = config.lora.rank
    (inputs, in_axes), (outputs, out_axes) = _sides(config)[projection]
    # Uniform up to 1 / sqrt(inputs), as PEFT draws it.
    a = jax.random.uniform(
        rngs.adapters(),
        (config.layers, *inputs, rank),
        minval=-1 / math.sqrt(math.prod(inputs)),
        maxval=1 / math.sqrt(math.prod(inputs)),
    )
    b = jnp.zeros((config.layers, rank, *outputs))
    self.scale = scale(config.lora)
    self.a = nnx.LoRAParam(a, axes=('layer', *in_axes, 'rank'))
    self.b = nnx.LoRAParam(b, axes=('layer', 'rank', *out_axes))

  def __call__(self, x: Array) -> Array:
    """Computes what one layer's adapter adds, [M, inputs] to [M, outputs]."""
    a, b = self.a[...].astype(x.dtype), self.b[...].astype(x.dtype)
    low = x @ a.reshape(x.shape[-1], -1)
    return self.scale * (low @ b.reshape(low.shape[-1], -1))


class Adapters(nnx.Module):
  """An `Adapter` under the name of each adapted projection."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    for projection in config.lora.projections:
      setattr(self, projection, Adapter(config, projection, rngs))


def scale(settings: LoraSettings) -> float:
  """s, what an adapter's product is multiplied by."""
  rank = settings.rank
  return settings.alpha / (math.sqrt(rank) if settings.rslora else rank)


def without(config: ModelConfig) -> ModelConfig:
  """The same policy without adapters."""
  return dataclasses.replace(config, lora=type(config.lora)())


def merged(config: ModelConfig, params: Params) -> tuple[ModelConfig, Params]:
  """The policy with its adapters added to the matrices, W + s A B.

  Takes numpy and jax arrays. Merged parameters are float32 whatever the base
  is: bfloat16 would round most of what was learned away.

  Returns:
    Settings and parameters without adapters; those of a policy that has none
    are returned as they are.
  """
  if not config.lora.projections:
    return config, params
  base = jax.tree.map(lambda x: x.astype(np.float32), params)
  blocks = dict(base['blocks'])
  adapters = blocks.pop(ADAPTERS)
  for name, adapter in adapters.items():
    a, b = adapter['a'], adapter['b']
    layers, rank = len(a), a.shape[-1]
    with jax.default_matmul_precision('highest'):
      product = a.reshape(layers, -1, rank) @ b.reshape(layers, rank, -1)
    change = scale(config.lora) * product
    blocks[name] = blocks[name] + change.reshape(blocks[name].shape)
  return without(config), {**base, 'blocks': blocks}


def merging(config: ModelConfig, dtype: str, shardings: Any) -> Any:
  """`merged` as a compiled function of the parameters, on one mesh.

  Args:
    config: of the policy, with adapters.
    dtype: of what it returns; empty for float32.
    shardings: of what it returns.
  """

  def merge(params):
    return jax.tree.map(
        lambda x: x.astype(dtype or x.dtype), merged(config, params)[1]
    )

  return jax.jit(merge, out_shardings=shardings)


def overlaid(base: Params, part: Params) -> Params:
  """The tree `base` with the leaves of `part` put in or in their place."""
  tree = dict(base)
  for name, value in part.items():
    inner = isinstance(value, dict) and name in base
    tree[name] = overlaid(base[name], value) if inner else value
  return tree


def part_of(tree: Params, names: Params) -> Params:
  """Restricts `tree` to the paths present in `like`."""
  if not isinstance(names, dict):
    return tree
  return {name: part_of(tree[name], inner) for name, inner in names.items()}


def shapes(
    config: ModelConfig,
) -> list[tuple[str, tuple[int, ...], tuple[int, ...]]]:
  """Each adapted projection with the shapes of one layer's A and B."""
  rank, sides = config.lora.rank, _sides(config)
  return [
      (name, (*sides[name][0][0], rank), (rank, *sides[name][1][0]))
      for name in config.lora.projections
  ]


def _sides(config: ModelConfig) -> dict[str, tuple[Any, Any]]:
  """Shape and axes of what each projection takes, and of what it gives."""
  c = config
  width = (c.width,), ('embed',)
  heads = (c.heads, c.head_size), ('heads', 'head')
  kv_heads = (c.kv_heads, c.head_size), ('kv_heads', 'head')
  mlp = (c.mlp_width,), ('mlp',)
  return {
      'query': (width, heads),
      'key': (width, kv_heads),
      'value': (width, kv_heads),
      'out': (heads, width),
      'gate': (width, mlp),
      'up': (width, mlp),
      'down': (mlp, width),
  }
