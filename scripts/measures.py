"""Prints measures of the package's shape: lengths, parameters, comments.

  python scripts/measures.py [ROOT]

They are signposts and not rules. A module should have at most 600 lines, a
class 400, a function 60 and 8 parameters; all attributes of a class should be
set in `__init__`; a hundred lines of code should have 8 comments or more, where
a trick needs its reason.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
import dataclasses
import io
import pathlib
import sys
import tokenize

MODULE_LINES = 600
CLASS_LINES = 400
FUNCTION_LINES = 60
PARAMETERS = 8


@dataclasses.dataclass(frozen=True)
class Measures:
  """Measures of a tree of Python files; each list has (size, place).

  Attributes:
    lines: of all files.
    code: lines that hold code.
    comments: lines that hold a comment.
    modules, classes, functions: those longer than they should be.
    parameters: functions with too many parameters.
    late: classes with attributes that `__init__` does not set, and how many.
  """

  lines: int
  code: int
  comments: int
  modules: list[tuple[int, str]]
  classes: list[tuple[int, str]]
  functions: list[tuple[int, str]]
  parameters: list[tuple[int, str]]
  late: list[tuple[int, str]]


def measure(root: pathlib.Path) -> Measures:
  """Measures all Python files below `root`."""
  found = Measures(0, 0, 0, [], [], [], [], [])
  lines = code = comments = 0
  for path in sorted(root.rglob('*.py')):
    text = path.read_text()
    length = text.count('\n')
    lines += length
    with_code, with_comment = _kinds(text)
    code += with_code
    comments += with_comment
    name = str(path.relative_to(root))
    if length > MODULE_LINES:
      found.modules.append((length, name))
    _measure_nodes(ast.parse(text), name, found)
  return dataclasses.replace(found, lines=lines, code=code, comments=comments)


def _kinds(text: str) -> tuple[int, int]:
  """Counts the lines with code and the lines with a comment."""
  code, comments = set(), set()
  skipped = (
      tokenize.NL,
      tokenize.NEWLINE,
      tokenize.INDENT,
      tokenize.DEDENT,
      tokenize.ENDMARKER,
  )
  for token in tokenize.generate_tokens(io.StringIO(text).readline):
    if token.type == tokenize.COMMENT:
      if not token.string.startswith(('# fmt', '# pylint', '# type')):
        comments.add(token.start[0])
    elif token.type not in skipped:
      code.update(range(token.start[0], token.end[0] + 1))
  return len(code - _docstring_lines(text)), len(comments)


def _docstring_lines(text: str) -> set[int]:
  found: set[int] = set()
  for node in ast.walk(ast.parse(text)):
    body = getattr(node, 'body', None)
    if isinstance(body, list) and body and isinstance(body[0], ast.Expr):
      first = body[0].value
      if isinstance(first, ast.Constant) and isinstance(first.value, str):
        found.update(range(first.lineno, first.end_lineno + 1))
  return found


def _measure_nodes(tree: ast.Module, name: str, found: Measures) -> None:
  for node in ast.walk(tree):
    if isinstance(node, ast.ClassDef):
      length = node.end_lineno - node.lineno + 1
      if length > CLASS_LINES:
        found.classes.append((length, f'{name} {node.name}'))
      late = set(_late_attributes(node))
      if late:
        found.late.append((len(late), f'{name} {node.name}'))
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
      length = node.end_lineno - node.lineno + 1
      if length > FUNCTION_LINES:
        found.functions.append((length, f'{name} {node.name}'))
      given = node.args
      count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
      count -= bool(given.args) and given.args[0].arg in ('self', 'cls')
      if count > PARAMETERS:
        found.parameters.append((count, f'{name} {node.name}'))


def _late_attributes(node: ast.ClassDef) -> Iterator[str]:
  """Names the attributes that methods other than `__init__` set first."""
  methods = [n for n in node.body if isinstance(n, ast.FunctionDef)]
  first = {n for m in methods if m.name == '__init__' for n in _assigned(m)}
  first |= {
      n.target.id
      for n in node.body
      if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
  }
  if not any(m.name == '__init__' for m in methods):
    return
  for method in methods:
    if method.name != '__init__':
      yield from _assigned(method) - first


def _assigned(method: ast.FunctionDef) -> set[str]:
  return {
      n.attr
      for n in ast.walk(method)
      if isinstance(n, ast.Attribute)
      and isinstance(n.ctx, ast.Store)
      and isinstance(n.value, ast.Name)
      and n.value.id == 'self'
  }


def main() -> None:
  """Prints the measures of `areal_jax` below the root that is named."""
  root = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else '.')
  found = measure(root / 'areal_jax')
  share = 100 * found.comments / found.code
  print(f'lines {found.lines}, of code {found.code}')
  print(f'comments a hundred lines of code {share:.1f}')
  for title, items in (
      (f'modules over {MODULE_LINES} lines', found.modules),
      (f'classes over {CLASS_LINES} lines', found.classes),
      (f'functions over {FUNCTION_LINES} lines', found.functions),
      (f'functions with over {PARAMETERS} parameters', found.parameters),
      ('classes with attributes set outside __init__', found.late),
  ):
    print(f'\n{title}: {len(items)}')
    for size, place in sorted(items, reverse=True):
      print(f'  {size:5} {place}')


if __name__ == '__main__':
  main()
