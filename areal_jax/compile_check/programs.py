"""Compiling one program from shapes, and what the compiler says of it.

In comes a traced program, out comes how long it took, what it needs of each
device's memory and what it costs there. A program that is too large for its
device is refused by the compiler itself; that is an answer. Any other error of
the compiler is one too, of less use: it is told by its first line.
"""

from __future__ import annotations

import dataclasses
import math
import re
import time
from typing import Any, Callable, Literal

import jax

from areal_jax.compile_check import hlo
from areal_jax.compile_check.chips import Chip
from areal_jax.config import ConfigError

Side = Literal['train', 'rollout']

# Of a causal kernel the blocks above the diagonal are skipped.
_CAUSAL = 0.5

_USED = re.compile(
    r'Used ([\d.]+)([KMGT]?) of [\d.]+[KMGT]? hbm'
    r'|temporaries \(([\d.]+)([KMGT]?)\) exceeds available HBM'
)
_UNITS = {'': 1, 'K': 2**10, 'M': 2**20, 'G': 2**30, 'T': 2**40}


@dataclasses.dataclass(frozen=True)
class Memory:
  """Bytes of one device, as the compiler lays them out.

  Attributes:
    arguments: of what goes in.
    results: of what comes out and takes no argument's place.
    temporaries: most that is alive in between.
    code: of the program itself.
  """

  arguments: int
  results: int
  temporaries: int
  code: int

  @property
  def total(self) -> int:
    return self.arguments + self.results + self.temporaries + self.code


@dataclasses.dataclass(frozen=True)
class Roofline:
  """Least seconds of one call, by what a chip is limited by.

  Each is what it would take if there were nothing else; `seconds` is the
  longest, as if the others went on beside it.
  """

  compute: float
  memory: float
  links: float

  @property
  def seconds(self) -> float:
    return max(self.compute, self.memory, self.links)

  @property
  def bound(self) -> str:
    """Names the longest of the three times."""
    names = dataclasses.asdict(self)
    return max(names, key=names.get)


@dataclasses.dataclass(frozen=True)
class Program:
  """A compiled program and its figures.

  Attributes:
    name: of it.
    side: which mesh it runs on.
    compile_s: seconds that it took to trace and compile.
    memory: of one device; None where the compiler refused it or failed.
    cost: of one device; None where the compiler refused it or failed.
    refused: bytes that it would need at least, of a device that has fewer; 0
      where it was compiled.
    failed: the mesh and the compiler's first line, where it failed at the
      program; empty where it did not.
  """

  name: str
  side: Side
  compile_s: float
  memory: Memory | None
  cost: hlo.Cost | None
  refused: int = 0
  failed: str = ''

  def roofline(self, chip: Chip) -> Roofline | None:
    """Least seconds of one call; None of what was not compiled."""
    if self.cost is None:
      return None
    return Roofline(
        compute=self.cost.flops / chip.flops,
        memory=self.cost.bytes / chip.hbm_rate,
        links=self.cost.sent / chip.link_rate,
    )


@dataclasses.dataclass(frozen=True, order=True)
class KernelCost:
  """The operations of kernels, and the bytes that they move."""

  flops: float = 0.0
  bytes: float = 0.0

  def __add__(self, other: KernelCost) -> KernelCost:
    return KernelCost(self.flops + other.flops, self.bytes + other.bytes)

  def times(self, count: float) -> KernelCost:
    """The same so many times."""
    return KernelCost(count * self.flops, count * self.bytes)


@dataclasses.dataclass(frozen=True)
class Task:
  """A program to be compiled.

  Attributes:
    name: of it.
    side: which mesh it runs on.
    mesh: what that mesh looks like, in words.
    trace: gives it, from shapes.
    live: see `kernel_cost`.
    grouped: share of the rows of a grouped product that are in a group.
  """

  name: str
  side: Side
  mesh: str
  trace: Callable[[], jax.stages.Traced]
  live: float = 1.0
  grouped: float = 1.0


