"""Pieces of a growing answer: whole characters, and nothing lost."""

import functools

from hypothesis import given, settings, strategies
import pytest
import tokenizers

from areal_jax.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from areal_jax.tokenizer.streaming import REPLACEMENT, StreamingDecoder
from tests.tokenizer import reference
from tests.tokenizer.byte_tokenizer import ByteTokenizer

TEXTS = strategies.text(
    strategies.sampled_from('ab <|>_s/▁\n\t0é–你🙂👨‍👩‍👧𝄞\ufffd\x00'),
    max_size=12,
)
SMALL = settings(max_examples=60, deadline=None)


def pieces(tokenizer, ids):
  """What comes out with each id, and at the end."""
  decoder = StreamingDecoder(tokenizer)
  return [decoder.push(i) for i in ids], decoder.finish()


def check(tokenizer, ids):
  said, last = pieces(tokenizer, ids)
  assert ''.join(said) + last == tokenizer.decode(ids)
  for piece in said:
    assert not piece.endswith(REPLACEMENT)  # may be half a character


@functools.cache
def byte_fallback(folder) -> HuggingFaceTokenizer:
  """Llama's layout of a tokenizer.json: blanks as '▁', bytes as '<0x00>'."""
  names = ['<s>', '</s>', *(f'<0x{byte:02X}>' for byte in range(256))]
  names += ['▁', 'a', 'b', '▁a', 'é', '▁▁']
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.BPE(
          {name: i for i, name in enumerate(names)},
          [('▁', 'a'), ('▁', '▁')],
          byte_fallback=True,
      )
  )
  tokenizer.normalizer = tokenizers.normalizers.Sequence(
      [
          tokenizers.normalizers.Prepend('▁'),
          tokenizers.normalizers.Replace(' ', '▁'),
      ]
  )
  tokenizer.decoder = tokenizers.decoders.Sequence(
      [
          tokenizers.decoders.Replace('▁', ' '),
          tokenizers.decoders.ByteFallback(),
          tokenizers.decoders.Fuse(),
          tokenizers.decoders.Strip(' ', 1, 0),
      ]
  )
  tokenizer.add_special_tokens(names[:2])
  tokenizer.save(str(folder / 'tokenizer.json'))
  return HuggingFaceTokenizer(folder)


@pytest.fixture(scope='module')
def fallback(tmp_path_factory):
  return byte_fallback(tmp_path_factory.mktemp('fallback'))


@pytest.mark.parametrize('name', reference.NAMES)
@given(data=strategies.data())
@SMALL
def test_pieces_are_the_whole_text_of_published_tokenizers(
    data_dir, name, data
):
  tokenizer = reference.opened(data_dir, name).tokenizer
  text = data.draw(TEXTS)
  check(tokenizer, tokenizer.encode_chat(text))
  # What a policy may say, too: no text has these ids. Bytes come first.
  any_id = strategies.integers(0, tokenizer.vocab_size - 1)
  low = strategies.integers(0, min(400, tokenizer.vocab_size - 1))
  check(tokenizer, data.draw(strategies.lists(any_id | low, max_size=24)))


@given(ids=strategies.lists(strategies.integers(0, 263), max_size=24))
@SMALL
def test_pieces_are_the_whole_text_where_bytes_are_read_in_runs(fallback, ids):
  assert len(fallback.run_ids) == 256
  check(fallback, ids)


@given(text=TEXTS, wild=strategies.lists(strategies.integers(0, 258)))
@SMALL
def test_pieces_are_the_whole_text_of_bytes(text, wild):
  tokenizer = ByteTokenizer()
  check(tokenizer, tokenizer.encode(text))
  check(tokenizer, wild)


def test_a_character_comes_out_whole_with_its_last_byte():
  tokenizer = ByteTokenizer()
  said, last = pieces(tokenizer, tokenizer.encode('a🙂é'))
  assert said == ['a', '', '', '', '🙂', '', 'é']
  assert last == ''


def test_half_a_character_comes_out_only_at_the_end():
  tokenizer = ByteTokenizer()
  said, last = pieces(tokenizer, tokenizer.encode('a🙂')[:-1])
  assert said == ['a', '', '', '']
  assert last == REPLACEMENT


def test_run_of_bytes_waits_for_what_follows(fallback):
  ids = fallback.encode('a\né')
  assert len(ids) == 3  # '▁a', the byte of a line break, 'é'
  said, last = pieces(fallback, ids)
  assert (said, last) == (['a', '', '\né'], '')
  # With half a character behind it the line break is none.
  broken = [ids[0], ids[1], 2 + 0xE4, ids[2]]
  said, last = pieces(fallback, broken)
  assert said == ['a', '', '', 2 * REPLACEMENT + 'é']


def test_last_ids_say_where_a_text_was_complete(fallback):
  decoder = StreamingDecoder(fallback)
  a, line, e = fallback.encode('a\né')
  for token in (a, line, line, e):
    piece = decoder.push(token)
  assert piece == '\n\né'
  assert decoder.last_ids('\n') == (1, 3)
  assert decoder.last_ids('\n\n') == (2, 3)
  assert decoder.last_ids('\n\né') == (3, 3)


def test_decoding_one_id_at_a_time_is_seen(data_dir):
  """Planted fault: characters of several ids break, and blanks go."""
  for name in ('gpt2/tokenizer.json', 'llama2_tokenizer.model'):
    tokenizer = reference.opened(data_dir, name).tokenizer
    ids = tokenizer.encode('so 𝄞')
    alone = [tokenizer.decode([i]) for i in ids]
    assert ''.join(alone) != tokenizer.decode(ids) == 'so 𝄞'
    assert any(piece.endswith(REPLACEMENT) for piece in alone)


def test_a_long_answer_costs_a_few_ids_a_piece():
  class Counting(ByteTokenizer):
    decoded = 0

    def decode(self, ids):
      self.decoded += len(ids)
      return super().decode(ids)

  tokenizer = Counting()
  ids = tokenizer.encode('né🙂' * 500)
  check_ids = pieces(tokenizer, ids)[0]
  assert ''.join(check_ids) == 'né🙂' * 500
  assert tokenizer.decoded < 12 * len(ids)
