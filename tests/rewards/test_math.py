"""The mathematics reward: extraction, equality, threads, published verdicts."""

import asyncio
import concurrent.futures
import json

import pytest

from areal_jax.rewards import base
from areal_jax.rewards.math import correct, final_answer
from areal_jax.rewards.scorer import Scorer
from areal_jax.types import Problem, RewardStatus
from tests.limits import WAIT_S

CORRECT = 'areal_jax.rewards.math:correct'


def problem(gold: str) -> Problem:
  return Problem('p', 'test', 'q', gold)


@pytest.mark.parametrize(
    'gold, text, score',
    [
        # CASES A24.
        ('-3', 'Therefore the answer is -3', 1.0),
        ('-3', 'the answer is 3', 0.0),
        ('7', 'the answer is +7', 1.0),
        ('7', '+7', 1.0),
        ('-3.5', 'so it is −3.5', 1.0),
        ('-3.5', '−3.5', 1.0),
        ('42', '2+40=42\n#### 42\n' + 'and 7 more of this prose ' * 20, 1.0),
        ('42', r'\boxed{42} ' + 'and 7 more of this prose ' * 200, 1.0),
        ('1234', '#### 1,234', 1.0),
        ('5', 'there is none', 0.0),
        ('5', '', 0.0),
        # Numbers.
        ('18', 'A: 18', 1.0),
        ('12', '5 + 7 = 12', 1.0),
        ('12', '12 + 7 = 19', 0.0),
        ('1234', 'It costs $1,234 in all.', 1.0),
        ('72', '#### 72 clips', 1.0),
        ('72', '#### $72.00', 1.0),
        ('0.5', r'\boxed{.50}', 1.0),
        ('5', 'The answer is **5**.', 1.0),
        ('1/3', 'about 0.333333', 1.0),
        # The last box counts, and boxes side by side are one answer.
        ('3', r'\boxed{4}. No, wait: \boxed{3}', 1.0),
        ('4', r'\boxed{4}. No, wait: \boxed{3}', 0.0),
        ('3', r'\boxed{4} and \boxed{3}', 0.0),
        ('3,4', r'\boxed{4} and \boxed{3}', 1.0),
        ('7', r'\boxed{7', 0.0),
        ('7', r'\boxed{7}, so \boxed{8', 1.0),
        ('5', r'\boxed{}', 0.0),
        ('8', r'#### 9 \boxed{8}', 1.0),
        # Four hashes are an answer, a heading is none.
        ('6', '#### 6\n##### 7\n#### Notes\nNone.', 1.0),
        ('5', '####', 0.0),
        # LaTeX.
        (r'\frac{1}{3}', r'\boxed{\frac{1}{3}}', 1.0),
        (r'\dfrac12', r'\boxed{0.5}', 1.0),
        ('10000', r'\boxed{10{,}000}', 1.0),
        (r'10,\!000', r'\boxed{10000}', 1.0),
        (r'\$10', r'\boxed{10}', 1.0),
        ('3', r'\boxed{x = 3}', 1.0),
        (r'(r+5)^2', r'(r+5)(r+5)', 1.0),
        (r'\text{Evelyn}', r'\boxed{Evelyn}', 1.0),
        (r'\text{Evelyn}', r'\boxed{Carla}', 0.0),
        (
            r'\left( 3, \frac{\pi}{2} \right)',
            r'\boxed{(3, \pi/2)}',
            1.0,
        ),
        (r'(3, \frac{\pi}{2})', r'\boxed{(\frac{\pi}{2}, 3)}', 0.0),
    ],
)
def test_answer_is_found_and_compared(gold, text, score):
  assert correct(problem(gold), text) == score


@pytest.mark.parametrize(
    'text, answer',
    [
        (r'so \boxed{\frac{1}{2}}.', r'\frac{1}{2}'),
        (r'\boxed{a} b \fbox {c}', 'c'),
        (r'\boxed{\{1\}}', r'\{1\}'),
        (r'\boxed{1 + \boxed{2}}', r'1 + \boxed{2}'),
        (r'$\boxed{1}$, \text{ and } $\boxed{2}$', '1, 2'),
        ('#### 1\n####  2 \nend', '2'),
        ('the answer is 3', None),
        (r'\boxed{3', None),
    ],
)
def test_final_answer_is_what_the_marks_hold(text, answer):
  assert final_answer(text) == answer


@pytest.mark.parametrize('gold', ['', ' \n', '.', r'\$'])
def test_right_answer_that_is_none_is_an_error_and_no_score(gold):
  status, score, _, detail = base.apply(CORRECT, problem(gold), '#### 5')
  assert (status, score) == ('error', None)
  assert f"answer of problem 'p' is {gold!r}, wanted a number" in detail


def test_every_thread_and_process_scores_alike():
  # CASES A20: time limits by SIGALRM work on the main thread alone.
  gold, text = problem(r'\frac{1}{3}'), r'\boxed{\frac{2}{6}}'
  job = (base.apply, CORRECT, gold, text)

  async def elsewhere():
    scorer = Scorer(CORRECT, timeout_s=WAIT_S)
    try:
      loop = asyncio.get_running_loop()
      return [
          await loop.run_in_executor(None, *job),
          (await scorer(gold, text)).score,
          (await scorer(problem(''), text)).status,
          scorer.counts['error'],
      ]
    finally:
      scorer.close()

  right = ('ok', 1.0, {}, '')
  assert job[0](*job[1:]) == right
  with concurrent.futures.ThreadPoolExecutor(1) as thread:
    assert thread.submit(*job).result() == right
  assert asyncio.run(elsewhere()) == [right, 1.0, RewardStatus.ERROR, 1]


@pytest.mark.parametrize(
    'name, stride, least',
    [
        ('gsm8k_model_solutions.jsonl', 20, 1.0),
        ('math_cot_responses.jsonl', 4, 1.0),
        # Test sets of other graders, which disagree among one another.
        ('math_pairs.jsonl', 5, 0.85),
    ],
)
def test_verdicts_agree_with_the_published_ones(data_dir, name, stride, least):
  path = data_dir / 'graders' / name
  if not path.is_file():
    pytest.skip(f'no file {path}')
  rows = [json.loads(line) for line in path.read_text('utf-8').splitlines()]
  agree = []
  for row in rows[::stride]:
    gold = final_answer(row['gold']) or row['gold']
    agree.append((correct(problem(gold), row['pred']) == 1.0) == row['equal'])
  assert sum(agree) >= least * len(agree)
