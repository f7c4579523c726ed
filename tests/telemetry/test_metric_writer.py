"""Metric rows: registered names only, strict JSON, TensorBoard beside it."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2
from tensorboardX.record_writer import masked_crc32c

from areal_jax.telemetry import metric_writer
from areal_jax.telemetry.jsonl import read_jsonl


def board_events(folder):
  """Events of all event files that hold values, read record by record."""
  for path in sorted((folder / 'tensorboard').iterdir()):
    data = path.read_bytes()
    while data:
      length = int.from_bytes(data[:8], 'little')
      body = data[12 : 12 + length]
      crc = int.from_bytes(data[12 + length : 16 + length], 'little')
      assert crc == masked_crc32c(body)
      event = event_pb2.Event.FromString(body)
      if event.summary.value:
        yield event
      data = data[16 + length :]


def board_values(folder):
  """(tag, step, value) of all event files."""
  return [
      (value.tag, event.step, value.simple_value)
      for event in board_events(folder)
      for value in event.summary.value
  ]


def test_row_holds_the_values_and_their_date(tmp_path):
  writer = metric_writer.MetricWriter(tmp_path, wall=lambda: 1234.5)
  writer.write(3, 2, {'reward_mean': np.float32(0.5), 'trained': np.int64(8)})
  # On disk before close: a killed run keeps its metrics.
  assert read_jsonl(tmp_path / 'metrics.jsonl') == [{
      'step': 3, 'version': 2, 'wall': 1234.5, 'reward_mean': 0.5,
      'trained': 8, 'nonfinite': [],
  }]  # fmt: skip
  writer.close()
  writer.close()
  assert board_values(tmp_path) == [
      ('learning/reward_mean', 3, 0.5),
      ('flow/trained', 3, 8.0),
  ]


def test_a_row_is_one_event_however_many_values_it_has(tmp_path):
  # Each event crosses a queue through a pipe, while training waits for room.
  writer = metric_writer.MetricWriter(tmp_path)
  for step in (1, 2):
    writer.write(step, step, dict.fromkeys(('loss', 'entropy', 'trained'), 1.0))
  writer.close()
  assert [event.step for event in board_events(tmp_path)] == [1, 2]


def test_nonfinite_values_are_null_and_named(tmp_path):
  writer = metric_writer.MetricWriter(tmp_path)
  writer.write(
      1, 1, {'loss': float('nan'), 'entropy': 1.0, 'gradient_norm': np.inf}
  )
  writer.close()
  text = (tmp_path / 'metrics.jsonl').read_text()
  row = json.loads(text, parse_constant=pytest.fail)  # strict: no NaN
  assert row['loss'] is None
  assert row['gradient_norm'] is None
  assert row['entropy'] == 1.0
  assert row['nonfinite'] == ['loss', 'gradient_norm']
  board = {tag: value for tag, _, value in board_values(tmp_path)}
  assert np.isnan(board['learning/loss'])


def test_unregistered_name_is_refused_and_leaves_no_row(tmp_path):
  writer = metric_writer.MetricWriter(tmp_path)
  with pytest.raises(ValueError, match=r"\['reward_maen'\] are not registered"):
    writer.write(1, 1, {'loss': 1.0, 'reward_maen': 0.5})
  writer.close()
  assert read_jsonl(tmp_path / 'metrics.jsonl') == []


@pytest.mark.parametrize('value', ['0.5', None, np.zeros(2), [1.0]])
def test_value_that_is_not_one_number_is_refused(tmp_path, value):
  writer = metric_writer.MetricWriter(tmp_path)
  with pytest.raises(TypeError, match='metric loss is .*wanted one number'):
    writer.write(1, 1, {'loss': value})
  writer.close()
