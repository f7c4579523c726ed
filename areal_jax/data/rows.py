"""Rows of data files: JSON lines, Parquet and ArrayRecord.

A row is an object of columns and knows where it stands, so that whatever is
wrong with it can be named by file and line. What its columns mean is said in
`forms.py`. Files are read whole: each row is checked before a run starts, and
some hundred thousand problems fit into memory many times over.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import os
import pathlib
from typing import Any, Callable, Iterator, Mapping

from areal_jax.config import ConfigError, fetching, require
from areal_jax.files import check_content

FORMATS = ('jsonl', 'parquet', 'array_record')
# What the end of a file's name says, shards such as
# 'x.array_record-00000-of-00002' included.
_ENDINGS = {
    '.jsonl': 'jsonl',
    '.json': 'jsonl',
    '.parquet': 'parquet',
    '.array_record': 'array_record',
    '.arrayrecord': 'array_record',
}
_KINDS = {
    'jsonl': 'a JSON lines file',
    'parquet': 'a Parquet file',
    'array_record': 'an ArrayRecord file',
}


@dataclasses.dataclass(frozen=True)
class Row:
  """A row with its place ('sums.jsonl', 'line 3') and its columns."""

  file: str
  place: str
  columns: Mapping[str, Any]

  @property
  def at(self) -> str:
    """File and place, for messages."""
    return f'{self.file} {self.place}'


def read_rows(path: str | os.PathLike, kind: str = '') -> list[Row]:
  """All rows of a file, or of all files that a pattern matches, by name.

  JSON lines are UTF-8 with one object a line, empty lines passed over; they are
  named by line, the first being 1. A record of an ArrayRecord file is one JSON
  object in UTF-8; records and the rows of Parquet files are named by row, the
  first being 0, as the libraries that write them count.

  Args:
    path: a file, or a pattern with `*`, `?` or `[`.
    kind: one of `FORMATS`; empty for what the end of the name says.

  Raises:
    ConfigError: no such file, another format, or a row that is no object; names
      the file and, where there is one, the row.
  """
  rows = []
  for file in _files(path, kind):
    found = _READERS[_kind(file, kind)](file)
    before = len(rows)
    rows.extend(found)
    if len(rows) == before:
      raise ConfigError(f'{file} holds no row, wanted at least one problem')
  return rows


def _files(path: str | os.PathLike, kind: str) -> list[pathlib.Path]:
  """The files that a path or pattern names, sorted."""
  wanted = _KINDS[_kind(pathlib.Path(path), kind)]
  if glob.has_magic(str(path)) and not pathlib.Path(path).exists():
    files = [pathlib.Path(name) for name in sorted(glob.glob(str(path)))]
    require(bool(files), 'data path', str(path), f'a pattern of {wanted}')
  else:
    files = [pathlib.Path(path)]
  for file in files:
    hint = fetching(str(file), 'dataset')
    require(file.is_file(), 'data path', str(file), wanted + hint)
    check_content(file)
  return files


def _kind(file: pathlib.Path, kind: str) -> str:
  """The format of a file; JSON lines where its name says nothing."""
  if kind:
    require(kind in FORMATS, 'data format', kind, f'one of {FORMATS}')
    return kind
  for ending, named in _ENDINGS.items():
    if ending in file.suffixes or f'{ending}-' in file.name:
      return named
  return 'jsonl'


def _jsonl(file: pathlib.Path) -> Iterator[Row]:
  content = file.read_bytes()
  _check_lines(file, content)
  for number, line in enumerate(content.splitlines(), start=1):
    if line.strip():
      place = f'line {number}'
      yield Row(str(file), place, _object(line, f'{file} {place}'))


def _check_lines(file: pathlib.Path, content: bytes) -> None:
  """Refuses a file that is one JSON value and no JSON lines."""
  found, rows = '', ''
  text = content.removeprefix(b'\xef\xbb\xbf').lstrip()
  if text.startswith(b'[') and _is_json(text):
    found, rows = 'a JSON array', 'json.load(sys.stdin)'
  elif text.startswith(b'{') and not _is_json(text.splitlines()[0]):
    if _is_json(text):
      found = 'one JSON object over several lines'
      rows = "json.load(sys.stdin)['<field with the rows>']"
  if found:
    raise ConfigError(
        f'{file} is {found}, wanted JSON lines, one object a line: python -c'
        f' "import json, sys; [print(json.dumps(row)) for row in {rows}]"'
        f' < {file} > {file.with_suffix("")}.lines.jsonl'
    )


def _is_json(text: bytes) -> bool:
  try:
    json.loads(text)
  except (ValueError, RecursionError):
    return False
  return True


def _parquet(file: pathlib.Path) -> Iterator[Row]:
  # Here and not above: half a second that runs without such files need not.
  import pyarrow as pa
  from pyarrow import parquet

  number = 0
  try:
    for batch in parquet.ParquetFile(file).iter_batches():
      for columns in batch.to_pylist():
        yield Row(str(file), f'row {number}', columns)
        number += 1
  # UnicodeDecodeError: a text column that holds other bytes than UTF-8.
  except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
    raise ConfigError(
        f'{file} cannot be read behind row {number} as Parquet: {error}'
    ) from error


def _array_record(file: pathlib.Path) -> Iterator[Row]:
  # Here and not above: grain imports jax, which this room does without.
  from grain import sources

  number = -1
  try:
    records = sources.ArrayRecordDataSource(str(file))
    for number in range(len(records)):
      place = f'row {number}'
      columns = _object(records[number], f'{file} {place}')
      yield Row(str(file), place, columns)
  except RuntimeError as error:  # what the C++ reader raises
    raise ConfigError(
        f'{file} cannot be read behind row {number} as ArrayRecord: {error}'
    ) from error


_READERS: dict[str, Callable[[pathlib.Path], Iterator[Row]]] = {
    'jsonl': _jsonl,
    'parquet': _parquet,
    'array_record': _array_record,
}


def _object(content: bytes, at: str) -> Mapping[str, Any]:
  """The JSON object of a line or record."""
  try:
    columns = json.loads(content.decode('utf-8-sig'))
  except UnicodeDecodeError as error:
    raise ConfigError(f'{at} is not UTF-8: {error}') from error
  # ValueError: also a number of more digits than Python reads.
  # RecursionError: more brackets inside one another than it reads.
  except (ValueError, RecursionError) as error:
    raise ConfigError(f'{at} is not JSON: {error}') from error
  if not isinstance(columns, dict):
    raise ConfigError(f'{at} is a {type(columns).__name__}, wanted an object')
  return columns
