"""Problems from functions."""

import sys

import pytest

from areal_jax.config import ConfigError
from areal_jax.data.problems import load_problems, require_batches
from areal_jax.types import Problem

TOTALS = 'areal_jax.data.running_totals:problems'


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
        ('[Problem("a", "", "x", "")] * 2', "the id of item 1 .* is 'a'"),
        ('[Problem("a", "", "", "")]', "item 0 .*: prompt is ''"),
        ('[Problem("a", "", "x", 2)]', 'item 0 .*: answer is 2, wanted a text'),
        ('[Problem(1, "", "x", "")]', 'item 0 .*: id is 1, wanted a text'),
        ('[Problem("a", "", ["x"], "")]', r"item 0 .*: prompt is \['x'\]"),
        ('[Problem("a", "", "x", "", 3)]', 'item 0 .*: meta is 3'),
        ('[Problem("a", "", "\\ud83d", "")]', 'item 0 .*: prompt holds'),
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


def test_data_set_smaller_than_a_batch_is_refused():
  problems = [Problem(str(i), '', 'x', '') for i in range(3)]
  require_batches(problems, 3)
  with pytest.raises(ConfigError, match='is 3, wanted at least .* size 4'):
    require_batches(problems, 4)