def compile_program(
    task: Task, device: jax.Device, effort: float = 0.0
) -> Program:
  """Compiles a program and reads what it needs.

  Args:
    task: the program.
    device: one of those that it is for: kernels ask which kind they run on,
      and would otherwise be told that of this machine.
    effort: of XLA to make it fast, from -1 to 1; 0 is its default. On the
      gradient of 1.5 billion parameters, -1 took 31 seconds of processor time
      for 115, and said 5.1 GB of temporaries for 6.1 and the same collectives:
      the compiler trades what room there is for speed.

  Raises:
    ConfigError: the mesh takes a part of a slice that no program can have.
  """
  name, side = task.name, task.side
  start = time.monotonic()
  traced = task.trace()
  try:
    options = {'exec_time_optimization_effort': effort} if effort else None
    with jax.default_device(device):
      compiled = traced.lower().compile(options)
  except jax.errors.JaxRuntimeError as error:
    said = str(error)
    refused, failed = bytes_wanted(said), ''
    if not refused:
      require_whole_slices(task.side, said)
      failed = f'mesh.{side} ({task.mesh}): {first_line(said)}'
    taken = time.monotonic() - start
    return Program(name, side, taken, None, None, refused, failed)
  seconds = time.monotonic() - start
  cost = hlo.cost(compiled.as_text(), task.grouped)
  kernels = kernel_cost(traced.jaxpr.jaxpr, task.live, task.grouped)
  cost = dataclasses.replace(
      cost, flops=cost.flops + kernels.flops, bytes=cost.bytes + kernels.bytes
  )
  return Program(name, side, seconds, _memory(compiled), cost)


def bytes_wanted(message: str) -> int:
  """Bytes that a program needs at least, as its refusal says; 0 of others.

  Examples: 'RESOURCE_EXHAUSTED: ... Used 33.07G of 31.25G hbm. ...' and
  'RESOURCE_EXHAUSTED: ... required for HLO temporaries (44.02G) exceeds
  available HBM (15.75G).'
  """
  found = _USED.search(message)
  if found is None or 'RESOURCE_EXHAUSTED' not in message:
    return 0
  number, unit = (part for part in found.groups() if part is not None)
  return math.ceil(float(number) * _UNITS[unit])


def first_line(message: str) -> str:
  """The first line of an error that says something."""
  lines = (line.strip() for line in message.splitlines())
  return next(filter(None, lines), 'an error without a word')


def require_whole_slices(side: Side, message: str) -> None:
  """Says what a refusal of a part of a slice means; nothing of others.

  Found by compiling: on v5e, whose chips do not route for one another, a
  program has to cover a slice, or one chip; v5p and v6e take any part.

  Raises:
    ConfigError: it is such a refusal.
  """
  if 'RET_CHECK' in message and re.search(r'device_(count|id)', message):
    raise ConfigError(
        f'config.mesh.{side} takes a part of a slice that the compiler refuses,'
        ' wanted whole slices or single chips on v5e, such as'
        " --topology='v5e:2x4*4' has four of, one of them for the train mesh"
    )


def kernel_cost(
    jaxpr: Any, live: float = 1.0, grouped: float = 1.0
) -> KernelCost:
  """Counts what Pallas kernels compute and move on one device.

  A compiled module shows of a kernel what goes in and out. So its products are
  counted where it is written, those of its body times the points of its grid;
  and what it moves by its blocks: one is copied whenever its place may change,
  that is with each point of the axes up to the last that its place depends on.
  Half of both in the splash kernels, which skip what lies ahead of a query.
  Loops turn as often as is known, and once where it is not; of branches the
  dearest counts.

  Args:
    jaxpr: of the program.
    live: share of its points that a kernel has whose grid is known only when
      it runs. At most they are as many as entries in the first list that it is
      given beforehand.
    grouped: share of the rows of `kernels.grouped_outer` that are in a group;
      its other rows are skipped.
  """
  total = KernelCost()
  for equation in jaxpr.eqns:
    name, given = equation.primitive.name, equation.params
    if name == 'pallas_call':
      total += _of_kernel(equation, live)
      continue
    if given.get('name') == 'tgmm':
      total += _of_grouped_outer(equation, grouped)
      continue
    inside = [
        kernel_cost(part, live, grouped)
        for value in given.values()
        for part in _jaxprs(value)
    ]
    if name == 'cond':
      total += max(inside, default=KernelCost())
    else:
      times = given['length'] if name == 'scan' else 1
      total += sum(inside, KernelCost()).times(times)
  return total


