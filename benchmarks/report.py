"""The form that every benchmark reports in: a table, then one JSON line.

  {"name": ..., "rows": [{"row": ..., "value": ..., "bar": ..., "met": ...}]}

The bar of a row is the one that was promised, as text ('>= 1.3'); a row without
a promise has none and counts as met.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from typing import Sequence

_COMPARE = {'<=': operator.le, '>=': operator.ge}


@dataclasses.dataclass(frozen=True)
class Row:
  """One figure with what was promised of it."""

  row: str
  value: float
  bar: str = ''
  met: bool = True


def bounded(name: str, value: float, bar: str) -> Row:
  """A row with a bar, '<= x' or '>= x'.

  Raises:
    ValueError: a bar of another form.
  """
  sign, _, limit = bar.partition(' ')
  if sign not in _COMPARE:
    raise ValueError(f'bar of {name!r} is {bar!r}, wanted "<= x" or ">= x"')
  return Row(name, value, bar, bool(_COMPARE[sign](value, float(limit))))


def line(name: str, rows: Sequence[Row]) -> str:
  """The JSON line of a benchmark."""
  return json.dumps(
      {'name': name, 'rows': [dataclasses.asdict(row) for row in rows]}
  )


def show(name: str, rows: Sequence[Row]) -> None:
  """Prints the table, and the JSON line last."""
  width = max((len(row.row) for row in rows), default=0)
  for row in rows:
    verdict = 'met' if row.met else 'NOT MET'
    bar = f'{row.bar:>10}  {verdict}' if row.bar else ''
    print(f'{row.row:<{width}}  {row.value:>12.6g}  {bar}'.rstrip())
  print(line(name, rows), flush=True)
