"""Openings for story models."""

import pytest

from areal_jax.config import ConfigError
from areal_jax.data import stories
from areal_jax.rewards.stories import name
from areal_jax.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer


def test_splits_are_large_enough_and_share_nothing():
  train, held_out = stories.openings('train'), stories.openings('eval')
  assert min(len(train), len(held_out)) >= 16
  both = [*train, *held_out]
  assert len({p.id for p in both}) == len(both)
  assert len({p.prompt for p in both}) == len(both)
  assert len({p.meta['subject'] for p in both}) == len(both)


@pytest.mark.parametrize('split', ['train', 'eval'])
def test_opening_states_its_subject_and_has_no_quotes(split):
  for opening in stories.openings(split):
    assert name(opening, opening.prompt) > 0
    assert '"' not in opening.prompt
    assert opening.prompt.endswith('.')
    assert opening.source == 'stories'


@pytest.mark.parametrize('split', ['train', 'eval'])
def test_openings_are_short_for_the_story_model(data_dir, split):
  path = data_dir / 'models/stories260K/tok512.model'
  if not path.is_file():
    pytest.skip(f'no file {path}')
  tokenizer = SentencePieceTokenizer(path)
  for opening in stories.openings(split):
    ids = tokenizer.encode(opening.prompt)
    assert len(ids) <= 40
    assert tokenizer.decode(ids) == opening.prompt


def test_unknown_split_is_refused():
  with pytest.raises(ConfigError, match="split is 'test'"):
    stories.openings('test')
