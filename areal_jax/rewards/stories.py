"""Rewards on the English of small story models: rules that a text can meet.

Each takes the text after the opening, not the opening itself, so that what the
opening says earns nothing. All lie in [0, 1].
"""

from __future__ import annotations

import re

from areal_jax.types import Problem

_ENDED = re.compile(r'[^.!?]*[.!?]+')


def quote(problem: Problem, text: str) -> float:
  """min(pairs of double quotes, 2) / 2: somebody speaks, twice for 1.0."""
  del problem
  return min(text.count('"') // 2, 2) / 2


def happy(problem: Problem, text: str) -> float:
  """1.0 if the letters 'happy' occur (in 'unhappy' too), else 0.0."""
  del problem
  return 1.0 if 'happy' in text else 0.0


def name(problem: Problem, text: str) -> float:
  """Share of the sentences that name the subject of the opening.

  A sentence ends with a full stop, exclamation or question mark and has a
  letter; a last one that the token limit cuts off is not counted. Without any
  sentence the reward is 0.0.

  Args:
    problem: `meta['subject']` is the name, such as 'Lily'; "Lily's" names it,
      'Lilyan' does not.
    text: the continuation of the opening.
  """
  sentences = [s for s in _ENDED.findall(text) if any(c.isalpha() for c in s)]
  if not sentences:
    return 0.0
  subject = re.compile(rf'\b{re.escape(problem.meta["subject"])}\b')
  naming = sum(1 for s in sentences if subject.search(s))
  return naming / len(sentences)
