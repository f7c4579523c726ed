"""The form that benchmarks report in."""

import ast
import json
import pathlib

import pytest

from benchmarks import report

FOLDER = pathlib.Path(report.__file__).parent


def calls(node: ast.AST) -> list[str]:
  return [
      ast.unparse(n.func) for n in ast.walk(node) if isinstance(n, ast.Call)
  ]


def commands() -> list[str]:
  """Names of the files that are benchmarks of their own: `main` is started."""
  parts = ('chaos_child',)  # started by another benchmark
  found = []
  for path in sorted(FOLDER.glob('*.py')):
    if "__name__ == '__main__'" in path.read_text() and path.stem not in parts:
      found.append(path.stem)
  return found


@pytest.mark.parametrize('name', commands())
def test_every_benchmark_reports_in_the_one_form(name):
  """Its `main` shows rows once, or has `serving` do so; it writes no JSON."""
  tree = ast.parse((FOLDER / f'{name}.py').read_text())
  (main,) = (
      node
      for node in tree.body
      if isinstance(node, ast.FunctionDef) and node.name == 'main'
  )
  shown = [c for c in calls(main) if c in ('report.show', 'serving.show_parts')]
  assert len(shown) == 1
  assert 'json.dumps' not in calls(main)


def test_last_line_is_json_of_the_stated_form(capsys):
  report.show(
      'some', [report.bounded('a', 2.0, '>= 1.5'), report.Row('b', 3.0)]
  )
  *table, last = capsys.readouterr().out.splitlines()
  assert json.loads(last) == {
      'name': 'some',
      'rows': [
          {'row': 'a', 'value': 2.0, 'bar': '>= 1.5', 'met': True},
          {'row': 'b', 'value': 3.0, 'bar': '', 'met': True},
      ],
  }
  assert len(table) == 2 and 'met' in table[0]


@pytest.mark.parametrize(
    'value, bar, met',
    [
        (1.0, '<= 1', True),
        (1.1, '<= 1', False),
        (1.0, '>= 1', True),
        (0.9, '>= 1', False),
    ],
)
def test_bar_decides_what_is_met(value, bar, met):
  assert report.bounded('x', value, bar).met is met


def test_row_below_its_bar_is_shown_as_such(capsys):
  report.show('some', [report.bounded('a', 1.0, '>= 2')])
  assert 'NOT MET' in capsys.readouterr().out.splitlines()[0]


def test_other_bars_are_refused():
  with pytest.raises(ValueError, match='wanted "<= x" or ">= x"'):
    report.bounded('a', 1.0, 'about 3')
