"""The quickstart task."""

import itertools

from hypothesis import given, settings, strategies
import pytest

from areal_jax.config import ConfigError
from areal_jax.data import running_totals
from areal_jax.rewards.running_totals import exact


def slow_answer(prompt: str) -> str:
  """The answer worked out term by term."""
  total, totals = 0, []
  for i, term in enumerate(prompt.removesuffix('=').split('+')):
    total += int(term)
    if i:
      totals.append(total)
  return ';'.join(str(t) for t in totals) + '.'


def test_worked_example():
  assert slow_answer('3+5+7=') == '8;15.'


@given(seed=strategies.integers(0, 2**32))
@settings(max_examples=10, deadline=None)
def test_problems_are_right_and_distinct_and_of_one_split(seed):
  train = running_totals.problems('train', 300, seed)
  held_out = running_totals.problems('eval', 100, seed)
  assert [len(train), len(held_out)] == [300, 100]
  for problem in (*train, *held_out):
    assert problem.answer == slow_answer(problem.prompt)
    assert exact(problem, problem.answer) == 1.0
    assert 2 <= problem.prompt.count('+') + 1 <= 8
  assert len({p.prompt for p in train}) == 300
  assert not {p.prompt for p in train} & {p.prompt for p in held_out}
  assert train[17].id == 'totals/train/17'


def test_splits_share_no_prompt_and_cover_all():
  every = [
      f'{a}+{b}+{c}=' for a, b, c in itertools.product(range(10), repeat=3)
  ]
  found = {
      split: {
          p.prompt
          for p in running_totals.problems(split, count, 0, lengths=(3, 3))
      }
      for split in running_totals.SPLITS
      for count in [sum(running_totals.split_of(x) == split for x in every)]
  }
  assert found['train'] | found['eval'] == set(every)
  assert not found['train'] & found['eval']
  assert 90 <= len(found['eval']) <= 160  # one in eight of 1,000


def test_seed_decides():
  first = running_totals.problems('train', 50, 1)
  assert first == running_totals.problems('train', 50, 1)
  assert first != running_totals.problems('train', 50, 2)


def test_lengths_are_uniform_and_answers_vary():
  train = running_totals.problems('train', 400, 0)
  counts = [sum(p.prompt.count('+') == n for p in train) for n in range(1, 6)]
  assert min(counts) >= 30
  lengths = {len(p.answer) for p in train}
  assert min(lengths) <= 3 and max(lengths) >= 14


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'split': 'test'}, "split is 'test'"),
        ({'count': 101}, r'count is 101, but only \d+ prompts of 2 to 2'),
        ({'lengths': (1, 4)}, r'lengths is \(1, 4\)'),
        ({'lengths': (5, 4)}, r'lengths is \(5, 4\)'),
        ({'count': 0}, 'count is 0'),
    ],
)
def test_impossible_problems_are_refused(arguments, message):
  arguments = {'split': 'train', 'count': 4, 'lengths': (2, 2), **arguments}
  with pytest.raises(ConfigError, match=message):
    running_totals.problems(seed=0, **arguments)


def test_demonstrations_are_whole_or_one_total_short():
  pairs = running_totals.demonstrations(20_000, 3, early_stop=0.55)
  assert len(pairs) == 20_000
  short = can_be = 0
  for prompt, answer in pairs:
    whole = slow_answer(prompt)
    can_be += ';' in whole
    if answer != whole:
      short += 1
      assert answer == whole.rpartition(';')[0] + '.'
  assert abs(can_be / 20_000 - 4 / 5) < 0.02
  assert abs(short / can_be - 0.55) < 0.02


def test_share_decides_only_which_answers_are_short():
  whole = running_totals.demonstrations(500, 3)
  short = running_totals.demonstrations(500, 3, early_stop=1.0)
  assert [p for p, _ in whole] == [p for p, _ in short]
  assert all(answer == slow_answer(prompt) for prompt, answer in whole)
  assert all(
      (answer == slow_answer(prompt)) == (prompt.count('+') == 1)
      for prompt, answer in short
  )


def test_no_demonstration_is_of_the_held_out_split():
  pairs = running_totals.demonstrations(20_000, 0)
  assert {running_totals.split_of(p) for p, _ in pairs} == {'train'}


def test_share_outside_its_range_is_refused():
  with pytest.raises(ConfigError, match='early_stop is 1.5'):
    running_totals.demonstrations(10, 0, early_stop=1.5)


def test_work_for_demonstrations_is_in_proportion_to_their_number(monkeypatch):
  """One prompt in eight is of the other split; the last block may be cut."""
  looked_at = []
  real = running_totals.split_of
  monkeypatch.setattr(
      running_totals,
      'split_of',
      lambda prompt: looked_at.append(prompt) or real(prompt),
  )
  found = running_totals.demonstrations(80_000, 0, early_stop=0.55)
  assert len(found) == 80_000
  assert len(looked_at) <= 80_000 * 8 / 7 * 1.02 + running_totals._BLOCK


def test_texts_hold_every_character_of_the_task():
  assert set(''.join(running_totals.texts())) == set('0123456789+=;.')
