"""Choosing tokens: keyed, position by position, with their log-probability.

A token's key is a fold of (seed, purpose, draw_index, sample, turn, branch,
position) and nothing else: not the slot, the neighbours, the attempt or the
version of the weights. So a retried or interrupted request continues the same
stream, and what a request says does not depend on who shares the batch.

From logits to the distribution sampled from, in this order:

1. logit bias is added,
2. repetition penalty r, for tokens of prompt or answer: a logit above 0 is
   divided by r, any other is multiplied with it
   (https://arxiv.org/abs/1909.05858),
3. less frequency penalty times the number of times that the answer holds the
   token, less presence penalty if it holds it at all,
4. divided by the temperature,
5. stop ids are impossible before the least length,
6. top-k: tokens below the k-th logit become impossible,
7. top-p: of the rest, renormalised, the fewest tokens that reach the mass p
   (https://arxiv.org/abs/1904.09751),
8. min-p: tokens with less than this share of the likeliest one's probability
   become impossible (https://arxiv.org/abs/2407.01082).

1 to 4 are the order of vLLM's sampler, 6 to 8 that of transformers' `generate`;
tokens with equal logits at a border are all kept. vLLM takes min-p before
top-p, so where both are set its top-p is a share of less mass.

Penalties look at the history of a slot and at nothing else. It is counted anew
at the start of each dispatch, so nothing is to be carried over a swap, a
rebuild or a preemption, and nothing of an earlier request can be left over.

What a feature costs is decided twice. `SamplingFeatures` are static: what an
engine was not built for is in none of its programs. What it was built for runs
only while some slot that still draws uses it.
"""

from __future__ import annotations

import dataclasses
from typing import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.config import require
from areal_jax.types import Request, SamplingParams

Array = jax.Array

# Also the value that impossible tokens get: finite, so that no 0 * inf can
# arise, and so low that exp of it is exactly 0 in float32.
IMPOSSIBLE = -1e30

# Below it a token is impossible, whatever temperature has divided IMPOSSIBLE.
_NEVER = -1e20


def stream_words(request: Request) -> np.ndarray:
  """[6] uint32: what names the random stream of a request."""
  words = (
      request.sampling.seed,
      int(request.purpose),
      request.draw_index,
      request.sample,
      request.turn,
      request.branch,
  )
  return np.asarray([w % 2**32 for w in words], np.uint32)


def stream_key(words: Array) -> Array:
  """Key data [2] uint32 of the stream that `words` [6] uint32 names."""
  key = jax.random.key(words[0])
  for word in words[1:]:
    key = jax.random.fold_in(key, word)
  return jax.random.key_data(key)


