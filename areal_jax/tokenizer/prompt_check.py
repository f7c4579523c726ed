"""What chat templates get wrong in silence, seen by rendering one prompt.

A template is somebody else's program. It can leave out the header of the
answer, end a turn with a token that nobody stops at, or put BOS where the
tokenizer puts it too. None of that raises, and the policy is trained on it. So
one prompt and one full turn are rendered before a run, and what looks wrong is
said.
"""

from __future__ import annotations

from typing import Sequence

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import Tokenizer, render_prompt
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.types import Message

_ANSWER = 'Answer 7'  # of the full turn; no template rewrites it


def check_prompt(
    tokenizer: Tokenizer,
    prompt: str | tuple[Message, ...],
    *,
    add_bos: bool,
    chat: ChatTemplate | None,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> list[str]:
  """Describes what looks wrong about a prompt and the answer behind it.

  Args:
    tokenizer: reads and writes text.
    prompt: one that can be rendered, see `render_prompt`.
    add_bos: whether BOS goes in front of a plain text.
    chat: renders messages; None without a template.
    stop_ids: ids that end an answer.
    stop_strings: texts that do.

  Returns:
    One line for each thing, with what to do; none if all is well.
  """
  ids = render_prompt(tokenizer, prompt, add_bos=add_bos, chat=chat)
  found = _doubled(tokenizer, ids, 'the prompt')
  if isinstance(prompt, str):
    return found
  if tokenizer.bos_id is not None and tokenizer.bos_id not in ids:
    found.append(
        'the chat template never writes'
        f' {tokenizer.spell([tokenizer.bos_id])!r}, with which texts of this'
        ' tokenizer begin: add it to the template (tokenizer.chat_template) if'
        ' the policy was trained with it'
    )
  try:
    found += _check_turn(tokenizer, prompt, chat, stop_ids, stop_strings)
  except ConfigError as error:
    found.append(
        'the end of an answer could not be seen, for a full turn fails:'
        f' {error}'
    )
  for name in sorted(chat.printed):
    found.append(
        f'the chat template prints {name!r}, which has no value and becomes'
        f' nothing: set tokenizer.chat_variables={{{name!r}: ...}}, or name the'
        ' token in tokenizer_config.json'
    )
  return found


def _check_turn(
    tokenizer: Tokenizer,
    messages: tuple[Message, ...],
    chat: ChatTemplate,
    stop_ids: Sequence[int],
    stop_strings: Sequence[str],
) -> list[str]:
  """Looks at the messages with an answer behind them."""
  asked, plain = chat.render(messages), chat.render(messages, header=False)
  turn = (*messages, Message('assistant', _ANSWER))
  full = chat.render(turn, header=False)
  before, answer, tail = full.rpartition(_ANSWER)
  if not answer:
    return ['the chat template leaves the answer out of a full turn']
  found = []
  between = before.removeprefix(plain) if before.startswith(plain) else ''
  if asked == plain and between.strip():
    found.append(
        'the chat template writes no header for the answer: the prompt is the'
        ' same with and without add_generation_prompt, and in a full turn'
        f' {between!r} stands before the answer, which the policy would have to'
        ' write itself; use a template that reads add_generation_prompt'
        ' (tokenizer.chat_template)'
    )
  ids = tokenizer.encode_chat(tail)
  ends = {*ids} & {*stop_ids} or any(text in tail for text in stop_strings)
  if tail.strip() and not ends:
    first = tokenizer.encode_chat(tail.lstrip())[:1]
    found.append(
        f'the chat template ends an answer with {tail!r}, which is no stop: the'
        f' stop ids are {list(stop_ids)}, so answers would go on behind their'
        f' end; set rollout.stop_ids={tuple(first)} or name the token in'
        ' generation_config.json'
    )
  return found + _doubled(tokenizer, tokenizer.encode_chat(full), 'a full turn')


def _doubled(tokenizer: Tokenizer, ids: Sequence[int], where: str) -> list[str]:
  """A line for each special token that stands twice in a row."""
  twice = {one for one, next_ in zip(ids, ids[1:]) if one == next_}
  return [
      f'{tokenizer.spell([one])!r} stands twice in a row in {where}: leave it'
      ' to the template or the text, or set tokenizer.add_bos=False'
      for one in sorted(twice)
      if not tokenizer.decode([one]) and tokenizer.spell([one])
  ]
