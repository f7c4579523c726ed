"""Settings: how they are checked, frozen and written down.

A setting is a field of a dataclass that stands beside the code it sets up.
The dataclasses are open while flags are read (`ml_collections.config_flags`
assigns to them); `resolve` then checks types and values of the whole tree and
returns a frozen, hashable copy. A dataclass that has more to say about its
values defines `validate(self, at)`, where `at` is its path in the tree, and
calls `require` there. Checks that span several rooms live in
`settings/`.

All mistakes of a tree are told together. Inside `validate`, `require` notes a
mistake and goes on. A check that fails after it has read a setting that was
refused before says nothing: it would only repeat that mistake in other words.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import difflib
import functools
import math
import pathlib
import re
import types
import typing
from typing import Any, Iterator, Sequence

_SECRET = re.compile(
    r'(api_?key|secret|password|passwd|token$|credential|authorization)', re.I
)
_SECRET_VALUE = re.compile(r'\b(sk-|hf_|ghp_|xox[abp]-|AKIA)[\w-]{8,}')
_REPOSITORY = re.compile(r'\w[\w.-]*/\w[\w.-]*')  # owner/name
REDACTED = '<redacted>'


class ConfigError(ValueError):
  """Mistakes of a user in the settings.

  Each argument is one mistake: one line with the field, the value seen and the
  value wanted.
  """

  @property
  def mistakes(self) -> tuple[str, ...]:
    return tuple(map(str, self.args))

  def __str__(self) -> str:
    return '\n'.join(self.mistakes)


class Mistakes:
  """Collects the mistakes of checks that do not depend on each other.

    mistakes = Mistakes()
    with mistakes:
      first_check()
    with mistakes:
      second_check()
    mistakes.tell()

  A `ConfigError` ends its own block alone.
  """

  def __init__(self):
    self.lines: list[str] = []

  def __enter__(self) -> Mistakes:
    return self

  def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
    if not isinstance(error, ConfigError):
      return False
    self.lines += error.mistakes
    return True

  def tell(self) -> None:
    """Raises `ConfigError` with all mistakes, each once; returns if none."""
    if self.lines:
      raise ConfigError(*dict.fromkeys(self.lines))


class _Unknown(Exception):
  """A check reads a setting of the wrong type, and there is no other value."""


@dataclasses.dataclass
class _Check:
  """The `validate` that runs.

  Attributes:
    node: the settings that it belongs to.
    at: their path.
    lines: mistakes found so far, in the whole tree.
    doubtful: whether a refused setting was read since the last `require`.
  """

  node: Any
  at: str
  lines: list[str]
  doubtful: bool = False


_check: contextvars.ContextVar[_Check | None] = contextvars.ContextVar(
    'check', default=None
)


def require(right: bool, field: str, seen: Any, wanted: str) -> None:
  """Refuses a setting unless its value is right.

  Args:
    right: whether it is.
    field: name of the setting.
    seen: its value.
    wanted: what it should be.

  Raises:
    ConfigError: it is not right. Inside `validate`, the mistake is noted
      instead, and `resolve` raises it with all others.
  """
  check = _check.get()
  mistake = f'{field} is {seen!r}, wanted {wanted}'
  if check is None:
    if not right:
      raise ConfigError(mistake)
    return
  doubtful, check.doubtful = check.doubtful, False
  if not right and not doubtful:
    check.lines.append(mistake)
    _mark_refused(check.node, field.removeprefix(f'{check.at}.'))


@contextlib.contextmanager
def named(setting: str) -> Iterator[None]:
  """Puts a setting's name before what a lower room says of its value."""
  try:
    yield
  except ConfigError as error:
    lines = (f'{setting}: {mistake}' for mistake in error.mistakes)
    raise ConfigError(*lines) from error


def unknown_field(at: str, name: str, known: Sequence[str]) -> str:
  """Describes a field that `at` lacks, with the most similar one or all."""
  near = difflib.get_close_matches(name, known, n=1)
  wanted = repr(near[0]) if near else f'one of {sorted(known)}'
  return f'{at} has no field {name!r}, wanted {wanted}'


def fetching(path: str, kind: str = 'model') -> str:
  """Says how to fetch what a path names, if it may be a repository; else ''.

  Example: 'Qwen/Qwen2.5-0.5B' is a name on the Hugging Face Hub unless there is
  a folder Qwen here.

  Args:
    path: where nothing was found.
    kind: of the repository, 'model' or 'dataset'.
  """
  owner, _, name = str(path).partition('/')
  if not _REPOSITORY.fullmatch(str(path)) or pathlib.Path(owner).exists():
    return ''
  more = ' --repo-type dataset' if kind == 'dataset' else ''
  return (
      '; a repository of the Hugging Face Hub has to be fetched first: hf'
      f' download {path}{more} --local-dir {name}, and then the path is'
      f' {name}'
  )


