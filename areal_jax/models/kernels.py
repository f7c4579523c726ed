"""Attention in kernels that are written for one kind of device.

Wrapped here, behind the shapes that `attention.py` speaks in: for TPUs the
splash kernel that jax ships, for GPUs its fused attention with segment ids and
cuDNN's. Decode over pages has kernels of ours. Those of jax 0.10.2 want the
heads of a cache first, which writing and sharing pages does not, or, the ragged
one for TPUs, run in neither of its interpreters, so that nothing here could
compare them with anything. What each can do stands in `forms.py`, which
chooses.

On a CPU kernels are interpreted, which is slow and for tests. All of it works
on what one device has; `attention.py` cuts.

Not covered: tiles are chosen by shape and not tuned by measurement, for want of
the devices.
"""

from __future__ import annotations

import functools
import importlib
import math
from typing import Any

import jax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plgpu
from jax.experimental.pallas.ops.gpu import attention as gpu_attention
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
)
import jax.numpy as jnp
import numpy as np

Array = jax.Array
Mesh = jax.sharding.Mesh
P = jax.sharding.PartitionSpec

_NOTHING = -1e30  # finite, or differences are NaN

# Of the kernel for TPUs: tokens of one product, and the most pages that they
# are copied from, each of which is an input.
_TPU_TOKENS = 256
_TPU_PAGES = 16
_LANES = 128

# Of the kernel for GPUs: tokens of one product, and those that one program
# walks, so that few slots of long sequences still fill the device.
_GPU_TOKENS = 64
_GPU_TOKENS_OF_A_PROGRAM = 1024
_GPU_ROWS = 16  # fewest of a product

# Of grouped products: tokens and columns of one product.
_GROUPED_TILE = 512
# Its package gives a function the name of the module.
_GROUPED = importlib.import_module(
    'jax.experimental.pallas.ops.tpu.megablox.gmm'
)


# Experts.


def grouped_outer(
    x: Array, y: Array, sizes: Array, *, interpret: bool
) -> Array:
  """Σ x_m y_mᵀ over the rows of each group, by jax's kernel for TPUs.

  Args:
    x: [M, A] rows, those of one group side by side.
    y: [M, B].
    sizes: [E] int32 rows of each group; what lies behind them is in none.
    interpret: whether to run without a TPU.

  Returns:
    [E, A, B] float32.
  """
  rows = -(-len(x) // _LANES) * _LANES  # to be cut into equal tiles
  x, y = (jnp.pad(each, ((0, rows - len(each)), (0, 0))) for each in (x, y))
  tokens = math.gcd(rows, _GROUPED_TILE)
  tile = tokens, *(min(_GROUPED_TILE, each.shape[1]) for each in (x, y))
  return _GROUPED.tgmm(x.T, y, sizes, jnp.float32, tile, interpret=interpret)


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
  seen = (None if window is None else window - 1, 0)
  mask = _Mask((queries, keys), seen, offset=0, shard_count=time_parts)
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
      splash_attention_mask.MultiHeadMask([mask] * heads),
      block_sizes=sizes,
      head_shards=1,
      q_seq_shards=time_parts,
      attn_logits_soft_cap=cap or None,
      interpret=interpret,
  )


class _Mask(splash_attention_mask.LocalMask):
  """Keys up to the query, within its window if there is one.

  The kernel is built by looking at every block of the mask. Most are all of one
  kind, which is said here without computing their numbers: at 32k tokens those
  are 3 · 10⁹.
  """

  def __getitem__(self, index: tuple[slice, slice]) -> np.ndarray:
    queries, keys = (range(n)[cut] for n, cut in zip(self.shape, index))
    nearest, farthest = queries[0] - keys[-1], queries[-1] - keys[0]
    back = self.shape[1] if self.window_size[0] is None else self.window_size[0]
    if nearest >= 0 and farthest <= back:
      return np.broadcast_to(True, (len(queries), len(keys)))
    if farthest < 0 or nearest > back:
      return np.broadcast_to(False, (len(queries), len(keys)))
    return super().__getitem__(index)


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


