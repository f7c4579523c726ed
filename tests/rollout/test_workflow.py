"""What a workflow refuses, and what is refused of a workflow."""

import asyncio
import dataclasses

import numpy as np
import pytest

from areal_jax.rollout.workflow import (
    SingleTurn,
    WorkflowContext,
    check_trajectory,
)
from areal_jax.types import (
    Draw,
    Problem,
    Purpose,
    RewardResult,
    RewardStatus,
    SamplingParams,
    Trajectory,
)

PROBLEM = Problem('p', 'here', '1+1=', '2')


class Asked(Exception):
  pass


def ask(purpose, **settings):
  """One draw of a workflow whose client, when asked, raises `Asked`."""

  class Client:

    async def generate(self, request):
      raise Asked

  workflow = SingleTurn(
      WorkflowContext(
          client=Client(),
          render=lambda problem: (1, 2),
          decode=str,
          score=None,
          sampling=SamplingParams(4, **settings),
          clock=lambda: 0.0,
      )
  )
  draw = Draw(0, 0, PROBLEM, purpose=purpose)
  asyncio.run(workflow(draw, 0, 0))


@pytest.mark.parametrize(
    'settings',
    [
        dict(top_k=5),
        dict(top_p=0.9),
        dict(min_p=0.1),
        dict(repetition_penalty=1.1),
        dict(frequency_penalty=0.1),
        dict(presence_penalty=0.1),
        dict(logit_bias=((3, 1.0),)),
        dict(min_new_tokens=2, stop_ids=(7,)),
    ],
)
def test_training_refuses_what_the_trainer_cannot_compute_anew(settings):
  name = next(iter(settings))
  with pytest.raises(ValueError, match=f'{name}.* wanted temperature alone'):
    ask(Purpose.TRAIN, **settings)
  with pytest.raises(Asked):
    ask(Purpose.EVAL, **settings)


def test_training_takes_any_temperature_and_stops():
  with pytest.raises(Asked):
    ask(Purpose.TRAIN, temperature=0.7, stop_ids=(7,), raw_logps=True)


@pytest.mark.parametrize(
    'changes, error, why',
    [
        (dict(sample=1), ValueError, r'= \(0, 1\), wanted \(0, 0\)'),
        (dict(logps=np.zeros(3, np.float32)), ValueError, "'logps': 3"),
        (dict(versions=np.full(2, -1)), ValueError, 'without a sampled token'),
        (
            dict(reward=RewardResult(RewardStatus.TIMEOUT)),
            ValueError,
            "status 'timeout', wanted 'ok'",
        ),
    ],
)
def test_a_trajectory_that_training_could_not_take_is_refused(
    changes, error, why
):
  made = Trajectory(
      draw_index=0,
      sample=0,
      segments=(),
      ids=np.zeros(2, np.int32),
      loss_mask=np.ones(2, np.float32),
      logps=np.zeros(2, np.float32),
      versions=np.zeros(2, np.int32),
      turn_ids=np.zeros(2, np.int32),
      reward=RewardResult(RewardStatus.OK, 1.0),
      temperature=1.0,
      admitted_version=0,
  )
  draw = Draw(0, 0, PROBLEM)
  check_trajectory(made, draw, 0)
  with pytest.raises(error, match=why):
    check_trajectory(dataclasses.replace(made, **changes), draw, 0)
