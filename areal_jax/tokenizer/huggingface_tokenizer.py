"""Tokenizers in the Hugging Face layout: `tokenizer.json` and its neighbours.

The file says how text becomes ids; which of them begin and end an answer is
said by the files beside it, see `special_tokens.py`.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Sequence

import tokenizers

from areal_jax.config import ConfigError, require
from areal_jax.files import check_content
from areal_jax.tokenizer import special_tokens

FILE = 'tokenizer.json'


class HuggingFaceTokenizer:
  """A `Tokenizer` over a `tokenizer.json`.

  `eos_ids` are those that any file beside it names; none if none does. Special
  tokens that a text spells out become their ids, as in transformers.

  Args:
    path: a folder, or the file in one.

  Raises:
    ConfigError: the file is missing or is no tokenizer, or a neighbour names a
      token that it does not have.
  """

  def __init__(self, path: str | os.PathLike):
    path = pathlib.Path(path)
    file = path / FILE if path.is_dir() else path
    self.path = str(path)
    require(file.is_file(), 'tokenizer path', self.path, f'a {FILE} or a folder'
            ' with one')  # fmt: skip
    check_content(file)
    try:
      self._tokenizer = tokenizers.Tokenizer.from_buffer(file.read_bytes())
    # The library's Rust code raises plain `Exception`s.
    except Exception as error:
      raise ConfigError(f'{file} is no tokenizer: {error}') from error
    # A published file may cut or pad: no prompt is to be changed in silence.
    self._tokenizer.no_truncation()
    self._tokenizer.no_padding()
    known = self._tokenizer.get_vocab(with_added_tokens=True)
    require(bool(known), f'{file}: vocab', known, 'at least one token')
    self.vocab_size = max(known.values()) + 1
    self.missing_ids = frozenset(range(self.vocab_size)) - {*known.values()}
    self.run_ids = _run_ids(self._tokenizer, known)
    self.unk_id = _unk_id(self._tokenizer)
    added = self._tokenizer.get_added_tokens_decoder().values()
    longest_first = sorted((t.content for t in added), key=len, reverse=True)
    texts = '|'.join(map(re.escape, longest_first))
    self._added = re.compile(f'({texts})') if texts else None
    self.special = special_tokens.read_ids(
        file.parent,
        self._tokenizer.token_to_id,
        frozenset(known.values()).__contains__,
        f'{FILE}, which has {self.vocab_size}',
    )
    self.bos_id, self.eos_ids = self.special.bos, self.special.ends
    # Padding is masked, so any id serves where there is none of its own.
    pads = (self.special.pad, self.special.eos)
    self.pad_id = next((i for i in pads if i is not None), 0)

  def encode(self, text: str) -> list[int]:
    """Ids of the text; none is added to them."""
    return self._tokenizer.encode(text, add_special_tokens=False).ids

  def encode_chat(self, text: str) -> list[int]:
    """Ids of a rendered chat."""
    return self.encode(text)

  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens and unknown ids decode to nothing.

    Bytes that are no UTF-8 become U+FFFD.
    """
    return self._tokenizer.decode(
        [int(i) for i in ids], skip_special_tokens=True
    )

  def spell(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens are written out: '<|im_end|>'."""
    return self._tokenizer.decode(
        [int(i) for i in ids], skip_special_tokens=False
    )

  def normalize(self, text: str) -> str:
    """The text by the rules in the file; added tokens in it stay."""
    normalizer = self._tokenizer.normalizer
    if normalizer is None:
      return text
    # A group in the pattern keeps the added tokens, at the odd places.
    parts = self._added.split(text) if self._added else [text]
    parts[::2] = map(normalizer.normalize_str, parts[::2])
    return ''.join(parts)


def _unk_id(tokenizer: tokenizers.Tokenizer) -> int | None:
  """Id of what has no token; None where the model has no such id."""
  if isinstance(tokenizer.model, tokenizers.models.Unigram):
    # The library tells it in the file alone.
    return json.loads(tokenizer.to_str())['model'].get('unk_id')
  text = tokenizer.model.unk_token
  return None if text is None else tokenizer.token_to_id(text)


def _run_ids(
    tokenizer: tokenizers.Tokenizer, known: dict[str, int]
) -> frozenset[int]:
  """Ids of the bytes '<0x00>' to '<0xFF>', where they are read in runs.

  The decoder `ByteFallback` reads all bytes in a row at once: if they are no
  UTF-8 together, each becomes U+FFFD, the whole characters among them too.
  """
  if tokenizer.decoder is None:
    return frozenset()
  decoder = json.loads(tokenizer.decoder.__getstate__())
  steps = decoder.get('decoders', [decoder])
  if not any(step.get('type') == 'ByteFallback' for step in steps):
    return frozenset()
  names = (f'<0x{byte:02X}>' for byte in range(256))
  return frozenset(known[name] for name in names if name in known)
