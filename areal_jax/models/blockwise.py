"""Attention over long rows in plain XLA, its memory linear in their length.

Scores exist for one block of queries and one of keys at a time. Going over the
blocks of keys, a block of queries keeps its largest score so far, the sum of
exp(score - largest) and the mixture weighted by it, and rescales them as the
largest grows (https://arxiv.org/abs/1805.02867). Backward the scores are
computed again from the logarithm of that sum (https://arxiv.org/abs/2205.14135,
algorithm 4), so that what a layer keeps is its inputs, its output and one
number a query and head.

Blocks of keys that no query of a block sees are not computed: those ahead of
it, those before its window, those of other segments. How many those are is
known when the program runs, row by row.

For a cut over devices see `attention.attend`; nothing here knows of meshes.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array

# Score of a key that a query does not see: finite, or its differences are NaN.
MASKED = -1e30
# The largest score before any is known. Above MASKED by so much that exp of the
# difference is 0, so that a query that sees nothing ends with a sum of 0.
_NOTHING = 0.5 * MASKED

# A window that leaves nothing out; places are smaller.
NO_WINDOW = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Row:
  """Positions and segments of one row, or of several with axes before.

  Attributes:
    query_places: [T].
    key_places: [C].
    query_segments: [T].
    key_segments: [C].
    first_key: [T / block] first block of keys that a block of queries sees.
    end_key: [T / block] block behind the last.
    first_query: [C / block] the same of queries, for a block of keys.
    end_query: [C / block].
    window: scalar, tokens that a query sees.
  """

  query_places: Array
  key_places: Array
  query_segments: Array
  key_segments: Array
  first_key: Array
  end_key: Array
  first_query: Array
  end_query: Array
  window: Array


def attend(
    q: Array,
    k: Array,
    v: Array,
    query_places: Array,
    key_places: Array,
    query_segments: Array | None,
    key_segments: Array | None,
    *,
    window: Array | int | None = None,
    cap: float = 0.0,
    one_head_at_a_time: bool = False,
    blocks: tuple[int, int],
) -> Array:
  """softmax(q kᵀ) v by blocks; `visibility.py` says what a query sees.

  Args:
    q: [B, T, N, H] scaled queries.
    k: [B, C, K, H] keys.
    v: [B, C, K, H] values.
    query_places: [T] int32.
    key_places: [C] int32.
    query_segments: [B, T] int32, or None.
    key_segments: [B, C] int32, or None.
    window: tokens that a query sees, its own included; None for all.
    cap: of the scores.
    one_head_at_a_time: whether key/value heads are a loop too. XLA's products
      of two dimensions are faster on a CPU, others want many heads at once.
    blocks: queries and keys of a block.

  Returns:
    [B, T, N, H] float32; 0 for a query that sees nothing.
  """
  b, t, n, h = q.shape
  c, kv_heads = k.shape[1:3]
  if query_segments is None:
    query_segments = jnp.ones((b, t), jnp.int32)
    key_segments = jnp.ones((b, c), jnp.int32)
  many, few = (min(size, x) for size, x in zip(blocks, (t, c)))
  # Padding is of segment 0, which sees nothing and is seen by nobody.
  more_t, more_c = -t % many, -c % few
  place = lambda x, more: jnp.pad(jnp.asarray(x, jnp.int32), (0, more), 'edge')
  segment = lambda x, more: jnp.pad(x, ((0, 0), (0, more)))
  rows = _rows(
      place(query_places, more_t),
      place(key_places, more_c),
      segment(query_segments, more_t),
      segment(key_segments, more_c),
      NO_WINDOW if window is None else window,
      (many, few),
  )

  def by_head(x, more):  # [B, T, heads, H] -> [B, K, heads / K, T, H]
    x = jnp.pad(x, ((0, 0), (0, more), (0, 0), (0, 0)))
    x = jnp.moveaxis(x, 1, 2)
    return x.reshape(b, kv_heads, -1, *x.shape[2:])

  static = _Static(cap, many, few, one_head_at_a_time)
  mixed = _attend(
      static,
      by_head(q, more_t),
      by_head(k, more_c)[:, :, 0],
      by_head(v, more_c)[:, :, 0],
      rows,
  )
  mixed = mixed.reshape(b, n, -1, h)[:, :, :t]
  return jnp.moveaxis(mixed, 1, 2)


def _rows(
    query_places: Array,
    key_places: Array,
    query_segments: Array,
    key_segments: Array,
    window: Array | int,
    blocks: tuple[int, int],
) -> _Row:
  """Finds the blocks that are needed, row by row."""
  many, few = blocks
  b = len(query_segments)
  queries = query_places.reshape(-1, many)
  keys = key_places.reshape(-1, few)
  needed = keys.min(1)[None] <= queries.max(1)[:, None]
  needed &= keys.max(1)[None] > queries.min(1)[:, None] - window
  lowest, highest = _ends(query_segments.reshape(b, -1, many))
  first, last = _ends(key_segments.reshape(b, -1, few))
  # Of two ranges of segments that meet there may be no segment in common; the
  # mask within a block says so.
  overlap = first[:, None] <= highest[:, :, None]
  overlap &= last[:, None] >= lowest[:, :, None]
  needed = needed[None] & overlap  # [B, T / block, C / block]
  first_key, end_key = _span(needed)
  first_query, end_query = _span(jnp.swapaxes(needed, 1, 2))
  whole = lambda x: jnp.broadcast_to(x, (b, *jnp.shape(x)))
  return _Row(
      whole(query_places),
      whole(key_places),
      query_segments,
      key_segments,
      first_key,
      end_key,
      first_query,
      end_query,
      whole(jnp.asarray(window, jnp.int32)),
  )


def _ends(segments: Array) -> tuple[Array, Array]:
  """Lowest and highest segment of blocks [B, blocks, block], padding aside."""
  lowest = jnp.where(segments == 0, NO_WINDOW, segments).min(-1)
  return lowest, segments.max(-1)


def _span(needed: Array) -> tuple[Array, Array]:
  """Returns the first True of the last axis and the end behind the last one."""
  count = needed.shape[-1]
  places = jnp.arange(count)
  first = jnp.where(needed, places, count).min(-1)
  end = jnp.where(needed, places + 1, 0).max(-1)
  return jnp.minimum(first, end), end


@dataclasses.dataclass(frozen=True)
class _Static:
  """The static settings of a program."""

  cap: float
  many: int  # queries of a block
  few: int  # keys of a block
  one_head_at_a_time: bool

  def over_heads(self, run):
    """`run` for each head of arrays [K, ...]."""
    if self.one_head_at_a_time:
      return lambda *heads: jax.lax.map(lambda xs: run(*xs), heads)
    return jax.vmap(run)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, q: Array, k: Array, v: Array, rows: _Row) -> Array:
  """[B, K, R, T, H] float32 of q like it and k, v [B, K, C, H]."""
  return _forward(static, q, k, v, rows)[0]


def _forward(static, q, k, v, rows):
  def of_row(inputs):
    q, k, v, row = inputs
    run = functools.partial(_forward_head, static, row)
    return static.over_heads(run)(q, k, v)

  return jax.lax.map(of_row, (q, k, v, rows))


def _attend_forward(static, q, k, v, rows):
  mixed, total = _forward(static, q, k, v, rows)
  return mixed, (q, k, v, rows, mixed, total)


def _attend_backward(static, kept, d_mixed):
  q, k, v, rows, mixed, total = kept
  # d score = p (d p - sum p d p), and that sum is the product with the mixture.
  delta = (mixed * d_mixed).sum(-1)

  def of_row(inputs):
    *arrays, row = inputs
    run = functools.partial(_backward_head, static, row)
    return static.over_heads(run)(*arrays)

  arrays = (q, k, v, total, delta, d_mixed.astype(v.dtype))
  dq, dk, dv = jax.lax.map(of_row, (*arrays, rows))
  # Integers have no gradient.
  none = jax.tree.map(lambda x: np.zeros(x.shape, jax.dtypes.float0), rows)
  return dq.astype(q.dtype), dk.astype(k.dtype), dv.astype(v.dtype), none


_attend.defvjp(_attend_forward, _attend_backward)


def _forward_head(static, row, q, k, v):
  """Mixture [R, T, H] and log Σ exp(score) [R, T] of q [R, T, H], k [C, H]."""
  r, t, h = q.shape
  many, few = static.many, static.few

  def of_queries(i):
    queries = _cut(q, i, many, 1).reshape(-1, h)

    def add(j, carry):
      best, total, mixed = carry
      scores, _ = _scores(static, row, queries, _cut(k, j, few), i, j)
      new = jnp.maximum(best, scores.max(-1))
      weights = jnp.exp(scores - new[..., None])
      scale = jnp.exp(best - new)
      more = _product(weights.reshape(-1, few).astype(v.dtype), _cut(v, j, few))
      return (
          new,
          total * scale + weights.sum(-1),
          mixed * scale[..., None] + more.reshape(mixed.shape),
      )

    start = (
        jnp.full((r, many), _NOTHING, jnp.float32),
        jnp.zeros((r, many), jnp.float32),
        jnp.zeros((r, many, h), jnp.float32),
    )
    best, total, mixed = jax.lax.fori_loop(
        row.first_key[i], row.end_key[i], add, start
    )
    total = jnp.where(total == 0, 1, total)  # of a query that sees nothing
    return mixed / total[..., None], best + jnp.log(total)

  mixed, logs = jax.lax.map(of_queries, jnp.arange(t // many))
  # [T / block, R, block, ...] -> [R, T, ...]
  return (
      jnp.moveaxis(mixed, 0, 1).reshape(r, t, h),
      jnp.moveaxis(logs, 0, 1).reshape(r, t),
  )


def _backward_head(static, row, q, k, v, total, delta, d_mixed):
  """Gradients of q [R, T, H], k and v [C, H], float32."""
  r, t, h = q.shape
  many, few = static.many, static.few

  def of_keys(dq, j):
    keys, values = _cut(k, j, few), _cut(v, j, few)

    def add(i, carry):
      dq, dk, dv = carry
      queries = _cut(q, i, many, 1).reshape(-1, h)
      d_out = _cut(d_mixed, i, many, 1).reshape(-1, h)
      scores, slope = _scores(static, row, queries, keys, i, j)
      weights = jnp.exp(scores - _cut(total, i, many, 1)[..., None])
      d_weights = _product(d_out, values.T).reshape(weights.shape)
      d_scores = weights * (d_weights - _cut(delta, i, many, 1)[..., None])
      d_scores = (d_scores * slope).reshape(-1, few).astype(q.dtype)
      weights = weights.reshape(-1, few).astype(v.dtype)
      dk += _product(d_scores.T, queries)
      dv += _product(weights.T, d_out)
      more = _product(d_scores, keys).reshape(r, many, h)
      more += _cut(dq, i, many, 1)
      dq = jax.lax.dynamic_update_slice_in_dim(dq, more, i * many, 1)
      return dq, dk, dv

    start = (dq, *jnp.zeros((2, few, h), jnp.float32))
    dq, dk, dv = jax.lax.fori_loop(
        row.first_query[j], row.end_query[j], add, start
    )
    return dq, (dk, dv)

  start = jnp.zeros((r, t, h), jnp.float32)
  dq, (dk, dv) = jax.lax.scan(of_keys, start, jnp.arange(len(k) // few))
  return dq, dk.reshape(-1, h), dv.reshape(-1, h)


def _scores(static, row, queries, keys, i, j):
  """Scores [R, block, block] of block i of queries and j of keys.

  And the derivative by the score before the cap, 1 without one.
  """
  many, few, cap = static.many, static.few, static.cap
  scores = _product(queries, keys.T).reshape(-1, many, few)
  slope = 1.0
  if cap:
    bent = jnp.tanh(scores / cap)
    scores, slope = cap * bent, 1 - jnp.square(bent)
  places = _cut(row.query_places, i, many)[:, None]
  others = _cut(row.key_places, j, few)
  segments = _cut(row.key_segments, j, few)
  seen = (others <= places) & (others > places - row.window) & (segments != 0)
  seen &= segments == _cut(row.query_segments, i, many)[:, None]
  return jnp.where(seen, scores, MASKED), slope


def _product(a: Array, b: Array) -> Array:
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)


def _cut(x: Array, index: Array, size: int, axis: int = 0) -> Array:
  return jax.lax.dynamic_slice_in_dim(x, index * size, size, axis)
