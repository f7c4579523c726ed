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
  return asyncio.run(self_test(score, problems, limit_s=600))


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


def test_all_answers_are_scored_at_once_and_it_tells_how_far_it_is():
  begun, told = [], []

  async def run():
    all_begun = asyncio.Event()

    async def score(problem, text):
      begun.append(text)
      if len(begun) == 2 * 9:
        all_begun.set()
      await all_begun.wait()  # one after another would wait for ever
      return RewardResult(RewardStatus.OK, float(problem.answer in text))

    problems = [Problem(f'p/{i}', 't', '?', f'{i}4') for i in range(2)]
    return await self_test(
        score, problems, limit_s=600, tell=lambda *now: told.append(now)
    )

  found = asyncio.run(run())
  assert found.passed and found.late == 0 and found.scored == 2 * 4
  assert begun[:2] == ['04', '14']  # gold answers come first
  assert told == [(i + 1, 18) for i in range(18)]


def test_what_is_not_scored_within_the_limit_is_late_and_cancelled():
  cancelled = []

  async def score(problem, text):
    if text == '0':
      return RewardResult(RewardStatus.TIMEOUT, detail='a:b took longer')
    try:
      await asyncio.Event().wait()
    except asyncio.CancelledError:
      cancelled.append(text)
      raise

  problems = [Problem('p', 't', '?', '0')]
  found = asyncio.run(self_test(score, problems, limit_s=0.05))
  assert (found.late, found.failed, found.scored) == (8, 1, 0)
  assert len(cancelled) == 8 and not found.passed
  with pytest.raises(base.BadReward, match='none of 1 gold .*: a:b took lon'):
    found.require_scores()


def test_late_answers_alone_end_nothing():
  async def score(problem, text):
    await asyncio.Event().wait()

  problems = [Problem('p', 't', '?', '0')]
  found = asyncio.run(self_test(score, problems, limit_s=0.05))
  found.require_scores()
  assert found.why == '9 answers were not scored in time'


@pytest.mark.parametrize(
    'function, why',
    [
        (
            'tests.session_rewards:always_raises',
            'tests.session_rewards:always_raises raised LookupError: the'
            ' verifier is not installed; reward.self_test=False',
        ),
        (
            'tests.rewards.test_self_test:always_none',
            'tests.rewards.test_self_test:always_none returned None: it found'
            " no answer in '42'; reward.self_test=False",
        ),
    ],
)
def test_reward_without_a_score_for_any_gold_answer_is_refused(function, why):
  with pytest.raises(base.BadReward) as error:
    _tested(function).require_scores()
  assert str(error.value).startswith(
      f'none of 3 gold answers gets a score: {why}'
  )
  assert '\n' not in str(error.value)


def test_reward_that_scores_one_gold_answer_goes_on():
  found = _tested('tests.rewards.test_self_test:only_42')
  found.require_scores()
  assert not found.passed and found.scored == 1


def always_none(problem, text):
  return None


def only_42(problem, text):
  return 1.0 if text == '42' else None


def always_0(problem, text):
  return 0.0


def always_1(problem, text):
  return 1.0


@pytest.mark.parametrize(
    'answer', ['42', '1', '7', '-3.5', 'B', 'q', 'x', '?!', '', '8;15.']
)
def test_corrupted_is_another(answer):
  assert corrupted(answer) != answer
