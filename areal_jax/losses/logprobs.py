"""From logits to the log-probs of the tokens: the one place of the shift.

A model's logits at t predict the token at t + 1. Everything per token in this
package is unshifted (the value at t belongs to the token at t), so what the
logits say is moved one position to the right here, and nowhere else.
"""

from __future__ import annotations

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
  segment_ids = jnp.asarray(segment_ids)
  temperatures = jnp.asarray(temperatures, jnp.float32)
  following = _left(segment_ids)
  predicts = (following == segment_ids) & (following > 0)
  temperature = _left(temperatures)
  temperature = jnp.where(temperature > 0, temperature, 1.0)
  scaled = masking.keep(logits, predicts[..., None]) / temperature[..., None]
  normalizer = jax.nn.logsumexp(scaled, axis=-1)
  # A comparison instead of a gather: with the vocabulary sharded each device
  # sums its own part, and the gradient is a select instead of a scatter.
  vocabulary = jnp.arange(scaled.shape[-1])
  chosen = vocabulary == _left(jnp.asarray(ids))[..., None]
  logps = jnp.sum(jnp.where(chosen, scaled, 0.0), axis=-1) - normalizer
  # Terms of one sign: the shorter Σ p scaled - normalizer cancels digits away.
  every = scaled - normalizer[..., None]
  # A token that is ruled out by a logit of -inf adds nothing: 0 log 0 = 0.
  finite = jnp.where(jnp.isneginf(every), 0.0, every)
  entropy = -jnp.sum(jnp.exp(every) * finite, axis=-1)
  return (
      _right(jnp.where(predicts, logps, 0.0)),
      _right(jnp.where(predicts, entropy, 0.0)),
  )


def _left(x: Array) -> Array:
  """The value of the next position; 0 at the last one."""
  return jnp.concatenate([x[:, 1:], jnp.zeros_like(x[:, :1])], axis=1)


def _right(x: Array) -> Array:
  """The value of the position before; 0 at the first one."""
  return jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
