"""What the columns of a row mean: published forms and our own.

A published data set is a row of `FORMS`: which columns make the question, which
one holds the right answer, and how the answer is taken out of it. Another data
set whose question and answer have columns of their own is the form 'columns'
with two names; one that needs more is a function of a row.
"""

from __future__ import annotations

import dataclasses
import decimal
import math
import re
from typing import Any, Callable, Iterator, Mapping

from areal_jax.config import ConfigError, require
from areal_jax.types import Message, Problem

OWN = 'problem'  # the form of `own_problem`
_REQUIRED = ('id', 'prompt', 'answer')
_OPTIONAL = ('source', 'meta')
_TERMS = re.compile(r'(\d+),(\d+):(\d+),(\d+)')


def text_of(value: Any) -> str:
  """A text as it is; a number as it is written, 145.0 as '145'.

  Raises:
    ValueError: anything else (a truth value, NaN and infinity too), or an
      empty text.
  """
  if isinstance(value, (float, decimal.Decimal)) and math.isfinite(value):
    # A whole number of more digits than a float holds stays as it is.
    whole = value == int(value) and abs(value) < 2**53
    return str(int(value) if whole else value)
  if isinstance(value, int) and not isinstance(value, bool):
    return str(value)
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f'{value!r}, wanted a text or a number')
  return value


def after_hashes(value: Any) -> str:
  """GSM8K: what follows the last '####', thousands without commas.

  Example: 'He has 2 + 3 = 5.\\n#### 1,234' -> '1234'.

  Raises:
    ValueError: no text with '####' and something behind it.
  """
  before, hashes, gold = str(value).rpartition('####')
  gold = gold.strip()
  if not isinstance(value, str) or not hashes or not gold:
    raise ValueError(f"{value!r}, wanted a text that ends with '#### N'")
  return re.sub(r'(?<=\d),(?=\d{3}(\D|$))', '', gold)


def next_terms(value: Any) -> str:
  """verl's arithmetic sequences: the terms that follow, joined by commas.

  The prompt 'a,b:m,n' asks for the n terms behind b, each the one before plus
  (b - a), modulo m. Example: '8,3:9,4' -> '7,2,6,1'.

  Args:
    value: the prompt, or its messages; the last one asks.

  Raises:
    ValueError: another form of prompt.
  """
  text = value[-1]['content'] if isinstance(value, list) and value else value
  found = _TERMS.fullmatch(text) if isinstance(text, str) else None
  if found is None:
    raise ValueError(f"{value!r}, wanted 'a,b:m,n' with whole numbers")
  first, second, modulus, count = map(int, found.groups())
  if modulus == 0:
    raise ValueError(f'{value!r}, wanted a modulus of at least 1')
  step = second - first
  terms = [(second + k * step) % modulus for k in range(1, count + 1)]
  return ','.join(map(str, terms))


@dataclasses.dataclass(frozen=True)
class Form:
  """The way from rows of a data set to problems.

  Attributes:
    prompt: columns whose texts, joined by a space, make the question; a single
      one may hold the messages of a chat instead. 'a.b' is the field b of the
      object in column a, unless a column is called 'a.b'.
    answer: column that holds the right answer, named in the same way.
    gold: takes the right answer out of that column; raises `ValueError` with
      what it saw and wanted.
    meta: columns kept in `Problem.meta`, of the rows that have them.
  """

  prompt: tuple[str, ...] = ('prompt',)
  answer: str = 'answer'
  gold: Callable[[Any], str] = text_of
  meta: tuple[str, ...] = ()


FORMS: dict[str, Form] = {
    'columns': Form(),
    'gsm8k': Form(('question',), 'answer', after_hashes),
    # The Hendrycks MATH sets and their like (MATH-500, AIME, AMC).
    'math': Form(
        ('problem',),
        meta=('subject', 'type', 'level', 'difficulty', 'unique_id'),
    ),
    'svamp': Form(('Body', 'Question'), 'Answer', meta=('Type',)),
    'arithmetic_sequence': Form(('prompt',), 'prompt', next_terms),
}


