"""Which policies fit which slices, and how fast a step could be there at best.

  python -m benchmarks.scale

The paper's recipe (experiments/paper_math.py: answers up to 27,648 tokens, 512
problems with 16 answers a step) with its models and two others, on slices of
TPU v5e, v5p and v6e, each compiled by `areal_jax.compile_check` in a process of
its own. Prints the table of docs/scale.md in Markdown, then the usual table and
the JSON line, whose figures are tokens a second at the roofline, 0 where it
does not fit or could not be compiled. It needs libtpu and no TPU. `--only=v5e`
takes the rows with that in their name, `--short` two small ones.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import signal
import subprocess
import sys
from typing import Any, Sequence

from absl import app, flags

from areal_jax import command
from benchmarks import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
_GIB = 2**30


@dataclasses.dataclass(frozen=True)
class Case:
  """One policy on one slice.

  Attributes:
    model: a published name.
    topology: of the slice.
    train: sizes of the train mesh's axes by name.
    replicas: engines.
    tensor: chips of each engine that share its heads and columns.
    expert: times so many that share its experts.
    pages: of 64 tokens, of an engine's cache.
    slots: of an engine.
  """

  model: str
  topology: str
  train: dict[str, int]
  replicas: int
  tensor: int = 1
  expert: int = 1
  pages: int = 4096
  slots: int = 64

  @property
  def name(self) -> str:
    return f'{self.model} on {self.topology}'

  def command(self) -> list[str]:
    """The command line that checks it."""
    rows = 1
    for axis in ('data', 'fsdp', 'expert'):
      rows *= self.train.get(axis, 1)
    settings = {
        'policy.path': self.model,
        **{f'mesh.train.{axis}': n for axis, n in self.train.items()},
        'mesh.rollout.replicas': self.replicas,
        'mesh.rollout.tensor': self.tensor,
        'mesh.rollout.expert': self.expert,
        'rollout.engine.pages': self.pages,
        'rollout.engine.slots': self.slots,
        'train.packing.rows': rows,
    }
    return [
        sys.executable, '-m', 'areal_jax.compile_check',
        f'--config={ROOT}/experiments/paper_math.py',
        *(f'--config.{name}={value}' for name, value in settings.items()),
        f'--topology={self.topology}', '--json', '--search=0',
    ]  # fmt: skip


# Meshes on v5e cover whole slices, so the train mesh is one of several there.
CASES = (
    Case('Qwen2.5-1.5B', 'v5e:2x4*4', {'fsdp': 8}, 24, pages=2048),
    Case('Qwen2.5-1.5B', 'v5p:4x4x4', {'fsdp': 32}, 32, pages=12_288),
    Case('Qwen2.5-1.5B', 'v6e:4x8', {'fsdp': 16}, 16, pages=4096),
    Case('Qwen2.5-7B', 'v5e:2x2*16', {'data': 8, 'fsdp': 4}, 8, 4),
    Case('Qwen2.5-7B', 'v5p:4x4x8', {'fsdp': 64}, 64, pages=4096),
    Case('Qwen2.5-7B', 'v6e:8x16', {'fsdp': 32, 'tensor': 2}, 32, 2),
    Case('Qwen2.5-14B', 'v5e:2x4*8', {'data': 4, 'fsdp': 8}, 4, 8),
    Case('Qwen2.5-14B', 'v5p:4x4x8', {'fsdp': 64}, 32, 2, pages=2048),
    Case('Qwen2.5-14B', 'v6e:16x16', {'fsdp': 32, 'tensor': 4}, 32, 4),
    Case('Qwen2.5-32B', 'v5e:2x4*8', {'data': 4, 'fsdp': 8}, 4, 8),
    Case('Qwen2.5-32B', 'v5p:4x8x8', {'fsdp': 128}, 32, 4, pages=2048),
    Case('Qwen2.5-32B', 'v6e:16x16', {'fsdp': 32, 'tensor': 4}, 16, 8),
    Case('Llama-3.1-8B', 'v5e:2x4*8', {'data': 4, 'fsdp': 8}, 4, 8),
    Case('Llama-3.1-8B', 'v5p:4x4x8', {'fsdp': 64}, 64, pages=2048),
    Case(
        'Llama-3.1-8B', 'v6e:8x16', {'fsdp': 32, 'tensor': 2}, 32, 2,
        pages=2048,
    ),
    Case('Qwen3-30B-A3B', 'v5e:2x4*8', {'data': 4, 'fsdp': 8}, 4, 4, 2),
    Case(
        'Qwen3-30B-A3B', 'v5p:4x4x8', {'fsdp': 16, 'expert': 4}, 32, 2,
        pages=2048,
    ),
    Case(
        'Qwen3-30B-A3B', 'v6e:16x16',
        {'fsdp': 4, 'expert': 4, 'context': 2, 'tensor': 4},
        16, 4, 2, pages=2048,
    ),
)  # fmt: skip
SHORT = (
    Case('Qwen2.5-0.5B', 'v5e:2x4', {'fsdp': 4}, 4, pages=1024),
    Case('Qwen2.5-7B', 'v5e:2x2', {'fsdp': 2}, 2, pages=1024),  # never fits
)

_HEAD = (
    '| policy | slice | train | rollout | fits | GiB a chip: train | rollout |'
    ' training s | generation s | tokens/s |\n'
    '|---|---|---|---|---|---|---|---|---|---|'
)


def measure(case: Case) -> dict[str, Any]:
  """The report of one case, with 'why' where a program of it is missing.

  Raises:
    RuntimeError: it could not be checked; says why.
  """
  child = subprocess.run(
      case.command(), cwd=ROOT, capture_output=True, text=True
  )
  said = child.stderr.strip().splitlines()
  if child.returncode < 0:  # libtpu may end its process
    fatal = [line for line in said if re.match(r'F\d{4} ', line)]
    last = [line for line in said if ': compiled in' in line][-1:]
    why = fatal[:1] or [f'after {line!r}' for line in last]
    return {'fits': None, 'why': ', '.join([_ended(child.returncode), *why])}
  found = json.loads(child.stdout) if child.stdout else {'fits': None}
  if child.returncode == 2:
    return found | {'why': said[-1]}
  if not child.stdout:
    raise RuntimeError(f'{case.name}: {child.stderr.strip()[-500:]}')
  return found


def _ended(code: int) -> str:
  return f'the compiler ended by {signal.Signals(-code).name}'


def line(case: Case, found: dict[str, Any]) -> str:
  """A row of the Markdown table."""
  step = found.get('step')
  mesh = ' · '.join(f'{axis} {n}' for axis, n in case.train.items())
  cells = [
      case.model,
      case.topology,
      mesh,
      f'{case.replicas} × {case.tensor * case.expert}',
      {True: 'yes', False: 'no', None: 'not known'}[found['fits']],
      *(f'{found[side]["peak"] / _GIB:.1f}' if side in found else '–'
        for side in ('train', 'rollout')),
      *(f'{step[name]:.0f}' if step else '–'
        for name in ('train_s', 'rollout_s')),
      f'{step["tokens_per_s"]:,.0f}' if step and found['fits'] else '–',
  ]  # fmt: skip
  return f'| {" | ".join(cells)} |'


def wanted(cases: Sequence[Case], only: str) -> list[Case]:
  """Those with this in their name.

  Raises:
    UsageError: there is none.
  """
  found = [case for case in cases if only in case.name]
  if not found:
    names = [case.name for case in cases]
    raise app.UsageError(f'--only is {only!r}, wanted a part of one of {names}')
  return found


def main(argv: Sequence[str]) -> None:
  """Prints the tables and the JSON line."""
  del argv
  values = flags.FLAGS
  cases = wanted(SHORT if values.short else CASES, values.only)
  rows = []
  print(_HEAD)
  for case in cases:
    found = measure(case)
    print(line(case, found), flush=True)
    if 'why' in found:
      print(f'{case.name}: {found["why"]}', file=sys.stderr)
    fits = found['fits'] and found.get('step')
    speed = found['step']['tokens_per_s'] if fits else 0.0
    rows.append(report.Row(f'{case.name}: tokens/s at best', speed))
  print()
  report.show('scale', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'Two small slices.')
  flags.DEFINE_string('only', '', 'Only rows with this in their name.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
