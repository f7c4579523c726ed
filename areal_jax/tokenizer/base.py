"""What every tokenizer offers, and how a prompt becomes token ids.

A tokenizer turns text into ids and back and knows its special ids. It never
adds a special token by itself: `render_prompt` is the one place where BOS is
put in front of a text, so that it is put there once. In a chat the template has
the say over all special tokens.
"""

from __future__ import annotations

from typing import Protocol, Sequence

from areal_jax.config import ConfigError
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.types import Message


class Tokenizer(Protocol):
  """Text to ids in `[0, vocab_size)` and back.

  `missing_ids` are those below `vocab_size` that stand for nothing: a file may
  leave holes between its tokens.

  `eos_ids` are the ids that end an answer (none, one or several). `pad_id`
  fills rows; padding is masked everywhere, so a tokenizer without an id of its
  own for it may name any. `run_ids` are those that are read together with their
  neighbours of the same kind, so that the text of a run is known only when
  another id follows it (`streaming.py`). `unk_id` is what a text becomes that
  has no token; None where there is no such id.
  """

  vocab_size: int
  missing_ids: frozenset[int]
  bos_id: int | None
  eos_ids: tuple[int, ...]
  pad_id: int
  unk_id: int | None
  run_ids: frozenset[int]

  def encode(self, text: str) -> list[int]:
    """Ids of the text alone, without special tokens."""

  def encode_chat(self, text: str) -> list[int]:
    """Ids of a rendered chat; special tokens spelt out in it are theirs."""

  def decode(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens decode to nothing."""

  def spell(self, ids: Sequence[int]) -> str:
    """Text of the ids; special tokens are written out."""

  def normalize(self, text: str) -> str:
    """The text as the tokenizer changes it before it looks for tokens."""


def absent_ids(
    tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, int], ...]:
  """Ids of a policy that its tokenizer lacks, as `ModelConfig.absent_ids`.

  Example: of a policy of 151,936 ids with Qwen2.5's tokenizer of 151,665,
  `((151665, 151936),)`.

  Args:
    tokenizer: the policy's.
    vocab_size: ids of the policy, at least those of the tokenizer.
  """
  absent = sorted(
      {*tokenizer.missing_ids, *range(tokenizer.vocab_size, vocab_size)}
  )
  ranges: list[tuple[int, int]] = []
  for token in absent:
    if ranges and ranges[-1][1] == token:
      ranges[-1] = (ranges[-1][0], token + 1)
    else:
      ranges.append((token, token + 1))
  return tuple(ranges)


def render_prompt(
    tokenizer: Tokenizer,
    prompt: str | tuple[Message, ...],
    *,
    add_bos: bool,
    chat: ChatTemplate | None = None,
) -> list[int]:
  """Token ids of a prompt, from which an engine goes on.

  Args:
    tokenizer: the one that the policy was trained with.
    prompt: a plain text, which stays as it is, or the messages of a chat.
    add_bos: whether the policy wants BOS in front of a plain text. That of a
      chat is in its template.
    chat: renders messages.

  Raises:
    ConfigError: messages without a template or which it refuses, `add_bos`
      without a BOS id, or no token at all.
  """
  if not isinstance(prompt, str):
    if chat is None:
      raise ConfigError(
          f'prompt is {len(prompt)} chat messages, wanted a text: this'
          ' tokenizer has no chat template; tokenizer.chat_template sets one,'
          ' and chat=False of a source (task.train_sources) makes texts of its'
          ' prompts'
      )
    ids = tokenizer.encode_chat(chat.render(prompt))
  else:
    if add_bos and tokenizer.bos_id is None:
      raise ConfigError('add_bos is True, but the tokenizer has no BOS id')
    front = [tokenizer.bos_id] if add_bos else []
    ids = front + list(tokenizer.encode(prompt))
  if not ids:
    raise ConfigError(f'prompt is {prompt!r}, wanted at least one token')
  return ids
