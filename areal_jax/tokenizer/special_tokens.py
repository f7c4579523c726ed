"""Special tokens of a folder: what begins, ends and fills an answer.

Four files beside a tokenizer name them. Published folders name the end of an
answer in any of the four, so all are read together. `tokenizer_config.json` and
`special_tokens_map.json` have texts, `generation_config.json` and `config.json`
have ids.

Beginnings are taken from texts alone: files of policies without a BOS token
name an id for it all the same (Qwen2.5 does).
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Callable

from areal_jax.config import require
from areal_jax.files import read_json

CONFIG = 'tokenizer_config.json'
MAP = 'special_tokens_map.json'
GENERATION = 'generation_config.json'
POLICY = 'config.json'
FILES = (CONFIG, MAP, GENERATION, POLICY)
NAMES = ('bos_token', 'eos_token', 'pad_token', 'unk_token')


@dataclasses.dataclass(frozen=True)
class SpecialIds:
  """Ids that a folder names.

  Attributes:
    bos: begins a text; None if there is none.
    eos: the first one that ends an answer by its text; None if none does.
    pad: fills rows; None if there is none.
    ends: every id that ends an answer, `eos` first.
    policy_ends: those of `ends` that `config.json` alone names.
  """

  bos: int | None
  eos: int | None
  pad: int | None
  ends: tuple[int, ...]
  policy_ends: tuple[int, ...]


def read_config(path: str | os.PathLike) -> dict[str, Any]:
  """The object of a JSON file; an empty one where there is no such file.

  Raises:
    ConfigError: the file is no JSON object.
  """
  path = pathlib.Path(path)
  return read_json(path) if path.is_file() else {}


def token_texts(folder: pathlib.Path) -> dict[str, str]:
  """Texts of special tokens by their names, such as 'bos_token'.

  `tokenizer_config.json` comes first, also where it says null.
  """
  first, second = read_config(folder / CONFIG), read_config(folder / MAP)
  found = {}
  for name in NAMES:
    text = _text((first if name in first else second).get(name))
    if text is not None:
      found[name] = text
  return found


def read_ids(
    folder: pathlib.Path,
    id_of: Callable[[str], int | None],
    exists: Callable[[int], bool],
    vocabulary: str,
    *,
    ends_alone: bool = False,
) -> SpecialIds:
  """The special ids that the files of a folder name.

  Args:
    folder: where the files may lie.
    id_of: id of a token's text; None if there is no such token.
    exists: whether an id is one of a token.
    vocabulary: what the ids belong to, for messages.
    ends_alone: whether other special tokens are passed over.

  Raises:
    ConfigError: a token or an id that the vocabulary lacks; names file, field
      and value.
  """

  def named(file: str, name: str, text: Any) -> int | None:
    text = _text(text)
    if text is None:
      return None
    found = id_of(text)
    require(found is not None, f'{folder / file}: {name}', text,
            f'a token of {vocabulary}')  # fmt: skip
    return found

  texts = token_texts(folder)
  first = read_config(folder / CONFIG)

  def by_text(name: str) -> int | None:
    file = CONFIG if name in first else MAP
    return named(file, name, texts.get(name))

  eos = by_text('eos_token')
  bos = None if ends_alone else by_text('bos_token')
  pad = None if ends_alone else by_text('pad_token')
  other = named(MAP, 'eos_token', read_config(folder / MAP).get('eos_token'))
  said = [id_ for id_ in (eos, other) if id_ is not None]
  for file in (GENERATION, POLICY):
    elsewhere = tuple(dict.fromkeys(said))
    said += _ends(folder / file, exists, vocabulary)
  ends = tuple(dict.fromkeys(said))
  return SpecialIds(bos, eos, pad, ends, ends[len(elsewhere) :])


def _ends(
    file: pathlib.Path, exists: Callable[[int], bool], vocabulary: str
) -> list[int]:
  """The ids at which a file tells the policy to stop."""
  ends = read_config(file).get('eos_token_id')
  ends = [] if ends is None else ends
  ends = ends if isinstance(ends, list) else [ends]
  for end in ends:
    whole = isinstance(end, int) and not isinstance(end, bool)
    require(whole and exists(end), f'{file}: eos_token_id', end,
            f'an id of {vocabulary}')  # fmt: skip
  return ends


def _text(value: Any) -> str | None:
  """The text of a special token: written as such, or in an object."""
  if isinstance(value, dict):
    value = value.get('content')
  return value if isinstance(value, str) else None
