"""Critics and reward models: one number a token on the trunk of a policy.

In go packed rows as training has them, out comes [B, T] float32. A critic's
value head says what a token's state is worth; a reward model's head scores a
whole sequence, at its last token (Bradley-Terry: the difference of two scores
is the log-odds that one is preferred). The trunk is the policy's Transformer
without its unembedding, so the trunk of a published policy can start either.

Parameters are the trunk's with the head's beside them, a plain dict as in
`transformer.py`: 'value_head' [D, 1] and 'value_head_bias' [1], or
'reward_head' [D, 1]. Losses and files are left to others.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp

from areal_jax.mesh.rules import Rules
from areal_jax.models import lora, parameters, transformer
from areal_jax.models.config import ModelConfig

Array = jax.Array
Mesh = jax.sharding.Mesh
Params = dict[str, Any]
HeadKind = Literal['value', 'reward']

# Axes of each head's parameters, of size D ('norm': small, and read by all
# devices) and 1 (None). Published ones have the same parts: a linear layer with
# a bias on values (`v_head.summary` of TRL), and one without on scores (`score`
# of transformers' sequence classifiers).
HEADS: dict[HeadKind, dict[str, tuple[str | None, ...]]] = {
    'value': {'value_head': ('norm', None), 'value_head_bias': (None,)},
    'reward': {'reward_head': ('norm', None)},
}
_STREAM = 0x4EAD  # apart from the trunk's random numbers


def trunk_config(config: ModelConfig) -> ModelConfig:
  """The policy without an unembedding of its own, and without adapters."""
  return dataclasses.replace(lora.without(config), tied_embeddings=True)


# Parameters.


def init_params(
    config: ModelConfig,
    kind: HeadKind,
    seed: int,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Params:
  """Random trunk and head in float32, on the devices that hold them."""
  trunk = parameters.init_params(trunk_config(config), seed, mesh, rules)
  return with_head(config, kind, trunk, seed, mesh, rules)


def with_head(
    config: ModelConfig,
    kind: HeadKind,
    trunk: Params,
    seed: int,
    mesh: Mesh | None,
    rules: Rules | None,
) -> Params:
  """A new head on the trunk of a policy.

  Its weights are normal with standard deviation 1 / (D + 1), as in
  https://arxiv.org/abs/2009.01325, so that first values are small against
  rewards of 1; the bias is 0.

  Args:
    config: of the policy.
    kind: of the head.
    trunk: the policy's parameters, used as they are (not copied); what belongs
      to no trunk, an unembedding or adapters, is left out.
    seed: of the head.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.
  """
  d = config.width

  def create(key):
    weight = jax.random.normal(key, (d, 1), jnp.float32) / (d + 1)
    return {
        name: weight if 'norm' in axes else jnp.zeros((1,), jnp.float32)
        for name, axes in HEADS[kind].items()
    }

  shardings = None
  if mesh is not None:
    whole = param_shardings(config, kind, mesh, rules)
    shardings = {name: whole[name] for name in HEADS[kind]}
  key = jax.random.fold_in(jax.random.key(seed), _STREAM)
  with jax.threefry_partitionable(True):
    head = jax.jit(create, out_shardings=shardings)(key)

  def wide(x):  # a frozen base may be bfloat16
    return x if x.dtype == jnp.float32 else x.astype(jnp.float32)

  return {**jax.tree.map(wide, _trunk(config, trunk)), **head}


def abstract_params(config: ModelConfig, kind: HeadKind) -> Params:
  """Trunk and head as `jax.ShapeDtypeStruct`s."""
  head = {
      name: jax.ShapeDtypeStruct(
          tuple(1 if a is None else config.width for a in axes), jnp.float32
      )
      for name, axes in HEADS[kind].items()
  }
  return {**parameters.abstract_params(trunk_config(config)), **head}


def logical_axes(config: ModelConfig, kind: HeadKind) -> Params:
  """Axis names of trunk and head."""
  trunk = parameters.logical_axes(trunk_config(config))
  return {**trunk, **HEADS[kind]}


def param_shardings(
    config: ModelConfig, kind: HeadKind, mesh: Mesh, rules: Rules
) -> Params:
  """A `NamedSharding` for every parameter.

  Raises:
    ConfigError: an axis that does not divide over its mesh axis.
  """
  return jax.tree.map(
      lambda p, axes: rules.sharding(axes, p.shape, mesh),
      abstract_params(config, kind),
      logical_axes(config, kind),
  )


# What they say.


def values(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Computes a critic's value of each state.

  V_t = w · h_t + b, h_t the normed state of the last layer at token t, which
  has seen the tokens up to and with t. The value before a token was sampled is
  therefore that of the token before it.

  Args:
    config: of the policy.
    params: of a critic.
    ids: [B, T] tokens.
    positions: [B, T] of each token in its own sequence.
    segment_ids: [B, T] sequence of the row, from 1; 0 is padding.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    [B, T] float32, in units of reward; 0 on padding.
  """
  said = _project(
      config, params, 'value_head', ids, positions, segment_ids, mesh, rules
  )
  bias = params['value_head_bias'].astype(jnp.float32)
  return jnp.where(segment_ids != 0, said + bias, 0.0)


def scores(
    config: ModelConfig,
    params: Params,
    ids: Array,
    positions: Array,
    segment_ids: Array,
    *,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Computes a reward model's score of each sequence, at its last token.

  r = w · h_last, and one sequence is preferred to another with probability
  sigmoid(r - r'), so a score has no zero of its own.

  Args:
    config: of the policy.
    params: of a reward model.
    ids: [B, T] tokens.
    positions: [B, T] of each token in its own sequence.
    segment_ids: [B, T] sequence of the row, from 1; 0 is padding.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    [B, T] float32, the score at each sequence's last token and 0 elsewhere.
  """
  said = _project(
      config, params, 'reward_head', ids, positions, segment_ids, mesh, rules
  )
  return jnp.where(last_tokens(segment_ids), said, 0.0)


def last_tokens(segment_ids: Array) -> Array:
  """[B, T] bool: whether a token is the last of its sequence in the row."""
  following = jnp.pad(segment_ids[:, 1:], ((0, 0), (0, 1)))
  return (segment_ids != 0) & (segment_ids != following)


def _project(
    config, params, name, ids, positions, segment_ids, mesh, rules
) -> Array:
  """[B, T] float32: the product of the last states with a head's weights."""
  x = transformer.hidden(
      trunk_config(config),
      _trunk(config, params),
      ids,
      positions,
      segment_ids,
      mesh=mesh,
      rules=rules,
  )
  # Not a matrix product, which a TPU would round to bfloat16.
  head = params[name][:, 0].astype(jnp.float32)
  return jnp.sum(x.astype(jnp.float32) * head, axis=-1)


def _trunk(config: ModelConfig, params: Params) -> Params:
  """The parameters that belong to the trunk."""
  names = parameters.abstract_params(trunk_config(config))
  return lora.part_of(params, names)
