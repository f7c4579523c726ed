"""Records to bytes and back, exactly: what a checkpoint keeps of `types.py`.

`dumps` takes any nest of the records of `types.py`, tuples, lists, mappings
with text keys, numpy arrays, numbers, text and None; `loads` returns an equal
one, arrays bit for bit. It works in memory: whoever has the bytes decides where
they lie.

The bytes are an npz file. Its member `tree` is JSON text in which a record is
an object that names its type under '!', and an array says where it lies in
another member; arrays of one dtype and inner shape lie there one behind
another, because a checkpoint holds thousands of short ones.
"""

from __future__ import annotations

import collections.abc
import dataclasses
import enum
import functools
import io
import json
import math
from typing import Any, Mapping

import numpy as np

from areal_jax import types

_TAG = '!'
_TREE = 'tree'
_AS_THEY_ARE = frozenset({int, str, bool, type(None)})
_CLASSES = {
    name: value
    for name, value in vars(types).items()
    if isinstance(value, type)
    and (dataclasses.is_dataclass(value) or issubclass(value, enum.Enum))
}


def dumps(value: Any) -> bytes:
  """The bytes of a value.

  Raises:
    TypeError: something in it is of another type; says where and what.
  """
  arrays = _Arrays()
  tree = _encoded(value, None, arrays)
  text = json.dumps(tree, separators=(',', ':')).encode()
  members = {key: np.concatenate(parts) for key, parts in arrays.parts.items()}
  file = io.BytesIO()
  np.savez(file, **{_TREE: np.frombuffer(text, np.uint8)}, **members)
  return file.getvalue()


def loads(data: bytes) -> Any:
  """Reads what `dumps` wrote. Mappings come back as dicts.

  Raises:
    ValueError: bytes that `dumps` did not write, or that name a type or field
      which this version does not know.
  """
  # npz raises errors of many kinds (zip, struct, end of file) on other bytes.
  if data[:2] != b'PK':
    raise ValueError(f'records begin with {data[:8]!r}, wanted an npz file')
  with np.load(io.BytesIO(data), allow_pickle=False) as members:
    found = {name: members[name] for name in members.files}
  if _TREE not in found:
    raise ValueError(f'records hold {sorted(found)}, wanted {_TREE!r} as well')
  return _decoded(json.loads(found[_TREE].tobytes()), found)


class _Arrays:
  """Arrays put one behind another, by dtype and inner shape."""

  def __init__(self):
    self.parts: dict[str, list[np.ndarray]] = {}
    self._lengths: dict[str, int] = {}

  def add(self, array: np.ndarray) -> list[Any]:
    """Takes an array in; returns where it lies: [member, start, shape]."""
    shape = array.shape
    key = _member(array.dtype, shape[1:])
    if array.dtype.byteorder == '>':
      array = array.astype(array.dtype.newbyteorder('<'))
    if not shape:
      array = array.reshape(1)
    start = self._lengths.get(key, 0)
    self.parts.setdefault(key, []).append(array)
    self._lengths[key] = start + len(array)
    return [key, start, list(shape)]


@functools.cache
def _member(dtype: np.dtype, inner: tuple[int, ...]) -> str:
  """Name of the member for arrays of this dtype and inner shape."""
  return '-'.join([dtype.str[1:], *map(str, inner)])


# Where a value stands, for a message that is almost never needed: the place of
# what holds it, and what leads on from there, a text or an index.
_At = tuple[Any, str | int] | None


def _place(at: _At) -> str:
  """`value.trajectories[3].ids`, say."""
  if at is None:
    return 'value'
  held, step = at
  return _place(held) + (f'[{step}]' if isinstance(step, int) else step)


def _encoded(value: Any, at: _At, arrays: _Arrays) -> Any:
  """The value as JSON holds it, its arrays put aside.

  A step's groups are thousands of values, so what is met most comes first and
  a place becomes text only where it is told.
  """
  kind = type(value)
  if kind in _AS_THEY_ARE:
    return value
  if kind is float:
    if math.isfinite(value):
      return value
    return {_TAG: 'float', 'value': str(value)}
  if kind is np.ndarray:
    if value.dtype.hasobject or value.dtype.names:
      raise TypeError(f'{_place(at)} is an array of {value.dtype}, wanted'
                      ' numbers')  # fmt: skip
    return {_TAG: 'array', 'at': arrays.add(value)}
  if kind is tuple or kind is list:
    items = [_encoded(v, (at, i), arrays) for i, v in enumerate(value)]
    return items if kind is list else {_TAG: 'tuple', 'items': items}
  if _CLASSES.get(kind.__name__) is kind:
    if issubclass(kind, enum.Enum):
      return {_TAG: kind.__name__, 'value': value.value}
    fields = {_TAG: kind.__name__}
    for name, step in _fields(kind):
      fields[name] = _encoded(getattr(value, name), (at, step), arrays)
    return fields
  if isinstance(value, np.generic):
    return {_TAG: 'scalar', 'at': arrays.add(np.asarray(value))}
  if isinstance(value, collections.abc.Mapping):
    for key in value:
      if not isinstance(key, str) or key == _TAG:
        raise TypeError(
            f'{_place(at)} has the key {key!r}, wanted text but {_TAG!r}'
        )
    return {k: _encoded(v, (at, f'[{k!r}]'), arrays) for k, v in value.items()}
  raise TypeError(
      f'{_place(at)} is a {kind.__name__}, wanted a record of types.py, a'
      ' tuple, list or mapping, a numpy array, a number, text or None'
  )


@functools.cache
def _fields(kind: type) -> tuple[tuple[str, str], ...]:
  """Names of a record's fields, and the texts that lead to them."""
  return tuple((f.name, f'.{f.name}') for f in dataclasses.fields(kind))


def _decoded(value: Any, members: Mapping[str, np.ndarray]) -> Any:
  if isinstance(value, list):
    return [_decoded(item, members) for item in value]
  if not isinstance(value, dict):
    return value
  kind = value.get(_TAG)
  fields = {k: _decoded(v, members) for k, v in value.items() if k != _TAG}
  if kind is None:
    return fields
  if kind == 'float':
    return float(fields['value'])
  if kind == 'tuple':
    return tuple(fields['items'])
  if kind in ('array', 'scalar'):
    array = _array(*fields['at'], members)
    return array if kind == 'array' else array[()]
  if kind not in _CLASSES:
    raise ValueError(
        f'records hold a {kind!r}, wanted one of {sorted(_CLASSES)}'
    )
  made = _CLASSES[kind]
  if issubclass(made, enum.Enum):
    return made(fields['value'])
  known = [field.name for field in dataclasses.fields(made)]
  unknown = sorted(set(fields) - set(known))
  if unknown:
    raise ValueError(f'a {kind} of the records has {unknown}, wanted {known}')
  return made(**fields)


def _array(
    key: str, start: int, shape: list[int], members: Mapping[str, np.ndarray]
) -> np.ndarray:
  length = shape[0] if shape else 1
  part = members[key][start : start + length]
  return part.reshape(shape).copy()  # no view that keeps all the others alive
