"""Problems from a function or a file, and the checks on them.

A task is a function that returns problems, named as 'package.module:function';
a data set on disk is JSON lines. What is wrong with either is one error, before
any device work.
"""

from __future__ import annotations

import inspect
import json
import os
import pathlib
from typing import Any, Mapping, Sequence

from areal_jax.config import ConfigError, require
from areal_jax.sandbox.call import load_function
from areal_jax.types import Message, Problem

_REQUIRED = ('id', 'prompt', 'answer')
_OPTIONAL = ('source', 'meta')


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


def read_jsonl(path: str | os.PathLike) -> list[Problem]:
  """Problems of a JSON lines file, UTF-8, one object a line.

  Fields: `id` (text), `prompt` (text, or a list of {"role", "content"}) and
  `answer` (text); optional `source` (text, otherwise the name of the file) and
  `meta` (object). Empty lines are passed over.

  Raises:
    ConfigError: no such file, no problem in it, or a row that is not of this
      form or repeats an id; names file and line.
  """
  path = pathlib.Path(path)
  require(path.is_file(), 'data path', str(path), 'a JSON lines file')
  problems = []
  line_of = {}
  for number, line in enumerate(path.read_bytes().splitlines(), start=1):
    if not line.strip():
      continue
    at = f'{path} line {number}'
    problem = _problem(_object(line, at), path.stem, at)
    if problem.id in line_of:
      raise ConfigError(
          f'{at}: id is {problem.id!r}, which line {line_of[problem.id]} has'
          ' too, wanted a new id'
      )
    line_of[problem.id] = number
    problems.append(problem)
  if not problems:
    raise ConfigError(f'{path} holds no row, wanted at least one problem')
  return problems


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


def _object(line: bytes, at: str) -> Mapping[str, Any]:
  """The JSON object of a line."""
  try:
    row = json.loads(line.decode('utf-8-sig'))
  except UnicodeDecodeError as error:
    raise ConfigError(f'{at} is not UTF-8: {error}') from error
  except json.JSONDecodeError as error:
    raise ConfigError(f'{at} is not JSON: {error}') from error
  if not isinstance(row, dict):
    raise ConfigError(f'{at} is a {type(row).__name__}, wanted an object')
  return row


def _problem(row: Mapping[str, Any], source: str, at: str) -> Problem:
  """The problem of a row, each field checked."""
  missing = [name for name in _REQUIRED if name not in row]
  if missing:
    raise ConfigError(f'{at} has fields {sorted(row)}, and misses {missing}')
  unknown = sorted(set(row) - {*_REQUIRED, *_OPTIONAL})
  if unknown:
    raise ConfigError(
        f'{at} has unknown fields {unknown}, wanted them inside "meta"'
    )
  for name in ('id', 'answer', 'source'):
    value = row.get(name, '')
    require(isinstance(value, str), f'{at}: {name}', value, 'a text')
  meta = row.get('meta', {})
  require(isinstance(meta, dict), f'{at}: meta', meta, 'an object')
  require(bool(row['id']), f'{at}: id', row['id'], 'a text that is not empty')
  prompt = _prompt(row['prompt'], at)
  return Problem(
      row['id'], row.get('source', source), prompt, row['answer'], meta
  )


def _prompt(prompt: Any, at: str) -> str | tuple[Message, ...]:
  """The prompt of a row: a text, or the messages of a chat."""
  wanted = 'a text, or a list of {"role", "content"} with texts'
  filled = isinstance(prompt, (str, list)) and len(prompt) > 0
  require(filled, f'{at}: prompt', prompt, wanted)
  if isinstance(prompt, str):
    return prompt
  for message in prompt:
    right = (
        isinstance(message, dict)
        and set(message) == {'role', 'content'}
        and all(isinstance(value, str) for value in message.values())
    )
    require(right, f'{at}: prompt', message, wanted)
  return tuple(Message(m['role'], m['content']) for m in prompt)
