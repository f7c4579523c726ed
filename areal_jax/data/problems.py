"""Problems from a function, and checks on problems from anywhere.

A task is a function that returns problems, named as 'package.module:function'.
What is wrong with it is one error, before any device work. Data sets on disk
are read in `sources.py`.
"""

from __future__ import annotations

import inspect
from typing import Any, Sequence

from areal_jax.config import ConfigError, require
from areal_jax.sandbox.call import load_function
from areal_jax.types import Problem


def load_problems(spec: str, /, **arguments: Any) -> list[Problem]:
  """Problems that the function named by the spec returns.

  Args:
    spec: 'package.module:function'.
    **arguments: what the function is called with.

  Raises:
    ConfigError: no such function, arguments that it does not take, or a result
      that is not problems with ids of their own.
  """
  function = load_function(spec, 'data.problems')
  try:
    inspect.signature(function).bind(**arguments)
  except TypeError as error:
    raise ConfigError(
        f'data.problems {spec!r} cannot be called with {arguments}: {error}'
    ) from error
  problems = function(**arguments)
  require(
      isinstance(problems, Sequence) and len(problems) > 0,
      f'the result of {spec!r}',
      type(problems).__name__ if problems else problems,
      'a list of at least one Problem',
  )
  seen = set()
  for i, problem in enumerate(problems):
    at = f'item {i} of the result of {spec!r}'
    require(isinstance(problem, Problem), at, problem, 'a Problem')
    require(problem.id not in seen, f'the id of {at}', problem.id, 'a new id')
    seen.add(problem.id)
  return list(problems)


def require_batches(
    problems: Sequence[Problem], batch_size: int, at: str = 'data'
) -> None:
  """Refuses a data set that is smaller than one batch.

  With fewer, a problem would be in one batch twice.

  Raises:
    ConfigError: fewer than `batch_size` problems; names both numbers.
  """
  require(
      len(problems) >= batch_size,
      f'the number of problems in {at}',
      len(problems),
      f'at least the batch size {batch_size}',
  )