def _of_grouped_outer(equation: Any, grouped: float) -> KernelCost:
  """Counts a product of rows [A, M] and [M, B]: inputs and result once each."""
  left, right = (var.aval for var in equation.invars[:2])
  (out,) = (var.aval for var in equation.outvars)
  rows, came = (
      sum(x.size * x.dtype.itemsize for x in arrays)
      for arrays in ((left, right), (out,))
  )
  flops = 2.0 * left.size * right.shape[1]
  return KernelCost(grouped * flops, grouped * rows + came)


def _of_kernel(equation: Any, live: float) -> KernelCost:
  given = equation.params
  mapping = given['grid_mapping']
  share = _CAUSAL if 'splash' in str(given['name']) else 1.0
  grid = []
  for size in mapping.grid:
    if not isinstance(size, int):
      listed = equation.invars[mapping.num_dynamic_grid_bounds].aval
      size = live * listed.shape[0]
    grid.append(size)
  moved = 0.0
  for block in mapping.block_mappings:
    axes = 1 + _last_axis(block.index_map_jaxpr.jaxpr, len(grid))
    size = math.prod(_block_sizes(block)) * block.array_aval.dtype.itemsize
    moved += size * math.prod(grid[:axes])
  points = math.prod(grid)
  return KernelCost(share * points * _products(given['jaxpr']), share * moved)


def _block_sizes(block: Any) -> list[int]:
  """Elements along each axis of a block; 1 along those that it leaves out."""
  sizes = []
  for size in block.block_shape:
    size = getattr(size, 'block_size', size)
    sizes.append(size if isinstance(size, int) else 1)
  return sizes


def _last_axis(index_map: Any, axes: int) -> int:
  """The last axis of the grid that a block's place depends on; -1 for none."""
  reach = {var: axis for axis, var in enumerate(index_map.invars[:axes])}
  for equation in index_map.eqns:
    known = [reach.get(v, -1) for v in equation.invars if not hasattr(v, 'val')]
    for var in equation.outvars:
      reach[var] = max(known, default=-1)
  known = [reach.get(v, -1) for v in index_map.outvars if not hasattr(v, 'val')]
  return max(known, default=-1)


def _products(jaxpr: Any) -> float:
  """Operations of the matrix products in a kernel's body."""
  total = 0.0
  for equation in jaxpr.eqns:
    name, given = equation.primitive.name, equation.params
    if name == 'dot_general':
      (axes, _), _ = given['dimension_numbers']
      shape = equation.invars[0].aval.shape
      contracted = math.prod(shape[axis] for axis in axes)
      total += 2.0 * contracted * math.prod(equation.outvars[0].aval.shape)
      continue
    inside = [_products(p) for v in given.values() for p in _jaxprs(v)]
    if name == 'cond':
      total += max(inside, default=0.0)
    else:
      total += (given['length'] if name == 'scan' else 1) * sum(inside)
  return total


def _jaxprs(value: Any) -> list[Any]:
  """The programs in a parameter of an equation."""
  if isinstance(value, (tuple, list)):
    return [part for each in value for part in _jaxprs(each)]
  value = getattr(value, 'jaxpr', value)  # a closed one
  return [value] if hasattr(value, 'eqns') else []


def _memory(compiled: jax.stages.Compiled) -> Memory:
  found = compiled.memory_analysis()
  return Memory(
      arguments=found.argument_size_in_bytes,
      results=found.output_size_in_bytes - found.alias_size_in_bytes,
      temporaries=found.temp_size_in_bytes,
      code=found.generated_code_size_in_bytes,
  )
