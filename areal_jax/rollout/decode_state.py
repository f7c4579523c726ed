"""The state of the decode slots, and what goes into it and comes out.

What lives here: `DecodeState`, all that S slots need to go on; what is sent to
them (`Pieces` of sequences to cache, `SlotSettings` of requests, the `Prefix`
of a prompt) and what a dispatch brings back (`StepResult`). They hold arrays
and do no work. Arrays of slots, pages or rows have those of the first data
shard first.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Sequence

import jax
import numpy as np

from areal_jax.rollout import sampling
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.types import Request

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['keys', 'values', 'ids', 'length', 'routing'],
    meta_fields=[],
)
@dataclasses.dataclass
class Prefix:
  """A prompt's cache entries, to be inserted into any number of slots."""

  keys: Array  # [L, T, K, H] of the compute dtype, positions encoded
  values: Array  # [L, T, K, H]
  ids: Array  # [T] int32, padded prompt
  length: Array  # [] int32, true length
  routing: Array | None = None  # [T, L, k] int16 experts, where recorded


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class DecodeState:
  """All that S slots need to go on. C = pages a slot times page size.

  Slots and pages are those of all data shards, the first one's first.
  """

  keys: Array  # [L, pages, page_size, K, H]; see transformer.cache_shapes
  values: Array  # [L, pages, page_size, K, H]
  history: Array  # [S, C] int32, prompt and answer so far
  length: Array  # [S] int32, tokens in history; the last one is not cached
  prompt_length: Array  # [S] int32
  limit: Array  # [S] int32, length at which the slot ends
  minimum: Array  # [S] int32, length before which stop ids are impossible
  choice: sampling.Choice  # how each slot chooses its tokens
  stop_ids: Array  # [S, E] int32, -1 where unused
  streams: Array  # [S, 2] uint32
  active: Array  # [S] bool


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class StepResult:
  """The result of up to k decode steps, slot by slot."""

  drawn: sampling.Drawn  # of [S, k]
  valid: Array  # [S, k] bool, whether the slot drew this token
  active: Array  # [S] bool, after the last step
  stopped: Array  # [S] bool, ended by a stop id (and not by its limit)
  steps: Array  # [D] int32, steps really run by each data shard
  # [S, k, L, experts a token] int16, of the token that was fed, where recorded
  routing: Array | None = None

  @property
  def tokens(self) -> Array:
    """[S, k] int32."""
    return self.drawn.tokens

  @property
  def logps(self) -> Array:
    """[S, k] float32 nats, of the distribution drawn from."""
    return self.drawn.logps


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Tokens to be cached, R rows of T: each a piece of a sequence.

  Rows are those of all data shards, as many of each, the first one's first.

  Example: the tokens from 8 on of a sequence of 19, with pages of 4: start 8,
  length 11, and a table that names the pages of positions 0 to 18.
  """

  ids: np.ndarray  # [R, T] int32, padded on the right
  starts: np.ndarray  # [R] int32, cached before; whole pages
  lengths: np.ndarray  # [R] int32 tokens that are meant, 0 in unused rows
  tables: np.ndarray  # [R, pages a slot] int32


@dataclasses.dataclass(frozen=True)
class SlotSettings:
  """Per-slot settings of M requests.

  M / D of each data shard, the first one's first, of which the first ones are
  meant.
  """

  # [M] int32 of its own shard's slots; as many as there are: none is meant
  slots: np.ndarray
  new_tokens: np.ndarray  # [M] int32
  min_new_tokens: np.ndarray  # [M] int32
  choice: sampling.Choice  # of numpy arrays
  stop_ids: np.ndarray  # [M, E] int32
  words: np.ndarray  # [M, 6] uint32, see `sampling.stream_words`


def of_slots(state: DecodeState, slots: Array) -> DecodeState:
  """The state of slots [R] alone, over the cache of all."""
  own = dataclasses.replace(state, keys=None, values=None)
  own = jax.tree.map(lambda x: x[slots], own)
  return dataclasses.replace(own, keys=state.keys, values=state.values)


def with_slots(
    state: DecodeState, slots: Array, own: DecodeState
) -> DecodeState:
  """The state with what decode steps of those slots have changed."""
  put = lambda x, new: x.at[slots].set(new)
  return dataclasses.replace(
      state,
      keys=own.keys,
      values=own.values,
      history=put(state.history, own.history),
      length=put(state.length, own.length),
      active=put(state.active, own.active),
  )


class SlotRows:
  """Which row of a program call each slot has, over all data shards.

  Args:
    settings: the engine's shapes.
    shards: D, data shards.
  """

  def __init__(self, settings: EngineSettings, shards: int):
    self.settings = settings
    self.shards = shards
    self.share = settings.of_shard(shards)

  def settings_of(
      self, slots: Sequence[int], requests: Sequence[Request], rows: int
  ) -> SlotSettings:
    """The settings of requests, of each data shard at most `rows`."""
    if len(slots) != len(requests) or not slots:
      raise ValueError(
          f'{len(requests)} requests for {len(slots)} slots, wanted as many,'
          ' 1 or more'
      )
    places, *more = self.by_calls(slots, rows)
    if more:
      raise ValueError(
          f'requests for slots {list(slots)}, wanted at most {rows} of each of'
          f' {self.shards} shards'
      )
    total = self.shards * rows
    integers = functools.partial(np.zeros, dtype=np.int32)
    filled = SlotSettings(
        slots=np.full(total, self.share.slots, np.int32),
        new_tokens=integers(total),
        min_new_tokens=integers(total),
        choice=sampling.choice_of(
            self.settings.sampling, total, requests, list(places.values())
        ),
        stop_ids=np.full((total, self.settings.max_stop_ids), -1, np.int32),
        words=np.zeros((total, 6), np.uint32),
    )
    for i, slot, request in zip(places.values(), slots, requests):
      chosen = request.sampling
      filled.slots[i] = slot % self.share.slots
      filled.new_tokens[i] = chosen.max_new_tokens
      filled.min_new_tokens[i] = chosen.min_new_tokens
      filled.stop_ids[i, : len(chosen.stop_ids)] = chosen.stop_ids
      filled.words[i] = sampling.stream_words(request)
    return filled

  def by_calls(self, slots: Sequence[int], rows: int) -> list[dict[int, int]]:
    """Numbers of slots by program call, each with its row among all shards'.

    Example: two shards of 2 slots, one row of each, slots 1, 0, 3: the calls
    are {0: 0, 2: 1} and {1: 0}.
    """
    calls: list[dict[int, int]] = []
    counts = [0] * self.shards
    for i, slot in enumerate(slots):
      shard = slot // self.share.slots
      call, row = divmod(counts[shard], rows)
      counts[shard] += 1
      if call == len(calls):
        calls.append({})
      calls[call][i] = shard * rows + row
    return calls
