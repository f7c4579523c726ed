"""One layer of the Transformer: RMSNorm, grouped queries, a gated MLP.

`Block` holds the parameters of all layers, stacked; its call is one layer. The
caller hands it the attention, so that training, prefill and decode share every
other line. Rotary embeddings are left to `rope.py`, experts to `moe.py`,
adapters to `lora.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable

from flax import nnx
import jax
import jax.numpy as jnp

from areal_jax.models import lora, moe
from areal_jax.models.config import ModelConfig
from areal_jax.models.layer_loop import Window
from areal_jax.models.layout import Layout
from areal_jax.models.moe import Routing
from areal_jax.models.rope import Rope, rotate

Array = jax.Array

_ACTIVATIONS = {
    'silu': jax.nn.silu,
    'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}
# Projections whose outputs are heads.
_HEADS = ('query', 'key', 'value')
# attend(layer, window, cache, q [M, N, H], k [M, K, H], v [M, K, H]) gives the
# mixture [M, N, H], the cache with k and v in it, and what the caller collects.
Attend = Callable[
    [Array, Window, Any, Array, Array, Array], tuple[Array, Any, Any]
]


class Block(nnx.Module):
  """All layers, stacked; a slice of its parameters along L is one layer.

  A plain MLP and experts are two stacks, each of the layers that have it.
  """

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    c = config
    self.config = config
    d, n, k, h = c.width, c.heads, c.kv_heads, c.head_size
    inside = 1 / math.sqrt(d)
    # 2 L matrices add to the residual stream; this keeps its variance near 1.
    shrink = 1 / math.sqrt(2 * c.layers)

    def matrix(shape, axes, std, layers=c.layers):
      return normal(rngs, (layers, *shape), ('layer', *axes), std)

    def constant(value, shape, axes):
      return constant_param(value, (c.layers, *shape), ('layer', *axes))

    one = 0 if c.unit_offset else 1  # the weight of a norm that scales by 1
    self.attention_norm = constant(one, (d,), ('norm',))
    self.query = matrix((d, n, h), ('embed', 'heads', 'head'), inside)
    self.key = matrix((d, k, h), ('embed', 'kv_heads', 'head'), inside)
    self.value = matrix((d, k, h), ('embed', 'kv_heads', 'head'), inside)
    self.out = matrix(
        (n, h, d), ('heads', 'head', 'embed'), shrink / math.sqrt(n * h)
    )
    if c.qkv_bias:
      self.query_bias = constant(0, (n, h), ('heads', 'head'))
      self.key_bias = constant(0, (k, h), ('kv_heads', 'head'))
      self.value_bias = constant(0, (k, h), ('kv_heads', 'head'))
    if c.qk_norm:
      self.query_norm = constant(one, (h,), ('norm',))
      self.key_norm = constant(one, (h,), ('norm',))
    self.mlp_norm = constant(one, (d,), ('norm',))
    if c.post_norms:
      self.attention_post_norm = constant(one, (d,), ('norm',))
      self.mlp_post_norm = constant(one, (d,), ('norm',))
    if dense := len(c.dense_layers):
      f = c.mlp_width
      self.gate = matrix((d, f), ('embed', 'mlp'), inside, dense)
      self.up = matrix((d, f), ('embed', 'mlp'), inside, dense)
      std = shrink / math.sqrt(f)
      self.down = matrix((f, d), ('mlp', 'embed'), std, dense)
    if sparse := len(c.sparse_layers):
      e, f = c.moe.experts, c.moe.width
      self.router = matrix((d, e), ('embed', 'scores'), inside, sparse)
      axes = ('expert', 'expert_embed', 'expert_mlp')
      self.expert_gate = matrix((e, d, f), axes, inside, sparse)
      self.expert_up = matrix((e, d, f), axes, inside, sparse)
      axes = ('expert', 'expert_mlp', 'expert_embed')
      std = shrink / math.sqrt(f)
      self.expert_down = matrix((e, f, d), axes, std, sparse)
    if c.lora.projections:
      self.adapters = lora.Adapters(c, rngs)

  def __call__(
      self,
      x: Array,
      rope: Rope,
      layer: Array,
      window: Window,
      cache: Any,
      attend: Attend,
      layout: Layout,
      routers: Routers,
      sparse: bool,
  ) -> tuple[Array, Any, Any, Routing | None]:
    """Applies one layer to flat tokens; the module holds its parameters.

    Args:
      x: [M, D] residual stream. Dense layers take flat tokens: products of
        three dimensions are slow on CPU, in the backward pass above all.
      rope: cosines and sines [M, 1, H / 2] of the tokens' positions.
      layer: its number, for `attend`.
      window: tokens that a query of it sees; None for all before it.
      cache: passed to `attend` and on.
      attend: see `Attend`.
      layout: constrains activations.
      routers: what is given to and asked of the layer's router.
      sparse: whether the layer has experts.

    Returns:
      [M, D], the cache, what `attend` gave to collect, and what the router did.
    """
    c = self.config
    h = rms_norm(c, x, self.attention_norm)
    q = layout(self._project(h, 'query'), 'tokens', 'heads', 'head')
    k = layout(self._project(h, 'key'), 'tokens', 'kv_heads', 'head')
    v = layout(self._project(h, 'value'), 'tokens', 'kv_heads', 'head')
    if c.qkv_bias:
      q = q + self.query_bias[...].astype(q.dtype)
      k = k + self.key_bias[...].astype(k.dtype)
      v = v + self.value_bias[...].astype(v.dtype)
    if c.qk_norm:
      q = rms_norm(c, q, self.query_norm)
      k = rms_norm(c, k, self.key_norm)
    q = rotate(q, rope, scale=1 / math.sqrt(c.query_scalar or c.head_size))
    k = rotate(k, rope)
    mixed, cache, collected = attend(layer, window, cache, q, k, v)
    mixed = layout(mixed.astype(x.dtype), 'tokens', 'heads', 'head')
    more = self._project(mixed.reshape(len(x), -1), 'out')
    if c.post_norms:
      more = rms_norm(c, more, self.attention_post_norm)
    x = layout(x + more, 'tokens', 'width')
    h = rms_norm(c, x, self.mlp_norm)
    routing = None
    if sparse:
      more, routing = self._experts(h, layout, routers)
    else:
      h = _gated(c, *self._gate_and_up(h))
      h = layout(h, 'tokens', 'mlp')
      more = self._project(h, 'down')
    if c.post_norms:
      more = rms_norm(c, more, self.mlp_post_norm)
    return layout(x + more, 'tokens', 'width'), cache, collected, routing

  def _experts(
      self, h: Array, layout: Layout, routers: Routers
  ) -> tuple[Array, Routing]:
    c = self.config
    experts, weights, probabilities = moe.route(
        h,
        self.router[...],
        chosen=c.moe.chosen,
        renormalise=c.moe.renormalise,
        given=routers.given,
    )
    mixed = moe.mix(
        h,
        experts,
        weights,
        self.expert_gate[...],
        self.expert_up[...],
        self.expert_down[...],
        activation=_ACTIVATIONS[c.activation],
        platform=layout.platform,
        mesh=layout.mesh,
        rules=layout.rules,
    )
    return mixed, moe.measure(experts, probabilities, routers.real)

  def _gate_and_up(self, x: Array) -> tuple[Array, Array]:
    """Both [M, F]; of one product, where `layers_apart` has joined them."""
    if self.gate[...].shape[-1] == 2 * self.config.mlp_width:
      gate, up = jnp.split(self._project(x, 'gate'), 2, -1)
      return gate, up
    return self._project(x, 'gate'), self._project(x, 'up')

  def _project(self, x: Array, name: str) -> Array:
    """[M, inputs] times a matrix, its inputs flat, with its adapter if any.

    Returns:
      [M, outputs], or [M, heads, H].
    """
    matrix = getattr(self, name)[...].astype(x.dtype)
    outputs = matrix.shape[-1:] if name not in _HEADS else matrix.shape[-2:]
    y = x @ matrix.reshape(x.shape[-1], -1)
    if name in self.config.lora.projections:
      y = y + getattr(self.adapters, name)(x)
    return y.reshape(-1, *outputs)


@dataclasses.dataclass(frozen=True)
class Routers:
  """Input of routers, and what is asked of them.

  Attributes:
    given: [M, k] choices to use, or [L, M, k]; None lets the routers choose.
    real: [M] bool, tokens whose sums are wanted; None for no sums.
  """

  given: Array | None = None
  real: Array | None = None


def normal(rngs, shape, axes, std) -> nnx.Param:
  """A parameter of normal numbers with this standard deviation."""
  value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


def constant_param(value, shape, axes) -> nnx.Param:
  """A parameter of one value everywhere."""
  return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


def _gated(config: ModelConfig, gate: Array, up: Array) -> Array:
  """activation(gate) · up, [M, F].

  The backward pass computes the activation again instead of keeping what lies
  between: arrays of the MLP's width are the largest of a layer, and on a CPU
  each of them that is kept is a pass over memory by itself.
  """
  activation = _ACTIVATIONS[config.activation]
  return jax.checkpoint(lambda gate, up: activation(gate) * up)(gate, up)


def rms_norm(config: ModelConfig, x: Array, weight: nnx.Param) -> Array:
  """x / sqrt(mean(x²) + eps) · scale over the last axis, in float32.

  The scale is the weight, or 1 + weight in families with `unit_offset`.
  """
  wide = x.astype(jnp.float32)
  scale = weight[...].astype(jnp.float32)
  if config.unit_offset:
    scale = 1 + scale
  power = jnp.mean(jnp.square(wide), -1, keepdims=True)
  wide = wide * jax.lax.rsqrt(power + config.norm_eps) * scale
  return wide.astype(x.dtype)
