"""The main job: `python -m areal_jax.run --config=experiments/quickstart.py`.

Thin: `command.py` reads the config file and its overrides
(`--config.a.b=value`), `session.py` does the work, or `replay.py` where the
batches of an earlier run are to be trained again. It imports jax late, because
reward workers import this module again and need none of it.

Exit codes: 0 done, 1 the run failed, 2 mistakes in the settings (a line each on
standard error, nothing written), 70 it hung and did not answer, 130 ended by
SIGINT, 143 by SIGTERM (saved, if training had begun).
"""

from __future__ import annotations

import typing

from absl import app

from areal_jax import command

if typing.TYPE_CHECKING:
  from areal_jax.settings.experiment import Experiment


def main(experiment: Experiment) -> int:
  """Runs the experiment; returns the exit code."""
  # pylint: disable=g-import-not-at-top
  from areal_jax import replay, session

  run = replay.run if experiment.replay else session.run
  return command.exit_code(run, experiment)


if __name__ == '__main__':
  app.run(main, flags_parser=command.read_flags)
