"""Logs are strict JSON and survive a killed writer."""

import enum
import json
import pathlib

import numpy as np
import pytest

from areal_jax.telemetry import jsonl


class Colour(enum.Enum):
  RED = 'red'


def test_plain_values_are_strict_json():
  value = {
      'numbers': [np.float32(0.5), np.int64(3), True, float('nan')],
      'ends': (float('inf'), -np.float32('inf')),
      'array': np.array([[1, 2]]),
      'path': pathlib.Path('a/b'),
      Colour.RED: Colour.RED,
  }
  text = jsonl.line(value)
  assert 'NaN' not in text
  assert 'Infinity' not in text
  assert json.loads(text) == {
      'numbers': [0.5, 3, True, None],
      'ends': ['inf', '-inf'],
      'array': [[1, 2]],
      'path': 'a/b',
      'red': 'red',
  }


def test_unknown_type_is_named():
  with pytest.raises(TypeError, match='is a object, wanted a number'):
    jsonl.plain({'x': [object()]})


@pytest.mark.parametrize('half', ['{"a":', '{"a": "' + 'x' * 200_000])
def test_unfinished_last_line_is_skipped_and_cut(tmp_path, half):
  path = tmp_path / 'log.jsonl'
  path.write_text('{"a":1}\n{"a":2}\n' + half)
  assert jsonl.read_jsonl(path) == [{'a': 1}, {'a': 2}]
  with jsonl.open_to_append(path) as file:
    file.write(jsonl.line({'a': 3}).encode())
  assert path.read_text() == '{"a":1}\n{"a":2}\n{"a":3}\n'


def test_file_of_one_unfinished_line_is_emptied(tmp_path):
  path = tmp_path / 'log.jsonl'
  path.write_text('{"a"')
  jsonl.open_to_append(path).close()
  assert path.read_bytes() == b''


def test_broken_line_in_the_middle_is_named(tmp_path):
  path = tmp_path / 'log.jsonl'
  path.write_text('{"a":1}\n{"a"\n{"a":3}\n')
  with pytest.raises(ValueError, match=r'log\.jsonl line 2 is not JSON'):
    jsonl.read_jsonl(path)
