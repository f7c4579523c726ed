"""The scripts at the root: an environment that is made once and kept whole."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from tests.limits import WAIT_S, wait_until

ROOT = pathlib.Path(__file__).resolve().parent.parent
SCRIPTS = ('quickstart.sh', 'test.sh', '.ci/run')
PREPARE = (
    'set -euo pipefail; source scripts/environment.sh;'
    ' prepare_environment requirements.txt'
)


@pytest.fixture
def checkout(tmp_path):
  """A folder with the scripts and a requirements file that asks for nothing."""
  shutil.copytree(ROOT / 'scripts', tmp_path / 'scripts')
  for name in ('quickstart.sh', 'test.sh'):
    shutil.copy(ROOT / name, tmp_path / name)
  (tmp_path / 'requirements.txt').write_text('# nothing\n')
  return tmp_path


def environment(python: str = sys.executable) -> dict[str, str]:
  return {**os.environ, 'PYTHON': python}


def prepare(folder: pathlib.Path) -> str:
  """What preparing the environment says."""
  done = subprocess.run(
      ['bash', '-c', PREPARE],
      cwd=folder,
      env=environment(),
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert done.returncode == 0, done.stderr
  return done.stderr


def written(folder: pathlib.Path) -> dict[pathlib.Path, int]:
  """When each file of a folder was last written."""
  return {p: p.lstat().st_mtime_ns for p in folder.rglob('*')}


@pytest.mark.parametrize('name', SCRIPTS)
def test_script_is_executable_bash(name):
  path = ROOT / name
  assert os.access(path, os.X_OK)
  lines = path.read_text().splitlines()
  assert lines[0] == '#!/usr/bin/env bash'
  assert 'set -euo pipefail' in lines
  subprocess.run(['bash', '-n', path], check=True, timeout=WAIT_S)


@pytest.mark.parametrize('name', ['quickstart.sh', 'test.sh'])
def test_wrong_python_is_one_line(checkout, name):
  done = subprocess.run(
      [f'./{name}'],
      cwd=checkout,
      env=environment('/bin/false'),
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert done.returncode == 1
  assert done.stderr == (
      "error: PYTHON is '/bin/false', wanted a Python 3.11.\n"
  )
  assert not (checkout / '.venv').exists()


def test_environment_is_remade_after_a_kill_and_reused_after_that(checkout):
  # Killed while the environment is being made: python is there, pip is not.
  killed = subprocess.Popen(
      ['bash', '-c', PREPARE],
      cwd=checkout,
      env=environment(),
      start_new_session=True,
      stderr=subprocess.DEVNULL,
  )
  python = checkout / '.venv/bin/python'
  wait_until(python.exists, '.venv/bin/python')
  os.killpg(killed.pid, signal.SIGKILL)
  killed.wait(WAIT_S)

  said = prepare(checkout)
  assert said.startswith('Installing requirements.txt')
  subprocess.run(
      [python, '-m', 'pip', '--version'],
      check=True,
      capture_output=True,
      timeout=WAIT_S,
  )

  # As it is: nothing said, nothing done.
  before = written(checkout / '.venv')
  assert prepare(checkout) == ''
  assert written(checkout / '.venv') == before

  # Other pins: installed into the same environment.
  mark = checkout / '.venv/mark'
  mark.touch()
  (checkout / 'requirements.txt').write_text('# nothing else\n')
  said = prepare(checkout)
  assert said.startswith('Installing requirements.txt')
  assert mark.exists()
