"""What the benchmark of attention reports, at lengths that take a moment."""

import numpy as np

from benchmarks import attention


def test_memory_is_compared_between_lengths_and_time_with_other_forms(
    monkeypatch,
):
  monkeypatch.setattr(attention, '_TOKENS', 32)
  rows = attention.rows_of([32, 64], plain=32, answers=8, repeats=1)
  found = {row.row: row for row in rows}
  times = {
      name: found[f'32 tokens, {name}: ms'].value
      for name in ('by_head (chosen)', 'grouped', 'blockwise')
  }
  choice = found['32 tokens: fastest over chosen, time']
  others = times['grouped'], times['blockwise']
  assert choice.value == min(others) / times['by_head (chosen)']
  assert choice.bar == '>= 0.9'
  assert '64 tokens, grouped: ms' not in found
  assert attention.chosen(256) == 'blockwise'
  growth = found['64 tokens: memory over that of half']
  sizes = [found[f'{n} tokens, by_head (chosen): MB'].value for n in (32, 64)]
  assert growth.value == sizes[1] / sizes[0] and growth.bar == '<= 2.3'


def test_answers_have_the_mean_that_is_asked_for():
  *_, segments = attention.inputs(4096, answers=64)
  counts = np.asarray(segments).max(1)
  assert abs(4096 / counts.mean() - 64) < 16
