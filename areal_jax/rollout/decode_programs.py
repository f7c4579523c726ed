"""What the devices compute for an engine: the bodies of its programs.

What lives here: `DecodePrograms`. It caches pieces of sequences (`extend`),
lets slots go on with them (`occupy`), takes decode steps (`generate`), ends
slots (`release`) and tells log-probs of prompts. Arrays go in and come out;
nothing is compiled or called here (see `engine_programs`).

With several data shards each runs its part of the slots and pages by itself, as
if it were all there is (`by_shard`): shard d of D has the slots from d · S / D
on and a pool of pages of its own, which tables count from 0.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules, mesh_axes
from areal_jax.models import paged_attention, parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.moe import UNKNOWN
from areal_jax.rollout import sampling
from areal_jax.rollout.decode_state import (
    DecodeState,
    StepResult,
    of_slots,
    with_slots,
)
from areal_jax.rollout.engine_settings import EngineSettings

Array = jax.Array

_PROMPT_LOGITS = 2**24  # most logits of a prompt that are there at once


class DecodePrograms:
  """The bodies of the programs of one model on one rollout mesh.

  Args:
    config: the model.
    settings: static shapes, which divide over the data shards.
    mesh: rollout mesh with the axes that `rules` names.
    rules: logical to mesh axes.

  Attributes:
    shards: D, data shards.
    share: the shapes of one of them; those of `settings` if there is no other.
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
    self.shards = rules.parts('slots', mesh)
    self.share = settings.of_shard(self.shards)

  def by_shard(self, program: Any, takes: Any, gives: Any) -> Any:
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

  def initial_state(self) -> DecodeState:
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

  def recorded(self, experts: Array | None) -> Array | None:
    """[L, M, k] choices as [M, L, k], if they are to be replayed."""
    if not self.config.moe.replay:
      return None
    return jnp.swapaxes(experts, 0, 1).astype(jnp.int16)

  def extend(self, params, state, pieces):
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

    routing = self.recorded(experts)
    if routing is not None:
      routing = routing.reshape(*pieces['ids'].shape, *routing.shape[1:])
    keys, values = (
        x.at[:, where].set(
            paged_attention.as_cached(paged(new), x), mode='drop'
        )
        for x, new in ((state.keys, keys), (state.values, values))
    )
    return dataclasses.replace(state, keys=keys, values=values), routing

  def occupy(self, state, settings, history, lengths, prompts, copies):
    def copy(i, cache):
      source, target = copies[i]
      return tuple(
          x.at[:, target].set(x[:, source], mode='drop') for x in cache
      )

    count = (settings['slots'] < len(state.length)).sum()
    cache = jax.lax.fori_loop(0, count, copy, (state.keys, state.values))
    state = dataclasses.replace(state, keys=cache[0], values=cache[1])
    return self.occupied(state, settings, history, lengths, prompts)

  def occupied(self, state, settings, history, lengths, prompts):
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

  def generate(self, params, state, tables, k, slots=None):
    """Decodes all slots, or `slots` [R] with tables [R, P]."""
    c, most, at = self.config, self.settings.steps, self._inside()
    params = parameters.layers_apart(c, params, **at)
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
        routing = routing.at[:, i].set(self.recorded(experts))
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

  def prompt_logps(self, params, padded_tokens, true_length):
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

  def release(self, state, ended):
    return dataclasses.replace(state, active=state.active & ~ended)
