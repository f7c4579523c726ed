"""Rows of JSON lines, Parquet and ArrayRecord files."""

import json
import subprocess
import sys

import pyarrow as pa
from pyarrow import parquet
import pytest

from areal_jax.config import ConfigError
from areal_jax.data.rows import read_rows
from tests import files
from tests.data.files import write

ROWS = [
    {'id': 'a', 'prompt': [{'role': 'user', 'content': 'Hé\u2028'}], 'n': 1},
    {'id': 'b', 'prompt': [], 'n': None},
    {'id': 'c', 'prompt': [], 'n': 3},
]
NAMES = ('x.jsonl', 'x.parquet', 'x.array_record')


@pytest.mark.parametrize('name', NAMES)
def test_all_formats_hold_the_same_rows(tmp_path, name):
  rows = read_rows(write(tmp_path / name, ROWS))
  assert [row.columns for row in rows] == ROWS
  first = 1 if name == 'x.jsonl' else 0
  unit = 'line' if name == 'x.jsonl' else 'row'
  assert [row.place for row in rows] == [
      f'{unit} {first + i}' for i in (0, 1, 2)
  ]
  assert rows[2].at == f'{tmp_path / name} {unit} {first + 2}'


def test_format_can_be_said_and_is_json_lines_otherwise(tmp_path):
  path = write(tmp_path / 'x.parquet', ROWS).rename(tmp_path / 'x.data')
  assert len(read_rows(path, 'parquet')) == 3
  with pytest.raises(ConfigError, match='x.data line 1 is not'):
    read_rows(path)
  with pytest.raises(ConfigError, match="data format is 'csv', wanted one of"):
    read_rows(path, 'csv')


def test_pattern_names_all_its_files_in_order(tmp_path):
  for i, row in enumerate(ROWS):
    write(tmp_path / f'x.array_record-0000{i}-of-00003', [row])
  rows = read_rows(tmp_path / 'x.array_record-*')
  assert [row.columns['id'] for row in rows] == ['a', 'b', 'c']
  assert rows[1].at.endswith('x.array_record-00001-of-00003 row 0')
  with pytest.raises(ConfigError, match=r"y\*.parquet', wanted a pattern of a"):
    read_rows(tmp_path / 'y*.parquet')


def test_file_may_have_a_bracket_in_its_name(tmp_path):
  assert len(read_rows(write(tmp_path / 'x[1].jsonl', ROWS))) == 3


def test_empty_lines_are_passed_over_and_counted(tmp_path):
  path = tmp_path / 'x.jsonl'
  path.write_bytes(b'\xef\xbb\xbf{"a": 1}\r\n\n  \n{"a": 2}')
  assert [row.place for row in read_rows(path)] == ['line 1', 'line 4']


@pytest.mark.parametrize(
    'content, message',
    [
        (b'{"id": "b", "prompt"', 'line 2 is not JSON'),
        (b'[1]', 'line 2 is a list, wanted an object'),
        (b'{"id": "\xff"}', 'line 2 is not UTF-8'),
        (b'{"id": ' + b'9' * 5000 + b'}', 'line 2 is not JSON: .*4300 digits'),
        (b'{"id": ' + b'[' * 100_000, 'line 2 is not JSON: .*recursion'),
    ],
)
def test_bad_line_is_named(tmp_path, content, message):
  (tmp_path / 'x.jsonl').write_bytes(b'{}\n' + content)
  with pytest.raises(ConfigError, match=f'x.jsonl {message}'):
    read_rows(tmp_path / 'x.jsonl')


@pytest.mark.parametrize('indent', [None, 2])
@pytest.mark.parametrize('name', ['x.json', 'x.jsonl'])
def test_a_json_array_is_refused_with_the_way_to_lines(tmp_path, name, indent):
  path = tmp_path / name
  path.write_text(json.dumps(ROWS, indent=indent))
  with pytest.raises(
      ConfigError, match=rf'{name} is a JSON array, wanted JSON lines.* python'
  ) as found:
    read_rows(path)
  # The command of the message makes the file that is wanted.
  command = str(found.value).partition('one object a line: ')[2]
  command = command.replace('python -c', f'{sys.executable} -c', 1)
  subprocess.run(command, shell=True, check=True)
  assert [r.columns for r in read_rows(tmp_path / 'x.lines.jsonl')] == ROWS


def test_one_object_over_several_lines_is_named(tmp_path):
  path = tmp_path / 'x.json'
  path.write_text(json.dumps({'data': ROWS}, indent=1))
  with pytest.raises(ConfigError, match='is one JSON object over several line'):
    read_rows(path)


def test_lines_that_are_arrays_are_named_by_line(tmp_path):
  (tmp_path / 'x.jsonl').write_text('[1]\n[2]\n')
  with pytest.raises(ConfigError, match='line 1 is a list, wanted an object'):
    read_rows(tmp_path / 'x.jsonl')


@pytest.mark.parametrize('name', NAMES)
def test_pointer_in_place_of_a_file_of_rows_is_named(tmp_path, name):
  (tmp_path / name).write_text(files.POINTER)
  with pytest.raises(ConfigError, match=f'{name} is a Git LFS pointer for 99 '):
    read_rows(tmp_path / name)


@pytest.mark.parametrize('name', NAMES)
def test_missing_and_empty_files_are_named(tmp_path, name):
  with pytest.raises(ConfigError, match=f"data path is '.*{name}', wanted a"):
    read_rows(tmp_path / name)
  with pytest.raises(ConfigError, match=f'{name} holds no row'):
    read_rows(write(tmp_path / name, []))


@pytest.mark.parametrize('name', NAMES[1:])
@pytest.mark.parametrize('content', [b'', b'hello' * 20_000])
def test_file_of_another_kind_is_named(tmp_path, name, content):
  (tmp_path / name).write_bytes(content)
  with pytest.raises(ConfigError, match=f'{name} cannot be read'):
    read_rows(tmp_path / name)


def test_parquet_column_that_is_not_utf8_is_named_by_its_row(tmp_path):
  texts = pa.array([b'ok', b'\xff'], pa.binary()).view(pa.string())
  parquet.write_table(pa.table({'prompt': texts}), tmp_path / 'x.parquet')
  with pytest.raises(ConfigError, match='x.parquet cannot be read .*utf-8'):
    read_rows(tmp_path / 'x.parquet')


def test_damaged_record_is_named_by_its_row(tmp_path):
  path = write(tmp_path / 'x.array_record', ROWS)
  content = bytearray(path.read_bytes())
  second = content.index(b'"b"')
  content[second + 1] ^= 0x55
  path.write_bytes(content)
  with pytest.raises(ConfigError, match='x.array_record .*row 1'):
    read_rows(path)
