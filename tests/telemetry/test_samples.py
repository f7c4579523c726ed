"""Samples are kept to the bit, up to a limit that is told."""

import numpy as np
import pytest

from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.telemetry.samples import SampleWriter
from areal_jax.types import StopReason

SAMPLE = {
    'prompt': '3+5=', 'prompt_ids': [1, 4], 'completion': '8.', 'reward': 0.0,
    'ids': [9, 2], 'versions': [3, 4], 'logps': [-0.1, -2.0], 'step': 5,
    'draw_index': 7, 'sample': 1, 'stop_reason': StopReason.STOP,
}  # fmt: skip


def test_row_holds_the_sample_and_log_probs_to_the_bit(tmp_path):
  logps = np.random.default_rng(0).normal(size=50).astype(np.float32)
  writer = SampleWriter(tmp_path / 'samples.jsonl', 100_000)
  tokens = {'logps': logps, 'versions': np.arange(50), 'ids': np.arange(50)}
  assert writer.write(**SAMPLE | tokens)
  assert writer.write(**SAMPLE | {'reward': None})
  writer.close()
  writer.close()
  row, other = read_jsonl(tmp_path / 'samples.jsonl')
  np.testing.assert_array_equal(np.float32(row['logps']), logps)
  assert row['versions'] == row['ids'] == list(range(50))
  assert row['reward'] == 0.0
  assert other['reward'] is None
  assert row['stop_reason'] == 'stop'
  assert (row['prompt'], row['completion']) == ('3+5=', '8.')
  assert (row['step'], row['draw_index'], row['sample']) == (5, 7, 1)


def test_limit_is_kept_and_told_in_the_last_row(tmp_path):
  path = tmp_path / 'samples.jsonl'
  writer = SampleWriter(path, 1000)
  written = [writer.write(**SAMPLE) for _ in range(50)]
  writer.close()
  assert 0 < sum(written) < 50
  assert written == sorted(written, reverse=True)
  assert path.stat().st_size <= 1000
  rows = read_jsonl(path)
  assert len(rows) == sum(written) + 1
  assert rows[-1]['limit_bytes'] == 1000
  assert 'limit' in rows[-1]['note']


def test_resumed_file_keeps_its_limit(tmp_path):
  path = tmp_path / 'samples.jsonl'
  written = 0
  for _ in range(30):  # each attempt adds one
    writer = SampleWriter(path, 1000)
    written += writer.write(**SAMPLE)
    writer.close()
  rows = read_jsonl(path)
  assert path.stat().st_size <= 1000
  assert len(rows) == written + 1
  assert 'note' in rows[-1]
  assert not any('note' in row for row in rows[:-1])


def test_bad_input_is_refused(tmp_path):
  with pytest.raises(ValueError, match='limit_bytes is 10, wanted at least'):
    SampleWriter(tmp_path / 'samples.jsonl', 10)
  writer = SampleWriter(tmp_path / 'samples.jsonl', 1000)
  for name in ('ids', 'versions', 'logps'):
    with pytest.raises(ValueError, match=rf'7/1 has .*{name} \(1,\)'):
      writer.write(**SAMPLE | {name: [3]})
  writer.close()
