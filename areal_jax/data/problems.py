"""Problems from a function, and checks on problems from anywhere.

A task is a function that returns problems, named as 'package.module:function'.
What is wrong with it is one error, before any device work. Data sets on disk
are read in `sources.py`.
"""

from __future__ import annotations

import inspect
import re
from typing import Any, Iterator, Mapping, Sequence

from areal_jax.config import ConfigError, require
from areal_jax.sandbox.call import load_function
from areal_jax.types import Message, Problem

# Halves of characters outside the basic plane. JSON can spell one alone
# ("\\ud83d"), but no file, tokenizer or terminal can take it.
_HALF = re.compile('[\ud800-\udfff]')
_AROUND = 20  # characters shown on both sides of one


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
    check_problem(problem, at)
    require(problem.id not in seen, f'the id of {at}', problem.id, 'a new id')
    seen.add(problem.id)
  return list(problems)


def check_problem(problem: Problem, at: str) -> None:
  """Refuses a problem whose texts are no texts.

  Args:
    problem: from a file or a function.
    at: where it comes from, for messages.

  Raises:
    ConfigError: a field that is not of its type, a prompt with nothing in it,
      or half of a character (a lone surrogate) anywhere; names the field.
  """
  for name in ('id', 'source', 'answer'):
    value = getattr(problem, name)
    require(isinstance(value, str), f'{at}: {name}', value, 'a text')
  prompt = problem.prompt
  chat = isinstance(prompt, tuple) and all(
      isinstance(message, Message) for message in prompt
  )
  require(isinstance(prompt, str) or chat, f'{at}: prompt', prompt,
          'a text, or a tuple of Message')  # fmt: skip
  blank = isinstance(prompt, str) and not prompt.strip()
  require(bool(prompt) and not blank, f'{at}: prompt', prompt,
          'a text that is not empty')  # fmt: skip
  require(isinstance(problem.meta, Mapping), f'{at}: meta', problem.meta,
          'a mapping')  # fmt: skip
  for name, text in _texts(problem):
    check_text(text, f'{at}: {name}')


def check_text(text: str, at: str) -> None:
  """Refuses a text with half of a character in it.

  Raises:
    ConfigError: a lone surrogate; names it and the characters around it.
  """
  half = None if text.isascii() else _HALF.search(text)
  if half is not None:
    near = text[max(0, half.start() - _AROUND) : half.end() + _AROUND]
    raise ConfigError(
        f'{at} holds {ascii(half.group())} in {ascii(near)}, which is half of a'
        ' character (a lone surrogate), wanted whole characters'
    )


def _texts(problem: Problem) -> Iterator[tuple[str, str]]:
  """Every text of a problem, with the field that it belongs to."""
  for name in ('id', 'source', 'answer'):
    yield name, getattr(problem, name)
  if isinstance(problem.prompt, str):
    yield 'prompt', problem.prompt
  else:
    for message in problem.prompt:
      yield from (('prompt', message.role), ('prompt', message.content))
  yield from (('meta', text) for text in _texts_in(problem.meta))


def _texts_in(value: Any) -> Iterator[str]:
  """Every text in a value as JSON has them, names of fields too."""
  if isinstance(value, str):
    yield value
  elif isinstance(value, Mapping):
    for key, inner in value.items():
      yield from _texts_in(key)
      yield from _texts_in(inner)
  elif isinstance(value, (list, tuple)):
    for inner in value:
      yield from _texts_in(inner)


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
