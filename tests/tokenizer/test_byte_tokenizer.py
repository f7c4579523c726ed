"""The byte tokenizer."""

from hypothesis import given, strategies
import pytest

from tests.tokenizer.byte_tokenizer import ByteTokenizer


def test_ids_are_bytes_after_three_special_ones():
  assert ByteTokenizer().encode('Hé') == [72 + 3, 0xC3 + 3, 0xA9 + 3]


@given(strategies.text())
def test_every_text_comes_back(text):
  tokenizer = ByteTokenizer()
  assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_ids_decode_to_nothing():
  tokenizer = ByteTokenizer()
  assert tokenizer.decode([1, 75, 2, 0, 108, 0]) == 'Hi'


def test_half_a_character_decodes_to_the_replacement():
  assert ByteTokenizer().decode([0xC3 + 3]) == '\ufffd'


def test_id_outside_the_vocabulary_is_named():
  with pytest.raises(ValueError, match=r'\[259\].*vocabulary of 259'):
    ByteTokenizer().decode([75, 259])
