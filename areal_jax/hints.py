"""What a mistyped flag, word or keyword was probably meant to be.

Pure functions from a text to a hint. They look through the fields of a tree of
settings dataclasses by their declared types, so no value is needed.
"""

from __future__ import annotations

import dataclasses
import difflib
import re
import typing
from typing import Iterator

from areal_jax.config import type_hints, unknown_field

_KEYWORD = re.compile(
    r"TypeError: (\w+)\.__init__\(\) got an unexpected keyword argument '(\w+)'"
)
_SHOWN = 4  # suggestions in one message


def paths(kind: type, above: str = '') -> Iterator[str]:
  """Dotted names of all fields below a settings class, sections included."""
  for name, hint in type_hints(kind).items():
    yield f'{above}{name}'
    for inner in (hint, *typing.get_args(hint)):
      if (
          dataclasses.is_dataclass(inner)
          and typing.get_origin(hint) is not tuple
      ):
        yield from paths(inner, f'{above}{name}.')


def fields_like(kind: type, name: str) -> list[str]:
  """Dotted names of the fields that a name, or part of one, may stand for.

  Args:
    kind: class of the whole tree of settings.
    name: such as 'eta' or 'rollout.eta', perhaps misspelt.

  Returns:
    Those that end with the name; without any, those whose last part is most
    like it. At most four.
  """
  known = list(paths(kind))
  exact = [p for p in known if f'.{p}'.endswith(f'.{name}')]
  if exact:
    return exact[:_SHOWN]
  last = [p.rpartition('.')[2] for p in known]
  near = difflib.get_close_matches(name.rpartition('.')[2], last, 1, 0.75)
  return [p for p, end in zip(known, last) if end in near][:_SHOWN]


def right_form(kind: type, text: str) -> str:
  """Suggests how a word of a command line should be written; '' if unclear.

  Args:
    kind: class of the whole tree of settings.
    text: the word, such as 'eta=2', '--rollout.eta=2' or 'quickstart.py'.
  """
  name, sign, value = text.lstrip('-').partition('=')
  name = name.removeprefix('config.')
  if not sign and re.search(r'\.(py|json)(:\w*)?$', text):
    return f'did you mean --config={text}?'
  if not re.fullmatch(r'[\w.\[\]]+', name):
    return ''
  found = [f'--config.{p}{sign}{value}' for p in fields_like(kind, name)]
  return f'did you mean {" or ".join(found)}?' if found else ''


def wrong_keyword(kind: type, cause: str) -> str:
  """Describes a keyword that a settings class lacks; '' for other causes.

  Args:
    kind: class of the whole tree of settings.
    cause: `Type: message` of the exception that a config file raised.
  """
  found = _KEYWORD.match(cause)
  if found is None:
    return ''
  classes = {c.__name__: c for c in _classes(kind)}
  if found[1] not in classes:
    return ''
  names = [field.name for field in dataclasses.fields(classes[found[1]])]
  return unknown_field(found[1], found[2], names)


def _classes(kind: type) -> Iterator[type]:
  """The class of a tree of settings, and those of all that is in it."""
  yield kind
  for hint in type_hints(kind).values():
    for inner in (hint, *typing.get_args(hint)):
      if dataclasses.is_dataclass(inner):
        yield from _classes(inner)
