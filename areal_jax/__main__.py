"""One command for every door: `areal-jax run --config=FILE`.

`pip install .` installs it as `areal-jax`; `python -m areal_jax` is the same.
`areal-jax NAME ...` does what `python -m areal_jax.NAME ...` does, with equal
flags and exit codes. This file only chooses the module, so it loads nothing
that the door itself does not need.
"""

from __future__ import annotations

import difflib
import runpy
import sys
from typing import Sequence

import areal_jax

DOORS = {
    'run': 'train a policy, from its config file to its summary',
    'evaluate': 'evaluate a policy on held-out problems',
    'serve': 'serve a trained policy',
    'convert': 'convert policies from and to other formats',
    'doctor': 'check a setup, with advice for each check that fails',
    'compile_check': 'say whether a run fits a TPU slice or GPUs, at what cost',
}


def usage() -> str:
  """Describes the command, with one line for each door."""
  width = max(map(len, DOORS))
  lines = [f'  {name:{width}}  {does}' for name, does in DOORS.items()]
  return '\n'.join(
      [
          'usage: areal-jax NAME --config=FILE [--config.FIELD=VALUE ...]',
          '',
          *lines,
          '',
          'areal-jax NAME --help shows the flags of NAME.',
          'areal-jax --version shows the version.',
      ]
  )


def main(arguments: Sequence[str] | None = None) -> None:
  """Runs the door that the first argument names.

  Args:
    arguments: what follows the program's name; None for those of this process.

  Raises:
    SystemExit: always. 0 after `--help` and `--version`, 2 for a name that no
      door has, else the exit code of the door.
  """
  arguments = sys.argv[1:] if arguments is None else list(arguments)
  name = arguments[0] if arguments else '--help'
  if name in ('-h', '--help', 'help'):
    print(usage())
    sys.exit(0 if arguments else 2)
  if name == '--version':
    print(areal_jax.__version__)
    sys.exit(0)
  if name not in DOORS:
    near = difflib.get_close_matches(name, DOORS, n=1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    print(
        f'error: {name!r} is no command, wanted one of {[*DOORS]}{hint}',
        file=sys.stderr,
    )
    sys.exit(2)
  module = f'areal_jax.{name}'
  sys.argv = [f'areal-jax {name}', *arguments[1:]]
  # Worker processes import the main module again by its name, which `alter_sys`
  # makes that of the door.
  runpy.run_module(module, run_name='__main__', alter_sys=True)


if __name__ == '__main__':
  main()
