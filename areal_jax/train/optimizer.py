"""The learning-rate schedule and the optimizers behind one settings dataclass.

The schedule counts *applied updates*: a minibatch that was skipped (non-finite
gradient) or that had nothing to teach (no advantage) does not advance it, and
a resumed run continues it, because the count lives in the optimizer state that
such minibatches leave alone and checkpoints carry.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib

from areal_jax.config import require

# Of the second moments of Adafactor; smaller matrices keep them whole.
_LEAST_TO_FACTOR = 128
# Root mean square of AdamW's updates, which Muon's are scaled to.
_ADAM_RMS = 0.2


@dataclasses.dataclass
class OptimizerSettings:
  """AdamW with global-norm clipping; defaults of the paper's Table 3.

  Attributes:
    learning_rate: peak of the schedule.
    schedule: what follows the warm-up.
    warmup_steps: updates of the linear rise from 0 to the peak.
    total_steps: update at which 'cosine' and 'linear' reach their end.
    final_fraction: share of the peak at the end, and ever after.
    beta1: AdamW's decay of the mean of gradients.
    beta2: AdamW's decay of the mean of squared gradients.
    epsilon: added to the root of the latter.
    momentum: Muon's decay of the mean of gradients.
    weight_decay: decoupled; on every parameter.
    gradient_clip: bound on the global norm; `inf` for none.
    kind: what makes an update of a gradient, all under the same schedule,
      clipping and decoupled decay:
      'adamw' keeps two moments of a parameter's size;
      'adafactor' (https://arxiv.org/abs/1804.04235) one, as a row and a column
      for each matrix of at least 128 by 128, with an RMS of at most 1 an
      update; no mean of gradients, no scale by the parameters: the learning
      rate means what it does for AdamW;
      'muon' (https://kellerjordan.github.io/posts/muon) one of full size, which
      it orthogonalises, for the matrices of the layers, scaled to the RMS of
      AdamW (https://arxiv.org/abs/2502.16982); AdamW for the rest.
  """

  learning_rate: float = 2e-5
  schedule: Literal['constant', 'cosine', 'linear'] = 'constant'
  warmup_steps: int = 0
  total_steps: int = 1000
  final_fraction: float = 0.0
  beta1: float = 0.9
  beta2: float = 0.95
  epsilon: float = 1e-5
  momentum: float = 0.95
  weight_decay: float = 0.05
  gradient_clip: float = 1.0
  kind: Literal['adamw', 'adafactor', 'muon'] = 'adamw'

  def validate(self, at: str) -> None:
    for name, right, wanted in (
        (
            'learning_rate',
            0 <= self.learning_rate < np.inf,
            'at least 0 and finite',
        ),
        ('warmup_steps', self.warmup_steps >= 0, 'at least 0'),
        ('total_steps', self.total_steps >= 1, 'at least 1'),
        ('final_fraction', 0 <= self.final_fraction <= 1, 'in [0, 1]'),
        ('beta1', 0 <= self.beta1 < 1, 'in [0, 1)'),
        ('beta2', 0 <= self.beta2 < 1, 'in [0, 1)'),
        ('momentum', 0 <= self.momentum < 1, 'in [0, 1)'),
        ('epsilon', 0 < self.epsilon < np.inf, 'above 0 and finite'),
        (
            'weight_decay',
            0 <= self.weight_decay < np.inf,
            'at least 0 and finite',
        ),
        ('gradient_clip', self.gradient_clip > 0, 'above 0'),
    ):
      require(right, f'{at}.{name}', getattr(self, name), wanted)
    if self.schedule != 'constant':
      require(
          self.warmup_steps < self.total_steps,
          f'{at}.warmup_steps',
          self.warmup_steps,
          f'less than total_steps={self.total_steps}',
      )


def learning_rate(
    settings: OptimizerSettings, step: int | jax.Array
) -> float | jax.Array:
  """Learning rate of the update after `step` applied ones.

  With peak p, warm-up W, total N, final fraction f and
  x = min(1, (step - W) / (N - W)):

    step < W   p step / W
    constant   p
    cosine     p (f + (1 - f) (1 + cos πx) / 2)
    linear     p (f + (1 - f) (1 - x))

  The warm-up is subtracted once: with W=22, N=220 cosine gives 0.0302 p at
  198 and 0 at 220. The first update has step 0, so with a warm-up it moves
  nothing, as in torch and optax.

  Args:
    settings: the schedule.
    step: a Python number, or an integer array under jit.
  """
  xp = jnp if isinstance(step, jax.Array) else np
  warmup = settings.warmup_steps
  rise = step / max(1, warmup)
  span = max(1, settings.total_steps - warmup)
  x = xp.clip((step - warmup) / span, 0.0, 1.0)
  shape = {
      'constant': lambda: xp.ones_like(x),
      'cosine': lambda: (1 + xp.cos(np.pi * x)) / 2,
      'linear': lambda: 1 - x,
  }[settings.schedule]()
  if settings.schedule != 'constant':
    final = settings.final_fraction
    shape = final + (1 - final) * shape
  rate = settings.learning_rate * xp.where(step < warmup, rise, shape)
  return rate if xp is jnp else float(rate)


def make_optimizer(
    settings: OptimizerSettings, sides: Any = None
) -> optax.GradientTransformation:
  """Clips by the global norm, then makes an update under the schedule.

  Args:
    settings: see there.
    sides: `models.parameters.matrix_sides` of the parameters that learn, for
      'muon'; not looked at by the others.
  """
  rate = lambda step: learning_rate(settings, step)
  update = {'adamw': _adamw, 'adafactor': _adafactor}.get(settings.kind)
  if update is None:
    update = functools.partial(_muon, sides=sides)
  return optax.chain(
      optax.stateless(
          lambda gradient, _: _clipped(gradient, settings.gradient_clip)
      ),
      update(settings, rate),
  )


def squared_norms(tree: Any) -> list[jax.Array]:
  """Sum of the squares of each leaf, float32, in the order of the leaves.

  As products of a leaf with itself, which XLA for CPU has in a library; a
  reduction it writes and compiles anew for each shape.
  """

  def squared(leaf: jax.Array) -> jax.Array:
    axes = tuple(range(leaf.ndim))
    leaf = leaf.astype(jnp.float32)
    return jax.lax.dot_general(
        leaf,
        leaf,
        ((axes, axes), ((), ())),
        precision=jax.lax.Precision.HIGHEST,  # TPUs and GPUs round otherwise
    )

  return [squared(leaf) for leaf in jax.tree.leaves(tree)]


def _clipped(gradient: Any, limit: float) -> Any:
  """The gradient g as g min(1, limit / |g|), |g| its global norm.

  Not `optax.clip_by_global_norm`, which divides every element by the norm, in a
  pass over memory of its own.
  """
  norm = jnp.sqrt(sum(squared_norms(gradient)))
  scale = jnp.where(norm < limit, 1.0, limit / norm)
  return jax.tree.map(lambda leaf: leaf * scale.astype(leaf.dtype), gradient)


def _adamw(
    settings: OptimizerSettings, rate: optax.Schedule
) -> optax.GradientTransformation:
  return optax.adamw(
      rate,
      b1=settings.beta1,
      b2=settings.beta2,
      eps=settings.epsilon,
      weight_decay=settings.weight_decay,
  )


def _adafactor(
    settings: OptimizerSettings, rate: optax.Schedule
) -> optax.GradientTransformation:
  """Builds Adafactor; `optax.adafactor` does not multiply decay by the rate."""
  return optax.chain(
      optax.scale_by_factored_rms(min_dim_size_to_factor=_LEAST_TO_FACTOR),
      optax.clip_by_block_rms(1.0),
      optax.add_decayed_weights(settings.weight_decay),
      optax.scale_by_learning_rate(rate),
  )


def _muon(
    settings: OptimizerSettings, rate: optax.Schedule, sides: Any
) -> optax.GradientTransformation:
  """Muon for the matrices, AdamW for the rest.

  Not `optax.contrib.muon`, whose AdamW has Muon's Nesterov momentum too.
  """
  is_leaf = lambda x: x is None or isinstance(x, tuple)
  kinds = jax.tree.map(
      lambda own: 'adamw' if own is None else 'muon', sides, is_leaf=is_leaf
  )
  numbers = jax.tree.map(
      lambda own: optax.MaskedNode()
      if own is None
      else optax.contrib.MuonDimensionNumbers(*own),
      sides,
      is_leaf=is_leaf,
  )

  def at_adams_rms(x, own):
    # An orthogonal matrix has the RMS 1 / sqrt(its longer side).
    longest = max(math.prod(x.shape[i] for i in side) for side in own)
    return _ADAM_RMS * math.sqrt(longest) * x

  matrices = optax.chain(
      optax.contrib.scale_by_muon(
          beta=settings.momentum, weight_dimension_numbers=numbers
      ),
      optax.stateless(
          lambda updates, _: jax.tree.map(at_adams_rms, updates, numbers)
      ),
      optax.add_decayed_weights(settings.weight_decay),
      optax.scale_by_learning_rate(rate),
  )
  return optax.partition(
      {'muon': matrices, 'adamw': _adamw(settings, rate)}, kinds
  )
