"""The claims of benchmarks/learning.py, three seeds each. Minutes; slow."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT


def rows_of(*arguments):
  done = subprocess.run(
      [sys.executable, '-m', 'benchmarks.learning', *arguments],
      cwd=ROOT,
      stdout=subprocess.PIPE,
      text=True,
      check=True,
  )
  return json.loads(done.stdout.splitlines()[-1])['rows']


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_quickstart_learns_from_its_reward_in_three_seeds():
  rows = rows_of('--task=quickstart')
  assert len(rows) == 3 * 10
  assert [r for r in rows if not r['met']] == []


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_stories_learn_from_their_reward_in_three_seeds(data_dir):
  rows = rows_of('--task=stories', f'--data={data_dir}')
  assert len(rows) == 3 * 7
  assert [r for r in rows if not r['met']] == []
