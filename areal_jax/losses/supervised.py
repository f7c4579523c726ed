"""Losses that need no reward: likelihood, preference pairs, a teacher.

As everywhere in this room, a loss is a sum divided by a denominator that is
handed in, so that the parts of a batch add up.
"""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking, segments

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
    chosen, rejected: [N] log π_θ of whole answers, nats (`sequence_logps`);
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


def sequence_logps(logps: Array, mask: Array, segment_ids: Array) -> Array:
  """log π of the whole answer, at each of its positions.

  Args:
    logps: [B, T] nats; masked ones may be NaN.
    mask: [B, T] positive on sampled tokens.
    segment_ids: [B, T] 1, 2, ... for the sequences of a row, 0 for padding.

  Returns:
    [B, T] float32, Σ log π over the sampled tokens of the own sequence.
  """
  return segments.total(logps, mask, segment_ids)


def distillation_loss(
    logits: Array,
    teacher_logits: Array,
    mask: Array,
    *,
    denominator: Array | float,
    temperature: float = 1.0,
) -> tuple[Array, dict[str, Array]]:
  """Reverse KL from a teacher over the whole vocabulary, on the own tokens.

  L = (1 / D) Σ_t Σ_v π(v) (log π(v) - log teacher(v)),  π = softmax(logits / τ)

  On-policy distillation: the tokens are those that the policy sampled, so that
  it learns where it goes itself. See https://arxiv.org/abs/2306.13649. Where
  only the teacher's log-probs of sampled tokens are known, its negative k1 as
  reward of a token does the same in the mean: `distillation_advantages`.

  Args:
    logits: [B, T, V] of the policy; carry the gradient.
    teacher_logits: [B, T, V]; a constant.
    mask: [B, T] positive where a sampled token is predicted; logits elsewhere
      may be NaN.
    denominator: such positions in the whole batch; with 0 the loss is 0.
    temperature: τ of both.

  Returns:
    The loss, a float32 scalar, and tokens_sum and teacher_kl_sum.
  """
  at = jnp.asarray(mask)[..., None]
  own = jax.nn.log_softmax(masking.keep(logits, at) / temperature)
  teacher = jax.lax.stop_gradient(
      jax.nn.log_softmax(masking.keep(teacher_logits, at) / temperature)
  )
  # A token that both rule out adds nothing: 0 · (-inf + inf).
  possible = jnp.exp(own) > 0
  gap = jnp.where(possible, own - teacher, 0.0)
  divergence = jnp.sum(jnp.exp(own) * gap, axis=-1)
  loss = masking.masked_mean(divergence, mask, denominator)
  stats = {
      'tokens_sum': masking.masked_count(mask),
      'teacher_kl_sum': masking.masked_sum(divergence, mask),
  }
  return loss, jax.lax.stop_gradient(stats)


def distillation_advantages(
    logps: Array, teacher_logps: Array, mask: Array
) -> Array:
  """log teacher - log π of each sampled token, as its advantage.

  With the policy loss this is the policy gradient of the reverse KL a token,
  E[∇ log π (log π - log teacher)], without a look at the whole vocabulary.

  Args:
    logps: [B, T] of the policy that sampled, nats; masked ones may be NaN.
    teacher_logps: [B, T] the same under the teacher.
    mask: [B, T] positive on sampled tokens.

  Returns:
    [B, T] float32 nats, a constant, 0 where masked.
  """
  return jax.lax.stop_gradient(
      masking.keep(teacher_logps, mask) - masking.keep(logps, mask)
  )


def _pair_stats(margin: Array, mask: Array) -> dict[str, Array]:
  return jax.lax.stop_gradient(
      {
          'pairs_sum': masking.masked_count(mask),
          'margin_sum': masking.masked_sum(margin, mask),
          'correct_sum': masking.masked_sum(margin > 0, mask),
      }
  )
