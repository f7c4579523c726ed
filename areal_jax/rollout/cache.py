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

Over several data shards (see `engine.py`) each has a pool of its own, and pages
are known and shared inside of one. A sequence goes where most of it is known,
if that is half of it or more, and else where the fewest are; where there is no
room for it, to the next one, which computes its beginning again.

Nothing here touches a device. Programs run in the order in which they were
sent, so a page counts as computed as soon as its piece is on its way.

In exact mode a page is found only if it came out of the very programs that the
prompt alone would have gone through, so that answers do not differ in their
last bits by what else was asked before: whole pieces, and no page that decoding
has written.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Callable, Collection, Hashable, Iterable, Mapping

import numpy as np

from areal_jax.rollout.decode_state import Pieces
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.pages import PagePool


@dataclasses.dataclass(eq=False)
class Sequence:
  """The part of the cache that one slot has.

  Attributes:
    slot: where it is.
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
    shards: data shards of the engine.
    alone: whether a few pieces of a bucket may be computed one by one; not
      while the program for one is not there.

  Attributes:
    pools: the pages of each shard.
    tables: [S, pages a slot] int32, of a slot's own shard.
  """

  def __init__(
      self,
      settings: EngineSettings,
      *,
      exact: bool = False,
      shards: int = 1,
      alone: Callable[[int], bool] = lambda bucket: True,
  ):
    self.settings = settings.of_shard(shards)
    self.exact = exact
    self._alone = alone
    self.shards = shards
    self.pools = [PagePool(self.settings.total_pages) for _ in range(shards)]
    self.tables = np.zeros((settings.slots, settings.pages_per_slot), np.int32)
    self._sequences: dict[int, Sequence] = {}  # by slot, oldest first
    self._members = [0] * shards  # sequences of each

  def __getitem__(self, slot: int) -> Sequence:
    return self._sequences[slot]

  @property
  def one_by_one(self) -> bool:
    """Whether a program computes one piece of a shard at a time.

    The shape of a prefill then depends on its prompt alone.
    """
    return self.exact

  @property
  def whole_pieces(self) -> bool:
    """Whether pages are found by the pieces whose programs computed them.

    What is found then equals what would have been computed, in bits.
    """
    return self.exact

  @property
  def used(self) -> int:
    """Pages that somebody holds, on all shards."""
    return sum(pool.used for pool in self.pools)

  def shard_of(self, slot: int) -> int:
    """The data shard that a slot is of."""
    return slot // self.settings.slots

  def slots(self) -> list[int]:
    """Slots with a sequence, that which was placed first before all others."""
    return list(self._sequences)

  def place(
      self,
      free: Collection[int],
      tokens: np.ndarray,
      limit: int,
      *,
      shared: bool = True,
  ) -> Sequence | None:
    """Gives one of some free slots the pages for a sequence.

    Every slot keeps room for one page more, if it may need one: what is placed
    now would otherwise soon push out others, or be pushed out.

    Args:
      free: slots, of which the first one of its shard is taken.
      tokens: [n] int32, n at least 1; all but the last are to be cached.
      limit: tokens at which it ends.
      shared: whether others may come that begin with all of them.

    Returns:
      The sequence; None if there are too few pages.
    """
    full, rest = divmod(len(tokens) - 1, self.settings.page_size)
    copied = shared and rest > 0
    keys = self._keys(tokens[:-1])[: full + copied]
    for slot in self._candidates(free, keys):
      sequence = self._place(slot, tokens, limit, keys, copied)
      if sequence is not None:
        return sequence
    return None

  def _candidates(
      self, free: Collection[int], keys: list[Hashable]
  ) -> list[int]:
    """The first free slot of each shard, the best shard for these keys first.

    What is known of less than half of a sequence, the beginning of a chat that
    all have in common, is sooner computed again than shards are filled one
    after another.
    """
    if self.shards == 1:
      return list(itertools.islice(free, 1))
    first: dict[int, int] = {}
    for slot in free:
      first.setdefault(self.shard_of(slot), slot)

    def rank(shard: int) -> tuple[int, int]:
      known = self.pools[shard].knows(keys)
      return -known if 2 * known >= len(keys) else 0, self._members[shard]

    return [first[shard] for shard in sorted(first, key=rank)]

  def _place(
      self,
      slot: int,
      tokens: np.ndarray,
      limit: int,
      keys: list[Hashable],
      copied: bool,
  ) -> Sequence | None:
    """`place` in this slot; whether a page is `copied` that `keys` end with."""
    shard, page = self.shard_of(slot), self.settings.page_size
    pool = self.pools[shard]
    cached = len(tokens) - 1
    rest = cached % page
    found = pool.find(keys)
    if self.whole_pieces:
      found = self._whole_pieces(pool, found, cached)
    # Full pages, the one to be copied, and one of its own for what is left.
    missing = len(keys) - len(found)
    taken = missing + (rest > 0)
    room = pool.available - taken
    # The count that is at most the other is made first: this is done often.
    if room < self._members[shard] and room < self._growth(shard):
      pool.give_back(found)
      return None
    fresh = pool.take(taken)
    held, own = found + fresh[:missing], fresh[missing:]
    pool.pending.update(fresh[:missing] if copied else fresh)
    pool.remember(keys, held)
    sequence = Sequence(
        slot=slot,
        tokens=tokens,
        limit=limit,
        source=held.pop() if copied else None,
        pages=held + own,
        found_tokens=min(cached, len(found) * page),
    )
    self._members[shard] += 1
    self._sequences[slot] = sequence
    return sequence

  def next_piece(self, *, long: bool) -> Pieces | None:
    """Chooses the work of the next prefill program; counts it as computed.

    Pieces of one bucket go together, oldest first, each in a row of its own
    shard's. A piece that another one of the same program has to precede waits;
    a page that several need is computed once.

    Args:
      long: whether to look at sequences of which more is left than one piece,
        or at the others.
    """
    s = self.settings
    claimed: list[set[int]] = [set() for _ in self.pools]
    chosen: list[list[tuple[Sequence, int, int]]] = [[] for _ in self.pools]
    bucket = most = 0
    for sequence in self._sequences.values():
      if not sequence.waits:
        continue
      shard = self.shard_of(sequence.slot)
      if bucket and len(chosen[shard]) == most:
        continue
      targets = self._advance(sequence)
      first = sequence.computed
      if first >= len(targets) or targets[first] in claimed[shard]:
        continue
      left = sequence.cached - first * s.page_size
      if (left > s.longest_piece) != long:
        continue
      length = min(left, s.longest_piece)
      size = s.piece_bucket(length)
      if bucket in (0, size):
        bucket = size
        most = 1 if self.one_by_one else s.piece_rows(size)
        chosen[shard].append((sequence, first, length))
        pages = -(-length // s.page_size)
        claimed[shard].update(targets[first : first + pages])
        if all(len(of_shard) == most for of_shard in chosen):
          break
    if not bucket:
      return None
    rows = s.rows_for(max(map(len, chosen)), bucket)
    if self.one_by_one:
      rows = 1
    elif rows == 1 and not self._alone(bucket):
      rows = s.piece_rows(bucket)
    return self._pieces([c[:rows] for c in chosen], rows, bucket)

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
        self._pool(slot).give_back([sequence.source])
        sequence.source = None
      self.tables[slot, : len(sequence.pages)] = sequence.pages
      placed.append(Placed(sequence, pages, copy))
    return placed

  def grow(self, slot: int, tokens: int) -> bool:
    """Adds pages until a slot can cache so many tokens; whether it can."""
    sequence, pool = self._sequences[slot], self._pool(slot)
    missing = -(-tokens // self.settings.page_size) - len(sequence.pages)
    if missing <= 0:
      return True
    if missing > pool.available:
      return False
    first = len(sequence.pages)
    sequence.pages += pool.take(missing)
    self.tables[slot, first : len(sequence.pages)] = sequence.pages[first:]
    return True

  def holds(self, slot: int) -> int:
    """Tokens that the pages of a slot have room for."""
    return len(self._sequences[slot].pages) * self.settings.page_size

  def youngest(self, slot: int) -> int:
    """Returns the most recently admitted slot on the same shard."""
    shard = self.shard_of(slot)
    for other in reversed(self._sequences):
      if self.shard_of(other) == shard:
        return other
    raise ValueError(f'slot {slot}: no slot of shard {shard} has a sequence')

  def end(self, slot: int, tokens: np.ndarray | None = None) -> None:
    """Takes a sequence out of its slot.

    Args:
      slot: which.
      tokens: [n] all its tokens, if its pages may be found by them.
    """
    sequence, pool = self._sequences.pop(slot), self._pool(slot)
    self._members[self.shard_of(slot)] -= 1
    if tokens is not None and not (
        self.whole_pieces or sequence.stale or sequence.waits
    ):
      full = (len(tokens) - 1) // self.settings.page_size
      keys = self._keys(tokens[: full * self.settings.page_size])
      pool.remember(keys, sequence.pages)
    if sequence.source is not None:
      pool.give_back([sequence.source])
    pool.give_back(sequence.pages)
    self.tables[slot] = 0

  def new_weights(self, rebuild: Mapping[int, np.ndarray] | None) -> None:
    """Forgets what is known; what is held is computed anew, or goes stale.

    Sequences that are not whole yet are computed anew in any case.

    Args:
      rebuild: the tokens [n] of the slots to be computed anew; None to leave
        them as they are.
    """
    for pool in self.pools:
      pool.forget()
      pool.pending.clear()
    for slot, sequence in self._sequences.items():
      if sequence.waits:
        if sequence.source is not None:
          self._pool(slot).give_back([sequence.source])
          sequence.source = None
      elif rebuild is not None:
        sequence.tokens = rebuild[slot]
      else:
        sequence.stale = True
        continue
      sequence.waits, sequence.stale = True, False
      sequence.found_tokens = sequence.computed = 0
      pages = -(-sequence.cached // self.settings.page_size)
      self._pool(slot).pending.update(sequence.pages[:pages])
    if self.whole_pieces:
      return  # what is computed anew came through other programs
    for slot, sequence in self._sequences.items():
      if sequence.waits:
        full = sequence.cached // self.settings.page_size
        whole = sequence.tokens[: full * self.settings.page_size]
        self._pool(slot).remember(self._keys(whole), sequence.pages)

  def _pool(self, slot: int) -> PagePool:
    return self.pools[self.shard_of(slot)]

  def _advance(self, sequence: Sequence) -> list[int]:
    """The sequence's target pages; moves its mark past the computed ones."""
    targets = sequence.targets()
    pending = self._pool(sequence.slot).pending
    wanted = -(-sequence.cached // self.settings.page_size)
    targets = targets[:wanted]
    while (
        sequence.computed < len(targets)
        and targets[sequence.computed] not in pending
    ):
      sequence.computed += 1
    return targets

  def _pieces(
      self,
      chosen: list[list[tuple[Sequence, int, int]]],
      rows: int,
      bucket: int,
  ) -> Pieces:
    """Arranges the chosen pieces of each shard as one program takes them."""
    s, total = self.settings, self.shards * rows
    pieces = Pieces(
        ids=np.zeros((total, bucket), np.int32),
        starts=np.zeros(total, np.int32),
        lengths=np.zeros(total, np.int32),
        tables=np.zeros((total, s.pages_per_slot), np.int32),
    )
    for shard, of_shard in enumerate(chosen):
      for row, (sequence, first, length) in enumerate(of_shard, shard * rows):
        start = first * s.page_size
        targets = sequence.targets()
        pieces.ids[row, :length] = sequence.tokens[start : start + length]
        pieces.starts[row] = start
        pieces.lengths[row] = length
        pieces.tables[row, : len(targets)] = targets
        last = first + -(-length // s.page_size)
        self.pools[shard].pending.difference_update(targets[first:last])
    return pieces

  def _growth(self, shard: int) -> int:
    """Sequences of a shard that may still need a page."""
    page = self.settings.page_size
    return sum(
        len(s.pages) * page < s.limit - 1
        for s in self._sequences.values()
        if self.shard_of(s.slot) == shard
    )

  def _keys(self, tokens: np.ndarray) -> list[Hashable]:
    """Returns a key for each page that the tokens begin."""
    page = self.settings.page_size
    parts = range(0, len(tokens), page)
    tokens = np.ascontiguousarray(tokens, np.int32)
    if not self.whole_pieces:
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

  def _whole_pieces(
      self, pool: PagePool, found: list[int], cached: int
  ) -> list[int]:
    """Keeps those found pages that make whole pieces, gives back the rest."""
    page, kept = self.settings.page_size, 0
    for start, length, _ in self._plan(cached):
      end = -(-(start + length) // page)
      if end <= len(found):
        kept = end
    pool.give_back(found[kept:])
    return found[:kept]
