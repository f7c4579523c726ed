"""The table of metrics: unique names, ranges in order, printed whole."""

import pathlib
import subprocess
import sys

from areal_jax.telemetry import metrics

ROOT = pathlib.Path(__file__).resolve().parents[2]


def test_names_are_unique_and_ranges_in_order():
  assert len(metrics.METRICS) == sum(map(len, metrics.GROUPS.values()))
  for metric in metrics.METRICS.values():
    assert metric.unit
    assert metric.definition.endswith('.')
    if metric.low is not None and metric.high is not None:
      assert metric.low <= metric.high
  assert not {'step', 'version', 'wall', 'nonfinite'} & set(metrics.METRICS)


def test_documentation_equals_what_the_module_prints():
  printed = subprocess.run(
      [sys.executable, '-m', 'areal_jax.telemetry.metrics'],
      cwd=ROOT,
      check=True,
      capture_output=True,
  ).stdout.decode()
  assert (
      ROOT / 'docs' / 'metrics.md'
  ).read_text() == printed, (
      'run: python -m areal_jax.telemetry.metrics > docs/metrics.md'
  )
  for name in metrics.METRICS:
    assert f'\n| `{name}` |' in printed
  for text in printed.splitlines():
    if text.startswith('|'):
      assert text.count('|') == 5, f'a cell holds a bar: {text}'


def test_no_tensorflow_torch_or_jax_comes_with_it():
  code = (
      'import sys; import areal_jax.telemetry.metric_writer;'
      "print([m for m in ('tensorflow', 'torch', 'jax') if m in sys.modules])"
  )
  printed = subprocess.run(
      [sys.executable, '-c', code], cwd=ROOT, check=True, capture_output=True
  ).stdout
  assert printed.strip() == b'[]'
