"""Which metrics of a run have left their healthy ranges, and since when.

The ranges, and what is said of a metric outside of its own, stand in the
registry (`metrics.py`). A run tells a metric when it turns unhealthy, not at
every step, and at its end how often each one was.
"""

from __future__ import annotations

import math
from typing import Any, Callable, Mapping

from areal_jax.telemetry.metrics import METRICS, healthy, registered

_WELL = 10  # healthy rows in a row before a metric is told again


class Health:
  """Looks at the rows of a run; owned by one thread.

  Args:
    tell: gets one line when a metric turns unhealthy.
  """

  def __init__(self, tell: Callable[[str], None]):
    self._tell = tell
    self._seen: dict[str, dict[str, Any]] = {}  # by metric that was unhealthy

  def look(self, step: int, values: Mapping[str, float]) -> None:
    """Takes in one row; tells what has turned unhealthy in it.

    Args:
      step: number of the row.
      values: by metric name. Metrics without advice are passed over, and so are
        values that are not finite, which a row names by itself.
    """
    for name, value in values.items():
      metric = METRICS[registered(name)]
      if not metric.advice or not math.isfinite(value):
        continue
      seen = self._seen.get(name)
      if _inside(value, metric.low, metric.high):
        if seen is not None:
          seen['well'] += 1
          seen['rows'] += 1
          seen['last'] = value
        continue
      if seen is None:
        seen = {'first_step': step, 'unhealthy': 0, 'rows': 0, 'well': _WELL}
        self._seen[name] = seen
      if seen['well'] >= _WELL:
        self._tell(
            f'caution: {name} is {value:.3g} in step {step}, healthy is'
            f' {healthy(metric)}: {metric.advice}'
        )
      seen['well'] = 0
      seen['unhealthy'] += 1
      seen['rows'] += 1
      seen['last'] = value

  def report(self) -> dict[str, dict[str, Any]]:
    """The metrics that were ever unhealthy, for the summary of a run.

    Each has the first step at which it was, the number of rows in which it was,
    the rows since the first of them, the last value, and the healthy range.
    """
    return {
        name: {
            'first_step': seen['first_step'],
            'unhealthy': seen['unhealthy'],
            'rows': seen['rows'],
            'last': seen['last'],
            'healthy': healthy(METRICS[registered(name)]),
        }
        for name, seen in self._seen.items()
    }

  def lines(self) -> list[str]:
    """What a run says at its end, a line for each of these metrics."""
    return [
        f'caution: {name} was unhealthy in {seen["unhealthy"]} of'
        f' {seen["rows"]} rows since step {seen["first_step"]} and ended at'
        f' {seen["last"]:.3g}, healthy is {seen["healthy"]}:'
        f' {METRICS[registered(name)].advice}'
        for name, seen in self.report().items()
    ]

  def state(self) -> dict[str, dict[str, Any]]:
    """Returns what `restore` needs, as JSON."""
    return {name: dict(seen) for name, seen in self._seen.items()}

  def restore(self, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Goes on from an earlier attempt of the run."""
    self._seen = {name: dict(seen) for name, seen in state.items()}


def _inside(value: float, low: float | None, high: float | None) -> bool:
  return (low is None or value >= low) and (high is None or value <= high)
