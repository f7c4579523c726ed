"""Estimators of KL(π ‖ reference) from the log-probs of sampled tokens.

With tokens sampled from π and d = log π - log reference (J. Schulman,
http://joschu.net/blog/kl-approx.html):

  k1 = d                 unbiased, of large variance, may be negative
  k2 = d² / 2            biased, low variance
  k3 = exp(-d) - 1 + d   unbiased, low variance, never negative

In a loss the gradient counts. That of k1 is ∇ log π, whose mean is 0: as a term
of the loss it only adds noise, and `PolicyLoss` refuses it. It belongs in
reports and in the reward. k2 has the gradient of KL(π ‖ reference), k3 that of
KL(reference ‖ π).

These are expectations over tokens of π itself. For tokens of an older policy
each estimate needs the importance weight π / π_behav, taken as a constant.

Where the reference finds a token e²⁰ times likelier than π does, k3 is held at
its value there and has no gradient (`saturates`).
"""

from __future__ import annotations

from typing import Literal

import jax
from jax import Array
import jax.numpy as jnp

from areal_jax.losses import masking

Kind = Literal['k1', 'k2', 'k3']


def k1(logps: Array, reference_logps: Array) -> Array:
  """d, in nats. Both [...] float, in nats."""
  return logps - reference_logps


def k2(logps: Array, reference_logps: Array) -> Array:
  """d² / 2, in nats. Both [...] float, in nats."""
  return jnp.square(logps - reference_logps) / 2


def k3(logps: Array, reference_logps: Array) -> Array:
  """exp(-d) - 1 + d, in nats, with d held at -`MAX_LOG_RATIO` or above.

  A token 4.9e8 times likelier under the reference has a gradient of 0 instead
  of an infinite one. Both [...] float, in nats.
  """
  held = saturates(logps, reference_logps)
  d = jnp.where(held, -masking.MAX_LOG_RATIO, logps - reference_logps)
  return jnp.expm1(-d) + d


def saturates(logps: Array, reference_logps: Array) -> Array:
  """Returns where `k3` has no gradient: d at or below -`MAX_LOG_RATIO`.

  Args:
    logps, reference_logps: [...] float, in nats.

  Returns:
    [...] bool.
  """
  return logps - reference_logps <= -masking.MAX_LOG_RATIO


def estimate(
    kind: Kind, logps: Array, reference_logps: Array, mask: Array
) -> Array:
  """Estimates the KL divergence at each token.

  Args:
    kind: 'k1', 'k2' or 'k3'.
    logps: [B, T] log π of the sampled tokens, in nats; carries the gradient.
    reference_logps: [B, T] the same under the reference; a constant.
    mask: [B, T] positive on sampled tokens.

  Returns:
    [B, T] float32 nats, 0 where masked, whatever stood there.

  Raises:
    ValueError: another kind.
  """
  estimators = {'k1': k1, 'k2': k2, 'k3': k3}
  if kind not in estimators:
    raise ValueError(f'kind is {kind!r}, wanted one of {list(estimators)}')
  logps = masking.keep(logps, mask)
  reference_logps = masking.keep(reference_logps, mask)
  reference_logps = jax.lax.stop_gradient(reference_logps)
  return estimators[kind](logps, reference_logps)
