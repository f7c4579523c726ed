"""Sentencepiece models: published ones, and ones trained here."""

import pathlib

from hypothesis import given, settings, strategies
import pytest

from areal_jax.config import ConfigError
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from tests.tokenizer import reference

SUMS = [f'{a}+{b}={a + b}.' for a in range(10) for b in range(10)]


def test_story_model_has_bos_1_and_eos_2_and_no_padding(data_dir):
  name = 'stories260K/tok512.model'
  tokenizer = reference.opened(data_dir, name).tokenizer
  assert (tokenizer.bos_id, tokenizer.eos_ids) == (1, (2,))
  assert tokenizer.encode('Once upon a time') == [403, 407, 261, 378]
  assert tokenizer.decode([1, 403, 407, 261, 378, 2]) == 'Once upon a time'


def test_character_model_has_a_piece_for_each_character(tmp_path):
  path = train_sentencepiece(SUMS, tmp_path / 'sums.model')
  tokenizer = SentencePieceTokenizer(path)
  # Ten digits, '+', '=' and '.', behind padding, BOS, EOS and unknown.
  assert tokenizer.vocab_size == 4 + 13
  assert (tokenizer.pad_id, tokenizer.bos_id, tokenizer.eos_ids) == (0, 1, (2,))
  assert len(tokenizer.encode('3+9=12.')) == 7
  assert set(tokenizer.encode('3x')) & {3} == {3}
  assert tokenizer.decode([1, *tokenizer.encode('3+9='), 2, 0]) == '3+9='


@pytest.fixture(scope='module')
def trained(tmp_path_factory) -> dict[str, SentencePieceTokenizer]:
  """A model of each kind."""
  folder = tmp_path_factory.mktemp('models')
  texts = ['ab ba', ' a', 'abab\nbé\t', 'é ba  ab'] * 3
  sizes = {'char': None, 'bpe': 272, 'unigram': 268}
  return {
      kind: SentencePieceTokenizer(
          train_sentencepiece(
              texts, folder / f'{kind}.model', kind=kind, vocab_size=size
          )
      )
      for kind, size in sizes.items()
  }


@given(text=strategies.text('abé \n\t'))
@settings(max_examples=50, deadline=None)
def test_texts_of_the_alphabet_come_back_unchanged(trained, text):
  for tokenizer in trained.values():
    assert tokenizer.decode(tokenizer.encode(text)) == text


@given(text=strategies.text(strategies.characters(blacklist_characters='▁\0')))
@settings(max_examples=50, deadline=None)
def test_other_characters_fall_back_to_bytes(trained, text):
  text = text.encode('utf-8', 'ignore').decode('utf-8')
  for kind in ('bpe', 'unigram'):
    tokenizer = trained[kind]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_id_outside_the_vocabulary_is_named(trained):
  for tokenizer in trained.values():
    size = tokenizer.vocab_size
    for wrong in (-1, size):
      said = rf'ids \[{wrong}\] are outside .* {size}'
      with pytest.raises(ValueError, match=said):
        tokenizer.decode([5, wrong])


@pytest.mark.parametrize('kind, size', [('char', None), ('unigram', 300)])
def test_same_texts_make_the_same_file(tmp_path, kind, size):
  files = [
      train_sentencepiece(
          SUMS, tmp_path / name, kind=kind, vocab_size=size
      ).read_bytes()
      for name in ('first', 'second')
  ]
  assert files[0] == files[1]
  assert sorted(p.name for p in tmp_path.iterdir()) == ['first', 'second']


def test_space_that_no_text_holds_still_comes_back(tmp_path):
  path = train_sentencepiece(SUMS, tmp_path / 'm', kind='bpe', vocab_size=300)
  tokenizer = SentencePieceTokenizer(path)
  assert tokenizer.decode(tokenizer.encode(' 3  + 4')) == ' 3  + 4'


def test_training_prints_nothing(tmp_path, capfd):
  train_sentencepiece(SUMS, tmp_path / 'm', kind='unigram', vocab_size=300)
  assert capfd.readouterr() == ('', '')


def test_long_text_is_not_skipped(tmp_path):
  path = train_sentencepiece(['a' * 10000 + 'z', 'b'], tmp_path / 'm')
  tokenizer = SentencePieceTokenizer(path)
  assert tokenizer.decode(tokenizer.encode('z')) == 'z'


@pytest.mark.parametrize(
    'arguments, message',
    [
        ({'vocab_size': 10}, 'vocab_size is 10, wanted at least 17'),
        ({'kind': 'word'}, "kind is 'word'"),
        ({'kind': 'bpe'}, 'vocab_size is None'),
        ({'kind': 'bpe', 'vocab_size': 100}, 'vocab_size is 100.*bpe'),
        ({'texts': []}, 'at least one text'),
        ({'texts': ['', '']}, 'at least one text'),
    ],
)
def test_impossible_training_is_refused(tmp_path, arguments, message):
  arguments = {'texts': SUMS, **arguments}
  with pytest.raises(ConfigError, match=message):
    train_sentencepiece(path=tmp_path / 'm', **arguments)
  assert not list(tmp_path.iterdir())


def test_missing_file_is_named(tmp_path):
  path = tmp_path / 'missing.model'
  with pytest.raises(ConfigError, match='missing.model.*model file'):
    SentencePieceTokenizer(path)


@pytest.mark.parametrize('content', [b'', b'hello world', b'\x00' * 100])
def test_file_that_is_no_model_is_named(tmp_path, content):
  path = pathlib.Path(tmp_path, 'bad.model')
  path.write_bytes(content)
  with pytest.raises(ConfigError, match='bad.model.*sentencepiece model'):
    SentencePieceTokenizer(path)
