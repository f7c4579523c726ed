"""Rewards of users that are wrong, as the door shows them: one clear line."""

import json

import pytest

from areal_jax import run, session
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
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


def assert_all_scores_were_equal(lines, folder):
  """No answer of random weights is right, so there was nothing to learn."""
  told = [n for n in lines if n.startswith('caution: reward_std ')]
  assert told[0].startswith('caution: reward_std is 0 in step 1, healthy is')
  assert told[1].startswith('caution: reward_std was unhealthy in 1 of 1 rows')
  assert len(told) == 2
  summary = json.loads((folder / run_folder.SUMMARY).read_text())
  assert summary['unhealthy']['reward_std']['last'] == 0.0


def test_share_of_unparseable_answers_is_measured_and_told(tmp_path, capsys):
  code, lines = _run(tmp_path, capsys, 'unparseable_in_training', steps=3)
  assert code == 0
  folder = tmp_path / 'small'
  rows = [
      row
      for row in read_jsonl(folder / run_folder.METRICS)
      if 'reward_unparseable_fraction' in row
  ]
  assert len(rows) == 3
  summary = json.loads((folder / run_folder.SUMMARY).read_text())
  found = summary['unhealthy']['reward_unparseable_fraction']
  ill = [r['reward_unparseable_fraction'] > 0.1 for r in rows]
  assert any(ill) and found['unhealthy'] == sum(ill)
  assert any(
      line.startswith('caution: reward_unparseable_fraction is ')
      for line in lines
  )


def test_reward_of_a_task_without_gold_answers_is_called_at_the_start(
    tmp_path, capsys
):
  held_out = tmp_path / 'held_out.jsonl'
  held_out.write_text(
      '\n'.join(
          json.dumps({'id': str(i), 'prompt': f'{i}+1=', 'answer': ''})
          for i in range(4)
      )
  )
  code, lines = _run(
      tmp_path, capsys, 'always_raises', task__eval_file=str(held_out)
  )
  assert code == 1
  said = 'caution: the reward gives none of the texts tried a score'
  first = [n for n in lines if n.startswith(('caution', 'error'))]
  assert first[0].startswith(
      f'{said} (tests.session_rewards:always_raises raised LookupError'
  )
  assert first[1].startswith('error: 0 of 4 evaluation answers could be scored')
  assert 'Traceback' not in '\n'.join(lines)


def test_what_a_reward_prints_is_shown_once_and_kept(tmp_path, capfd):
  code, lines = _run(tmp_path, capfd, 'prints')
  assert code == 0
  log = tmp_path / 'small' / run_folder.REWARD_OUTPUT
  at = lines.index(f'the reward prints; all of it goes to {log}:')
  assert lines[at + 1].startswith('  scores totals/eval/')
  assert lines[at + 2] == '  and more'
  assert sum('and more' in line for line in lines) == 1
  assert sum('the reward prints' in line for line in lines) == 1
  assert_all_scores_were_equal(lines, log.parent)
  printed = log.read_text()
  assert 'scores totals/eval/' in printed and 'scores totals/train/' in printed
