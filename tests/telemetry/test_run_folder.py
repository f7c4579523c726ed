"""A saved run is never overwritten, and JSON is whole or absent."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.telemetry import run_folder

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_saved_run_is_never_overwritten(tmp_path):
  root = tmp_path / 'runs'
  first = run_folder.new_run_folder(root, 'quickstart')
  assert first == root / 'quickstart'
  assert first.is_dir()
  assert run_folder.new_run_folder(root, 'quickstart') == first  # still empty
  (first / 'summary.json').write_text('{}')
  second = run_folder.new_run_folder(root, 'quickstart')
  assert second == root / 'quickstart-2'
  (second / 'summary.json').write_text('{}')
  (root / 'quickstart-3').write_text('a file of that name')
  third = run_folder.new_run_folder(root, 'quickstart')
  assert third == root / 'quickstart-4'
  assert list(third.iterdir()) == []


def test_root_that_cannot_be_written_is_a_clear_error(tmp_path):
  file = tmp_path / 'file'
  file.write_text('')
  for root in (file, file / 'below', pathlib.Path('/proc/areal_jax')):
    with pytest.raises(ConfigError, match='run folder .*cannot be made'):
      run_folder.new_run_folder(root, 'x')


@pytest.mark.parametrize('name', ['', '.', '..', 'a/b', '/tmp'])
def test_name_must_be_one_folder(tmp_path, name):
  with pytest.raises(ConfigError, match='run name is .*one folder name'):
    run_folder.new_run_folder(tmp_path, name)


def test_json_is_strict_and_takes_numpy(tmp_path):
  path = tmp_path / 'summary.json'
  run_folder.write_json(path, {
      'eta': float('inf'), 'gap': np.float32('nan'), 'steps': np.int64(3),
      'rate': np.float32(0.5), 'swaps': np.arange(2), 'text': 'π',
  })  # fmt: skip
  value = json.loads(path.read_text('utf-8'), parse_constant=pytest.fail)
  assert value == {
      'eta': 'inf', 'gap': None, 'steps': 3, 'rate': 0.5, 'swaps': [0, 1],
      'text': 'π',
  }  # fmt: skip
  assert [p.name for p in tmp_path.iterdir()] == ['summary.json']


def test_failed_write_keeps_the_old_file(tmp_path):
  path = tmp_path / 'summary.json'
  run_folder.write_json(path, {'steps': 1})
  with pytest.raises(TypeError):
    run_folder.write_json(path, {'steps': object()})
  assert json.loads(path.read_text()) == {'steps': 1}
  assert [p.name for p in tmp_path.iterdir()] == ['summary.json']


def test_peak_memory_rises_with_use_and_stays():
  code = """
import numpy as np
from areal_jax.telemetry.run_folder import peak_rss_bytes
before = peak_rss_bytes()
held = np.ones(2**24)  # 128 MiB
during = peak_rss_bytes()
del held
print(before, during, peak_rss_bytes())
"""
  printed = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, check=True, capture_output=True
  ).stdout
  before, during, after = map(int, printed.split())
  assert 2**23 < before < 2**28
  slack = 2**20  # the kernel counts in batches
  assert during >= before + 2**27 - slack
  assert after >= during - slack
