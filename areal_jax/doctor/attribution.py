"""Why engine and trainer disagree on a log-prob: the same tokens, path by path.

A record says which tokens were sampled, at which temperature and under which
version of the weights, and what the engine took their log-probs to be. The same
tokens are scored here along each path on which something may go wrong:

  trainer             rows of whole sequences, as training scores them
  engine              token by token through a cache, as engines do; whatever
                      separates it from the trainer's is numerics
  sampling transform  the engine's path at another temperature than was told, or
                      narrowed or penalised without a word: see below
  stale weights       the engine's path under other weights than the label says
  stale cache         the labelled weights over keys and values of others: those
                      of tokens before a swap, or of the prompt

The path that meets the record names the cause. Where none does, the tokens of
the record are not those that were sampled: wrong tokens.

A record has only the temperature of its sampling. What narrows a distribution
gives itself away: with a share m of the probability left, each log-prob is
larger by -log m, so the gap of each token says how many of the likeliest ones
were left, and one k, one p or one share has to fit all tokens of an answer.
Penalties do not, so usual ones are tried, and those that the caller names.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Any, Iterator, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.rollout import sampling as sampling_lib
from areal_jax.types import Request, SamplingParams, Trajectory

CAUSES = (
    'numerics',
    'sampling transform',
    'stale weights',
    'stale cache',
    'wrong tokens',
)

# What is tried of penalties, each by itself.
PENALTIES = (
    *({'repetition_penalty': r} for r in (1.05, 1.1, 1.2, 1.5)),
    *({'frequency_penalty': f} for f in (0.1, 0.5, 1.0)),
    *({'presence_penalty': p} for p in (0.5, 1.0, 1.5)),
)
# Tokens that have to speak for one k, p or share before it is believed.
_SPEAKING = 4
_FEATURES = sampling_lib.SamplingFeatures(penalties=True)


@dataclasses.dataclass(frozen=True)
class Attribution:
  """The parts of a gap, in nats a token over all sampled tokens.

  Attributes:
    gap: mean |log-prob of the engine - that of the trainer|.
    parts: by cause; they add up to about the gap.
    answers: answers whose gap each cause explains best.
  """

  gap: float
  parts: Mapping[str, float]
  answers: Mapping[str, int]

  @property
  def cause(self) -> str:
    """Names the largest part of the gap."""
    return max(CAUSES, key=lambda cause: self.parts[cause])

  def __str__(self) -> str:
    parts = ', '.join(
        f'{cause} {self.parts[cause]:.2g} ({self.answers[cause]} answers)'
        for cause in CAUSES
        if self.answers[cause]
    )
    return f'{self.gap:.2g} nats a token: {parts}'


class Paths:
  """Scores sequences of one policy along the paths.

  Args:
    config: of the policy, as engines run it.
    weights: parameters by version, on `mesh` or on the host. Those of the host
      are sent when they are asked for, one version at a time.
    mesh: where they lie.
    rules: how they lie there.
    length: most tokens of a sequence.
  """

  def __init__(
      self,
      config: ModelConfig,
      weights: Mapping[int, Any],
      *,
      mesh: jax.sharding.Mesh,
      rules: Rules,
      length: int,
  ):
    self.versions = tuple(sorted(weights))
    self._weights = weights
    self._shardings = parameters.param_shardings(config, mesh, rules)
    self._sent: tuple[int, Any] = (-1, None)  # version and parameters
    self._length = length
    vocabulary = config.vocab_size
    place = dict(mesh=mesh, rules=rules)
    cache = (config.layers, 1, length, config.kv_heads, config.head_size)
    dtype = config.compute_dtype

    def rows(params, ids, temperature):
      ones = jnp.ones_like(ids)
      positions = jnp.arange(length)[None]
      logits = transformer.forward(
          config, params, ids, positions, ones, **place
      )
      given = jnp.full(ids.shape, temperature)
      logps, _ = logprobs.token_logps(logits, ids, ones, given)
      return logps[0]

    def decoded(params, ids, carried, start, end, say):
      """Feeds tokens; `say` tells what is kept of the logits [1, V]."""

      def step(t, carried):
        keys, values, found = carried
        logits, keys, values = transformer.decode(
            config,
            params,
            ids[t][None],
            t[None],
            keys,
            values,
            jnp.zeros((1, 1), jnp.int32),
            jnp.ones(1, bool),
            **place,
        )
        said = say(t, logits[:, :vocabulary])
        return (
            keys,
            values,
            jax.tree.map(
                lambda kept, new: kept.at[t + 1].set(new, mode='drop'),
                found,
                said,
            ),
        )

      return jax.lax.fori_loop(start, end, step, carried)

    one = jnp.ones(1, bool)

    def steps(params, ids, prompt, choice, carried, start, end):
      def say(t, logits):
        counts = sampling_lib.count(
            choice, ids[None], prompt[None], t[None] + 1, one, vocabulary
        )
        shaped = sampling_lib.shape(
            logits,
            choice,
            forbidden=jnp.zeros_like(logits, bool),
            active=one,
            counts=counts,
        )
        return jax.nn.log_softmax(shaped[0])[ids[t + 1]]

      return decoded(params, ids, carried, start, end, say)

    def narrowness(params, ids, temperature, told, carried, start, end):
      def say(t, logits):
        logps = jax.nn.log_softmax(logits[0] / temperature)
        left = jnp.exp(logps[ids[t + 1]] - told[t + 1])
        ordered = jnp.exp(jnp.sort(logps, descending=True))
        mass = jnp.cumsum(ordered)
        last = jnp.argmin(jnp.abs(mass - left))
        after = jnp.minimum(last + 1, vocabulary - 1)
        return {
            'left': left,
            'count': last + 1,
            'mass': mass[last],
            'before': mass[last] - ordered[last],
            'share': ordered[last] / ordered[0],
            'share_after': ordered[after] / ordered[0],
        }

      return decoded(params, ids, carried, start, end, say)

    self._rows = jax.jit(rows)
    self._steps = jax.jit(steps)
    self._narrowness = jax.jit(narrowness)
    self._blank = (
        np.zeros(cache, dtype),
        np.zeros(cache, dtype),
        np.zeros(length, np.float32),
    )

  def trainer(self, record: Trajectory) -> np.ndarray:
    """[T] nats, each token under the version that its label says."""
    ids = self._padded(record.ids)[None]
    return self._by_label(
        record,
        lambda version: self._rows(
            self._of(version), ids, np.float32(record.temperature)
        ),
    )

  def engine(
      self,
      record: Trajectory,
      *,
      shift: int = 0,
      **transform: float,
  ) -> np.ndarray:
    """[T] nats, from caches of the same weights as each token's.

    Args:
      record: the answer.
      shift: versions to add to each label.
      **transform: fields of `SamplingParams` other than the record says.
    """
    return self._by_label(
        record,
        lambda version: self._decoded(
            record, [(version + shift, 0, len(record.ids))], **transform
        ),
    )

  def kept(self, record: Trajectory, prompt: int | None = None) -> np.ndarray:
    """[T] nats, over keys and values that no later weights have rebuilt.

    Args:
      record: the answer.
      prompt: version whose weights have cached the prompt; None for that of
        the first token.
    """
    sampled = np.flatnonzero(record.versions >= 0)
    # What token t was drawn from was computed when t - 1 was fed.
    fed = np.empty(len(record.ids), np.int32)
    fed[sampled - 1] = record.versions[sampled]
    first = sampled[0] - 1
    fed[:first] = record.versions[sampled[0]] if prompt is None else prompt
    fed[sampled[-1] :] = record.versions[sampled[-1]]
    cuts = [0, *(np.flatnonzero(np.diff(fed)) + 1).tolist(), len(fed)]
    runs = [(int(fed[a]), a, b) for a, b in zip(cuts, cuts[1:])]
    return self._decoded(record, runs)

  def narrowings(self, record: Trajectory) -> list[dict[str, float]]:
    """The top-k, the top-p and the min-p that come nearest to a record.

    Nothing where too few of its tokens are likelier than they should be.
    """
    ids, told = self._padded(record.ids), self._padded(record.logps, np.float32)
    found: list[dict[str, np.ndarray]] = []
    for version in sorted(set(record.versions.tolist()) - {-1}):
      zeros = np.zeros(self._length, np.float32)
      names = ('left', 'mass', 'before', 'share', 'share_after')
      blank = dict.fromkeys(names, zeros)
      blank['count'] = np.zeros(self._length, np.int32)
      _, _, said = self._narrowness(
          self._of(version),
          ids,
          np.float32(record.temperature),
          told,
          (*self._blank[:2], blank),
          np.int32(0),
          np.int32(len(record.ids)),
      )
      own = record.versions == version
      found.append({n: np.asarray(v)[: len(own)][own] for n, v in said.items()})
    whole = {n: np.concatenate([f[n] for f in found]) for n in found[0]}
    speaks = whole['left'] < 1 - 1e-4
    if speaks.sum() < _SPEAKING:
      return []
    whole = {name: values[speaks] for name, values in whole.items()}
    low, high = whole['before'].max(), whole['mass'].min()
    top_p = (low + high) / 2 if low < high else high
    low, high = whole['share_after'].max(), whole['share'].min()
    min_p = np.sqrt(low * high) if low < high else high
    return [
        {'top_k': int(np.median(whole['count']))},
        {'top_p': float(np.clip(top_p, 1e-6, 1.0))},
        {'min_p': float(np.clip(min_p, 0.0, 1.0))},
    ]

  def _of(self, version: int) -> Any:
    """The parameters of a version, on the mesh."""
    held = self._weights[version]
    if all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(held)):
      return held
    if self._sent[0] != version:
      self._sent = (-1, None)  # makes room first
      self._sent = (version, jax.device_put(held, self._shardings))
    return self._sent[1]

  def _decoded(
      self,
      record: Trajectory,
      runs: Sequence[tuple[int, int, int]],
      **transform: float,
  ) -> np.ndarray:
    """Feeds tokens `start` to `end` of each run under its version."""
    ids, carried = self._padded(record.ids), self._blank
    prompt = np.int32(np.flatnonzero(record.versions >= 0)[0])
    asked = {'temperature': record.temperature, **transform}
    request = Request('', (0,), SamplingParams(max_new_tokens=1, **asked))
    choice = sampling_lib.choice_of(_FEATURES, 1, [request])
    for version, start, end in runs:
      carried = self._steps(
          self._of(version),
          ids,
          prompt,
          choice,
          carried,
          np.int32(start),
          np.int32(end),
      )
    return np.asarray(carried[2])[: len(record.ids)]

  def _by_label(self, record: Trajectory, score: Any) -> np.ndarray:
    found = np.zeros(len(record.ids), np.float32)
    for version in sorted(set(record.versions.tolist()) - {-1}):
      own = record.versions == version
      found[own] = np.asarray(score(version))[: len(found)][own]
    return found

  def _padded(self, values: np.ndarray, dtype: Any = np.int32) -> np.ndarray:
    return np.pad(values, (0, self._length - len(values))).astype(dtype)


def attribute(
    records: Sequence[Trajectory],
    paths: Paths,
    *,
    transforms: Sequence[Mapping[str, float]] = (),
    tolerance: float = 1e-4,
) -> Attribution:
  """Splits the gap between engine and trainer by its causes.

  Args:
    records: answers as engines gave them, of one turn each.
    paths: must hold every version that is a label.
    transforms: fields of `SamplingParams` by which the engine may have sampled,
      beside what is tried anyway.
    tolerance: mean nats a token below which a path meets a record; what
      numerics alone amount to is allowed for on top.
  """
  parts: collections.Counter[str] = collections.Counter()
  answers: collections.Counter[str] = collections.Counter()
  tokens, total = 0, 0.0
  for record in records:
    own = record.versions >= 0
    count = int(own.sum())
    trainer, engine = paths.trainer(record), paths.engine(record)
    numerics = _distance(engine, trainer, own)
    unexplained = _distance(record.logps, engine, own)
    enough = tolerance * count + numerics
    cause, left = 'numerics', unexplained
    if unexplained > enough:
      tried = [
          (_distance(record.logps, found, own), name)
          for name, found in _faulty(paths, record, transforms)
      ]
      left, cause = min(tried, default=(unexplained, ''))
      if left > enough:
        cause = 'wrong tokens'
    answers[cause] += 1
    parts['numerics'] += numerics
    parts[cause] += unexplained if cause != 'numerics' else 0.0
    tokens += count
    total += _distance(record.logps, trainer, own)
  return Attribution(
      gap=total / max(1, tokens),
      parts={cause: parts[cause] / max(1, tokens) for cause in CAUSES},
      answers={cause: answers[cause] for cause in CAUSES},
  )


def _distance(one: np.ndarray, other: np.ndarray, own: np.ndarray) -> float:
  return float(np.abs(one - other)[own].sum())


def _faulty(
    paths: Paths,
    record: Trajectory,
    transforms: Sequence[Mapping[str, float]],
) -> Iterator[tuple[str, np.ndarray]]:
  """The record scored as each fault would have it."""
  scaled = record.temperature
  tried = [
      {'temperature': other}
      for other in sorted({1.0, scaled**2, 1 / scaled} - {scaled})
  ]
  tried += [*paths.narrowings(record), *PENALTIES, *transforms]
  for transform in tried:
    yield 'sampling transform', paths.engine(record, **transform)
  labels = set(record.versions.tolist()) - {-1}
  held = set(paths.versions)
  span = max(held) - min(held)
  for shift in range(-span, span + 1):
    if shift and {label + shift for label in labels} <= held:
      yield 'stale weights', paths.engine(record, shift=shift)
  first = int(record.versions[record.versions >= 0][0])
  for version in sorted(held):
    if version != first or len(labels) > 1:
      yield 'stale cache', paths.kept(record, prompt=version)
