"""The text of an optimised XLA module, read into instructions."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Mapping

_ARRAY = re.compile(r'([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
COMPUTATION = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*)$')
_NAME = re.compile(r'%([\w.\-]+)')
NUMBERS = re.compile(r'\d+')


@dataclasses.dataclass(frozen=True)
class Array:
  """An array in the result of an instruction."""

  dtype: str
  sizes: tuple[int, ...]
  is_fast: bool  # it lies in a memory faster than HBM

  @property
  def elements(self) -> int:
    return math.prod(self.sizes)

  @property
  def bytes(self) -> float:
    return self.elements * _bits(self.dtype) / 8


@dataclasses.dataclass(frozen=True)
class Instruction:
  """An instruction: `name = arrays op(operands), attributes`."""

  name: str
  op: str
  arrays: tuple[Array, ...]
  operands: tuple[str, ...]
  attributes: str
  arguments: str
  is_root: bool

  @property
  def bytes(self) -> float:
    """Bytes of the result in HBM."""
    return sum(array.bytes for array in self.arrays if not array.is_fast)

  def called(self, *names: str) -> list[str]:
    """Computations that these attributes name."""
    found = []
    for name in names:
      match = re.search(rf'\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)', self.attributes)
      if match:
        found += re.findall(r'%?([\w.\-]+)', match[1])
    return found


def read_instruction(name: str, rest: str, is_root: bool) -> Instruction:
  """Reads what stands behind the `=`: type, op(operands), attributes."""
  end = _closing(rest, 0) + 1 if rest.startswith('(') else rest.index(' ')
  kind, rest = rest[:end], rest[end:].lstrip()
  start = rest.index('(')
  op, end = rest[:start], _closing(rest, start)
  arguments, attributes = rest[start + 1 : end], rest[end + 1 :]
  arrays = tuple(
      Array(
          dtype,
          tuple(int(n) for n in NUMBERS.findall(sizes)),
          re.search(r'S\([1-9]\d*\)', layout or '') is not None,
      )
      for dtype, sizes, layout in _ARRAY.findall(kind)
  )
  named = op not in ('constant', 'parameter')
  operands = tuple(_NAME.findall(arguments)) if named else ()
  return Instruction(name, op, arrays, operands, attributes, arguments, is_root)


def _closing(text: str, start: int) -> int:
  """Returns the position of the bracket that closes the one at `start`."""
  depth = 0
  for place in range(start, len(text)):
    if text[place] == '(':
      depth += 1
    elif text[place] == ')':
      depth -= 1
      if not depth:
        return place
  raise ValueError(f'no closing bracket in {text[:80]!r}')


def _bits(dtype: str) -> int:
  """Returns bits of an element: 'bf16' 16, 'f8e4m3fn' 8, 'pred' 8, token 0."""
  if dtype == 'pred':
    return 8
  found = re.match(r'[a-z]+(\d+)', dtype)
  return int(found[1]) if found else 0


def call_target(each: Instruction) -> str:
  """Returns the target of a custom call."""
  match = re.search(r'custom_call_target="([^"]*)"', each.attributes)
  return match[1] if match else 'custom-call'


def channel_of(each: Instruction) -> str:
  """Returns the channel that identifies a collective; '' without one."""
  match = re.search(r'channel_id=(\d+)', each.attributes)
  return match[1] if match else ''


def group_size(each: Instruction) -> int:
  """Counts the devices of a collective's group.

  It is written as lists {{0,1},{2,3}}, as [2,2]<=[4], or as axes of a mesh:
  mesh['axis_0'=2,'axis_1'=4] {'axis_1'}.
  """
  if 'collective-permute' in each.op:
    return 2
  mesh = re.search(
      r'replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}', each.attributes
  )
  if mesh:
    sizes = dict(re.findall(r"'(\w+)'=(\d+)", mesh[1]))
    parts = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", mesh[2])
    return math.prod(int(part or sizes[axis]) for axis, part in parts)
  short = re.search(r'replica_groups=\[(\d+),(\d+)\]', each.attributes)
  if short:
    return int(short[2])
  match = re.search(r'replica_groups=\{\{([\d,]*)\}', each.attributes)
  return len(NUMBERS.findall(match[1])) if match else 1


def window_sizes(
    window: Mapping[str, str], name: str, place: int, default: int
) -> int:
  """Returns a number of a convolution's window; of 'low_high' the first."""
  if name not in window:
    return default
  return int(window[name].split('x')[place].split('_')[0])


def braced(text: str, name: str) -> str:
  """Returns what stands in the braces behind `name`; '' if it is not there."""
  match = re.search(rf'{name}\{{([^}}]*)\}}', text)
  return match[1] if match else ''
