"""The arithmetic of benchmarks/growth.py by hand, and a short run of it."""

import json
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax.models import parameters
from areal_jax.train.packing import Shape
from benchmarks import growth
from benchmarks.growth import Point, Series
from tests.conftest import ROOT


def test_exponent_is_that_of_the_last_points():
  at = [1, 2, 4, 8, 16]
  assert growth.exponent(at, [3 * n**2 for n in at]) == pytest.approx(2)
  # The first points, where something else counts, have no say.
  late = [1e6, 1e6, *(n**1.5 for n in at[2:])]
  assert growth.exponent(at, late) == pytest.approx(1.5)
  # By hand: logarithms 0, 1, 2 to base 2; the slope of 0, 1, 1 is 1 / 2.
  assert growth.exponent([1, 2, 4], [1, 2, 2]) == pytest.approx(0.5)
  with pytest.raises(ValueError, match='1 points, wanted at least 2'):
    growth.exponent([1], [1])


def series(power: float, held: float, axis=growth.LENGTH) -> Series:
  points = [
      Point(n, 10 * n, 0.001 * n**power, round(2**20 * n**held))
      for n in (1024, 2048, 4096)
  ]
  return Series('train', axis, tuple(points))


def test_bars_are_those_of_the_axis():
  rows = {r.row: r for r in growth.rows([series(2.0, 1.0)])}
  point = rows['train, length 1,024: tokens/s']
  assert point.value == pytest.approx(10 / (0.001 * 1024))
  assert rows['train, length 2,048: MiB'].value == 2048
  assert rows['train, length: exponent of time'].met
  assert rows['train, length: exponent of memory'].met


@pytest.mark.parametrize(
    'power, held, row',
    [
        (2.4, 1.0, 'train, length: exponent of time'),
        # What a mask of all queries and keys would show as.
        (2.0, 2.0, 'train, length: exponent of memory'),
    ],
)
def test_what_grows_too_fast_is_seen(power, held, row):
  failed = [r.row for r in growth.rows([series(power, held)]) if not r.met]
  assert failed == [row]


def test_memory_may_not_grow_with_microbatches_at_all():
  rows = growth.rows([series(1.0, 0.0, growth.MICROBATCHES)])
  assert all(row.met for row in rows)
  rows = growth.rows([series(1.0, 0.3, growth.MICROBATCHES)])
  assert [row.row for row in rows if not row.met] == [
      'train, microbatches: exponent of memory'
  ]


def test_parameters_are_those_of_the_policy():
  config = growth.wide(64)
  shapes = parameters.abstract_params(config)
  counted = {
      jax.tree_util.keystr(path): int(np.prod(leaf.shape))
      for path, leaf in jax.tree.leaves_with_path(shapes)
      if leaf.ndim > 1 and 'embedding' not in jax.tree_util.keystr(path)
  }
  matrices = {n: c for n, c in counted.items() if 'bias' not in n}
  matrices = {n: c for n, c in matrices.items() if 'norm' not in n}
  unembedding = config.width * config.vocab_size
  assert growth.parameters(config) == sum(matrices.values()) + unembedding


def test_rows_are_full_of_sequences():
  made = growth.filled(Shape(2, 12), 4, 50)
  assert made.segment_ids[0].tolist() == [1] * 4 + [2] * 4 + [3] * 4
  assert made.positions[1].tolist() == [0, 1, 2, 3] * 3
  assert made.loss_mask[0].tolist() == [0, 1, 1, 1] * 3
  assert made.ids.min() >= 1 and made.advantages.std() > 0


def test_picture_has_a_column_for_each_axis(tmp_path):
  path = tmp_path / 'new' / 'growth.png'
  growth.draw([series(2.0, 1.0), series(1.0, 0.0, growth.MICROBATCHES)], path)
  assert path.read_bytes().startswith(b'\x89PNG')


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run_prints_a_table(tmp_path):
  path = tmp_path / 'growth.png'
  command = [sys.executable, '-m', 'benchmarks.growth', '--short']
  done = subprocess.run(
      [*command, f'--output={path}'],
      cwd=ROOT,
      capture_output=True,
      text=True,
      check=True,
  )
  last = json.loads(done.stdout.splitlines()[-1])
  assert last['name'] == 'growth' and path.is_file()
  memory = {
      row['row']: row
      for row in last['rows']
      if row['row'].endswith('exponent of memory')
  }
  # Times depend on what else the machine does, what is held does not.
  assert len(memory) == 5 and all(row['met'] for row in memory.values())
