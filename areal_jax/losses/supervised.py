"""Losses that need no reward: likelihood and preference pairs.

As everywhere in this room, a loss is a sum divided by a denominator that is
handed in, so that the parts of a batch add up.
"""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking

PreferenceKind = Literal['sigmoid', 'ipo']


def sft_loss(logps: Array, mask: Array, *, denominator: Array | float) -> Array:
  """Negative log-likelihood, L = -(1 / denominator) Σ_mask log π_θ.

  Args:
    logps: [B, T] log π_θ of the tokens, in nats; masked ones may be NaN.
    mask: [B, T] positive on the tokens to learn.
    denominator: such tokens in the whole batch; with 0 the loss is 0.

  Returns:
    The loss, a float32 scalar.
  """
  return -masking.masked_mean(logps, mask, denominator)


def preference_loss(
    chosen: Array,
    rejected: Array,
    *,
    denominator: Array | float,
    kind: PreferenceKind = 'sigmoid',
    beta: float = 0.1,
    reference_chosen: Array | float = 0.0,
    reference_rejected: Array | float = 0.0,
    mask: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """DPO: the policy as its own reward model, on pairs of answers.

  With h = (log π_θ - log reference)(chosen) - the same (rejected):

    sigmoid  L = -(1 / D) Σ log sigmoid(β h)      arXiv 2305.18290
    ipo      L = (1 / D) Σ (h - 1 / (2 β))²       arXiv 2310.12036

  For 'ipo' TRL takes means over tokens in place of the sums: hand those in.

  Args:
    chosen, rejected: [N] log π_θ of whole answers, nats (`segments.total`);
      carry the gradient.
    denominator: pairs in the whole batch; with 0 the loss is 0.
    kind: see above.
    beta: how closely the policy is held to the reference.
    reference_chosen, reference_rejected: [N] the same under the reference
      policy, constants; 0 without one.
    mask: [N] positive on pairs that count; None for all. Others may be NaN.

  Returns:
    The loss, a float32 scalar, and pairs_sum, margin_sum (β h) and correct_sum
    (h > 0).
  """
  mask = jnp.ones(jnp.shape(chosen)) if mask is None else mask
  reference = jax.lax.stop_gradient(
      masking.keep(jnp.broadcast_to(reference_chosen, jnp.shape(mask)), mask)
      - masking.keep(
          jnp.broadcast_to(reference_rejected, jnp.shape(mask)), mask
      )
  )
  margin = masking.keep(chosen, mask) - masking.keep(rejected, mask)
  margin -= reference
  if kind == 'sigmoid':
    losses = -jax.nn.log_sigmoid(beta * margin)
  elif kind == 'ipo':
    losses = jnp.square(margin - 1 / (2 * beta))
  else:
    raise ValueError(f"kind is {kind!r}, wanted 'sigmoid' or 'ipo'")
  stats = _pair_stats(beta * margin, mask)
  return masking.masked_mean(losses, mask, denominator), stats


def reward_model_loss(
    chosen: Array,
    rejected: Array,
    *,
    denominator: Array | float,
    mask: Array | None = None,
) -> tuple[Array, dict[str, Array]]:
  """Bradley–Terry: the chosen answer is likelier to win.

  L = -(1 / D) Σ log sigmoid(s_chosen - s_rejected)

  Args:
    chosen, rejected: [N] scores s of the answers; carry the gradient.
    denominator: pairs in the whole batch; with 0 the loss is 0.
    mask: [N] positive on pairs that count; None for all. Others may be NaN.

  Returns:
    The loss, a float32 scalar, and pairs_sum, margin_sum, correct_sum.
  """
  mask = jnp.ones(jnp.shape(chosen)) if mask is None else mask
  margin = masking.keep(chosen, mask) - masking.keep(rejected, mask)
  losses = -jax.nn.log_sigmoid(margin)
  stats = _pair_stats(margin, mask)
  return masking.masked_mean(losses, mask, denominator), stats


def _pair_stats(margin: Array, mask: Array) -> dict[str, Array]:
  return jax.lax.stop_gradient(
      {
          'pairs_sum': masking.masked_count(mask),
          'margin_sum': masking.masked_sum(margin, mask),
          'correct_sum': masking.masked_sum(margin > 0, mask),
      }
  )
