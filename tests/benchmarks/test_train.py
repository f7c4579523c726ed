"""The arithmetic of benchmarks/train.py by hand, and a short run of it."""

import json
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.train import packing
from areal_jax.train.packing import PackingSettings
from benchmarks import train
from benchmarks.train import Batch, Work
from tests import tiny
from tests.conftest import ROOT

WORK = Work('some', 64, 20, 4, PackingSettings(64, 8), prompt=3)


def test_lengths_vary_with_the_turn_and_end_at_the_limit():
  first, second = WORK.batch(40, 0), WORK.batch(40, 1)
  lengths = [[len(a) for a in b.answers] for b in (first, second)]
  assert lengths[0] != lengths[1]
  assert max(lengths[0]) == 20 and min(lengths[0]) >= 1
  # Geometric with one of ten ending an answer, cut at 20: (1 - 0.9^20) / 0.1.
  means = [WORK.batch(40, turn).tokens / 64 for turn in range(40)]
  assert np.mean(means) == pytest.approx((1 - 0.9**20) / 0.1, rel=0.05)
  assert WORK.batch(40, 0) == first  # the same for every system


def test_others_get_the_whole_batch():
  batch = Batch([[1, 2], [1, 2]], [[3], [4, 5]], [0.5, -0.5], 4, 2)
  sent = json.loads(json.dumps(train.as_json(batch)))
  assert sent == {
      'prompts': [[1, 2], [1, 2]],
      'answers': [[3], [4, 5]],
      'advantages': [0.5, -0.5],
      'limit': 4,
      'group': 2,
  }
  first, second = batch.trajectories()
  assert second.ids.tolist() == [1, 2, 4, 5]
  assert second.loss_mask.tolist() == [0, 0, 1, 1]
  assert (first.draw_index, first.sample, second.sample) == (0, 0, 1)


def test_padded_rows_hold_what_packed_rows_do():
  batch = WORK.batch(40, 0)
  given = [t.loss_mask * 0.5 for t in batch.trajectories()]
  made = train.one_a_row(16)(batch.trajectories(), given)
  assert [m.ids.shape for m in made] == [
      (16, -(-(3 + max(map(len, batch.answers[i : i + 16]))) // 16) * 16)
      for i in range(0, 64, 16)
  ]
  packed = packing.pack(batch.trajectories(), given, WORK.packing)
  for name in ('ids', 'loss_mask', 'behavior_logps', 'advantages'):
    sums = [
        sum(np.sum(getattr(m, name), dtype=np.float64) for m in cut)
        for cut in (made, packed)
    ]
    assert sums[0] == pytest.approx(sums[1]) and sums[0]
  assert packing.padding_fraction(made) > packing.padding_fraction(packed)


def test_operations_of_a_step_by_hand():
  config = tiny.config(tied_embeddings=False)
  layer = 32 * (4 + 2 + 2) * 8 + 32 * 32 + 3 * 32 * 48
  dense = 3 * 2 * 10 * (2 * layer + 32 * 40)
  shapes = train.products(config, 10)
  assert sum(2 * m * k * n for m, k, n in shapes) == dense
  assert len(shapes) == 3 * (2 * 5 + 1)
  # Two sequences of 5 tokens: 15 pairs each, in 2 layers, 4 heads of 8.
  pairs = 2 * 15
  assert train.flops(config, 10, 5) == dense + 6 * 2 * pairs * 2 * 4 * 8


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run_prints_a_table():
  command = [sys.executable, '-m', 'benchmarks.train', '--short']
  done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=True
  )
  last = json.loads(done.stdout.splitlines()[-1])
  assert last['name'] == 'train'
  rows = {row['row']: row['value'] for row in last['rows']}
  assert rows['long tail: padding, packed'] < rows['long tail: padding, padded']
  assert rows['full: tokens/s'] > 0
  assert 0 < rows['full: utilisation']
