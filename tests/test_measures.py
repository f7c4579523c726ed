"""The measures of the package's shape count what they say."""

from __future__ import annotations

from scripts.measures import measure


def _planted(folder, text):
  (folder / 'planted.py').write_text(text)
  return measure(folder)


def test_lines_code_and_comments_are_counted_apart(tmp_path):
  found = _planted(
      tmp_path, '"""A page.\n\nOf text.\n"""\n\n# Why.\nx = 1  # Also why.\n'
  )
  assert (found.lines, found.code, found.comments) == (7, 1, 2)


def test_what_is_too_long_is_named(tmp_path):
  body = ''.join(f'  x = {i}\n' for i in range(601))
  found = _planted(tmp_path, f'class Long:\n{body}\n\ndef long():\n{body}')
  assert found.modules == [(1206, 'planted.py')]
  assert found.classes == [(602, 'planted.py Long')]
  assert found.functions == [(602, 'planted.py long')]


def test_parameters_are_counted_without_self(tmp_path):
  found = _planted(
      tmp_path,
      'class A:\n  def f(self, a, b, c, d, e, f, g, h):\n    pass\n'
      'def g(a, b, c, d, e, f, g, *, h, i):\n  pass\n',
  )
  assert found.parameters == [(9, 'planted.py g')]


def test_attributes_born_late_are_counted(tmp_path):
  found = _planted(
      tmp_path,
      'class A:\n  kind: int\n  def __init__(self):\n    self.a = 1\n'
      '  def f(self):\n    self.a = self.b = self.kind = 2\n',
  )
  assert found.late == [(1, 'planted.py A')]