@dataclasses.dataclass
class SamplingFeatures:
  """Sampling features that an engine is built for; static.

  Temperature, top-k, top-p, min-p, least length, stop ids and seeds are always
  there.

  Attributes:
    penalties: repetition, frequency and presence penalties; 5 bytes for each
      slot and token of the vocabulary while a dispatch runs.
    max_logit_bias: most (id, bias) pairs of a request.
    max_top_logps: most likeliest tokens told at each position.
    raw_logps: log-probs without what shapes the distribution.
    prompt_logps: log-probs of the prompt's tokens; a program more for each
      prefill bucket.
  """

  penalties: bool = False
  max_logit_bias: int = 0
  max_top_logps: int = 0
  raw_logps: bool = False
  prompt_logps: bool = False

  def validate(self, at: str) -> None:
    for name in ('max_logit_bias', 'max_top_logps'):
      value = getattr(self, name)
      require(value >= 0, f'{at}.{name}', value, 'at least 0')

  def refusal(self, asked: SamplingParams, vocabulary: int) -> str:
    """Why an engine so built cannot sample like that; empty if it can.

    Args:
      asked: how a request wants to be sampled.
      vocabulary: number of token ids.
    """
    at = 'rollout.engine.sampling'
    for name, needed, off in (
        ('repetition_penalty', 'penalties', 1),
        ('frequency_penalty', 'penalties', 0),
        ('presence_penalty', 'penalties', 0),
        ('raw_logps', 'raw_logps', False),
        ('prompt_logps', 'prompt_logps', False),
    ):
      value = getattr(asked, name)
      if value != off and not getattr(self, needed):
        return f'sampling.{name} is {value}, wanted {off}: {at}.{needed} is off'
    ids = [token for token, _ in asked.logit_bias]
    for name, value, needed in (
        ('logit_bias', len(ids), 'max_logit_bias'),
        ('top_logps', asked.top_logps, 'max_top_logps'),
    ):
      most = getattr(self, needed)
      if value > most:
        return (
            f'sampling.{name} asks for {value}, wanted at most {most}:'
            f' {at}.{needed}'
        )
    for name, value, most in (
        ('logit_bias names id', max(ids, default=0), vocabulary - 1),
        ('top_logps asks for', asked.top_logps, vocabulary),
    ):
      if value > most:
        return f'sampling.{name} {value}, wanted at most {most}'
    return ''


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Choice:
  """Sampling parameters of S slots; None where the engine lacks the feature."""

  temperature: Array  # [S] float32, 0 is greedy
  top_k: Array  # [S] int32, 0 is off
  top_p: Array  # [S] float32, 1 is off
  min_p: Array  # [S] float32, 0 is off
  repetition: Array | None  # [S] float32, 1 is off
  frequency: Array | None  # [S] float32, 0 is off
  presence: Array | None  # [S] float32, 0 is off
  bias_ids: Array | None  # [S, E] int32, -1 where unused
  bias: Array | None  # [S, E] float32
  top_logps: Array | None  # [S] int32, likeliest tokens that are wanted
  raw_logps: Array | None  # [S] bool, whether they are wanted

  @property
  def penalised(self) -> Array:
    """[S] bool, whether the slot's history matters."""
    return (self.repetition != 1) | (self.frequency != 0) | (self.presence != 0)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Counts:
  """Counts of the tokens that the slots have sampled."""

  seen: Array  # [S, V] bool, in prompt or answer
  answered: Array  # [S, V] int32, times in the answer


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Drawn:
  """A sampled token for each slot, with its log-probs in nats."""

  tokens: Array  # [S] int32
  logps: Array  # [S] float32, of the distribution drawn from
  raw_logps: Array | None = None  # [S] float32, 0 where nobody asks
  top_ids: Array | None = None  # [S, n] int32
  top_logps: Array | None = None  # [S, n] float32, 0 where nobody asks


def choice_of(
    features: SamplingFeatures,
    slots: int,
    requests: Sequence[Request],
    places: Sequence[int] = (),
) -> Choice:
  """The settings of requests in numpy arrays of length `slots`.

  Args:
    features: what the engine is built for.
    slots: how long.
    requests: any number up to that.
    places: where each stands in the arrays; the first ones if not given.
  """
  asked = [request.sampling for request in requests]
  places = places or list(range(len(asked)))

  def filled(name, off, dtype):
    array = np.full(slots, off, dtype)
    array[places] = [getattr(one, name) for one in asked]
    return array

  penalties, pairs = features.penalties, features.max_logit_bias
  ids, bias = np.full((slots, pairs), -1, np.int32), np.zeros((slots, pairs))
  for i, one in zip(places, asked):
    for j, (token, nats) in enumerate(one.logit_bias):
      ids[i, j], bias[i, j] = token, nats
  real = np.float32
  return Choice(
      temperature=filled('temperature', 1, real),
      top_k=filled('top_k', 0, np.int32),
      top_p=filled('top_p', 1, real),
      min_p=filled('min_p', 0, real),
      repetition=filled('repetition_penalty', 1, real) if penalties else None,
      frequency=filled('frequency_penalty', 0, real) if penalties else None,
      presence=filled('presence_penalty', 0, real) if penalties else None,
      bias_ids=ids if pairs else None,
      bias=bias.astype(real) if pairs else None,
      top_logps=filled('top_logps', 0, np.int32)
      if features.max_top_logps
      else None,
      raw_logps=filled('raw_logps', False, bool)
      if features.raw_logps
      else None,
  )


