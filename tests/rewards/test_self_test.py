"""Gold answers score, corrupted ones do not; a wrong set-up is seen."""

import asyncio

import pytest

from areal_jax.rewards import base
from areal_jax.rewards.self_test import corrupted, self_test
from areal_jax.types import Problem, RewardResult, RewardStatus


def _tested(function, answers=('42', '-3', '8;15.')):
  async def score(problem, text):
    status, value, parts, detail = base.apply(function, problem, text)
    return RewardResult(RewardStatus(status), value, parts, detail)

  problems = [Problem(f'p/{i}', 't', '?', a) for i, a in enumerate(answers)]
  return asyncio.run(self_test(score, problems))


@pytest.mark.parametrize(
    'function, answers',
    [
        ('areal_jax.rewards.running_totals:exact', ('8;15.', '1;2;3.')),
        ('areal_jax.rewards.last_number:correct', ('42', '-3', '1,234')),
        ('areal_jax.rewards.math:correct', ('42', '\\frac{1}{3}', '-3')),
    ],
)
def test_our_rewards_pass(function, answers):
  found = _tested(function, answers)
  assert found.passed, found
  assert found.right == found.problems == len(answers)
  assert found.gold > found.corrupted and not found.example


@pytest.mark.parametrize('value', ['0.0', '1.0'])
def test_reward_that_is_always_the_same_fails(value):
  found = _tested(f'tests.rewards.test_self_test:always_{value[0]}')
  assert not found.passed and found.right == 0
  assert found.example.startswith("p/0: '42' scores")


def test_reward_that_raises_fails_with_its_error():
  found = _tested('tests.session_rewards:always_raises')
  assert not found.passed and found.failed == 3 * 9
  assert 'LookupError: the verifier is not installed' in found.error


def always_0(problem, text):
  return 0.0


def always_1(problem, text):
  return 1.0


@pytest.mark.parametrize(
    'answer', ['42', '1', '7', '-3.5', 'B', 'q', 'x', '?!', '', '8;15.']
)
def test_corrupted_is_another(answer):
  assert corrupted(answer) != answer
