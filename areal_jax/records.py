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

import collections
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
_AS_THEY_ARE = (int, str, bool, type(None))
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
  tree = _encoded(value, 'value', arrays)
  text = json.dumps(tree, separators=(',', ':')).encode()
  members = {key: np.concatenate(parts) for key, parts in arrays.parts.items()}
  file = io.BytesIO()
  np.savez(file, **{_TREE: np.frombuffer(text, np.uint8)}, **members)
  return file.getvalue()


def loads(data: bytes) -> Any:
  """What `dumps` was given. Mappings come back as dicts.

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
    self.parts: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    self._lengths: collections.Counter[str] = collections.Counter()

  def add(self, array: np.ndarray) -> list[Any]:
    """Takes an array in; returns where it lies: [member, start, shape]."""
    inner = array.shape[1:] if array.ndim else ()
    key = '-'.join([array.dtype.str[1:], *map(str, inner)])
    if array.dtype.byteorder == '>':
      array = array.astype(array.dtype.newbyteorder('<'))
    start = self._lengths[key]
    whole = array if array.ndim else array.reshape(1)
    self.parts[key].append(whole)
    self._lengths[key] += len(whole)
    return [key, start, list(array.shape)]


def _encoded(value: Any, at: str, arrays: _Arrays) -> Any:
  """The value as JSON holds it, its arrays put aside."""
  if type(value) in _AS_THEY_ARE:  # most of what is met, so it comes first
    return value
  if isinstance(value, enum.Enum):  # before text and number, which some are
    return {_TAG: _class_of(value, at), 'value': value.value}
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, np.generic):  # before float, which one of them is
    return {_TAG: 'scalar', 'at': arrays.add(np.asarray(value))}
  if isinstance(value, float):
    if math.isfinite(value):
      return float(value)
    return {_TAG: 'float', 'value': str(float(value))}
  if isinstance(value, np.ndarray):
    if value.dtype.hasobject or value.dtype.names:
      raise TypeError(f'{at} is an array of {value.dtype}, wanted numbers')
    return {_TAG: 'array', 'at': arrays.add(value)}
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    fields = {
        name: _encoded(getattr(value, name), f'{at}.{name}', arrays)
        for name in _field_names(type(value))
    }
    return {_TAG: _class_of(value, at), **fields}
  if isinstance(value, Mapping):
    for key in value:
      if not isinstance(key, str) or key == _TAG:
        raise TypeError(f'{at} has the key {key!r}, wanted text but {_TAG!r}')
    return {k: _encoded(v, f'{at}[{k!r}]', arrays) for k, v in value.items()}
  if isinstance(value, (tuple, list)):
    items = [_encoded(v, f'{at}[{i}]', arrays) for i, v in enumerate(value)]
    return items if isinstance(value, list) else {_TAG: 'tuple', 'items': items}
  raise TypeError(
      f'{at} is a {type(value).__name__}, wanted a record of types.py, a tuple,'
      ' list or mapping, a numpy array, a number, text or None'
  )


@functools.cache
def _field_names(kind: type) -> tuple[str, ...]:
  return tuple(field.name for field in dataclasses.fields(kind))


def _class_of(value: Any, at: str) -> str:
  name = type(value).__name__
  if _CLASSES.get(name) is not type(value):
    raise TypeError(f'{at} is a {name}, wanted a record of types.py')
  return name


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
