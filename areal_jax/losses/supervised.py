"""Losses that need no reward: likelihood, preference pairs, a teacher.

As everywhere in this room, a loss is a sum divided by a denominator that is
handed in, so that the parts of a batch add up.
"""

from __future__ import annotations

from typing import Literal

from jax import Array

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
