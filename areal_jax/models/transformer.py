"""The policy: a decoder of RMSNorm, RoPE, grouped queries and a gated MLP.

The modules are Flax NNX; every parameter carries the logical names of its axes.
The functions below are pure and meant to be called inside of the caller's
`jax.jit`, the config closed over; they take parameters as a plain nested dict,
see `parameters.py`.

Three of them walk the same layers: `hidden` over packed rows (training),
`prefill` (keys and values of prompts, or of a next piece of them) and `decode`
(one token a slot from a paged cache). They differ only in the attention they
hand to a layer, so that the engine's and the trainer's log-probabilities agree.

One layer is `block.py`, the loop over layers `layer_loop.py`. Left to others:
sampling (`rollout/`), losses (`losses/`), files (`hf.py`).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

from flax import nnx
import jax
from jax.ad_checkpoint import checkpoint_name
import jax.numpy as jnp
import numpy as np

from areal_jax.mesh.rules import Rules
from areal_jax.models import (
    attention,
    forms,
    paged_attention,
    visibility,
)
from areal_jax.models.block import (
    Attend,
    Block,
    Routers,
    constant_param,
    normal,
    rms_norm,
)
from areal_jax.models.config import ModelConfig
from areal_jax.models.layer_loop import (
    STREAM,
    first_alike,
    given_to,
    layers_of,
    of_layer,
    rematerialised,
    scanned,
    stacked_rows,
    window_of,
)
from areal_jax.models.layout import Layout
from areal_jax.models.moe import Routing
from areal_jax.models.rope import layer_rotations
from areal_jax.models.visibility import Visibility

Array = jax.Array
Mesh = jax.sharding.Mesh
Params = dict[str, Any]

CACHE_AXES = paged_attention.CACHE_AXES

# Of embeddings, as in GPT-2; matrices have 1 / sqrt(inputs) instead.
_EMBEDDING_STD = 0.02

# What `abstract_module` has made, by the config's values.
_abstracts: dict[str, tuple[nnx.GraphDef, nnx.State]] = {}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Prefix:
  """Cached keys and values of B sequences, for `prefill` to go on from.

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


class Transformer(nnx.Module):
  """Embedding, stacked layers, final norm, unembedding."""

  def __init__(self, config: ModelConfig, rngs: nnx.Rngs):
    v, d = config.padded_vocab_size, config.width
    self.config = config
    self.embedding = normal(rngs, (v, d), ('vocab', 'embed'), _EMBEDDING_STD)
    self.blocks = Block(config, rngs)
    one = 0 if config.unit_offset else 1
    self.final_norm = constant_param(one, (d,), ('norm',))
    if not config.tied_embeddings:
      std = 1 / math.sqrt(d)
      self.unembedding = normal(rngs, (d, v), ('embed', 'vocab'), std)

  def walk(
      self,
      ids: Array,
      positions: Array,
      cache: Any,
      attend: Attend,
      layout: Layout,
      routers: Routers | None = None,
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
    ropes = layout.computed(layer_rotations(c, positions), positions)
    routers = routers or Routers()
    one_layer, stacked = nnx.split(self.blocks)

    def step(carry, like, sparse, layer, weights, given):
      x, cache = carry
      if c.remat == 'offload':
        x = checkpoint_name(x, STREAM)
      if not isinstance(weights, nnx.State):
        weights = filled(stacked, weights)
      block = nnx.merge(one_layer, weights)
      known = layer if like is None else like
      x, cache, collected, routing = block(
          x,
          of_layer(c, known, *ropes),
          layer,
          window_of(c, known),
          cache,
          attend,
          layout,
          Routers(given, routers.real),
          sparse,
      )
      return (x, cache), (collected, routing)

    if c.layer_loop == 'scan':
      carry, *along = scanned(c, step, (x, cache), stacked, routers.given)
      return *carry, *along
    # Layers of one kind are traced and differentiated once, and called again;
    # XLA writes out every call.
    static = dict(static_argnums=(1, 2))
    body = jax.jit(rematerialised(c, step, **static), **static)
    carry, rows, routings = (x, cache), [], []
    layers = apart or layers_of(c, stacked, ids, layout)
    for layer, (like, weights) in enumerate(zip(first_alike(c), layers)):
      given = given_to(c, routers.given, layer)
      carry, (collected, routing) = body(
          carry, like, like in c.sparse_layers, np.int32(layer), weights, given
      )
      rows.append(collected)
      if routing is not None:
        routings.append(routing)
    return (
        *carry,
        stacked_rows(rows),
        stacked_rows(routings) if routings else None,
    )

  def unembed(self, x: Array, layout: Layout) -> Array:
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
  model, layout = merged(config, params), Layout(mesh, rules)
  if given is not None:
    given = jnp.swapaxes(layout.flat(given, None, None), 0, 1)
  routers = Routers(given, layout.flat(segment_ids) != 0)
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
      parts_apart(params),
  )
  x = rms_norm(config, x, model.final_norm)
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
  model, layout = merged(config, params), Layout(mesh, rules)
  logits = model.unembed(layout.flat(x, 'width'), layout)
  return layout.rows(logits, x.shape[:-1], 'vocab')


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
  model, layout = merged(config, params), Layout(mesh, rules)
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
      apart=parts_apart(params),
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
  """Decodes one token a slot: writes its key and value, returns its logits.

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
  model, layout = merged(config, params), Layout(mesh, rules)
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
      apart=parts_apart(params),
  )
  x = rms_norm(config, x, model.final_norm)
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
      platform=Layout(mesh, rules).platform,
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


def _row_attention(
    config: ModelConfig,
    shape: tuple[int, ...],
    visible: Visibility,
    layout: Layout,
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


def abstract_module(config: ModelConfig) -> tuple[nnx.GraphDef, nnx.State]:
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


def merged(config: ModelConfig, params: Params) -> Transformer:
  """The module around these parameters; layers apart stay shapes in it."""
  structure, state = abstract_module(config)
  stacked = isinstance(params['blocks'], dict)
  known = {n: x for n, x in params.items() if stacked or n != 'blocks'}
  return nnx.merge(structure, filled(state, known))


def parts_apart(params: Params) -> tuple[Params, ...] | None:
  """The layers' parameters, if `layers_apart` has been here."""
  blocks = params['blocks']
  return blocks if isinstance(blocks, tuple) else None


def filled(state: nnx.State, params: Params) -> nnx.State:
  """A state with these arrays in it, in place of its own."""
  whole = jax.tree.map(lambda leaf: leaf, state)
  nnx.replace_by_pure_dict(whole, params)
  return whole