def blank(features: SamplingFeatures, *shape: int) -> Drawn:
  """Room for what is drawn, of this shape."""
  several = (*shape, features.max_top_logps)
  real = jnp.float32
  return Drawn(
      tokens=jnp.zeros(shape, jnp.int32),
      logps=jnp.zeros(shape, real),
      raw_logps=jnp.zeros(shape, real) if features.raw_logps else None,
      top_ids=jnp.zeros(several, jnp.int32) if several[-1] else None,
      top_logps=jnp.zeros(several, real) if several[-1] else None,
  )


def count(
    choice: Choice,
    history: Array,
    prompt_length: Array,
    length: Array,
    active: Array,
    vocabulary: int,
) -> Counts | None:
  """Counts the tokens of each slot, if a slot that draws is penalised.

  Args:
    choice: how slots choose; without penalties there is nothing to count.
    history: [S, C] int32, prompt and answer.
    prompt_length: [S] int32.
    length: [S] int32, of prompt and answer.
    active: [S] bool, slots that draw.
    vocabulary: V.
  """
  if choice.repetition is None:
    return None
  shape = len(history), vocabulary

  def nothing():
    return Counts(jnp.zeros(shape, bool), jnp.zeros(shape, jnp.int32))

  def everything():
    rows = jnp.arange(len(history))[:, None]
    place = jnp.arange(history.shape[1])
    # What does not count goes outside the array, which drops it.
    held = jnp.where(place < length[:, None], history, vocabulary)
    said = jnp.where(place < prompt_length[:, None], vocabulary, held)
    counts = nothing()
    return Counts(
        counts.seen.at[rows, held].set(True, mode='drop'),
        counts.answered.at[rows, said].add(1, mode='drop'),
    )

  used = (choice.penalised & active).any()
  return jax.lax.cond(used, everything, nothing)


def counted(counts: Counts | None, tokens: Array, drew: Array) -> Counts | None:
  """The counts with the tokens [S] of the slots that drew [S] one more."""
  if counts is None:
    return None
  rows = jnp.arange(len(tokens))
  place = jnp.where(drew, tokens, counts.seen.shape[1])
  return Counts(
      counts.seen.at[rows, place].set(True, mode='drop'),
      counts.answered.at[rows, place].add(1, mode='drop'),
  )


def shape(
    logits: Array,
    choice: Choice,
    *,
    forbidden: Array,
    active: Array,
    counts: Counts | None = None,
) -> Array:
  """[S, V] logits of what is drawn from: the steps at the top of this file.

  Args:
    logits: [S, V] float32.
    choice: the settings of each slot; temperature 0 is taken for 1.
    forbidden: [S, V] bool, tokens that may not be drawn.
    active: [S] bool, slots whose draws count.
    counts: what the slots have said, where the engine has penalties.
  """
  shaped = _biased(logits, choice, active)
  if counts is not None:
    used = choice.penalised & active
    before = shaped
    shaped = jax.lax.cond(
        used.any(), lambda: _penalised(before, choice, counts), lambda: before
    )
  greedy = choice.temperature <= 0
  shaped = shaped / jnp.where(greedy, 1.0, choice.temperature)[:, None]
  shaped = jnp.where(forbidden, IMPOSSIBLE, shaped)
  narrowed = (choice.top_k > 0) | (choice.top_p < 1) | (choice.min_p > 0)
  wide = shaped
  return jax.lax.cond(
      (narrowed & active).any(), lambda: _narrow(wide, choice), lambda: wide
  )


