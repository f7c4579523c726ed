"""Packing: Algorithm 1, static shapes, and nothing lost or moved."""

import dataclasses
import json
import re

from hypothesis import given, strategies
from hypothesis import settings as hypothesis_settings
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.models.moe import UNKNOWN
from areal_jax.train import packing
from areal_jax.types import RewardResult, RewardStatus, Trajectory

LENGTHS = strategies.lists(strategies.integers(1, 40), min_size=0, max_size=30)


def trajectory(ids, mask, *, draw=0, sample=0, temperature=1.0):
  mask = np.asarray(mask, np.float32)
  count = np.arange(1, len(ids) + 1)
  return Trajectory(
      draw_index=draw,
      sample=sample,
      segments=(),
      ids=np.asarray(ids, np.int32),
      loss_mask=mask,
      logps=(-0.1 * count * mask).astype(np.float32),
      versions=np.where(mask > 0, 3, -1).astype(np.int32),
      turn_ids=np.zeros(len(ids), np.int32),
      reward=RewardResult(RewardStatus.OK, 1.0),
      temperature=temperature,
      admitted_version=3,
  )


def test_algorithm_one_by_hand():
  # Sorted: 6(1) 5(3) 4(0) 3(4) 2(2). Bins of 9: 6 opens a; 5 cannot join a
  # and opens b; 4 fits b only; 3 fits a only; 2 fits nowhere (9, 9).
  assert packing.allocate([4, 6, 2, 5, 3], 9) == [[1, 4], [3, 0], [2]]


def test_fewest_sequences_wins_over_least_loaded():
  # After 5 | 2 2 the next 1 joins the 5: fewer sequences, though more tokens.
  assert packing.allocate([5, 3, 2, 1], 6, 2) == [[0, 3], [1, 2]]
  # Equal counts: the least loaded takes it.
  assert packing.allocate([5, 3, 1], 6, 2) == [[0], [1, 2]]


def test_too_long_sequence_is_named():
  with pytest.raises(ValueError, match='sequence 1 has 11 tokens.*at most 10'):
    packing.allocate([3, 11, 2], 10)


def test_too_few_sequences_for_the_minimum_are_refused():
  with pytest.raises(ValueError, match='2 sequences.*minimum_bins=3'):
    packing.allocate([3, 2], 10, 3)


