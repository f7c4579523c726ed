"""Opening a tokenizer by its path, and keeping its files."""

import json

import pytest
import tokenizers

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import render_prompt
from areal_jax.tokenizer.files import open_tokenizer
from areal_jax.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from areal_jax.types import Message
from tests import files

ASK = (Message('user', 'ab'),)


@pytest.fixture
def model(tmp_path):
  return train_sentencepiece(['ab<s>/:[]'], tmp_path / 'tok.model')


@pytest.fixture
def folder(tmp_path):
  """A folder in the Hugging Face layout, and more in it."""
  folder = tmp_path / 'published'
  folder.mkdir()
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.WordLevel({'<e>': 0, 'ab': 1, ':': 2}, '<e>')
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(['<e>'])
  tokenizer.save(str(folder / 'tokenizer.json'))
  for name, content in {
      'tokenizer_config.json': {'eos_token': '<e>'},
      'generation_config.json': {'eos_token_id': [0, 2]},
      'config.json': {'model_type': 'llama'},
  }.items():
    (folder / name).write_text(json.dumps(content))
  (folder / 'chat_template.jinja').write_text('{{ messages[0].content }} :')
  return folder


def kept(opened, tmp_path):
  """What is opened again from the files, as the folder of a run keeps them."""
  run = tmp_path / 'run'
  for name, content in opened.files.items():
    (run / name).parent.mkdir(parents=True, exist_ok=True)
    (run / name).write_bytes(content)
  return open_tokenizer(run)


def test_model_file_is_sentencepiece(model, tmp_path):
  opened = open_tokenizer(model)
  assert isinstance(opened.tokenizer, SentencePieceTokenizer)
  assert opened.chat is None
  assert list(opened.files) == ['tokenizer.model']
  again = kept(opened, tmp_path)
  assert again.tokenizer.encode('ab') == opened.tokenizer.encode('ab')
  assert again.files == opened.files


@pytest.mark.parametrize('name', ['', 'tokenizer.json'])
def test_folder_and_its_file_are_the_same(folder, tmp_path, name):
  opened = open_tokenizer(folder / name)
  assert isinstance(opened.tokenizer, HuggingFaceTokenizer)
  assert sorted(opened.files) == [
      'tokenizer/chat_template.jinja',
      'tokenizer/generation_config.json',
      'tokenizer/tokenizer.json',
      'tokenizer/tokenizer_config.json',
  ]
  again = kept(opened, tmp_path)
  assert again.files == opened.files
  assert again.tokenizer.eos_ids == opened.tokenizer.eos_ids == (0, 2)
  for each in (opened, again):
    assert render_prompt(
        each.tokenizer, ASK, add_bos=False, chat=each.chat
    ) == [1, 2]


def test_template_of_the_settings_comes_first(folder, model):
  given = dict(template='{{ messages[0].content }}{{ end }}')
  for path in (folder, model):
    opened = open_tokenizer(path, **given, variables={'end': ' ab'})
    assert opened.chat.render(ASK) == 'ab ab'


def test_llamas_folder_keeps_its_sentencepiece_model(model, tmp_path):
  folder = tmp_path / 'llama'
  folder.mkdir()
  (folder / 'tokenizer.model').write_bytes(model.read_bytes())
  (folder / 'tokenizer_config.json').write_text(
      json.dumps(
          {
              'bos_token': '<s>',
              'chat_template': '{{ bos_token }}[{{ messages[0].content }}]',
          }
      )
  )
  opened = open_tokenizer(folder)
  ids = render_prompt(opened.tokenizer, ASK, add_bos=True, chat=opened.chat)
  # '<s>' is one id, put there once and by the template.
  assert ids == [1, *opened.tokenizer.encode('[ab]')]
  assert opened.tokenizer.encode('<s>') != [1]  # in a text it is a text
  again = kept(opened, tmp_path)
  assert again.files == opened.files
  assert again.chat.render(ASK) == '<s>[ab]'


def test_folder_without_a_tokenizer_is_named(tmp_path):
  with pytest.raises(ConfigError, match='a folder with tokenizer.json or tok'):
    open_tokenizer(tmp_path)


def test_ends_that_the_policy_names_stay_with_the_tokenizer(folder, tmp_path):
  (folder / 'config.json').write_text('{"eos_token_id": [0, 1]}')
  (folder / 'generation_config.json').write_text('{"temperature": 0.5}')
  opened = open_tokenizer(folder)
  again = kept(opened, tmp_path)
  assert again.tokenizer.eos_ids == opened.tokenizer.eos_ids == (0, 1)
  assert again.files == opened.files
  said = json.loads(opened.files['tokenizer/generation_config.json'])
  assert said == {'temperature': 0.5, 'eos_token_id': [0, 1]}


def test_files_stay_as_they_are_where_others_name_the_end(folder):
  (folder / 'config.json').write_text('{"eos_token_id": 2}')
  before = (folder / 'generation_config.json').read_bytes()
  opened = open_tokenizer(folder)
  assert opened.files['tokenizer/generation_config.json'] == before


@pytest.mark.parametrize(
    'name, content, ends',
    [
        ('config.json', {'eos_token_id': 1}, (1, 2)),
        ('generation_config.json', {'eos_token_id': [2, 1]}, (2, 1)),
        ('special_tokens_map.json', {'eos_token': '<s>'}, (1, 2)),
        ('tokenizer_config.json', {'pad_token': '[PAD]'}, (2,)),
    ],
)
def test_ends_beside_a_sentencepiece_model_are_read(
    model, tmp_path, name, content, ends
):
  folder = tmp_path / 'llama'
  folder.mkdir()
  (folder / 'tokenizer.model').write_bytes(model.read_bytes())
  (folder / name).write_text(json.dumps(content))
  opened = open_tokenizer(folder)
  assert opened.tokenizer.eos_ids == ends
  assert kept(opened, tmp_path).tokenizer.eos_ids == ends


def test_end_that_a_sentencepiece_model_lacks_is_named(model, tmp_path):
  folder = tmp_path / 'llama'
  folder.mkdir()
  (folder / 'tokenizer.model').write_bytes(model.read_bytes())
  (folder / 'tokenizer_config.json').write_text('{"eos_token": "<|im_end|>"}')
  with pytest.raises(
      ConfigError,
      match="eos_token is '<|im_end|>', wanted a token of the",
  ):
    open_tokenizer(folder)


def test_template_sees_the_tokens_of_both_files(folder):
  (folder / 'special_tokens_map.json').write_text('{"bos_token": "ab"}')
  opened = open_tokenizer(folder, template='{{ bos_token }}|{{ eos_token }}')
  assert opened.chat.render(ASK) == 'ab|<e>'


def test_pointer_in_place_of_a_sentencepiece_model_is_named(tmp_path):
  (tmp_path / 'tokenizer.model').write_text(files.POINTER)
  with pytest.raises(ConfigError, match='tokenizer.model is a Git LFS pointer'):
    open_tokenizer(tmp_path)
