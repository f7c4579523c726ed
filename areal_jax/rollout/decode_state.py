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

import jax
import numpy as np

from areal_jax.rollout import sampling

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
  """What up to k decode steps brought, slot by slot."""

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
