"""Reward for answers in words: is the last number that they name the right one?

For policies too weak to keep to a format; `math.py` is the strict one.
"""

from __future__ import annotations

import decimal
import re

from areal_jax.types import Problem

# A sign counts where nothing stands before it that it could subtract from.
_NUMBER = re.compile(
    r'(?:(?<![\w.)\]])[-−])?(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?'
)


def correct(problem: Problem, text: str) -> float:
  """1.0 if the last number of the text is the problem's answer, else 0.0.

  Example: with the answer '7', '3 + 4 = 7.' and '7.0' give 1.0, '7 or 8' 0.0.

  Raises:
    ValueError: the problem's own answer is no number.
  """
  right = _last(problem.answer)
  if right is None:
    raise ValueError(
        f'the answer of problem {problem.id!r} is {problem.answer!r}, wanted a'
        ' number'
    )
  return 1.0 if _last(text) == right else 0.0


def final_number(text: str) -> str | None:
  """The last number of a text in its shortest form, for votes; None without."""
  number = _last(text)
  return None if number is None else f'{number.normalize():f}'


def _last(text: str) -> decimal.Decimal | None:
  found = _NUMBER.findall(text)
  if not found:
    return None
  return decimal.Decimal(found[-1].replace(',', '').replace('−', '-'))
