"""A metric that turns unhealthy is told once, and at the end of the run."""

import json

import pytest

from areal_jax.telemetry.health import Health
from areal_jax.telemetry.metrics import METRICS


def _looked(*values, name='truncated_fraction'):
  told = []
  health = Health(told.append)
  for step, value in enumerate(values, start=1):
    health.look(step, {name: value})
  return health, told


def test_it_is_told_once_when_it_turns_and_counted_every_time():
  health, told = _looked(0.1, 0.2, 0.5, 0.6, 0.1, 0.7)
  (line,) = told
  assert line.startswith(
      'caution: truncated_fraction is 0.5 in step 3, healthy is 0 to 0.2:'
      ' answers are cut off at the limit'
  )
  assert health.report() == {
      'truncated_fraction': {
          'first_step': 3,
          'unhealthy': 3,
          'rows': 4,
          'last': 0.7,
          'healthy': '0 to 0.2',
      }
  }
  (line,) = health.lines()
  assert 'was unhealthy in 3 of 4 rows since step 3 and ended at 0.7' in line


def test_it_is_told_again_after_ten_healthy_rows():
  assert len(_looked(0.5, *[0.1] * 9, 0.5)[1]) == 1
  assert len(_looked(0.5, *[0.1] * 10, 0.5)[1]) == 2


def test_a_healthy_run_says_nothing():
  health, told = _looked(0.0, 0.2, float('nan'))
  assert (told, health.lines(), health.report()) == ([], [], {})


@pytest.mark.parametrize(
    'name, ill, well',
    [
        ('reward_std', 0.0, 0.1),
        ('truncated_fraction', 0.21, 0.2),
        ('eval_truncated_fraction', 0.21, 0.2),
        ('reward_unparseable_fraction', 0.11, 0.1),
        ('importance_capped_fraction', 0.11, 0.1),
    ],
)
def test_these_metrics_are_watched(name, ill, well):
  assert METRICS[name].advice
  assert len(_looked(ill, name=name)[1]) == 1
  assert not _looked(well, name=name)[1]


def test_a_metric_without_advice_is_passed_over():
  assert _looked(1e9, name='gradient_norm')[1] == []


def test_a_resumed_run_goes_on_without_telling_again():
  health, _ = _looked(0.1, 0.5, 0.1)
  told = []
  resumed = Health(told.append)
  resumed.restore(json.loads(json.dumps(health.state())))
  resumed.look(4, {'truncated_fraction': 0.9})
  assert told == []
  assert resumed.report()['truncated_fraction']['unhealthy'] == 2
