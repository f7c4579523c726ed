"""Published tokenizers do what the libraries of their makers do.

Where the folder of outside data is there, all of them have to be: a file that
is missing is a failure and no skip.
"""

import json
import re

import pytest

from areal_jax.tokenizer.base import render_prompt
from areal_jax.types import Message
from tests.tokenizer import reference


def test_every_tokenizer_of_the_reference_is_compared(data_dir):
  assert sorted(reference.expected(data_dir)) == sorted(reference.NAMES)


@pytest.mark.parametrize('name', reference.NAMES)
def test_encodes_and_decodes_as_the_reference(data_dir, name):
  expected = reference.expected(data_dir)[name]
  opened = reference.opened(data_dir, name)
  tokenizer = opened.tokenizer
  assert tokenizer.vocab_size == expected['vocab_size']
  assert len(expected['cases']) == 8
  specials = r'<\|im_(start|end)\|>' if tokenizer.eos_ids else '(?!)'
  if name.endswith('.model'):
    specials = '(?!)'  # a text cannot spell them
  for case in expected['cases']:
    assert tokenizer.encode(case['text']) == case['ids']
    # The reference spells special tokens out.
    wanted = re.sub(specials, '', case['decoded'])
    assert tokenizer.decode(case['ids']) == wanted


def test_a_planted_difference_is_seen(data_dir):
  """The comparison can fail: one tokenizer against another's cases."""
  cases = reference.expected(data_dir)['gpt2/tokenizer.json']['cases']
  tokenizer = reference.opened(data_dir, 'smollm2/tokenizer.json').tokenizer
  assert all(tokenizer.encode(case['text']) != case['ids'] for case in cases)


def test_chat_becomes_the_published_text_and_ids(data_dir):
  file = data_dir / 'models/smollm2_135m_instruct/reference.json'
  wanted = json.loads(file.read_text())['chat']
  opened = reference.opened(data_dir, 'smollm2/tokenizer.json')
  chat = (Message('user', 'What is 7 plus 5?'),)
  assert opened.chat.render(chat) == wanted['prompt_text']
  ids = render_prompt(
      opened.tokenizer,
      chat,
      add_bos=True,  # is for plain texts; this template brings its own
      chat=opened.chat,
  )
  assert ids == wanted['prompt_ids']
  said = opened.tokenizer.decode(wanted['greedy_ids'])
  assert said == wanted['greedy_text']


@pytest.mark.parametrize('prompt', ['chat', 'plain'])
def test_texts_of_the_reference_have_its_ids(data_dir, prompt):
  file = data_dir / 'models/smollm2_135m_instruct/reference.json'
  wanted = json.loads(file.read_text())[prompt]
  tokenizer = reference.opened(data_dir, 'smollm2/tokenizer.json').tokenizer
  assert tokenizer.encode_chat(wanted['prompt_text']) == wanted['prompt_ids']


def test_prompts_of_the_story_model_have_its_ids(data_dir):
  file = data_dir / 'models/stories260K/reference.json'
  cases = json.loads(file.read_text())['cases']
  tokenizer = reference.opened(data_dir, 'stories260K/tok512.model').tokenizer
  assert cases
  for case in cases:
    ids = render_prompt(tokenizer, case['prompt'], add_bos=True)
    assert ids == case['prompt_ids']
