"""Which tokens of which slot lie on which page, and which are still to come.

The host's side of the paged cache. A sequence is placed in a slot: pages are
found that hold its beginning already, others are taken, and what no page holds
is computed piece by piece (`next_piece`). Once that is so the slot can be
occupied (`ready`). Pages are added as it grows and given back at its end, when
they stay known by their tokens. New weights make everything known void, and of
what is held either computed anew or kept as it is.

The cache always lacks the last token of a slot (see `engine.py`), so that of n
tokens n - 1 are cached. Pages that are full of them can be shared, since nobody
writes there again. What is left of the prompt lies on a page that slots copy,
each to a page of its own, which it then goes on writing.

Nothing here touches a device. Programs run in the order in which they were
sent, so a page counts as computed as soon as its piece is on its way.

In exact mode a page is found only if it came out of the very programs that the
prompt alone would have gone through, so that answers do not differ in their
last bits by what else was asked before: whole pieces, and no page that decoding
has written.
"""

from __future__ import annotations

import dataclasses
from typing import Hashable, Iterable, Mapping

import numpy as np

from areal_jax.rollout.engine import EngineSettings, Pieces
from areal_jax.rollout.pages import PagePool


@dataclasses.dataclass(eq=False)
class Sequence:
  """What a slot has of the cache.

  Attributes:
    slot: where it is.
    serial: in the order of placing.
    tokens: [n] all that it had when it was placed or rebuilt.
    limit: tokens at which it ends.
    pages: of its positions, first to last.
    source: page that holds what is to be copied to the last of `pages`; None
      if nothing is.
    found_tokens: of `tokens`, cached before it came.
    waits: whether something of it is still to be computed or copied.
    stale: whether its pages are of weights that are no longer the newest.
    computed: leading pages known to be computed.
  """

  slot: int
  serial: int
  tokens: np.ndarray
  limit: int
  pages: list[int]
  source: int | None = None
  found_tokens: int = 0
  waits: bool = True
  stale: bool = False
  computed: int = 0

  @property
  def cached(self) -> int:
    """Tokens that are to be in the cache before it can go on."""
    return len(self.tokens) - 1

  def targets(self) -> list[int]:
    """The pages that its pieces are written to."""
    if self.source is None:
      return self.pages
    return [*self.pages[:-1], self.source]


@dataclasses.dataclass(frozen=True)
class Placed:
  """A sequence that is whole: its slot can be occupied.

  Attributes:
    sequence: it.
    pages: that its cached tokens were computed on, first to last.
    copy: (from page, to page) to copy first; None for nothing.
  """

  sequence: Sequence
  pages: list[int]
  copy: tuple[int, int] | None


