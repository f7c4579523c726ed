"""Sources: files of problems, alone or mixed by weight.

A source is a file (or a pattern of files), the form of its rows and how its
questions are put to the policy. `read_sources` reads several and says which
part of the problems is whose; in which order they are drawn is the business of
`stream.py`.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import pathlib
from typing import Any, Callable, Literal, Mapping, Sequence

from areal_jax.config import ConfigError, named, require
from areal_jax.data import forms, rows
from areal_jax.data.problems import check_problem, check_text
from areal_jax.data.stream import Part
from areal_jax.sandbox.call import call, load_function
from areal_jax.types import Message, Problem

_SLOT = '{prompt}'


@dataclasses.dataclass
class SourceSettings:
  """Settings of one source of problems.

  Attributes:
    path: a file, or a pattern such as 'train-*.parquet'.
    form: what a row means: 'problem' (our own form), a name in `forms.FORMS`,
      or 'package.module:function', called with a row's columns and returning
      those of our own form.
    format: of the file; empty for what its name ends with.
    name: the source of its problems in tables; empty for the file's name
      without its ending.
    weight: share of the draws beside other sources, relative to theirs.
    limit: rows to take from the beginning; 0 for all.
    bad_rows: whether a row that is not of the form is refused, or left out and
      counted. A file that cannot be read is refused in either case.
    prompt: column of the question, 'a.b' for the field b in column a; with
      form 'columns'.
    answer: column of the right answer, named in the same way; with form
      'columns'.
    template: what is asked, '{prompt}' standing for the question.
    chat: whether the question is put as the user's message of a chat.
    system: message of the system before it; empty for none.
  """

  path: str = ''
  form: str = forms.OWN
  format: Literal['', 'jsonl', 'parquet', 'array_record'] = ''
  name: str = ''
  weight: float = 1.0
  limit: int = 0
  bad_rows: Literal['refuse', 'drop'] = 'refuse'
  prompt: str = ''
  answer: str = ''
  template: str = _SLOT
  chat: bool = False
  system: str = ''

  def validate(self, at: str) -> None:
    require(bool(self.path), f'{at}.path', self.path, 'a file')
    known = [forms.OWN, *forms.FORMS]
    right = self.form in known or ':' in self.form
    require(right, f'{at}.form', self.form,
            f"one of {known} or 'package.module:function'")  # fmt: skip
    right = 0 < self.weight < math.inf
    require(right, f'{at}.weight', self.weight, 'above 0 and finite')
    require(self.limit >= 0, f'{at}.limit', self.limit, 'at least 0')
    for column in ('prompt', 'answer'):
      value = getattr(self, column)
      right = not value or self.form == 'columns'
      require(right, f'{at}.{column}', value, "'' unless form is 'columns'")
    right = self.template.count(_SLOT) == 1
    require(right, f'{at}.template', self.template, f'one {_SLOT!r} in it')
    for name in ('name', 'template', 'system'):
      check_text(getattr(self, name), f'{at}.{name}')
    right = self.chat or not self.system
    require(right, f'{at}.system', self.system, "'' unless chat is True")

  @property
  def title(self) -> str:
    """The name, or what the path says where there is none."""
    return self.name or pathlib.Path(self.path).name.partition('.')[0]


@dataclasses.dataclass(frozen=True)
class Sources:
  """Problems that were read from sources.

  Attributes:
    problems: those of all sources, one source behind another.
    parts: which of them are of which source.
    bad_rows: what was wrong with each row that was left out.
  """

  problems: tuple[Problem, ...]
  parts: tuple[Part, ...]
  bad_rows: tuple[str, ...] = ()


def read_source(
    settings: SourceSettings, owner: dict[str, rows.Row] | None = None
) -> Sources:
  """The problems of one source.

  Rows of our own form bring their ids; others are `<name>/<number>`, counted
  from 0 over all rows of the source.

  Args:
    settings: the source.
    owner: rows of other sources by the ids they took; these are added.

  Raises:
    ConfigError: a file that cannot be read, a row that is not of its form, no
      row that is, or an id that two rows have; names file and line.
  """
  owner = {} if owner is None else owner
  make = _maker(settings)
  problems, bad_rows = [], []
  found = rows.read_rows(settings.path, settings.format)
  for number, row in enumerate(found[: settings.limit or None]):
    try:
      problem = make(number, row)
      problem = dataclasses.replace(
          problem, prompt=_asked(settings, problem.prompt, row.at)
      )
      check_problem(problem, row.at)
    except ConfigError as error:
      if settings.bad_rows == 'refuse':
        raise
      bad_rows.append(str(error))
      continue
    if problem.id in owner:
      other = owner[problem.id]
      place = other.place if other.file == row.file else other.at
      raise ConfigError(
          f'{row.at}: id is {problem.id!r}, which {place} has too, wanted a new'
          ' id, or a `name` of its own for each source'
      )
    owner[problem.id] = row
    problems.append(problem)
  if not problems:
    raise ConfigError(
        f'{settings.path} holds no good row, wanted at least one; the first'
        f' says: {bad_rows[0]}'
    )
  part = Part(settings.title, len(problems), settings.weight)
  return Sources(tuple(problems), (part,), tuple(bad_rows))


def read_sources(settings: Sequence[SourceSettings], at: str) -> Sources:
  """The problems of several sources; see `read_source`.

  Args:
    settings: the sources.
    at: the setting that lists them, for messages.

  Raises:
    ConfigError: what `read_source` refuses; names the source.
  """
  owner: dict[str, rows.Row] = {}
  found = []
  for i, source in enumerate(settings):
    with named(f'{at}[{i}]'):
      found.append(read_source(source, owner))
  return Sources(
      problems=tuple(p for each in found for p in each.problems),
      parts=tuple(part for each in found for part in each.parts),
      bad_rows=tuple(row for each in found for row in each.bad_rows),
  )


def _maker(settings: SourceSettings) -> Callable[[int, rows.Row], Problem]:
  """A function of (number, row) that makes the problem."""
  title = settings.title
  if ':' in settings.form:
    function = load_function(settings.form, 'form')
    try:
      inspect.signature(function).bind({})
    except (TypeError, ValueError) as error:  # ValueError: it has none
      raise ConfigError(
          f'form is {settings.form!r}, which cannot be called with a row:'
          f' {error}'
      ) from error
    return lambda number, row: _by_function(function, number, row, settings)
  if settings.form == forms.OWN:
    return lambda _, row: forms.own_problem(row.columns, title, row.at)
  form = forms.FORMS[settings.form]
  if settings.prompt:
    form = dataclasses.replace(form, prompt=(settings.prompt,))
  if settings.answer:
    form = dataclasses.replace(form, answer=settings.answer)
  return lambda number, row: forms.form_problem(
      form, row.columns, f'{title}/{number}', title, row.at
  )


def _by_function(
    function: Callable[[Mapping[str, Any]], Any],
    number: int,
    row: rows.Row,
    settings: SourceSettings,
) -> Problem:
  """The problem that a user's function makes of a row."""
  outcome = call(function, row.columns)
  if outcome.status != 'ok':
    cause = outcome.detail.splitlines()[0]
    raise ConfigError(f'{row.at}: {settings.form} failed: {cause}')
  made = outcome.value
  at = f'{row.at}: what {settings.form} returned'
  require(isinstance(made, dict), at, made, 'a dict of our own form')
  made = {'id': f'{settings.title}/{number}', **made}
  return forms.own_problem(made, settings.title, at)


def _asked(
    settings: SourceSettings, prompt: str | tuple[Message, ...], at: str
) -> str | tuple[Message, ...]:
  """The question as it is put to the policy."""
  if isinstance(prompt, str):
    text = settings.template.replace(_SLOT, prompt)
    if not settings.chat:
      return text
    prompt = (Message('user', text),)
  elif settings.template != _SLOT:
    raise ConfigError(
        f'{at}: the prompt is {len(prompt)} chat messages, wanted a text for'
        f' the template {settings.template!r}'
    )
  if not settings.system:
    return prompt
  if prompt[0].role == 'system':
    raise ConfigError(
        f'{at}: the prompt has a message of the system, and the source brings'
        f' {settings.system!r}; wanted one of the two'
    )
  return (Message('system', settings.system), *prompt)
