"""Finding a tokenizer on disk, and the files that make it whole.

A path is a sentencepiece `.model`, a `tokenizer.json`, a folder with one of
the two, or the folder of a run. What was opened can be written elsewhere by its
`files`: a `.model` as `tokenizer.model`, a folder's as `tokenizer/...`, so that
the folder of a run is such a path again.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
from typing import Any, Mapping

from areal_jax.config import ConfigError, fetching
from areal_jax.tokenizer import (
    chat_template,
    huggingface_tokenizer,
    special_tokens,
)
from areal_jax.tokenizer.base import Tokenizer
from areal_jax.tokenizer.chat_template import ChatTemplate, read_chat_template
from areal_jax.tokenizer.huggingface_tokenizer import HuggingFaceTokenizer
from areal_jax.tokenizer.sentencepiece_tokenizer import SentencePieceTokenizer

MODEL = 'tokenizer.model'
FOLDER = 'tokenizer'
_NAMES = (
    MODEL,
    huggingface_tokenizer.FILE,
    special_tokens.CONFIG,
    special_tokens.MAP,
    chat_template.FILE,
    special_tokens.GENERATION,
)


@dataclasses.dataclass(frozen=True)
class Opened:
  """A tokenizer with its chat template and its files.

  Attributes:
    tokenizer: reads and writes text.
    chat: renders messages; None if there is no template.
    files: contents by the name under which a run's folder keeps them.
  """

  tokenizer: Tokenizer
  chat: ChatTemplate | None
  files: Mapping[str, bytes]


def open_tokenizer(
    path: str | os.PathLike,
    *,
    template: str = '',
    variables: Mapping[str, Any] | None = None,
) -> Opened:
  """The tokenizer at a path.

  Args:
    path: a `.model`, a `tokenizer.json`, a folder with either, or the folder of
      a run.
    template: a Jinja text for chats, instead of the one in the folder.
    variables: what the template may ask for; see `ChatTemplate`.

  Raises:
    ConfigError: no tokenizer there, or one that cannot be read.
  """
  path = pathlib.Path(path)
  files = _files(path)
  main = files.get(huggingface_tokenizer.FILE, files.get(MODEL))
  hugging = main is files.get(huggingface_tokenizer.FILE)
  if hugging:
    opened = HuggingFaceTokenizer(main)
  else:
    opened = SentencePieceTokenizer(
        main, main.parent if path.is_dir() else None
    )
  contents = {name: file.read_bytes() for name, file in files.items()}
  if opened.special is not None and opened.special.policy_ends:
    # A run keeps no other `config.json` than its own, so what that file alone
    # says goes where the others read it.
    folder = main.parent
    said = special_tokens.read_config(folder / special_tokens.GENERATION)
    said = {**said, 'eos_token_id': list(opened.special.ends)}
    text = json.dumps(said, indent=2) + '\n'
    contents[special_tokens.GENERATION] = text.encode()
  if list(contents) == [MODEL]:
    chat = ChatTemplate(template, variables=variables) if template else None
    return Opened(opened, chat, contents)
  chat = read_chat_template(main.parent, override=template, variables=variables)
  kept = {f'{FOLDER}/{name}': content for name, content in contents.items()}
  return Opened(opened, chat, kept)


def holds_tokenizer(folder: str | os.PathLike) -> bool:
  """Returns whether `open_tokenizer` finds one in a folder."""
  return _in_folder(pathlib.Path(folder)) is not None


def beside_weights(files: Mapping[str, bytes]) -> dict[str, bytes]:
  """`Opened.files` by the names that they have in a folder with weights."""
  return {name.removeprefix(f'{FOLDER}/'): files[name] for name in files}


def _files(path: pathlib.Path) -> dict[str, pathlib.Path]:
  """The files of the tokenizer at a path by their usual names."""
  if not path.exists() and (hint := fetching(str(path))):
    raise ConfigError(
        f'tokenizer path is {str(path)!r}, wanted a file or a folder{hint}'
    )
  if not path.is_dir():
    if path.suffix != '.json':
      return {MODEL: path}
    return {**_neighbours(path.parent), huggingface_tokenizer.FILE: path}
  files = _in_folder(path)
  if files is None:
    raise ConfigError(
        f'tokenizer path is {str(path)!r}, wanted a folder with'
        f' {huggingface_tokenizer.FILE} or {MODEL}'
    )
  return files


def _in_folder(path: pathlib.Path) -> dict[str, pathlib.Path] | None:
  """The files of the tokenizer in a folder; None if it has none.

  A run keeps them in a folder of its own, a checkpoint of a run in one inside
  of that.
  """
  for folder in (path, path / FOLDER, path / FOLDER / FOLDER):
    files = _neighbours(folder)
    if MODEL in files or huggingface_tokenizer.FILE in files:
      return files
  return None


def _neighbours(folder: pathlib.Path) -> dict[str, pathlib.Path]:
  """Returns the known tokenizer files present in a folder."""
  return {name: folder / name for name in _NAMES if (folder / name).is_file()}
