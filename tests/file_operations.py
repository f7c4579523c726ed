"""What a process does to files, operation by operation, as a crash sees it.

An audit hook of Python tells of each operation before it is made. What C++
writes by itself falls between two of them. With it a test can look at the disk
as a process would leave it that is killed there, or kill itself there.
"""

import contextlib
import os
import pathlib
import shutil
import signal
import sys
import threading

_WRITING = os.O_WRONLY | os.O_RDWR
_REMOVING = ('os.remove', 'os.rmdir')
_OTHERS = ('os.mkdir', 'os.rename', 'os.truncate', 'os.link', 'os.symlink')

_watches = []
_inside = threading.local()  # what a watch does is not watched


def _hook(event, arguments):
  if not _watches or getattr(_inside, 'now', False):
    return
  if event == 'open':
    path, _, flags = arguments
    if not isinstance(path, (str, bytes)) or not (flags or 0) & _WRITING:
      return
    kind = 'write'
  elif event in _REMOVING:
    path, folder = arguments
    if isinstance(folder, int) and folder >= 0:  # rmtree names by descriptor
      _inside.now = True
      path = os.path.join(os.readlink(f'/proc/self/fd/{folder}'), path)
      _inside.now = False
    kind = 'remove'
  elif event in _OTHERS:
    path, kind = arguments[0], event
  else:
    return
  _inside.now = True
  try:
    for watch in list(_watches):
      watch(kind, os.path.abspath(os.fsdecode(path)))
  finally:
    _inside.now = False


sys.addaudithook(_hook)  # for good: Python takes none away


@contextlib.contextmanager
def watched(watch):
  """Calls `watch(kind, path)` before each operation made inside."""
  _watches.append(watch)
  try:
    yield
  finally:
    _watches.remove(watch)


def kill_before(kind, ending, count):
  """Kills this process, as kill -9 does, before so many such operations."""
  left = [count]

  def watch(seen, path):
    if seen == kind and path.endswith(ending):
      left[0] -= 1
      if not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)

  _watches.append(watch)


class Crashes:
  """Copies of a folder as a kill would leave it, one for each operation.

  After a file was written there are two more: with half of it, and empty.

  Args:
    folder: what is copied.
    into: where to; made.

  Attributes:
    states: (what was about to happen, folder) in their order.
  """

  def __init__(self, folder, into):
    self.states = []
    self._folder = pathlib.Path(folder)
    self._into = pathlib.Path(into)
    self._written = None
    self._lock = threading.RLock()  # orbax writes in several threads

  def __call__(self, kind, path):
    if not pathlib.Path(path).is_relative_to(self._folder):
      return
    with self._lock:
      self.look(f'{kind} {pathlib.Path(path).relative_to(self._folder)}')
      self._written = path if kind == 'write' else None

  def look(self, name):
    """Keeps the state of the disk as it is now."""
    whole = self._copy(name)
    if self._written is None or not os.path.isfile(self._written):
      return
    place = pathlib.Path(self._written).relative_to(self._folder)
    if not (whole / place).is_file():
      return  # it came, or went, while the others were copied
    content = (whole / place).read_bytes()
    for part, length in (('half', len(content) // 2), ('nothing', 0)):
      torn = self._copy(f'{name}, with {part} of {place}', whole)
      (torn / place).write_bytes(content[:length])

  def _copy(self, name, source=None):
    made = self._into / f'{len(self.states):04d}'
    for _ in range(20):
      try:
        shutil.copytree(source or self._folder, made)
        break
      except (shutil.Error, FileNotFoundError):
        shutil.rmtree(made)  # C++ took a file away in the middle of it
    else:
      raise AssertionError(f'{self._folder} does not come to rest')
    self.states.append((name, made))
    return made
