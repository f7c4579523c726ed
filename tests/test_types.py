"""Records refuse what they cannot mean; CASES A23."""

import math

import numpy as np
import pytest

from areal_jax import types
from tests import records


def test_score_of_zero_is_a_score():
  result = types.RewardResult(types.RewardStatus.OK, 0.0)
  assert result.score == 0.0


@pytest.mark.parametrize(
    'status, score',
    [
        (types.RewardStatus.OK, None),
        (types.RewardStatus.TIMEOUT, 0.0),
        (types.RewardStatus.OK, math.nan),
        (types.RewardStatus.OK, math.inf),
    ],
)
def test_score_goes_with_status_ok_alone(status, score):
  with pytest.raises(ValueError, match='score'):
    types.RewardResult(status, score)


def test_head_version_is_the_oldest_sampled_token():
  trajectory = records.trajectory(answer=(1, 2, 3), versions=[4, 4, 6])
  assert trajectory.head_version == 4  # and not -1 of the prompt


def test_group_head_is_the_oldest_of_its_members():
  group = records.group(0, version=3)
  old = records.trajectory(0, 9, versions=[1, 3])
  group = types.Group(
      group.draw, 3, (*group.trajectories, old), (), group.admitted_version
  )
  assert group.head_version == 1


@pytest.mark.parametrize(
    'settings, named',
    [
        (dict(max_new_tokens=0), 'max_new_tokens is 0'),
        (dict(max_new_tokens=4, temperature=-1.0), 'temperature is -1.0'),
        (dict(max_new_tokens=4, top_p=0.0), 'top_p is 0.0'),
        (dict(max_new_tokens=4, top_k=-2), 'top_k is -2'),
        (dict(max_new_tokens=4, min_p=1.5), 'min_p is 1.5'),
        (
            dict(max_new_tokens=4, repetition_penalty=0.0),
            'repetition_penalty is 0.0',
        ),
        (
            dict(max_new_tokens=4, frequency_penalty=math.inf),
            'frequency_penalty is inf',
        ),
        (
            dict(max_new_tokens=4, presence_penalty=math.nan),
            'presence_penalty is nan',
        ),
        (
            dict(max_new_tokens=4, logit_bias=((3, 1.0), (3, 2.0))),
            'wanted pairs of a different token id each',
        ),
        (dict(max_new_tokens=4, logit_bias=((-1, 1.0),)), 'logit_bias is'),
        (dict(max_new_tokens=4, top_logps=-1), 'top_logps is -1'),
        (dict(max_new_tokens=4, min_new_tokens=5), 'min_new_tokens is 5'),
    ],
)
def test_sampling_settings_name_the_field_and_the_value(settings, named):
  with pytest.raises(ValueError, match=named):
    types.SamplingParams(**settings)


def test_stop_reason_is_that_of_the_last_sampled_segment():
  cut = records.trajectory(stop_reason=types.StopReason.LENGTH)
  assert cut.stop_reason is types.StopReason.LENGTH
  assert isinstance(cut.versions, np.ndarray)
