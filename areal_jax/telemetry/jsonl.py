"""JSON Lines: values made plain, one object a line, read back whole.

Every log of a run (events, metrics, samples) is written and read through this
file, so that all of them treat numpy scalars, numbers that JSON cannot hold and
the unfinished last line of a killed run alike. The output is strict JSON: a
parser that refuses `NaN` reads it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
import enum
import json
import math
import pathlib
from typing import Any, BinaryIO

import numpy as np


def plain(value: Any) -> Any:
  """The value as JSON holds it: infinities as 'inf' or '-inf', NaN as null.

  Takes what telemetry meets: numbers, text, None, mappings, sequences, sets
  (sorted), numpy scalars and arrays, paths and enumerations.

  Raises:
    TypeError: any other type, named.
  """
  if isinstance(value, enum.Enum):
    return plain(value.value)
  if value is None or isinstance(value, (bool, int, str)):
    return value
  if isinstance(value, float):
    if math.isfinite(value):
      return float(value)
    return None if math.isnan(value) else str(float(value))
  if isinstance(value, np.ndarray):
    return plain(value.tolist())
  if isinstance(value, np.generic):
    return plain(value.item())
  if isinstance(value, Mapping):
    return {str(plain(key)): plain(inner) for key, inner in value.items()}
  if isinstance(value, (list, tuple)):
    return [plain(inner) for inner in value]
  if isinstance(value, (set, frozenset)):
    return [plain(inner) for inner in sorted(value)]
  if isinstance(value, pathlib.PurePath):
    return str(value)
  raise TypeError(
      f'{value!r} is a {type(value).__name__}, wanted a number, text, None, or'
      ' a mapping, sequence or numpy array of them'
  )


def line(value: Mapping[str, Any]) -> str:
  """Formats a row of a log as compact strict JSON with a line end."""
  try:
    # Most rows have nothing but what JSON knows, and `plain` takes three times
    # as long as encoding; a run writes some hundred rows a second.
    text = _STRICT.encode(value)
  except (TypeError, ValueError):  # ValueError: a number that JSON cannot hold
    text = _STRICT.encode(plain(value))
  return text + '\n'


_STRICT = json.JSONEncoder(
    separators=(',', ':'), allow_nan=False, default=plain
)


def open_to_append(path: pathlib.Path) -> BinaryIO:
  """Opens a log for appending, after cutting a last line left unfinished.

  A killed run may leave half a line; appending to it would spoil a whole one.
  """
  path.parent.mkdir(parents=True, exist_ok=True)
  file = open(path, 'a+b')
  end = file.seek(0, 2)
  whole = end
  while whole > 0:
    start = max(0, whole - 65536)
    file.seek(start)
    chunk = file.read(whole - start)
    newline = chunk.rfind(b'\n')
    if newline >= 0:
      whole = start + newline + 1
      break
    whole = start
  if whole < end:
    file.truncate(whole)
  return file


def cut(path: pathlib.Path, length: int) -> bool:
  """Takes away what a log holds beyond `length` bytes.

  Returns:
    False where it is not even that long, or is not there.
  """
  try:
    with open(path, 'r+b') as file:
      size = file.seek(0, 2)
      if size > length:
        file.truncate(length)
      return size >= length
  except FileNotFoundError:
    return length == 0


def iterate_jsonl(path: str | pathlib.Path) -> Iterator[dict[str, Any]]:
  """Yields the rows of a log; an unfinished last line is left out.

  Raises:
    ValueError: a finished line is not JSON; names file and line.
  """
  with open(path, encoding='utf-8') as file:
    for number, text in enumerate(file, 1):
      if not text.endswith('\n'):
        return  # the writer was killed, or is writing right now
      if not text.strip():
        continue
      try:
        row = json.loads(text)
      except json.JSONDecodeError as error:
        raise ValueError(
            f'{path} line {number} is not JSON: {error}'
        ) from error
      yield row


def read_jsonl(path: str | pathlib.Path) -> list[dict[str, Any]]:
  """All rows of a log. See `iterate_jsonl`."""
  return list(iterate_jsonl(path))
