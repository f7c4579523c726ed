"""Settings: how they are checked, frozen and written down.

A setting is a field of a dataclass that stands beside the code it sets up.
The dataclasses are open while flags are read (`ml_collections.config_flags`
assigns to them); `resolve` then checks types and values of the whole tree and
returns a frozen, hashable copy. A dataclass that has more to say about its
values defines `validate(self, at)`, where `at` is its path in the tree, and
calls `require` there. Checks that span several rooms live in `experiment.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import re
import types
import typing
from typing import Any, Iterator, Sequence

_SECRET = re.compile(
    r'(api_?key|secret|password|passwd|token$|credential|authorization)', re.I
)
_SECRET_VALUE = re.compile(r'\b(sk-|hf_|ghp_|xox[abp]-|AKIA)[\w-]{8,}')
REDACTED = '<redacted>'


class ConfigError(ValueError):
  """A user's mistake in the settings: one line, field, seen and wanted."""


def require(right: bool, field: str, seen: Any, wanted: str) -> None:
  """Raises `ConfigError` with the field, the value seen and the one wanted."""
  if not right:
    raise ConfigError(f'{field} is {seen!r}, wanted {wanted}')


@contextlib.contextmanager
def named(setting: str) -> Iterator[None]:
  """Puts a setting's name before what a lower room says of its value."""
  try:
    yield
  except ConfigError as error:
    raise ConfigError(f'{setting}: {error}') from error


def unknown_field(at: str, name: str, known: Sequence[str]) -> str:
  """What to say of a field that `at` lacks: the one most like it, or all."""
  near = difflib.get_close_matches(name, known, n=1)
  wanted = repr(near[0]) if near else f'one of {sorted(known)}'
  return f'{at} has no field {name!r}, wanted {wanted}'


def resolve(settings: Any, at: str = 'config') -> Any:
  """Checks a tree of settings dataclasses and returns a frozen copy of it.

  Raises:
    ConfigError: an attribute that is no field, a value of the wrong type, or
      one that `validate` refuses.
  """
  right = dataclasses.is_dataclass(settings) and not isinstance(settings, type)
  require(right, at, settings, 'a dataclass of settings')
  names = [field.name for field in dataclasses.fields(settings)]
  for name in vars(settings):  # a misspelt assignment makes a new attribute
    if name not in names and name != '_resolved':
      raise ConfigError(unknown_field(at, name, names))
  values = {}
  hints = _type_hints(type(settings))
  for field in dataclasses.fields(settings):
    path = f'{at}.{field.name}'
    value = getattr(settings, field.name)
    value = _checked(value, hints[field.name], path)
    values[field.name] = _resolved(value, path)
  frozen = _frozen_type(_open_type(type(settings)))(**values)
  validate = getattr(frozen, 'validate', None)
  if validate is not None:
    validate(at)
  return frozen


def _resolved(value: Any, path: str) -> Any:
  """A checked value; settings in it, alone or in a tuple, are resolved."""
  if isinstance(value, tuple):
    return tuple(_resolved(v, f'{path}[{i}]') for i, v in enumerate(value))
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return resolve(value, path)
  return value


def to_dict(settings: Any) -> Any:
  """A tree of settings as plain data for JSON, secrets replaced."""
  if dataclasses.is_dataclass(settings) and not isinstance(settings, type):
    return {
        f.name: _redacted(f.name, to_dict(getattr(settings, f.name)))
        for f in dataclasses.fields(settings)
    }
  if isinstance(settings, dict):
    return {str(k): _redacted(str(k), to_dict(v)) for k, v in settings.items()}
  if isinstance(settings, (list, tuple)):
    return [to_dict(v) for v in settings]
  if isinstance(settings, float) and not math.isfinite(settings):
    return str(settings)
  if settings is None or isinstance(settings, (bool, int, float)):
    return settings
  return _SECRET_VALUE.sub(REDACTED, str(settings))


def from_dict(kind: type, values: Any, at: str = 'config') -> Any:
  """The tree of settings that `to_dict` wrote, open again.

  Fields that are missing have their defaults. Values are checked when the tree
  is resolved.

  Raises:
    ConfigError: a field that `kind` lacks, or a tree of another form.
  """
  require(isinstance(values, dict), at, values, f'fields of {kind.__name__}')
  hints = _type_hints(kind)
  for name in values:
    if name not in hints:
      raise ConfigError(unknown_field(at, name, list(hints)))
  try:
    return _open_type(kind)(
        **{
            name: _from_plain(value, hints[name], f'{at}.{name}')
            for name, value in values.items()
        }
    )
  except TypeError as error:  # a field without a default is missing
    raise ConfigError(f'{at}: {error}') from error


