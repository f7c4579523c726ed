"""Rewards of users that are wrong, as the door shows them: one clear line."""

import pytest

from areal_jax import run, session
from areal_jax.telemetry import run_folder
from tests.small_experiment import experiment


def _run(folder, capsys, reward, **changes):
  """Runs with a reward of `session_rewards`; returns code and what was told."""
  settings = experiment(
      folder, reward__function=f'tests.session_rewards:{reward}', **changes
  )
  code = run.main(settings)
  return code, capsys.readouterr().err.splitlines()


@pytest.mark.parametrize(
    'reward, why',
    [
        ('always_raises', 'raised LookupError: the verifier is not installed'),
        ('always_none', 'returned None: it found no answer in '),
        ('always_hangs', 'took longer than reward.timeout_s=0.5 and was'),
    ],
)
def test_reward_without_a_score_ends_the_run_before_anything_is_compiled(
    tmp_path, capsys, monkeypatch, reward, why
):
  def compiles(*_):
    raise AssertionError('an engine is built')

  monkeypatch.setattr(session, 'build_rollout', compiles)
  monkeypatch.setattr(session, '_SELF_TEST_TOLD_S', 0.0)
  code, lines = _run(
      tmp_path,
      capsys,
      reward,
      warm_start__steps=1,
      reward__timeout_s=0.5 if reward == 'always_hangs' else 60.0,
  )
  assert code == 1
  told = [line for line in lines if not line.startswith('tests the reward: ')]
  (error,) = told
  assert error.startswith(
      'error: none of 4 gold answers gets a score:'
      f' tests.session_rewards:{reward} {why}'
  )
  log = tmp_path / 'small' / run_folder.REWARD_ERRORS
  assert log.exists() == (reward != 'always_none')
  if reward == 'always_hangs':  # half a second passed, so it was told
    assert any('of 36 answers are scored; it takes at' in t for t in lines)
  if reward == 'always_raises':
    assert error.endswith(f'(details: {log})')
    assert 'session_rewards.py", line' in log.read_text()
  assert not (tmp_path / 'small' / run_folder.REWARD_OUTPUT).exists()


def test_reward_may_fail_its_self_test_where_that_is_asked_for(
    tmp_path, capsys
):
  code, lines = _run(
      tmp_path,
      capsys,
      'fails_in_training',
      reward__self_test=False,
      evaluation__before=False,
      failures__breaker_answers=4,
  )
  assert code == 1  # it begins to train, and then most answers have no score
  log = tmp_path / 'small' / run_folder.REWARD_ERRORS
  reward = 'tests.session_rewards:fails_in_training'
  first = f"the reward failed: {reward} raised KeyError: 'ground_truth'"
  assert [n for n in lines if n.startswith('the reward failed')] == [
      f'{first} (all failures: {log})'
  ]
  (error,) = [line for line in lines if line.startswith('error: ')]
  assert 'of the last 4 answers have no score' in error
  assert "raised KeyError: 'ground_truth'" in error
  assert 'Traceback' not in '\n'.join(lines)
  assert 'session_rewards.py", line' in log.read_text()


def test_what_a_reward_prints_is_shown_once_and_kept(tmp_path, capfd):
  code, lines = _run(tmp_path, capfd, 'prints')
  assert code == 0
  log = tmp_path / 'small' / run_folder.REWARD_OUTPUT
  at = lines.index(f'the reward prints; all of it goes to {log}:')
  assert lines[at + 1].startswith('  scores totals/eval/')
  assert lines[at + 2] == '  and more'
  assert sum('and more' in line for line in lines) == 1
  assert sum('the reward prints' in line for line in lines) == 1
  printed = log.read_text()
  assert 'scores totals/eval/' in printed and 'scores totals/train/' in printed
