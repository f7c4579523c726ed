"""The policy: a decoder of RMSNorm, RoPE, grouped queries and a gated MLP.

The modules are Flax NNX; every parameter carries the logical names of its axes.
Outside of them parameters are a plain nested dict of arrays, with the layers
stacked along a leading axis, so that optax, orbax and `jax.device_put` take
them as they are. The functions below are pure and meant to be called inside of
the caller's `jax.jit`, the config closed over.

Three of them walk the same block: `hidden` over packed rows (training),
`prefill` (keys and values of prompts, or of a next piece of them) and `decode`
(one token a slot from a paged cache). They differ only in the attention they
hand to it, so that the engine's and the trainer's log-probabilities agree.

Layers may differ in whether they slide, that is see the last tokens alone, and
in the base of their rotary embedding. What a layer needs of the two is taken by
its number: as the program is traced where the loop is unrolled or all layers
are alike, by a select in a scan over layers that are not. Layers with experts
and layers without are other programs, so a scan goes over blocks of them that
repeat; see `_runs`.

Left to others: sampling (`rollout/`), losses (`losses/`), files (`hf.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import math
from typing import Any, Callable, NamedTuple

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from areal_jax.mesh.rules import Rules, platform_of
from areal_jax.models import (
    attention,
    forms,
    lora,
    moe,
    paged_attention,
    visibility,
)
from areal_jax.models.config import ModelConfig, RopeScaling
from areal_jax.models.moe import Routing
from areal_jax.models.visibility import Visibility

Array = jax.Array
Mesh = jax.sharding.Mesh
Params = dict[str, Any]
Rope = tuple[Array, Array]  # cosines and sines [M, 1, H / 2] float32

CACHE_AXES = paged_attention.CACHE_AXES

_ACTIVATIONS = {
    'silu': jax.nn.silu,
    'gelu_tanh': lambda x: jax.nn.gelu(x, approximate=True),
}

# Of adapters, apart from the numbers of the base.
_ADAPTER_STREAM = 0x10A
# Of embeddings, as in GPT-2; matrices have 1 / sqrt(inputs) instead.
_EMBEDDING_STD = 0.02

# What a layer begins with, by the name that 'offload' knows it by.
_STREAM = 'stream'

# Projections whose outputs are heads.
_HEADS = ('query', 'key', 'value')

# Of `_abstract`, by the config's values.
_abstracts: dict[str, tuple[nnx.GraphDef, nnx.State]] = {}

# attend(layer, window, cache, q [M, N, H], k [M, K, H], v [M, K, H]) gives the
# mixture [M, N, H], the cache with k and v in it, and what the caller collects.
Window = visibility.Window | int | None
Attend = Callable[
    [Array, Window, Any, Array, Array, Array], tuple[Array, Any, Any]
]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """What is cached of B sequences, for `prefill` to go on from.

  Attributes:
    keys: [L, pages, page, K, H] the cache, keys rotated; as for `decode`.
    values: [L, pages, page, K, H].
    page_table: [B, P] pages that hold a row's first P · page positions.
    lengths: [B] cached tokens of each row, at most P · page.
  """

  keys: Array
  values: Array
  page_table: Array
  lengths: Array


# The modules.


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
      return _normal(rngs, (layers, *shape), ('layer', *axes), std)

    def constant(value, shape, axes):
      return _constant(value, (c.layers, *shape), ('layer', *axes))

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
      layout: _Layout,
      routers: _Routers,
      sparse: bool,
  ) -> tuple[Array, Any, Any, Routing | None]:
    """One layer on flat tokens; this module holds one layer's parameters.

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
    h = _rms_norm(c, x, self.attention_norm)
    q = layout(self._project(h, 'query'), 'tokens', 'heads', 'head')
    k = layout(self._project(h, 'key'), 'tokens', 'kv_heads', 'head')
    v = layout(self._project(h, 'value'), 'tokens', 'kv_heads', 'head')
    if c.qkv_bias:
      q = q + self.query_bias[...].astype(q.dtype)
      k = k + self.key_bias[...].astype(k.dtype)
      v = v + self.value_bias[...].astype(v.dtype)
    if c.qk_norm:
      q = _rms_norm(c, q, self.query_norm)
      k = _rms_norm(c, k, self.key_norm)
    q = _rotate(q, rope, scale=1 / math.sqrt(c.query_scalar or c.head_size))
    k = _rotate(k, rope)
    mixed, cache, collected = attend(layer, window, cache, q, k, v)
    mixed = layout(mixed.astype(x.dtype), 'tokens', 'heads', 'head')
    more = self._project(mixed.reshape(len(x), -1), 'out')
    if c.post_norms:
      more = _rms_norm(c, more, self.attention_post_norm)
    x = layout(x + more, 'tokens', 'width')
    h = _rms_norm(c, x, self.mlp_norm)
    routing = None
    if sparse:
      more, routing = self._experts(h, layout, routers)
    else:
      h = _gated(c, *self._gate_and_up(h))
      h = layout(h, 'tokens', 'mlp')
      more = self._project(h, 'down')
    if c.post_norms:
      more = _rms_norm(c, more, self.mlp_post_norm)
    return layout(x + more, 'tokens', 'width'), cache, collected, routing

  def _experts(
      self, h: Array, layout: _Layout, routers: _Routers
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


class Transformer(nnx.Module):
  """Embedding, stacked layers, final norm, unembedding."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    v, d = config.padded_vocab_size, config.width
    self.config = config
    self.embedding = _normal(rngs, (v, d), ('vocab', 'embed'), _EMBEDDING_STD)
    self.blocks = Block(config, rngs)
    one = 0 if config.unit_offset else 1
    self.final_norm = _constant(one, (d,), ('norm',))
    if not config.tied_embeddings:
      std = 1 / math.sqrt(d)
      self.unembedding = _normal(rngs, (d, v), ('embed', 'vocab'), std)

  def walk(
      self,
      ids: Array,
      positions: Array,
      cache: Any,
      attend: Attend,
      layout: _Layout,
      routers: _Routers | None = None,
      apart: tuple[Params, ...] | None = None,
  ) -> tuple[Array, Any, Any, Routing | None]:
    """All layers on flat tokens.

    Args:
      ids: [M] tokens.
      positions: [M] of each in its own sequence.
      cache: carried through the layers whole, so that writes stay in place.
      attend: see `Attend`.
      layout: constrains activations.
      routers: of all sparse layers, along their L.
      apart: the layers' parameters, where they are not in `blocks`.

    Returns:
      [M, D] of the last layer, the cache, the collected stacked along L, and
      what the routers did along the L of sparse layers, None without any.
    """
    c = self.config
    x = self.embedding[...][ids].astype(c.compute_dtype)
    if c.scaled_embeddings:
      # The root is rounded too, as in transformers.
      x = x * jnp.asarray(math.sqrt(c.width), x.dtype)
    x = layout(x, 'tokens', 'width')
    ropes = layout.computed(_ropes(c, positions), positions)
    routers = routers or _Routers()
    one_layer, stacked = nnx.split(self.blocks)

    def step(carry, like, sparse, layer, weights, given):
      x, cache = carry
      if c.remat == 'offload':
        x = checkpoint_name(x, _STREAM)
      if not isinstance(weights, nnx.State):
        weights = _filled(stacked, weights)
      block = nnx.merge(one_layer, weights)
      known = layer if like is None else like
      x, cache, collected, routing = block(
          x,
          _of_layer(c, known, *ropes),
          layer,
          _window(c, known),
          cache,
          attend,
          layout,
          _Routers(given, routers.real),
          sparse,
      )
      return (x, cache), (collected, routing)

    if c.layer_loop == 'scan':
      carry, *along = _scanned(c, step, (x, cache), stacked, routers.given)
      return *carry, *along
    # Layers of one kind are traced and differentiated once, and called again;
    # XLA writes out every call.
    static = dict(static_argnums=(1, 2))
    body = jax.jit(_rematerialised(c, step, **static), **static)
    carry, rows, routings = (x, cache), [], []
    layers = apart or _layers_of(c, stacked, ids, layout)
    for layer, (like, weights) in enumerate(zip(_first_alike(c), layers)):
      given = _given(c, routers.given, layer)
      carry, (collected, routing) = body(
          carry, like, like in c.sparse_layers, np.int32(layer), weights, given
      )
      rows.append(collected)
      if routing is not None:
        routings.append(routing)
    return *carry, _stacked(rows), _stacked(routings) if routings else None

  def unembed(self, x: Array, layout: _Layout) -> Array:
    """Logits [M, V] float32 of the normed hidden states [M, D]."""
    c = self.config
    if c.tied_embeddings:
      matrix = self.embedding[...].astype(x.dtype).T
    else:
      matrix = self.unembedding[...].astype(x.dtype)
    logits = jnp.matmul(x, matrix, preferred_element_type=jnp.float32)
    logits = visibility.capped(layout(logits, 'tokens', 'vocab'), c.logit_cap)
    return _only_possible(c, logits)


def _only_possible(config: ModelConfig, logits: Array) -> Array:
  """Gives ids that are never sampled a logit that adds nothing to a sum.

  Those are the padding of the vocabulary and ids that the tokenizer lacks.
  """
  possible = config.possible_ids
  count = int(possible.sum())
  if count == len(possible):
    return logits
  if possible[:count].all():
    # The usual case: all that is impossible comes last. No table is needed.
    possible = jnp.arange(len(possible)) < count
  return jnp.where(possible, logits, visibility.MASKED)


# Parameters.


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
  """What learns and what stays as it is, of parameters or a tree like them.

  With adapters those are `nnx.LoRAParam`s and the others; without, everything
  learns. `lora.overlaid` puts the two together again.
  """
  if not config.lora.projections:
    return tree, {}
  _, state = _abstract(config)
  learns, stays = nnx.split_state(state, nnx.LoRAParam, ...)
  return tuple(
      lora.part_of(tree, nnx.to_pure_dict(part)) for part in (learns, stays)
  )


def abstract_params(config: ModelConfig) -> Params:
  """The parameters as `jax.ShapeDtypeStruct`s."""
  _, state = _abstract(config)
  return _in_base_dtype(config, nnx.to_pure_dict(state))


def logical_axes(config: ModelConfig) -> Params:
  """The parameters' axis names: tuples where the parameters have arrays."""
  _, state = _abstract(config)
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
  """Which parameters are stacks of matrices, for optimizers that look at them.

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
  """Whether `layers_apart` takes parameters apart."""
  on_cpu = _Layout(mesh, rules).platform == 'cpu'
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
  joins = _Layout(mesh, rules).whole and not config.lora.projections
  layers = []
  for layer in range(config.layers):
    places = [_place(config, name, layer) for name in sorted(blocks)]
    join = joins and layer in config.dense_layers
    layers.append((cut or layer_apart)(blocks, np.int32(places), join))
  return {**params, 'blocks': tuple(layers)}


def layer_apart(blocks: Params, places: Array, join: bool) -> Params:
  """One layer of `layers_apart`.

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


# The three walks.


def hidden(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Normed states of the last layer, for packed rows.

  A token attends to those before it in its row that have its segment id; 0 is
  padding, which is attended by none and whose states are finite.

  Args:
    config: of the policy.
    params: of the policy.
    ids: [B, T] tokens.
    positions: [B, T] of each token in its own sequence.
    segment_ids: [B, T] sequence of the row that a token belongs to, from 1.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    [B, T, D] in `config.compute_dtype`, to be passed to `unembed`.
  """
  return hidden_routed(
      config, params, ids, positions, segment_ids, mesh=mesh, rules=rules
  )[0]


def hidden_routed(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    given: Array | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[Array, Routing | None]:
  """`hidden`, and what the routers did; None in a policy without experts.

  Args:
    config: of the policy.
    params: of the policy.
    ids: see `hidden`.
    positions: see `hidden`.
    segment_ids: see `hidden`; padding counts in no sum of the routing.
    given: [B, T, L, k] experts that tokens are to go to, L the sparse layers;
      a token with `moe.UNKNOWN` chooses. None lets all choose.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.
  """
  model, layout = _merged(config, params), _Layout(mesh, rules)
  if given is not None:
    given = jnp.swapaxes(layout.flat(given, None, None), 0, 1)
  routers = _Routers(given, layout.flat(segment_ids) != 0)
  # A sequence lies in one piece, so that places tell how far tokens are apart.
  visible = Visibility.of_rows(ids.shape[1], segment_ids)
  attend = _row_attention(config, ids.shape, visible, layout)
  x, _, _, routing = model.walk(
      layout.flat(ids),
      layout.flat(positions),
      None,
      attend,
      layout,
      routers,
      _apart(params),
  )
  x = _rms_norm(config, x, model.final_norm)
  return layout.rows(x, ids.shape, 'width'), routing


def unembed(
    config: ModelConfig,
    params: Params,
    x: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Logits of normed states.

  Args:
    config: of the policy.
    params: of the policy.
    x: [..., D] as `hidden` returns; where the tokens of a row are cut over
      devices, [B, C, ..., D] with as many C as there are shards.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    [..., V] float32, V padded; columns of padding and of ids that the
    tokenizer lacks (`ModelConfig.possible_ids`) are -1e30.
  """
  model, layout = _merged(config, params), _Layout(mesh, rules)
  logits = model.unembed(layout.flat(x, 'width'), layout)
  return layout.rows(logits, x.shape[:-1], 'vocab')


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
  matrix = _Layout(mesh, rules)(params[name].astype(dtype), *axes)
  return {**params, name: matrix}


def forward(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Next-token logits [B, T, V] float32 of packed rows: `unembed(hidden)`."""
  return forward_routed(
      config, params, ids, positions, segment_ids, mesh=mesh, rules=rules
  )[0]


def forward_routed(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    given: Array | None = None,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[Array, Routing | None]:
  """`unembed(hidden)` and the routing; arguments as in `hidden_routed`."""
  x, routing = hidden_routed(
      config,
      params,
      ids,
      positions,
      segment_ids,
      given=given,
      mesh=mesh,
      rules=rules,
  )
  return unembed(config, params, x, mesh=mesh, rules=rules), routing


def prefill(
    config: ModelConfig,
    params: Params,
    ids: Array,
    lengths: Array,
    prefix: Prefix | None = None,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[Array, Array]:
  """Keys and values of sequences, for a cache; no logits.

  A long prompt may come in pieces: each is prefilled on top of the keys and
  values of those before it.

  Args:
    config: of the policy.
    params: of the policy.
    ids: [B, T] tokens, padded on the right; from position 0, or from where the
      prefix ends.
    lengths: [B] real tokens of each row; what stands beyond is finite noise.
    prefix: what stands before them; None for nothing.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    Keys and values [L, B, T, K, H] of these tokens in `config.compute_dtype`,
    keys rotated.
  """
  return prefill_routed(
      config, params, ids, lengths, prefix, mesh=mesh, rules=rules
  )[0]


def prefill_routed(
    config: ModelConfig,
    params: Params,
    ids: Array,
    lengths: Array,
    prefix: Prefix | None = None,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[tuple[Array, Array], Array | None]:
  """`prefill`, and the experts [L, B · T, k] of the sparse layers, if any."""
  model, layout = _merged(config, params), _Layout(mesh, rules)
  positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
  if prefix is not None:
    positions = positions + prefix.lengths[:, None]
  # Padding lies behind all that is real, so that nothing real sees it.
  attend = _row_attention(
      config,
      ids.shape,
      Visibility.of_rows(ids.shape[1]),
      layout,
      prefix=prefix,
      collect=True,
  )
  _, _, collected, routing = model.walk(
      ids.reshape(-1),
      positions.reshape(-1),
      None,
      attend,
      layout,
      apart=_apart(params),
  )
  return collected, None if routing is None else routing.experts


def decode(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    keys: Array,
    values: Array,
    page_table: Array,
    write_ok: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[Array, Array, Array]:
  """One token a slot: writes its key and value, and returns its logits.

  Logical position p of slot s lives at offset p % page of page
  `page_table[s, p // page]`. Donate the cache: it is written in place.

  Args:
    config: of the policy.
    params: of the policy; in a loop those that `layers_apart` returns.
    ids: [S] tokens.
    positions: [S] of each token, below P · page.
    keys: [L, pages, page, K, H] the cache, axes `CACHE_AXES`; or with the last
      two in one, see `cache_shapes`.
    values: the cache, of the same shape.
    page_table: [S, P] pages of each slot; as many columns as are to be read.
    write_ok: [S] bool; a slot with False writes nothing.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    Logits [S, V] float32, keys, values.
  """
  return decode_routed(
      config,
      params,
      ids,
      positions,
      keys,
      values,
      page_table,
      write_ok,
      mesh=mesh,
      rules=rules,
  )[0]


def decode_routed(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    keys: Array,
    values: Array,
    page_table: Array,
    write_ok: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[tuple[Array, Array, Array], Array | None]:
  """`decode`, and the experts [L, S, k] of the sparse layers, if any."""
  model, layout = _merged(config, params), _Layout(mesh, rules)
  page = keys.shape[2]
  column = (positions // page)[:, None]
  pages = jnp.take_along_axis(page_table, column, axis=1, mode='clip')[:, 0]
  # Past the end, where a scatter in mode 'drop' writes nothing.
  pages = jnp.where(write_ok, pages, keys.shape[1])
  offsets = positions % page

  def attend(layer, window, cache, q, k, v):
    at = (layer, pages, offsets)

    def written(x, new):
      new = paged_attention.as_cached(new, x).astype(x.dtype)
      return layout(x.at[at].set(new, mode='drop'), *CACHE_AXES[: x.ndim])

    keys, values = (written(x, new) for x, new in zip(cache, (k, v)))
    mixed = paged_attention.attend_paged(
        q,
        keys,
        values,
        layer,
        page_table,
        positions,
        window=window,
        cap=config.attention_cap,
        platform=layout.platform,
        form=config.attention.pages,
        mesh=mesh,
        rules=rules,
    )
    return mixed, (keys, values), None

  x, cache, _, routing = model.walk(
      ids,
      positions,
      (keys, values),
      attend,
      layout,
      apart=_apart(params),
  )
  x = _rms_norm(config, x, model.final_norm)
  experts = None if routing is None else routing.experts
  return (model.unembed(x, layout), *cache), experts


def cache_shapes(
    config: ModelConfig,
    pages: int,
    page: int,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
  """The cache that `decode` reads fastest on these devices.

  Args:
    config: of the policy.
    pages: of the cache.
    page: tokens a page.
    mesh: where it is to lie; None for one device.
    rules: how it is to lie there.

  Returns:
    Keys and values [L, pages, page, K, H]; or, where a kernel wants the heads
    of a token side by side, [L, pages, page, K · H].
  """
  c = config
  asked = forms.Pages(
      platform=_Layout(mesh, rules).platform,
      page=page,
      heads=c.heads,
      kv_heads=c.kv_heads,
      head_size=c.head_size,
      dtype=c.compute_dtype,
      parts=1 if mesh is None else rules.parts('heads', mesh),
  )
  flat = forms.flattens(forms.of_pages(c.attention.pages, asked))
  last = (c.kv_heads * c.head_size,) if flat else (c.kv_heads, c.head_size)
  shape = (c.layers, pages, page, *last)
  cache = jax.ShapeDtypeStruct(shape, jnp.dtype(c.compute_dtype))
  return cache, cache


# Helpers.


@dataclasses.dataclass(frozen=True)
class _Routers:
  """What is given to routers and asked of them.

  Attributes:
    given: [M, k] choices to use, or [L, M, k]; None lets the routers choose.
    real: [M] bool, tokens whose sums are wanted; None for no sums.
  """

  given: Array | None = None
  real: Array | None = None


def _rematerialised(
    config: ModelConfig, body: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
  """A layer whose backward pass computes again what `config.remat` says."""
  if config.remat == 'none':
    return body
  policies = jax.checkpoint_policies
  policy = {
      # Projections take flat tokens and so have no batch dimension.
      'dots': policies.dots_with_no_batch_dims_saveable,
      'full': policies.nothing_saveable,
      'offload': policies.save_and_offload_only_these_names(
          names_which_can_be_saved=[],
          names_which_can_be_offloaded=[_STREAM],
          offload_src='device',
          offload_dst='pinned_host',
      ),
  }[config.remat]
  return jax.checkpoint(body, policy=policy, **options)


class _Run(NamedTuple):
  """Layers that one scan walks: a block of `size` layers, `times` in a row."""

  first: int
  size: int
  times: int


@functools.cache
def _runs(kinds: tuple[bool, ...]) -> tuple[_Run, ...]:
  """The layers as blocks that repeat, so that as few as can be are compiled.

  A scan compiles the layers of one block, however often it repeats. Example: of
  the kinds aabaabb, the blocks are aab twice and b once.

  Args:
    kinds: what tells the program of each layer apart.
  """
  count = len(kinds)
  # From each layer on: layers that are compiled, scans, and the first run.
  best: list[tuple[int, int, _Run | None]] = [(0, 0, None)] * (count + 1)
  for first in reversed(range(count)):
    options = []
    for size in range(1, count - first + 1):
      block, times = kinds[first : first + size], 1
      while True:
        stop = first + size * times
        layers, scans, _ = best[stop]
        options.append((size + layers, scans + 1, _Run(first, size, times)))
        if kinds[stop : stop + size] != block:
          break
        times += 1
    best[first] = min(options)
  found, first = [], 0
  while first < count:
    run = best[first][2]
    found.append(run)
    first += run.size * run.times
  return tuple(found)


def _scanned(
    config: ModelConfig,
    step: Callable[..., Any],
    carry: Any,
    stacked: nnx.State,
    given: Array | None,
) -> tuple[Any, Any, Routing | None]:
  """Walks all layers by scans over `_runs`.

  Args:
    config: of the policy.
    step: one layer, see `Transformer.walk`.
    carry: what the first layer takes.
    stacked: the parameters of all layers.
    given: [L, M, k] choices of the sparse layers; None lets routers choose.

  Returns:
    What the last layer gives, and along L what was collected and what the
    routers did, None without any.
  """
  c = config
  sparse = tuple(n in c.sparse_layers for n in range(c.layers))
  static = dict(static_argnums=(1, 2))
  # A loop keeps what is computed again apart from what was computed before.
  looped = _rematerialised(c, step, prevent_cse=False, **static)
  alone = _rematerialised(c, step, **static)
  leaves, structure = jax.tree.flatten_with_path(stacked)
  names = [path[0].key for path, _ in leaves]
  rows, routings = [], []
  for run in _runs(sparse):
    numbers = jnp.arange(run.first, run.first + run.size * run.times)
    inputs = (
        numbers.reshape(run.times, run.size),
        [_of_run(c, name, x, run) for name, (_, x) in zip(names, leaves)],
        None if given is None else _of_run(c, 'router', given, run),
    )

    def block(carry, inputs, run=run):
      numbers, stacks, chosen = inputs
      body = looped if run.times > 1 else alone
      of_layers, of_routers = [], []
      for place in range(run.size):
        layer = run.first + place
        weights = structure.unflatten(
            # What no layer of the run has is not used; its first stands for it.
            whole[0] if x is None else x[_place_in_run(c, name, run, layer)]
            for name, (_, whole), x in zip(names, leaves, stacks)
        )
        mine = None
        if chosen is not None and sparse[layer]:
          mine = chosen[_place_in_run(c, 'router', run, layer)]
        carry, (collected, routing) = body(
            carry, None, sparse[layer], numbers[place], weights, mine
        )
        of_layers.append(collected)
        if routing is not None:
          of_routers.append(routing)
      routing = _stacked(of_routers) if of_routers else None
      return carry, (_stacked(of_layers), routing)

    carry, (collected, routing) = jax.lax.scan(block, carry, inputs)
    rows.append(collected)
    if routing is not None:
      routings.append(routing)
  return carry, _in_a_row(rows), _in_a_row(routings) if routings else None


def _of_run(
    config: ModelConfig, name: str, stack: Array, run: _Run
) -> Array | None:
  """The part of a stack that a run reads: [times, layers of a block, ...].

  None of a stack that no layer of the run has a part in.
  """
  places = [_place(config, name, layer) for layer in _having(config, name, run)]
  if not places:
    return None
  each = len(places)
  part = stack[places[0] : places[0] + each * run.times]
  return part.reshape(run.times, each, *stack.shape[1:])


def _place_in_run(config: ModelConfig, name: str, run: _Run, layer: int) -> int:
  """Where a layer of the first block lies in `_of_run`; 0 if it does not."""
  having = _having(config, name, run)
  return having.index(layer) if layer in having else 0


def _having(config: ModelConfig, name: str, run: _Run) -> list[int]:
  """Layers of a run's first block that have a parameter."""
  block = range(run.first, run.first + run.size)
  return [layer for layer in config.layers_with(name) if layer in block]


def _in_a_row(parts: list[Any]) -> Any:
  """[times, layers of a block, ...] of one run after another, as [L, ...]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
  return jax.tree.map(lambda *x: jnp.concatenate(x), *flat)


def _layers_of(
    config: ModelConfig, stacked: nnx.State, ids: Array, layout: _Layout
) -> list[nnx.State]:
  """The parameters of each layer.

  Of a stack that a layer has no part in, its first is taken and not used.

  XLA for CPU compiles kernels that are alike once, but not those that differ in
  a constant, as cuts of one layer and the next do. So where the parameters lie
  on one processor whole, the numbers of layers come out of a branch that XLA
  cannot decide.
  """
  if layout.platform == 'cpu' and layout.whole:
    numbers = jax.lax.cond(
        ids[0] >= 0,  # always
        lambda: tuple(np.arange(config.layers, dtype=np.int32)),
        lambda: tuple(np.zeros(config.layers, np.int32)),
    )
    cut = lambda stack: _parts(stack, numbers[: len(stack)])
  else:
    cut = lambda stack: [stack[n] for n in range(len(stack))]
  leaves, structure = jax.tree.flatten_with_path(stacked)
  parts = [(path[0].key, cut(leaf)) for path, leaf in leaves]
  return [
      structure.unflatten(
          each[_place(config, name, layer)] for name, each in parts
      )
      for layer in range(config.layers)
  ]


@jax.custom_vjp
def _parts(stack: Array, numbers: tuple[Array, ...]) -> tuple[Array, ...]:
  """The parts of a stack in order, 0 to its length, as these scalars name them.

  Its gradient is a stack too, and not a sum of some that are zero but for one.
  """
  return tuple(
      jax.lax.dynamic_index_in_dim(stack, n, keepdims=False) for n in numbers
  )


_parts.defvjp(
    lambda stack, numbers: (_parts(stack, numbers), len(numbers)),
    lambda count, parts: (
        jnp.stack(parts),
        count * (np.zeros((), jax.dtypes.float0),),
    ),
)


def _given(
    config: ModelConfig, given: Array | None, layer: int
) -> Array | None:
  """The choices [M, k] that are given for a layer, of those of all."""
  if given is None or layer not in config.sparse_layers:
    return None
  return given[_place(config, 'router', layer)]


def _place(config: ModelConfig, name: str, layer: int) -> int:
  """Where the layer lies along the L of a parameter; 0 if it does not."""
  layers = config.layers_with(name)
  return layers.index(layer) if layer in layers else 0


def _stacked(rows: list[Any]) -> Any:
  return jax.tree.map(lambda *r: jnp.stack(r), *rows)


class _Layout:
  """Constrains activations to a mesh by their logical axes.

  Dense layers take flat tokens [M], M = B · T. Where both rows and the tokens
  of a row are cut, no cut of plainly flattened rows leaves every token where it
  is, so the flat order is another one: those of the first device, then those of
  the next. Only `flat` and `rows` know about it.
  """

  def __init__(self, mesh: Mesh | None, rules: Rules | None):
    self.mesh = mesh
    self.rules = rules
    self.platform = (
        jax.devices()[0].platform if mesh is None else platform_of(mesh)
    )
    self.whole = mesh is None or mesh.size == 1  # on one device
    self.context = 1 if mesh is None else rules.parts('time', mesh)

  def flat(self, x: Array, *axes: str | None) -> Array:
    """[B, T, ..., *axes] as [M, *axes], without moving anything.

    The second dimension is that which is cut by the rule of 'time'.
    """
    lead = x.ndim - len(axes)
    after = x.shape[lead:]
    if self.context == 1 or lead == 1:
      return x.reshape(-1, *after)
    shape = math.prod(x.shape[:lead]), *after
    return jax.shard_map(
        lambda part: part.reshape(-1, *part.shape[lead:]),
        mesh=self.mesh,
        in_specs=self._spec(_row_axes(lead) + axes, x.shape),
        out_specs=self._spec(('tokens', *axes), shape),
    )(x)

  def rows(self, x: Array, shape: tuple[int, ...], *axes: str | None) -> Array:
    """The inverse: [M, *axes] as [*shape, *axes]."""
    whole = (*shape, *x.shape[1:])
    if self.context == 1 or len(shape) == 1:
      return x.reshape(whole)
    rows = self._spec(_row_axes(len(shape)) + axes, whole)
    part = jax.sharding.NamedSharding(self.mesh, rows).shard_shape(whole)
    return jax.shard_map(
        lambda x: x.reshape(part),
        mesh=self.mesh,
        in_specs=self._spec(('tokens', *axes), x.shape),
        out_specs=rows,
    )(x)

  def computed(self, x: Any, positions: Array) -> Any:
    """Values of positions [M], computed once for all that read them.

    XLA for CPU computes a cosine anew in each operation that multiplies by it,
    for every head of every layer, and takes barriers away. It leaves results of
    branches alone.
    """
    if self.platform != 'cpu' or (self.mesh is not None and self.mesh.size > 1):
      return x
    always = positions.max() >= 0
    zeros = lambda: jax.tree.map(jnp.zeros_like, x)
    return jax.lax.cond(always, lambda: x, zeros)

  def _spec(self, axes, shape) -> jax.sharding.PartitionSpec:
    return self.rules.spec(axes, shape, self.mesh)

  def __call__(self, x: Array, *axes: str) -> Array:
    if self.mesh is None or self.mesh.size == 1:
      return x
    sharding = self.rules.sharding(axes, x.shape, self.mesh)
    return jax.lax.with_sharding_constraint(x, sharding)


def _row_axes(count: int) -> tuple[str | None, ...]:
  """Logical axes of [B, T, ...], `count` of them."""
  return ('batch', 'time', *[None] * (count - 2))


def _of_layer(
    config: ModelConfig, layer: Array | int, full: Any, sliding: Any
) -> Any:
  """The one of two that a layer needs, by whether it slides."""
  slides = [n in config.sliding_layers for n in range(config.layers)]
  if full is sliding:
    return full
  if len(set(slides)) == 1:
    return sliding if slides[0] else full
  if isinstance(layer, int):
    return sliding if slides[layer] else full
  chosen = jnp.asarray(slides)[layer]
  return jax.tree.map(lambda f, s: jnp.where(chosen, s, f), full, sliding)


def _first_alike(config: ModelConfig) -> list[int]:
  """For each layer the first that slides as it does, and has experts or not."""
  kinds = [
      (n in config.sliding_layers, n in config.sparse_layers)
      for n in range(config.layers)
  ]
  return [kinds.index(kind) for kind in kinds]


def _window(config: ModelConfig, layer: Array | int) -> Window:
  """Tokens that a query of the layer sees; None for all before it."""
  slides = [n in config.sliding_layers for n in range(config.layers)]
  if isinstance(layer, int) or len(set(slides)) == 1:
    first = layer if isinstance(layer, int) else 0
    return config.sliding_window if slides[first] else None
  return visibility.Window(config.sliding_window, jnp.asarray(slides)[layer])


def _row_attention(
    config: ModelConfig,
    shape: tuple[int, ...],
    visible: Visibility,
    layout: _Layout,
    *,
    prefix: Prefix | None = None,
    collect: bool = False,
) -> Attend:
  """Attention of rows of this shape [B, T] to themselves and to a prefix."""

  def rows(x, heads):
    x = layout.rows(x, shape, heads, 'head')
    return layout(x, 'batch', 'time', heads, 'head')

  def attend(layer, window, cache, q, k, v):
    q, k, v = rows(q, 'heads'), rows(k, 'kv_heads'), rows(v, 'kv_heads')
    own = (k, v) if collect else None
    if prefix is None:
      mixed = attention.attend(
          q,
          k,
          v,
          visible,
          window=window,
          cap=config.attention_cap,
          platform=layout.platform,
          form=config.attention.rows,
          mesh=layout.mesh,
          rules=layout.rules,
      )
    else:
      mixed = attention.attend_behind(
          q,
          k,
          v,
          visible.mask(window),
          prefix.keys,
          prefix.values,
          layer,
          prefix.page_table,
          prefix.lengths,
          window=window,
          cap=config.attention_cap,
      )
    return layout.flat(mixed, 'heads', 'head'), cache, own

  return attend


def _normal(rngs, shape, axes, std) -> nnx.Param:
  value = std * jax.random.normal(rngs.params(), shape, jnp.float32)
  return nnx.Param(value, axes=axes)


def _constant(value, shape, axes) -> nnx.Param:
  return nnx.Param(jnp.full(shape, value, jnp.float32), axes=axes)


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


def _abstract(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
  """Structure and shapes of the module; not to be changed.

  Kept, for every program that is traced asks for them. A config can be edited,
  so what is kept is known by the values, and has a copy of them.
  """
  values = repr(config)
  if values not in _abstracts:
    own = copy.deepcopy(config)
    _abstracts[values] = nnx.split(
        nnx.eval_shape(lambda: Transformer(own, nnx.Rngs(0)))
    )
  return _abstracts[values]


def _merged(config: ModelConfig, params: Params) -> Transformer:
  """The module around these parameters; layers apart stay shapes in it."""
  structure, state = _abstract(config)
  stacked = isinstance(params['blocks'], dict)
  known = {n: x for n, x in params.items() if stacked or n != 'blocks'}
  return nnx.merge(structure, _filled(state, known))


def _apart(params: Params) -> tuple[Params, ...] | None:
  """The layers' parameters, if `layers_apart` has been here."""
  blocks = params['blocks']
  return blocks if isinstance(blocks, tuple) else None


def _filled(state: nnx.State, params: Params) -> nnx.State:
  """A state with these arrays in it, in place of its own."""
  filled = jax.tree.map(lambda leaf: leaf, state)
  nnx.replace_by_pure_dict(filled, params)
  return filled


def _gated(config: ModelConfig, gate: Array, up: Array) -> Array:
  """activation(gate) · up, [M, F].

  The backward pass computes the activation again instead of keeping what lies
  between: arrays of the MLP's width are the largest of a layer, and on a CPU
  each of them that is kept is a pass over memory by itself.
  """
  activation = _ACTIVATIONS[config.activation]
  return jax.checkpoint(lambda gate, up: activation(gate) * up)(gate, up)


def _rms_norm(config: ModelConfig, x: Array, weight: nnx.Param) -> Array:
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


def _ropes(config: ModelConfig, positions: Array) -> tuple[Rope, Rope]:
  """The rotations of full layers and of sliding ones at positions [M]."""
  full = rope(config, positions)
  if not (config.sliding_layers and config.sliding_rope_theta):
    return full, full
  own = dataclasses.replace(
      config, rope_theta=config.sliding_rope_theta, rope_scaling=RopeScaling()
  )
  return full, rope(own, positions)


def rope(config: ModelConfig, positions: Array) -> Rope:
  """Cosines and sines [M, 1, H / 2] float32 of positions [M]."""
  frequencies = jnp.asarray(rope_frequencies(config))
  scaling, positions = config.rope_scaling, positions[:, None, None]
  if scaling.kind == 'dynamic':
    frequencies = frequencies * _dynamic_stretch(config, positions)
  angles = positions * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  if scaling.amplitude != 1:
    cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
  return cos, sin


def _dynamic_stretch(config: ModelConfig, positions: Array) -> Array:
  """What frequencies are multiplied by at positions [M, 1, 1].

  A base that is r^(H / (H - 2)) times as large makes frequency i of H / 2
  r^(-2i / (H - 2)) times as large. r = f n / N - (f - 1) for n > N tokens, with
  N those trained on and f the factor; a position p has n = p + 1.
  """
  scaling, h = config.rope_scaling, config.head_size
  trained = scaling.original_max_length
  beyond = jnp.maximum(positions + 1 - trained, 0)
  growth = 1 + scaling.factor * beyond.astype(jnp.float32) / trained
  return growth ** (-jnp.arange(0, h, 2) / (h - 2))


def rope_frequencies(config: ModelConfig) -> np.ndarray:
  """Radians a token, [H / 2] float32: theta^(-2i / H), scaled if set.

  For 'dynamic' those of sequences no longer than trained on. See
  https://arxiv.org/abs/2104.09864, for the scalings
  `modeling_rope_utils.py` of https://github.com/huggingface/transformers.
  """
  halves = np.arange(0, config.head_size, 2) / config.head_size
  frequencies = config.rope_theta**-halves
  rope = config.rope_scaling
  if rope.kind == 'linear':
    frequencies /= rope.factor
  if rope.kind in ('yarn', 'llama3'):
    kept = (_kept_by_yarn if rope.kind == 'yarn' else _kept_by_llama3)(config)
    frequencies *= kept + (1 - kept) / rope.factor
  return frequencies.astype(np.float32)


def _kept_by_llama3(config: ModelConfig) -> np.ndarray:
  """The share of each frequency that stays, by the turns that it makes."""
  rope = config.rope_scaling
  halves = np.arange(0, config.head_size, 2) / config.head_size
  # How many times a wave fits in the context that was trained on.
  turns = rope.original_max_length * config.rope_theta**-halves / (2 * np.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  return np.clip((turns - low) / (high - low), 0, 1)


def _kept_by_yarn(config: ModelConfig) -> np.ndarray:
  """The share of each frequency that stays, by its number."""
  rope, h = config.rope_scaling, config.head_size

  def number(turns):
    """That of the frequency with so many turns in the context trained on."""
    wave = rope.original_max_length / (turns * 2 * np.pi)
    return h * math.log(wave) / (2 * math.log(config.rope_theta))

  first, last = number(rope.beta_fast), number(rope.beta_slow)
  if rope.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, h - 1)
  if first == last:
    last += 0.001  # a step, and no division by 0
  return 1 - np.clip((np.arange(h // 2) - first) / (last - first), 0, 1)


def _rotate(x: Array, rope: Rope, scale: float = 1.0) -> Array:
  """Rotates the pairs (i, i + H / 2) of [M, heads, H], in float32."""
  cos, sin = rope
  first, second = jnp.split(x.astype(jnp.float32), 2, -1)
  turned = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], -1
  )
  return (turned * scale).astype(x.dtype)
