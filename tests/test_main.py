"""`areal-jax NAME` does what `python -m areal_jax.NAME` does."""

from __future__ import annotations

import importlib.util
import pathlib
import subprocess
import sys

import pytest

import areal_jax
from areal_jax import __main__ as main

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _call(*arguments: str) -> subprocess.CompletedProcess[str]:
  return subprocess.run(
      [sys.executable, '-m', 'areal_jax', *arguments],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=False,
  )


@pytest.mark.parametrize('name', main.DOORS)
def test_every_name_is_a_module(name):
  assert importlib.util.find_spec(f'areal_jax.{name}') is not None


def test_help_names_every_door():
  found = _call('--help')
  assert found.returncode == 0
  assert all(f'\n  {name} ' in found.stdout for name in main.DOORS)


def test_version_is_that_of_the_package():
  assert _call('--version').stdout == f'{areal_jax.__version__}\n'


def test_a_wrong_name_is_one_line_with_the_near_one():
  found = _call('evalute')
  assert found.returncode == 2
  assert found.stderr == (
      "error: 'evalute' is no command, wanted one of"
      f" {[*main.DOORS]}; did you mean 'evaluate'?\n"
  )


def test_flags_and_exit_code_are_those_of_the_door():
  found = _call('run', '--config=nowhere.py')
  assert found.returncode == 2
  assert found.stderr.startswith("error: --config is 'nowhere.py'")
