"""The plan of the house holds: floors, BUILD, pins, docstrings and documents.

`scripts/house.py` is the checker. Planted faults show that it finds them.
"""

from __future__ import annotations

import ast
import dataclasses
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

from scripts.house import (
    HEAVY,
    LIGHT_MODULES,
    OUTSIDE_PATHS,
    OUTSIDE_ROOMS,
    REQUIREMENTS,
    ROOT,
    build_faults,
    clock_faults,
    expected_rules,
    faults,
    flag_faults,
    floor_faults,
    parse,
    pin_faults,
    read_build,
    render,
    text_faults,
    version_faults,
    weight_faults,
)
from tests.limits import WAIT_S


def _copy(folder: pathlib.Path) -> pathlib.Path:
  """A copy of what the checker reads, in which faults can be planted."""
  for name in ('areal_jax', *OUTSIDE_ROOMS, 'notebooks'):
    if (ROOT / name).is_dir():
      shutil.copytree(
          ROOT / name,
          folder / name,
          ignore=shutil.ignore_patterns('__pycache__'),
      )
  for name in ('BUILD', 'MODULE.bazel', *REQUIREMENTS):
    shutil.copy(ROOT / name, folder / name)
  return folder


def _append(path: pathlib.Path, text: str) -> None:
  path.write_text(path.read_text() + text)


@pytest.mark.parametrize(
    'check',
    [
        floor_faults,
        weight_faults,
        build_faults,
        pin_faults,
        text_faults,
        flag_faults,
        clock_faults,
        version_faults,
    ],
    ids=lambda check: check.__name__,
)
def test_house_has_none_of(check):
  assert list(check(ROOT)) == []


