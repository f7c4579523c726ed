"""Variable-length answers into rows of a few static shapes.

A row holds several trajectories one behind another; a microbatch holds a number
of rows of one length. Lengths and numbers are declared (`PackingSettings`), so
that the jitted step is compiled once for each and ahead of time. Which
trajectories share a row is decided by Algorithm 1 of
https://arxiv.org/abs/2505.24298; which shapes a batch takes, by what it would
leave empty. What is a loss token travels in the record (`loss_mask`) and is
never inferred from an id, so the padding id may be any id of the vocabulary,
the end of an answer included.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Mapping, Sequence

import numpy as np

from areal_jax.config import require
from areal_jax.types import Microbatch, Trajectory

# Values of the padding, by field of `Microbatch`. Padding is segment 0.
_PADDING = {
    'ids': 0,
    'positions': 0,
    'segment_ids': 0,
    'loss_mask': 0.0,
    'behavior_logps': 0.0,
    'advantages': 0.0,
    'versions': -1,
    'temperatures': 1.0,
}
_UNKNOWN = -1  # as `models.moe.UNKNOWN`: the router chooses itself
_WHOLE = ('ids', 'positions', 'segment_ids', 'versions')


# Padding that is worth a shorter row, whose attention costs less.
_LITTLE = 0.05


@dataclasses.dataclass(frozen=True)
class Shape:
  """The static shape [B, T] of a microbatch."""

  rows: int  # B
  row_tokens: int  # T


@dataclasses.dataclass
class PackingSettings:
  """The static shapes [B, T] of microbatches.

  The largest shape is what has to fit into memory. Further ones keep padding
  low: a batch that fills 18 rows is one microbatch of 16 and one of 2 if
  `rows` is 16 and `fewer` names 2, where it would be two of 16. Each pair of a
  number and a length is compiled, so a few of them are enough.

  Attributes:
    row_tokens: T, tokens in a row: no trajectory may be longer.
    rows: B, rows in a microbatch; divisible by the shards of the rows.
    shorter: further row lengths below `row_tokens`, for batches of short
      answers: attention costs by T.
    fewer: further numbers of rows below `rows`, each divisible by the shards.
  """

  row_tokens: int = 256
  rows: int = 8
  shorter: tuple[int, ...] = ()
  fewer: tuple[int, ...] = ()

  def validate(self, at: str) -> None:
    for name, least, more in (
        ('row_tokens', 2, 'shorter'),
        ('rows', 1, 'fewer'),
    ):
      largest, others = getattr(self, name), getattr(self, more)
      require(largest >= least, f'{at}.{name}', largest, f'at least {least}')
      right = all(least <= n < largest for n in others)
      require(
          right and len(set(others)) == len(others),
          f'{at}.{more}',
          others,
          f'numbers from {least} to below {name}={largest}, each once',
      )

  @property
  def lengths(self) -> tuple[int, ...]:
    """Every T, ascending."""
    return tuple(sorted({self.row_tokens, *self.shorter}))

  @property
  def numbers(self) -> tuple[int, ...]:
    """Every B, descending."""
    return tuple(sorted({self.rows, *self.fewer}, reverse=True))

  @property
  def shapes(self) -> tuple[Shape, ...]:
    """Every pair of the two, the largest first."""
    lengths = self.lengths[::-1]
    return tuple(Shape(b, t) for t in lengths for b in self.numbers)


def allocate(
    lengths: Sequence[int], capacity: int, minimum_bins: int = 1
) -> list[list[int]]:
  """Algorithm 1: bins of sequences within a token capacity.

  Longest first: a sequence opens a new bin while there are fewer than
  `minimum_bins` or where none can take it, and otherwise joins the bin with
  the fewest sequences among those that can. Ties are settled without chance:
  equal lengths go by index, equally full bins by load, then by age.

  Args:
    lengths: tokens in each sequence.
    capacity: tokens in a bin.
    minimum_bins: bins to open before any is shared.

  Returns:
    Indices into `lengths`, a list a bin, in the order they were put in.

  Raises:
    ValueError: a sequence exceeds the capacity (its index is named), or there
      are fewer sequences than `minimum_bins`.
  """
  if lengths and len(lengths) < minimum_bins:
    raise ValueError(
        f'{len(lengths)} sequences do not fill minimum_bins={minimum_bins}'
    )
  bins: list[list[int]] = []
  loads: list[int] = []
  for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
    length = lengths[index]
    if length > capacity:
      raise ValueError(
          f'sequence {index} has {length} tokens, wanted at most {capacity}'
      )
    fitting = [b for b, load in enumerate(loads) if load + length <= capacity]
    if len(bins) < minimum_bins or not fitting:
      bins.append([index])
      loads.append(length)
    else:
      chosen = min(fitting, key=lambda b: (len(bins[b]), loads[b], b))
      bins[chosen].append(index)
      loads[chosen] += length
  return bins


def spread(
    lengths: Sequence[int],
    capacity: int,
    bins: list[list[int]],
    wanted: int,
) -> list[list[int]]:
  """Spreads sequences over `wanted` bins, where that leaves fewer empty.

  A microbatch costs the same whatever its rows hold, so rows that would stay
  empty take sequences of others. Bins without a sequence come last.

  Args:
    lengths: tokens of each sequence.
    capacity: tokens that a bin holds.
    bins: what `allocate` returned for them.
    wanted: number of bins, at least that of `bins`.
  """
  if len(bins) < wanted <= len(lengths):
    spread = allocate(lengths, capacity, wanted)
    if len(spread) == wanted:
      bins = spread
  return bins + [[] for _ in range(wanted - len(bins))]


def cover(needed: int, numbers: Sequence[int]) -> list[int]:
  """Numbers of rows, largest first, that hold `needed` rows together.

  As few rows as can be, and among those as few microbatches.

  Args:
    needed: rows, at least 0.
    numbers: what a microbatch may have; each may be taken again.
  """
  # best[n]: rows, microbatches and last number of the best cover of n rows.
  best = [(0, 0, 0)]
  for n in range(1, needed + 1):
    best.append(
        min(
            (best[max(0, n - b)][0] + b, best[max(0, n - b)][1] + 1, b)
            for b in numbers
        )
    )
  taken = []
  while needed > 0:
    taken.append(best[needed][2])
    needed -= taken[-1]
  return sorted(taken, reverse=True)


@dataclasses.dataclass(frozen=True)
class Place:
  """The place of a sequence: row of a microbatch, from token `start` on."""

  microbatch: int
  row: int
  start: int
  segment: int  # its segment id, from 1


@dataclasses.dataclass(frozen=True)
class Layout:
  """The places of all sequences of a minibatch.

  Example: lengths (3, 2) with rows of 6 tokens, one a microbatch, have the
  shapes (Shape(1, 6),) and the places (0, 0, 0, 1) and (0, 0, 3, 2).

  Attributes:
    shapes: of each microbatch; all have one T.
    places: of each sequence.
  """

  shapes: tuple[Shape, ...]
  places: tuple[Place, ...]


def lay(lengths: Sequence[int], settings: PackingSettings) -> Layout:
  """Shapes of the microbatches, and the place of each sequence.

  The rows are the shortest that leave less than 5 % empty, or those that leave
  least. Sequences of a row stand in their order. Rows stand so that those of
  any equal contiguous parts, as data shards are, hold about as many tokens.

  Raises:
    ValueError: as `allocate`.
  """
  if not lengths:
    return Layout((), ())
  capacity, bins, rows = _rows_of(lengths, settings)
  bins = spread(lengths, capacity, bins, sum(rows))
  fullest = sorted(bins, key=lambda members: -sum(lengths[i] for i in members))
  places: dict[int, Place] = {}
  first = 0
  for microbatch, count in enumerate(rows):
    own = fullest[first : first + count]
    first += count
    for row, members in zip(_dealt(count), own, strict=True):
      start = 0
      for segment, index in enumerate(sorted(members), start=1):
        places[index] = Place(microbatch, row, start, segment)
        start += lengths[index]
  return Layout(
      tuple(Shape(count, capacity) for count in rows),
      tuple(places[index] for index in range(len(lengths))),
  )


def _rows_of(
    lengths: Sequence[int], settings: PackingSettings
) -> tuple[int, list[list[int]], list[int]]:
  """Length of the rows, their sequences, and how many a microbatch has."""
  found = []
  for capacity in settings.lengths:
    if capacity < min(max(lengths), settings.row_tokens):
      continue
    bins = allocate(lengths, capacity)
    rows = cover(len(bins), settings.numbers)
    places = sum(rows) * capacity
    if sum(lengths) >= (1 - _LITTLE) * places:
      return capacity, bins, rows
    found.append((places, capacity, bins, rows))
  return min(found, key=lambda one: one[:2])[1:]


@functools.cache
def _dealt(count: int) -> tuple[int, ...]:
  """The row of each of `count` bins that come fullest first.

  In order of the row's number with its bits reversed, so that neighbours in
  fullness come to lie in different halves, quarters and so on of the rows.
  """
  bits = max(1, (count - 1).bit_length())
  return tuple(
      sorted(range(count), key=lambda row: int(f'{row:0{bits}b}'[::-1], 2))
  )


def gather(
    rows: Sequence[np.ndarray], places: Sequence[Place], lengths: Sequence[int]
) -> list[np.ndarray]:
  """The part of each sequence, [T_i], from [B, T] of each microbatch."""
  return [
      rows[p.microbatch][p.row, p.start : p.start + length]
      for p, length in zip(places, lengths, strict=True)
  ]


def scatter(values: Sequence[np.ndarray], layout: Layout) -> list[np.ndarray]:
  """[B, T] float32 of each microbatch from [T_i] of each sequence; else 0."""
  rows = [np.zeros((s.rows, s.row_tokens), np.float32) for s in layout.shapes]
  for value, p in zip(values, layout.places, strict=True):
    rows[p.microbatch][p.row, p.start : p.start + len(value)] = value
  return rows


def pack(
    trajectories: Sequence[Trajectory],
    advantages: Sequence[np.ndarray],
    settings: PackingSettings,
    routing: tuple[int, int] | None = None,
) -> list[Microbatch]:
  """Packs trajectories for the policy step.

  Args:
    trajectories: scored answers.
    advantages: [T] float32 for each, in units of reward, unshifted.
    settings: the static shapes.
    routing: (L, k) of recorded choices of experts to be replayed; None if they
      are not.

  Returns:
    Microbatches as `lay` says; none for no trajectories.

  Raises:
    ValueError: a trajectory is longer than a row, a field of it has another
      length than its ids, or its choices are missing or of another shape;
      draw_index and sample are named.
  """
  sequences = []
  for trajectory, advantage in zip(trajectories, advantages, strict=True):
    fields = {
        'ids': trajectory.ids,
        'loss_mask': trajectory.loss_mask,
        'behavior_logps': trajectory.logps,
        'advantages': advantage,
        'versions': trajectory.versions,
    }
    where = f'draw {trajectory.draw_index} sample {trajectory.sample}'
    if routing is not None:
      fields['routing'] = _choices(trajectory, routing, where)
    _check(fields, settings, where)
    sequences.append({**fields, 'temperatures': trajectory.temperature})
  return _fill(sequences, settings, routing)


def _choices(
    trajectory: Trajectory, wanted: tuple[int, int], where: str
) -> np.ndarray:
  """The recorded experts [T, L, k] of a trajectory."""
  recorded = trajectory.routing
  shape = None if recorded is None else recorded.shape[1:]
  if shape != wanted:
    raise ValueError(
        f'{where} has recorded choices of experts {shape}, wanted {wanted}'
        ' (sparse layers, experts a token), for moe.replay is on'
    )
  return recorded


def pack_pairs(
    pairs: Sequence[tuple[Sequence[int], Sequence[int], Sequence[int]]],
    settings: PackingSettings,
) -> list[Microbatch]:
  """Packs (prompt, chosen, rejected) ids; both answers of a pair share a row.

  A row holds pairs one behind another, each as two sequences: segment 1 is the
  chosen answer with its prompt, 2 the rejected one of the same pair, and so on.
  The loss mask is 1 on answers.

  Raises:
    ValueError: a pair is longer than a row, or lacks a prompt or an answer.
  """
  joined = []
  for index, (prompt, *answers) in enumerate(pairs):
    length = 2 * len(prompt) + sum(map(len, answers))
    if not all(map(len, (prompt, *answers))) or length > settings.row_tokens:
      raise ValueError(
          f'pair {index} has {len(prompt)} prompt and'
          f' {[len(a) for a in answers]} answer tokens, wanted at least one of'
          f' each and, the prompt twice, at most'
          f' packing.row_tokens={settings.row_tokens} together'
      )
    joined.append(length)
  layout = lay(joined, settings)
  packed = [empty(shape) for shape in layout.shapes]
  for (prompt, *answers), place in zip(pairs, layout.places):
    arrays, start = packed[place.microbatch].arrays(), place.start
    for which, answer in enumerate(answers):
      length = len(prompt) + len(answer)
      at = (place.row, slice(start, start + length))
      arrays['ids'][at] = [*prompt, *answer]
      arrays['loss_mask'][at] = np.arange(length) >= len(prompt)
      arrays['positions'][at] = np.arange(length)
      arrays['segment_ids'][at] = 2 * place.segment - 1 + which
      start += length
  return packed


def pack_tokens(
    sequences: Sequence[tuple[np.ndarray, np.ndarray]],
    settings: PackingSettings,
) -> list[Microbatch]:
  """Packs (ids [T], loss_mask [T]) pairs for the supervised step.

  The fields that only a sampled answer has keep their padding values.

  Raises:
    ValueError: a sequence is longer than a row, or its mask than its ids.
  """
  filled = []
  for index, (ids, mask) in enumerate(sequences):
    fields = {'ids': ids, 'loss_mask': mask}
    _check(fields, settings, f'sequence {index}')
    filled.append(fields)
  return _fill(filled, settings)


def padding_fraction(microbatches: Sequence[Microbatch]) -> float:
  """Share of the packed positions that hold no token; 0 for no microbatch."""
  size = sum(m.segment_ids.size for m in microbatches)
  used = sum(int(np.count_nonzero(m.segment_ids)) for m in microbatches)
  return 1.0 - used / size if size else 0.0


def empty(
    shape: Shape | PackingSettings, routing: tuple[int, int] | None = None
) -> Microbatch:
  """A microbatch of padding alone, also the shapes and dtypes of any.

  Args:
    shape: of it; of settings the largest.
    routing: as for `pack`.
  """
  shape = (shape.rows, shape.row_tokens)
  choices = None
  if routing is not None:
    choices = np.full((*shape, *routing), _UNKNOWN, np.int16)
  return Microbatch(
      **{
          name: np.full(shape, value, _dtype(name))
          for name, value in _PADDING.items()
      },
      routing=choices,
  )


def _fill(
    sequences: Sequence[Mapping[str, Any]],
    settings: PackingSettings,
    routing: tuple[int, int] | None = None,
) -> list[Microbatch]:
  """Writes each sequence's fields into its row."""
  lengths = [len(s['ids']) for s in sequences]
  layout = lay(lengths, settings)
  packed = [empty(shape, routing) for shape in layout.shapes]
  counting = np.arange(settings.row_tokens, dtype=np.int32)
  for sequence, length, place in zip(sequences, lengths, layout.places):
    arrays = packed[place.microbatch].arrays()
    at = (place.row, slice(place.start, place.start + length))
    for name, value in sequence.items():
      arrays[name][at] = value
    arrays['positions'][at] = counting[:length]
    arrays['segment_ids'][at] = place.segment
  return packed


def _check(
    fields: Mapping[str, np.ndarray], settings: PackingSettings, where: str
) -> None:
  length = len(fields['ids'])
  if not 0 < length <= settings.row_tokens:
    raise ValueError(
        f'{where} has {length} tokens, wanted 1 to'
        f' packing.row_tokens={settings.row_tokens}'
    )
  for name, value in fields.items():
    if len(value) != length:
      raise ValueError(
          f'{where}: {name} has length {len(value)}, wanted the {length} of ids'
      )


def _dtype(name: str) -> type:
  return np.int32 if name in _WHOLE else np.float32
