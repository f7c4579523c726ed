"""Sums, means and maxima over the sequences that share a row.

A row of T tokens holds several sequences; `segment_ids` [B, T] names them (1,
2, ... and 0 for padding). Every result is [B, T] again: each position gets the
number of its own sequence, so that packed and padded rows give the same. A
sequence is whole in its row, which `train/packing.py` sees to.
"""

from __future__ import annotations

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking


def total(x: Array, mask: Array, segment_ids: Array) -> Array:
  """Σ x over the positions of the own sequence that count, [B, T] float32.

  Args:
    x: [B, T]; masked positions may hold NaN or infinity.
    mask: [B, T] positive where a position counts.
    segment_ids: [B, T] from 0 to T.
  """
  return _by_row(jax.ops.segment_sum, masking.keep(x, mask), segment_ids)


def count(mask: Array, segment_ids: Array) -> Array:
  """Positions of the own sequence that count, [B, T] float32."""
  return total(jnp.ones(jnp.shape(mask)), mask, segment_ids)


def mean(x: Array, mask: Array, segment_ids: Array) -> Array:
  """Mean of x over them, [B, T] float32; 0 where none counts."""
  counts = jnp.maximum(count(mask, segment_ids), 1)
  return total(x, mask, segment_ids) / counts


def largest(x: Array, mask: Array, segment_ids: Array) -> Array:
  """Maximum of x over them, [B, T] float32; 0 where none counts."""
  kept = masking.keep(x, mask, -jnp.inf)
  highest = _by_row(jax.ops.segment_max, kept, segment_ids)
  return jnp.where(jnp.isneginf(highest), 0.0, highest)


def _by_row(reduce, x: Array, segment_ids: Array) -> Array:
  """Reduces each sequence and repeats the result at its positions."""
  segments = x.shape[1] + 1  # at most T sequences, and padding

  def row(x, ids):
    return reduce(x, ids, num_segments=segments)[ids]

  return jax.vmap(row)(x, jnp.asarray(segment_ids))
