"""Rotary position embeddings: frequencies, their scaling, and the rotation.

Sliding layers may have a base of their own, so there are two tables of cosines
and sines; `layer_rotations` makes both, once for all layers.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models.config import ModelConfig, RopeScaling

Array = jax.Array

Rope = tuple[Array, Array]  # cosines and sines [M, 1, H / 2] float32


def layer_rotations(config: ModelConfig, positions: Array) -> tuple[Rope, Rope]:
  """The rotations of full layers and of sliding ones at positions [M]."""
  full = rotations(config, positions)
  if not (config.sliding_layers and config.sliding_rope_theta):
    return full, full
  own = dataclasses.replace(
      config, rope_theta=config.sliding_rope_theta, rope_scaling=RopeScaling()
  )
  return full, rotations(own, positions)


def rotations(config: ModelConfig, positions: Array) -> Rope:
  """Cosines and sines [M, 1, H / 2] float32 of positions [M]."""
  frequencies = jnp.asarray(rope_frequencies(config))
  scaling, positions = config.rope_scaling, positions[:, None, None]
  if scaling.kind == 'dynamic':
    frequencies = frequencies * _dynamic_stretch(config, positions)
  angles = positions * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  if scaling.amplitude != 1:
    cos, sin = cos * scaling.amplitude, sin * scaling.amplitude
  return cos, sin


def _dynamic_stretch(config: ModelConfig, positions: Array) -> Array:
  """Computes the factor of frequencies at positions [M, 1, 1].

  A base that is r^(H / (H - 2)) times as large makes frequency i of H / 2
  r^(-2i / (H - 2)) times as large. r = f n / N - (f - 1) for n > N tokens, with
  N those trained on and f the factor; a position p has n = p + 1.
  """
  scaling, h = config.rope_scaling, config.head_size
  trained = scaling.original_max_length
  beyond = jnp.maximum(positions + 1 - trained, 0)
  growth = 1 + scaling.factor * beyond.astype(jnp.float32) / trained
  return growth ** (-jnp.arange(0, h, 2) / (h - 2))


def rope_frequencies(config: ModelConfig) -> np.ndarray:
  """Radians a token, [H / 2] float32: theta^(-2i / H), scaled if set.

  For 'dynamic' those of sequences no longer than trained on. See
  https://arxiv.org/abs/2104.09864, for the scalings
  `modeling_rope_utils.py` of https://github.com/huggingface/transformers.
  """
  halves = np.arange(0, config.head_size, 2) / config.head_size
  frequencies = config.rope_theta**-halves
  rope = config.rope_scaling
  if rope.kind == 'linear':
    frequencies /= rope.factor
  if rope.kind in ('yarn', 'llama3'):
    kept = (_kept_by_yarn if rope.kind == 'yarn' else _kept_by_llama3)(config)
    frequencies *= kept + (1 - kept) / rope.factor
  return frequencies.astype(np.float32)


def _kept_by_llama3(config: ModelConfig) -> np.ndarray:
  """The share of each frequency that stays, by the turns that it makes."""
  rope = config.rope_scaling
  halves = np.arange(0, config.head_size, 2) / config.head_size
  # How many times a wave fits in the context that was trained on.
  turns = rope.original_max_length * config.rope_theta**-halves / (2 * np.pi)
  low, high = rope.low_freq_factor, rope.high_freq_factor
  return np.clip((turns - low) / (high - low), 0, 1)


def _kept_by_yarn(config: ModelConfig) -> np.ndarray:
  """The share of each frequency that stays, by its number."""
  rope, h = config.rope_scaling, config.head_size

  def number(turns):
    """Returns the index of the frequency with `turns` turns in the context."""
    wave = rope.original_max_length / (turns * 2 * np.pi)
    return h * math.log(wave) / (2 * math.log(config.rope_theta))

  first, last = number(rope.beta_fast), number(rope.beta_slow)
  if rope.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, h - 1)
  if first == last:
    last += 0.001  # a step, and no division by 0
  return 1 - np.clip((np.arange(h // 2) - first) / (last - first), 0, 1)


def rotate(x: Array, rope: Rope, scale: float = 1.0) -> Array:
  """Rotates the pairs (i, i + H / 2) of [M, heads, H], in float32."""
  cos, sin = rope
  first, second = jnp.split(x.astype(jnp.float32), 2, -1)
  turned = jnp.concatenate(
      [first * cos - second * sin, second * cos + first * sin], -1
  )
  return (turned * scale).astype(x.dtype)