def resolve(settings: Any, at: str = 'config') -> Any:
  """Checks a tree of settings dataclasses and returns a frozen copy of it.

  Raises:
    ConfigError: with every attribute that is no field, every value of the wrong
      type, and every one that `validate` refuses.
  """
  mistakes = Mistakes()
  with mistakes:
    frozen = _resolve(settings, at, mistakes.lines)
  mistakes.tell()
  return frozen


def _resolve(settings: Any, at: str, lines: list[str]) -> Any:
  """The frozen copy of one node and of all below; adds mistakes to `lines`."""
  mistakes = Mistakes()
  mistakes.lines = lines
  right = dataclasses.is_dataclass(settings) and not isinstance(settings, type)
  if not right:
    raise ConfigError(f'{at} is {settings!r}, wanted a dataclass of settings')
  names = [field.name for field in dataclasses.fields(settings)]
  for name in vars(settings):  # a misspelt assignment makes a new attribute
    if name not in names and name != '_resolved':
      lines.append(unknown_field(at, name, names))
  values, unreadable = {}, []
  hints = type_hints(type(settings))
  for name in names:
    path = f'{at}.{name}'
    values[name] = getattr(settings, name)
    unreadable.append(name)
    with mistakes, _outside_of_checks():
      values[name] = _checked(values[name], hints[name], path)
      values[name] = _resolved(values[name], path, lines)
      unreadable.pop()
  frozen = _frozen_type(_open_type(type(settings)))(**values)
  for name in unreadable:
    _watch(frozen, name, readable=False)
  _validate(frozen, at, lines)
  return frozen


@contextlib.contextmanager
def _outside_of_checks() -> Iterator[None]:
  """Lets `require` raise, also where a `validate` resolves settings."""
  token = _check.set(None)
  try:
    yield
  finally:
    _check.reset(token)


def _validate(frozen: Any, at: str, lines: list[str]) -> None:
  """Runs the `validate` of one node; adds its mistakes to `lines`."""
  validate = getattr(frozen, 'validate', None)
  if validate is None:
    return
  check = _Check(frozen, at, lines)
  token = _check.set(check)
  try:
    validate(at)
  except _Unknown:
    pass  # what is wrong with that setting is told already
  except ConfigError as error:
    if not check.doubtful:
      lines += error.mistakes
  except ArithmeticError:
    if not lines:
      raise  # else it has computed with a value that was refused
  finally:
    _check.reset(token)


def _mark_refused(node: Any, path: str) -> None:
  """Notes that the setting at a path below `node` was refused."""
  *above, name = path.replace('[', '.').replace(']', '').split('.')
  for part in above:
    if isinstance(node, tuple):
      node = node[int(part)]
    elif dataclasses.is_dataclass(node):
      node = vars(node).get(part)
  if dataclasses.is_dataclass(node) and name in vars(node):
    _watch(node, name)


def _watch(node: Any, name: str, readable: bool = True) -> None:
  """Tells the check that runs when this field is read.

  Args:
    node: frozen settings.
    name: of the field.
    readable: whether the value has the right type. In place of another, a
      check reads the default; it raises `_Unknown` if there is none, or if it
      is a section, whose fields would not be doubted.
  """
  (default,) = (f.default for f in dataclasses.fields(node) if f.name == name)

  def read(self):
    check = _check.get()
    if check is not None:
      check.doubtful = True
      if not readable:
        if default is dataclasses.MISSING:
          raise _Unknown(name)
        return default
    return vars(self)[name]

  kind = type(node)
  watched = type(
      kind.__name__,
      (kind,),
      {
          '__module__': kind.__module__,
          '__qualname__': kind.__qualname__,
          name: property(read),
      },
  )
  object.__setattr__(node, '__class__', watched)


def _resolved(value: Any, path: str, lines: list[str]) -> Any:
  """A checked value; settings in it, alone or in a tuple, are resolved."""
  if isinstance(value, tuple):
    items = enumerate(value)
    return tuple(_resolved(v, f'{path}[{i}]', lines) for i, v in items)
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    return _resolve(value, path, lines)
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
  hints = type_hints(kind)
  mistakes, given = Mistakes(), {}
  for name, value in values.items():
    with mistakes:
      if name not in hints:
        raise ConfigError(unknown_field(at, name, list(hints)))
      given[name] = _from_plain(value, hints[name], f'{at}.{name}')
  mistakes.tell()
  try:
    return _open_type(kind)(**given)
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
def type_hints(kind: type) -> dict[str, Any]:
  """Types of the fields of a settings class, by name."""
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
  hints = type_hints(kind)
  for field in dataclasses.fields(kind):
    hint = hints[field.name]
    if typing.get_origin(hint) is typing.Literal:
      hint = type(typing.get_args(hint)[0])
    field.type = hint
    for inner in (hint, *typing.get_args(hint)):  # also those in a tuple
      if dataclasses.is_dataclass(inner):
        open_for_flags(inner)
