"""A task without meaning, for `loop.py`: random prompts, a coin for a reward.

Every character is a token, and there are as many as the vocabulary has room
for. Reward workers import this, so it stays light.
"""

from __future__ import annotations

import zlib

import numpy as np

from areal_jax.types import Problem

PROMPT = 16  # characters

_SPECIAL = 4  # ids that a tokenizer of ours has beside characters
_FIRST = 0x4E00  # the first character
_IN_PROMPTS = 60


def text(vocabulary: int) -> str:
  """Every character that a vocabulary of so many ids has room for."""
  return _written(np.arange(vocabulary - _SPECIAL))


def problems(split: str, count: int, seed: int) -> list[Problem]:
  """Prompts of so few characters that every vocabulary here has them."""
  generator = np.random.default_rng([seed, split == 'eval'])
  drawn = generator.integers(0, _IN_PROMPTS, (count, PROMPT))
  return [
      Problem(f'loop/{split}/{i}', 'loop', _written(ids), '')
      for i, ids in enumerate(drawn)
  ]


def reward(problem: Problem, text: str) -> float:
  """A coin for each answer, of its text."""
  del problem
  return float(zlib.crc32(text.encode()) % 2)


def _written(ids: np.ndarray) -> str:
  return ''.join(chr(_FIRST + int(i)) for i in ids)
