"""The counting task: right answers, lengths of the stated law, apart splits."""

import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.data import counting
from areal_jax.data.running_totals import split_of


@pytest.fixture(scope='module')
def train():
  return counting.problems('train', 4000, seed=3)


def test_answer_counts_from_the_first_number_to_the_second(train):
  for problem in train[:200]:
    first, last = map(int, problem.prompt.rstrip('=').split('-'))
    numbers = [int(n) for n in problem.answer.rstrip('.').split(';')]
    assert numbers == list(range(first, last + 1))
    assert len(problem.prompt) == 6
    assert len(problem.answer) == 3 * len(numbers)


def test_lengths_follow_the_law(train):
  lengths = np.array([len(problem.answer) for problem in train])
  steps = lengths // 3 - 1
  seen = np.bincount(steps, minlength=41)[1:] / len(steps)
  # Three standard errors of a share at 4,000 problems, most where P is 0.43.
  np.testing.assert_allclose(seen, counting.law(), atol=0.025)
  assert np.median(lengths) == 9
  assert lengths.max() > 10 * np.median(lengths)
  assert np.mean(lengths > 96) == pytest.approx(0.019, abs=0.007)


def test_no_prompt_is_in_both_splits(train):
  evaluation = counting.problems('eval', 300, seed=3)
  assert not {p.prompt for p in train} & {p.prompt for p in evaluation}
  assert {split_of(p.prompt) for p in evaluation} == {'eval'}
  assert len({p.id for p in (*train, *evaluation)}) == 4300


def test_demonstrations_are_answers_of_the_train_split():
  pairs = counting.demonstrations(300, seed=1)
  assert len(pairs) == 300
  assert {split_of(prompt) for prompt, _ in pairs} == {'train'}
  assert all(answer.startswith(prompt[:2]) for prompt, answer in pairs)
  assert set(''.join(counting.texts())) == set('0123456789-=;.')


def test_seed_decides():
  one, other = (counting.problems('train', 50, seed=s) for s in (1, 2))
  assert one == counting.problems('train', 50, seed=1)
  assert one != other


@pytest.mark.parametrize('split, count', [('test', 1), ('train', 0)])
def test_wrong_arguments_are_refused(split, count):
  with pytest.raises(ConfigError, match='split|count'):
    counting.problems(split, count, seed=0)
