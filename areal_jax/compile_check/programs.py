"""Compiling one program from shapes, and what the compiler says of it.

In comes a traced program, out comes how long it took, what it needs of each
device's memory and what it costs there. A program that is too large for its
device is refused by the compiler itself; that is an answer, and any other
exception of it is not caught.
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
    """Which one is the longest."""
    names = dataclasses.asdict(self)
    return max(names, key=names.get)


@dataclasses.dataclass(frozen=True)
class Program:
  """One compiled program.

  Attributes:
    name: of it.
    side: which mesh it runs on.
    compile_s: seconds that it took to trace and compile.
    memory: of one device; None where the compiler refused it.
    cost: of one device; None where the compiler refused it.
    refused: bytes that it would need at least, of a device that has fewer; 0
      where it was compiled.
  """

  name: str
  side: Side
  compile_s: float
  memory: Memory | None
  cost: hlo.Cost | None
  refused: int = 0

  def roofline(self, chip: Chip) -> Roofline | None:
    """Least seconds of one call; None where the compiler refused it."""
    if self.cost is None:
      return None
    return Roofline(
        compute=self.cost.flops / chip.flops,
        memory=self.cost.bytes / chip.hbm_rate,
        links=self.cost.sent / chip.link_rate,
    )


def compile_program(
    name: str, side: Side, trace: Callable[[], jax.stages.Traced]
) -> Program:
  """Compiles a program and reads what it needs.

  Args:
    name: of it.
    side: which mesh it runs on.
    trace: gives it.
  """
  start = time.monotonic()
  traced = trace()
  try:
    compiled = traced.lower().compile()
  except jax.errors.JaxRuntimeError as error:
    refused = bytes_wanted(str(error))
    if not refused:
      raise
    return Program(name, side, time.monotonic() - start, None, None, refused)
  seconds = time.monotonic() - start
  cost = hlo.cost(compiled.as_text())
  cost = dataclasses.replace(
      cost, flops=cost.flops + kernel_flops(traced.jaxpr.jaxpr)
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


def kernel_flops(jaxpr: Any) -> float:
  """Operations of the matrix products in Pallas kernels, on one device.

  A compiled module shows of a kernel what goes in and out. Its products are
  counted where it is written: those of its body times the points of its grid,
  half of them in the splash kernels, which skip what lies ahead of a query.
  Loops turn as often as is known, and once where it is not; of branches the
  dearest counts.
  """
  return _flops(jaxpr, in_kernel=False)


def _flops(jaxpr: Any, *, in_kernel: bool) -> float:
  total = 0.0
  for equation in jaxpr.eqns:
    name, given = equation.primitive.name, equation.params
    if name == 'pallas_call':
      points = math.prod(given['grid_mapping'].grid)
      called = str(given.get('name') or given.get('name_and_src_info', ''))
      share = _CAUSAL if 'splash' in called else 1.0
      total += share * points * _flops(given['jaxpr'], in_kernel=True)
    elif name == 'dot_general' and in_kernel:
      (axes, _), _ = given['dimension_numbers']
      shape = equation.invars[0].aval.shape
      contracted = math.prod(shape[axis] for axis in axes)
      total += 2.0 * contracted * math.prod(equation.outvars[0].aval.shape)
    else:
      inside = [
          _flops(part, in_kernel=in_kernel)
          for value in given.values()
          for part in _jaxprs(value)
      ]
      if name == 'cond':
        total += max(inside, default=0.0)
      else:
        times = given['length'] if name == 'scan' else 1
        total += times * sum(inside)
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
