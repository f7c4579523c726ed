"""The order in which problems are drawn, without end and resumable.

A stream deals every problem once an epoch, in an order that depends on seed,
purpose and epoch alone. It keeps one number, the next draw index, so that a
resume is exact. What became of a draw is the ledger's business.
"""

from __future__ import annotations

import collections
import hashlib
from typing import Any, Iterator, Mapping, Sequence

from areal_jax.config import require
from areal_jax.types import Draw, Problem, Purpose


class ProblemStream(Iterator[Draw]):
  """Iterator of `Draw`; `draw_index` counts 0, 1, 2, ... over all restarts.

  Args:
    problems: N of them; draw i is of epoch i // N.
    seed: the run's.
    purpose: training and evaluation draw in orders of their own.

  Raises:
    ConfigError: no problem, or two with one id.
  """

  def __init__(
      self,
      problems: Sequence[Problem],
      *,
      seed: int,
      purpose: Purpose = Purpose.TRAIN,
  ):
    # Here and not above: grain imports jax, which this room does without, and
    # takes half a second more.
    import grain

    ids = [problem.id for problem in problems]
    require(len(ids) > 0, 'the number of problems', 0, 'at least 1')
    twice = [i for i, n in collections.Counter(ids).items() if n > 1]
    require(not twice, 'problem ids', twice[:5], 'each of them once')
    self._purpose = purpose
    self._size = len(ids)
    # What must be equal for the next draw index to say where we are.
    self._identity = {
        'problems': self._size,
        'ids_digest': _digest(*ids),
        'seed': seed,
        'purpose': int(purpose),
    }
    # grain shuffles epoch e of seed s as epoch 0 of seed s + e; hashed, seeds
    # that follow one another share no order.
    shuffle_seed = int(_digest(seed, int(purpose))[:8], 16)
    # By index, without grain's iterator: no thread, and nothing else to save.
    # A draw takes 20 us, and 2 ms for a dozen problems (grain's permutation
    # of few items walks long cycles).
    self._order = (
        grain.MapDataset.source(problems).shuffle(shuffle_seed).repeat()
    )
    self._next = 0

  def __next__(self) -> Draw:
    index = self._next
    self._next += 1
    return Draw(
        draw_index=index,
        epoch=index // self._size,
        problem=self._order[index],
        purpose=self._purpose,
    )

  def state(self) -> dict[str, Any]:
    """What `restore` needs, as JSON."""
    return {'next_draw_index': self._next, **self._identity}

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on after the draw that was the last when `state` was taken.

    Raises:
      ConfigError: the state is of other problems, or of another seed or
        purpose; names the first that differs.
    """
    for name, value in self._identity.items():
      require(
          state.get(name) == value,
          f'{name} of the saved data state',
          state.get(name),
          f'{value!r} as in this run',
      )
    self._next = int(state['next_draw_index'])


def _digest(*parts: Any) -> str:
  """Hexadecimal hash of the parts in their order."""
  digest = hashlib.blake2b(digest_size=16)
  for part in parts:
    content = str(part).encode('utf-8')
    digest.update(len(content).to_bytes(8, 'little') + content)
  return digest.hexdigest()
