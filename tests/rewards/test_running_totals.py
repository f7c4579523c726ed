"""The reward of the quickstart task."""

import pytest

from areal_jax.rewards.running_totals import exact
from areal_jax.types import Problem


@pytest.mark.parametrize(
    'text, score',
    [('8;15.', 1.0), ('8.', 0.0), ('8;15', 0.0), (' 8;15.', 0.0), ('', 0.0)],
)
def test_only_the_whole_answer_scores(text, score):
  assert exact(Problem('0', 'totals', '3+5+7=', '8;15.'), text) == score
