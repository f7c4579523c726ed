"""Rendering prompts."""

import pytest

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import render_prompt
from areal_jax.tokenizer.byte_tokenizer import ByteTokenizer
from areal_jax.types import Message


def test_bos_is_put_in_front_once_and_only_if_asked():
  tokenizer = ByteTokenizer()
  assert render_prompt(tokenizer, 'Hi', add_bos=True) == [1, 75, 108]
  assert render_prompt(tokenizer, 'Hi', add_bos=False) == [75, 108]
  assert render_prompt(tokenizer, '', add_bos=True) == [1]


def test_chat_prompt_is_refused():
  messages = (Message('system', 'Be kind.'), Message('user', 'Hi'))
  with pytest.raises(ConfigError, match='2 chat messages.*no chat template'):
    render_prompt(ByteTokenizer(), messages, add_bos=False)


def test_prompt_without_a_token_is_refused():
  with pytest.raises(ConfigError, match="prompt is ''.*at least one token"):
    render_prompt(ByteTokenizer(), '', add_bos=False)


def test_bos_that_the_tokenizer_does_not_have_is_refused():
  class WithoutBos(ByteTokenizer):
    bos_id = None

  with pytest.raises(ConfigError, match='no BOS id'):
    render_prompt(WithoutBos(), 'Hi', add_bos=True)
