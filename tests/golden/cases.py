"""Golden cases as parameters of a test, chosen by what the index says of them.

Nothing is chosen by a case's name, so the variable AREAL_GOLDEN may point at
other files of the same form. Without the folder the tests are skipped; with a
folder in which no case matches they fail.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import pathlib
from typing import Any, Callable

import numpy as np
import pytest

# (file, case) of every case that some test compares; filled by `matching`.
COMPARED: set[tuple[str, str]] = set()

_ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass(frozen=True)
class Case:
  """One run of another project's code: arguments, inputs and outputs."""

  folder: pathlib.Path
  record: dict[str, Any]

  @property
  def args(self) -> dict[str, Any]:
    return self.record['args']

  @property
  def scalars(self) -> dict[str, Any]:
    """What the index says of the outcome."""
    return self.record.get('out_scalars', {})

  @property
  def inputs(self) -> dict[str, np.ndarray]:
    return self._arrays('in')

  @property
  def outputs(self) -> dict[str, np.ndarray]:
    """As computed in float32."""
    return self._arrays('out')

  def _arrays(self, group: str) -> dict[str, np.ndarray]:
    data = _load(self.folder / self.record['file'])
    start = f'{self.record["case"]}/{group}/'
    return {
        name.removeprefix(start): data[name]
        for name in data.files
        if name.startswith(start)
    }


class _NoCase:
  """Fails the test that looks at it."""

  def __init__(self, why: str):
    self._why = why

  def __getattr__(self, name: str):
    pytest.fail(self._why)


def matching(
    file: str,
    *functions: str,
    when: Callable[[Case], bool] = lambda case: True,
) -> pytest.MarkDecorator:
  """Parametrises a test over `case`.

  Args:
    file: the archive, for instance 'areal/actor_loss.npz'.
    *functions: names of the functions that produced the case, any of them.
    when: whether a case asks for what this project has.
  """
  folder = pathlib.Path(
      os.environ.get('AREAL_GOLDEN') or _ROOT / '../shared/golden'
  )
  if not folder.is_dir():
    skip = pytest.mark.skip(reason=f'AREAL_GOLDEN: no folder {folder}')
    return pytest.mark.parametrize('case', [pytest.param(None, marks=skip)])
  found = [
      Case(folder, record)
      for record in _index(folder)
      if record.get('file') == file and record['function'] in functions
  ]
  found = [case for case in found if when(case)]
  COMPARED.update((file, case.record['case']) for case in found)
  chosen = [pytest.param(c, id=c.record['case']) for c in found]
  if not chosen:
    why = (
        f'no case of {functions} in {file} under {folder} matches, wanted at'
        ' least one'
    )
    chosen = [pytest.param(_NoCase(why), id='no_case_matches')]
  return pytest.mark.parametrize('case', chosen)


def every(folder: pathlib.Path, *sets: str) -> list[Case]:
  """All cases of these sets ('areal', 'verl')."""
  return [
      Case(folder, record)
      for record in _index(folder)
      if str(record.get('file')).split('/')[0] in sets
  ]


@functools.cache
def _index(folder: pathlib.Path) -> list[dict[str, Any]]:
  return json.loads((folder / 'index.json').read_text())['cases']


@functools.cache
def _load(path: pathlib.Path):
  return np.load(path)
