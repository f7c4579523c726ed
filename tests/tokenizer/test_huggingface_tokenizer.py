"""Tokenizers in the Hugging Face layout: published ones, and small ones."""

import json
import pathlib

import pytest
import tokenizers

from areal_jax.config import ConfigError
from areal_jax.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from tests import files
from tests.tokenizer import reference


@pytest.fixture
def published(data_dir):
  """Opens a published tokenizer."""
  return lambda name: reference.opened(data_dir, name).tokenizer


def test_special_ids_come_from_the_neighbours(published):
  smollm2 = published('smollm2/tokenizer.json')
  assert (smollm2.bos_id, smollm2.eos_ids, smollm2.pad_id) == (1, (2,), 2)
  qwen3 = published('qwen3/tokenizer.json.gz')
  assert (qwen3.bos_id, qwen3.eos_ids, qwen3.pad_id) == (
      None,
      (151645,),
      151643,
  )
  gpt2 = published('gpt2/tokenizer.json')
  assert (gpt2.bos_id, gpt2.eos_ids, gpt2.pad_id) == (None, (), 0)


def test_answer_is_decoded_without_special_tokens(published):
  tokenizer = published('smollm2/tokenizer.json')
  ids = tokenizer.encode('12<|im_end|>')
  assert ids[-1] == 2
  assert tokenizer.decode(ids) == '12'
  assert tokenizer.decode([*ids, 60_000]) == '12'  # no such id


def test_holes_between_the_tokens_of_a_file_are_known(tmp_path):
  model = tokenizers.models.WordLevel({'a': 0, 'b': 3, 'c': 6}, unk_token='a')
  tokenizers.Tokenizer(model).save(str(tmp_path / 'tokenizer.json'))
  tokenizer = HuggingFaceTokenizer(tmp_path)
  assert tokenizer.vocab_size == 7
  assert tokenizer.missing_ids == {1, 2, 4, 5}


def test_bytes_of_half_a_character_are_replaced(published):
  tokenizer = published('smollm2/tokenizer.json')
  ids = tokenizer.encode('𝄞')
  assert len(ids) > 1
  assert tokenizer.decode(ids) == '𝄞'
  assert '\ufffd' in tokenizer.decode(ids[:1])


def small(folder: pathlib.Path, **configs: object) -> pathlib.Path:
  """A word-level tokenizer that cuts, pads and puts BOS in front."""
  words = ['<s>', '</s>', '<end>', 'a', 'b', 'c']
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, 'a')
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  tokenizer.add_special_tokens(words[:3])
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
      single='<s> $A', special_tokens=[('<s>', 0)]
  )
  tokenizer.enable_truncation(2)
  tokenizer.enable_padding(length=8)
  folder.mkdir(exist_ok=True)
  tokenizer.save(str(folder / 'tokenizer.json'))
  for name, content in configs.items():
    (folder / f'{name}.json').write_text(json.dumps(content))
  return folder


def test_nothing_is_cut_padded_or_put_in_front(tmp_path):
  tokenizer = HuggingFaceTokenizer(small(tmp_path))
  assert tokenizer.encode('a b c b a') == [3, 4, 5, 4, 3]


@pytest.mark.parametrize(
    'configs, ends',
    [
        ({}, ()),
        ({'tokenizer_config': {'eos_token': '<end>'}}, (2,)),
        ({'generation_config': {'eos_token_id': 1}}, (1,)),
        ({'generation_config': {'eos_token_id': [1, 2]}}, (1, 2)),
        (
            {
                'tokenizer_config': {'eos_token': {'content': '<end>'}},
                'generation_config': {'eos_token_id': [1, 2]},
            },
            (2, 1),  # the chat's own end first: it ends demonstrations
        ),
        ({'config': {'eos_token_id': 2}}, (2,)),
        ({'config': {'eos_token_id': [2, 1]}}, (2, 1)),
        ({'special_tokens_map': {'eos_token': '</s>'}}, (1,)),
        (
            {
                'config': {'eos_token_id': 2},
                'special_tokens_map': {'eos_token': {'content': '</s>'}},
            },
            (1, 2),
        ),
        (
            {
                'tokenizer_config': {'eos_token': '<end>'},
                'special_tokens_map': {'eos_token': '</s>'},
                'generation_config': {'eos_token_id': None},
                'config': {'eos_token_id': 0, 'bos_token_id': 1},
            },
            (2, 1, 0),
        ),
    ],
)
def test_all_ends_of_all_files_are_taken(tmp_path, configs, ends):
  tokenizer = HuggingFaceTokenizer(small(tmp_path, **configs))
  assert tokenizer.eos_ids == ends
  named = {'tokenizer_config', 'special_tokens_map'} & {*configs}
  assert tokenizer.pad_id == (ends[0] if named else 0)
  assert tokenizer.bos_id is None  # ids of policies name none


def test_what_begins_and_fills_is_read_from_both_files_of_texts(tmp_path):
  texts = {'bos_token': '<s>', 'pad_token': '<end>', 'eos_token': '</s>'}
  tokenizer = HuggingFaceTokenizer(small(tmp_path, special_tokens_map=texts))
  assert (tokenizer.bos_id, tokenizer.eos_ids) == (0, (1,))
  assert tokenizer.pad_id == 2
  # Null is a word of its own: this tokenizer puts nothing in front.
  (tmp_path / 'tokenizer_config.json').write_text('{"bos_token": null}')
  assert HuggingFaceTokenizer(tmp_path).bos_id is None


@pytest.mark.parametrize(
    'configs, message',
    [
        (
            {'tokenizer_config': {'eos_token': '<e>'}},
            "eos_token is '<e>', want",
        ),
        ({'tokenizer_config': {'bos_token': '<e>'}}, "bos_token is '<e>'"),
        ({'generation_config': {'eos_token_id': 6}}, 'eos_token_id is 6, .* 6'),
        ({'generation_config': {'eos_token_id': ['x']}}, "eos_token_id is 'x'"),
        ({'generation_config': [1]}, r'generation_config.json is \[1\]'),
        ({'config': {'eos_token_id': 6}}, '/config.json: eos_token_id is 6'),
        (
            {'special_tokens_map': {'eos_token': '<e>'}},
            "special_tokens_map.json: eos_token is '<e>', wanted a token of",
        ),
    ],
)
def test_neighbour_that_does_not_fit_is_named(tmp_path, configs, message):
  with pytest.raises(ConfigError, match=message):
    HuggingFaceTokenizer(small(tmp_path, **configs))


@pytest.mark.parametrize('content', ['', 'hello', '{}', '{"model": 3}'])
def test_file_that_is_no_tokenizer_is_named(tmp_path, content):
  (tmp_path / 'tokenizer.json').write_text(content)
  with pytest.raises(ConfigError, match='tokenizer.json is no tokenizer: '):
    HuggingFaceTokenizer(tmp_path)


def test_missing_file_is_named(tmp_path):
  with pytest.raises(ConfigError, match='wanted a tokenizer.json or a folder'):
    HuggingFaceTokenizer(tmp_path)


def test_pointer_in_place_of_the_file_is_named(tmp_path):
  (tmp_path / 'tokenizer.json').write_text(files.POINTER)
  with pytest.raises(ConfigError, match='tokenizer.json is a Git LFS pointer'):
    HuggingFaceTokenizer(tmp_path)
