"""Checks of a setup that is right, and of one that is wrong in one thing."""

import dataclasses

import pytest

from areal_jax.doctor import setup
from areal_jax.doctor.verdict import Verdict, judge
from areal_jax.experiment import prepare
from areal_jax.rollout.memory import Estimate as RolloutEstimate
from areal_jax.train.memory import Estimate as TrainEstimate
from tests.small_experiment import experiment


def by_name(verdicts):
  return {verdict.name: verdict for verdict in verdicts}


def test_verdict_is_a_line_and_advice_where_it_failed():
  assert str(judge('a', True, 'said', 'do')) == 'ok    a: said'
  assert str(judge('a', False, 'said', 'do')) == (
      'fail  a: said\n      advice: do'
  )
  assert str(Verdict('a', 'skip', 'why')) == 'skip  a: why'


def test_sound_setup_has_no_failure(tmp_path):
  prepared = prepare(experiment(tmp_path))
  verdicts = [
      *setup.environment(prepared),
      *setup.devices(prepared),
      *setup.data(prepared),
      *setup.tokenizer(prepared),
      setup.reward(prepared),
      *setup.arithmetic(prepared),
      *setup.memory(prepared),
  ]
  failed = [str(v) for v in verdicts if v.status == 'fail']
  assert not failed
  assert not list(tmp_path.iterdir())  # nothing was written
  assert 'of 8 gold answers score above' in by_name(verdicts)['reward'].said


@pytest.mark.parametrize(
    'changes, check, name, advice',
    [
        (
            {'reward__function': 'tests.rewards.test_self_test:always_1'},
            'reward',
            'reward',
            'always_1: totals/train/0',
        ),
        (
            {'reward__function': 'tests.session_rewards:always_raises'},
            'reward',
            'reward',
            'the verifier is not installed',
        ),
        (
            {'rollout__stop_at_eos': False},
            'tokenizer',
            'end of answers',
            'stop_at_eos',
        ),
        (
            {'rollout__max_new_tokens': 2},
            'tokenizer',
            'length of answers',
            'max_new_tokens above',
        ),
        (
            {'rollout__eta': 0.0, 'rollout__engine__slots': 64},
            'arithmetic',
            'slots',
            'at most 8 slots',
        ),
    ],
)
def test_what_is_wrong_fails_with_advice(
    changes, check, name, advice, tmp_path
):
  prepared = prepare(experiment(tmp_path, **changes))
  found = getattr(setup, check)(prepared)
  verdicts = [found] if isinstance(found, Verdict) else list(found)
  verdict = by_name(verdicts)[name]
  assert verdict.status == 'fail' and advice in verdict.advice


def test_phases_that_take_turns_are_counted_apart():
  trains = TrainEstimate({'policy': 300}, gradients=100, offloaded=200)
  generates = RolloutEstimate(50, 2, 1_000, 1)
  assert setup.at_once(trains, generates, colocated=False) == {
      'training': 400, 'generation': 1_100,
  }  # fmt: skip
  assert setup.at_once(trains, generates, colocated=True) == {
      'training and generation': 1_500,
  }  # fmt: skip
  generates = dataclasses.replace(generates, turns=True)
  assert setup.at_once(trains, generates, colocated=True) == {
      'training': 400 + 50,  # the weights that generate next are there
      'generation': 100 + 1_050,  # moments are not
  }


def test_whether_phases_take_turns_is_said_by_mesh_and_eta(tmp_path):
  shared = dict(mesh__colocated=True)
  apart = prepare(experiment(tmp_path, rollout__eta=0.0, **shared))
  assert [v.name for v in setup.memory(apart)] == [
      'memory of training', 'memory of generation', 'memory of the host',
  ]  # fmt: skip
  together = prepare(experiment(tmp_path, rollout__eta=2.0, **shared))
  assert next(setup.memory(together)).name == (
      'memory of training and generation'
  )


def test_too_few_devices_fail(tmp_path):
  prepared = prepare(experiment(tmp_path, mesh__rollout__replicas=99))
  (verdict,) = setup.devices(prepared)
  assert verdict.status == 'fail' and '100 wanted' in verdict.said
