"""Reads one field of a `config.json`, with a check of its type and bounds.

Each function takes the parsed file, the name of a field, what stands for the
field where it is absent or null, and the file's name `at` for messages. Each
raises ConfigError with the field, the value seen and the value wanted.
"""

from __future__ import annotations

import sys
from typing import Any, Mapping

from areal_jax.config import ConfigError, require


def read_value(
    fields: Mapping[str, Any], name: str, default: Any, at: str, wanted: str
) -> Any:
  """A field, or the default where it is absent or null."""
  value = fields.get(name)
  value = default if value is None else value
  if value is None:
    raise ConfigError(f'{at}: {name} is missing, wanted {wanted}')
  return value


def read_size(
    fields: Mapping[str, Any],
    name: str,
    default: int | None,
    at: str,
    least: int = 1,
) -> int:
  """A whole number of at least `least`."""
  wanted = f'a whole number of at least {least}'
  value = read_value(fields, name, default, at, wanted)
  whole = isinstance(value, int) and not isinstance(value, bool)
  require(whole and value >= least, f'{at}: {name}', value, wanted)
  return value


def read_number(
    fields: Mapping[str, Any], name: str, default: float | None, at: str
) -> float:
  """A finite number above 0."""
  wanted = 'a finite number above 0'
  value = read_value(fields, name, default, at, wanted)
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  # Not merely below infinity: Python has whole numbers that no float can hold.
  right = number and 0 < value <= sys.float_info.max
  require(right, f'{at}: {name}', value, wanted)
  return float(value)


def read_truth(fields: Mapping[str, Any], name: str, at: str) -> bool:
  """A truth value; absent is false."""
  value = read_value(fields, name, False, at, '')
  require(isinstance(value, bool), f'{at}: {name}', value, 'true or false')
  return value


def read_choice(
    fields: Mapping[str, Any],
    name: str,
    options: Mapping[str, Any],
    default: str | None,
    at: str,
) -> str:
  """The name of one of the options."""
  value = fields.get(name)
  value = default if value is None else value
  known = isinstance(value, str) and value in options
  require(known, f'{at}: {name}', value, f'one of {[*options]}')
  return value