def form_problem(
    form: Form,
    columns: Mapping[str, Any],
    problem_id: str,
    source: str,
    at: str,
) -> Problem:
  """The problem of a row of a published form.

  Args:
    form: what its columns mean.
    columns: the row.
    problem_id: the problem's id.
    source: where it comes from.
    at: file and line, for messages.

  Raises:
    ConfigError: a column that is missing or holds something else.
  """
  wanted = sorted({*form.prompt, form.answer})
  found = {name: column(columns, name) for name in wanted}
  missing = [name for name in wanted if found[name] is None]
  if missing:
    nested = any('.' in name for name in missing)
    filled = sorted(_names(columns, nested))
    raise ConfigError(f'{at} has fields {filled}, and misses {missing}')
  if len(form.prompt) == 1:
    prompt = prompt_of(found[form.prompt[0]], f'{at}: {form.prompt[0]}')
  else:
    texts = [found[name] for name in form.prompt]
    for name, text in zip(form.prompt, texts):
      right = isinstance(text, str) and bool(text.strip())
      require(right, f'{at}: {name}', text, 'a text that is not empty')
    prompt = ' '.join(text.strip() for text in texts)
  try:
    gold = form.gold(found[form.answer])
  except ValueError as error:
    raise ConfigError(f'{at}: {form.answer} is {error}') from error
  meta = {c: columns[c] for c in form.meta if columns.get(c) is not None}
  return Problem(problem_id, source, prompt, gold, meta)


def column(columns: Mapping[str, Any], name: str) -> Any:
  """The value of a column, or of a field inside one; None if there is none.

  Example: 'reward_model.ground_truth' of {'reward_model': {'ground_truth': 4}}
  is 4. A column that is called so itself comes first.
  """
  if columns.get(name) is not None:
    return columns[name]
  outer, dot, inner = name.partition('.')
  value = columns.get(outer) if dot else None
  return column(value, inner) if isinstance(value, Mapping) else None


def _names(columns: Mapping[str, Any], nested: bool) -> Iterator[str]:
  """Columns that hold something, and fields inside them if asked for."""
  for name, value in columns.items():
    if nested and isinstance(value, Mapping):
      yield from (f'{name}.{inner}' for inner in _names(value, nested))
    elif value is not None:
      yield name


def own_problem(columns: Mapping[str, Any], source: str, at: str) -> Problem:
  """The problem of a row of our own form.

  Fields: `id` (text or whole number), `prompt` (text, or a list of {"role",
  "content"}) and `answer` (text or number, '' where there is no right answer);
  numbers become texts by `text_of`. Optional: `source` (text), `meta` (object).

  Raises:
    ConfigError: a field is missing, unknown or of another type.
  """
  missing = [name for name in _REQUIRED if name not in columns]
  if missing:
    raise ConfigError(
        f'{at} has fields {sorted(columns)}, and misses {missing}'
    )
  unknown = sorted(set(columns) - {*_REQUIRED, *_OPTIONAL})
  if unknown:
    raise ConfigError(
        f'{at} has unknown fields {unknown}, wanted them inside "meta"'
    )
  # A column that some rows of a Parquet file lack is null there.
  given = {k: v for k, v in columns.items() if k in _REQUIRED or v is not None}
  for name in ('id', 'answer'):
    if not isinstance(given[name], str):
      try:
        given[name] = text_of(given[name])
      except ValueError as error:
        raise ConfigError(f'{at}: {name} is {error}') from error
  meta = given.get('meta', {})
  require(isinstance(meta, dict), f'{at}: meta', meta, 'an object')
  name = given['id']
  require(bool(name), f'{at}: id', name, 'a text that is not empty')
  prompt = prompt_of(given['prompt'], f'{at}: prompt')
  return Problem(
      name, given.get('source', source), prompt, given['answer'], meta
  )


def prompt_of(prompt: Any, at: str) -> str | tuple[Message, ...]:
  """A text, or the messages of a chat, as a problem holds them.

  Raises:
    ConfigError: anything else, or nothing in it.
  """
  wanted = 'a text, or a list of {"role", "content"} with texts'
  blank = isinstance(prompt, str) and not prompt.strip()
  filled = isinstance(prompt, (str, list)) and len(prompt) > 0 and not blank
  require(filled, at, prompt, wanted)
  if isinstance(prompt, str):
    return prompt
  for message in prompt:
    right = (
        isinstance(message, dict)
        and set(message) == {'role', 'content'}
        and all(isinstance(value, str) for value in message.values())
    )
    require(right, at, message, wanted)
  return tuple(Message(m['role'], m['content']) for m in prompt)
