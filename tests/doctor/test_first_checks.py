"""The first checks on a tiny policy, and their judgement on planted numbers."""

import json

import numpy as np
import pytest

from areal_jax.doctor import first_checks
from areal_jax.doctor.__main__ import Asked, main
from areal_jax.doctor.attribution import CAUSES, Attribution
from areal_jax.telemetry import run_folder
from tests import records
from tests.test_session import experiment


@pytest.mark.slow  # four small runs, each compiled anew: a minute
def test_sound_setup_passes_every_check(tmp_path, capsys):
  made = experiment(tmp_path / 'runs', rollout__eta=1.0)
  code = main(Asked(made, setup_only=False, steps=12))
  lines = capsys.readouterr().out.splitlines()
  names = [line[6:].partition(':')[0] for line in lines if line[:2] == 'ok']
  assert {'step 1', 'η = 0', 'weights after a swap', 'gap', 'standing still',
          'overfitting'} <= set(names), lines  # fmt: skip
  # This reward counts ones, whatever the gold answer.
  assert [line[6:12] for line in lines if line[:4] == 'fail'] == [
      'reward'
  ], lines
  assert code == 1
  assert not (tmp_path / 'runs').exists()


def row(**changes):
  return {
      'logprob_gap_staleness_0': 1e-6, 'kl_k3_staleness_0': 1e-9,
      'ratio_mean': 1.0, 'clip_fraction': 0.0, 'reward_mean': 0.5,
      'reward_std': 0.3, 'logprob_gap_mean': 1e-6, 'update_norm': 0.0,
      **changes,
  }  # fmt: skip


@pytest.mark.parametrize(
    'changes',
    [
        {'logprob_gap_staleness_0': 0.05},
        {'kl_k3_staleness_0': 0.01},
        {'ratio_mean': 1.01},
        {'clip_fraction': 0.02},
    ],
)
def test_first_step_that_is_off_fails(changes):
  assert first_checks.step_one(row()).status == 'ok'
  verdict = first_checks.step_one(row(**changes))
  assert verdict.status == 'fail' and verdict.advice


def test_policy_that_moves_at_rate_zero_fails():
  rows = [row(reward_mean=0.5 + 0.1 * (i % 3)) for i in range(20)]
  assert first_checks.stands_still(rows).status == 'ok'
  moved = [*rows, row(update_norm=1e-3)]
  assert first_checks.stands_still(moved).status == 'fail'
  drift = [row(reward_mean=0.02 * i) for i in range(20)]
  assert first_checks.stands_still(drift).status == 'fail'
  gap = [*rows, row(logprob_gap_mean=0.1)]
  assert first_checks.stands_still(gap).status == 'fail'


def test_reward_that_does_not_rise_fails():
  noise = np.random.default_rng(0).normal(0, 0.02, 40)
  flat = [row(reward_mean=0.5 + n) for n in noise]
  assert first_checks.overfits(flat).status == 'fail'
  risen = [row(reward_mean=0.1 + 0.02 * i + n) for i, n in enumerate(noise)]
  assert first_checks.overfits(risen).status == 'ok'
  equal = [row(reward_mean=0.0, reward_std=0.0)] * 40
  assert first_checks.overfits(equal).status == 'look'


def test_run_that_is_not_the_plain_one_is_seen(tmp_path):
  answers = [records.trajectory(d, s) for d in range(2) for s in range(2)]
  parts, counts = dict.fromkeys(CAUSES, 0.0), dict.fromkeys(CAUSES, 0)
  found = Attribution(1e-6, parts, counts)
  plain = first_checks.Plain(tuple((1, t) for t in answers), 3, (), found)
  rows = [
      {'step': 1, 'draw_index': t.draw_index, 'sample': t.sample,
       'ids': [9, 2], 'logps': [-0.5, -0.5]}
      for t in answers
  ]  # fmt: skip

  def verdicts():
    text = ''.join(json.dumps(r) + '\n' for r in rows)
    (tmp_path / run_folder.SAMPLES).write_text(text)
    return [v.status for v in first_checks.plain_loop(plain, tmp_path)]

  assert verdicts() == ['ok', 'ok', 'ok']
  rows[2]['ids'] = [9, 3]
  assert verdicts()[0] == 'fail'
