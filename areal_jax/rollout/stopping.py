"""Stop strings: seen in an answer's text while its tokens are being drawn.

A string begins and ends anywhere: inside of a token, across tokens, dispatches
and new weights. The device knows nothing of it. What it draws behind the end,
to the end of the dispatch, is thrown away by whoever asked; the tokens before
are those that were sampled, and are not encoded anew.
"""

from __future__ import annotations

import dataclasses
from typing import Iterable, Sequence

from areal_jax.tokenizer.base import Tokenizer
from areal_jax.tokenizer.streaming import StreamingDecoder
from areal_jax.types import SamplingParams


@dataclasses.dataclass(frozen=True)
class Stop:
  """The place where a stop string ended an answer.

  Attributes:
    string: which one.
    tokens: of the answer, up to and with the one that completes the string.
    text_end: characters of the answer's text before the string.
  """

  string: str
  tokens: int
  text_end: int


class StopStrings:
  """Reads one answer as it grows.

  The string whose last character comes first ends the answer; of several that
  end there, the longest. One that is complete with fewer tokens than
  `min_new_tokens` ends nothing.
  """

  def __init__(self, sampling: SamplingParams, tokenizer: Tokenizer):
    self._strings = sampling.stop_strings
    self._minimum = sampling.min_new_tokens
    self._decoder = StreamingDecoder(tokenizer)
    self._tokens = 0
    self._before = 0  # characters before the tail
    self._tail = ''  # as long as a string can lie in what has been read
    self._keep = max(map(len, self._strings)) - 1

  def push(self, ids: Iterable[int]) -> Stop | None:
    """Reads on; nothing is to be pushed after a stop."""
    for token in ids:
      self._tokens += 1
      stop = self._read(self._decoder.push(token))
      if stop is not None:
        return stop
    return None

  def finish(self) -> Stop | None:
    """Reads what was held back; no token comes after it."""
    return self._read(self._decoder.finish())

  def _read(self, piece: str) -> Stop | None:
    text, known = self._tail + piece, len(self._tail)
    if piece:
      for end, start, string in sorted(_found(text, known, self._strings)):
        enough, count = self._decoder.last_ids(text[known:end])
        tokens = self._tokens - count + enough
        if tokens >= self._minimum:
          return Stop(string, tokens, self._before + start)
    cut = max(0, len(text) - self._keep)
    self._before += cut
    self._tail = text[cut:]
    return None


def _found(
    text: str, known: int, strings: Sequence[str]
) -> Iterable[tuple[int, int, str]]:
  """(end, start, string) of all that end behind the known part of the text."""
  for string in strings:
    start = text.find(string, max(0, known - len(string) + 1))
    while start >= 0:
      yield start + len(string), start, string
      start = text.find(string, start + 1)
