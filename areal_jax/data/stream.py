"""The order in which problems are drawn, without end and resumable.

A stream deals every problem of a source once an epoch, in an order that depends
on seed, purpose, source and epoch alone; several sources are mixed by weight.
It keeps one number, the next draw index, so that a resume is exact to the row.
Hosts that draw side by side take turns in one common order. What became of a
draw is the ledger's business.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
import math
from typing import Any, Iterable, Iterator, Mapping, Sequence

from areal_jax.config import ConfigError, require
from areal_jax.types import Draw, Problem, Purpose


@dataclasses.dataclass(frozen=True)
class Part:
  """A run of neighbours in a list of problems that come from one source.

  `weight` is its share of the draws, relative to those of the other parts.
  """

  name: str
  size: int
  weight: float = 1.0


class ProblemStream(Iterator[Draw]):
  """Iterator of `Draw`; `draw_index` counts 0, 1, 2, ... over all restarts.

  Draw i of a source of N problems is of the source's epoch i // N. Of the first
  n draws of a mixture, each source has its share of n to within a few draws,
  evenly spread.

  Args:
    problems: all of them, source by source.
    seed: the run's.
    purpose: training and evaluation draw in orders of their own.
    parts: which of the problems are of which source; None for one source.

  Raises:
    ConfigError: no problem, two with one id, or parts that are not those of the
      problems.
  """

  def __init__(
      self,
      problems: Sequence[Problem],
      *,
      seed: int,
      purpose: Purpose = Purpose.TRAIN,
      parts: Sequence[Part] | None = None,
  ):
    ids = [problem.id for problem in problems]
    parts = tuple(parts) if parts else (Part('', len(ids)),)
    _check(ids, parts)
    self._purpose = purpose
    self._parts = parts
    self._shard = (0, 1)
    # What must be equal for the next draw index to say where we are.
    self._identity = {
        'problems': len(ids),
        'ids_digest': _digest(*ids),
        'sources': [dataclasses.asdict(part) for part in parts],
        'seed': seed,
        'purpose': int(purpose),
    }
    self._order = _order(problems, parts, seed, purpose)
    self._first = self._next = 0
    self._positions = [0] * len(parts)

  def shard(self, index: int, count: int) -> ProblemStream:
    """The draws of host `index` of `count`: every count-th of this order.

    Together the hosts make every draw once, each with its own draw indices.

    Raises:
      ConfigError: no such host, or a stream that was drawn from already.
    """
    require(count >= 1, 'shard count', count, 'at least 1')
    require(0 <= index < count, 'shard index', index, f'0..{count - 1}')
    unused = self._next == 0 and self._shard == (0, 1)
    require(unused, 'next draw of a stream to shard', self._next,
            '0, and all of its draws')  # fmt: skip
    other = ProblemStream.__new__(ProblemStream)
    other.__dict__.update(self.__dict__)
    other._shard = (index, count)
    other._first, other._next = 0, index
    other._positions = [0] * len(self._parts)
    return other

  def __next__(self) -> Draw:
    index = self._next
    self._next += self._shard[1]
    part, place, problem = self._order[index - self._first]
    self._positions[part] = place + 1
    return Draw(
        draw_index=index,
        epoch=place // self._parts[part].size,
        problem=problem,
        purpose=self._purpose,
    )

  def state(self) -> dict[str, Any]:
    """Returns what `restore` needs, as JSON.

    `positions` has, for each source, how far its own order has been walked: the
    draws from it up to the last one made here. It is for the reader; the next
    draw index says it all.
    """
    return {
        'next_draw_index': self._next,
        'first_draw_index': self._first,
        'positions': list(self._positions),
        'shard': list(self._shard),
        **self._identity,
    }

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on after the draw that was the last when `state` was taken.

    Raises:
      ConfigError: the state is of other problems, or of another mixture, seed,
        purpose or shard; names the first that differs.
    """
    difference = self.difference(state)
    if difference:
      raise ConfigError(difference)
    self._first = int(state.get('first_draw_index', 0))
    self._next = int(state['next_draw_index'])
    self._positions = [int(place) for place in state['positions']]

  def difference(self, state: Mapping[str, Any]) -> str:
    """Describes how a state differs from this stream; empty if it does not.

    Ids are compared, and not what the problems of these ids say.
    """
    for name, value in {**self._identity, 'shard': [*self._shard]}.items():
      if state.get(name) != value:
        return (
            f'{name} of the saved data state is {state.get(name)!r}, wanted'
            f' {value!r} as in this run'
        )
    return ''

  def begin_at(self, index: int) -> None:
    """Begins with the first problem of its order, under this draw index.

    For data that take the place of others in a run: draw indices rise on.
    """
    self._first = self._next = index
    self._positions = [0] * len(self._parts)


def _check(ids: Sequence[str], parts: Sequence[Part]) -> None:
  """Refuses problems and parts that do not go together."""
  require(len(ids) > 0, 'the number of problems', 0, 'at least 1')
  twice = [i for i, n in collections.Counter(ids).items() if n > 1]
  require(not twice, 'problem ids', twice[:5], 'each of them once')
  for part in parts:
    at = f'source {part.name!r}'
    require(part.size >= 1, f'the number of problems of {at}', part.size,
            'at least 1')  # fmt: skip
    right = 0 < part.weight < math.inf
    require(right, f'the weight of {at}', part.weight, 'above 0 and finite')
  total = sum(part.size for part in parts)
  require(total == len(ids), 'the number of problems of all sources', total,
          f'the {len(ids)} problems')  # fmt: skip


def _order(
    problems: Sequence[Problem],
    parts: Sequence[Part],
    seed: int,
    purpose: Purpose,
) -> Any:
  """Endless order of (part, place in the part's own order, problem)."""
  # Here and not above: grain imports jax, which this room does without, and
  # takes half a second more.
  import grain

  orders = []
  starts = itertools.accumulate((part.size for part in parts), initial=0)
  for k, (part, start) in enumerate(zip(parts, starts)):
    # grain shuffles epoch e of seed s as epoch 0 of seed s + e; hashed, seeds
    # that follow one another share no order.
    name = (seed, int(purpose), k) if k else (seed, int(purpose))
    # By index, without grain's iterator: no thread, and nothing else to save.
    # A draw takes 20 us, and 2 ms for a dozen problems (grain's permutation
    # of few items walks long cycles).
    orders.append(
        grain.MapDataset.source(problems[start : start + part.size])
        .shuffle(int(_digest(*name)[:8], 16))
        .repeat()
        .map_with_index(lambda place, problem, k=k: (k, place, problem))
    )
  if len(orders) == 1:
    return orders[0]
  return grain.MapDataset.mix(orders, weights=[part.weight for part in parts])


def content_digest(problems: Iterable[Problem]) -> str:
  """Hexadecimal hash of all that problems say, in their order."""
  said = (
      (p.id, p.prompt, p.answer, sorted((str(k), v) for k, v in p.meta.items()))
      for p in problems
  )
  return _digest(*said)


def _digest(*parts: Any) -> str:
  """Hexadecimal hash of the parts in their order."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    content = str(part).encode('utf-8')
    digest.update(len(content).to_bytes(8, 'little') + content)
  return digest.hexdigest()
