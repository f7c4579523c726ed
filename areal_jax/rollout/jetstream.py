"""Our engine behind the stock JetStream orchestrator and its gRPC server.

What lives here: `JetStreamEngine`, the `jetstream.engine.engine_api.Engine`
over `engine.Engine`, and `start`, which hands it to the orchestrator of
google-jetstream 0.2.2. This is the one file that imports jetstream (and with
it TensorFlow: seconds and hundreds of megabytes), so only `serve.py` imports
it, late. What TensorFlow then writes to standard error about the machine's CPU
and GPUs cannot be switched off.

The orchestrator decides who gets a slot and when an answer ends for its client.
It takes the parameters once: there is no swap here, so training uses
`loop.py`. It passes no request to `insert`, so that every slot gets the same
sampling settings, with all the room that its prompt leaves as the limit, and
decodes on, unheard, when its client wanted less.

What JetStream does to a prompt, and what is made of it here:

* it puts BOS in front of texts and of client-side token ids alike; here a
  policy that was trained without one loses it again,
* it cuts the front off a prompt that is too long, BOS included; here the end
  that fits is kept and BOS put back in front,
* ids outside the vocabulary are the client's mistake; its answer means nothing,
  other answers are not touched.

Not covered: `session_cache` of a request (nothing is kept between requests, and
with token ids the orchestrator fails on it), access control (the server listens
on every address, without encryption), and errors: whatever a thread of the
orchestrator raises kills the process.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import logging
import os
import threading
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config import require
from areal_jax.rollout import engine as core
from areal_jax.rollout.decode_state import DecodeState, Prefix, StepResult
from areal_jax.rollout.prefix_engine import PrefixEngine
from areal_jax.types import Request, SamplingParams

_LEVEL = logging.getLogger().level

from jetstream.core import config_lib, orchestrator, server_lib  # noqa: E402
from jetstream.engine import (  # noqa: E402
    engine_api,
    token_utils,
    tokenizer_pb2,
)

# Importing the orchestrator has set the root logger to tell everything, a line
# or more for each token, on standard output.
logging.getLogger().removeHandler(orchestrator.handler)
logging.getLogger().setLevel(_LEVEL)

# The one shim: the orchestrator deletes used prefixes by a name that jax no
# longer has.
jax.tree_map = jax.tree.map

Array = jax.Array
Params = Any

_LONGEST_PREFILL = 32768  # JetStream pads to 16, 32, 64, ... and no further


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=['prefix'],
    meta_fields=['length'],
)
@dataclasses.dataclass
class Prompt:
  """A cached prompt on its way from `prefill` to `insert`.

  The length is known here without asking the device, which would hold up
  decoding.
  """

  prefix: Prefix
  length: int  # tokens


class JetStreamEngine(engine_api.Engine):
  """Adapts one policy to JetStream's orchestrator.

  Args:
    engine: its programs.
    params: weights on the engine's mesh.
    tokenizer_path: the sentencepiece model.
    add_bos: whether the policy wants BOS in front of a prompt.
    sampling: how all answers are sampled; the limit is the room in a slot.

  Raises:
    ConfigError: prompts longer than JetStream can pad.
  """

  def __init__(
      self,
      engine: core.Engine,
      params: Params,
      *,
      tokenizer_path: str | os.PathLike,
      add_bos: bool,
      sampling: SamplingParams,
  ):
    longest = engine.settings.max_prompt_length
    require(
        longest <= _LONGEST_PREFILL,
        'config.rollout.engine.max_prompt_length',
        longest,
        f'at most {_LONGEST_PREFILL}, the longest that JetStream prefills',
    )
    self._engine = engine
    self._prefixes = PrefixEngine(engine)
    self._prefixes.compile_ahead(params)
    self._params = engine.lay_out(params)
    self._tokenizer_path = os.fspath(tokenizer_path)
    self._add_bos = add_bos
    self._sampling = sampling
    self._bos_id = self.build_tokenizer(self.get_tokenizer()).bos_id
    self._inserted = itertools.count()
    self._pack = jax.jit(_pack)
    # The orchestrator prefills and decodes in two threads. Programs with
    # collectives that reach the devices in different orders would wait for
    # each other for ever, so such an engine does one thing at a time.
    several = engine.mesh.devices.size > 1
    self._turns = threading.Lock() if several else contextlib.nullcontext()

  def load_params(self) -> Params:
    """The weights; the orchestrator asks once."""
    return self._params

  def init_decode_state(self) -> DecodeState:
    """A state in which no slot is active."""
    return self._engine.init_decode_state()

  def prefill(
      self,
      *,
      params: Params,
      existing_prefix: None = None,
      padded_tokens: np.ndarray,
      true_length: int,
  ) -> Prompt:
    """Caches a prompt.

    Args:
      params: the weights.
      existing_prefix: never given by this orchestrator.
      padded_tokens: [T] int32, of JetStream's padding.
      true_length: tokens of the prompt before it was cut to T.

    Raises:
      ValueError: there is a prefix.
    """
    if existing_prefix is not None:
      raise ValueError('existing_prefix is given, wanted a whole prompt')
    ids = self._prompt(np.asarray(padded_tokens), true_length)
    padded = self._engine.pad_prompt(ids)
    return self._prefill(params, padded, len(ids))

  def insert(
      self, prefix: Prompt, decode_state: DecodeState, slot: int
  ) -> DecodeState:
    """Puts a prompt into a slot, with all the room that it leaves."""
    number = next(self._inserted)  # names the random stream of the answer
    room = self._engine.settings.max_length - prefix.length
    request = Request(
        request_id=f'jetstream-{number}',
        prompt_ids=(),  # they are in the prefix
        sampling=dataclasses.replace(self._sampling, max_new_tokens=room),
        draw_index=number,
    )
    return self._taking_turns(
        self._prefixes.insert, prefix.prefix, decode_state, slot, request
    )

  def generate(
      self, params: Params, decode_state: DecodeState
  ) -> tuple[DecodeState, engine_api.ResultTokens]:
    """Runs one decode step of all slots."""
    state, result = self._taking_turns(
        self._prefixes.generate, params, decode_state
    )
    packed = self._taking_turns(
        self._pack, result, state.length, state.prompt_length
    )
    return state, engine_api.ResultTokens(
        data=packed,
        tokens_idx=(0, 1),
        valid_idx=(1, 2),
        length_idx=(2, 3),
        samples_per_slot=1,
    )

  def get_prefix_destination_sharding(self) -> jax.sharding.NamedSharding:
    """Returns the sharding of prefixes from other engines: whole everywhere."""
    whole = jax.sharding.PartitionSpec()
    return jax.sharding.NamedSharding(self._engine.mesh, whole)

  def get_tokenizer(self) -> tokenizer_pb2.TokenizerParameters:
    """Names the sentencepiece model."""
    return tokenizer_pb2.TokenizerParameters(path=self._tokenizer_path)

  def build_tokenizer(
      self, metadata: tokenizer_pb2.TokenizerParameters
  ) -> _Tokenizer:
    """JetStream's sentencepiece tokenizer, with our stop ids."""
    return _Tokenizer(metadata, self._sampling.stop_ids)

  @property
  def max_concurrent_decodes(self) -> int:
    return self._engine.settings.slots

  @property
  def samples_per_slot(self) -> int:
    return 1

  @property
  def max_prefill_length(self) -> int:
    """Returns the longest padded prompt of JetStream, a power of two."""
    longest = self._engine.settings.max_prompt_length
    return max(16, 1 << (longest - 1).bit_length())

  @property
  def mesh(self) -> jax.sharding.Mesh:
    return self._engine.mesh

  @property
  def colocated_cpus(self) -> None:
    return None

  def warm_up(self) -> None:
    """Waits until every program that a request can need is compiled.

    That has begun with the engine. Nothing is computed for it.
    """
    programs = self._engine.programs
    programs.plan([(('pack',), self._compile_pack)])
    programs.wait_for_all()

  def _compile_pack(self) -> None:
    engine = self._engine
    weights = jax.tree.map(lambda x: _shape_of(x, x.sharding), self._params)
    columns = engine.settings.live_buckets[-1]
    _, result = engine.jitted.trace_generate(weights, columns).out_info
    state = engine.jitted.abstract_state
    by_slot = state.length.sharding
    result = jax.tree.map(lambda x: _shape_of(x, by_slot), result)
    self._pack.lower(result, state.length, state.prompt_length).compile()

  def _prefill(self, params: Params, padded: np.ndarray, length: int) -> Prompt:
    prefix = self._taking_turns(
        self._prefixes.prefill,
        params=params,
        padded_tokens=padded,
        true_length=length,
    )
    return Prompt(prefix, length)

  def _prompt(self, padded: np.ndarray, true_length: int) -> list[int]:
    """The ids to cache, from what JetStream made of a prompt."""
    ids = padded[:true_length].astype(np.int32).tolist()
    if true_length <= len(padded) and ids[:1] == [self._bos_id]:
      ids = ids[1:]
    front = [self._bos_id] if self._add_bos else []
    room = self._engine.settings.max_prompt_length - len(front)
    ids = front + ids[max(0, len(ids) - room) :]
    # An engine takes one token at least. An empty text without BOS has none,
    # and an exception here would end the server.
    return ids or [max(0, self._bos_id)]

  def _taking_turns(self, program: Any, *args: Any, **kwargs: Any) -> Any:
    with self._turns as alone:
      result = program(*args, **kwargs)
      if alone:  # a CPU may start what was sent later before it
        jax.block_until_ready(result)
    return result


