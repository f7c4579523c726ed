"""The last number of an answer, by hand."""

import pytest

from areal_jax.rewards.last_number import correct, final_number
from areal_jax.types import Problem


def problem(answer):
  return Problem('p', 's', 'q', answer)


@pytest.mark.parametrize(
    'answer, text, score',
    [
        ('7', '7', 1.0),
        ('7', '3 + 4 = 7.', 1.0),
        ('7', 'It is 7.0, I think', 1.0),
        ('7', '07', 1.0),
        ('7', '7 or 8', 0.0),
        ('7', '17', 0.0),
        ('7', '-7', 0.0),
        ('7', '14-7', 1.0),  # a difference has no sign
        ('7', 'x = (9)-7', 1.0),
        ('-7', 'minus: -7', 1.0),
        ('-7', '−7', 1.0),
        ('1234', '1,234 apples', 1.0),
        ('1,234', '1234', 1.0),
        ('4', '1,2,3,4', 1.0),
        ('2.5', 'about 2.50', 1.0),
        ('2.5', '2.', 0.0),
        ('7', 'seven', 0.0),
        ('7', '', 0.0),
        ('12', '1.2.12', 1.0),
    ],
)
def test_last_number_counts(answer, text, score):
  assert correct(problem(answer), text) == score


def test_answer_without_a_number_is_no_score():
  with pytest.raises(ValueError, match="'seven', wanted a number"):
    correct(problem('seven'), '7')


@pytest.mark.parametrize(
    'text, vote',
    [('= 12.50', '12.5'), ('100', '100'), ('1,000', '1000'), ('none', None)],
)
def test_votes_are_equal_where_numbers_are(text, vote):
  assert final_number(text) == vote
