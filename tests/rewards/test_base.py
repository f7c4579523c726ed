"""Finding reward functions and reading what they return."""

import asyncio
import concurrent.futures
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.rewards import base
from areal_jax.types import Problem
from tests.limits import WAIT_S

sys.path.insert(0, str(pathlib.Path(__file__).parent))

PROBLEM = Problem('train/7', 'totals', '3+5+7=', '8;15.')
BY_TEXT = 'reward_jobs:by_text'


def test_reward_is_found_by_name():
  function = base.load_reward('areal_jax.rewards.running_totals:exact')
  assert function(PROBLEM, '8;15.') == 1.0


@pytest.mark.parametrize(
    'spec, cause',
    [
        ('areal_jax.rewards.nothing:exact', "No module named 'areal_jax.rew"),
        ('areal_jax.rewards.running_totals:none', "has no 'none'"),
        ('reward_jobs:NOT_A_FUNCTION', 'is a int, wanted a function'),
        ('reward_jobs:awaited', 'wanted a plain function'),
        ('reward_jobs:yields', 'wanted a plain function that returns'),
        ('reward_jobs:batch', 'whose first parameters are prompts, compl'),
        ('reward_jobs:compute_score', 'are solution_str, ground_truth, want'),
        ('reward_jobs:hnag', "has no 'hnag'; did you mean 'hang'"),
        ('running_totals', 'wanted the form'),
        (
            'reward_jobs:of_one',
            r'which cannot be called with \(problem, text\)',
        ),
        ('reward_jobs:of_three', "missing a required argument: 'extra'"),
    ],
)
def test_error_names_setting_spec_and_cause(spec, cause):
  with pytest.raises(
      ConfigError, match=f"rewards.function is '{spec}'.*{cause}"
  ):
    base.load_reward(spec)


@pytest.mark.parametrize(
    'text, status, score, parts',
    [
        ('zero', 'ok', 0.0, {}),  # CASES A23: a score like any other
        ('one', 'ok', 1.0, {}),
        ('true', 'ok', 1.0, {}),
        ('none', 'unparseable', None, {}),
        ('nan', 'error', None, {}),
        ('infinite', 'error', None, {}),
        ('parts', 'ok', 0.25, {'format': 1.0, 'value': 0.0}),
        ('none with parts', 'unparseable', None, {'format': 0.0}),
        ('text', 'error', None, {}),
        ('text part', 'error', None, {}),
        ('three', 'error', None, {}),
    ],
)
def test_returned_value_has_one_meaning(text, status, score, parts):
  scored = base.apply(BY_TEXT, PROBLEM, text)
  assert scored[:3] == (status, score, parts)
  assert bool(scored[3]) == (status != 'ok')  # and then says why
  assert scored[3].startswith(BY_TEXT if status != 'ok' else '')
  assert '\n' not in scored[3]


def test_numpy_number_is_a_plain_score(monkeypatch):
  import reward_jobs

  monkeypatch.setattr(
      reward_jobs, 'numpy', lambda p, t: np.float32(0.5), raising=False
  )
  score = base.apply('reward_jobs:numpy', PROBLEM, '')[1]
  assert score == 0.5 and type(score) is float


def test_detail_says_what_was_returned():
  assert (
      "returned '1.0' (str), wanted a number"
      in base.apply(BY_TEXT, PROBLEM, 'text')[3]
  )
  assert 'returned nan' in base.apply(BY_TEXT, PROBLEM, 'nan')[3]
  assert base.apply(BY_TEXT, PROBLEM, 'none')[3] == (
      "reward_jobs:by_text returned None: it found no answer in 'none'"
  )


@pytest.mark.parametrize(
    'value, seen',
    [
        (np.ones((2, 2)), 'array([[1., 1.], [1., 1.]]) (ndarray)'),
        ([1.0], '[1.0] (list)'),
        ({'score': 1}, "{'score': 1} (dict)"),
    ],
)
def test_what_is_no_score_is_one_line_with_value_and_type(
    value, seen, monkeypatch
):
  import reward_jobs

  monkeypatch.setattr(reward_jobs, 'returns', lambda p, t: value, raising=False)
  base._loaded.cache_clear()
  found = base.apply('reward_jobs:returns', PROBLEM, '')
  assert found[0] == 'error'
  assert found[3].startswith(f'reward_jobs:returns returned {seen}, wanted a')
  assert '\n' not in found[3]


def test_module_that_exits_when_imported_is_refused(tmp_path, monkeypatch):
  (tmp_path / 'exits_at_once.py').write_text('import sys; sys.exit(0)')
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ConfigError, match='importing exits_at_once failed: Sys'):
    base.load_reward('exits_at_once:score')


def test_exception_is_an_error_with_type_and_message():
  status, score, _, detail = base.apply('reward_jobs:fail', PROBLEM, 'x')
  assert (status, score) == ('error', None)
  assert detail.startswith(
      'reward_jobs:fail raised ValueError: no gold for train/7 in x\n'
  )


def test_every_thread_scores_alike():
  # CASES A20; the fourth place, a process, is in test_scorer.
  job = (base.apply, 'areal_jax.rewards.running_totals:exact', PROBLEM, '8;15.')

  async def in_an_executor():
    return await asyncio.get_running_loop().run_in_executor(None, *job)

  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    scored = [job[0](*job[1:]), thread.submit(*job).result()]
  scored.append(asyncio.run(in_an_executor()))
  assert scored == [('ok', 1.0, {}, '')] * 3


def test_light_rooms_import_no_jax():
  # Reward workers start with every killed job, config checks with every typo.
  text = """
import importlib, pkgutil, sys
import areal_jax
for room in ('tokenizer', 'sandbox', 'rewards', 'data'):
  package = importlib.import_module(f'areal_jax.{room}')
  for module in pkgutil.iter_modules(package.__path__, package.__name__ + '.'):
    importlib.import_module(module.name)
print([m for m in ('jax', 'jaxlib', 'grain', 'flax') if m in sys.modules])
print('areal_jax.data.stream' in sys.modules)
"""
  root = pathlib.Path(__file__).parent.parent.parent
  done = subprocess.run(
      [sys.executable, '-c', text],
      cwd=root,
      capture_output=True,
      text=True,
      timeout=WAIT_S,
      check=True,
  )
  assert done.stdout == '[]\nTrue\n'
