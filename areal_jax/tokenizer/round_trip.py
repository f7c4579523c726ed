"""Whether a text comes back from its token ids.

A prompt that does not come back reaches the policy as another prompt, and an
answer that does not can never be written. `round_trip` tells three cases apart:
the text comes back as it was; it comes back changed by rules of the tokenizer
(NFKC, lower case, runs of blanks); or something is lost, such as a character
that has no token.
"""

from __future__ import annotations

import re

from areal_jax.config import ConfigError
from areal_jax.tokenizer.base import Tokenizer

_SHOWN = 5  # characters that are named
_AROUND = 20  # characters shown on both sides of the first difference
# Sentencepiece writes U+2581 for a blank, so it cannot tell the two apart.
_VISIBLE = re.compile(r'[^\s▁]')
_BLANKS = re.compile(r'[\s▁]+')


def round_trip(tokenizer: Tokenizer, text: str, ids: list[int]) -> str:
  """Describes how the tokenizer changes a text on the way to ids and back.

  Blanks that are added, as many tokenizers do in front of a text, do not count.

  Args:
    tokenizer: made the ids.
    text: what they are to say.
    ids: those of the text, a BOS in front of it left out.

  Returns:
    '' if the text comes back, or what is changed by the tokenizer's own rules:
    "'½ cup' comes back as '1/2 cup'".

  Raises:
    ConfigError: something is lost; names the characters, where it is known
      which.
  """
  seen = tokenizer.spell(ids)
  if seen == text:
    return ''
  unknown = sum(token == tokenizer.unk_id for token in ids)
  if unknown:
    raise ConfigError(
        f'{_near(text, seen)}; {unknown} of its {len(ids)} tokens are the'
        f' unknown one{_characters(tokenizer, text)}, wanted a tokenizer that'
        ' has a token for each character'
    )
  visible = _BLANKS.sub('', seen)
  if visible == _BLANKS.sub('', text):
    return _near(text, seen) if _loses_blanks(text, seen) else ''
  if visible == _BLANKS.sub('', tokenizer.normalize(text)):
    return _near(text, seen)
  raise ConfigError(
      f'{_near(text, seen)}, wanted a tokenizer that loses no character'
  )


def _loses_blanks(text: str, seen: str) -> bool:
  """Returns whether blanks are missing; the visible characters are equal."""
  return any(
      not (after.startswith(before) or after.endswith(before))
      for before, after in zip(
          _VISIBLE.split(text.replace('▁', ' ')),
          _VISIBLE.split(seen.replace('▁', ' ')),
      )
  )


def _near(text: str, seen: str) -> str:
  """Both texts around their first difference."""
  pairs = enumerate(zip(text, seen))
  first = next((i for i, (a, b) in pairs if a != b), min(len(text), len(seen)))
  part = slice(max(0, first - _AROUND), first + _AROUND)
  return f'{text[part]!r} comes back as {seen[part]!r}'


def _characters(tokenizer: Tokenizer, text: str) -> str:
  """The characters without a token, where a character alone shows that."""
  without = [
      character
      for character in dict.fromkeys(text)
      if tokenizer.unk_id in tokenizer.encode(character)
  ]
  if not without:
    return ''
  more = ' and others' if len(without) > _SHOWN else ''
  shown = ', '.join(map(repr, without[:_SHOWN]))
  return f': it has none for {shown}{more}'
