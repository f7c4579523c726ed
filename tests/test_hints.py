"""A mistyped flag, word or keyword is answered with the right form."""

import pytest

from areal_jax import hints
from areal_jax.settings.experiment import Experiment


@pytest.mark.parametrize(
    'text, says',
    [
        ('eta=2', 'did you mean --config.rollout.eta=2?'),
        ('--eta=2', 'did you mean --config.rollout.eta=2?'),
        ('--rollout.eta=2', 'did you mean --config.rollout.eta=2?'),
        ('--config.eta=2', 'did you mean --config.rollout.eta=2?'),
        ('--gruop_size=4', 'did you mean --config.rollout.group_size=4?'),
        ('--steps', 'did you mean --config.steps or --config.warm_start.steps'),
        ('--train_sources=x', 'did you mean --config.task.train_sources=x?'),
        ('quick.py', 'did you mean --config=quick.py?'),
        ('runs/a/config.json', 'did you mean --config=runs/a/config.json?'),
        ('files.py:long', 'did you mean --config=files.py:long?'),
        ('--qwertyuiop=1', ''),
        ('a b', ''),
    ],
)
def test_a_word_is_answered_with_its_right_form(text, says):
  found = hints.right_form(Experiment, text)
  assert found.startswith(says) and bool(found) == bool(says)


def test_paths_go_into_optional_sections_and_not_into_items():
  known = set(hints.paths(Experiment))
  assert {'steps', 'train', 'train.optimizer.learning_rate'} <= known
  assert 'task.train_sources' in known
  assert 'task.train_sources.path' not in known


@pytest.mark.parametrize(
    'cause, says',
    [
        (
            'TypeError: RolloutSettings.__init__() got an unexpected keyword'
            " argument 'bach_size'",
            "RolloutSettings has no field 'bach_size', wanted 'batch_size'",
        ),
        (
            'TypeError: Other.__init__() got an unexpected keyword argument'
            " 'x'",
            '',
        ),
        ("KeyError: 'bach_size'", ''),
    ],
)
def test_a_wrong_keyword_is_answered_with_the_near_name(cause, says):
  assert hints.wrong_keyword(Experiment, cause) == says
