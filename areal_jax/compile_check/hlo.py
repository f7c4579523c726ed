"""What one device does in a compiled program, read from its text.

XLA's own cost analysis counts the body of a loop once, and names no collective;
a policy whose layers are scanned does nearly all its work in loops. So the text
of the optimised module is read: instructions, the computations they call, and
how often a loop turns: from `known_trip_count`, or from a condition that
compares a counter with a constant.

  operations   2 · outputs · contracted size of every dot and convolution;
               elementwise work is left out: matrix units do none of it
  bytes        what every instruction outside of fusions reads and writes, of a
               slice or gather the part that it takes, of an update in place the
               part that is new; what lies in a chip's faster memories is free
  collectives  by kind: how many, bytes of the whole array, and bytes that each
               device sends around a ring of its group

The semantics are in https://openxla.org/xla/operation_semantics, the text has
no specification; what this file knows of it is shown by its tests.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Mapping

from areal_jax.compile_check.hlo_text import (
    COMPUTATION,
    INSTRUCTION,
    NUMBERS,
    Instruction,
    braced,
    call_target,
    channel_of,
    group_size,
    read_instruction,
    window_sizes,
)

# Kinds by the name of their instruction, asynchronous ones begin with '-start'.
COLLECTIVES = (
    'all-gather',
    'all-reduce',
    'all-to-all',
    'collective-permute',
    'ragged-all-to-all',
    'reduce-scatter',
)

# Hand-written ones, by what calls them.
KERNELS = frozenset(('tpu_custom_call', '__gpu$xla.gpu.triton', '__cudnn$fmha'))
# What XLA for TPU writes at a kernel of its own for `jax.lax.ragged_dot`.
_GROUPED = 'ragged_dot_tiling'
# With these a compiler speaks to itself.
_HELPERS = frozenset(
    (
        'AllocateBuffer',
        'AssumeGatherIndicesInBound',
        'AsyncCollectiveDone',
        'AsyncCollectiveStart',
        'ConcatBitcast',
        'Sharding',
    )
)
_FREE = frozenset(
    (
        'after-all',
        'bitcast',
        'constant',
        'domain',
        'get-tuple-element',
        'opt-barrier',
        'parameter',
        'partition-id',
        'replica-id',
        'tuple',
    )
)
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"')


@dataclasses.dataclass(frozen=True)
class Collective:
  """All collectives of one kind over groups of one size.

  Attributes:
    kind: one of `COLLECTIVES`.
    group: devices of each group.
    count: how often it runs.
    bytes: of the whole arrays, those of one device of a permutation.
    sent: bytes that a device sends, around a ring where the kind goes around.
  """

  kind: str
  group: int
  count: float
  bytes: float
  sent: float


@dataclasses.dataclass(frozen=True)
class Cost:
  """The work of one device in one call of a program.

  Attributes:
    flops: of its matrix products.
    bytes: from and to its memory.
    collectives: sorted by what they send, most first.
    kernels: hand-written kernels by name and how often they run. What they
      compute and move is in no text: it is not in the other numbers.
    unknown_loops: how many loops turn a number of times that XLA does not know;
      they are counted as if they did once.
    arguments: bytes of what goes in, without what their layout adds.
  """

  flops: float
  bytes: float
  collectives: tuple[Collective, ...]
  kernels: Mapping[str, float]
  unknown_loops: int
  arguments: float

  @property
  def sent(self) -> float:
    """Bytes that a device sends."""
    return sum(each.sent for each in self.collectives)


def cost(text: str, grouped: float = 1.0) -> Cost:
  """Reads the text of a compiled module, `compiled.as_text()`.

  Args:
    text: of the module.
    grouped: share of the rows of its grouped products that are in a group.

  Raises:
    ValueError: there is no entry computation in it.
  """
  return _Module(text, grouped).cost()


class _Module:
  """A module's computations by name, and sums over them."""

  def __init__(self, text: str, grouped: float):
    self._grouped = grouped
    self._computations: dict[str, dict[str, Instruction]] = {}
    self._entry = ''
    current: dict[str, Instruction] = {}
    for line in text.splitlines():
      head = COMPUTATION.match(line)
      if head:
        current = self._computations.setdefault(head[2], {})
        if head[1]:
          self._entry = head[2]
        continue
      found = INSTRUCTION.match(line)
      if found:
        instruction = read_instruction(found[2], found[3], bool(found[1]))
        current[instruction.name] = instruction
    if not self._entry:
      raise ValueError('a module without an ENTRY computation, wanted one')
    self._unknown = 0
    self._known_sums: dict[tuple[str, bool], _Sums] = {}
    self._known_users: dict[str, dict[str, list[Instruction]]] = {}

  def cost(self) -> Cost:
    total = self._sum(self._entry)
    kinds: dict[tuple[str, int], list[float]] = {}
    for (_, kind, group, size), count in total.collectives.items():
      sums = kinds.setdefault((kind, group), [0, 0.0, 0.0])
      sums[0] += count
      sums[1] += count * size
      sums[2] += count * ring_bytes(kind, group, size)
    # A group of one, of an axis that is not cut, sends nothing.
    found = [Collective(*k, *sums) for k, sums in kinds.items() if k[1] > 1]
    return Cost(
        flops=total.flops,
        bytes=total.bytes,
        collectives=tuple(sorted(found, key=lambda c: -c.sent)),
        kernels=dict(total.kernels),
        unknown_loops=self._unknown,
        arguments=sum(
            array.bytes
            for each in self._computations[self._entry].values()
            if each.op == 'parameter'
            for array in each.arrays
        ),
    )

  def _sum(self, computation: str, *, fused: bool = False) -> _Sums:
    """Sums over a computation and what it calls.

    Inside of a fusion nothing goes to memory: there are no bytes.
    """
    key = computation, fused
    if key not in self._known_sums:
      total = _Sums()
      for each in self._computations[computation].values():
        # One that goes on beside other work is in several fusions at once.
        apart = each.op not in ('while', 'conditional', 'call')
        total.add(self._of(computation, each, fused), by_channel=apart)
      self._known_sums[key] = total
    return self._known_sums[key]

  def _of(self, computation: str, each: Instruction, fused: bool) -> _Sums:
    op = each.op
    if op in _FREE or op.endswith(('-done', '-update')):
      return _Sums()
    if op == 'while':
      trips = self._trips(computation, each)
      self._unknown += trips is None
      sums = _Sums()
      for name in each.called('body', 'condition'):
        sums.add(self._sum(name), 1 if trips is None else trips)
      return sums
    if op == 'conditional':
      names = each.called(
          'branch_computations', 'true_computation', 'false_computation'
      )
      # The dearest branch: what is skipped now may be needed at another call.
      return max((self._sum(name) for name in names), key=_Sums.weight)
    if op in ('call', 'async-start'):
      sums = _Sums()
      for name in each.called('calls', 'to_apply'):
        sums.add(self._sum(name, fused=fused))
      return sums
    sums = _Sums()
    if op == 'fusion':
      for name in each.called('calls'):
        sums.add(self._sum(name, fused=True))
    elif op == 'custom-call' and _GROUPED in each.attributes:
      sums.flops += self._grouped_product(computation, each)
    elif op == 'custom-call':
      target = call_target(each)
      if target in KERNELS:
        sums.kernels[target] += 1
      if target in KERNELS or target in _HELPERS:
        return sums
    elif op in ('dot', 'convolution'):
      sums.flops += self._product(computation, each)
    else:
      kind = op.removesuffix('-start')
      if kind in COLLECTIVES:
        size = self._size(computation, each)
        sums.collectives[channel_of(each), kind, group_size(each), size] += 1
    if not fused:
      sums.bytes += self._bytes(computation, each)
    return sums

  def _trips(self, computation: str, each: Instruction) -> int | None:
    """Returns the trip count of a loop; None where it is unknown.

    A counter goes up from one constant to below another one, by a third where
    the loop is unrolled.
    """
    found = _TRIPS.search(each.attributes)
    if found:
      return int(found[1])
    (condition,) = each.called('condition')
    inside = self._computations[condition]
    root = next(i for i in inside.values() if i.is_root)
    if root.op != 'compare' or 'direction=LT' not in root.attributes:
      return None
    counter, limit = (inside[name] for name in root.operands)
    place = re.search(r'index=(\d+)', counter.attributes)
    if limit.op != 'constant' or place is None:
      return None
    outside = self._computations[computation]
    start = outside[each.operands[0]]
    first = 0
    if start.op == 'tuple':
      begins = outside[start.operands[int(place[1])]]
      first = int(begins.arguments) if begins.op == 'constant' else 0
    step = self._step(each, int(place[1]))
    return -(-(int(limit.arguments) - first) // step)

  def _step(self, each: Instruction, place: int) -> int:
    """Returns the step of a loop's counter; 1 where it is unclear."""
    (body,) = each.called('body')
    inside = self._computations[body]
    root = next(i for i in inside.values() if i.is_root)
    if root.op != 'tuple':
      return 1
    after = inside[root.operands[place]]
    if after.op != 'add':
      return 1
    added = (inside[name] for name in after.operands)
    return next((int(i.arguments) for i in added if i.op == 'constant'), 1)

  def _size(self, computation: str, each: Instruction) -> float:
    """Bytes of the larger side of a collective, in whatever memory."""
    given = sum(
        array.bytes
        for name in each.operands
        for array in self._computations[computation][name].arrays
    )
    arrays = each.arrays
    if each.op.endswith('-start') and len(arrays) > 1:
      # (operands, results, contexts); the contexts are scalars.
      arrays = arrays[len(each.operands) :]
    return max(given, sum(array.bytes for array in arrays))

  def _product(self, computation: str, each: Instruction) -> float:
    """Operations of a dot or a convolution."""
    left, right = (
        self._computations[computation][name].arrays[0].sizes
        for name in each.operands[:2]
    )
    if each.op == 'dot':
      match = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', each.attributes)
      axes = [int(n) for n in NUMBERS.findall(match[1])] if match else []
      contracted = math.prod(left[axis] for axis in axes)
      return 2.0 * each.arrays[0].elements * contracted
    return _convolution(each, left, right)

  def _grouped_product(self, computation: str, each: Instruction) -> float:
    """Operations of rows [M, K], each times the matrix of its group."""
    rows = self._computations[computation][each.operands[-2]].arrays[0].sizes
    return self._grouped * 2.0 * each.arrays[0].elements * rows[-1]

  # Bytes.

  def _bytes(self, computation: str, each: Instruction) -> float:
    op = each.op
    if op == 'dynamic-slice' or op == 'gather':
      return 2 * each.bytes
    if op == 'dynamic-update-slice':
      return 2 * self._result(computation, each.operands[1])
    if op == 'scatter':
      return 3 * self._result(computation, each.operands[-1])
    if op.endswith('-start'):
      # Operand and result; the rest of the tuple repeats the operand.
      read = sum(self._result(computation, name) for name in each.operands)
      arrays = each.arrays[len(each.operands) :] or each.arrays
      return read + sum(a.bytes for a in arrays if not a.is_fast)
    if op != 'fusion':
      return each.bytes + sum(
          self._result(computation, name) for name in each.operands
      )
    (inner,) = each.called('calls')
    read = 0.0
    for place, name in enumerate(each.operands):
      if self._result(computation, name):
        read += self._read(inner, place)
    return read + self._written(inner, each)

  def _result(self, computation: str, name: str) -> float:
    return self._computations[computation][name].bytes

  def _users(self, computation: str) -> dict[str, list[Instruction]]:
    """The instructions of a computation by the values that they take."""
    if computation not in self._known_users:
      users = collections.defaultdict(list)
      for each in self._computations[computation].values():
        for name in dict.fromkeys(each.operands):
          users[name].append(each)
      self._known_users[computation] = users
    return self._known_users[computation]

  def _read(self, computation: str, place: int) -> float:
    """Bytes that a fusion reads of its parameter number `place`."""
    for each in self._computations[computation].values():
      if each.op == 'parameter' and each.arguments.strip() == str(place):
        return min(each.bytes, self._taken(computation, each))
    return 0.0

  def _taken(self, computation: str, each: Instruction) -> float:
    """Bytes that the users of a value take of it."""
    taken = 0.0
    for user in self._users(computation)[each.name]:
      first = user.operands[0] == each.name
      if user.op in ('dynamic-slice', 'gather') and first:
        taken += sum(array.bytes for array in user.arrays)
      elif user.op in ('dynamic-update-slice', 'scatter') and first:
        continue  # in place
      elif user.op == 'bitcast':
        taken += self._taken(computation, user)
      elif user.op == 'fusion':
        (inner,) = user.called('calls')
        taken += sum(
            self._read(inner, place)
            for place, name in enumerate(user.operands)
            if name == each.name
        )
      else:
        return math.inf
    return taken

  def _written(self, computation: str, outside: Instruction) -> float:
    """Bytes that a fusion writes."""
    inside = self._computations[computation]
    root = next(each for each in inside.values() if each.is_root)
    parts = [root]
    if root.op == 'tuple':
      parts = [inside[name] for name in root.operands]
    written = 0.0
    for part, array in zip(parts, outside.arrays):
      while part.op == 'bitcast':
        part = inside[part.operands[0]]
      if array.is_fast:
        continue
      if part.op == 'dynamic-update-slice':
        written += sum(a.bytes for a in inside[part.operands[1]].arrays)
      elif part.op == 'scatter':
        written += sum(a.bytes for a in inside[part.operands[-1]].arrays)
      else:
        written += array.bytes
    return written


class _Sums:
  """Running sums; collectives by (channel, kind, group, bytes)."""

  def __init__(self):
    self.flops = 0.0
    self.bytes = 0.0
    self.collectives: collections.Counter = collections.Counter()
    self.kernels: collections.Counter = collections.Counter()

  def add(
      self, other: _Sums, times: int = 1, *, by_channel: bool = False
  ) -> None:
    """Adds `times` the other; with `by_channel` a collective counts once."""
    self.flops += times * other.flops
    self.bytes += times * other.bytes
    for key, count in other.kernels.items():
      self.kernels[key] += times * count
    for key, count in other.collectives.items():
      known = by_channel and key[0] and key in self.collectives
      self.collectives[key] += 0 if known else times * count

  def weight(self) -> tuple[float, float]:
    return self.flops, self.bytes


def ring_bytes(kind: str, group: int, size: float) -> float:
  """Bytes that each device of a ring sends in a collective.

  With n devices and an array of `size` bytes as a whole: (n - 1) / n of it for
  a gather or a scatter, twice that for an all-reduce, which is both, and for an
  exchange of all with all; a permutation sends what it is given.

  Args:
    kind: one of `COLLECTIVES`.
    group: n; 1 sends nothing.
    size: of the larger side: the result of a gather, the operand of a scatter.
  """
  share = (group - 1) / group
  if kind == 'all-reduce':
    return 2 * share * size
  if kind == 'collective-permute':
    return size if group > 1 else 0.0
  return share * size


def _convolution(
    each: Instruction, left: tuple[int, ...], right: tuple[int, ...]
) -> float:
  """2 · batch · outputs · inputs · pairs of positions that meet.

  TPUs have their matrix products in this form too, batch axes as dimensions
  that are dilated or padded so that each position meets one of the other side.
  """
  labels = re.search(r'dim_labels=([\w?]+)_([\w?]+)->([\w?]+)', each.attributes)
  inputs, kernel, outputs = labels.groups()
  result = each.arrays[0].sizes
  window = dict(
      re.findall(r'(\w+)=([\dx_\-]+)', braced(each.attributes, 'window='))
  )
  pairs = 1
  spatial = sorted(label for label in inputs if label.isdigit())
  for place, label in enumerate(spatial):
    pairs *= _meetings(
        left[inputs.index(label)],
        right[kernel.index(label)],
        result[outputs.index(label)],
        stride=window_sizes(window, 'stride', place, 1),
        low=window_sizes(window, 'pad', place, 0),
        spread=window_sizes(window, 'lhs_dilate', place, 1),
        step=window_sizes(window, 'rhs_dilate', place, 1),
    )
  return (
      2.0
      * pairs
      * result[outputs.index('b')]
      * result[outputs.index('f')]
      * right[kernel.index('i')]
  )


def _meetings(
    left: int, right: int, result: int, *, stride: int, low: int, spread: int,
    step: int,
) -> int:  # fmt: skip
  """Pairs (output, kernel) along a dimension that meet an input element."""
  count, last = 0, (left - 1) * spread
  for position in range(right):
    first = position * step - low
    if spread == 1 and stride == 1:
      count += max(0, min(result - 1, last - first) - max(0, -first) + 1)
      continue
    places = (out * stride + first for out in range(result))
    count += sum(0 <= p <= last and p % spread == 0 for p in places)
  return count
