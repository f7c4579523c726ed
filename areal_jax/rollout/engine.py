"""The decode engine: one policy on one rollout mesh, S slots side by side.

What lives here: the jitted programs (prefill, insert, generate, rebuild,
release) and the decode state that they pass on. The state holds everything
that a slot needs to go on: its tokens, its cache pages, its sampling settings,
its random stream, its limit. `params` is always an argument, so the same
engine serves any version. Who asks, when weights change and who gets the
answer is left to `loop.py`.

Method names and the meaning of their arguments are those of
`jetstream.engine.engine_api.Engine` (google-jetstream 0.2.2), without its
import, which loads TensorFlow; `insert_many`, `generate_steps`, `rebuild` and
`release` are ours.

Two facts hold the design together:

* The cache always lacks the last token of a slot. `prefill` caches the prompt,
  and the next decode step feeds the last token again, at its own position. So
  every sampled token, the first one too, comes out of the one decode program,
  the G samples of a problem share one prefill, and after new weights a slot is
  whole again once its cache is rebuilt: no logits have to be kept.
* A slot is not a cache address. Logical position p of slot s lives on page
  `page_table[s, p // page_size]`. The table is the identity as long as nothing
  shares pages.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config import require
from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.models import transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.moe import UNKNOWN
from areal_jax.rollout import sampling
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.types import Request, SamplingParams

Array = jax.Array
Params = Any

_SMALLEST_PREFILL = 16
_PROMPT_LOGITS = 2**24  # most logits of a prompt that are there at once


@dataclasses.dataclass
class EngineSettings:
  """Shapes of one engine; every one of them is static.

  Attributes:
    slots: S, requests decoded side by side.
    max_length: longest prompt plus answer, in tokens.
    max_prompt_length: longest prompt, in tokens.
    page_size: tokens a cache page.
    steps: k, most decode steps a dispatch.
    rebuild_rows: slots whose caches one rebuild program recomputes.
    max_stop_ids: room for stop ids in each slot.
    sampling: what requests may ask of the sampler that costs something.
  """

  slots: int = 64
  max_length: int = 128
  max_prompt_length: int = 64
  page_size: int = 16
  steps: int = 8
  rebuild_rows: int = 16
  max_stop_ids: int = 4
  sampling: SamplingFeatures = dataclasses.field(
      default_factory=SamplingFeatures
  )

  def validate(self, at: str) -> None:
    for name in ('slots', 'max_length', 'max_prompt_length', 'page_size',
                 'steps', 'rebuild_rows', 'max_stop_ids'):  # fmt: skip
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    require(
        self.max_prompt_length < self.max_length,
        f'{at}.max_prompt_length',
        self.max_prompt_length,
        f'less than max_length={self.max_length}',
    )
    power = self.page_size & (self.page_size - 1) == 0
    require(power, f'{at}.page_size', self.page_size, 'a power of two')

  @property
  def pages_per_slot(self) -> int:
    return math.ceil(self.max_length / self.page_size)

  @property
  def prefill_buckets(self) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two, the last one holds any prompt."""
    capacity = self.pages_per_slot * self.page_size
    bucket = max(_SMALLEST_PREFILL, self.page_size)
    buckets = []
    while bucket < self.max_prompt_length:
      buckets.append(min(bucket, capacity))
      bucket *= 2
    return tuple(sorted({*buckets, min(bucket, capacity)}))


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
  """All that S slots need to go on. C = pages a slot times page size."""

  keys: Array  # [L, pages, page_size, K, H]
  values: Array  # [L, pages, page_size, K, H]
  page_table: Array  # [S, pages a slot] int32
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
  steps: Array  # [] int32, steps really run
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
class SlotSettings:
  """Per-slot settings of requests in the arrays that `insert_many` takes."""

  slots: np.ndarray  # [S] int32, the first `count` are meant
  count: np.ndarray  # [] int32
  new_tokens: np.ndarray  # [S] int32
  min_new_tokens: np.ndarray  # [S] int32
  choice: sampling.Choice  # of numpy arrays
  stop_ids: np.ndarray  # [S, E] int32
  words: np.ndarray  # [S, 6] uint32, see `sampling.stream_words`


