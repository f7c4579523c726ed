"""Requests in slots: what each has said, and the pages that hold it.

What lives here: `Running`, a request with its answer so far, and `Slots`, which
knows who is in which slot and keeps the cache's pages (`cache`) in step with
that. Nothing here computes on a device, waits or locks: the loop asks, and has
the engine do what follows.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import numpy as np

from areal_jax.models.moe import UNKNOWN
from areal_jax.rollout.cache import Placed, SlotCache
from areal_jax.rollout.decode_state import Pieces
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.stopping import Stop, StopStrings
from areal_jax.types import Completion, Request, StopReason


class Ticket:
  """Stands for one submitted request, whatever its id is.

  Ids come again: a request that is asked once more after a time limit has the
  id of the one that was given up. So what is aborted is named by its ticket.
  """


@dataclasses.dataclass
class Running:
  """A request with what it has said so far, dispatch by dispatch."""

  request: Request
  ticket: Ticket  # the same one when it begins anew
  answer: Callable[[Completion | BaseException], None]
  stops: StopStrings | None  # None if it has no stop strings
  since: float  # monotonic second at which it was asked, or begun anew
  ids: list[np.ndarray] = dataclasses.field(default_factory=list)
  logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)  # a dispatch
  # Where the engine records it: of what was cached when its slot was occupied
  # or rebuilt, then of each token that was fed, which are one fewer than there
  # are in the end.
  routing: list[np.ndarray] = dataclasses.field(default_factory=list)
  # What the engine was built to tell: [n], [n, top] and [n, top] a dispatch.
  raw_logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
  top_logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  prompt_logps: np.ndarray | None = None  # [P]
  prompt_version: int | None = None
  active: bool = False  # whether its slot decodes
  said: int = 0  # tokens

  def __len__(self) -> int:
    return self.said

  @property
  def length(self) -> int:
    """Tokens of prompt and answer so far."""
    return len(self.request.prompt_ids) + self.said

  @property
  def limit(self) -> int:
    """Tokens of prompt and answer at which it ends."""
    sampling = self.request.sampling
    return len(self.request.prompt_ids) + sampling.max_new_tokens

  def tokens(self) -> np.ndarray:
    """[length] int32: prompt and answer so far."""
    prompt = np.asarray(self.request.prompt_ids, np.int32)
    return np.concatenate([prompt, *self.ids]).astype(np.int32, copy=False)

  def add(self, ids: np.ndarray, logps: np.ndarray, version: int) -> None:
    """Adds the result of a dispatch."""
    self.ids.append(ids)
    self.logps.append(logps)
    self.versions.append(version)
    self.said += len(ids)

  def stop_string(
      self, tokens: np.ndarray, active: bool, stopped: bool
  ) -> Stop | None:
    """The stop string that ends the answer with the tokens just drawn.

    Args:
      tokens: [n] int32, which have been added.
      active: whether the slot would go on.
      stopped: whether a stop id has ended it.
    """
    if self.stops is None:
      return None
    stop = self.stops.push(tokens.tolist())
    if stop is None and not active:
      stop = self.stops.finish()
    # One token may be a stop id and complete a string: the id is the reason.
    by_id = stop is not None and stopped and stop.tokens == len(self)
    return None if by_id else stop


def completion_of(
    running: Running,
    source: str,
    most_top_logps: int,
    reason: StopReason,
    stop_id: int | None,
    stop: Stop | None = None,
) -> Completion:
  """The completion of a request that has ended.

  Args:
    running: the request.
    source: whose weights these were, such as 'engine/0'.
    most_top_logps: candidates that the engine tells for each token.
    reason: why it ended.
    stop_id: the id that ended it, if one did.
    stop: the stop string that ended it, if one did.
  """
  end = None if stop is None else stop.tokens

  def joined(parts, dtype, *more):
    nothing = np.zeros((0, *more), dtype)
    return np.concatenate([nothing, *parts]).astype(dtype)[:end]

  asked = running.request.sampling
  told = {}
  if asked.raw_logps:
    told['raw_logps'] = joined(running.raw_logps, np.float32)
  if asked.top_logps:
    for name, dtype in (('top_ids', np.int32), ('top_logps', np.float32)):
      every = joined(getattr(running, name), dtype, most_top_logps)
      told[name] = every[:, : asked.top_logps]
  return Completion(
      request_id=running.request.request_id,
      ids=joined(running.ids, np.int32),
      logps=joined(running.logps, np.float32),
      versions=np.repeat(
          np.asarray(running.versions, np.int32), list(map(len, running.ids))
      )[:end],
      stop_reason=reason,
      stop_id=stop_id,
      stop_string=None if stop is None else stop.string,
      text_end=None if stop is None else stop.text_end,
      weight_source=source,
      routing=_routing_of(running, end),
      prompt_logps=running.prompt_logps,
      prompt_version=running.prompt_version,
      **told,
  )


def _routing_of(running: Running, end: int | None) -> np.ndarray | None:
  """[P + T, L, k] recorded choices of the prompt and T = `end` tokens.

  None for all tokens. The last one drawn was never fed: its choices are -1.
  None where nothing is recorded, and for a request that never had a slot.
  """
  if not running.routing:
    return None
  fed = np.concatenate(running.routing)
  fed = np.concatenate([fed, np.full_like(fed[:1], UNKNOWN)])
  return fed if end is None else fed[: len(running.request.prompt_ids) + end]


class Slots:
  """Who is in which slot, and on which pages.

  Args:
    engine: the programs and shapes.
    exact: whether nothing that was cached before may change an answer in its
      last bits; see `cache.SlotCache`.

  Attributes:
    members: of each slot the request in it, or None.
    cache: which pages hold what.
  """

  def __init__(self, engine: Engine, exact: bool):
    self._engine = engine
    self._exact = exact
    self.members: list[Running | None] = [None] * engine.settings.slots
    self.cache = self._empty_cache()
    # Experts that the tokens of a page went to, where that is recorded. What
    # decoding writes has no such entry, so nobody may find it.
    self._records = engine.config.moe.replay
    self._routing: dict[tuple[int, int], np.ndarray] = {}  # by shard, page

  def __getitem__(self, slot: int) -> Running | None:
    return self.members[slot]

  def occupied(self) -> dict[int, Running]:
    """The slots that somebody is in."""
    return {s: r for s, r in enumerate(self.members) if r is not None}

  def any_occupied(self) -> bool:
    """Whether somebody is in a slot."""
    return any(r is not None for r in self.members)

  def any_active(self) -> bool:
    """Whether a slot decodes."""
    return any(r is not None and r.active for r in self.members)

  def active(self) -> np.ndarray:
    """[S] bool, which slots decode."""
    return np.array([r is not None and r.active for r in self.members])

  def any_waits(self) -> bool:
    """Whether a slot that decodes is not cached wholly yet."""
    return any(
        r is not None and r.active and self.cache[s].waits
        for s, r in enumerate(self.members)
    )

  def clear(self) -> list[Running]:
    """Empties every slot and the cache; returns who was there."""
    self.cache = self._empty_cache()
    running = [r for r in self.members if r is not None]
    self.members = [None] * len(self.members)
    return running

  def leave(self, slot: int, *, known: bool) -> Running:
    """Takes a request out of its slot.

    Args:
      slot: which; the device knows that it has ended, or hears of it before
        it decodes again.
      known: whether its pages may be found by its tokens.
    """
    running, self.members[slot] = self.members[slot], None
    known = known and running.active and not self._records
    self.cache.end(slot, running.tokens() if known else None)
    running.active = False
    return running

  def keep_routing(self, pieces: Pieces, routing: np.ndarray) -> None:
    """Keeps what experts the tokens of pieces went to, by page.

    Args:
      pieces: what was cached.
      routing: [R, T, L, k] int16.
    """
    page = self._engine.settings.page_size
    rows = len(routing) // self._engine.shards
    for row, chosen in enumerate(routing):
      start, length = pieces.starts[row], pieces.lengths[row]
      for at in range(0, length, page):
        place = int(pieces.tables[row, (start + at) // page])
        self._routing[row // rows, place] = chosen[at : at + page]

  def cached(self) -> list[Placed]:
    """The sequences that are cached by now and whose slots do not decode."""
    placed = []
    for whole in self.cache.ready():
      running = self.members[whole.sequence.slot]
      if self._records:
        # What is sampled from now on rests on these caches, so these are the
        # choices to replay. The last token is fed by the next step.
        shard = self.cache.shard_of(whole.sequence.slot)
        of_pages = [self._routing[shard, p] for p in whole.pages]
        cached = whole.sequence.cached
        running.routing = [np.concatenate(of_pages)[:cached]] if cached else []
      if not running.active:  # and not rebuilt in its slot
        placed.append(whole)
    return placed

  def make_room(
      self, k: int, gives_way: Callable[[Running], None]
  ) -> tuple[int, list[int]]:
    """Gives all who decode the pages for k steps more.

    When pages run out, the youngest leaves its slot.

    Args:
      k: steps.
      gives_way: called with each who left.

    Returns:
      Tokens of the longest sequence then, and the slots to release.
    """
    preempted, longest = [], 1
    for slot in self.cache.slots():
      running = self.members[slot]
      if running is None or not running.active:
        continue  # it is not whole, or has given way to one before it
      needed = min(running.length + k - 1, running.limit - 1)
      longest = max(longest, needed)
      if needed <= self.cache.holds(slot):
        continue
      while not self.cache.grow(slot, needed):
        youngest = self.cache.youngest(slot)
        if self.members[youngest].active:
          preempted.append(youngest)
        gives_way(self.leave(youngest, known=True))
        if youngest == slot:
          break
    return longest, preempted

  def _empty_cache(self) -> SlotCache:
    engine = self._engine
    return SlotCache(
        engine.settings,
        exact=self._exact,
        shards=engine.shards,
        alone=lambda bucket: engine.programs.ready(
            ('extend', engine.shards, bucket)
        ),
    )
