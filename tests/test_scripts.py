"""The scripts at the root: an environment that is made once and kept whole."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

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


def prepare(folder: pathlib.Path) -> tuple[str, float]:
  """What preparing the environment says, and its seconds."""
  start = time.perf_counter()
  done = subprocess.run(
      ['bash', '-c', PREPARE],
      cwd=folder,
      env=environment(),
      capture_output=True,
      text=True,
      timeout=120,
  )
  assert done.returncode == 0, done.stderr
  return done.stderr, time.perf_counter() - start


@pytest.mark.parametrize('name', SCRIPTS)
def test_script_is_executable_bash(name):
  path = ROOT / name
  assert os.access(path, os.X_OK)
  lines = path.read_text().splitlines()
  assert lines[0] == '#!/usr/bin/env bash'
  assert 'set -euo pipefail' in lines
  subprocess.run(['bash', '-n', path], check=True, timeout=10)


@pytest.mark.parametrize('name', ['quickstart.sh', 'test.sh'])
def test_wrong_python_is_one_line(checkout, name):
  done = subprocess.run(
      [f'./{name}'],
      cwd=checkout,
      env=environment('/bin/false'),
      capture_output=True,
      text=True,
      timeout=10,
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
  deadline = time.monotonic() + 60
  while not python.exists():
    assert time.monotonic() < deadline, 'no .venv/bin/python within 60 s'
    time.sleep(0.01)
  os.killpg(killed.pid, signal.SIGKILL)
  killed.wait(10)

  said, _ = prepare(checkout)
  assert said.startswith('Installing requirements.txt')
  subprocess.run(
      [python, '-m', 'pip', '--version'],
      check=True,
      capture_output=True,
      timeout=60,
  )

  # As it is: nothing said, nothing done.
  said, seconds = prepare(checkout)
  assert said == ''
  assert seconds < 1.0

  # Other pins: installed into the same environment.
  mark = checkout / '.venv/mark'
  mark.touch()
  (checkout / 'requirements.txt').write_text('# nothing else\n')
  said, _ = prepare(checkout)
  assert said.startswith('Installing requirements.txt')
  assert mark.exists()
