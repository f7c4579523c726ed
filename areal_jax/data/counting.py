"""Counting from one number to another: answers whose lengths have a long tail.

Prompt '37-40=', answer '37;38;39;40.': every number from the first to the
second. A prompt has 6 characters whatever is asked and an answer of k steps has
3 (k + 1), so the law of k is the law of lengths:

  P(k) ∝ k^-1.5 for 1 <= k <= 40

Three answers in five have 6 or 9 characters, one in fifty more than 96. So it
is with reasoning: a few answers are many times as long as most.

Prompts repeat, since those of few steps are many and there are only 90 - k of
k steps; the split is that of the prompt's hash, as in `running_totals.py`.
"""

from __future__ import annotations

from typing import Iterator, Literal

import numpy as np

from areal_jax.config import require
from areal_jax.data.running_totals import SPLITS, split_of
from areal_jax.types import Problem

NUMBERS = (10, 99)  # two digits each, so that lengths depend on k alone
MOST_STEPS = 40
TAIL = 1.5  # exponent of the law
_BLOCK = 1024  # prompts drawn at once


def problems(
    split: Literal['train', 'eval'], count: int, seed: int
) -> list[Problem]:
  """`count` problems of a split.

  Raises:
    ConfigError: an unknown split, or a count below 1.
  """
  return [
      Problem(f'counting/{split}/{i}', 'counting', prompt, answer)
      for i, (prompt, answer) in enumerate(_pairs(split, count, seed))
  ]


def demonstrations(count: int, seed: int) -> list[tuple[str, str]]:
  """Prompts of the train split with their answers."""
  return _pairs('train', count, seed)


def texts(count: int = 200, seed: int = 0) -> list[str]:
  """Prompts with their answers, to train a tokenizer on."""
  return [prompt + answer for prompt, answer in demonstrations(count, seed)]


def law() -> np.ndarray:
  """[MOST_STEPS] P(k) of k = 1, 2, ... steps."""
  weights = np.arange(1, MOST_STEPS + 1, dtype=np.float64) ** -TAIL
  return weights / weights.sum()


def _pairs(split: str, count: int, seed: int) -> list[tuple[str, str]]:
  """`count` (prompt, answer) pairs of one split."""
  require(split in SPLITS, 'split', split, f'one of {SPLITS}')
  require(count >= 1, 'count', count, 'at least 1')
  pairs: list[tuple[str, str]] = []
  for block in _blocks(np.random.default_rng([seed, SPLITS.index(split)])):
    pairs += [pair for pair in block if split_of(pair[0]) == split]
    if len(pairs) >= count:
      break
  return pairs[:count]


def _blocks(generator: np.random.Generator) -> Iterator[list[tuple[str, str]]]:
  """Endless blocks of pairs of both splits."""
  least, greatest = NUMBERS
  while True:
    steps = 1 + generator.choice(MOST_STEPS, _BLOCK, p=law())
    first = generator.integers(least, greatest + 1 - steps)
    yield [
        (f'{a}-{a + k}=', ';'.join(map(str, range(a, a + k + 1))) + '.')
        for a, k in zip(first.tolist(), steps.tolist())
    ]
