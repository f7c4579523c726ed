"""Problems from functions and files."""

import pathlib
import sys

import pytest

from areal_jax.config import ConfigError
from areal_jax.data.problems import load_problems, read_jsonl, require_batches
from areal_jax.types import Message, Problem

TOTALS = 'areal_jax.data.running_totals:problems'
GOOD = '{"id": "a", "prompt": "2+2=", "answer": "4"}'


def write(tmp_path, *lines) -> pathlib.Path:
  path = tmp_path / 'sums.jsonl'
  path.write_text('\n'.join(lines) + '\n', 'utf-8')
  return path


def test_task_is_called_with_its_arguments():
  problems = load_problems(TOTALS, split='train', count=3, seed=0)
  assert [p.id for p in problems] == [f'totals/train/{i}' for i in range(3)]


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'count': 3, 'seed': 0}, "missing a required argument: 'split'"),
        ({'split': 'train', 'count': 3, 'sede': 0}, 'sede'),
        ({'split': 'tain', 'count': 3, 'seed': 0}, "split is 'tain'"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
  with pytest.raises(ConfigError, match=message):
    load_problems(TOTALS, **arguments)


def test_task_that_does_not_exist_is_named():
  with pytest.raises(ConfigError, match="'no_such:task'.*ModuleNotFoundError"):
    load_problems('no_such:task')


@pytest.mark.parametrize(
    'result, message',
    [
        ('[]', 'at least one Problem'),
        ('None', 'a list of at least one Problem'),
        ('[3]', 'item 0 of the result .* is 3, wanted a Problem'),
        ('[Problem("a", "", "", "")] * 2', "the id of item 1 .* is 'a'"),
    ],
)
def test_result_that_is_not_problems_is_refused(
    tmp_path, monkeypatch, result, message
):
  name = f'task_{abs(hash(result))}'
  text = f'from areal_jax.types import Problem\n\ndef f():\n  return {result}\n'
  (tmp_path / f'{name}.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ConfigError, match=message):
    load_problems(f'{name}:f')
  del sys.modules[name]


def test_rows_become_problems(tmp_path):
  path = write(
      tmp_path,
      GOOD,
      '',
      '{"id": "b", "source": "web", "prompt": [{"role": "user", "content":'
      ' "Hé"}], "answer": "", "meta": {"level": 3}}',
  )
  assert read_jsonl(path) == [
      Problem('a', 'sums', '2+2=', '4'),
      Problem('b', 'web', (Message('user', 'Hé'),), '', {'level': 3}),
  ]


@pytest.mark.parametrize(
    'row, message',
    [
        ('{"id": "b", "prompt"', 'not JSON'),
        ('[1]', 'is a list, wanted an object'),
        ('{"id": "b", "prompt": "x"}', r"misses \['answer'\]"),
        ('{"id": 3, "prompt": "x", "answer": "y"}', 'id is 3, wanted a text'),
        ('{"id": "", "prompt": "x", "answer": "y"}', "id is ''"),
        ('{"id": "b", "prompt": "x", "answer": 4}', 'answer is 4'),
        ('{"id": "b", "prompt": "", "answer": "4"}', "prompt is ''"),
        ('{"id": "b", "prompt": [], "answer": "4"}', r'prompt is \[\]'),
        ('{"id": "b", "prompt": [{"role": "user"}], "answer": "4"}', 'content'),
        ('{"id": "b", "prompt": ["x"], "answer": "4"}', "prompt is 'x'"),
        ('{"id": "b", "prompt": "x", "answer": "", "meta": 1}', 'meta is 1'),
        ('{"id": "b", "prompt": "x", "answer": "", "level": 1}', 'level'),
        (GOOD, "id is 'a', which line 1 has too"),
    ],
)
def test_bad_row_is_named_by_file_and_line(tmp_path, row, message):
  path = write(tmp_path, GOOD, '', row)
  with pytest.raises(ConfigError, match=f'sums.jsonl line 3.*{message}'):
    read_jsonl(path)


def test_bytes_that_are_no_text_are_named_by_line(tmp_path):
  path = tmp_path / 'sums.jsonl'
  path.write_bytes(GOOD.encode() + b'\n{"id": "\xff"}\n')
  with pytest.raises(ConfigError, match='line 2 is not UTF-8'):
    read_jsonl(path)


def test_missing_and_empty_files_are_refused(tmp_path):
  with pytest.raises(ConfigError, match='missing.jsonl'):
    read_jsonl(tmp_path / 'missing.jsonl')
  with pytest.raises(ConfigError, match='sums.jsonl holds no row'):
    read_jsonl(write(tmp_path, ''))


def test_data_set_smaller_than_a_batch_is_refused():
  problems = [Problem(str(i), '', 'x', '') for i in range(3)]
  require_batches(problems, 3)
  with pytest.raises(ConfigError, match='is 3, wanted at least .* size 4'):
    require_batches(problems, 4)
