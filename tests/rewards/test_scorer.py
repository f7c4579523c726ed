"""Scoring in killable processes."""

import asyncio
import pathlib
import sys

import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.rewards.scorer import RewardSettings, Scorer
from areal_jax.types import Problem, RewardStatus
from tests.limits import WAIT_S

sys.path.insert(0, str(pathlib.Path(__file__).parent))  # for the workers too

PROBLEM = Problem('train/7', 'totals', '3+5+7=', '8;15.', {'level': 2})


def score(scorer, *texts):
  async def gather():
    return await asyncio.gather(*(scorer(PROBLEM, text) for text in texts))

  return asyncio.run(gather())


def test_each_status_is_counted_and_only_ok_has_a_score():
  scorer = Scorer('reward_jobs:by_text', timeout_s=WAIT_S)
  scorer.start()
  texts = ('zero', 'parts', 'none', 'nan', 'a word it does not know')
  results = score(scorer, *texts)
  assert [r.status.value for r in results] == [
      'ok',
      'ok',
      'unparseable',
      'error',
      'error',
  ]
  assert [r.score for r in results] == [0.0, 0.25, None, None, None]
  assert results[1].parts == {'format': 1.0, 'value': 0.0}
  assert results[4].detail.startswith(
      "reward_jobs:by_text raised KeyError: 'a word"
  )
  assert scorer.counts == {'ok': 2, 'unparseable': 1, 'error': 2, 'timeout': 0}
  scorer.close()


def test_hung_reward_is_a_timeout_and_the_next_is_scored():
  scorer = Scorer('reward_jobs:hang', workers=1, timeout_s=4.0)
  scorer.start()
  hung, good = score(scorer, 'hang', 'good')
  assert hung.detail == (
      'reward_jobs:hang took longer than reward.timeout_s=4 and was killed'
  )
  assert (hung.status, hung.score) == (RewardStatus.TIMEOUT, None)
  assert hung.seconds == 4.0
  assert good.score == 1.0
  assert scorer.counts == {'ok': 1, 'timeout': 1, 'error': 0, 'unparseable': 0}
  scorer.close()


def test_each_way_to_fail_is_a_line_with_the_name_of_the_function():
  scorer = Scorer('reward_jobs:exits', timeout_s=WAIT_S)
  scorer.start()
  raised, died, good = score(scorer, 'exit', 'vanish', 'good')
  assert raised.detail.startswith('reward_jobs:exits raised SystemExit: 3\n')
  assert died.detail == (
      'reward_jobs:exits: the process of the job died with exit code 3'
  )
  assert good.score == 1.0
  scorer.close()


def test_what_a_reward_prints_goes_to_its_file(tmp_path, capfd):
  scorer = Scorer(
      'reward_jobs:exits', timeout_s=WAIT_S, output=tmp_path / 'printed'
  )
  scorer.start()
  score(scorer, 'one', 'two')
  scorer.close()
  assert (tmp_path / 'printed').read_text().splitlines() == [
      'scores one', 'a warning', 'scores two', 'a warning',
  ]  # fmt: skip
  assert capfd.readouterr() == ('', '')


def test_process_scores_as_a_thread_does():
  # CASES A20, without start(): the first call starts the workers.
  scorer = Scorer('areal_jax.rewards.running_totals:exact', timeout_s=WAIT_S)
  assert [r.score for r in score(scorer, '8;15.', '8.')] == [1.0, 0.0]
  scorer.close()


def test_unknown_function_is_refused_before_any_process():
  with pytest.raises(ConfigError, match="'reward_jobs:none'"):
    Scorer('reward_jobs:none')


@pytest.mark.parametrize(
    'settings, message',
    [
        ({'workers': 0}, 'config.workers is 0, wanted at least 1'),
        ({'timeout_s': 0.0}, 'config.timeout_s is 0.0, wanted more than 0'),
    ],
)
def test_impossible_settings_are_refused(settings, message):
  with pytest.raises(ConfigError, match=message):
    resolve(RewardSettings('reward_jobs:by_text', **settings))


def test_check_imports_the_function():
  resolve(RewardSettings('reward_jobs:by_text')).check('config.rewards')
  missing = resolve(RewardSettings('reward_jobs:none'))
  with pytest.raises(ConfigError, match='config.rewards.function is'):
    missing.check('config.rewards')
