"""Rendering prompts."""

import pytest

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import render_prompt
from areal_jax.tokenizer.byte_tokenizer import ByteTokenizer
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.types import Message


def test_bos_is_put_in_front_once_and_only_if_asked():
  tokenizer = ByteTokenizer()
  assert render_prompt(tokenizer, 'Hi', add_bos=True) == [1, 75, 108]
  assert render_prompt(tokenizer, 'Hi', add_bos=False) == [75, 108]
  assert render_prompt(tokenizer, '', add_bos=True) == [1]


MESSAGES = (Message('system', 'Be kind.'), Message('user', 'Hi'))


def test_chat_prompt_without_a_template_is_refused():
  with pytest.raises(ConfigError, match='2 chat messages.*no chat template'):
    render_prompt(ByteTokenizer(), MESSAGES, add_bos=False)


def test_chat_is_what_its_template_says_and_nothing_is_put_in_front():
  chat = ChatTemplate('{% for m in messages %}{{ m.content }}|{% endfor %}')
  ids = render_prompt(ByteTokenizer(), MESSAGES, add_bos=True, chat=chat)
  assert ByteTokenizer().decode(ids) == 'Be kind.|Hi|'
  assert ids[0] != ByteTokenizer.bos_id
  plain = render_prompt(ByteTokenizer(), 'Hi', add_bos=True, chat=chat)
  assert plain == [1, 75, 108]  # a plain text stays as it is


def test_prompt_without_a_token_is_refused():
  with pytest.raises(ConfigError, match="prompt is ''.*at least one token"):
    render_prompt(ByteTokenizer(), '', add_bos=False)


def test_bos_that_the_tokenizer_does_not_have_is_refused():
  class WithoutBos(ByteTokenizer):
    bos_id = None

  with pytest.raises(ConfigError, match='no BOS id'):
    render_prompt(WithoutBos(), 'Hi', add_bos=True)
