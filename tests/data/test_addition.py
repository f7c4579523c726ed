"""The pairs of one-digit addition, and which of them are held out."""

import re

import pytest

from areal_jax.config import ConfigError
from areal_jax.data.addition import problems


def pairs(split, count, seed=0):
  found = []
  for problem in problems(split, count, seed):
    (message,) = problem.prompt
    numbers = re.fullmatch(
        r'What is (\d) plus (\d)\? Answer with only the number\.',
        message.content,
    )
    assert message.role == 'user'
    a, b = map(int, numbers.groups())
    assert problem.answer == str(a + b)
    assert problem.id == f'addition/{a}+{b}'
    found.append((a, b))
  return found


@pytest.mark.parametrize('seed', [0, 1, 7])
def test_no_held_out_pair_or_its_twin_is_trained_on(seed):
  train, held_out = pairs('train', 75, seed), pairs('eval', 25, seed)
  assert len({*train, *held_out}) == 100
  assert not {(b, a) for a, b in held_out} & set(train)


def test_a_cut_without_regard_to_twins_is_seen():
  """Planted fault: 25 pairs held out as they come leave twins behind."""
  everything = sorted(pairs('train', 75) + pairs('eval', 25))
  train, held_out = everything[:75], everything[75:]
  assert {(b, a) for a, b in held_out} & set(train)


def test_seed_says_which_and_in_which_order():
  assert pairs('train', 75, 3) == pairs('train', 75, 3)
  assert pairs('eval', 25, 3) != pairs('eval', 25, 4)
  assert pairs('train', 10, 3) == pairs('train', 75, 3)[:10]


@pytest.mark.parametrize('split, count', [('train', 76), ('eval', 26),
                                          ('train', 0)])  # fmt: skip
def test_more_than_there_are_is_refused(split, count):
  with pytest.raises(ConfigError, match=f'count is {count}, wanted 1 to'):
    problems(split, count, 0)


def test_unknown_split_is_refused():
  with pytest.raises(ConfigError, match="split is 'test'"):
    problems('test', 1, 0)
