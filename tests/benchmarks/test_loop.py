"""The arithmetic of benchmarks/loop.py by hand, and a short run of it."""

import json
import subprocess
import sys

import pytest

from areal_jax import config as config_lib
from areal_jax.train.packing import PackingSettings
from benchmarks import loop, loop_task
from benchmarks.loop import ASYNC, SYNC, Looped, Work
from tests.conftest import ROOT

WORK = Work(
    'some', 8, 3, PackingSettings(24, 4), {'Tunix': '>= 3', 'TRL': '>= 1.7'},
    prompts=2, group=2,
)  # fmt: skip


def looped(first: float, speed: float) -> Looped:
  """Two steps of 10 and 30 tokens at a speed."""
  return Looped(first, (10 / speed, 30 / speed), (10, 30))


def test_first_steps_do_not_count():
  said = {'first': 9.0, 'steps': [[5.0, 1], [2.0, 30], [3.0, 50]]}
  found = loop.read(json.dumps(said), warm=2)
  # The first step is no part of the list, so two warm ones leave two.
  assert found == Looped(9.0, (2.0, 3.0), (30, 50))
  assert found.throughput == 16
  with pytest.raises(ValueError, match='4 steps, wanted more than warm=4'):
    loop.read(json.dumps(said), warm=4)


def test_steps_of_ours_run_from_end_to_end():
  step = lambda start, duration, tokens: {
      'kind': 'step',
      'mono': start,
      'duration': duration,
      'fields': {'tokens': tokens},
  }
  wait = {'kind': 'wait', 'mono': 100.0, 'duration': 5.0, 'fields': {}}
  events = [step(107.0, 1.0, 40.0), wait, step(105.0, 1.0, 20.0)]
  # Events come in the order of their ends, or any other.
  assert loop.told(events, 100.0) == {'first': 6.0, 'steps': [[2.0, 40]]}


def test_ratios_are_taken_round_by_round():
  found = {
      SYNC: [looped(6.0, 100.0), looped(6.0, 50.0)],
      # The machine was half as fast in the second round.
      ASYNC: [looped(5.0, 200.0), looped(7.0, 100.0)],
      'Tunix': [looped(10.0, 50.0), looped(20.0, 25.0)],
      'TRL': [looped(2.0, 125.0), looped(2.0, 62.5)],
  }
  rows = {row.row: row for row in loop.rows(WORK, found)}
  assert rows['some: tokens/s, eta 1'].value == pytest.approx(150)
  # 40 tokens in two steps of 4 answers.
  assert rows['some: tokens an answer, TRL'].value == 5
  times = rows['some: times Tunix, eta 1']
  assert times.value == pytest.approx(4) and times.bar == '>= 3' and times.met
  # Bars are those of eta 1.
  assert rows['some: times Tunix, eta 0'].bar == ''
  slow = rows['some: times TRL, eta 1']
  assert slow.value == pytest.approx(1.6) and not slow.met
  first = rows['some: end of step 1 / that of Tunix']
  assert first.value == pytest.approx((0.5 + 0.35) / 2) and first.met
  # A run that finds its programs is shown beside, without a bar.
  kept = {loop.KEPT: [looped(1.0, 300.0), looped(1.0, 150.0)]}
  rows = {row.row: row for row in loop.rows(WORK, found | kept)}
  assert rows['some: times Tunix, eta 1, programs kept'].value == 6
  assert not rows['some: times Tunix, eta 1, programs kept'].bar
  assert rows['some: end of step 1 / that of Tunix'] == first


def test_without_other_systems_nothing_is_compared():
  found = {SYNC: [looped(1.0, 2.0)], ASYNC: [looped(1.0, 2.0)]}
  rows = loop.rows(WORK, found)
  assert len(rows) == 6 and not any(row.bar for row in rows)


def test_others_get_as_many_prompts_of_the_same_length():
  asked = WORK.as_json(64, steps=5)
  assert [len(batch) for batch in asked['prompts']] == [2] * 5
  lengths = {len(p) for batch in asked['prompts'] for p in batch}
  assert lengths == {loop_task.PROMPT}
  assert min(min(p) for batch in asked['prompts'] for p in batch) >= 1
  assert (asked['group'], asked['limit']) == (2, 8)
  assert asked['stop_ids'] == [1, 2, 3]


def test_every_experiment_is_accepted():
  for short in (True, False):
    for work in loop.plan(short).works:
      for eta in (0.0, 1.0):
        made = loop.experiment('policy', work, eta, 4, 'runs')
        settings = config_lib.resolve(made)
        assert settings.mesh.colocated == (eta == 0)
        # As many answers in a step as slots, so none waits at eta 0.
        assert settings.rollout.engine.slots == work.answers


def test_characters_are_tokens_and_the_reward_is_a_coin():
  text = loop_task.text(64)
  assert len(set(text)) == len(text) == 60  # and four special ids
  train, held_out = (
      loop_task.problems(split, 50, 0) for split in ('train', 'eval')
  )
  assert all(set(p.prompt) <= set(text) for p in train)
  assert {len(p.prompt) for p in train} == {loop_task.PROMPT}
  assert not {p.prompt for p in train} & {p.prompt for p in held_out}
  scores = [loop_task.reward(train[0], p.prompt) for p in train]
  assert set(scores) == {0.0, 1.0}  # so that there is something to learn


def test_an_interpreter_that_is_none_is_refused_before_any_run():
  command = [sys.executable, '-m', 'benchmarks.loop', '--trl=/no/python']
  done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
  assert done.returncode == 1 and 'tokens/s' not in done.stdout
  assert "--trl is '/no/python', wanted an interpreter" in done.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run_prints_a_table():
  command = [sys.executable, '-m', 'benchmarks.loop', '--short']
  done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=True
  )
  last = json.loads(done.stdout.splitlines()[-1])
  assert last['name'] == 'loop'
  rows = {row['row']: row['value'] for row in last['rows']}
  assert rows['full 32: tokens an answer, eta 1'] == 32
  # Geometric with 4 of 64 ending an answer, cut at 32: 13.9 in the mean.
  assert 8 < rows['mean 13 of 32: tokens an answer, eta 0'] < 20
  assert rows['mean 13 of 32: tokens/s, eta 1'] > 0
  assert rows['compilations after warm-up'] == 0
