"""The main job: `python -m areal_jax.run --config=experiments/quickstart.py`.

Thin: reads the config and its overrides (`--config.a.b=value`) and hands over
to `session.py`. It imports jax late, because reward workers import this module
again and need none of it.

Exit codes: 0 done, 1 the run failed, 2 a mistake in the settings (one line on
standard error, nothing written), 130 interrupted.
"""

from __future__ import annotations

import sys
import typing

from absl import app, flags
from ml_collections import config_flags

if typing.TYPE_CHECKING:
  from areal_jax.experiment import Experiment

_CONFIG = config_flags.DEFINE_config_file(
    'config', None, 'A file with get_config(), e.g. experiments/quickstart.py.'
)


def read_flags(argv: list[str]) -> list[str]:
  """Parses flags; what `config_flags` says of a wrong one becomes one line.

  Raises:
    SystemExit: with code 2, after the line.
  """
  # These are what config_flags raises for a field that does not exist, a value
  # that does not parse, or a file that fails while it is read.
  mistakes = (flags.Error, KeyError, ValueError, TypeError, AttributeError)
  try:
    rest = flags.FLAGS(argv)
    if len(rest) > 1:
      raise flags.Error(f'{rest[1:]} are no flags')
    if _CONFIG.value is None:
      raise flags.Error('--config is missing, wanted a file with get_config()')
    vars(_CONFIG.value)  # a file that failed to load reports it when touched
    return rest
  except (*mistakes, OSError, SyntaxError, ImportError) as error:
    text = error.args[0] if error.args else type(error).__name__
    print(f'error: {" ".join(str(text).split())}', file=sys.stderr)
    sys.exit(2)


def main(argv: list[str]) -> None:
  """Runs the experiment that the flags describe."""
  del argv
  experiment = typing.cast('Experiment', _CONFIG.value)
  # pylint: disable=g-import-not-at-top
  from areal_jax import session
  from areal_jax.config import ConfigError

  try:
    session.run(experiment)
  except ConfigError as error:
    print(f'error: {error}', file=sys.stderr)
    sys.exit(2)
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    sys.exit(130)


if __name__ == '__main__':
  app.run(main, flags_parser=read_flags)
