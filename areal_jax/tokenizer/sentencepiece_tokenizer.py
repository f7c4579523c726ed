"""Sentencepiece models: reading one, and training one on a task's own text.

A trained model has fixed special ids (padding 0, BOS 1, EOS 2, unknown 3),
changes no character of a text (identity normalisation, no dummy prefix, every
space kept), so that `decode(encode(x)) == x` where its alphabet covers x, and
is the same file for the same texts. (U+2581, the mark sentencepiece stands for
a space, is the exception: it decodes as a space.)
"""

from __future__ import annotations

import io
import os
import pathlib
import re
from typing import Iterable, Literal, Sequence

import sentencepiece

from areal_jax.config import ConfigError, require
from areal_jax.files import check_content
from areal_jax.tokenizer import special_tokens

PAD_ID, BOS_ID, EOS_ID, UNK_ID = range(4)
_SPECIAL = 4
_LONGEST = 1 << 24  # bytes; the trainer's own 4,192 skips longer texts silently


class SentencePieceTokenizer:
  """A `Tokenizer` over a sentencepiece model file.

  `eos_ids` are the model's own and those that the files of a folder name.

  Args:
    path: the file.
    folder: where further files may name ends, see `special_tokens.py`; None for
      a file that stands alone.

  Raises:
    ConfigError: the file is missing or is no sentencepiece model, or a
      neighbour names an end that it does not have.
  """

  def __init__(
      self, path: str | os.PathLike, folder: pathlib.Path | None = None
  ):
    self.path = str(path)
    require(
        pathlib.Path(path).is_file(),
        'tokenizer path',
        self.path,
        'a sentencepiece model file',
    )
    check_content(path)
    self._processor = sentencepiece.SentencePieceProcessor()
    try:
      self._processor.Load(self.path)
    except RuntimeError as error:  # what the C++ reader raises for a bad file
      raise ConfigError(
          f'tokenizer path is {self.path!r}, wanted a sentencepiece model'
          f' file: {error}'
      ) from error
    processor = self._processor
    self.vocab_size = processor.GetPieceSize()
    self.missing_ids = frozenset()  # pieces are numbered without a gap
    bos, eos, pad = processor.bos_id(), processor.eos_id(), processor.pad_id()
    self.bos_id = bos if bos >= 0 else None
    self.special = None
    ends = [eos] if eos >= 0 else []
    if folder is not None:
      self.special = self._special_ids(folder)
      ends = [*self.special.ends, *ends]
    self.eos_ids = tuple(dict.fromkeys(ends))
    # Bytes of a character that has no piece are read one character at a time.
    self.run_ids = frozenset()
    self.unk_id = processor.unk_id()
    # Llama's models have no padding id. Padding is masked, so any id serves.
    self.pad_id = pad if pad >= 0 else 0
    # What a text cannot spell: sentencepiece reads '<s>' as three characters.
    self._controls = {
        processor.IdToPiece(i): i
        for i in range(self.vocab_size)
        if processor.IsControl(i)
    }
    self._control_names = {i: text for text, i in self._controls.items()}
    texts = '|'.join(map(re.escape, self._controls))
    self._special = re.compile(f'({texts})') if texts else None

  def _special_ids(self, folder: pathlib.Path) -> special_tokens.SpecialIds:
    """The ends that the files of a folder name."""
    processor, size = self._processor, self.vocab_size

    def id_of(text: str) -> int | None:
      found = processor.PieceToId(text)
      return found if processor.IdToPiece(found) == text else None

    vocabulary = f'the {size} pieces of {pathlib.Path(self.path).name}'
    return special_tokens.read_ids(
        folder, id_of, range(size).__contains__, vocabulary, ends_alone=True
    )

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone, without special tokens."""
    return self._processor.EncodeAsIds(text)

  def encode_chat(self, text: str) -> list[int]:
    """Ids of a rendered chat: '<s>' and the like in it become their ids."""
    ids = []
    for piece in self._special.split(text) if self._special else [text]:
      special = self._controls.get(piece)
      ids += self.encode(piece) if special is None else [special]
    return ids

  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens decode to nothing.

    Raises:
      ValueError: an id outside the vocabulary.
    """
    ids = [int(i) for i in ids]
    if ids and not 0 <= min(ids) <= max(ids) < self.vocab_size:
      wrong = [i for i in ids if not 0 <= i < self.vocab_size]
      raise ValueError(
          f'ids {wrong[:5]} are outside the vocabulary of {self.vocab_size}'
      )
    return self._processor.DecodeIds(ids)

  def spell(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens are written out: '<s>'."""
    if self._control_names.keys().isdisjoint(ids):
      return self.decode(ids)
    texts, plain = [], []
    for token in ids:
      if token in self._control_names:
        texts += [self.decode(plain), self._control_names[token]]
        plain = []
      else:
        plain.append(token)
    return ''.join([*texts, self.decode(plain)])

  def normalize(self, text: str) -> str:
    """The text by the rules in the model's file, such as NFKC."""
    return self._processor.Normalize(text).replace('▁', ' ')


def train_sentencepiece(
    texts: Iterable[str],
    path: str | os.PathLike,
    *,
    kind: Literal['char', 'bpe', 'unigram'] = 'char',
    vocab_size: int | None = None,
) -> pathlib.Path:
  """Trains a model on the texts and writes it to `path`.

  Args:
    texts: what the model is to encode; any of them may hold line breaks.
    path: the file to write, conventionally `*.model`.
    kind: 'char' has a piece for each character of the texts and encodes others
      as unknown; 'bpe' and 'unigram' fall back to bytes.
    vocab_size: pieces, the four special ones included. 'char' needs none (all
      its characters); with one that is too small it is refused rather than
      cut.

  Returns:
    The path.

  Raises:
    ConfigError: no text, an unknown kind, or a size that cannot be reached.
  """
  texts = list(texts)
  at = 'train_sentencepiece'
  require(any(texts), f'{at}.texts', texts[:1], 'at least one text')
  kinds = ('char', 'bpe', 'unigram')
  require(kind in kinds, f'{at}.kind', kind, f'one of {kinds}')
  if kind == 'char':
    needed = len({' ' if c == '▁' else c for c in set().union(*texts)})
    vocab_size = needed + _SPECIAL if vocab_size is None else vocab_size
    require(
        vocab_size >= needed + _SPECIAL,
        f'{at}.vocab_size',
        vocab_size,
        f'at least {needed + _SPECIAL}: {needed} characters and {_SPECIAL}'
        ' special pieces',
    )
  require(vocab_size is not None, f'{at}.vocab_size', None, 'a whole number')
  model = io.BytesIO()
  try:
    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=vocab_size,
        byte_fallback=kind != 'char',
        # Where the texts hold no space, a later one would fall back to the
        # bytes of U+2581 and decode as that.
        required_chars='' if kind == 'char' else '▁',
        character_coverage=1.0,
        normalization_rule_name='identity',
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        pad_id=PAD_ID,
        bos_id=BOS_ID,
        eos_id=EOS_ID,
        unk_id=UNK_ID,
        max_sentence_length=_LONGEST,
        num_threads=1,  # sums of floats in one order: the same file each time
        minloglevel=2,  # the trainer reports every phase on stderr otherwise
    )
  except RuntimeError as error:  # what the C++ trainer raises
    raise ConfigError(
        f'{at}.vocab_size is {vocab_size}, which cannot be reached with kind'
        f' {kind!r} on {len(texts)} texts: {error}'
    ) from error
  path = pathlib.Path(path)
  path.parent.mkdir(parents=True, exist_ok=True)
  draft = path.with_name(path.name + '.draft')
  draft.write_bytes(model.getvalue())
  os.replace(draft, path)  # whoever reads the path sees a whole model
  return path
