"""A log of texts for people, such as tracebacks, up to a limit in bytes."""

from __future__ import annotations

import os
import pathlib
import threading

_FULL = '(the limit of this file is met; later entries are left out)\n'


class TextLog:
  """Appends texts to a file, which is made with the first one; thread-safe.

  Args:
    path: the file; one that is there is continued.
    limit_bytes: size after which nothing more is written.
  """

  def __init__(self, path: str | os.PathLike, limit_bytes: int):
    self.path = pathlib.Path(path)
    self._limit = limit_bytes
    self._lock = threading.Lock()

  def append(self, text: str) -> None:
    """Writes a text and an empty line behind it; on disk when it returns."""
    with self._lock:
      size = self.path.stat().st_size if self.path.exists() else 0
      if size >= self._limit:
        return
      entry = f'{text.rstrip()}\n\n'
      with open(self.path, 'a', encoding='utf-8', errors='replace') as file:
        file.write(entry)
        if size + len(entry.encode(errors='replace')) >= self._limit:
          file.write(_FULL)
