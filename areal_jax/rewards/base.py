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

# Names of first parameters by which reward functions of other libraries are
# known: TRL calls with batches, verl with a solution and the right answer.
_FOREIGN = frozenset({
    'completion_ids', 'completions', 'data_source', 'ground_truth', 'prompts',
    'queries', 'responses', 'solution_str', 'solutions',
})  # fmt: skip


class BadReward(ValueError):
  """The reward gives no score where a run needs one; the text is one line."""


def load_reward(
    spec: str, at: str = 'rewards.function'
) -> Callable[[Problem, str], Any]:
  """The reward function that `'package.module:function'` names.

  Raises:
    ConfigError: it cannot be imported or is no plain function that takes a
      problem and a text; names the setting `at`, the spec and the cause.
  """
  function = load_function(spec, at)
  kinds = (
      inspect.iscoroutinefunction,
      inspect.isasyncgenfunction,
      inspect.isgeneratorfunction,
  )
  forms = (function, type(function).__call__)  # an instance may be awaited
  require(
      not any(kind(form) for kind in kinds for form in forms),
      at,
      spec,
      'a plain function that returns its score: rewards run in processes of'
      ' their own, not awaited, and yield nothing',
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
  first = list(signature.parameters)[:2]
  if _FOREIGN & set(first):
    raise ConfigError(
        f'{at} is {spec!r}, whose first parameters are {", ".join(first)},'
        ' wanted a function of (problem, text) that scores one answer; write'
        f' one that calls {spec.partition(":")[2]} with problem.prompt,'
        ' problem.answer and the text'
    )
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
  outcome = call(function, problem, text, catch=(Exception, SystemExit))
  if outcome.status != 'ok':
    return RewardStatus.ERROR.value, None, {}, f'{spec} raised {outcome.detail}'
  return _scored(spec, text, outcome.value)


_loaded = functools.cache(load_reward)


def _scored(spec: str, text: str, value: Any) -> Scored:
  """The four-way result that a returned value stands for.

  Args:
    spec: of the function.
    text: that it was given.
    value: that it returned.
  """
  parts = {}
  if isinstance(value, tuple) and len(value) == 2:
    value, parts = value
  if not _are_parts(parts) or not (value is None or _is_number(value)):
    seen = ' '.join((repr((value, parts)) if parts else repr(value)).split())
    return (
        RewardStatus.ERROR.value,
        None,
        {},
        f'{spec} returned {seen[:100]} ({type(value).__name__}), wanted a'
        ' number, None, or either with a dict of numbers',
    )
  parts = {name: float(part) for name, part in parts.items()}
  if value is None:
    detail = f'{spec} returned None: it found no answer in {text[:60]!r}'
    return RewardStatus.UNPARSEABLE.value, None, parts, detail
  score = float(value)
  if not math.isfinite(score):
    detail = f'{spec} returned {score}, wanted a finite number'
    return RewardStatus.ERROR.value, None, parts, detail
  return RewardStatus.OK.value, score, parts, ''


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real)


def _are_parts(parts: Any) -> bool:
  return isinstance(parts, Mapping) and all(
      isinstance(name, str) and _is_number(part) for name, part in parts.items()
  )
