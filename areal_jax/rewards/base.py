"""What a reward function is, and how one answer is scored with it.

A reward function is `f(problem, text)` with the text that the policy wrote
(the prompt is not in it). It returns a number; or None where it finds no answer
in the text; or either with a dict of parts, `(0.5, {'format': 1.0})`. A score
of 0.0 is a score. What it raises, or a number that is not finite, is an error
and never a score. Nothing here limits its time: `scorer.py` does.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from typing import Any, Callable, Mapping

from areal_jax.config import ConfigError, require
from areal_jax.sandbox.call import call, load_function
from areal_jax.types import Problem, RewardStatus

# (status, score, parts, detail): the fields of a `RewardResult`, plain so that
# they pickle without this package's classes.
Scored = tuple[str, float | None, dict[str, float], str]


def load_reward(
    spec: str, at: str = 'rewards.function'
) -> Callable[[Problem, str], Any]:
  """The reward function that `'package.module:function'` names.

  Raises:
    ConfigError: it cannot be imported or is no plain function that takes a
      problem and a text; names the setting `at`, the spec and the cause.
  """
  function = load_function(spec, at)
  require(
      not inspect.iscoroutinefunction(function),
      at,
      spec,
      'a plain function: rewards run in processes of their own, not awaited',
  )
  try:
    signature = inspect.signature(function)
  except ValueError:  # one written in C that does not say what it takes
    return function
  try:
    signature.bind(None, '')
  except TypeError as error:
    raise ConfigError(
        f'{at} is {spec!r}, which cannot be called with (problem, text):'
        f' {error}'
    ) from error
  return function


def apply(spec: str, problem: Problem, text: str) -> Scored:
  """Scores one text; runs in the workers and, as well, anywhere else.

  Args:
    spec: see `load_reward`.
    problem: what was asked.
    text: what the policy wrote after the prompt.

  Raises:
    ConfigError: the spec names no reward function.
  """
  function = _loaded(spec)
  outcome = call(function, problem, text)
  if outcome.status != 'ok':
    return RewardStatus.ERROR.value, None, {}, outcome.detail
  return _scored(outcome.value)


_loaded = functools.cache(load_reward)


def _scored(value: Any) -> Scored:
  """The four-way result that a returned value stands for."""
  parts = {}
  if isinstance(value, tuple) and len(value) == 2:
    value, parts = value
  if not _are_parts(parts) or not (value is None or _is_number(value)):
    seen = repr(value) if not parts else repr((value, parts))
    return (
        RewardStatus.ERROR.value,
        None,
        {},
        f'the reward returned {seen[:200]}, wanted a number, None, or either'
        ' with a dict of numbers',
    )
  parts = {name: float(part) for name, part in parts.items()}
  if value is None:
    return RewardStatus.UNPARSEABLE.value, None, parts, ''
  score = float(value)
  if not math.isfinite(score):
    detail = f'the reward returned {score}, wanted a finite number'
    return RewardStatus.ERROR.value, None, parts, detail
  return RewardStatus.OK.value, score, parts, ''


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real)


def _are_parts(parts: Any) -> bool:
  return isinstance(parts, Mapping) and all(
      isinstance(name, str) and _is_number(part) for name, part in parts.items()
  )
