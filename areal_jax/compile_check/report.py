"""A report as a table for people, or as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from areal_jax.compile_check.findings import Holding, Report
from areal_jax.compile_check.programs import Program

_GIB = 2**30


def to_json(report: Report) -> str:
  """Formats the report as one line of JSON, rooflines included."""
  fields = dataclasses.asdict(report)
  for program, written in zip(report.programs, fields['programs']):
    written['roofline'] = _roofline(report, program)
  fields['topology'] |= {'is_estimate': report.topology.is_estimate}
  return json.dumps(fields)


def to_text(report: Report) -> str:
  """Everything in lines of at most 100 characters."""
  topology = report.topology
  chip = topology.chip
  lines = [
      f'{report.name}: {report.model}, {report.parameters / 1e9:.3g} billion'
      f' parameters, on {topology.name}: {report.used} of {topology.count}'
      f' chips, {chip.hbm / _GIB:.2f} GiB each'
  ]
  if topology.is_estimate:
    lines.append(
        'an estimate: compiled for pretended CPU devices, whose programs differ'
        ' from those of a GPU'
    )
  lines += ['', verdict(report.fits)]
  for failure in report.failures:
    lines.append(f'  could not be compiled: {failure}')
  for name, holding in (('train', report.train), ('rollout', report.rollout)):
    lines += _holding(name, holding, chip.hbm)
  lines += ['', 'one call of a program, a chip']
  lines.append(
      f'  {"program":<18} {"compiled":>9} {"memory":>10} {"TFLOP":>9}'
      f' {"GB moved":>9} {"GB sent":>8} {"at best":>9}  bound'
  )
  for program in report.programs:
    lines.append(_program(report, program))
  lines += ['', 'collectives of a call: how many, of how much, over how many']
  for program in report.programs:
    for each in program.cost.collectives if program.cost else ():
      lines.append(
          f'  {program.name:<18} {each.kind:<19} {each.count:>6.0f}'
          f' {each.bytes / 1e9:>10.3f} GB  over {each.group}'
      )
  moved = report.reshard
  lines += [
      '',
      f'a publish: {moved.total / 1e9:.2f} GB arrive, at most'
      f' {moved.received / 1e9:.2f} GB at a chip and {moved.sent / 1e9:.2f} GB'
      ' from one',
  ]
  step = report.step
  if step is not None:
    calls = ', '.join(f'{n} {name}' for name, n in step.calls.items())
    lines += [
        '',
        f'a step at best: {step.answers} answers with {step.tokens:,} sampled'
        ' tokens',
        f'  training    {step.train_s:9.2f} s  ({calls})',
        f'  generation  {step.rollout_s:9.2f} s  ({step.decode_steps:,} decode'
        ' steps a replica)',
        f'  publishing  {step.publish_s:9.2f} s  beside both',
        f'  the step    {step.seconds:9.2f} s,'
        f' {step.tokens_per_s:,.0f} tokens a second',
    ]
  if report.largest_rows is not None:
    largest = report.largest_rows or 'none that was tried'
    lines += [
        '',
        f'largest microbatch that fits: {largest} rows (the settings have'
        f' {report.rows})',
    ]
  if report.advice:
    lines += ['', 'advice', *(f'  {line}' for line in report.advice)]
  return '\n'.join(lines)


def program_line(program: Program) -> str:
  """Formats the line that is printed when a program is compiled."""
  if program.refused:
    return (
        f'{program.name}: refused, it needs {program.refused / _GIB:.2f} GiB'
        ' of a chip'
    )
  if program.failed:
    return f'{program.name}: could not be compiled on {program.failed}'
  return f'{program.name}: compiled in {program.compile_s:.1f} s'


def verdict(fits: bool | None) -> str:
  """Formats the verdict in words."""
  if fits is None:
    return 'NOT KNOWN whether it fits'
  return 'fits' if fits else 'DOES NOT FIT'


def _holding(name: str, holding: Holding, hbm: float) -> list[str]:
  least = ' without what was not compiled' if holding.fits is None else ''
  lines = [
      f'  {name}, {holding.chips} chips: {verdict(holding.fits)}; at most'
      f' {holding.peak / _GIB:.2f} of {hbm / _GIB:.2f} GiB{least}, at'
      f' {holding.at}'
  ]
  for kind, size in holding.kinds.items():
    lines.append(f'    {kind:<16} {size / _GIB:>9.3f} GiB')
  return lines


def _program(report: Report, program: Program) -> str:
  if program.failed:
    return f'  {program.name:<18} could not be compiled, see above'
  if program.cost is None:
    return (
        f'  {program.name:<18} refused: it needs'
        f' {program.refused / _GIB:.2f} GiB'
    )
  cost, roof = program.cost, program.roofline(report.topology.chip)
  return (
      f'  {program.name:<18} {program.compile_s:>7.1f} s'
      f' {program.memory.total / _GIB:>6.2f} GiB {cost.flops / 1e12:>9.3f}'
      f' {cost.bytes / 1e9:>9.3f} {cost.sent / 1e9:>8.3f}'
      f' {1000 * roof.seconds:>6.1f} ms  {roof.bound}'
  )


def _roofline(report: Report, program: Program) -> dict[str, Any] | None:
  roof = program.roofline(report.topology.chip)
  if roof is None:
    return None
  return {
      **dataclasses.asdict(roof),
      'seconds': roof.seconds,
      'bound': roof.bound,
  }
