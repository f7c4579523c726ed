"""One id for each byte: needs no file and covers every text.

Small enough to work out by hand, so tests and toy runs use it.
"""

from __future__ import annotations

from typing import Sequence

_SPECIAL = 3


class ByteTokenizer:
  """Ids 0, 1, 2 are padding, BOS and EOS; id b + 3 is the byte b.

  Example: `encode('Hi')` is `[75, 108]`.
  """

  vocab_size = 256 + _SPECIAL
  missing_ids = frozenset()
  pad_id = 0
  unk_id = None
  bos_id = 1
  eos_ids = (2,)
  run_ids = frozenset()

  def encode(self, text: str) -> list[int]:
    """Ids of the UTF-8 bytes of the text."""
    return [byte + _SPECIAL for byte in text.encode('utf-8')]

  def encode_chat(self, text: str) -> list[int]:
    """Ids of a rendered chat, which can spell no special token."""
    return self.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; bytes that are no UTF-8 become U+FFFD.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    wrong = [i for i in ids if not 0 <= i < self.vocab_size]
    if wrong:
      raise ValueError(
          f'ids {wrong[:5]} are outside the vocabulary of {self.vocab_size}'
      )
    content = bytes(i - _SPECIAL for i in ids if i >= _SPECIAL)
    return content.decode('utf-8', errors='replace')

  def spell(self, ids: Sequence[int]) -> str:
    """The same as `decode`: no text can spell a special token."""
    return self.decode(ids)

  def normalize(self, text: str) -> str:
    """The text as it is."""
    return text