def _from_plain(value: Any, hint: Any, path: str) -> Any:
  """A field's value from JSON: what JSON lacks is told by its type."""
  origin, inner = typing.get_origin(hint), typing.get_args(hint)
  if origin in (typing.Union, types.UnionType):
    # The only unions of settings are with None.
    trees = [option for option in inner if dataclasses.is_dataclass(option)]
    tree = trees and isinstance(value, dict)
    return _from_plain(value, trees[0], path) if tree else value
  if dataclasses.is_dataclass(hint):
    return from_dict(hint, value, path)
  if origin is tuple and isinstance(value, list):
    if inner[-1] is Ellipsis:
      inner = inner[:1] * len(value)
    return tuple(
        _from_plain(v, t, f'{path}[{i}]')
        for i, (v, t) in enumerate(zip(value, inner))
    )
  if hint is float and value in ('inf', '-inf'):
    return float(value)
  return value


def _redacted(name: str, value: Any) -> Any:
  """Hides a value whose field name says that it is a secret."""
  return REDACTED if value and _SECRET.search(name) else value


def _checked(value: Any, hint: Any, path: str) -> Any:
  """The value in the type that its field declares (int to float only)."""
  origin = typing.get_origin(hint)
  if hint is Any:
    return value
  if origin in (typing.Union, types.UnionType):
    options = typing.get_args(hint)
    if value is None and type(None) in options:
      return None
    for option in options:
      if option is not type(None):
        try:
          return _checked(value, option, path)
        except ConfigError:
          continue
    raise ConfigError(f'{path} is {value!r}, wanted {_type_name(hint)}')
  if origin is tuple:
    require(isinstance(value, (tuple, list)), path, value, _type_name(hint))
    inner = typing.get_args(hint)
    if len(inner) == 2 and inner[1] is Ellipsis:
      inner = (inner[0],) * len(value)
    require(len(inner) == len(value), path, value, _type_name(hint))
    items = zip(value, inner)
    return tuple(
        _checked(v, t, f'{path}[{i}]') for i, (v, t) in enumerate(items)
    )
  if origin is dict:
    require(isinstance(value, dict), path, value, _type_name(hint))
    return value
  if origin is typing.Literal:
    options = typing.get_args(hint)
    require(value in options, path, value, f'one of {list(options)}')
    return value
  if hint is float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN is below and above nothing, so it would pass most checks that follow.
    require(number and value == value, path, value, 'a number')
    return float(value)
  if hint is int:
    whole = isinstance(value, int) and not isinstance(value, bool)
    require(whole, path, value, 'a whole number')
    return value
  if isinstance(hint, type):
    require(isinstance(value, hint), path, value, f'a {hint.__name__}')
  return value


def _type_name(hint: Any) -> str:
  return str(hint).replace('typing.', '')


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
  return typing.get_type_hints(_open_type(kind))


def _open_type(kind: type) -> type:
  """The dataclass as written, for one that `resolve` may have frozen."""
  return getattr(kind, '_open', kind)


@functools.cache
def _frozen_type(kind: type) -> type:
  """A subclass of the dataclass whose instances refuse assignment."""

  def refuse(self, name, value):
    if getattr(self, '_resolved', False):
      raise AttributeError(
          f'{kind.__name__}.{name} cannot be set: the settings are resolved'
      )
    object.__setattr__(self, name, value)

  def hashed(self):
    return hash(
        tuple(
            _hashable(getattr(self, f.name)) for f in dataclasses.fields(self)
        )
    )

  def initialise(self, **values):
    kind.__init__(self, **values)
    object.__setattr__(self, '_resolved', True)

  return type(
      kind.__name__,
      (kind,),
      {
          '__module__': kind.__module__,
          '__qualname__': kind.__qualname__,
          '__init__': initialise,
          '__setattr__': refuse,
          '__hash__': hashed,
          '_open': kind,
      },
  )


def _hashable(value: Any) -> Any:
  if isinstance(value, dict):
    return tuple(sorted((k, _hashable(v)) for k, v in value.items()))
  return value


def open_for_flags(kind: type) -> None:
  """Lets `ml_collections.config_flags` read a tree of settings dataclasses.

  It takes a field's type as written and knows neither the strings that
  postponed annotations leave there nor `Literal`; both are put right in place.
  """
  hints = _type_hints(kind)
  for field in dataclasses.fields(kind):
    hint = hints[field.name]
    if typing.get_origin(hint) is typing.Literal:
      hint = type(typing.get_args(hint)[0])
    field.type = hint
    for inner in (hint, *typing.get_args(hint)):  # also those in a tuple
      if dataclasses.is_dataclass(inner):
        open_for_flags(inner)
