"""Compiles a run for a machine that is not there.

  python -m areal_jax.compile_check --config=experiments/gsm8k.py \\
    --topology=v5e:4x2

The programs of the run (gradient, update, proximal log-probs, prefill, decode)
are compiled for a TPU topology by libtpu (`pip install -r
requirements-dev.txt`), from shapes alone. It says whether they fit, what a chip
holds, what a call costs, how long a step takes at best, and what to change.
`--topology=gpu:h100:8` compiles for pretended CPU devices and says what that
would be on such GPUs: an estimate.

Neither data nor tokenizer nor checkpoint is read. A `policy.path` where nothing
lies may end with a published name, such as Qwen2.5-7B-Instruct.
`--answer_tokens` is the mean length of an answer that a step is counted with
(half of `rollout.max_new_tokens`), `--search` how often its rows are doubled or
halved to find the largest microbatch (0 leaves that out), `--effort` how hard
the compiler tries (0 as in a run, and slower), and `--json` prints one JSON
line on standard output.

Exit codes: 0 it fits, 1 it does not, 2 a mistake in the settings or in the
topology, or a program that the compiler fails at for another reason than memory
(one line on standard error; the report says what is known of the others), 130
interrupted.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import typing

from absl import app, flags

from areal_jax import command

if typing.TYPE_CHECKING:
  from areal_jax.settings.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Asked:
  """The parsed command line."""

  experiment: Experiment
  topology: str
  answer_tokens: int
  search: int
  effort: float
  json: bool


def read_flags(argv: list[str]) -> Asked:
  """Parses the flags of this program.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  # Before jax starts: what is compiled here is for devices of other machines.
  os.environ['JAX_PLATFORMS'] = 'cpu'
  flags.DEFINE_string('topology', '', 'Such as v5p:4x4x4 or gpu:h100:8.')
  flags.DEFINE_integer(
      'answer_tokens', 0, 'Of an answer on average; 0 for half of the most.',
      lower_bound=0,
  )  # fmt: skip
  flags.DEFINE_integer(
      'search', 4, 'Doublings of a microbatch to try.', lower_bound=0
  )
  flags.DEFINE_float(
      'effort', -1.0, 'Of the compiler; 0 is what a run has.',
      lower_bound=-1.0, upper_bound=1.0,
  )  # fmt: skip
  flags.DEFINE_bool('json', False, 'Print one JSON line.')
  experiment = command.read_flags(argv)
  values = flags.FLAGS
  return Asked(
      experiment,
      values.topology,
      values.answer_tokens,
      values.search,
      values.effort,
      values.json,
  )


def main(asked: Asked) -> int:
  """Prints the report; returns the exit code."""
  refused: list[str] = []
  return command.exit_code(show, asked, refused) or int(bool(refused))


def show(asked: Asked, refused: list[str]) -> None:
  """Prints the report; adds the name of an experiment that does not fit.

  Raises:
    ConfigError: a mistake in the settings or in the topology, or a program that
      the compiler failed at, which the report has told.
  """
  # pylint: disable=g-import-not-at-top
  from areal_jax.compile_check import report
  from areal_jax.compile_check.check import check
  from areal_jax.compile_check.chips import parse_topology
  from areal_jax.config import ConfigError
  from areal_jax.mesh.slices import devices_first
  from areal_jax.prepare.prepared import prepare_shapes

  topology = parse_topology(asked.topology)
  with devices_first(asked.experiment.mesh, count=topology.count):
    shapes = prepare_shapes(asked.experiment)
  found = check(
      shapes,
      topology,
      answer_tokens=asked.answer_tokens,
      search=asked.search,
      effort=asked.effort,
      tell=lambda program: print(
          report.program_line(program), file=sys.stderr, flush=True
      ),
  )
  print(report.to_json(found) if asked.json else report.to_text(found))
  if found.failures:
    sys.stdout.flush()
    raise ConfigError(
        f'{topology.name}: {len(found.failures)} of {len(found.programs)}'
        f' programs could not be compiled: {"; ".join(found.failures)}'
    )
  if not found.fits:
    refused.append(found.name)


if __name__ == '__main__':
  sys.exit(app.run(main, flags_parser=read_flags))