class _Tokenizer(token_utils.SentencePieceTokenizer):
  """The stock tokenizer, but for two things.

  It encodes without TensorFlow, whose first operation would take hold of an
  accelerator's memory, and answers end at the stop ids that the engine ends
  them at (and not at padding, which a policy may say).
  """

  def __init__(
      self,
      metadata: tokenizer_pb2.TokenizerParameters,
      stop_ids: tuple[int, ...],
  ):
    super().__init__(metadata)
    self._stop_ids = set(stop_ids)

  @property
  def stop_tokens(self) -> set[int]:
    return self._stop_ids

  def encode(self, s: str, **padding: Any) -> tuple[Array | np.ndarray, int]:
    """Ids [T] of a text, padded as `padding` says, and their true number."""
    ids = np.asarray(self.vocab.tokenizer.EncodeAsIds(s), np.int32)
    return token_utils.pad_tokens(ids, self.bos_id, self.pad_id, **padding)


def _shape_of(x: Any, sharding: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _pack(result: StepResult, length: Array, prompt_length: Array) -> Array:
  """[S, 3] int32: token, whether it was drawn, tokens generated so far."""
  return jnp.stack(
      [result.tokens[:, 0], result.valid[:, 0], length - prompt_length], axis=1
  ).astype(jnp.int32)


def start(engine: JetStreamEngine, port: int) -> server_lib.JetStreamServer:
  """Starts the stock orchestrator and its gRPC server on all addresses.

  Returns:
    The server; `stop()` ends it, after ten seconds where answers are under way.
  """
  devices = list(engine.mesh.devices.flat)
  config = config_lib.ServerConfig(
      interleaved_slices=(f'mesh={len(devices)}',),
      interleaved_engine_create_fns=(lambda _: engine,),
  )
  # Without `jax_padding` prompts stay on the host, where they are looked at.
  return server_lib.run(port, config, devices, jax_padding=False)