class SlotCache:
  """Pages of S slots.

  Args:
    settings: shapes of the engine.
    exact: see above.
  """

  def __init__(self, settings: EngineSettings, *, exact: bool = False):
    self.settings = settings
    self.exact = exact
    self.pool = PagePool(settings.total_pages)
    self.tables = np.zeros((settings.slots, settings.pages_per_slot), np.int32)
    self._sequences: dict[int, Sequence] = {}  # by slot, oldest first
    self._placed = 0

  def __getitem__(self, slot: int) -> Sequence:
    return self._sequences[slot]

  def slots(self) -> list[int]:
    """Slots with a sequence, that which was placed first before all others."""
    return list(self._sequences)

  def place(
      self, slot: int, tokens: np.ndarray, limit: int, *, shared: bool = True
  ) -> Sequence | None:
    """Gives a free slot the pages for a sequence.

    Every slot keeps room for one page more, if it may need one: what is placed
    now would otherwise soon push out others, or be pushed out.

    Args:
      slot: which.
      tokens: [n] int32, n at least 1; all but the last are to be cached.
      limit: tokens at which it ends.
      shared: whether others may come that begin with all of them.

    Returns:
      The sequence; None if there are too few pages.
    """
    page = self.settings.page_size
    cached = len(tokens) - 1
    full, rest = divmod(cached, page)
    copied = shared and rest > 0
    keys = self._keys(tokens[:cached])[: full + copied]
    found = self.pool.find(keys)
    if self.exact:
      found = self._whole_pieces(found, cached)
    # Full pages, the one to be copied, and one of its own for what is left.
    missing = full + copied - len(found)
    taken = missing + (rest > 0)
    room = self.pool.available - taken
    # The count that is at most the other is made first: this is done often.
    if room < len(self._sequences) and room < self._growth():
      self.pool.give_back(found)
      return None
    fresh = self.pool.take(taken)
    held, own = found + fresh[:missing], fresh[missing:]
    self.pool.pending.update(fresh[:missing] if copied else fresh)
    self.pool.remember(keys, held)
    sequence = Sequence(
        slot=slot,
        serial=self._placed,
        tokens=tokens,
        limit=limit,
        source=held.pop() if copied else None,
        pages=held + own,
        found_tokens=min(cached, len(found) * page),
    )
    self._placed += 1
    self._sequences[slot] = sequence
    return sequence

  def next_piece(self, *, long: bool) -> Pieces | None:
    """What one prefill program shall compute next, counted as computed.

    Pieces of one bucket go together, oldest first. A piece that another one of
    the same program has to precede waits; a page that several need is computed
    once.

    Args:
      long: whether to look at sequences of which more is left than one piece,
        or at the others.
    """
    s = self.settings
    claimed: set[int] = set()
    chosen: list[tuple[Sequence, int, int]] = []
    bucket = 0
    for sequence in self._sequences.values():
      if not sequence.waits:
        continue
      targets = self._advance(sequence)
      first = sequence.computed
      if first >= len(targets) or targets[first] in claimed:
        continue
      left = sequence.cached - first * s.page_size
      if (left > s.longest_piece) != long:
        continue
      length = min(left, s.longest_piece)
      size = s.piece_bucket(length)
      if bucket in (0, size):
        bucket = size
        chosen.append((sequence, first, length))
        pages = -(-length // s.page_size)
        claimed.update(targets[first : first + pages])
      if len(chosen) == (1 if self.exact else s.piece_rows(bucket)):
        break
    if not chosen:
      return None
    rows = 1 if self.exact else s.rows_for(len(chosen), bucket)
    return self._pieces(chosen[:rows], rows, bucket)

  def ready(self) -> list[Placed]:
    """Sequences that are whole by now, oldest first, each of them once."""
    placed = []
    for slot, sequence in self._sequences.items():
      if not sequence.waits:
        continue
      pages = self._advance(sequence)
      if len(pages) > sequence.computed:
        continue
      sequence.waits = False
      copy = None
      if sequence.source is not None:
        copy = (sequence.source, sequence.pages[-1])
        # Whatever takes the page from here on is sent after the copy.
        self.pool.give_back([sequence.source])
        sequence.source = None
      self.tables[slot, : len(sequence.pages)] = sequence.pages
      placed.append(Placed(sequence, pages, copy))
    return placed

  def grow(self, slot: int, tokens: int) -> bool:
    """Adds pages until a slot can cache so many tokens; whether it can."""
    sequence = self._sequences[slot]
    missing = -(-tokens // self.settings.page_size) - len(sequence.pages)
    if missing <= 0:
      return True
    if missing > self.pool.available:
      return False
    first = len(sequence.pages)
    sequence.pages += self.pool.take(missing)
    self.tables[slot, first : len(sequence.pages)] = sequence.pages[first:]
    return True

  def holds(self, slot: int) -> int:
    """Tokens that the pages of a slot have room for."""
    return len(self._sequences[slot].pages) * self.settings.page_size

  def youngest(self) -> int:
    """The slot that was placed last."""
    return max(self._sequences.values(), key=lambda s: s.serial).slot

  def end(self, slot: int, tokens: np.ndarray | None = None) -> None:
    """Takes a sequence out of its slot.

    Args:
      slot: which.
      tokens: [n] all its tokens, if its pages may be found by them.
    """
    sequence = self._sequences.pop(slot)
    if tokens is not None and not (
        self.exact or sequence.stale or sequence.waits
    ):
      full = (len(tokens) - 1) // self.settings.page_size
      keys = self._keys(tokens[: full * self.settings.page_size])
      self.pool.remember(keys, sequence.pages)
    if sequence.source is not None:
      self.pool.give_back([sequence.source])
    self.pool.give_back(sequence.pages)
    self.tables[slot] = 0

  def new_weights(self, rebuild: Mapping[int, np.ndarray] | None) -> None:
    """Forgets what is known; what is held is computed anew, or goes stale.

    Sequences that are not whole yet are computed anew in any case.

    Args:
      rebuild: the tokens [n] of the slots to be computed anew; None to leave
        them as they are.
    """
    self.pool.forget()
    pending = self.pool.pending
    pending.clear()
    for slot, sequence in self._sequences.items():
      if sequence.waits:
        if sequence.source is not None:
          self.pool.give_back([sequence.source])
          sequence.source = None
      elif rebuild is not None:
        sequence.tokens = rebuild[slot]
      else:
        sequence.stale = True
        continue
      sequence.waits, sequence.stale = True, False
      sequence.found_tokens = sequence.computed = 0
      pages = -(-sequence.cached // self.settings.page_size)
      pending.update(sequence.pages[:pages])
    if self.exact:
      return  # what is computed anew came through other programs
    for sequence in self._sequences.values():
      if sequence.waits:
        full = sequence.cached // self.settings.page_size
        whole = sequence.tokens[: full * self.settings.page_size]
        self.pool.remember(self._keys(whole), sequence.pages)

  def _advance(self, sequence: Sequence) -> list[int]:
    """The sequence's target pages; moves its mark past the computed ones."""
    targets, pending = sequence.targets(), self.pool.pending
    wanted = -(-sequence.cached // self.settings.page_size)
    targets = targets[:wanted]
    while (
        sequence.computed < len(targets)
        and targets[sequence.computed] not in pending
    ):
      sequence.computed += 1
    return targets

  def _pieces(
      self, chosen: list[tuple[Sequence, int, int]], rows: int, bucket: int
  ) -> Pieces:
    s = self.settings
    pieces = Pieces(
        ids=np.zeros((rows, bucket), np.int32),
        starts=np.zeros(rows, np.int32),
        lengths=np.zeros(rows, np.int32),
        tables=np.zeros((rows, s.pages_per_slot), np.int32),
    )
    for row, (sequence, first, length) in enumerate(chosen):
      start = first * s.page_size
      targets = sequence.targets()
      pieces.ids[row, :length] = sequence.tokens[start : start + length]
      pieces.starts[row] = start
      pieces.lengths[row] = length
      pieces.tables[row, : len(targets)] = targets
      last = first + -(-length // s.page_size)
      self.pool.pending.difference_update(targets[first:last])
    return pieces

  def _growth(self) -> int:
    """Sequences that may still need a page."""
    page = self.settings.page_size
    return sum(
        len(s.pages) * page < s.limit - 1 for s in self._sequences.values()
    )

  def _keys(self, tokens: np.ndarray) -> list[Hashable]:
    """One for each page that the tokens begin."""
    page = self.settings.page_size
    parts = range(0, len(tokens), page)
    tokens = np.ascontiguousarray(tokens, np.int32)
    if not self.exact:
      return [tokens[at : at + page].tobytes() for at in parts]
    # A page of a piece holds what it holds for all tokens of the piece, since
    # those decide which program computes it.
    keys = []
    for start, length, bucket in self._plan(len(tokens)):
      piece = tokens[start : start + length].tobytes()
      keys += [(bucket, i, piece) for i in range(-(-length // page))]
    return keys

  def _plan(self, cached: int) -> Iterable[tuple[int, int, int]]:
    """(start, length, bucket) of the pieces of so many tokens, from none on."""
    for start in range(0, cached, self.settings.longest_piece):
      length = min(cached - start, self.settings.longest_piece)
      yield start, length, self.settings.piece_bucket(length)

  def _whole_pieces(self, found: list[int], cached: int) -> list[int]:
    """Keeps those found pages that make whole pieces, gives back the rest."""
    page, kept = self.settings.page_size, 0
    for start, length, _ in self._plan(cached):
      end = -(-(start + length) // page)
      if end <= len(found):
        kept = end
    self.pool.give_back(found[kept:])
    return found[:kept]
