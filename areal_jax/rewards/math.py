"""Reward for mathematics: is the final answer equal to the right one?

The final answer of a text is what its last `\\boxed{...}` holds; boxes one
behind another, joined by no more than 'and' or a comma, are one answer of
several values. Without a box it is the last '#### N', as in GSM8K; without that
what `math-verify` finds by its own rules ('the answer is ...', else the last
formula or number).

Two answers are equal if they are the same text or number, or if `math-verify`
finds them the same mathematics. Its time limits are off, for they work by a
signal and so on the main thread alone; the process that scores is killed when
its time is up (`scorer.py`).
"""

from __future__ import annotations

import decimal
import functools
import logging
import re
from typing import Any

import math_verify

from areal_jax.types import Problem

# It warns on first use that the limits are off.
logging.getLogger('math_verify').setLevel(logging.ERROR)

_MINUS = str.maketrans({'−': '-', '﹣': '-', '-': '-'})
_BOXED = re.compile(r'\\(?:boxed|fbox)\s*\{')
_BRACE = re.compile(r'\\.|[{}]', re.DOTALL)
# What may stand between two boxes of one answer.
_GLUE = re.compile(
    r'(?:\s|[,;$]|\\[()\[\]]|\\q?quad|\\[,; ]|\b(?:and|or)\b'
    r'|\\text\s*\{\s*,?\s*(?:and|or)?\s*\})*'
)
# Four and no more, and a number behind them: a heading has as many.
_HASHES = re.compile(r'(?<!#)####(?!#)[ \t]*([^\n]*\d[^\n]*)')
_NUMBER = re.compile(r'([-+]?)(\d+|\d{1,3}(?:,\d{3})+)?(\.\d+)?')
_CURRENCY = re.compile(r'\\?\$|\s')
# How LaTeX parts thousands.
_PARTED = re.compile(r'(?<=\d)(?:,\\!|\{,\}|\\[,!; ])(?=\d{3}(?!\d))')
# A plus that is no sum: math-verify reads no number behind it.
_PLUS = re.compile(r'(^|[\s$:(])\+(?=\.?\d)')
# What a bare formula lacks: a word, two names in a row, a colon, a frame.
_PROSE = re.compile(
    r'(?<![\\a-zA-Z])[a-zA-Z]{3,}|(?<![\\a-zA-Z])[a-zA-Z]+\s+[a-zA-Z]+'
    r'|[:$]|\\[(\[]'
)


def correct(problem: Problem, text: str) -> float:
  """1.0 if the final answer of the text is the problem's, else 0.0.

  A text without any answer is wrong: 0.0. A box that is never closed is cut
  off, and no answer.

  Raises:
    ValueError: the problem's own answer is not one; a score of 0.0 would blame
      the policy.
  """
  gold = _cleaned(problem.answer)
  right = _parsed_gold(gold) if gold else ()
  if not right:
    raise ValueError(
        f'the answer of problem {problem.id!r} is {problem.answer!r}, wanted a'
        ' number or a formula'
    )
  text = text.translate(_MINUS)
  boxes, whole = _boxes(text)
  answer = _held(boxes) if boxes else _last_line(text)
  if answer is not None and _same(gold, _cleaned(answer)):
    return 1.0
  if boxes:
    framed = _framed(_cleaned(answer))
  else:
    framed = _prose(whole if answer is None else answer)
  found = _parsed(framed)
  return 1.0 if found and _verified(right, found) else 0.0


def final_answer(text: str) -> str | None:
  """Extracts the last box or '#### N' of a text; None if it has neither.

  Example: '... = \\boxed{\\frac{1}{2}}.' -> '\\frac{1}{2}'.
  """
  boxes, _ = _boxes(text)
  return _held(boxes) if boxes else _last_line(text)


def _held(boxes: list[tuple[int, int, str]]) -> str:
  """The content of the last box, or of the last ones of one answer."""
  return ', '.join(held for _, _, held in boxes)


def _last_line(text: str) -> str | None:
  lines = _HASHES.findall(text)
  return lines[-1].strip() if lines else None


def _boxes(text: str) -> tuple[list[tuple[int, int, str]], str]:
  """The (start, end, content) of the last boxes, which make up one answer.

  A box inside of another counts as its content. Also returns the text, less a
  box that is not closed and all behind it.
  """
  boxes: list[tuple[int, int, str]] = []
  whole = text
  for match in _BOXED.finditer(text):
    start, inside = match.span()
    if boxes and start < boxes[-1][1]:
      continue
    closing = _closing(text, inside)
    if closing is None:
      whole = text[:start]
      break
    if boxes and not _GLUE.fullmatch(text, boxes[-1][1], start):
      boxes = []
    boxes.append((start, closing + 1, text[inside:closing].strip()))
  return boxes, whole


def _closing(text: str, inside: int) -> int | None:
  """Index of the brace that closes the one before `inside`."""
  depth = 1
  for match in _BRACE.finditer(text, inside):
    depth += {'{': 1, '}': -1}.get(match.group(), 0)
    if depth == 0:
      return match.start()
  return None


def _cleaned(answer: str) -> str:
  """An answer without the marks around it that mean nothing."""
  answer = _PARTED.sub('', answer.translate(_MINUS))
  return answer.replace('\\$', '').strip().rstrip('.,;').strip()


def _same(gold: str, answer: str) -> bool:
  """Equal as texts or as plain numbers: most right answers, in no time."""
  if gold == answer:
    return True
  numbers = _number(gold), _number(answer)
  return None not in numbers and numbers[0] == numbers[1]


def _number(text: str) -> decimal.Decimal | None:
  """The value of a plain number such as '+7', '1,234', '$3.50' or '- 5'."""
  found = _NUMBER.fullmatch(_CURRENCY.sub('', text))
  if found is None or not (found[2] or found[3]):
    return None
  digits = (found[2] or '').replace(',', '') + (found[3] or '')
  return decimal.Decimal(found[1] + digits)


def _framed(answer: str) -> str:
  """A formula so that `math-verify` takes it for one: it looks for boxes."""
  if (number := _number(answer)) is not None:
    return str(number)
  return answer if '$' in answer else f'\\boxed{{{answer}}}'


def _prose(text: str) -> str:
  """A text so that `math-verify` finds the number or formula in it."""
  if re.search(r'[a-zA-Z^]', text) and not _PROSE.search(text):
    return _framed(_cleaned(text))
  return _PLUS.sub(r'\1', text)


@functools.lru_cache(maxsize=4096)  # every problem has several answers
def _parsed_gold(gold: str) -> tuple[Any, ...]:
  return tuple(_parsed(_framed(gold)))


def _parsed(text: str) -> list[Any]:
  return math_verify.parse(text, parsing_timeout=None, raise_on_error=True)


def _verified(gold: tuple[Any, ...], answer: list[Any]) -> bool:
  return math_verify.verify(
      list(gold), answer, timeout_seconds=None, raise_on_error=True
  )
