"""What a run says about itself: events, metrics, samples, plots, progress.

`read` is the way back, for notebooks; it is here so that it can be called as
`areal_jax.telemetry.read`, and imports what it needs only then.
"""

from __future__ import annotations

import os
import typing

if typing.TYPE_CHECKING:
  from areal_jax.telemetry.frames import Run


def read(folder: str | os.PathLike) -> Run:
  """A saved run, or one that still goes on, as pandas frames.

  Example: `read('runs/quickstart').metrics.reward_mean.plot()`.

  Raises:
    ModuleNotFoundError: pandas is not installed.
    FileNotFoundError: the folder holds no run.
  """
  try:
    from areal_jax.telemetry import frames
  except ModuleNotFoundError as error:
    if error.name != 'pandas':
      raise
    raise ModuleNotFoundError(
        'areal_jax.telemetry.read needs pandas, which is not installed: pip'
        ' install -r requirements-notebooks.txt',
        name='pandas',
    ) from error
  return frames.read(folder)
