"""Files of others, read with an error that says what lies there instead.

A folder that was fetched with Git alone holds pointers in place of its large
files, and one that was fetched with a wrong address holds web pages. Every
parser fails on them in words of its own, so they are looked for first.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
from typing import Any

from areal_jax.config import ConfigError, require

# See https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md.
_POINTER = b'version https://git-lfs.github.com/spec/'
_PAGES = (b'<!doctype html', b'<html')


def check_content(path: str | os.PathLike) -> None:
  """Refuses a file that holds a stand-in for the file that was meant.

  A path without a file is passed over: readers name that by themselves.

  Raises:
    ConfigError: it is a Git LFS pointer or a web page; names the file and what
      to do.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    return
  with path.open('rb') as file:
    head = file.read(1024)
  if head.startswith(_POINTER):
    size = re.search(rb'^size (\d+)', head, re.MULTILINE)
    stands = f' for {int(size[1])} bytes' if size else ''
    raise ConfigError(
        f'{path} is a Git LFS pointer{stands}, wanted the file itself: run `git'
        f' lfs pull` in {str(path.parent)!r}, or fetch the folder again'
    )
  if head.lstrip().lower().startswith(_PAGES):
    raise ConfigError(
        f'{path} is a web page, wanted the file itself: fetch it again from the'
        ' address of the file, not of the page that shows it'
    )


def read_json(path: str | os.PathLike) -> dict[str, Any]:
  """The object of a JSON file.

  Raises:
    ConfigError: there is no such file, or it holds no JSON object.
  """
  path = pathlib.Path(path)
  if not path.is_file():
    raise ConfigError(f'there is no file {path}')
  check_content(path)
  try:
    found = json.loads(path.read_bytes())
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise ConfigError(f'{path} is not JSON: {error}') from error
  require(isinstance(found, dict), str(path), found, 'a JSON object')
  return found