def attend_pages_by_mosaic(
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
  """Attends with one query a slot, [S, N, H] float32; see `attend_paged`.

  A step of the grid has the queries of a slot and a block of its pages, which
  are copied while the step before computes. The steps are a list of the blocks
  that slots see, made here, so that a slot costs by its own length and not by
  the longest. Queries have zeros for the heads that they do not look at, as in
  `attention.attend_side_by_side`: products of K times the size, on units that
  would wait for the cache anyway, and no cutting of heads out of pages.

  Args:
    keys: [L, pages, page, K · H] the cache.
    values: [L, pages, page, K · H].
  """
  s, n, h = q.shape
  layers, pages, page, wide = keys.shape
  kv_heads = wide // h
  group = n // kv_heads
  own = jnp.repeat(jnp.eye(kv_heads, dtype=keys.dtype), group, axis=0)  # [N, K]
  q = q.astype(keys.dtype)[:, :, None] * own[:, :, None]
  q = q.reshape(s, n, wide)

  each = min(max(1, _TPU_TOKENS // page), _TPU_PAGES, page_table.shape[1])
  tokens = each * page
  table = (page_table + layer * pages).astype(jnp.int32)
  last = positions.astype(jnp.int32)
  first = jnp.zeros_like(last)
  if window is not None:
    first = jnp.maximum(last - window + 1, 0)
  begins = first // tokens
  counts = last // tokens - begins + 1
  most = s * -(-page_table.shape[1] // each)
  slots = jnp.repeat(
      jnp.arange(s, dtype=jnp.int32), counts, total_repeat_length=most
  )
  ends = jnp.cumsum(counts).astype(jnp.int32)
  steps = jnp.arange(most, dtype=jnp.int32)
  blocks = steps - (ends - counts)[slots] + begins[slots]

  def page_of(i):
    def index(step, slots, blocks, table, first, last):
      slot = slots[step]
      # What the slot does not see is another copy of what it does.
      column = jnp.clip(
          blocks[step] * each + i, first[slot] // page, last[slot] // page
      )
      return table[slot, column], 0, 0

    return pl.BlockSpec((None, page, wide), index)

  row = pl.BlockSpec(
      (None, n, wide), lambda step, slots, *_: (slots[step], 0, 0)
  )
  cache = [x.reshape(layers * pages, page, wide) for x in (keys, values)]
  mixed = pl.pallas_call(
      functools.partial(_block_of_pages, page=page, each=each, cap=cap),
      grid_spec=pltpu.PrefetchScalarGridSpec(
          num_scalar_prefetch=5,
          grid=(ends[-1],),
          in_specs=[row, *[page_of(i) for i in range(each)] * 2],
          out_specs=row,
          scratch_shapes=[
              pltpu.VMEM((n, _LANES), jnp.float32),
              pltpu.VMEM((n, _LANES), jnp.float32),
              pltpu.VMEM((n, wide), jnp.float32),
          ],
      ),
      out_shape=jax.ShapeDtypeStruct((s, n, wide), jnp.float32),
      interpret=interpret,
      name='attend_pages',
  )(slots, blocks, table, first, last, q, *cache[:1] * each, *cache[1:] * each)
  mixed = mixed.reshape(s, kv_heads, group, kv_heads, h)
  return jnp.stack(
      [mixed[:, head, :, head] for head in range(kv_heads)], 1
  ).reshape(s, n, h)


def _block_of_pages(
    slots_ref,  # [steps] slot of each step
    blocks_ref,  # [steps] block of pages of each step
    table_ref,  # [S, P]
    first_ref,  # [S] first position to be seen
    last_ref,  # [S]
    q_ref,  # [N, K · H]
    *refs,  # pages of keys and of values [page, K · H]; the rest is named below
    page: int,
    each: int,
    cap: float,
):
  """Adds a block to a slot's mixture; the softmax is put together as ever."""
  del table_ref
  keys, values = refs[:each], refs[each : 2 * each]
  mixed_ref, best_ref, total_ref, sum_ref = refs[2 * each :]
  step = pl.program_id(0)
  slot, tokens = slots_ref[step], each * page
  begin = blocks_ref[step] * tokens
  first, last = first_ref[slot], last_ref[slot]

  @pl.when(begin <= first)
  def _():
    best_ref[...] = jnp.full(best_ref.shape, 0.5 * _NOTHING, jnp.float32)
    total_ref[...] = jnp.zeros(total_ref.shape, jnp.float32)
    sum_ref[...] = jnp.zeros(sum_ref.shape, jnp.float32)

  k = jnp.concatenate([ref[...] for ref in keys], 0)
  v = jnp.concatenate([ref[...] for ref in values], 0)
  scores = jax.lax.dot_general(
      q_ref[...],
      k,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
  )
  if cap:
    scores = cap * jnp.tanh(scores / cap)
  places = begin + jax.lax.broadcasted_iota(jnp.int32, scores.shape, 1)
  seen = (places >= first) & (places <= last)
  scores = jnp.where(seen, scores, _NOTHING)
  best = best_ref[:, :1]
  new = jnp.maximum(best, scores.max(1, keepdims=True))
  weights = jnp.exp(scores - new)
  scale = jnp.exp(best - new)
  total = total_ref[:, :1] * scale + weights.sum(1, keepdims=True)
  mixed = sum_ref[...] * scale + jnp.dot(
      weights.astype(v.dtype), v, preferred_element_type=jnp.float32
  )
  best_ref[...] = jnp.broadcast_to(new, best_ref.shape)
  total_ref[...] = jnp.broadcast_to(total, total_ref.shape)
  sum_ref[...] = mixed

  @pl.when(begin + tokens > last)
  def _():
    mixed_ref[...] = mixed / total


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
  """Attends with one query a slot, [S, N, H] float32; see `attend_paged`.

  A program has the queries of one key/value head of a slot and walks a stretch
  of its pages; the stretches' mixtures are put together behind it, each
  weighted by its sum of exp(score).
  """
  s, n, h = q.shape
  layers, pages, page = keys.shape[:3]
  kv_heads = math.prod(keys.shape[3:]) // h
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


PAGES = dict(mosaic=attend_pages_by_mosaic, triton=attend_pages_by_triton)
