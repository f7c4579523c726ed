"""Writes the data files of these tests."""

import json
import pathlib

from array_record.python.array_record_module import ArrayRecordWriter
import pyarrow as pa
from pyarrow import parquet


def write(path: pathlib.Path, rows: list[dict]) -> pathlib.Path:
  """The rows in the format that the path ends with."""
  if path.suffix == '.parquet':
    parquet.write_table(pa.Table.from_pylist(rows), path)
    return path
  lines = [json.dumps(row, ensure_ascii=False).encode() for row in rows]
  if '.array_record' in path.name:
    writer = ArrayRecordWriter(str(path), 'group_size:1')
    for line in lines:
      writer.write(line)
    writer.close()
  else:
    path.write_bytes(b'\n'.join(lines) + b'\n')
  return path
