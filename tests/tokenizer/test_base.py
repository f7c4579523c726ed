"""Rendering prompts."""

import pytest

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import absent_ids, render_prompt
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.types import Message
from tests.tokenizer import reference
from tests.tokenizer.byte_tokenizer import ByteTokenizer


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


def test_ids_that_a_policy_has_and_its_tokenizer_lacks_are_ranges():
  tokenizer = ByteTokenizer()
  assert absent_ids(tokenizer, 259) == ()
  assert absent_ids(tokenizer, 300) == ((259, 300),)
  tokenizer.missing_ids = frozenset({5, 6, 9, 258})
  assert absent_ids(tokenizer, 259) == ((5, 7), (9, 10), (258, 259))
  assert absent_ids(tokenizer, 300) == ((5, 7), (9, 10), (258, 300))


def test_published_embedding_has_rows_that_its_tokenizer_lacks(data_dir):
  qwen3 = reference.opened(data_dir, 'qwen3/tokenizer.json.gz').tokenizer
  assert absent_ids(qwen3, 151_936) == ((151_669, 151_936),)
  smollm2 = reference.opened(data_dir, 'smollm2/tokenizer.json').tokenizer
  assert absent_ids(smollm2, 49_152) == ()


def test_prompt_without_a_token_is_refused():
  with pytest.raises(ConfigError, match="prompt is ''.*at least one token"):
    render_prompt(ByteTokenizer(), '', add_bos=False)


def test_bos_that_the_tokenizer_does_not_have_is_refused():
  class WithoutBos(ByteTokenizer):
    bos_id = None

  with pytest.raises(ConfigError, match='no BOS id'):
    render_prompt(WithoutBos(), 'Hi', add_bos=True)