def sample(
    logits: Array,
    streams: Array,
    positions: Array,
    choice: Choice,
    *,
    forbidden: Array,
    active: Array,
    counts: Counts | None = None,
    most_top_logps: int = 0,
) -> Drawn:
  """Draws one token a slot and its log-probability under what was drawn from.

  The distribution is the softmax of what the steps at the top of this file
  leave of the logits; the draw inverts its cumulative sum. Temperature 0 takes
  the largest and reports its log-probability at temperature 1.

  Args:
    logits: [S, V] float32.
    streams: [S, 2] uint32, from `stream_key`.
    positions: [S] int32, position in the sequence of the token to be drawn.
    choice: the settings of each slot.
    forbidden: [S, V] bool, tokens that may not be drawn.
    active: [S] bool, slots whose draws count; what the others get means
      nothing.
    counts: what the slots have said, where the engine has penalties.
    most_top_logps: n, static; likeliest tokens that are told.
  """
  shaped = shape(
      logits, choice, forbidden=forbidden, active=active, counts=counts
  )
  greedy = choice.temperature <= 0

  best = shaped.max(-1, keepdims=True)
  masses = jnp.exp(shaped - best)
  drawn, total = _draw(masses, _uniform(streams, positions))
  tokens = jnp.where(greedy, _place_of_largest(shaped, best), drawn)
  normalizer = best[:, 0] + jnp.log(total)
  return Drawn(
      tokens,
      _at(shaped, tokens) - normalizer,
      _raw(logits, tokens, choice, active),
      *_likeliest(shaped, normalizer, choice, active, most_top_logps),
  )


def _uniform(streams: Array, positions: Array) -> Array:
  """[S, 2] float32 in [0, 1), each a multiple of 2⁻²⁴.

  Folding a position into a key is Threefry of a counter, so the two words of
  the folded key are as random as any that could be drawn with it.
  """

  def words(stream, position):
    key = jax.random.fold_in(jax.random.wrap_key_data(stream), position)
    return jax.random.key_data(key)

  bits = jax.vmap(words)(streams, positions)
  return (bits >> 8).astype(jnp.float32) * jnp.float32(2**-24)


