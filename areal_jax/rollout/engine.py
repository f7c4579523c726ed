"""The decode engine: one policy on one rollout mesh, S slots side by side.

What lives here: the jitted programs (extend, occupy, generate, release, and
for JetStream prefill and insert) and the decode state that they pass on. The
state holds everything that a slot needs to go on: its tokens, its sampling
settings, its random stream, its limit; and the pages of the cache. `params` is
always an argument, so the same engine serves any version. Who asks, which pages
are whose, when weights change and who gets the answer is left to `loop.py` and
`cache.py`.

Method names and the meaning of their arguments are those of
`jetstream.engine.engine_api.Engine` (google-jetstream 0.2.2), without its
import, which loads TensorFlow; `extend`, `occupy`, `insert_many`,
`generate_steps`, `rebuild` and `release` are ours.

Four facts hold the design together:

* The cache always lacks the last token of a slot. What stands before it is
  cached, and the next decode step feeds the last token, at its own position. So
  every sampled token, the first one too, comes out of the one decode program,
  the G samples of a problem share what is cached of it, and after new weights a
  slot is whole again once its cache is rebuilt: no logits have to be kept.
* A slot is not a cache address. Logical position p of slot s lives on page
  `tables[s, p // page_size]`. Tables are the caller's and come with each call,
  as wide as the longest live sequence needs, so that attention costs by that
  and not by the capacity. Without one every slot has pages of its own, side by
  side.
* Whatever fills the cache, a prompt, a piece of one, a sequence that was pushed
  out, or all of them anew under new weights, is the one program `extend`.
* Over the data axis of a mesh slots and pages are cut into shards that have
  nothing to say to each other: shard d of D has the slots from d · S / D on,
  and a pool of pages of its own, which tables count from 0. Each runs the
  programs below by itself, as if it were all there is. Arrays of slots have
  those of the first shard first, and so have arrays of rows.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules, mesh_axes
from areal_jax.models import paged_attention, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.moe import UNKNOWN
from areal_jax.rollout import sampling
from areal_jax.rollout.decode_state import (
    DecodeState,
    Pieces,
    Prefix,
    SlotSettings,
    StepResult,
    of_slots,
    with_slots,
)
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.telemetry.programs import Compile, Name, Programs
from areal_jax.types import Request, SamplingParams

Array = jax.Array
Params = Any
P = jax.sharding.PartitionSpec

# Names of the programs that have one shape each.
INIT: Name = ('init',)
LAY_OUT: Name = ('lay_out',)
OCCUPY: Name = ('occupy',)
RELEASE: Name = ('release',)

_PROMPT_LOGITS = 2**24  # most logits of a prompt that are there at once


class Engine:
  """Programs for one model on one rollout mesh.

  Args:
    config: the model.
    settings: static shapes.
    mesh: rollout mesh with the axes that `rules` names.
    rules: logical to mesh axes.

  Attributes:
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
    self.share = settings.of_shard(self.shards)
    self.param_shardings = transformer.param_shardings(config, mesh, rules)
    self.state_shapes = jax.eval_shape(self._initial_state)
    slots = rules.sharding(('slots',), (settings.slots,), mesh)
    self.state_shardings = jax.tree.map(lambda _: slots, self.state_shapes)
    cache = rules.sharding(
        transformer.CACHE_AXES[: self.state_shapes.keys.ndim],
        self.state_shapes.keys.shape,
        mesh,
    )
    self.state_shardings.keys = cache
    self.state_shardings.values = cache
    state, by_shard = self.state_shardings, self._by_shard
    # How a part is cut out of what goes by slots or rows, and of states.
    cut = slots.spec
    parts = jax.tree.map(lambda sharding: sharding.spec, state)
    parts.keys = parts.values = P(None, *cut)
    compiled = functools.partial(jax.jit, donate_argnames='state')
    self._init = jax.jit(self._initial_state, out_shardings=state)
    self._apart = transformer.reads_apart(config, mesh, rules)
    self._cut = jax.jit(transformer.layer_apart, static_argnums=2)
    self._prefill = jax.jit(self._prefill_program)
    self._insert = compiled(
        by_shard(self._insert_program, (P(), parts, cut, cut), parts),
        out_shardings=state,
    )
    self._generate = compiled(
        by_shard(
            self._generate_program, (P(), parts, cut, P(), cut), (parts, cut)
        ),
        out_shardings=(state, slots),
    )
    self._extend = compiled(
        by_shard(self._extend_program, (P(), parts, cut), (parts, cut)),
        out_shardings=(state, slots),
    )
    self._occupy = compiled(
        by_shard(self._occupy_program, (parts, *[cut] * 5), parts),
        out_shardings=state,
    )
    self._release = compiled(self._release_program, out_shardings=state)
    self._prompt_logps = jax.jit(self._prompt_logps_program)
    self.programs = Programs()
    self._planned_for: tuple[Any, ...] | None = None

  # The part that JetStream's orchestrator also calls.

  @property
  def max_concurrent_decodes(self) -> int:
    return self.settings.slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    return self.settings.prefill_buckets[-1]

  def init_decode_state(self) -> DecodeState:
    """A state in which no slot is active."""
    self.programs.wait(INIT)
    return self._init()

  def abstract_weights(self, dtype: str = '') -> Params:
    """Weights of this engine as shapes with shardings, for `compile_ahead`.

    Args:
      dtype: of the floating ones; empty for the policy's own.
    """
    shapes = cast_shapes(transformer.abstract_params(self.config), dtype)
    return _placed(shapes, self.param_shardings)

  def lay_out(self, params: Params) -> Params:
    """Weights in the form that every dispatch reads fastest.

    All methods take either form; each has programs of its own, and those of
    this one are compiled ahead of time. See `transformer.layers_apart`.
    """
    if not self._apart:
      return params
    self.programs.wait(LAY_OUT)
    with _sends():
      return self._laid_out(params, self._cut)

  def _laid_out(self, params: Params, cut: Callable[..., Params]) -> Params:
    return transformer.layers_apart(
        self.config, params, self.mesh, self.rules, cut
    )

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
    if padded not in self.settings.prefill_buckets:
      raise ValueError(
          f'prompt padded to {padded}, wanted one of'
          f' {self.settings.prefill_buckets}'
      )
    if not 1 <= true_length <= padded:
      raise ValueError(f'true_length is {true_length}, wanted 1..{padded}')
    self.programs.wait(('prefill', padded))
    with _sends():
      return self._prefill(
          params, np.asarray(padded_tokens, np.int32), np.int32(true_length)
      )

  def insert(
      self, prefix: Prefix, decode_state: DecodeState, slot: int,
      request: Request,
  ) -> DecodeState:  # fmt: skip
    """Puts a prefix into one slot."""
    return self.insert_many(prefix, decode_state, [slot], [request])

  def generate(
      self, params: Params, decode_state: DecodeState
  ) -> tuple[DecodeState, StepResult]:
    """One decode step of all slots."""
    return self.generate_steps(params, decode_state, 1)

  # Ours.

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
    with _sends():
      return self._extend(params, state, vars(pieces))

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
    for part in self._by_rows(slots, rows):
      settings = self._slot_settings(
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
      with _sends():
        state = self._occupy(
            state, vars(settings), history, lengths, prompts, pages
        )
    return state

  def insert_many(
      self,
      prefix: Prefix,
      state: DecodeState,
      slots: Sequence[int],
      requests: Sequence[Request],
  ) -> DecodeState:
    """Puts one prefix into several slots, each with pages of its own."""
    s = self.share
    settings = self._slot_settings(slots, requests, s.slots)
    where = np.full(
        (self.settings.slots, s.pages_per_slot), s.total_pages, np.int32
    )
    (part,) = self._by_rows(slots, s.slots)
    where[list(part.values())] = self.own_tables()[list(slots)]
    with _sends():
      return self._insert(prefix, state, vars(settings), where)

  def generate_steps(
      self,
      params: Params,
      state: DecodeState,
      k: int,
      tables: np.ndarray | None = None,
      slots: np.ndarray | None = None,
  ) -> tuple[DecodeState, StepResult]:
    """Up to k decode steps in one dispatch; ends early when no slot is active.

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
    with _sends():
      return self._generate(params, state, tables, np.int32(k), slots)

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
    with _sends():
      return self._prompt_logps(params, padded_tokens, np.int32(true_length))

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
    with _sends():
      return self._release(state, ended)

  def compile_ahead(
      self, like: Params, *, exact: bool = False, jetstream: bool = False
  ) -> None:
    """Begins to compile every program that a run can need, and returns.

    It goes on in one thread, in the order of need, with programs for short
    sequences first; nothing is computed and no state is made for it. A call of
    a program waits for that one alone.

    Args:
      like: the weights to come, or `jax.ShapeDtypeStruct`s with shardings.
      exact: whether only loops that are `exact` will use it, which take
        sequences one by one and decode with the widest page tables.
      jetstream: whether JetStream will use it and no loop: it prefills whole
        prompts by themselves and decodes with slots' own pages.
    """
    weights = jax.tree.map(_abstract, like)
    asked = (*jax.tree.flatten(weights), exact, jetstream)
    if asked == self._planned_for:
      return
    if self._planned_for is not None:
      self.programs.wait_for_all()
    self._planned_for = asked
    self.programs.plan(**self._plan(weights, exact, jetstream))

  def warm_up(self, params: Params) -> None:
    """Compiles every program that a run can need, and waits for all of them.

    Args:
      params: like the weights to come; see `compile_ahead`.

    Raises:
      Exception: what the compilation of one of them raised.
    """
    self.compile_ahead(params)
    self.programs.wait_for_all()

  def _plan(
      self, weights: Params, exact: bool = False, jetstream: bool = False
  ) -> dict[str, list[tuple[Name, Compile]]]:
    """What to compile for weights of these shapes, as `Programs.plan` takes it.

    What the first answers need comes first. Prompts that come one by one can be
    computed by the programs for several. Pieces longer than a prompt are for
    sequences whose weights are replaced, not before a first step, or whose
    pages were taken; in a loop that is exact the weights wait. What else a run
    can do without are decode steps of few slots.
    """
    s, integers, state = self.settings, _integers, self.abstract_state
    laid_out = weights

    def lay_out() -> None:
      nonlocal laid_out
      laid_out = self._compile_lay_out(weights)

    def prefill(bucket: int) -> tuple[Name, Compile]:
      def compile_() -> None:
        compiled = self._prefill.lower(
            laid_out, integers(bucket), integers()
        ).compile()
        # What is prefilled is going to be inserted.
        prefix = _placed(compiled.out_info, compiled.output_shardings)
        tables = integers(s.slots, s.pages_per_slot)
        self._insert.lower(
            prefix, state, self._abstract_settings(self.share.slots), tables
        ).compile()

      return ('prefill', bucket), compile_

    def occupy() -> None:
      rows = self.shards * self.share.occupy_rows
      self._occupy.lower(
          state,
          self._abstract_settings(self.share.occupy_rows),
          integers(rows, s.pages_per_slot * s.page_size),
          integers(rows),
          integers(rows),
          integers(rows, 2),
      ).compile()

    def release() -> None:
      ended = np.zeros(s.slots, bool)
      self._release.lower(state, _abstract(ended)).compile()

    def extend(rows: int, bucket: int) -> tuple[Name, Compile]:
      trace = lambda: self.trace_extend(laid_out, rows, bucket)
      name = ('extend', self.shards * rows, bucket)
      return name, lambda: trace().lower().compile()

    def generate(rows: int, columns: int) -> tuple[Name, Compile]:
      trace = lambda: self.trace_generate(laid_out, columns, rows)
      name = generate_name(self.shards * rows, columns)
      return name, lambda: trace().lower().compile()

    def prompt_logps(bucket: int) -> tuple[Name, Compile]:
      lower = lambda: self._prompt_logps.lower(
          laid_out, integers(bucket), integers()
      )
      return ('prompt_logps', bucket), lambda: lower().compile()

    columns = s.live_buckets[-1:] if exact else s.live_buckets
    pieces = [
        (rows, bucket)
        for bucket in s.piece_buckets
        for rows in sorted(  # many first: a run begins with many prompts
            {1} if exact else {s.rows_for(0, bucket), s.piece_rows(bucket)},
            reverse=True,
        )
    ]
    plan = [(INIT, lambda: self._init.lower().compile())]
    if self._apart:
      plan.append((LAY_OUT, lay_out))
    if jetstream:
      first, *more = (prefill(bucket) for bucket in s.prefill_buckets)
      decode = generate(self.share.slots, columns[-1])
      return {'work': [*plan, first, decode, *more]}
    plan += [
        extend(*pieces[0]),
        (OCCUPY, occupy),
        generate(self.share.slots, columns[0]),
        (RELEASE, release),
    ]
    longest = s.piece_bucket(min(s.max_prompt_length, s.longest_piece))
    first = [
        (rows, bucket)
        for rows, bucket in pieces[1:]
        if bucket <= longest and (exact or rows == s.piece_rows(bucket))
    ]
    plan += [extend(*shape) for shape in first]
    if s.sampling.prompt_logps:
      plan += [prompt_logps(bucket) for bucket in s.prefill_buckets]
    every, *fewer = self.share.decode_rows
    plan += [generate(every, width) for width in columns[1:]]
    others = [extend(*shape) for shape in pieces[1:] if shape not in first]
    if exact:
      kept = not s.pages  # nobody's pages are taken
      return {'work': plan, 'later' if kept else 'soon': others}
    few = [generate(rows, width) for width in columns for rows in fewer]
    return {'work': plan, 'soon': others, 'later': few}

  def _compile_lay_out(self, weights: Params) -> Params:
    """Compiles what `lay_out` calls; gives its result as shapes."""
    layers = {}  # those of one kind have one program

    def cut(blocks: Params, places: np.ndarray, join: bool) -> Params:
      if join not in layers:
        compiled = self._cut.lower(blocks, _abstract(places), join).compile()
        layers[join] = _placed(compiled.out_info, compiled.output_shardings)
      return layers[join]

    return self._laid_out(weights, cut)

  def _abstract_settings(self, rows: int) -> dict[str, Any]:
    """Settings of so many slots, as shapes."""
    request = Request('warm-up', (0,), SamplingParams(1))
    filled = self._slot_settings([0], [request], rows)
    return jax.tree.map(_abstract, vars(filled))

  # The same from shapes alone: nothing is compiled and no device used.

  def trace_extend(
      self, params: Params, rows: int, bucket: int
  ) -> jax.stages.Traced:
    """`extend` of so many rows of a bucket.

    Args:
      params: `jax.ShapeDtypeStruct`s with shardings.
      rows: of each data shard.
      bucket: T, one of `piece_buckets`.
    """
    rows *= self.shards
    pieces = Pieces(
        ids=_integers(rows, bucket),
        starts=_integers(rows),
        lengths=_integers(rows),
        tables=_integers(rows, self.settings.pages_per_slot),
    )
    return self._extend.trace(params, self.abstract_state, vars(pieces))

  def trace_generate(
      self, params: Params, columns: int, rows: int | None = None
  ) -> jax.stages.Traced:
    """`generate_steps` with tables of so many columns.

    Args:
      params: `jax.ShapeDtypeStruct`s with shardings.
      columns: one of `live_buckets`.
      rows: of each data shard, one of its `decode_rows`; None for all slots.
    """
    every = self.settings.slots
    rows = every if rows is None else self.shards * rows
    return self._generate.trace(
        params,
        self.abstract_state,
        _integers(rows, columns),
        _integers(),
        None if rows == every else _integers(rows),
    )

  @property
  def abstract_state(self) -> DecodeState:
    """Shapes and shardings of a decode state."""
    return _placed(self.state_shapes, self.state_shardings)

  # The programs, but for the first each as one data shard runs it.

  def _by_shard(self, program: Any, takes: Any, gives: Any) -> Any:
    """A program over arrays of all shards, from one over those of a shard.

    The other mesh axes are left to the compiler, as they are without shards. So
    is nothing along this one: no collective is needed, and none can arise.

    Args:
      program: it.
      takes: for each argument how a shard's part of it is cut out.
      gives: the same for what it returns.
    """
    if self.shards == 1:
      return program
    return jax.shard_map(
        program,
        mesh=self.mesh,
        in_specs=takes,
        out_specs=gives,
        axis_names=set(mesh_axes(self.rules.slots)),
        # Loops begin with constants, which are alike on all shards.
        check_vma=False,
    )

  def _inside(self) -> dict[str, Any]:
    """Mesh and rules in a program that a shard runs by itself."""
    if self.shards == 1:
      return dict(mesh=self.mesh, rules=self.rules)
    return dict(
        mesh=jax.sharding.get_abstract_mesh(),
        rules=self.rules.inside(mesh_axes(self.rules.slots)),
    )

  def _initial_state(self) -> DecodeState:
    c, s = self.config, self.settings
    slots, capacity = s.slots, s.pages_per_slot * s.page_size
    keys, values = (
        jnp.zeros(x.shape, x.dtype)
        for x in transformer.cache_shapes(
            c,
            self.shards * self.share.total_pages,
            s.page_size,
            mesh=self.mesh,
            rules=self.rules,
        )
    )
    integers = functools.partial(jnp.zeros, dtype=jnp.int32)
    return DecodeState(
        keys=keys,
        values=values,
        history=integers((slots, capacity)),
        length=jnp.ones((slots,), jnp.int32),
        prompt_length=jnp.ones((slots,), jnp.int32),
        limit=integers((slots,)),
        minimum=integers((slots,)),
        choice=jax.tree.map(
            jnp.asarray, sampling.choice_of(s.sampling, slots, ())
        ),
        stop_ids=jnp.full((slots, s.max_stop_ids), -1, jnp.int32),
        streams=jnp.zeros((slots, 2), jnp.uint32),
        active=jnp.zeros((slots,), bool),
    )

  def _prefill_program(self, params, padded_tokens, true_length):
    (keys, values), experts = transformer.prefill_routed(
        self.config,
        params,
        padded_tokens[None],
        true_length[None],
        mesh=self.mesh,
        rules=self.rules,
    )
    routing = self._recorded(experts)
    return Prefix(keys[:, 0], values[:, 0], padded_tokens, true_length, routing)

  def _recorded(self, experts: Array | None) -> Array | None:
    """[L, M, k] choices as [M, L, k], if they are to be replayed."""
    if not self.config.moe.replay:
      return None
    return jnp.swapaxes(experts, 0, 1).astype(jnp.int16)

  def _insert_program(self, prefix, state, settings, tables):
    page = self.settings.page_size
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
    return self._occupied(state, settings, history, lengths, lengths)

  def _extend_program(self, params, state, pieces):
    page, nowhere = self.share.page_size, self.share.total_pages
    starts, lengths = pieces['starts'], pieces['lengths']
    before = transformer.Prefix(
        state.keys, state.values, pieces['tables'], starts
    )
    (keys, values), experts = transformer.prefill_routed(
        self.config,
        params,
        pieces['ids'],
        lengths,
        before,
        **self._inside(),
    )  # [L, R, T, K, H]
    places = jnp.arange(0, pieces['ids'].shape[1], page)
    columns = (starts[:, None] + places) // page
    where = jnp.take_along_axis(pieces['tables'], columns, axis=1, mode='clip')
    where = jnp.where(places < lengths[:, None], where, nowhere).reshape(-1)

    def paged(x):
      return x.reshape(x.shape[0], len(where), page, *x.shape[3:])

    routing = self._recorded(experts)
    if routing is not None:
      routing = routing.reshape(*pieces['ids'].shape, *routing.shape[1:])
    keys, values = (
        x.at[:, where].set(
            paged_attention.as_cached(paged(new), x), mode='drop'
        )
        for x, new in ((state.keys, keys), (state.values, values))
    )
    return dataclasses.replace(state, keys=keys, values=values), routing

  def _occupy_program(self, state, settings, history, lengths, prompts, copies):
    def copy(i, cache):
      source, target = copies[i]
      return tuple(
          x.at[:, target].set(x[:, source], mode='drop') for x in cache
      )

    count = (settings['slots'] < len(state.length)).sum()
    cache = jax.lax.fori_loop(0, count, copy, (state.keys, state.values))
    state = dataclasses.replace(state, keys=cache[0], values=cache[1])
    return self._occupied(state, settings, history, lengths, prompts)

  def _occupied(self, state, settings, history, lengths, prompts):
    """The state with M slots' own entries; [M, C], [M], [M]."""
    changes = dict(
        history=history,
        length=lengths,
        prompt_length=prompts,
        limit=prompts + settings['new_tokens'],
        minimum=prompts + settings['min_new_tokens'],
        choice=settings['choice'],
        stop_ids=settings['stop_ids'],
        streams=jax.vmap(sampling.stream_key)(settings['words']),
        active=jnp.ones(lengths.shape, bool),
    )
    slots = settings['slots']
    held = {name: getattr(state, name) for name in changes}
    put = lambda x, given: x.at[slots].set(given, mode='drop')
    return dataclasses.replace(state, **jax.tree.map(put, held, changes))

  def _generate_program(self, params, state, tables, k, slots=None):
    """Of all slots, or of `slots` [R], whose tables then are [R, P]."""
    c, most, at = self.config, self.settings.steps, self._inside()
    params = transformer.layers_apart(c, params, **at)
    vocabulary = jnp.arange(c.padded_vocab_size)
    features = self.settings.sampling
    whole = state
    if slots is not None:
      state = of_slots(state, slots)
    rows = len(state.length)
    everyone = jnp.arange(rows)
    blank = StepResult(
        drawn=sampling.blank(features, rows, most),
        valid=jnp.zeros((rows, most), bool),
        active=state.active,
        stopped=jnp.zeros((rows,), bool),
        steps=jnp.int32(0),
        routing=self._blank_routing(rows),
    )

    counts = sampling.count(
        state.choice,
        state.history,
        state.prompt_length,
        state.length,
        state.active,
        c.padded_vocab_size,
    )

    def more(carry):
      state, result, _ = carry
      return (result.steps < k) & state.active.any()

    def step(carry):
      state, result, counts = carry
      i, position = result.steps, state.length - 1
      (logits, keys, values), experts = transformer.decode_routed(
          c,
          params,
          state.history[everyone, position],
          position,
          state.keys,
          state.values,
          tables,
          state.active,
          **at,
      )
      early = state.length < state.minimum
      forbidden = jax.lax.cond(
          early.any(),
          lambda: early[:, None]
          & (state.stop_ids[:, :, None] == vocabulary).any(1),
          lambda: jnp.zeros(logits.shape, bool),
      )
      drawn = sampling.sample(
          logits,
          state.streams,
          state.length,
          state.choice,
          forbidden=forbidden,
          active=state.active,
          counts=counts,
          most_top_logps=features.max_top_logps,
      )
      tokens, drew = drawn.tokens, state.active
      # Slots that draw nothing write outside the array, which drops it.
      place = jnp.where(drew, state.length, state.history.shape[1])
      history = state.history.at[everyone, place].set(tokens, mode='drop')
      length = state.length + drew
      stop = drew & (tokens[:, None] == state.stop_ids).any(-1)
      active = drew & ~stop & (length < state.limit)
      routing = result.routing
      if routing is not None:
        routing = routing.at[:, i].set(self._recorded(experts))
      result = StepResult(
          drawn=jax.tree.map(
              lambda all_steps, one: all_steps.at[:, i].set(one),
              result.drawn,
              drawn,
          ),
          valid=result.valid.at[:, i].set(drew),
          active=active,
          stopped=result.stopped | stop,
          steps=i + 1,
          routing=routing,
      )
      state = dataclasses.replace(
          state,
          keys=keys,
          values=values,
          history=history,
          length=length,
          active=active,
      )
      return state, result, sampling.counted(counts, tokens, drew)

    state, result, _ = jax.lax.while_loop(more, step, (state, blank, counts))
    if slots is not None:
      state = with_slots(whole, slots, state)
    return state, dataclasses.replace(result, steps=result.steps[None])

  def _blank_routing(self, rows: int) -> Array | None:
    c, s = self.config, self.settings
    if not c.moe.replay:
      return None
    shape = (rows, s.steps, *c.routing_shape)
    return jnp.full(shape, UNKNOWN, jnp.int16)

  def _prompt_logps_program(self, params, padded_tokens, true_length):
    at = dict(mesh=self.mesh, rules=self.rules)
    size = len(padded_tokens)
    meant = (jnp.arange(size) < true_length).astype(jnp.int32)[None]
    ids = padded_tokens[None]
    states = transformer.hidden(
        self.config, params, ids, jnp.arange(size)[None], meant, **at
    )
    logps, _ = logprobs.masked_logps(
        lambda x: transformer.unembed(self.config, params, x, **at),
        states,
        ids,
        meant,
        jnp.ones(ids.shape, jnp.float32),
        meant,
        # The logits of a long prompt are never all there.
        chunk=max(1, _PROMPT_LOGITS // self.config.padded_vocab_size),
    )
    return logps[0]

  def _release_program(self, state, ended):
    return dataclasses.replace(state, active=state.active & ~ended)

  def _slot_settings(
      self, slots: Sequence[int], requests: Sequence[Request], rows: int
  ) -> SlotSettings:
    """The settings of requests, of each data shard at most `rows`."""
    if len(slots) != len(requests) or not slots:
      raise ValueError(
          f'{len(requests)} requests for {len(slots)} slots, wanted as many,'
          ' 1 or more'
      )
    places, *more = self._by_rows(slots, rows)
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

  def _by_rows(self, slots: Sequence[int], rows: int) -> list[dict[int, int]]:
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


def _sends() -> contextlib.AbstractContextManager:
  """Around a program that takes numpy arrays: here they are meant to be sent.

  A loop may refuse all else that is sent (`jax.transfer_guard`). A program
  takes its arguments along in 20 us; `device_put` ahead of it needs 107.
  """
  return jax.transfer_guard_host_to_device('allow')


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def cast_shapes(shapes: Any, dtype: str) -> Any:
  """Shapes, the floating ones in another dtype, if there is one."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
      if dtype and jnp.issubdtype(x.dtype, jnp.floating)
      else x,
      shapes,
  )


def extend_name(pieces: Pieces) -> Name:
  """The program that caches pieces of this shape."""
  return ('extend', *pieces.ids.shape)


def generate_name(rows: int, columns: int) -> Name:
  """The program that decodes so many slots over page tables of this width."""
  return ('generate', rows, columns)


def prompt_logps_name(padded_tokens: np.ndarray) -> Name:
  """The program for prompts that are padded to this length."""
  return ('prompt_logps', len(padded_tokens))


def _placed(shapes: Any, shardings: Any) -> Any:
  """Shapes with shardings."""
  return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=sharding
      ),
      shapes,
      shardings,
  )


def _abstract(x: Any) -> jax.ShapeDtypeStruct:
  """An argument as its program is compiled for it.

  One that is on the host, or committed to no device, comes without a sharding:
  it goes where the others are.
  """
  placed = getattr(x, 'committed', hasattr(x, 'sharding'))
  sharding = x.sharding if placed else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
