"""Workflows of users in real runs: `rollout.workflow`."""

import pytest

from areal_jax import run, session
from tests import session_workflows
from tests.small_experiment import experiment


def test_a_workflow_of_ones_own_answers_in_training_and_evaluation(
    tmp_path, monkeypatch
):
  answered = []
  monkeypatch.setattr(session_workflows, 'ANSWERED', answered)
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          reward__function='tests.session_rewards:seldom_parses',
          reward__self_test=False,
          failures__breaker_answers=1000,
          rollout__workflow='tests.session_workflows:retry_once',
      )
  )
  assert {purpose for purpose, *_ in answered} == {'TRAIN', 'EVAL'}
  training = [a[1:] for a in answered if a[0] == 'TRAIN']
  # Another branch is another answer: some of the second ones got a score, and
  # only members whose second answer got none have failed.
  assert (1, True) in training
  failed = result.summary['failed_members']
  assert failed <= training.count((1, False)) < training.count((0, False))


def test_a_workflow_that_returns_no_trajectory_ends_the_run_with_its_name(
    tmp_path,
):
  with pytest.raises(TypeError, match='returned None, wanted a Trajectory'):
    session.run(
        experiment(
            tmp_path,
            rollout__workflow='tests.session_workflows:returns_nothing',
        )
    )


@pytest.mark.parametrize(
    'name, why',
    [
        ('builds_no_coroutine', 'wanted a function that returns a coroutine'),
        ('builds_too_few', 'cannot be called with (draw, sample, admitted_ver'),
    ],
)
def test_what_builds_no_workflow_is_one_line(tmp_path, capsys, name, why):
  spec = f'tests.session_workflows:{name}'
  code = run.main(experiment(tmp_path, rollout__workflow=spec))
  assert code == 2
  told = capsys.readouterr().err.splitlines()
  (error,) = [line for line in told if line.startswith('error')]
  assert f'config.rollout.workflow is {spec!r}' in error
  assert why in error