def test_lint_finds_nothing():
  lint = subprocess.run(
      [sys.executable, '-m', 'ruff', 'check', '--output-format=concise', '.'],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert lint.returncode == 0, lint.stdout


DOCUMENTS = sorted(
    [
        *(path.relative_to(ROOT) for path in (ROOT / 'docs').rglob('*.md')),
        pathlib.Path('README.md'),
        pathlib.Path('CONTRIBUTING.md'),
    ]
)


def test_documents_name_tests_that_exist():
  for document in DOCUMENTS:
    text = (ROOT / document).read_text()
    for file, name in re.findall(r'`(tests/[\w/]+\.py)(?:::(\w+))?`', text):
      path = ROOT / file
      assert path.exists(), f'{document} names {file}'
      names = {
          node.name
          for node in parse(path.read_text()).body
          if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
      }
      assert not name or name in names, f'{document} names {file}::{name}'


def test_documents_link_to_files_that_exist():
  for document in DOCUMENTS:
    path = ROOT / document
    for target in re.findall(r'\]\(([^)#\s]+)[^)]*\)', path.read_text()):
      if '://' not in target:
        there = (path.parent / target).exists()
        assert there, f'{document} links to {target}, which is not there'


def test_paragraphs_of_results_are_short():
  for path in (ROOT / 'docs/results').rglob('*.md'):
    for paragraph in re.split(r'\n\n|\n- |\n\|', path.read_text()):
      prose = re.sub(r'`[^`]*`', 'code', paragraph)
      assert len(prose.split()) <= 60, f'{path.name}: {paragraph[:60]}...'


def test_the_glossary_has_at_most_forty_terms():
  rows = (ROOT / 'docs/glossary.md').read_text().split('|---|---|\n')[1]
  assert len(rows.strip().splitlines()) <= 40


@pytest.mark.parametrize('module', LIGHT_MODULES)
def test_module_loads_no_accelerator_library(module):
  code = (
      f'import sys, {module}\n'
      f'print(*sorted(set({HEAVY!r}) & set(sys.modules)))'
  )
  child = subprocess.run(
      [sys.executable, '-c', code],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert child.returncode == 0, child.stderr
  assert child.stdout.split() == []


# File (below areal_jax, or from the root), text put at its end, and a piece of
# the one complaint that has to follow.
PLANTED = {
    'upward': (
        'areal_jax/losses/__init__.py',
        '\nfrom areal_jax.train import packing\n',
        'areal_jax.train.packing: upward, from losses (floor 2) to train',
    ),
    'upward_inside_a_function': (
        'areal_jax/ledger.py',
        '\ndef _late():\n  import areal_jax.rollout.engine\n',
        'areal_jax.rollout.engine: upward, from words (floor 0) to rollout',
    ),
    'upward_by_name': (
        'areal_jax/mesh/__init__.py',
        '\nimport importlib\nimportlib.import_module("areal_jax.train")\n',
        'areal_jax.train: upward, from mesh (floor 1) to train (floor 3)',
    ),
    'sideways': (
        'areal_jax/losses/__init__.py',
        '\nfrom areal_jax import models\n',
        'areal_jax.models: sideways, from losses (floor 2) to models',
    ),
    'sideways_relative': (
        'areal_jax/rewards/__init__.py',
        '\nfrom ..data import base\n',
        'areal_jax.data.base: sideways, from rewards (floor 2) to data',
    ),
    'room_without_a_floor': (
        'areal_jax/attic.py',
        '"""A room nobody planned."""\n',
        "areal_jax/attic.py: room 'attic' has no floor",
    ),
    'tests_from_the_package': (
        'areal_jax/train/__init__.py',
        '\nimport tests.conftest\n',
        'the package does not know what lies outside it',
    ),
    'jax_in_a_light_room': (
        'areal_jax/rewards/__init__.py',
        '\ndef _late():\n  import jax.numpy as jnp\n',
        "imports jax.numpy: room 'rewards' stays light",
    ),
    'heavy_room_in_a_light_room': (
        'areal_jax/data/__init__.py',
        '\nfrom areal_jax.mesh import rules\n',
        "room 'data' stays light, 'mesh' is not",
    ),
    'missing_edge': (
        'areal_jax/buffer.py',
        '\nfrom areal_jax.tokenizer import base\n',
        "BUILD: 'buffer' imports :tokenizer and has no edge to it",
    ),
    'missing_edge_to_a_wheel': (
        'areal_jax/buffer.py',
        '\nimport tokenizers\n',
        """BUILD: 'buffer' imports requirement("tokenizers") and has no edge""",
    ),
    'tests_declared_otherwise': (
        'tests/losses/test_attic.py',
        'import torch\n',
        """BUILD: 'testing' imports requirement("torch") and has no edge""",
    ),
    'entry_without_files': (
        'BUILD',
        '\npy_library(name = "attic", srcs = glob(["areal_jax/attic/*.py"]))\n',
        "BUILD: library 'attic' has no files",
    ),
    'package_without_pin': (
        'areal_jax/buffer.py',
        '\nimport torch\n',
        "imports torch: no file of requirements pins 'torch' for areal_jax",
    ),
    'pandas_outside_its_file': (
        'areal_jax/telemetry/plots.py',
        '\ndef _late():\n  import pandas\n',
        "imports pandas: no file of requirements pins 'pandas' for areal_jax",
    ),
    'pins_that_disagree': (
        'requirements-notebooks.txt',
        'optax==0.1.0\n',
        'requirements-notebooks.txt: optax is 0.1.0, requirements.txt has',
    ),
    'loose_pin': (
        'requirements.txt',
        'torch>=2\n',
        'requirements.txt: torch>=2 has no exact version',
    ),
    'path_of_a_machine': (
        'areal_jax/buffer.py',
        f'\n_HOME = "{OUTSIDE_PATHS[1]}main"\n',
        f'areal_jax/buffer.py: mentions {OUTSIDE_PATHS[1]!r}',
    ),
    'flag_of_a_module': (
        'benchmarks/numerics.py',
        "\n_SEED = flags.DEFINE_integer('seed', 0, 'Seed.')\n",
        'defines a flag when imported',
    ),
    'a_test_that_times': (
        'tests/test_buffer.py',
        '\ndef test_fast():\n  assert time.monotonic() < 5\n',
        'time.monotonic reads a clock: wait for a condition',
    ),
    'a_test_with_a_short_limit': (
        'tests/test_buffer.py',
        '\nsubprocess.run([], timeout=60)\n',
        'subprocess.run has a limit of 60 s: WAIT_S is long enough',
    ),
    'another_version': (
        'areal_jax/__init__.py',
        "\n__version__ = '9.9.9'\n",
        "MODULE.bazel: version ['0.1.0'], areal_jax has ['0.1.0', '9.9.9']",
    ),
    'public_function_without_docstring': (
        'areal_jax/buffer.py',
        '\ndef open_attic():\n  return 1\n',
        'open_attic has no docstring',
    ),
}


@pytest.mark.parametrize('name', PLANTED)
def test_planted_fault_is_reported(name, tmp_path):
  root = _copy(tmp_path)
  before = set(faults(root))
  file, text, complaint = PLANTED[name]
  path = root / file
  path.parent.mkdir(parents=True, exist_ok=True)
  path.touch()
  _append(path, text)
  new = set(faults(root)) - before
  assert any(complaint in line for line in new), sorted(new)


def test_edge_taken_out_of_build_is_reported(tmp_path):
  root = _copy(tmp_path)
  rules = expected_rules(root)
  less = dataclasses.replace(
      rules['buffer'], deps=rules['buffer'].deps - {':words'}
  )
  (root / 'BUILD').write_text(render({**rules, 'buffer': less}))
  assert list(build_faults(root)) == [
      "BUILD: 'buffer' imports :words and has no edge to it"
  ]


def test_edge_without_import_is_reported(tmp_path):
  root = _copy(tmp_path)
  rules = expected_rules(root)
  more = dataclasses.replace(
      rules['buffer'], deps=rules['buffer'].deps | {':mesh'}
  )
  (root / 'BUILD').write_text(render({**rules, 'buffer': more}))
  assert list(build_faults(root)) == [
      "BUILD: 'buffer' has an edge to :mesh and does not import it"
  ]


def test_written_build_agrees_with_imports(tmp_path):
  root = _copy(tmp_path)
  rules = expected_rules(root)
  (root / 'BUILD').write_text(render(rules))
  assert read_build(root) == rules


def test_tests_that_are_not_declared_are_reported(tmp_path):
  root = _copy(tmp_path)
  text = (root / 'BUILD').read_text()
  (root / 'BUILD').write_text(
      text.replace('glob(["tests/**/test_*.py"])', '[]')
  )
  assert list(build_faults(root)) == [
      'BUILD: the tests are not declared as scripts/house.py writes them'
  ]