@hypothesis_settings(max_examples=60, deadline=None)
@given(LENGTHS, strategies.integers(40, 90), strategies.integers(1, 4))
def test_allocation_properties(lengths, capacity, rows):
  bins = packing.allocate(lengths, capacity)
  loads = [sum(lengths[i] for i in members) for members in bins]
  assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
  assert all(load <= capacity for load in loads)
  # Every bin but one is more than half full, or it would have been shared.
  assert sum(2 * load <= capacity for load in loads) <= 1
  wanted = -(-len(bins) // rows) * rows
  spread = packing.spread(lengths, capacity, bins, wanted)
  assert len(spread) % rows == 0
  assert len(spread) - len(bins) < rows
  assert sorted(i for b in spread for i in b) == list(range(len(lengths)))
  assert all(sum(lengths[i] for i in b) <= capacity for b in spread)


def test_spread_over_rows_that_would_stay_empty():
  bins = packing.allocate([4, 4, 4, 4], 16)
  assert bins == [[0, 1, 2, 3]]
  spread = packing.spread([4, 4, 4, 4], 16, bins, 4)
  assert spread == [[0], [1], [2], [3]]
  # Two sequences cannot fill four bins, and stay together.
  assert packing.spread([4, 4], 16, [[0, 1]], 4) == [[0, 1], [], [], []]


def test_packed_row_by_hand():
  settings = packing.PackingSettings(row_tokens=6, rows=1)
  first = trajectory([7, 8, 9], [0, 1, 1], temperature=0.5)
  second = trajectory([5, 6], [0, 1])
  (microbatch,) = packing.pack(
      [first, second],
      [np.array([0.0, 2.0, 2.0]), np.array([0.0, -1.0])],
      settings,
  )
  expected = {
      'ids': [7, 8, 9, 5, 6, 0],
      'positions': [0, 1, 2, 0, 1, 0],
      'segment_ids': [1, 1, 1, 2, 2, 0],
      'loss_mask': [0, 1, 1, 0, 1, 0],
      'behavior_logps': [0, -0.2, -0.3, 0, -0.2, 0],
      'advantages': [0, 2, 2, 0, -1, 0],
      'versions': [-1, 3, 3, -1, 3, -1],
      'temperatures': [0.5, 0.5, 0.5, 1, 1, 1],
  }
  for name, values in expected.items():
    array = getattr(microbatch, name)
    assert array.shape == (1, 6), name
    assert array.dtype == getattr(packing.empty(settings), name).dtype
    np.testing.assert_allclose(array[0], values, rtol=1e-6, err_msg=name)
  assert packing.padding_fraction([microbatch]) == pytest.approx(1 / 6)


@hypothesis_settings(max_examples=30, deadline=None)
@given(LENGTHS)
def test_every_token_is_packed_once_in_static_shapes(lengths):
  settings = packing.PackingSettings(row_tokens=40, rows=3)
  start = 1
  sequences = []
  for length in lengths:
    ids = np.arange(start, start + length, dtype=np.int32)
    sequences.append((ids, np.ones(length, np.float32)))
    start += length
  microbatches = packing.pack_tokens(sequences, settings)
  assert all(m.ids.shape == (3, 40) for m in microbatches)
  packed = []
  for microbatch in microbatches:
    for row in range(3):
      for segment in range(1, microbatch.segment_ids[row].max() + 1):
        at = microbatch.segment_ids[row] == segment
        np.testing.assert_array_equal(
            microbatch.positions[row, at], np.arange(at.sum())
        )
        packed.append(tuple(microbatch.ids[row, at]))
  assert sorted(packed) == sorted(tuple(ids) for ids, _ in sequences)
  assert sum(m.loss_mask.sum() for m in microbatches) == sum(lengths)


def test_end_token_equal_to_the_padding_id_is_still_trained():
  """CASES A6: pad = eos = 0, response [5, 7, 0] and one cut at its limit."""
  settings = packing.PackingSettings(row_tokens=6, rows=2)
  ended = trajectory([4, 5, 7, 0], [0, 1, 1, 1])
  cut = trajectory([4, 5, 7, 9], [0, 1, 1, 1], sample=1)
  (microbatch,) = packing.pack([ended, cut], [np.ones(4)] * 2, settings)
  np.testing.assert_array_equal(microbatch.ids[0], [4, 5, 7, 0, 0, 0])
  np.testing.assert_array_equal(microbatch.loss_mask[0], [0, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(microbatch.segment_ids[0], [1, 1, 1, 1, 0, 0])
  np.testing.assert_array_equal(microbatch.loss_mask[1], [0, 1, 1, 1, 0, 0])


def test_errors_name_the_trajectory_and_both_numbers():
  settings = packing.PackingSettings(row_tokens=3, rows=1)
  long = trajectory([1, 2, 3, 4], [0, 1, 1, 1], draw=12, sample=5)
  with pytest.raises(ValueError, match='draw 12 sample 5 has 4.*row_tokens=3'):
    packing.pack([long], [np.ones(4)], settings)
  short = trajectory([1, 2], [0, 1], draw=2)
  with pytest.raises(ValueError, match='draw 2 .*advantages has length 1'):
    packing.pack([short], [np.ones(1)], settings)
  with pytest.raises(ConfigError, match='at.rows is 0, wanted at least 1'):
    packing.PackingSettings(rows=0).validate('at')


def test_nothing_packs_into_nothing():
  settings = packing.PackingSettings(row_tokens=4, rows=2)
  assert packing.pack([], [], settings) == []
  assert packing.padding_fraction([]) == 0


def test_choices_of_experts_stay_with_their_tokens():
  settings = packing.PackingSettings(row_tokens=6, rows=1)
  parts = []
  for sample, ids in enumerate(([7, 8, 9], [5, 6])):
    one = trajectory(ids, [0, *[1] * (len(ids) - 1)], sample=sample)
    routing = np.arange(len(ids) * 4).reshape(-1, 2, 2) + 100 * sample
    parts.append(dataclasses.replace(one, routing=routing.astype(np.int16)))
  given = [np.zeros(len(part.ids)) for part in parts]
  (packed,) = packing.pack(parts, given, settings, (2, 2))
  assert packed.routing.dtype == np.int16
  np.testing.assert_array_equal(packed.routing[0, :3], parts[0].routing)
  np.testing.assert_array_equal(packed.routing[0, 3:5], parts[1].routing)
  assert (packed.routing[0, 5] == UNKNOWN).all()
  (plain,) = packing.pack(parts, given, settings)
  assert plain.routing is None and 'routing' not in plain.arrays()
  with pytest.raises(
      ValueError, match=r'sample 0 .* \(2, 2\), wanted \(3, 2\)'
  ):
    packing.pack(parts, given, settings, (3, 2))
  with pytest.raises(ValueError, match='experts None, wanted'):
    packing.pack([trajectory([1], [1])], [np.ones(1)], settings, (2, 2))


# Shapes.


def test_rows_are_covered_by_few_shapes_by_hand():
  assert packing.cover(18, (16, 4, 2)) == [16, 2]
  assert packing.cover(32, (16, 4, 2)) == [16, 16]
  assert packing.cover(15, (16, 4, 2)) == [16]  # and not 4 + 4 + 4 + 4
  assert packing.cover(6, (4, 3)) == [3, 3]  # the largest first would leave 2
  assert packing.cover(0, (4,)) == []


@hypothesis_settings(max_examples=40, deadline=None)
@given(
    strategies.integers(1, 25),
    strategies.sets(strategies.integers(1, 9), min_size=1, max_size=3),
)
def test_no_cover_has_fewer_rows(needed, numbers):
  found = packing.cover(needed, sorted(numbers))
  assert set(found) <= numbers
  sums = {0}  # every sum of numbers, by trying
  for _ in range(needed):
    sums |= {total + n for total in sums for n in numbers if total < needed}
  assert sum(found) == min(total for total in sums if total >= needed)


def test_short_answers_get_short_rows():
  settings = packing.PackingSettings(16, 4, shorter=(4, 8), fewer=(1, 2))
  shapes = lambda lengths: packing.lay(lengths, settings).shapes
  # All of them leave nothing empty; the shortest costs least attention.
  assert shapes([4, 4, 4, 4]) == (packing.Shape(4, 4),)
  # Rows of 4 would leave a quarter empty, rows of 8 only a tenth less.
  assert shapes([3, 3, 3, 3, 3, 1]) == (packing.Shape(1, 16),)
  assert shapes([5, 3]) == (packing.Shape(1, 8),)
  assert shapes([9, 7, 16, 16, 16, 16]) == (
      packing.Shape(4, 16),
      packing.Shape(1, 16),
  )


@pytest.mark.parametrize(
    'changes,words',
    [
        ({'shorter': (256,)}, r'shorter is \(256,\), wanted numbers from 2 to'),
        ({'fewer': (0,)}, r'fewer is \(0,\), wanted numbers from 1 to below'),
        ({'fewer': (2, 2)}, 'fewer is .*each once'),
        ({'row_tokens': 1}, 'row_tokens is 1, wanted at least 2'),
    ],
)
def test_bad_shapes_are_refused(changes, words):
  with pytest.raises(ConfigError, match=f'at.{words}'):
    packing.PackingSettings(**changes).validate('at')


# Padding and balance, on lengths as they come.

REAL = packing.PackingSettings(1024, 32, shorter=(512,), fewer=(4, 8, 16))


@pytest.fixture(scope='module')
def lengths(data_dir):
  """Tokens of prompt and answer, 1,024 at once: GSM8K's, and a long tail."""
  lines = (data_dir / 'datasets/gsm8k_train.jsonl').read_text().splitlines()
  rows = [json.loads(line) for line in lines]
  # Numbers digit by digit, words and signs: within a tenth of Qwen's tokens.
  count = lambda text: len(re.findall(r'\d|[A-Za-z]+|[^\sA-Za-z\d]', text))
  real = np.array([count(r['question']) + count(r['answer']) for r in rows])
  random = np.random.default_rng(0)
  tail = random.lognormal(np.log(80), 1.0, 8 * 1024)
  return {
      'gsm8k': random.choice(real, (8, 1024)),
      'long tail': 64 + np.minimum(tail, 960).astype(int).reshape(8, 1024),
  }


def filled(layout, lengths):
  """Tokens in each row of each microbatch."""
  rows = [np.zeros(shape.rows, int) for shape in layout.shapes]
  for place, length in zip(layout.places, lengths, strict=True):
    rows[place.microbatch][place.row] += length
  return rows


@pytest.mark.parametrize('kind', ['gsm8k', 'long tail'])
def test_little_is_padding_and_shards_are_even(kind, lengths):
  for batch in lengths[kind].tolist():
    layout = packing.lay(batch, REAL)
    places = sum(s.rows * s.row_tokens for s in layout.shapes)
    assert sum(batch) > 0.95 * places
    for shards in (2, 4):
      held = sum(
          rows.reshape(shards, -1).sum(1) for rows in filled(layout, batch)
      )
      assert held.max() < 1.05 * held.mean() and held.min() > 0.95 * held.mean()


def test_rows_left_empty_are_shared_out():
  layout = packing.lay([16] * 5, packing.PackingSettings(16, 8))
  (rows,) = filled(layout, [16] * 5)
  assert rows.reshape(4, 2).sum(1).tolist() == [32, 16, 16, 16]
  assert rows.reshape(2, 4).sum(1).tolist() == [48, 32]
  # In order of fullness the last of four shards would have had nothing to do.
  assert sorted(rows, reverse=True) == [16] * 5 + [0] * 3
