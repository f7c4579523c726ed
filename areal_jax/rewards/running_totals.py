"""Reward of the running-totals task of `areal_jax/data/running_totals.py`."""

from __future__ import annotations

from areal_jax.types import Problem


def exact(problem: Problem, text: str) -> float:
  """1.0 if the text is the answer, character for character, else 0.0.

  Example: the answer of '3+5+7=' is '8;15.'; '8.' and ' 8;15.' give 0.0.
  """
  return 1.0 if text == problem.answer else 0.0
