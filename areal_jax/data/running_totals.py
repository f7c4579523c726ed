"""The quickstart task: add one-digit numbers, writing every running total.

Prompt '3+5+7=', answer '8;15.': the total after each addition, ';' between
two, '.' after the last. Answers run from 2 to 15 characters.

The hash of a prompt says to which split it belongs, so that no prompt of one
split can turn up in another, whatever the counts and seeds.
"""

from __future__ import annotations

import hashlib
from typing import Iterator, Literal

import numpy as np

from areal_jax.config import ConfigError, require
from areal_jax.types import Problem

SPLITS = ('train', 'eval')
LENGTHS = (2, 6)
HABIT = 0.62  # short demonstrations among those that can be
_EVAL_SHARE = 1 / 8
_BLOCK = 4096  # prompts drawn at once
_DRY = 20  # blocks without a new prompt after which none is expected


def problems(
    split: Literal['train', 'eval'],
    count: int,
    seed: int,
    lengths: tuple[int, int] = LENGTHS,
) -> list[Problem]:
  """`count` problems of a split, none of them twice.

  How many numbers a prompt has is uniform over `lengths` as long as there are
  unused prompts of that length; two numbers make 100 prompts in both splits
  together, so large sets have fewer of those.

  Args:
    split: 'train' or 'eval'.
    count: number of problems.
    seed: which ones, and their order.
    lengths: least and greatest number of numbers.

  Raises:
    ConfigError: an unknown split, other lengths than 2 <= least <= greatest, or
      more problems than the split has.
  """
  require(count >= 1, 'count', count, 'at least 1')
  found: dict[str, str] = {}
  dry = 0
  for prompts, answers in _blocks(split, seed, lengths):
    before = len(found)
    for prompt, answer in zip(prompts, answers):
      if len(found) < count:
        found.setdefault(prompt, ';'.join(answer) + '.')
    dry = dry + 1 if len(found) == before else 0
    if len(found) == count:
      break
    if dry == _DRY:
      raise ConfigError(
          f'count is {count}, but only {len(found)} prompts of {lengths[0]} to'
          f' {lengths[1]} numbers were found in the {split} split'
      )
  return [
      Problem(f'totals/{split}/{i}', 'totals', prompt, answer)
      for i, (prompt, answer) in enumerate(found.items())
  ]


def demonstrations(
    count: int,
    seed: int,
    early_stop: float = 0.0,
    lengths: tuple[int, int] = LENGTHS,
) -> list[tuple[str, str]]:
  """Worked prompts of the train split, some with a bad habit.

  A habit of stopping one total too early ('3+5+7=' -> '8.') is what the reward
  then has to break; the arithmetic before it is right.

  Args:
    count: number of (prompt, answer) pairs; prompts may repeat.
    seed: which ones.
    early_stop: probability of the habit in an answer of two totals or more. An
      answer of one total has nothing to leave out and stays whole, so of all
      answers a share `early_stop * 4 / 5` is short with the default lengths.
    lengths: least and greatest number of numbers, each equally likely.

  Raises:
    ConfigError: a share outside [0, 1], or lengths as in `problems`.
  """
  require(count >= 1, 'count', count, 'at least 1')
  require(0 <= early_stop <= 1, 'early_stop', early_stop, 'in [0, 1]')
  # Its own stream of random numbers: the same prompts with any share.
  chance = np.random.default_rng([seed, 2])
  pairs = []
  for prompts, answers in _blocks('train', seed, lengths):
    cut = chance.random(len(prompts)) < early_stop
    for prompt, totals, short in zip(prompts, answers, cut):
      if short and len(totals) > 1:
        totals = totals[:-1]
      pairs.append((prompt, ';'.join(totals) + '.'))
    if len(pairs) >= count:
      break
  return pairs[:count]


def habitual(count: int, seed: int) -> list[tuple[str, str]]:
  """Demonstrations of which `HABIT` have the habit: the quickstart's own."""
  return demonstrations(count, seed, HABIT)


def texts(count: int = 1000, seed: int = 0) -> list[str]:
  """Prompts with their answers, to train a tokenizer on."""
  return [prompt + answer for prompt, answer in demonstrations(count, seed)]


def _blocks(
    split: str, seed: int, lengths: tuple[int, int]
) -> Iterator[tuple[list[str], list[list[str]]]]:
  """Endless blocks of (prompts, totals of each prompt) of one split."""
  require(split in SPLITS, 'split', split, f'one of {SPLITS}')
  least, greatest = lengths
  require(2 <= least <= greatest, 'lengths', lengths, '2 <= least <= greatest')
  generator = np.random.default_rng([seed, SPLITS.index(split)])
  # Text of every total that can occur, made once: half the time otherwise.
  text_of = [str(total) for total in range(9 * greatest + 1)]
  while True:
    terms = generator.integers(least, greatest + 1, _BLOCK)
    digits = generator.integers(0, 10, (_BLOCK, greatest))
    totals = np.cumsum(digits, axis=1).tolist()
    prompts, answers = [], []
    for n, row, sums in zip(terms.tolist(), digits.tolist(), totals):
      prompt = '+'.join([text_of[digit] for digit in row[:n]]) + '='
      if split_of(prompt) == split:
        prompts.append(prompt)
        answers.append([text_of[total] for total in sums[1:n]])
    yield prompts, answers


def split_of(prompt: str) -> str:
  """The split that a prompt belongs to: 'eval' for one in eight."""
  digest = hashlib.blake2b(prompt.encode('ascii'), digest_size=4).digest()
  is_eval = int.from_bytes(digest, 'little') < _EVAL_SHARE * 2**32
  return 'eval' if is_eval else 'train'
