"""One-digit addition as questions of a chat: what a small policy can learn.

'What is 3 plus 4? Answer with only the number.' The 100 pairs of digits are
parted into 75 to train on and 25 that are held out, so that a pair and its
commuted twin (3 plus 4, 4 plus 3) are always on one side: a held-out answer can
be no copy of a trained one.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from areal_jax.config import require
from areal_jax.types import Message, Problem

SPLITS = ('train', 'eval')
# 3 doubles and 11 pairs with their twins make 25.
_HELD_OUT_DOUBLES = 3
_HELD_OUT_TWINS = 11


def problems(
    split: Literal['train', 'eval'], count: int, seed: int
) -> list[Problem]:
  """`count` problems of a split, none of them twice.

  Args:
    split: 'train', which has 75, or 'eval', which has 25.
    count: number of problems.
    seed: which pairs are held out, and the order.

  Raises:
    ConfigError: an unknown split, or more problems than it has.
  """
  require(split in SPLITS, 'split', split, f'one of {SPLITS}')
  pairs = _pairs(seed)[split]
  require(1 <= count <= len(pairs), 'count', count, f'1 to {len(pairs)}, the'
          f' pairs of the {split} split')  # fmt: skip
  return [
      Problem(
          id=f'addition/{a}+{b}',
          source='addition',
          prompt=(
              Message(
                  'user', f'What is {a} plus {b}? Answer with only the number.'
              ),
          ),
          answer=str(a + b),
      )
      for a, b in pairs[:count]
  ]


def _pairs(seed: int) -> dict[str, list[tuple[int, int]]]:
  """The pairs of both splits in the order of the seed."""
  random = np.random.default_rng(seed)
  doubles = random.permutation([(a, a) for a in range(10)]).tolist()
  twins = [(a, b) for a in range(10) for b in range(a)]
  twins = random.permutation(twins).tolist()
  held_out = doubles[:_HELD_OUT_DOUBLES]
  for a, b in twins[:_HELD_OUT_TWINS]:
    held_out += [[a, b], [b, a]]
  trained = doubles[_HELD_OUT_DOUBLES:]
  for a, b in twins[_HELD_OUT_TWINS:]:
    trained += [[a, b], [b, a]]
  return {
      name: [tuple(pair) for pair in random.permutation(part).tolist()]
      for name, part in (('train', trained), ('eval', held_out))
  }
