"""Choosing tokens: keyed, position by position, with their log-probability.

A token's key is a fold of (seed, purpose, draw_index, sample, turn, branch,
position) and nothing else: not the slot, the neighbours, the attempt or the
version of the weights. So a retried or interrupted request continues the same
stream, and what a request says does not depend on who shares the batch.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.types import Request

Array = jax.Array

# Also the value that impossible tokens get: finite, so that no 0 * inf can
# arise, and so low that exp of it is exactly 0 in float32.
IMPOSSIBLE = -1e30


def stream_words(request: Request) -> np.ndarray:
  """[6] uint32: what names the random stream of a request."""
  words = (
      request.sampling.seed,
      int(request.purpose),
      request.draw_index,
      request.sample,
      request.turn,
      request.branch,
  )
  return np.asarray([w % 2**32 for w in words], np.uint32)


def stream_key(words: Array) -> Array:
  """Key data [2] uint32 of the stream that `words` [6] uint32 names."""
  key = jax.random.key(words[0])
  for word in words[1:]:
    key = jax.random.fold_in(key, word)
  return jax.random.key_data(key)


def sample(
    logits: Array,
    streams: Array,
    positions: Array,
    *,
    temperature: Array,
    top_k: Array,
    top_p: Array,
    forbidden: Array,
) -> tuple[Array, Array]:
  """Draws one token a slot and its log-probability under what was drawn from.

  The distribution is softmax(logits / temperature) restricted to the top-k and
  top-p sets and to tokens that are not forbidden; the draw is the argmax of
  the perturbed logits (Gumbel-max, https://arxiv.org/abs/1611.00712).
  Temperature 0 takes the largest logit and reports its log-probability at
  temperature 1.

  Args:
    logits: [S, V] float32.
    streams: [S, 2] uint32, from `stream_key`.
    positions: [S] int32, position in the sequence of the token to be drawn.
    temperature: [S] float32.
    top_k: [S] int32, 0 is off.
    top_p: [S] float32, 1 is off.
    forbidden: [S, V] bool, tokens that may not be drawn.

  Returns:
    tokens [S] int32 and log-probabilities [S] float32 in nats.
  """
  greedy = temperature <= 0
  scaled = logits / jnp.where(greedy, 1.0, temperature)[:, None]
  scaled = jnp.where(forbidden, IMPOSSIBLE, scaled)
  narrowed = (top_k > 0) | (top_p < 1)
  scaled = jax.lax.cond(
      narrowed.any(), lambda: _narrow(scaled, top_k, top_p), lambda: scaled
  )

  def noise(stream, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(stream), position)
    return jax.random.gumbel(key, logits.shape[1:], jnp.float32)

  perturbed = scaled + jnp.where(
      greedy[:, None], 0.0, jax.vmap(noise)(streams, positions)
  )
  tokens = jnp.argmax(perturbed, axis=-1).astype(jnp.int32)
  chosen = jnp.take_along_axis(scaled, tokens[:, None], axis=-1)[:, 0]
  logps = chosen - jax.nn.logsumexp(scaled, axis=-1)
  return tokens, logps


def _narrow(scaled: Array, top_k: Array, top_p: Array) -> Array:
  """Makes tokens outside the top-k and top-p sets impossible. [S, V]."""
  ordered = jnp.sort(scaled, axis=-1, descending=True)
  size = scaled.shape[-1]
  kth = jnp.clip(jnp.where(top_k > 0, top_k, size), 1, size) - 1
  floor_k = jnp.take_along_axis(ordered, kth[:, None], axis=-1)
  # Top-p is taken inside the top-k set, renormalised, as is usual.
  inside = jnp.where(ordered >= floor_k, ordered, IMPOSSIBLE)
  mass = jnp.cumsum(jax.nn.softmax(inside, axis=-1), axis=-1)
  before = mass - jax.nn.softmax(inside, axis=-1)
  kept = before < top_p[:, None]  # the first token is always kept
  floor_p = jnp.min(jnp.where(kept, inside, jnp.inf), axis=-1, keepdims=True)
  floor_p = jnp.where(top_p[:, None] < 1, floor_p, -jnp.inf)
  return jnp.where(
      (scaled >= floor_k) & (scaled >= floor_p), scaled, IMPOSSIBLE
  )
