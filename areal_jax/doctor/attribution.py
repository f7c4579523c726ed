"""Why engine and trainer disagree on a log-prob: the same tokens, path by path.

A record says which tokens were sampled, at which temperature and under which
version of the weights, and what the engine took their log-probs to be. The same
tokens are scored here along each path on which something may go wrong:

  trainer             rows of whole sequences, as training scores them
  engine              token by token through a cache, as engines do; whatever
                      separates it from the trainer's is numerics
  sampling transform  the engine's path at another temperature than was told
  stale weights       the engine's path under other weights than the label says
  stale cache         the labelled weights over keys and values of others: those
                      of tokens before a swap, or of the prompt

The path that meets the record names the cause. Where none does, the tokens of
the record are not those that were sampled: wrong tokens.
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
from areal_jax.models import transformer
from areal_jax.models.config import ModelConfig
from areal_jax.types import Trajectory

CAUSES = (
    'numerics',
    'sampling transform',
    'stale weights',
    'stale cache',
    'wrong tokens',
)


@dataclasses.dataclass(frozen=True)
class Attribution:
  """How a gap splits, in nats a token over all sampled tokens.

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
    """What most of the gap comes from."""
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
    weights: parameters by version, on `mesh`.
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
    self._length = length
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

    def steps(params, ids, temperature, carried, start, end):
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
        logps = jax.nn.log_softmax(logits[0] / temperature)
        return keys, values, found.at[t + 1].set(logps[ids[t + 1]], mode='drop')

      return jax.lax.fori_loop(start, end, step, carried)

    self._rows = jax.jit(rows)
    self._steps = jax.jit(steps)
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
            self._weights[version], ids, np.float32(record.temperature)
        ),
    )

  def engine(
      self,
      record: Trajectory,
      *,
      temperature: float | None = None,
      shift: int = 0,
  ) -> np.ndarray:
    """[T] nats, from caches of the same weights as each token's.

    Args:
      record: the answer.
      temperature: instead of the record's.
      shift: versions to add to each label.
    """
    return self._by_label(
        record,
        lambda version: self._decoded(
            record,
            [(version + shift, 0, len(record.ids))],
            record.temperature if temperature is None else temperature,
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
    return self._decoded(record, runs, record.temperature)

  def _decoded(
      self,
      record: Trajectory,
      runs: Sequence[tuple[int, int, int]],
      temperature: float,
  ) -> np.ndarray:
    """Feeds tokens `start` to `end` of each run under its version."""
    ids, carried = self._padded(record.ids), self._blank
    for version, start, end in runs:
      carried = self._steps(
          self._weights[version],
          ids,
          np.float32(temperature),
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

  def _padded(self, ids: np.ndarray) -> np.ndarray:
    return np.pad(ids, (0, self._length - len(ids))).astype(np.int32)


def attribute(
    records: Sequence[Trajectory], paths: Paths, *, tolerance: float = 1e-4
) -> Attribution:
  """Splits the gap between engine and trainer by its causes.

  Args:
    records: answers as engines gave them, of one turn each.
    paths: must hold every version that is a label.
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
          for name, found in _faulty(paths, record)
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
    paths: Paths, record: Trajectory
) -> Iterator[tuple[str, np.ndarray]]:
  """The record scored as each fault would have it."""
  scaled = record.temperature
  for temperature in sorted({1.0, scaled**2, 1 / scaled} - {scaled}):
    yield 'sampling transform', paths.engine(record, temperature=temperature)
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
