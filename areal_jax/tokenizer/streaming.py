"""Text of an answer while it is still being written, token by token.

Ids go in one at a time and pieces of text come out, which put together are
`decode` of all ids. What a later id may still change is held back: the bytes of
half a character, and bytes of a run that the tokenizer reads as a whole.

A piece costs the decoding of a few ids, however long the answer is: of those
behind the piece before, too. Tokenizers drop a blank at the front of a text, so
the ids that a decoding begins with are always some that have text.
"""

from __future__ import annotations

from areal_jax.tokenizer.base import Tokenizer

# What decoders write for bytes that are no UTF-8 (yet).
REPLACEMENT = '\ufffd'


class StreamingDecoder:
  """Decodes one answer as it grows.

  Example, with bytes as tokens: the four ids of '🙂' give '', '', '' and '🙂'.
  """

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer
    self._ids: list[int] = []  # known ones, and behind them those held back
    self._known = 0
    self._text = ''  # of the known ids
    self._in_run = False
    self._last: tuple[list[int], int, str] = ([], 0, '')

  def push(self, token: int) -> str:
    """Takes the next id; returns the text that is certain now, maybe ''."""
    token = int(token)
    self._ids.append(token)
    if token in self._tokenizer.run_ids:
      self._in_run = True
      return ''
    if self._in_run and not self._tokenizer.decode([token]):
      return ''  # a special token does not part a run
    self._in_run = False
    text = self._tokenizer.decode(self._ids)
    if text.endswith(REPLACEMENT) or not text.startswith(self._text):
      return ''
    return self._take(text)

  def finish(self) -> str:
    """Returns what was held back (half characters as U+FFFD), and ends."""
    return self._take(self._tokenizer.decode(self._ids))

  def last_ids(self, text: str) -> tuple[int, int]:
    """Returns the number of ids that brought the last piece.

    Args:
      text: a beginning of that piece.

    Returns:
      How many of the ids behind the piece it takes to have that text, and how
      many there are in all.
    """
    ids, known, before = self._last
    count = len(ids) - known
    for enough in range(1, count):
      shorter = self._tokenizer.decode(ids[: known + enough])
      if shorter.startswith(before + text):
        return enough, count
    return count, count

  def _take(self, text: str) -> str:
    piece = text[len(self._text) :]
    self._last = (self._ids, self._known, self._text)
    fresh = self._ids[self._known :]
    alone = self._tokenizer.decode(fresh)
    # Behind ids without text, a blank would count as the front of the text.
    self._ids, self._text = (fresh, alone) if alone else (self._ids, text)
    self._known = len(self._ids)
    # `_last` keeps the list as it is now; the next ids go into another one.
    self._ids = list(self._ids)
    return piece
