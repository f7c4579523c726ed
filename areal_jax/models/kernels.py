"""Attention in kernels that are written for one kind of device.

Wrapped here, behind the shapes that `attention.py` speaks in: for TPUs the
splash and ragged paged attention kernels that jax ships; for GPUs jax's fused
attention with segment ids and cuDNN's, and a kernel of ours for decode over
pages, since those that are shipped want a cache laid out with the heads first.
What each can do stands in `forms.py`, which chooses.

On a CPU kernels are interpreted, which is slow and for tests. All of it works
on what one device has; `attention.py` cuts.

Not covered: tiles are chosen by shape and not tuned by measurement, for want of
the devices.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu.ragged_paged_attention import (
    kernel as ragged,
)
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
import jax.numpy as jnp

Array = jax.Array
Mesh = jax.sharding.Mesh
P = jax.sharding.PartitionSpec

_NOTHING = -1e30  # finite, or differences are NaN

# Tokens that a kernel over pages has in fast memory at once. In the ragged
# kernel each page is a copy of its own, and more than 16 spill scalars.
_TOKENS_OF_A_BLOCK = 512
_PAGES_OF_A_BLOCK = 16
# Its queries of a block, each of another slot, share the products with every
# slot's keys: few waste little, and 8 fill the rows of a register.
_QUERIES_OF_A_BLOCK = 8

# Of the kernel for GPUs: tokens of one product, and those that one program
# walks, so that few slots of long sequences still fill the device.
_GPU_TOKENS = 64
_GPU_TOKENS_OF_A_PROGRAM = 1024
_GPU_ROWS = 16  # fewest of a product


# Rows.


def splash(
    *,
    heads: int,
    queries: int,
    keys: int,
    window: int | None,
    cap: float,
    mesh: Mesh | None,
    time: str | None,
    time_parts: int,
    interpret: bool,
) -> tuple[Any, Any]:
  """The kernel for rows of these lengths, and how it is cut over a mesh.

  It holds which blocks a block of queries needs, so that it is cut where they
  are.

  Args:
    heads: N of one device.
    queries: T, before it is cut.
    keys: C; queries and keys stand at places from 0 on.
    window: tokens that a query sees, its own included; None for all.
    cap: of the scores.
    mesh: None for one device.
    time: mesh axis that T is cut over, if any.
    time_parts: devices that T is cut over.
    interpret: whether to run without a TPU.

  Returns:
    What `attend_by_splash` takes, and its `PartitionSpec`s.
  """
  # What the kernel holds must be arrays and no part of the program that is
  # being traced, to be built once for all layers.
  with jax.ensure_compile_time_eval():
    kernel = _splash(heads, queries, keys, window, cap, time_parts, interpret)
  if mesh is None:
    return kernel, P()
  cut = jax.sharding.NamedSharding(mesh, P(None, time))
  return kernel, kernel.manual_sharding_spec(cut)


@functools.lru_cache(maxsize=32)
def _splash(heads, queries, keys, window, cap, time_parts, interpret):
  masks, shape = splash_attention_mask, (queries, keys)
  if window is None:
    mask = masks.CausalMask(shape, shard_count=time_parts)
  else:
    seen = (window - 1, 0)
    mask = masks.LocalMask(shape, seen, offset=0, shard_count=time_parts)
  many, few = _tile(queries // time_parts), _tile(keys)
  # Gradients of queries by a kernel of their own: together with those of keys
  # they would take memory for each block of keys.
  sizes = splash_attention_kernel.BlockSizes(
      block_q=many,
      block_kv=few,
      block_q_dkv=many,
      block_kv_dkv=few,
      block_q_dq=many,
      block_kv_dq=few,
  )
  return splash_attention_kernel.make_splash_mha(
      masks.MultiHeadMask([mask] * heads),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=time_parts,
      attn_logits_soft_cap=cap or None,
      interpret=interpret,
  )


def _tile(length: int) -> int:
  """The largest block of 512, 256 or 128 that divides a length."""
  return next(size for size in (512, 256, 128) if length % size == 0)


def attend_by_splash(
    kernel: Any,
    q: Array,
    k: Array,
    v: Array,
    query_segments: Array | None,
    key_segments: Array | None,
) -> Array:
  """Rows [B, T, N, H] in q's dtype; padding sees the padding before it."""
  q, k, v = (jnp.moveaxis(x, 2, 1) for x in (q, k, v))
  segments = None
  if query_segments is not None:
    segments = splash_attention_kernel.SegmentIds(query_segments, key_segments)
  return jnp.moveaxis(jax.vmap(kernel)(q, k, v, segments), 1, 2)


