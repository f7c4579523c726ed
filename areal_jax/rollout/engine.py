"""The decode engine: one policy on one rollout mesh, S slots side by side.

What lives here: `Engine`, which calls the programs (`decode_programs` has what
they compute). Requests, tokens and page tables go in from the host; a decode
state is passed on from call to call; what a dispatch brought comes out. The
weights are always an argument, so the same engine serves any version. Who asks,
which pages are whose, when weights change and who gets the answer is left to
`loop` and `cache`.

The cache always lacks the last token of a slot, and the next decode step feeds
it at its own position. So every sampled token comes out of one decode program,
the samples of a problem share what is cached of it, and after new weights a
slot is whole again once its cache is rebuilt.
"""

from __future__ import annotations

import contextlib
from typing import Any, Sequence

import jax
import numpy as np

from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.rollout import engine_plan
from areal_jax.rollout.decode_state import DecodeState, Pieces, StepResult
from areal_jax.rollout.engine_programs import (
    INIT,
    LAY_OUT,
    OCCUPY,
    RELEASE,
    EnginePrograms,
    abstract,
    extend_name,
    generate_name,
    prompt_logps_name,
)
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.telemetry.programs import Programs
from areal_jax.types import Request

Array = jax.Array
Params = Any


class Engine:
  """Programs for one model on one rollout mesh.

  Args:
    config: the model.
    settings: static shapes.
    mesh: rollout mesh with the axes that `rules` names.
    rules: logical to mesh axes.

  Attributes:
    jitted: the programs, and the same from shapes alone.
    shards: D, data shards.
    share: the shapes of one of them; `settings` if there is no other.

  Raises:
    ConfigError: settings that do not divide over the shards.
  """

  def __init__(
      self,
      config: ModelConfig,
      settings: EngineSettings,
      mesh: jax.sharding.Mesh,
      rules: Rules,
  ):
    self.config = config
    self._possible_ids = config.possible_ids
    self.settings = settings
    self.mesh = mesh
    self.rules = rules
    self.shards = rules.parts('slots', mesh)
    settings.check_shards(self.shards, 'config.rollout.engine')
    jitted = self.jitted = EnginePrograms(config, settings, mesh, rules)
    self.share = jitted.share
    self.param_shardings = jitted.param_shardings
    self.state_shapes = jitted.state_shapes
    self.state_shardings = jitted.state_shardings
    self.programs = Programs()
    self._planned_for: tuple[Any, ...] | None = None

  def init_decode_state(self) -> DecodeState:
    """A state in which no slot is active."""
    self.programs.wait(INIT)
    return self.jitted.init()

  def abstract_weights(self, dtype: str = '') -> Params:
    """Weights of this engine as shapes with shardings, for `compile_ahead`.

    Args:
      dtype: of the floating ones; empty for the policy's own.
    """
    return self.jitted.abstract_weights(dtype)

  def lay_out(self, params: Params) -> Params:
    """Weights in the form that every dispatch reads fastest.

    All methods take either form; each has programs of its own, and those of
    this one are compiled ahead of time. See `parameters.layers_apart`.
    """
    if not self.jitted.apart:
      return params
    self.programs.wait(LAY_OUT)
    with sends():
      return self.jitted.laid_out(params, self.jitted.cut)

  def check(self, request: Request) -> None:
    """Refuses a request that these shapes cannot serve.

    Raises:
      ValueError: the prompt, the answer or the stop ids do not fit, or the
        engine was not built for how it samples.
    """
    prompt, new = len(request.prompt_ids), request.sampling.max_new_tokens
    s = self.settings
    if not 1 <= prompt <= s.max_prompt_length:
      raise ValueError(
          f'request {request.request_id}: prompt of {prompt} tokens, wanted'
          f' 1..{s.max_prompt_length}'
      )
    if prompt + new > s.max_length:
      raise ValueError(
          f'request {request.request_id}: {prompt} prompt + {new} new tokens,'
          f' wanted at most {s.max_length} together'
      )
    if len(request.sampling.stop_ids) > s.max_stop_ids:
      raise ValueError(
          f'request {request.request_id}: {len(request.sampling.stop_ids)} stop'
          f' ids, wanted at most {s.max_stop_ids}'
      )
    refusal = s.sampling.refusal(request.sampling, self.config.vocab_size)
    if refusal:
      raise ValueError(f'request {request.request_id}: {refusal}')
    biased = [token for token, _ in request.sampling.logit_bias]
    absent = [token for token in biased if not self._possible_ids[token]]
    if absent:
      raise ValueError(
          f'request {request.request_id}: sampling.logit_bias names ids'
          f' {absent}, wanted ids that the tokenizer has'
      )

  def pad_prompt(self, ids: Sequence[int]) -> np.ndarray:
    """The prompt in the smallest bucket that holds it."""
    fits = [b for b in self.settings.prefill_buckets if b >= len(ids)]
    if not fits:
      raise ValueError(
          f'prompt of {len(ids)} tokens, wanted at most'
          f' {self.settings.max_prompt_length}'
      )
    padded = np.zeros(fits[0], np.int32)
    padded[: len(ids)] = ids
    return padded

  def own_tables(self) -> np.ndarray:
    """[S, pages a slot] int32: tables of slots that share nothing.

    Raises:
      ValueError: there are fewer pages than that takes.
    """
    s = self.share
    pages = s.slots * s.pages_per_slot
    if pages > s.total_pages:
      raise ValueError(
          f'{s.slots} slots with pages of their own need {pages} pages, the'
          f' cache has {s.total_pages}'
      )
    own = np.arange(pages, dtype=np.int32).reshape(s.slots, -1)
    return np.tile(own, (self.shards, 1))

  def extend(
      self, params: Params, state: DecodeState, pieces: Pieces
  ) -> tuple[DecodeState, Array | None]:
    """Caches pieces of sequences, each behind what is cached of it already.

    Pages that a piece begins are written whole; those before are read.

    Args:
      params: weights to compute with.
      state: the decode state; no slot of it changes.
      pieces: T one of `piece_buckets`, of each data shard 1 row or as many as
        that bucket has.

    Returns:
      The state, and [R, T, L, k] int16 the experts that the tokens went to;
      None where choices are not recorded.
    """
    self.programs.wait(extend_name(pieces))
    with sends():
      return self.jitted.extend(params, state, vars(pieces))

  def occupy(
      self,
      state: DecodeState,
      slots: Sequence[int],
      requests: Sequence[Request],
      tokens: Sequence[np.ndarray],
      copies: Sequence[tuple[int, int] | None] | None = None,
  ) -> DecodeState:
    """Lets slots go on with sequences whose tokens but the last are cached.

    Args:
      state: the decode state.
      slots: which slots.
      requests: what is asked of each.
      tokens: [n] of each: its prompt, and what it has answered before.
      copies: (from page, to page) to copy for each before, of its own shard;
        None for nothing.
    """
    s = self.share
    rows, nowhere = s.occupy_rows, s.total_pages
    total = self.shards * rows
    self.programs.wait(OCCUPY)
    for part in self.jitted.rows.by_calls(slots, rows):
      settings = self.jitted.rows.settings_of(
          [slots[i] for i in part], [requests[i] for i in part], rows
      )
      history = np.zeros((total, s.pages_per_slot * s.page_size), np.int32)
      lengths, prompts = np.ones((2, total), np.int32)
      pages = np.full((total, 2), nowhere, np.int32)
      for i, row in part.items():
        history[row, : len(tokens[i])] = tokens[i]
        lengths[row] = len(tokens[i])
        prompts[row] = len(requests[i].prompt_ids)
        if copies is not None and copies[i] is not None:
          pages[row] = copies[i]
      # Not `asdict`, which copies every array.
      with sends():
        state = self.jitted.occupy(
            state, vars(settings), history, lengths, prompts, pages
        )
    return state

  def generate_steps(
      self,
      params: Params,
      state: DecodeState,
      k: int,
      tables: np.ndarray | None = None,
      slots: np.ndarray | None = None,
  ) -> tuple[DecodeState, StepResult]:
    """Runs up to k decode steps in one dispatch; ends when no slot is active.

    With `slots`, the others stand still, and S is R in what is returned.

    Args:
      params: weights to decode with.
      state: the decode state.
      k: steps.
      tables: [S, P] pages of all slots, P one of `live_buckets`, with those
        that these steps write; None for pages of their own.
      slots: [R] int32 slots, each once, with all active ones; of each data
        shard as many, one of its `decode_rows`, and tables [R, P]. None for
        all.

    Raises:
      ValueError: k is not in 1..settings.steps.
    """
    if not 1 <= k <= self.settings.steps:
      raise ValueError(f'k is {k}, wanted 1..{self.settings.steps}')
    if tables is None:
      tables = self.own_tables()
    if slots is not None:
      slots = slots % self.share.slots
    self.programs.wait(generate_name(*tables.shape))
    with sends():
      return self.jitted.generate(params, state, tables, np.int32(k), slots)

  def prompt_logps(
      self, params: Params, padded_tokens: np.ndarray, true_length: int
  ) -> Array:
    """[T] float32 nats, raw log-probs of a prompt's tokens, 0 for the first.

    Args:
      params: the weights.
      padded_tokens: [T] int32, T one of `prefill_buckets`.
      true_length: tokens that are meant; what is behind them is 0.
    """
    self.programs.wait(prompt_logps_name(padded_tokens))
    with sends():
      return self.jitted.prompt_logps(
          params, padded_tokens, np.int32(true_length)
      )

  def rebuild(
      self, params: Params, state: DecodeState, slots: Sequence[int]
  ) -> DecodeState:
    """Recomputes the caches of slots that have pages of their own.

    Args:
      params: the weights that go on with these slots.
      state: the decode state.
      slots: which slots.
    """
    history, lengths = jax.device_get((state.history, state.length))
    tables = self.own_tables()
    for slot in slots:
      tokens = history[slot, : lengths[slot]]
      state = self.extend_whole(
          params, state, tokens, tables[slot], slot // self.share.slots
      )
    return state

  def extend_whole(
      self,
      params: Params,
      state: DecodeState,
      tokens: np.ndarray,
      table: np.ndarray,
      shard: int = 0,
  ) -> DecodeState:
    """Caches one sequence but its last token, by itself, piece by piece.

    Args:
      params: weights to compute with.
      state: the decode state.
      tokens: [n] int32.
      table: [pages a slot] int32, pages to cache it on.
      shard: data shard whose pages they are.
    """
    s = self.share
    for start in range(0, len(tokens) - 1, s.longest_piece):
      length = min(s.longest_piece, len(tokens) - 1 - start)
      bucket = s.piece_bucket(length)
      rows = s.rows_for(0, bucket)
      row = shard * rows
      ids = np.zeros((self.shards * rows, bucket), np.int32)
      ids[row, :length] = tokens[start : start + length]
      starts, lengths = np.zeros((2, len(ids)), np.int32)
      starts[row], lengths[row] = start, length
      tables = np.zeros((len(ids), s.pages_per_slot), np.int32)
      tables[row] = table
      pieces = Pieces(ids, starts, lengths, tables)
      state, _ = self.extend(params, state, pieces)
    return state

  def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
    """Ends slots whose requests nobody waits for any more."""
    ended = np.zeros(self.settings.slots, bool)
    ended[list(slots)] = True
    self.programs.wait(RELEASE)
    with sends():
      return self.jitted.release(state, ended)

  def compile_ahead(self, like: Params, *, exact: bool = False) -> None:
    """Begins to compile every program that a run can need, and returns.

    It goes on in one thread, in the order of need, with programs for short
    sequences first; nothing is computed and no state is made for it. A call of
    a program waits for that one alone.

    Args:
      like: the weights to come, or `jax.ShapeDtypeStruct`s with shardings.
      exact: whether only loops that are `exact` will use it, which take
        sequences one by one and decode with the widest page tables.
    """
    weights = jax.tree.map(abstract, like)
    asked = (*jax.tree.flatten(weights), exact)
    if asked == self._planned_for:
      return
    if self._planned_for is not None:
      self.programs.wait_for_all()
    self._planned_for = asked
    self.programs.plan(**engine_plan.plan(self.jitted, weights, exact))

  def warm_up(self, params: Params) -> None:
    """Compiles every program that a run can need, and waits for all of them.

    Args:
      params: like the weights to come; see `compile_ahead`.

    Raises:
      Exception: what the compilation of one of them raised.
    """
    self.compile_ahead(params)
    self.programs.wait_for_all()


def sends() -> contextlib.AbstractContextManager:
  """Permits host-to-device transfer of a program's arguments.

  A loop may refuse all else that is sent (`jax.transfer_guard`). A program
  takes its arguments along in 20 us; `device_put` ahead of it needs 107.
  """
  return jax.transfer_guard_host_to_device('allow')
