"""A metric sink: where a user sends the metrics of a run besides its files.

`metrics_sink` names a function or class, `package.module:function`. A run calls
it once with (folder, config) and then its `write` with each row of
metrics.jsonl, in the main thread, and its `close` at the end. What it raises
ends no run: the first error is told, and the number of rows at the end.
"""

from __future__ import annotations

import inspect
import pathlib
from typing import Any, Callable, Mapping, Protocol

from areal_jax.config import ConfigError, require
from areal_jax.sandbox.call import call, load_function


class MetricSink(Protocol):
  """What the function that `metrics_sink` names returns."""

  def write(self, step: int, version: int, values: Mapping[str, Any]) -> None:
    """Takes one row.

    Args:
      step: training steps done. The row of an evaluation has the step of the
        version that was evaluated, which may be earlier than that of the last
        row.
      version: of the policy that the values speak of.
      values: numbers by metric name; some may be NaN or infinite.
    """

  def close(self) -> None:
    """Ends it; nothing is written afterwards."""


Build = Callable[[pathlib.Path, Mapping[str, Any]], MetricSink]


def load_sink(spec: str, at: str) -> Build | None:
  """The function that a setting names; None for ''.

  Raises:
    ConfigError: it cannot be imported or called with (folder, config).
  """
  if not spec:
    return None
  build = load_function(spec, at)
  try:
    inspect.signature(build).bind(None, None)
  except (TypeError, ValueError) as error:  # ValueError: it has no signature
    raise ConfigError(
        f'{at} is {spec!r}, which cannot be called with (folder, config):'
        f' {error}'
    ) from error
  return build


class GuardedSink:
  """Passes rows on to a user's sink, whose errors it counts.

  Args:
    spec: 'package.module:function', see `load_sink`.
    folder: of the run.
    config: settings of the run, as in config.json.
    note: tells a line to the user.
    at: the setting that holds `spec`, for messages.

  Raises:
    ConfigError: there is no sink: see `load_sink`; or the function raised, or
      what it returned lacks `write` or `close`.
  """

  def __init__(
      self,
      spec: str,
      folder: pathlib.Path,
      config: Mapping[str, Any],
      note: Callable[[str], None],
      at: str = 'config.metrics_sink',
  ):
    built = call(load_sink(spec, at), folder, config)
    if built.status != 'ok':
      raise ConfigError(f'{at} is {spec!r}, which raised {_first(built)}')
    for name in ('write', 'close'):
      require(
          callable(getattr(built.value, name, None)),
          at,
          spec,
          'a function that returns an object with write(step, version, values)'
          f' and close(), and it returned {built.value!r}',
      )
    self._sink = built.value
    self._spec = spec
    self._note = note
    self._rows = 0
    self._failed = 0

  def write(self, step: int, version: int, values: Mapping[str, Any]) -> None:
    """Passes a row on; the first error is told."""
    self._rows += 1
    outcome = call(self._sink.write, step, version, dict(values))
    if outcome.status == 'ok':
      return
    self._failed += 1
    if self._failed == 1:
      self._note(
          f'metrics_sink {self._spec} failed at step {step} and the run goes on'
          f' without that row: {_first(outcome)}'
      )

  def close(self) -> None:
    """Closes the sink and tells how many rows it did not take."""
    outcome = call(self._sink.close)
    if outcome.status != 'ok':
      self._note(f'metrics_sink {self._spec}: close failed: {_first(outcome)}')
    if self._failed:
      self._note(
          f'metrics_sink {self._spec} failed for {self._failed} of {self._rows}'
          ' rows; metrics.jsonl has them all'
      )


def _first(outcome: Any) -> str:
  """The first line of what went wrong."""
  return outcome.detail.splitlines()[0]
