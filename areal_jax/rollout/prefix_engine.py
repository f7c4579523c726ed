"""Whole prompts, cached by themselves and then put into slots.

What lives here: `PrefixEngine`, the way in which JetStream's orchestrator works
an engine: it prefills a prompt, inserts the result into a slot and takes single
decode steps. Method names and the meaning of their arguments are those of
`jetstream.engine.engine_api.Engine` (google-jetstream 0.2.2), without its
import, which loads TensorFlow. Training has no use for it: `loop` caches the
pieces of sequences where they stay.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models import paged_attention, transformer
from areal_jax.rollout.decode_state import DecodeState, Prefix, StepResult
from areal_jax.rollout.engine import Engine, sends
from areal_jax.rollout.engine_plan import LaidOut
from areal_jax.rollout.engine_programs import (
    abstract,
    integers,
    placed_shapes,
)
from areal_jax.telemetry.programs import Compile, Name
from areal_jax.types import Request

Params = Any
P = jax.sharding.PartitionSpec


class PrefixEngine:
  """An engine that is worked prompt by prompt.

  Args:
    engine: what holds the slots and decodes.
  """

  def __init__(self, engine: Engine):
    self.engine = engine
    jitted = engine.jitted
    self._bodies = jitted.bodies
    cut, parts = jitted.by_slot.spec, jitted.state_parts
    self._prefill = jax.jit(self._prefill_program)
    self._insert = jax.jit(
        jitted.bodies.by_shard(
            self._insert_program, (P(), parts, cut, cut), parts
        ),
        donate_argnames='state',
        out_shardings=jitted.state_shardings,
    )

  def compile_ahead(self, like: Params) -> None:
    """Begins to compile every program that JetStream can need, and returns.

    Slots decode on pages of their own, so page tables have one width.

    Args:
      like: the weights to come, or `jax.ShapeDtypeStruct`s with shardings.
    """
    s, jitted = self.engine.settings, self.engine.jitted
    laid_out = LaidOut(jitted, jax.tree.map(abstract, like))
    first, *more = (self._planned(laid_out, b) for b in s.prefill_buckets)
    decode = laid_out.generate(self.engine.share.slots, s.live_buckets[-1])
    self.engine.programs.plan([*laid_out.first(), first, decode, *more])

  def _planned(self, laid_out: LaidOut, bucket: int) -> tuple[Name, Compile]:
    """`prefill` of a bucket, with `insert` of what it gives."""
    engine, jitted = self.engine, self.engine.jitted

    def compile_() -> None:
      compiled = self._prefill.lower(
          laid_out.weights, integers(bucket), integers()
      ).compile()
      self._insert.lower(
          placed_shapes(compiled.out_info, compiled.output_shardings),
          jitted.abstract_state,
          jitted.abstract_settings(engine.share.slots),
          integers(engine.settings.slots, engine.settings.pages_per_slot),
      ).compile()

    return ('prefill', bucket), compile_

  def prefill(
      self,
      *,
      params: Params,
      padded_tokens: np.ndarray,
      true_length: int,
  ) -> Prefix:
    """Caches a prompt once, for any number of slots.

    Args:
      params: weights of the version to prefill with.
      padded_tokens: [T] int32, T one of `prefill_buckets`.
      true_length: tokens that are meant.

    Raises:
      ValueError: T is no bucket, or the length is not in 1..T.
    """
    padded = len(padded_tokens)
    if padded not in self.engine.settings.prefill_buckets:
      raise ValueError(
          f'prompt padded to {padded}, wanted one of'
          f' {self.engine.settings.prefill_buckets}'
      )
    if not 1 <= true_length <= padded:
      raise ValueError(f'true_length is {true_length}, wanted 1..{padded}')
    self.engine.programs.wait(('prefill', padded))
    with sends():
      return self._prefill(
          params, np.asarray(padded_tokens, np.int32), np.int32(true_length)
      )

  def insert(
      self, prefix: Prefix, decode_state: DecodeState, slot: int,
      request: Request,
  ) -> DecodeState:  # fmt: skip
    """Puts a prefix into one slot."""
    return self.insert_many(prefix, decode_state, [slot], [request])

  def insert_many(
      self,
      prefix: Prefix,
      state: DecodeState,
      slots: Sequence[int],
      requests: Sequence[Request],
  ) -> DecodeState:
    """Puts one prefix into several slots, each with pages of its own."""
    s, rows = self.engine.share, self.engine.jitted.rows
    settings = rows.settings_of(slots, requests, s.slots)
    where = np.full(
        (self.engine.settings.slots, s.pages_per_slot), s.total_pages, np.int32
    )
    (part,) = rows.by_calls(slots, s.slots)
    where[list(part.values())] = self.engine.own_tables()[list(slots)]
    with sends():
      return self._insert(prefix, state, vars(settings), where)

  def generate(
      self, params: Params, decode_state: DecodeState
  ) -> tuple[DecodeState, StepResult]:
    """Runs one decode step of all slots."""
    return self.engine.generate_steps(params, decode_state, 1)

  def _prefill_program(self, params, padded_tokens, true_length):
    (keys, values), experts = transformer.prefill_routed(
        self.engine.config,
        params,
        padded_tokens[None],
        true_length[None],
        mesh=self.engine.mesh,
        rules=self.engine.rules,
    )
    routing = self._bodies.recorded(experts)
    return Prefix(keys[:, 0], values[:, 0], padded_tokens, true_length, routing)

  def _insert_program(self, prefix, state, settings, tables):
    page = self._bodies.settings.page_size
    pages = prefix.ids.shape[0] // page

    def paged(x):  # [L, T, K, H] -> [L, pages, page, K, H]
      return x.reshape(x.shape[0], pages, page, *x.shape[2:])

    def put(i, cache):
      where = tables[i, :pages]
      return tuple(
          x.at[:, where].set(
              paged_attention.as_cached(paged(new), x), mode='drop'
          )
          for x, new in zip(cache, (prefix.keys, prefix.values))
      )

    count = (settings['slots'] < len(state.length)).sum()
    cache = jax.lax.fori_loop(0, count, put, (state.keys, state.values))
    state = dataclasses.replace(state, keys=cache[0], values=cache[1])
    row = jnp.zeros(state.history.shape[1], jnp.int32)
    row = row.at[: prefix.ids.shape[0]].set(prefix.ids)
    rows = len(settings['slots'])
    lengths = jnp.broadcast_to(prefix.length, (rows,))
    history = jnp.broadcast_to(row, (rows, len(row)))
    return self._bodies.occupied(state, settings, history, lengths, lengths)
