"""Checks a setup: `python -m areal_jax.doctor --config=FILE`.

Environment, devices, data, tokenizer, reward, memory and the arithmetic of
batches, then the first checks of any run with small real runs (`first_checks`;
`--setup_only` leaves them out, `--steps=N` says how long two of them go on). A
line a check: ok, look (it works and is hardly meant), fail, skip; advice below
those that need it.

Exit codes: 0 nothing failed, 1 something did, 2 mistakes in the settings (a
line each on standard error), 130 interrupted.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import tempfile
import typing

from absl import app, flags

from areal_jax import command

if typing.TYPE_CHECKING:
  from areal_jax.settings.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Asked:
  """The parsed command line."""

  experiment: Experiment
  setup_only: bool
  steps: int


def read_flags(argv: list[str]) -> Asked:
  """Parses the flags of this program.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  flags.DEFINE_bool('setup_only', False, 'Leave the runs out.')
  flags.DEFINE_integer(
      'steps', 50, 'Of the runs that stand still and overfit.', lower_bound=4
  )
  experiment = command.read_flags(argv)
  values = flags.FLAGS
  return Asked(experiment, values.setup_only, values.steps)


def main(asked: Asked) -> int:
  """Prints the verdicts; returns the exit code."""
  failed: list[str] = []
  return command.exit_code(diagnose, asked, failed) or int(bool(failed))


def diagnose(asked: Asked, failed: list[str]) -> None:
  """Prints a verdict a check; adds the names of those that fail.

  Raises:
    ConfigError: a mistake in the settings.
  """
  # pylint: disable=g-import-not-at-top
  from areal_jax.doctor import setup
  from areal_jax.doctor.first_checks import first_checks
  from areal_jax.mesh.slices import devices_first
  from areal_jax.prepare.prepared import prepare

  def tell(verdict) -> None:
    print(verdict, flush=True)
    if verdict.status == 'fail':
      failed.append(verdict.name)

  with devices_first(asked.experiment.mesh):
    prepared = prepare(asked.experiment)
  for check in (setup.environment, setup.devices, setup.data, setup.tokenizer):
    for verdict in check(prepared):
      tell(verdict)
  tell(setup.reward(prepared))
  for verdict in setup.arithmetic(prepared):
    tell(verdict)
  if 'devices' not in failed:
    for verdict in setup.memory(prepared):
      tell(verdict)
    if not asked.setup_only:
      with tempfile.TemporaryDirectory(prefix='areal_jax_doctor_') as folder:
        place = pathlib.Path(folder)
        for verdict in first_checks(asked.experiment, place, asked.steps):
          tell(verdict)
  if failed:
    print(f'{len(failed)} failed: {", ".join(failed)}')


if __name__ == '__main__':
  sys.exit(app.run(main, flags_parser=read_flags))
