"""Pages of the cache: who holds them, and which can be used again.

A page is a number: a place for `page_size` tokens on the devices, which this
file never touches. Sequences hold pages, several of them one page where they
begin with the same tokens. A page that nobody holds any more, but whose tokens
are known, stays until room is needed: the prefix cache, which is bounded by the
pool and gives up first what has not been used for longest.

Known pages form a tree. The key of a page says what it holds and its path what
stands before, so that a path from the root is a sequence of tokens. The tree
belongs to one version of the weights: `forget` at the next one.

A pending page is one whose tokens are on their way but not computed. It can be
found and shared like any other; whoever holds it sees to it that it is
computed, and if the last holder lets go of it before, it is as if it had never
been.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Hashable, Iterable, Sequence


@dataclasses.dataclass(eq=False)
class _Node:
  """A page whose content is known, behind those of its ancestors."""

  key: Hashable
  page: int
  parent: _Node | None
  children: dict[Hashable, _Node] = dataclasses.field(default_factory=dict)


class PagePool:
  """Counts references to pages, and remembers what is in them.

  Whoever holds a page holds all pages before it in its sequence. Pages of a
  sequence are given back together, so that of two that nobody holds the one
  further back is always given up first.

  Args:
    pages: how many there are.
  """

  def __init__(self, pages: int):
    self.pages = pages
    self.pending: set[int] = set()
    self._holders = [0] * pages
    self._free = list(range(pages - 1, -1, -1))
    self._idle: collections.OrderedDict[int, None] = collections.OrderedDict()
    self._root = _Node(None, -1, None)
    self._nodes: dict[int, _Node] = {}

  @property
  def used(self) -> int:
    """Pages that somebody holds."""
    return self.pages - self.available

  @property
  def available(self) -> int:
    """Pages that can be taken: the free ones and those only remembered."""
    return len(self._free) + len(self._idle)

  @property
  def idle(self) -> int:
    """Pages that are remembered and held by nobody."""
    return len(self._idle)

  def holders(self, page: int) -> int:
    """Returns the number of holders of a page."""
    return self._holders[page]

  def take(self, count: int) -> list[int]:
    """Pages for one holder, with nothing in them.

    Raises:
      ValueError: fewer are available.
    """
    if count > self.available:
      raise ValueError(
          f'{count} pages asked for, {self.available} of {self.pages} available'
      )
    taken = []
    for _ in range(count):
      if self._free:
        page = self._free.pop()
      else:
        page, _ = self._idle.popitem(last=False)
        self._unlink(page)
      self._holders[page] = 1
      taken.append(page)
    return taken

  def share(self, pages: Iterable[int]) -> None:
    """Adds a holder to each page."""
    for page in pages:
      if not self._holders[page]:
        del self._idle[page]
      self._holders[page] += 1

  def give_back(self, pages: Sequence[int]) -> None:
    """Removes a holder from each page of a sequence, first to last."""
    for page in reversed(pages):
      self._holders[page] -= 1
      if self._holders[page]:
        continue
      if page in self.pending:
        self.pending.remove(page)
        self._unlink(page)
      if page in self._nodes:
        self._idle[page] = None
      else:
        self._free.append(page)

  def find(self, keys: Iterable[Hashable]) -> list[int]:
    """The pages of the longest known beginning, with one holder more."""
    found = self._known(keys)
    self.share(found)
    return found

  def knows(self, keys: Iterable[Hashable]) -> int:
    """Counts the pages that `find` would find, without holding them."""
    return len(self._known(keys))

  def remember(self, keys: Iterable[Hashable], pages: Iterable[int]) -> None:
    """Makes held pages known by their keys, first to last.

    Where another page is known for the same tokens already, it stays, and what
    lies behind is not remembered.
    """
    node = self._root
    for key, page in zip(keys, pages):
      child = node.children.get(key)
      if child is None:
        if page in self._nodes:
          return
        child = _Node(key, page, node)
        node.children[key] = self._nodes[page] = child
      elif child.page != page:
        return
      node = child

  def forget(self) -> None:
    """Forgets all known pages; pages that are held stay held."""
    self._root = _Node(None, -1, None)
    self._nodes.clear()
    self._free.extend(self._idle)
    self._idle.clear()

  def _known(self, keys: Iterable[Hashable]) -> list[int]:
    node, known = self._root, []
    for key in keys:
      node = node.children.get(key)
      if node is None:
        break
      known.append(node.page)
    return known

  def _unlink(self, page: int) -> None:
    node = self._nodes.pop(page, None)
    if node is not None:
      del node.parent.children[node.key]
