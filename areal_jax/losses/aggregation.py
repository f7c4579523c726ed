"""From a loss of each token to the loss of a batch.

  L = Σ_t c_t l_t / D

  kind                     c of a token               D of the whole batch
  token_mean               1                          loss tokens
  sequence_mean_of_sums    1                          sequences
  sequence_mean_of_means   1 / tokens of its sequence sequences
  constant                 1                          sequences · length

D is counted once over the whole batch and handed to every part of it, so that
parts add up; c needs only the sequence itself, which is never cut. A sequence
without a loss token does not count. `constant` is Dr.GRPO's
(https://arxiv.org/abs/2503.20783): neither long answers nor short ones weigh
more a token.
"""

from __future__ import annotations

from typing import Literal, Sequence

from jax import Array
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import segments

Kind = Literal[
    'token_mean', 'sequence_mean_of_sums', 'sequence_mean_of_means', 'constant'
]


def denominator(
    kind: Kind, loss_masks: Sequence[np.ndarray], constant_length: int = 0
) -> float:
  """D of a whole batch, on the host.

  Args:
    kind: see the top of this file.
    loss_masks: [T_i] for each sequence of the batch, positive on loss tokens,
      before any rule rejects one.
    constant_length: tokens, for 'constant'.
  """
  counts = [int(np.count_nonzero(mask)) for mask in loss_masks]
  if kind == 'token_mean':
    return float(sum(counts))
  sequences = float(sum(count > 0 for count in counts))
  return sequences * constant_length if kind == 'constant' else sequences


def shares(kind: Kind, mask: Array, segment_ids: Array | None) -> Array:
  """c of each token, [B, T] float32.

  Args:
    kind: see the top of this file.
    mask: [B, T] positive on loss tokens, before any rule rejects one.
    segment_ids: [B, T]; None where the kind does not look at sequences.
  """
  if kind == 'sequence_mean_of_means':
    return 1 / jnp.maximum(segments.count(mask, segment_ids), 1)
  return jnp.ones(jnp.shape(mask), jnp.float32)
