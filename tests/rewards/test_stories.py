"""Rewards on English."""

import pytest

from areal_jax.rewards import stories
from areal_jax.types import Problem

LILY = Problem('0', 'stories', 'There was Lily.', '', {'subject': 'Lily'})


@pytest.mark.parametrize('quotes', range(7))
def test_quote_counts_pairs_up_to_two(quotes):
  wanted = [0.0, 0.0, 0.5, 0.5, 1.0, 1.0, 1.0][quotes]
  assert stories.quote(LILY, 'a "' * quotes) == wanted


def test_happy_is_found_anywhere():
  assert stories.happy(LILY, 'She was so happy.') == 1.0
  assert stories.happy(LILY, 'She was sad. Happ') == 0.0


@pytest.mark.parametrize(
    'text, share',
    [
        ('', 0.0),
        ('Lily ran', 0.0),  # no sentence has ended
        ('... !', 0.0),  # nor is there one in this
        ('Lily ran.', 1.0),
        ('Lily ran. Tom ran.', 0.5),
        ('Lily\'s mom came! She said, "No!" Was it Lily? Yes. Lily', 0.5),
        ('Lilyan ran. lily ran.', 0.0),
        ('Lily and Lily. He. He...  He.', 0.25),
    ],
)
def test_name_is_the_share_of_ended_sentences(text, share):
  assert stories.name(LILY, text) == share


def test_subject_is_taken_literally():
  problem = Problem('0', 'stories', '', '', {'subject': 'L.ly'})
  assert stories.name(problem, 'Lily ran.') == 0.0
