"""What a train step minimises.

An objective takes what a network says of a microbatch, and the microbatch; it
returns the loss and its statistics.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Mapping

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking, policy, statistics, supervised

Batch = Mapping[str, Array]


@dataclasses.dataclass(frozen=True)
class Scores:
  """Log-probs of a microbatch, [B, T] float32 nats, unshifted.

  Attributes:
    logps: of the policy that learns; carries the gradient.
    entropy: of its distribution at each token; carries gradient too.
    proximal_logps: under the weights that the step started from; constant.
    reference_logps: under the reference policy; constant; None without one.
  """

  logps: Array
  entropy: Array
  proximal_logps: Array
  reference_logps: Array | None


# (what the network says, batch) -> loss and statistics with names in _sum and
# _max. A policy says `Scores`; a critic and a reward model [B, T], see `score`.
Objective = Callable[[Any, Batch], tuple[Array, dict[str, Array]]]


def policy_objective(settings: policy.PolicyLoss) -> Objective:
  """The policy loss of these settings, with statistics by age.

  The batch has 'kept' where the settings have a `second_moment`.
  """

  def objective(scores: Scores, batch: Batch):
    mask = batch['loss_mask']
    entropy = scores.entropy
    if not settings.entropy_coefficient:  # measured only: no backward pass
      entropy = jax.lax.stop_gradient(entropy)
    fresh = mask * (batch['versions'] == batch['version'])
    ages = batch['version'] - batch['versions']
    loss, stats = policy.policy_loss(
        scores.logps,
        scores.proximal_logps,
        batch['behavior_logps'],
        batch['advantages'],
        mask,
        denominator=batch['denominator'],
        settings=settings,
        segment_ids=batch['segment_ids'],
        ages=ages,
        kept=batch.get('kept'),
        reference_logps=scores.reference_logps,
        entropy=entropy,
        fresh=fresh,
    )
    gap = jnp.abs(scores.proximal_logps - batch['behavior_logps'])
    stats['gap_sum'] = masking.masked_sum(gap, mask)
    if settings.proximal != 'exact':
      # There the loss has seen a stand-in; engine and trainer are compared by
      # what the weights really say.
      stats |= {
          'fresh_gap_sum': masking.masked_sum(gap, fresh),
          'fresh_gap_max': masking.masked_max(gap, fresh),
      }
      stats |= statistics.gap_by_age(
          jnp.where(mask > 0, scores.proximal_logps, 0.0),
          jnp.where(mask > 0, batch['behavior_logps'], 0.0),
          mask,
          ages,
      )
    return loss, jax.lax.stop_gradient(stats)

  return objective


def supervised_objective(scores: Scores, batch: Batch):
  """Negative log-likelihood of the tokens in the loss mask."""
  mask = batch['loss_mask']
  loss = supervised.sft_loss(
      scores.logps, mask, denominator=batch['denominator']
  )
  return loss, {'tokens_sum': masking.masked_count(mask)}
