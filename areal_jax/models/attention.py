"""Attention of grouped query heads, for packed rows and for a paged cache.

In flow queries, keys and values with RoPE applied and the queries scaled; out
flows the mixture of values. N query heads share K key/value heads in groups of
N / K, which are never repeated in memory. Scores, softmax and sums are float32
whatever the inputs are. A query that may see nothing gets a finite mixture.
With a cap, scores are cap · tanh(score / cap), as in Gemma 2
(https://arxiv.org/abs/2408.00118); a cap of 0 is none.

`attend_grouped` is the plain form for any backend and any mesh, and the one
that others are compared with.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

Array = jax.Array

# Finite, so that a row that is masked whole has no NaN in value or gradient.
MASKED = -1e30

# Cached tokens that `attend_behind` reads at a time.
_BLOCK = 128

# Above this many heads the unrolled loop costs more to compile than it saves.
_MOST_HEADS_UNROLLED = 16


def attend(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    *,
    platform: str,
    shards: int,
    cap: float = 0.0,
) -> Array:
  """Attention over rows, in the form that is fastest on the platform.

  On two CPU cores, gradients at 24 rows of 128 tokens took, for (N, K, H) =
  (4, 4, 24), (8, 4, 8), (8, 2, 32): 10.3, 27, 36 ms grouped and 4.7, 7.2, 16 ms
  by head, whose scores [B, T, T] are smaller and need no transposition.

  Args:
    q: [B, T, N, H] scaled queries.
    k: [B, C, K, H] keys.
    v: [B, C, K, H] values.
    mask: [B, T, C] True where a query may look.
    platform: 'cpu', 'gpu' or 'tpu'.
    shards: devices that the heads are cut over.
    cap: of the scores.

  Returns:
    [B, T, N, H] float32.
  """
  few = q.shape[2] <= _MOST_HEADS_UNROLLED
  if platform == 'cpu' and shards == 1 and few:
    return attend_by_head(q, k, v, mask, cap)
  return attend_grouped(q, k, v, mask, cap)


def attend_grouped(
    q: Array, k: Array, v: Array, mask: Array, cap: float = 0.0
) -> Array:
  """softmax(q kᵀ) v with the heads as batch axes; shapes as in `attend`."""
  b, t, n, h = q.shape
  q = q.reshape(b, t, k.shape[2], -1, h)
  scores = jnp.einsum(
      'btkrh,bckh->bkrtc', q, k, preferred_element_type=jnp.float32
  )
  scores = capped(scores, cap)
  weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED))
  mixed = jnp.einsum(
      'bkrtc,bckh->btkrh',
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
  )
  return mixed.reshape(b, t, n, h)


def attend_by_head(
    q: Array, k: Array, v: Array, mask: Array, cap: float = 0.0
) -> Array:
  """The same one head after another, normalised after the last product."""
  group = q.shape[2] // k.shape[2]
  heads = []
  for head in range(q.shape[2]):
    own, shared = q[:, :, head], head // group
    scores = jnp.einsum(
        'bth,bch->btc',
        own,
        k[:, :, shared],
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask, capped(scores, cap), MASKED)
    # A constant shift: the result does not depend on it.
    best = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - best)
    mixed = jnp.einsum(
        'btc,bch->bth',
        weights.astype(v.dtype),
        v[:, :, shared],
        preferred_element_type=jnp.float32,
    )
    heads.append(mixed / weights.sum(-1, keepdims=True))
  return jnp.stack(heads, 2)


def attend_behind(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    lengths: Array,
    *,
    window: Array | int | None = None,
    cap: float = 0.0,
) -> Array:
  """Attention of rows to themselves and to what is cached before them.

  The cache is read in blocks up to the longest row's length, so that one
  program serves any length at the cost of that length. The softmax over both
  parts is put together block by block: with m the largest score so far, sums of
  exp(score - m) and exp(score - m) v are kept and rescaled as m grows
  (https://arxiv.org/abs/1805.02867).

  Args:
    q: [B, T, N, H] scaled queries.
    k: [B, T, K, H] keys of the rows' own tokens.
    v: [B, T, K, H] values.
    mask: [B, T, T] True where a query may look in its own row.
    keys: [L, pages, page, K, H] the cache.
    values: [L, pages, page, K, H] the cache.
    layer: which L.
    page_table: [B, P] pages that hold a row's first P · page positions.
    lengths: [B] positions cached; the row's own begin behind them.
    window: positions that a query sees, its own included; None for all.
    cap: of the scores.

  Returns:
    [B, T, N, H] float32.
  """
  b, t, n, h = q.shape
  page, kv_heads = keys.shape[2:4]
  q = q.reshape(b, t, kv_heads, -1, h)

  def part(k, v, mask):
    """Largest score [B, K, R, T, 1], sum of exp and mixture [B, K, R, T, H]."""
    scores = jnp.einsum(
        'btkrh,bckh->bkrtc', q, k, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], capped(scores, cap), MASKED)
    best = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - best)
    mixed = jnp.einsum(
        'bkrtc,bckh->bkrth',
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return best, weights.sum(-1, keepdims=True), mixed

  columns = max(1, _BLOCK // page)
  block = columns * page
  spare = -page_table.shape[1] % columns
  page_table = jnp.pad(page_table, ((0, 0), (0, spare)))
  positions = lengths[:, None] + jnp.arange(t)

  def add(i, carry):
    at = jax.lax.dynamic_slice_in_dim(page_table, i * columns, columns, 1)
    places = i * block + jnp.arange(block)
    seen = (places < lengths[:, None])[:, None]
    if window is not None:
      seen &= places > positions[:, :, None] - window
    seen = jnp.broadcast_to(seen, (b, t, block))
    new = part(
        keys[layer, at].reshape(b, block, kv_heads, h),
        values[layer, at].reshape(b, block, kv_heads, h),
        seen,
    )
    best = jnp.maximum(carry[0], new[0])
    old_scale, new_scale = jnp.exp(carry[0] - best), jnp.exp(new[0] - best)
    return best, *(
        x * old_scale + y * new_scale for x, y in zip(carry[1:], new[1:])
    )

  first = 0
  if isinstance(window, int):
    # Rows that nothing is cached of do not hold the others back.
    begin = jnp.where(lengths > 0, lengths - window + 1, lengths.max())
    first = jnp.maximum(begin.min(), 0) // block
  blocks = (lengths.max() + block - 1) // block
  _, total, mixed = jax.lax.fori_loop(first, blocks, add, part(k, v, mask))
  mixed = jnp.moveaxis(mixed / total, 3, 1)  # [B, T, K, R, H]
  return mixed.reshape(b, t, n, h)


def attend_paged(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    platform: str,
    shards: int,
    window: Array | int | None = None,
    cap: float = 0.0,
) -> Array:
  """One query a slot over the slot's own pages, up to its position.

  A CPU reads the cache as it lies, [S, C, K · H]: queries get zeros for the
  heads that they do not look at, which multiplies the products by K and saves
  the transpositions of keys and values. On two busy cores 225 us instead of
  873 at (S, C, N, K, H) = (64, 80, 4, 2, 64); the gather is 40 of them.

  Args:
    q: [S, N, H] scaled queries.
    keys: [L, pages, page, K, H] the cache.
    values: [L, pages, page, K, H] the cache.
    layer: which L.
    page_table: [S, P] pages that hold a slot's first P · page positions.
    positions: [S] last logical position that a slot sees.
    platform: 'cpu', 'gpu' or 'tpu'.
    shards: devices that the heads are cut over.
    window: positions that it sees, that one included; None for all. No page
      outside of it is read if it is a plain number.
    cap: of the scores.

  Returns:
    [S, N, H] float32.
  """
  s, n, h = q.shape
  page, kv_heads = keys.shape[2:4]
  first = jnp.zeros_like(positions)
  if isinstance(window, int):
    # So many pages hold a window, wherever it begins.
    columns = (window - 2) // page + 2
    if columns < page_table.shape[1]:
      first = jnp.maximum(positions - window + 1, 0) // page
      read = first[:, None] + jnp.arange(columns)
      # Columns beyond the last are read again, and lie ahead of the query.
      page_table = jnp.take_along_axis(page_table, read, axis=1, mode='clip')
  context = page_table.shape[1] * page
  places = first[:, None] * page + jnp.arange(context)
  seen = places <= positions[:, None]
  if window is not None:
    seen &= places > positions[:, None] - window
  # One gather of layer and page: a slice of the layer first would copy it.
  k, v = keys[layer, page_table], values[layer, page_table]
  if platform == 'cpu' and shards == 1:
    group = n // kv_heads
    own = jnp.repeat(jnp.eye(kv_heads, dtype=q.dtype), group, axis=0)  # [N, K]
    q = (q[:, :, None] * own[:, :, None]).reshape(s, n, kv_heads * h)
    k, v = (x.reshape(s, context, kv_heads * h) for x in (k, v))
    # Many rows times few; the other way round takes 1.6 times as long. The
    # barrier keeps the small transposition out of the product.
    scores = jax.lax.optimization_barrier(
        jnp.einsum('scd,snd->scn', k, q, preferred_element_type=jnp.float32)
    )
    scores = capped(jnp.swapaxes(scores, 1, 2), cap)
    weights = jax.nn.softmax(jnp.where(seen[:, None], scores, MASKED))
    mixed = jnp.einsum(
        'snc,scd->snd',
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    mixed = mixed.reshape(s, kv_heads, group, kv_heads, h)
    return jnp.stack(
        [mixed[:, head, :, head] for head in range(kv_heads)], 1
    ).reshape(s, n, h)
  k, v = (x.reshape(s, context, kv_heads, h) for x in (k, v))
  scores = jnp.einsum(
      'skrh,sckh->skrc',
      q.reshape(s, kv_heads, -1, h),
      k,
      preferred_element_type=jnp.float32,
  )
  scores = capped(scores, cap)
  weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED))
  mixed = jnp.einsum(
      'skrc,sckh->skrh',
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
  )
  return mixed.reshape(s, n, h)


def capped(x: Array, cap: float) -> Array:
  """cap · tanh(x / cap), within (-cap, cap); x itself for a cap of 0."""
  return cap * jnp.tanh(x / cap) if cap else x
