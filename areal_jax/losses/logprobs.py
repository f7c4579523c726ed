"""From logits to the log-probs of the tokens: the one place of the shift.

A model's logits at t predict the token at t + 1. Everything per token in this
package is unshifted (the value at t belongs to the token at t), so what the
logits say is moved one position to the right here, and nowhere else.
"""

from __future__ import annotations

from typing import Callable

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking


def token_logps(
    logits: Array, ids: Array, segment_ids: Array, temperatures: Array
) -> tuple[Array, Array]:
  """Log-prob of every token given the earlier tokens of its segment.

  logps[t] = log_softmax(logits[t - 1] / temperatures[t])[ids[t]]
  entropy[t] = -Σ_v p_v log p_v of that same distribution

  Temperature divides the logits before the softmax, so these are log-probs of
  the distribution that a token was sampled from. A temperature of 0 counts as
  1: greedy completions report log-probs at temperature 1.

  Logits that predict nothing (the last of a segment, padding) may hold NaN or
  infinity without touching a value or a gradient.

  Args:
    logits: [B, T, V] as the model gives them, any float type.
    ids: [B, T] token ids.
    segment_ids: [B, T] 1, 2, ... for the trajectories of a row, 0 for padding.
    temperatures: [B, T] of the token at that position.

  Returns:
    logps: [B, T] float32 nats, 0 for the first token of a segment and padding.
    entropy: [B, T] float32 nats, 0 in the same places.
  """
  predicts, targets, temperature = _predictions(ids, segment_ids, temperatures)
  logps, entropy = _of_targets(logits, targets, temperature, predicts)
  return _right(logps), _right(entropy)


def masked_logps(
    unembed: Callable[[Array], Array],
    states: Array,
    ids: Array,
    segment_ids: Array,
    temperatures: Array,
    mask: Array,
    *,
    chunk: int,
    pieces: int = 1,
) -> tuple[Array, Array]:
  """`token_logps` of the tokens in a mask, whose logits are never all there.

  With a large vocabulary the logits of a microbatch are its largest array by
  far, and those of prompts and padding are of no use. The states that predict
  a token of the mask are moved to the front of their rows; `chunk` of each row
  at a time then become logits, which are computed again in the backward pass.
  A chunk without any costs nothing, so time follows the row with the most
  tokens in the mask.

  Where the tokens of a row are cut over devices, `pieces` says over how many:
  each piece is sorted by itself, so that states stay where they are and every
  device has logits to compute. Time then follows the piece with the most tokens
  in the mask.

  Args:
    unembed: states [B, T, D] or, in chunks, [B, chunk, D] to logits; of pieces
      [B, pieces, chunk, D]. It may close over parameters.
    states: [B, T, D] of the last layer, finite.
    ids: [B, T] token ids.
    segment_ids: [B, T] as in `token_logps`.
    temperatures: [B, T] of the token at that position.
    mask: [B, T] positive on the tokens that are asked for.
    chunk: positions of a piece at a time; from T / pieces on all at once,
      without moving and computing anything twice.
    pieces: equal parts of a row; a divisor of T.

  Returns:
    logps, entropy: [B, T] float32 nats, 0 outside the mask as well.
  """
  predicts, targets, temperature = _predictions(ids, segment_ids, temperatures)
  wanted = predicts & (_left(jnp.asarray(mask)) > 0)
  tokens = wanted.shape[1] // pieces
  if chunk >= tokens:
    scores = _of_targets(unembed(states), targets, temperature, wanted)
    return _right(scores[0]), _right(scores[1])
  inputs = states, targets, temperature, wanted
  if pieces > 1:
    inputs = [x.reshape(-1, pieces, tokens, *x.shape[2:]) for x in inputs]
  *lead, _ = inputs[-1].shape
  along = len(lead)  # the axis that is sorted and cut
  order = jnp.argsort(~inputs[-1], axis=along, stable=True)
  count = -(-tokens // chunk)
  chunk = -(-tokens // count)  # as even as can be

  def cut(x: Array) -> Array:  # [*lead, T, ...] -> [count, *lead, chunk, ...]
    more = x.ndim - along - 1
    x = jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * more),
                            axis=along)  # fmt: skip
    spare = [(0, 0)] * x.ndim
    spare[along] = (0, count * chunk - tokens)
    x = jnp.pad(x, spare).reshape(*lead, count, chunk, *x.shape[along + 1 :])
    return jnp.moveaxis(x, along, 0)

  @jax.checkpoint
  def of_chunk(states, targets, temperature, wanted):
    nothing = jnp.zeros(wanted.shape, jnp.float32)
    return jax.lax.cond(
        wanted.any(),
        lambda: _of_targets(unembed(states), targets, temperature, wanted),
        lambda: (nothing, nothing),
    )

  parts = [cut(x) for x in inputs]
  _, scores = jax.lax.scan(lambda _, x: (None, of_chunk(*x)), None, parts)
  back = jnp.argsort(order, axis=along)

  def joined(x: Array) -> Array:  # [count, *lead, chunk] -> [B, T]
    x = jnp.moveaxis(x, 0, along).reshape(*lead, -1)[..., :tokens]
    x = jnp.take_along_axis(x, back, axis=along)
    return _right(x.reshape(wanted.shape))

  return joined(scores[0]), joined(scores[1])


def _predictions(
    ids: Array, segment_ids: Array, temperatures: Array
) -> tuple[Array, Array, Array]:
  """Returns what each position predicts: whether, which id, temperature."""
  segment_ids = jnp.asarray(segment_ids)
  following = _left(segment_ids)
  predicts = (following == segment_ids) & (following > 0)
  temperature = _left(jnp.asarray(temperatures, jnp.float32))
  temperature = jnp.where(temperature > 0, temperature, 1.0)
  return predicts, _left(jnp.asarray(ids)), temperature


def _of_targets(
    logits: Array, targets: Array, temperature: Array, counts: Array
) -> tuple[Array, Array]:
  """Log-prob of each target, and the entropy; 0 where it does not count."""
  scaled = masking.keep(logits, counts[..., None]) / temperature[..., None]
  normalizer = jax.nn.logsumexp(scaled, axis=-1)
  # A comparison instead of a gather: with the vocabulary sharded each device
  # sums its own part, and the gradient is a select instead of a scatter.
  vocabulary = jnp.arange(scaled.shape[-1])
  chosen = vocabulary == targets[..., None]
  logps = jnp.sum(jnp.where(chosen, scaled, 0.0), axis=-1) - normalizer
  # Terms of one sign: the shorter Σ p scaled - normalizer cancels digits away.
  every = scaled - normalizer[..., None]
  # A token that is ruled out by a logit of -inf adds nothing: 0 log 0 = 0.
  finite = jnp.where(jnp.isneginf(every), 0.0, every)
  entropy = -jnp.sum(jnp.exp(every) * finite, axis=-1)
  return jnp.where(counts, logps, 0.0), jnp.where(counts, entropy, 0.0)


def _left(x: Array) -> Array:
  """The value of the next position; 0 at the last one."""
  return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def _right(x: Array) -> Array:
  """The value of the position before; 0 at the first one."""
  return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
