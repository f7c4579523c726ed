"""Stop strings in growing answers, against a search of the whole text."""

from hypothesis import given, settings, strategies
import pytest

from areal_jax.rollout.stopping import Stop, StopStrings
from areal_jax.types import SamplingParams
from tests.tokenizer import reference
from tests.tokenizer.byte_tokenizer import ByteTokenizer

BYTES = ByteTokenizer()


def read(tokenizer, ids, strings, *, dispatch=1, minimum=0):
  """Reads ids so many at a time, as they come from the device."""
  sampling = SamplingParams(
      max_new_tokens=max(1, len(ids), minimum),
      min_new_tokens=minimum,
      stop_strings=tuple(strings),
  )
  stops = StopStrings(sampling, tokenizer)
  for start in range(0, len(ids), dispatch):
    stop = stops.push(ids[start : start + dispatch])
    if stop is not None:
      return stop
  return stops.finish()


def plain(tokenizer, ids, strings, minimum=0):
  """The same by decoding everything again for every token."""
  text = tokenizer.decode(ids)
  found = sorted(
      (start + len(string), start, string)
      for string in strings
      for start in range(len(text))
      if text.startswith(string, start)
  )
  for end, start, string in found:
    tokens = next(
        n
        for n in range(1, len(ids) + 1)
        if tokenizer.decode(ids[:n]).startswith(text[:end])
    )
    if tokens >= minimum:
      return Stop(string, tokens, start)
  return None


@given(
    text=strategies.text('abé🙂\n', max_size=20),
    strings=strategies.lists(
        strategies.text('abé🙂\n', min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    dispatch=strategies.integers(1, 7),
    minimum=strategies.integers(0, 8),
)
@settings(max_examples=150, deadline=None)
def test_equals_a_search_of_the_whole_text(text, strings, dispatch, minimum):
  ids = BYTES.encode(text)
  said = read(BYTES, ids, strings, dispatch=dispatch, minimum=minimum)
  assert said == plain(BYTES, ids, strings, minimum)


@pytest.mark.parametrize('name', reference.NAMES)
@given(data=strategies.data())
@settings(max_examples=40, deadline=None)
def test_equals_a_search_with_published_tokenizers(data_dir, name, data):
  tokenizer = reference.opened(data_dir, name).tokenizer
  words = ['so', ' the', ' answer', ':', '\n', '\n\n', ' 12', '.', '🙂', '你好']
  text = ''.join(data.draw(strategies.lists(strategies.sampled_from(words))))
  start = data.draw(strategies.integers(0, max(0, len(text) - 1)))
  length = data.draw(strategies.integers(1, 6))
  strings = [text[start : start + length] or 'x', 'wer:', '好']
  ids = tokenizer.encode(text)
  said = read(tokenizer, ids, strings, dispatch=3)
  assert said == plain(tokenizer, ids, strings)


def test_border_inside_of_a_token(data_dir):
  tokenizer = reference.opened(data_dir, 'gpt2/tokenizer.json').tokenizer
  ids = tokenizer.encode('The answer is twelve. Thanks')
  said = read(tokenizer, ids, ['wer is tw'])
  assert said.string == 'wer is tw'
  assert said.text_end == len('The ans')
  kept = tokenizer.decode(ids[: said.tokens])
  assert kept == 'The answer is twelve'  # the token goes on behind the string
  # Planted fault: to encode the cut text anew gives other tokens.
  assert tokenizer.encode(kept[: said.text_end]) != ids[: said.tokens]


def test_string_split_over_dispatches():
  ids = BYTES.encode('one two three')
  assert read(BYTES, ids, ['two'], dispatch=6) == Stop('two', 7, 4)
  # Planted fault: a search of each dispatch alone finds nothing.
  halves = [BYTES.decode(ids[i : i + 6]) for i in range(0, len(ids), 6)]
  assert not any('two' in half for half in halves)


def test_half_a_character_completes_no_string():
  ids = BYTES.encode('a🙂b')
  for dispatch in (1, 2, 3):
    assert read(BYTES, ids, ['🙂'], dispatch=dispatch) == Stop('🙂', 5, 1)
  assert read(BYTES, ids[:4], ['🙂']) is None


def test_earliest_end_wins_and_then_the_longest():
  ids = BYTES.encode('abcd')
  assert read(BYTES, ids, ['bcd', 'c'], dispatch=4) == Stop('c', 3, 2)
  assert read(BYTES, ids, ['c', 'abc'], dispatch=4) == Stop('abc', 3, 0)


def test_string_complete_before_the_minimum_ends_nothing():
  ids = BYTES.encode('x.y.z')
  assert read(BYTES, ids, ['.']) == Stop('.', 2, 1)
  assert read(BYTES, ids, ['.'], minimum=2) == Stop('.', 2, 1)
  assert read(BYTES, ids, ['.'], minimum=3) == Stop('.', 4, 3)
  assert read(BYTES, ids, ['.'], minimum=5) is None


@pytest.mark.parametrize('string', ['', 'a\ufffd'])
def test_string_that_cannot_be_told_is_refused(string):
  with pytest.raises(ValueError, match='sampling.stop_strings is .*U.FFFD'):
    SamplingParams(max_new_tokens=1, stop_strings=('a', string))
