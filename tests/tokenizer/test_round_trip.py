"""Which texts come back from their ids: as they are, changed, or not at all."""

import io
import json

import pytest
import sentencepiece
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers

from areal_jax.config import ConfigError
from areal_jax.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from areal_jax.tokenizer.round_trip import round_trip
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from tests.tokenizer import reference
from tests.tokenizer.byte_tokenizer import ByteTokenizer

HARD = (
    'plain', '  two', 'a\n\n\tb ', 'ﬁ ½ x²', '😀\u200b', '日本語',
    '<s>hi</s>', '<unk>', 'a\0b', '\r\n x \n', '▁',
    '<|im_start|>user\nhi<|im_end|>\n',
)  # fmt: skip
PUBLISHED = (
    'smollm2/tokenizer.json',
    'qwen3/tokenizer.json.gz',
    'gpt2/tokenizer.json',
    'mistral_v1_tokenizer.model',
    'llama2_tokenizer.model',
)


def returned(tokenizer, text):
  return round_trip(tokenizer, text, tokenizer.encode(text))


@pytest.mark.parametrize('name', PUBLISHED)
def test_hard_texts_come_back_from_published_tokenizers(data_dir, name):
  tokenizer = reference.opened(data_dir, name).tokenizer
  for text in HARD:
    assert returned(tokenizer, text) == ''
    assert round_trip(tokenizer, text, tokenizer.encode_chat(text)) == ''


def test_letters_that_are_composed_are_told(data_dir):
  qwen3 = reference.opened(data_dir, 'qwen3/tokenizer.json.gz').tokenizer
  said = returned(qwen3, 'cafe\u0301')
  assert said == "'cafe\u0301' comes back as 'caf\xe9'"
  assert returned(qwen3, 'caf\xe9') == ''


@pytest.fixture(scope='module')
def characters(tmp_path_factory):
  """A tokenizer of the characters of running totals."""
  path = tmp_path_factory.mktemp('made') / 'totals.model'
  return SentencePieceTokenizer(train_sentencepiece(['0123456789+=;.'], path))


@pytest.mark.parametrize(
    'text, message',
    [
        (
            'sort: 964 ->',
            r"2 of .* unknown one.*none for 's', 'o', 'r', 't', ':' and others",
        ),
        ('1+1 =', "1 of its 5 tokens are the unknown one: it has none for ' '"),
        ('1\0', "it has none for '.x00'"),
    ],
)
def test_characters_without_a_token_are_named(characters, text, message):
  assert returned(characters, '9+9=') == ''
  with pytest.raises(ConfigError, match=message):
    returned(characters, text)


def test_every_text_comes_back_from_bytes():
  for text in HARD:
    assert returned(ByteTokenizer(), text) == ''


def test_a_model_that_normalizes_is_told_and_not_refused(tmp_path):
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(['one half fine tea x 12']),
      model_writer=model,
      model_type='char',
      vocab_size=17,
      hard_vocab_limit=False,
      character_coverage=1.0,
      normalization_rule_name='nmt_nfkc_cf',
      minloglevel=2,
  )
  (tmp_path / 'nfkc.model').write_bytes(model.getvalue())
  tokenizer = SentencePieceTokenizer(tmp_path / 'nfkc.model')
  assert returned(tokenizer, 'one tea') == ''  # a blank more in front
  assert returned(tokenizer, 'ﬁne') == "'ﬁne' comes back as 'fine'"
  assert returned(tokenizer, 'Tea x²') == "'Tea x²' comes back as 'tea x2'"
  # A run of blanks becomes one: what stood on lines of their own does not.
  said = returned(tokenizer, 'one\n\ntea')
  assert said == r"'one\n\ntea' comes back as 'one tea'"
  with pytest.raises(ConfigError, match="it has none for 'q'"):
    returned(tokenizer, 'tea q')


def saved(folder, made):
  made.save(str(folder / 'tokenizer.json'))
  return HuggingFaceTokenizer(folder)


def test_lower_case_by_rule_is_told_and_special_tokens_stay(tmp_path):
  words = {'[UNK]': 0, '[SEP]': 1, 'what': 2, 'is': 3, 'it': 4, '##s': 5}
  made = tokenizers.Tokenizer(models.WordPiece(words, unk_token='[UNK]'))
  made.normalizer = normalizers.BertNormalizer()
  made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
  made.decoder = decoders.WordPiece()
  made.add_special_tokens(['[SEP]'])
  tokenizer = saved(tmp_path, made)
  assert tokenizer.unk_id == 0
  assert returned(tokenizer, 'what is its') == ''
  said = returned(tokenizer, 'What [SEP] is')
  assert said == "'What [SEP] is' comes back as 'what [SEP] is'"
  with pytest.raises(ConfigError, match='1 of its 3 tokens are the unknown'):
    returned(tokenizer, 'what is love')


def test_a_character_that_vanishes_is_refused(tmp_path):
  # A BPE without an unknown token leaves out what it does not know.
  made = tokenizers.Tokenizer(models.BPE({'a': 0, 'b': 1}, []))
  made.decoder = decoders.Fuse()
  tokenizer = saved(tmp_path, made)
  assert tokenizer.unk_id is None and returned(tokenizer, 'ab') == ''
  with pytest.raises(ConfigError, match="'abc' comes back as 'ab', wanted"):
    returned(tokenizer, 'abc')


def test_an_unknown_token_that_a_text_spells_out_is_its_own(tmp_path):
  made = tokenizers.Tokenizer(
      models.Unigram([('a', 0.0), ('<unk>', -9.0)], unk_id=1)
  )
  made.add_special_tokens(['<unk>'])
  made.decoder = decoders.Fuse()
  tokenizer = saved(tmp_path, made)
  assert json.loads(made.to_str())['model']['unk_id'] == tokenizer.unk_id == 1
  assert returned(tokenizer, 'a<unk>a') == ''
  with pytest.raises(ConfigError, match="unknown one: it has none for 'b'"):
    returned(tokenizer, 'ab')