def _draw(masses: Array, uniform: Array) -> tuple[Array, Array]:
  """Draws in proportion to masses [S, V] by two numbers a slot.

  The first chooses a block of about √V tokens by its share of the whole, the
  second a token by its share of the block. That takes 2 numbers a slot where
  noise on every logit (the usual argmax of Gumbel noise) takes V, and sums of
  √V terms, whose errors and whose steps of 2⁻²⁴ stay small beside the mass that
  they divide.

  Returns:
    tokens [S] int32, none of mass 0; sum of the masses [S].
  """
  slots, size = masses.shape
  width = 1 << (size.bit_length() // 2)
  blocks = -(-size // width)
  spare = ((0, 0), (0, blocks * width - size))
  masses = jnp.pad(masses, spare).reshape(slots, blocks, width)
  sums = masses.sum(-1)
  block = _place_of_share(sums, uniform[:, 0])
  inside = jnp.take_along_axis(masses, block[:, None, None], axis=1)[:, 0]
  place = _place_of_share(inside, uniform[:, 1])
  return block * width + place, sums.sum(-1)


def _place_of_share(masses: Array, share: Array) -> Array:
  """[S] int32, the first place where the sum so far exceeds share · all."""
  size = masses.shape[-1]
  places = jnp.arange(size, dtype=jnp.int32)
  # A product with ones, in full precision, for XLA sums a prefix in many steps.
  sums = jnp.matmul(
      masses,
      jnp.triu(jnp.ones((size, size), masses.dtype)),
      precision=jax.lax.Precision.HIGHEST,
  )
  possible = masses > 0
  beyond = possible & (sums > share[:, None] * sums[:, -1:])
  # Rounding may leave no sum beyond a share of almost 1: then it is the last.
  last = jnp.where(possible, places, 0).max(-1)
  return jnp.minimum(jnp.where(beyond, places, size).min(-1), last)


def _place_of_largest(x: Array, best: Array) -> Array:
  """argmax along the last axis, [S] int32, where the largest [S, 1] is known.

  XLA for CPU computes what flows into its own argmax number by number.
  """
  size = x.shape[-1]
  places = jnp.where(x == best, jnp.arange(size, dtype=jnp.int32), size - 1)
  return places.min(-1)


def _at(values: Array, tokens: Array) -> Array:
  """[S] of [S, V], at each slot's token."""
  return jnp.take_along_axis(values, tokens[:, None], axis=-1)[:, 0]


def _biased(logits: Array, choice: Choice, active: Array) -> Array:
  if choice.bias_ids is None:
    return logits
  used = choice.bias_ids >= 0

  def biased():
    rows = jnp.arange(len(logits))[:, None]
    ids = jnp.where(used, choice.bias_ids, logits.shape[-1])
    return logits.at[rows, ids].add(choice.bias, mode='drop')

  any_used = (used.any(-1) & active).any()
  return jax.lax.cond(any_used, biased, lambda: logits)


def _penalised(logits: Array, choice: Choice, counts: Counts) -> Array:
  factor = jnp.where(counts.seen, choice.repetition[:, None], 1.0)
  logits = jnp.where(logits > 0, logits / factor, logits * factor)
  logits -= choice.frequency[:, None] * counts.answered
  return logits - choice.presence[:, None] * (counts.answered > 0)


def _raw(
    logits: Array, tokens: Array, choice: Choice, active: Array
) -> Array | None:
  if choice.raw_logps is None:
    return None
  return jax.lax.cond(
      (choice.raw_logps & active).any(),
      lambda: _at(logits, tokens) - jax.nn.logsumexp(logits, axis=-1),
      lambda: jnp.zeros(len(logits), jnp.float32),
  )


def _likeliest(
    shaped: Array, normalizer: Array, choice: Choice, active: Array, most: int
) -> tuple[Array | None, Array | None]:
  """Ids and log-probs [S, n] of the likeliest tokens, best first."""
  if not most:
    return None, None

  def likeliest():
    best, ids = jax.lax.top_k(shaped, most)
    logps = jnp.where(best > _NEVER, best - normalizer[:, None], -jnp.inf)
    return ids, logps

  def nothing():
    shape = len(shaped), most
    return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

  wanted = ((choice.top_logps > 0) & active).any()
  return jax.lax.cond(wanted, likeliest, nothing)


def _narrow(shaped: Array, choice: Choice) -> Array:
  """Makes tokens outside the top-k, top-p and min-p sets impossible. [S, V]."""
  top_k, top_p = choice.top_k, choice.top_p
  ordered = jnp.sort(shaped, axis=-1, descending=True)
  size = shaped.shape[-1]
  kth = jnp.clip(jnp.where(top_k > 0, top_k, size), 1, size) - 1
  floor_k = jnp.take_along_axis(ordered, kth[:, None], axis=-1)
  # Top-p is taken inside the top-k set, renormalised, as is usual.
  inside = jnp.where(ordered >= floor_k, ordered, IMPOSSIBLE)
  mass = jnp.cumsum(jax.nn.softmax(inside, axis=-1), axis=-1)
  before = mass - jax.nn.softmax(inside, axis=-1)
  kept = before < top_p[:, None]  # the first token is always kept
  floor_p = jnp.min(jnp.where(kept, inside, jnp.inf), axis=-1, keepdims=True)
  floor_p = jnp.where(top_p[:, None] < 1, floor_p, -jnp.inf)
  # log 0 is -inf: off. A share is of the best token's probability, which
  # renormalising does not change, so the sets before do not matter.
  share = jnp.log(choice.min_p)[:, None]
  floors = jnp.maximum(jnp.maximum(floor_k, floor_p), ordered[:, :1] + share)
  return jnp.where(shaped >= floors, shaped, IMPOSSIBLE)