class Engine:
  """Programs for one model on one rollout mesh.

  Args:
    config: the model.
    settings: static shapes.
    mesh: rollout mesh with the axes that `rules` names.
    rules: logical to mesh axes.
  """

  def __init__(
      self,
      config: ModelConfig,
      settings: EngineSettings,
      mesh: jax.sharding.Mesh,
      rules: Rules,
  ):
    self.config = config
    self.settings = settings
    self.mesh = mesh
    self.rules = rules
    self.param_shardings = transformer.param_shardings(config, mesh, rules)
    self._replicated = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec()
    )
    self.state_shapes = jax.eval_shape(self._initial_state)
    self.state_shardings = jax.tree.map(
        lambda _: self._replicated, self.state_shapes
    )
    cache = rules.sharding(
        ('layer', None, None, 'kv_heads', 'head'),
        self.state_shapes.keys.shape,
        mesh,
    )
    self.state_shardings.keys = cache
    self.state_shardings.values = cache
    state, alone = self.state_shardings, self._replicated
    compiled = functools.partial(jax.jit, donate_argnames='state')
    self._init = jax.jit(self._initial_state, out_shardings=state)
    self._prefill = jax.jit(self._prefill_program)
    self._insert = compiled(self._insert_program, out_shardings=state)
    self._generate = compiled(
        self._generate_program, out_shardings=(state, alone)
    )
    self._rebuild = compiled(
        self._rebuild_program,
        out_shardings=(state, alone),
        static_argnames='pages',
    )
    self._release = compiled(self._release_program, out_shardings=state)
    self._prompt_logps = jax.jit(self._prompt_logps_program)

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
    return self._init()

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

  def insert_many(
      self,
      prefix: Prefix,
      state: DecodeState,
      slots: Sequence[int],
      requests: Sequence[Request],
  ) -> DecodeState:
    """Puts one prefix into several slots, each with its own request."""
    settings = self._slot_settings(slots, requests)
    # Not `asdict`, which copies every array.
    return self._insert(prefix, state, vars(settings))

  def generate_steps(
      self, params: Params, state: DecodeState, k: int
  ) -> tuple[DecodeState, StepResult]:
    """Up to k decode steps in one dispatch; ends early when no slot is active.

    Raises:
      ValueError: k is not in 1..settings.steps.
    """
    if not 1 <= k <= self.settings.steps:
      raise ValueError(f'k is {k}, wanted 1..{self.settings.steps}')
    return self._generate(params, state, np.int32(k))

  def prompt_logps(
      self, params: Params, padded_tokens: np.ndarray, true_length: int
  ) -> Array:
    """[T] float32 nats, raw log-probs of a prompt's tokens, 0 for the first.

    Args:
      params: the weights.
      padded_tokens: [T] int32, T one of `prefill_buckets`.
      true_length: tokens that are meant; what is behind them is 0.
    """
    return self._prompt_logps(params, padded_tokens, np.int32(true_length))

  def rebuild(
      self,
      params: Params,
      state: DecodeState,
      slots: Sequence[int],
      longest: int | None = None,
  ) -> DecodeState:
    """Recomputes the caches of slots from their tokens, under these weights.

    Args:
      params: the weights that go on with these slots.
      state: the decode state.
      slots: which slots.
      longest: tokens in the longest of them, if the caller knows; the program
        reads no further than the power of two of pages that holds it.
    """
    return self.rebuild_routed(params, state, slots, longest)[0]

  def rebuild_routed(
      self,
      params: Params,
      state: DecodeState,
      slots: Sequence[int],
      longest: int | None = None,
  ) -> tuple[DecodeState, list[Array]]:
    """`rebuild`, and the choices of experts that are behind the new caches.

    Returns:
      The state, and [R, T, L, k] int16 for each R = `rebuild_rows` slots in
      turn; an empty list where choices are not recorded.
    """
    s = self.settings
    pages = s.pages_per_slot
    if longest is not None:
      needed = max(1, math.ceil(longest / s.page_size))
      pages = min(pages, 1 << (needed - 1).bit_length())
    recorded: list[Array] = []
    for start in range(0, len(slots), s.rebuild_rows):
      rows = np.full(s.rebuild_rows, -1, np.int32)
      chunk = slots[start : start + s.rebuild_rows]
      rows[: len(chunk)] = chunk
      state, routing = self._rebuild(params, state, rows, pages=pages)
      if routing is not None:
        recorded.append(routing)
    return state, recorded

  def release(self, state: DecodeState, slots: Sequence[int]) -> DecodeState:
    """Ends slots whose requests nobody waits for any more."""
    ended = np.zeros(self.settings.slots, bool)
    ended[list(slots)] = True
    return self._release(state, ended)

  def rebuild_page_buckets(self) -> tuple[int, ...]:
    """Page counts for which `rebuild` has a program."""
    whole = self.settings.pages_per_slot
    powers = {1 << i for i in range(whole.bit_length())}
    return tuple(sorted({min(p, whole) for p in powers} | {whole}))

  def warm_up(self, params: Params) -> None:
    """Compiles every program that a run can need."""
    state = self.init_decode_state()
    longest_answer = SamplingParams(self.settings.max_length - 1)
    request = Request('warm-up', (0,), longest_answer)
    for bucket in self.settings.prefill_buckets:
      prefix = self.prefill(
          params=params, padded_tokens=np.zeros(bucket, np.int32), true_length=1
      )
      state = self.insert(prefix, state, 0, request)
      if self.settings.sampling.prompt_logps:
        self.prompt_logps(params, np.zeros(bucket, np.int32), 1)
    for pages in self.rebuild_page_buckets():
      longest = pages * self.settings.page_size
      state = self.rebuild(params, state, [0], longest)
    state, _ = self.generate_steps(params, state, 1)
    state = self.release(state, [0])
    jax.block_until_ready(state)

  # The programs.

  def _initial_state(self) -> DecodeState:
    c, s = self.config, self.settings
    slots, pages = s.slots, s.pages_per_slot
    # The last axis of the cache is a head; see transformer.decode.
    cache = (c.layers, slots * pages, s.page_size, c.kv_heads, c.head_size)
    dtype = jnp.dtype(c.compute_dtype)
    integers = functools.partial(jnp.zeros, dtype=jnp.int32)
    return DecodeState(
        keys=jnp.zeros(cache, dtype),
        values=jnp.zeros(cache, dtype),
        page_table=jnp.arange(slots * pages, dtype=jnp.int32).reshape(
            slots, pages
        ),
        history=integers((slots, pages * s.page_size)),
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

  def _insert_program(self, prefix, state, settings):
    page = self.settings.page_size
    pages = prefix.ids.shape[0] // page

    def paged(x):  # [L, T, K, H] -> [L, pages, page, K, H]
      return x.reshape(x.shape[0], pages, page, *x.shape[2:])

    keys, values = paged(prefix.keys), paged(prefix.values)
    streams = jax.vmap(sampling.stream_key)(settings['words'])
    row = jnp.zeros(state.history.shape[1], jnp.int32)
    row = row.at[: prefix.ids.shape[0]].set(prefix.ids)

    def put(i, state):
      slot = settings['slots'][i]
      where = jax.lax.dynamic_slice(state.page_table, (slot, 0), (1, pages))[0]
      length = prefix.length
      changes = dict(
          history=row,
          length=length,
          prompt_length=length,
          limit=length + settings['new_tokens'][i],
          minimum=length + settings['min_new_tokens'][i],
          stop_ids=settings['stop_ids'][i],
          streams=streams[i],
          active=True,
      )
      return dataclasses.replace(
          state,
          keys=state.keys.at[:, where].set(keys),
          values=state.values.at[:, where].set(values),
          **{
              name: getattr(state, name).at[slot].set(value)
              for name, value in changes.items()
          },
          choice=jax.tree.map(
              lambda held, given: held.at[slot].set(given[i]),
              state.choice,
              settings['choice'],
          ),
      )

    return jax.lax.fori_loop(0, settings['count'], put, state)

  def _generate_program(self, params, state, k):
    slots, most = self.settings.slots, self.settings.steps
    everyone = jnp.arange(slots)
    params = transformer.layers_apart(
        self.config, params, self.mesh, self.rules
    )
    vocabulary = jnp.arange(self.config.padded_vocab_size)
    features = self.settings.sampling
    blank = StepResult(
        drawn=sampling.blank(features, slots, most),
        valid=jnp.zeros((slots, most), bool),
        active=state.active,
        stopped=jnp.zeros((slots,), bool),
        steps=jnp.int32(0),
        routing=self._blank_routing(),
    )

    counts = sampling.count(
        state.choice,
        state.history,
        state.prompt_length,
        state.length,
        state.active,
        self.config.padded_vocab_size,
    )

    def more(carry):
      state, result, _ = carry
      return (result.steps < k) & state.active.any()

    def step(carry):
      state, result, counts = carry
      i, position = result.steps, state.length - 1
      (logits, keys, values), experts = transformer.decode_routed(
          self.config,
          params,
          state.history[everyone, position],
          position,
          state.keys,
          state.values,
          state.page_table,
          state.active,
          mesh=self.mesh,
          rules=self.rules,
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
    return state, result

  def _blank_routing(self) -> Array | None:
    c, s = self.config, self.settings
    if not c.moe.replay:
      return None
    shape = (s.slots, s.steps, *c.routing_shape)
    return jnp.full(shape, UNKNOWN, jnp.int16)

  def _rebuild_program(self, params, state, slots, *, pages):
    page = self.settings.page_size
    ids = state.history[slots, : pages * page]
    (keys, values), experts = transformer.prefill_routed(
        self.config,
        params,
        ids,
        state.length[slots],
        mesh=self.mesh,
        rules=self.rules,
    )  # [L, R, T, K, H]
    nowhere = state.keys.shape[1]
    where = state.page_table[slots, :pages].reshape(-1)
    meant = jnp.repeat(slots >= 0, pages)
    where = jnp.where(meant, where, nowhere)

    def paged(x):
      return x.reshape(x.shape[0], len(slots) * pages, page, *x.shape[3:])

    routing = self._recorded(experts)
    if routing is not None:
      routing = routing.reshape(*ids.shape, *routing.shape[1:])
    rebuilt = dataclasses.replace(
        state,
        keys=state.keys.at[:, where].set(paged(keys), mode='drop'),
        values=state.values.at[:, where].set(paged(values), mode='drop'),
    )
    return rebuilt, routing

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
      self, slots: Sequence[int], requests: Sequence[Request]
  ) -> SlotSettings:
    total = self.settings.slots
    if len(slots) != len(requests) or not 1 <= len(slots) <= total:
      raise ValueError(
          f'{len(requests)} requests for {len(slots)} slots, wanted as many,'
          f' 1..{total}'
      )
    integers = functools.partial(np.zeros, dtype=np.int32)
    filled = SlotSettings(
        slots=integers(total),
        count=np.int32(len(slots)),
        new_tokens=integers(total),
        min_new_tokens=integers(total),
        choice=sampling.choice_of(self.settings.sampling, total, requests),
        stop_ids=np.full((total, self.settings.max_stop_ids), -1, np.int32),
        words=np.zeros((total, 6), np.uint32),
    )
    for i, (slot, request) in enumerate(zip(slots, requests)):
      chosen = request.sampling
      filled.slots[i] = slot
      filled.new_tokens[i] = chosen.max_new_tokens
      filled.min_new_tokens[i] = chosen.min_new_tokens
      filled.stop_ids[i, : len(chosen.stop_ids)] = chosen.stop_ids
      filled.words[i] = sampling.stream_words(request)
    return filled