def attend_by_triton(
    q: Array, k: Array, v: Array, segments: Array | None, *, interpret: bool
) -> Array:
  """Whole rows [B, T, N, H] in q's dtype; padding sees padding."""
  group = q.shape[2] // k.shape[2]
  # The kernel has as many heads of keys as of queries.
  k, v = (jnp.repeat(x, group, axis=2) for x in (k, v))
  return gpu_attention.mha(
      q, k, v, segments, sm_scale=1.0, causal=True, interpret=interpret
  )


def attend_by_cudnn(q: Array, k: Array, v: Array, window: int | None) -> Array:
  """Whole rows [B, T, N, H] of one sequence each, in q's dtype."""
  return jax.nn.dot_product_attention(
      q,
      k,
      v,
      scale=1.0,
      is_causal=True,
      local_window_size=None if window is None else (window - 1, 0),
      implementation='cudnn',
  )


# Pages.


def attend_pages_by_ragged(
    q: Array,
    keys: Array,
    values: None,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    window: int | None,
    cap: float,
    interpret: bool,
) -> Array:
  """One query a slot, [S, N, H] in q's dtype; see `attention.attend_paged`.

  The kernel takes the pages of one layer. Those of all layers in one row are
  the same array, with other numbers for the pages.
  """
  del values  # `keys` has them
  slots, (layers, pages, page) = len(q), keys.shape[:3]
  table = (page_table + layer * pages).astype(jnp.int32)
  columns = max(1, _TOKENS_OF_A_BLOCK // page)
  emulated = pltpu.force_tpu_interpret_mode() if interpret else None
  with emulated or contextlib.nullcontext():
    return ragged.ragged_paged_attention(
        q.astype(keys.dtype),
        keys.reshape(layers * pages, *keys.shape[2:]),
        (positions + 1).astype(jnp.int32),
        table,
        jnp.arange(slots + 1, dtype=jnp.int32),
        jnp.full(1, slots, jnp.int32),
        sliding_window=window,
        soft_cap=cap or None,
        num_kv_pages_per_block=min(
            columns, _PAGES_OF_A_BLOCK, page_table.shape[1]
        ),
        num_queries_per_block=min(_QUERIES_OF_A_BLOCK, slots),
    )


def attend_pages_by_triton(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    window: Array | int | None,
    cap: float,
    interpret: bool,
) -> Array:
  """One query a slot, [S, N, H] float32; see `attention.attend_paged`.

  A program has the queries of one key/value head of a slot and walks a stretch
  of its pages; the stretches' mixtures are put together behind it, each
  weighted by its sum of exp(score).
  """
  s, n, h = q.shape
  layers, pages, page, kv_heads = keys.shape[:4]
  group = n // kv_heads
  rows = max(_GPU_ROWS, pl.next_power_of_2(group))
  q = q.reshape(s, kv_heads, group, h).astype(keys.dtype)
  q = jnp.pad(q, ((0, 0), (0, 0), (0, rows - group), (0, 0)))
  step = max(1, _GPU_TOKENS // page)  # pages of one product
  columns = max(step, _GPU_TOKENS_OF_A_PROGRAM // page // step * step)
  columns = min(columns, -(-page_table.shape[1] // step) * step)
  spare = -page_table.shape[1] % columns
  table = jnp.pad(page_table, ((0, 0), (0, spare)))
  parts = table.shape[1] // columns
  table = (table + layer * pages).astype(jnp.int32).reshape(s, parts, columns)
  last = positions.astype(jnp.int32)[:, None]
  first = jnp.zeros_like(last)
  if window is not None:
    first = jnp.maximum(last - window + 1, 0)

  whole = lambda x: x.reshape(layers * pages, page, kv_heads, h)
  cache = pl.BlockSpec(
      (layers * pages, page, None, h), lambda s, k, i: (0, 0, k, 0)
  )
  bound = pl.BlockSpec((None, 1), lambda s, k, i: (s, 0))
  number = pl.BlockSpec((None, None, None, rows), lambda s, k, i: (s, k, i, 0))
  stretches = (s, kv_heads, parts, rows)
  mixed, total, best = pl.pallas_call(
      functools.partial(_stretch, page=page, step=step, cap=cap),
      grid=(s, kv_heads, parts),
      in_specs=[
          pl.BlockSpec((None, None, rows, h), lambda s, k, i: (s, k, 0, 0)),
          cache,
          cache,
          pl.BlockSpec((None, None, columns), lambda s, k, i: (s, i, 0)),
          bound,
          bound,
      ],
      out_specs=[
          pl.BlockSpec(
              (None, None, None, rows, h), lambda s, k, i: (s, k, i, 0, 0)
          ),
          number,
          number,
      ],
      out_shape=[
          jax.ShapeDtypeStruct((*stretches, h), jnp.float32),
          jax.ShapeDtypeStruct(stretches, jnp.float32),
          jax.ShapeDtypeStruct(stretches, jnp.float32),
      ],
      compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
      interpret=interpret,
      name='attend_pages',
  )(q, whole(keys), whole(values), table, first, last)
  scale = jnp.exp(best - best.max(2, keepdims=True))
  mixed = (mixed * scale[..., None]).sum(2) / (total * scale).sum(2)[..., None]
  return mixed[:, :, :group].reshape(s, n, h)


def _stretch(
    q_ref,  # [rows, H]
    k_ref,  # [pages, page, H]
    v_ref,  # [pages, page, H]
    table_ref,  # [columns]
    first_ref,  # [1] first position to be seen
    last_ref,  # [1]
    mixed_ref,  # [rows, H]
    total_ref,  # [rows]
    best_ref,  # [rows]
    *,
    page: int,
    step: int,
    cap: float,
):
  """A stretch of pages: Σ exp(score - best) v, Σ exp(score - best), best."""
  rows, h = q_ref.shape
  columns = table_ref.shape[0]
  tokens = step * page
  begin = pl.program_id(2) * (columns * page)
  first, last = first_ref[0], last_ref[0]
  q = q_ref[...]

  def add(i, carry):
    best, total, mixed = carry
    at = table_ref[pl.ds(i * step, step)]
    k = k_ref[at].reshape(tokens, h)
    v = v_ref[at].reshape(tokens, h)
    scores = plgpu.dot(q, k.T).astype(jnp.float32)
    if cap:
      scores = cap * jnp.tanh(scores / cap)
    places = begin + i * tokens + jnp.arange(tokens)
    seen = (places >= first) & (places <= last)
    scores = jnp.where(seen[None, :], scores, _NOTHING)
    new = jnp.maximum(best, scores.max(-1))
    weights = jnp.exp(scores - new[:, None])
    scale = jnp.exp(best - new)
    mixed = mixed * scale[:, None] + plgpu.dot(weights.astype(v.dtype), v)
    return new, total * scale + weights.sum(-1), mixed

  start = (
      # Above what is not seen, or its weights would be 1.
      jnp.full((rows,), 0.5 * _NOTHING, jnp.float32),
      jnp.zeros((rows,), jnp.float32),
      jnp.zeros((rows, h), jnp.float32),
  )
  steps = columns // step
  begins = jnp.clip((first - begin) // tokens, 0, steps)
  ends = jnp.clip((last - begin) // tokens + 1, 0, steps)
  best, total, mixed = jax.lax.fori_loop(begins, ends, add, start)
  mixed_ref[...] = mixed
  total_ref[...] = total
  best_ref[...] = best


PAGES = dict(ragged=attend_pages_by_ragged, triton=attend_pages_by_triton)
