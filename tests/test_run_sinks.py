"""Metric sinks of users in real runs: `metrics_sink`."""

import json

import pytest

from areal_jax import run, session
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from tests.small_experiment import experiment


def test_a_sink_gets_every_row_and_is_closed(tmp_path):
  result = session.run(
      experiment(tmp_path, metrics_sink='tests.session_sinks:Lines')
  )
  text = (result.folder / 'sink.jsonl').read_text()
  opened, *rows, closed = map(json.loads, text.splitlines())
  assert opened == {'opened': 'small'}
  assert closed == 'closed'
  written = list(read_jsonl(result.folder / run_folder.METRICS))
  assert len(rows) == len(written) == 3  # two evaluations and a step
  for row, wanted in zip(rows, written):
    del wanted['wall'], wanted['nonfinite']
    assert {k: v for k, v in row.items() if v == v} == {
        k: v for k, v in wanted.items() if v is not None
    }


def test_what_a_sink_raises_is_told_once_and_ends_no_run(tmp_path, capsys):
  spec = 'tests.session_sinks:Fails'
  result = session.run(experiment(tmp_path, metrics_sink=spec))
  assert result.summary['steps'] == 1
  told = capsys.readouterr().err.splitlines()
  assert [line for line in told if spec in line] == [
      f'metrics_sink {spec} failed at step 0 and the run goes on without that'
      ' row: ConnectionError: no route to host',
      f'metrics_sink {spec}: close failed: ConnectionError: still none',
      f'metrics_sink {spec} failed for 3 of 3 rows; metrics.jsonl has them all',
  ]


@pytest.mark.parametrize(
    'spec, why',
    [
        ('tests.session_sinks:Line', "did you mean 'Lines'?"),
        ('tests.session_sinks:takes_a_row', 'called with (folder, config)'),
        ('tests.session_sinks:raises', 'raised PermissionError: not logged in'),
        (
            'tests.session_sinks:returns_a_dict',
            'wanted a function that returns an object with write',
        ),
    ],
)
def test_what_is_no_sink_is_one_line_before_anything_is_built(
    tmp_path, capsys, monkeypatch, spec, why
):
  def builds(*_, **__):
    raise AssertionError('an engine is built')

  monkeypatch.setattr(session, 'build_rollout', builds)
  code = run.main(experiment(tmp_path, metrics_sink=spec))
  assert code == 2
  told = capsys.readouterr().err.splitlines()
  (error,) = [line for line in told if line.startswith('error')]
  assert error.startswith(f'error: config.metrics_sink is {spec!r}')
  assert why in error
