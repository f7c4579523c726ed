"""What a workflow refuses before it asks anyone."""

import asyncio

import pytest

from areal_jax.rollout.workflow import SingleTurn
from areal_jax.types import Draw, Problem, Purpose, SamplingParams

PROBLEM = Problem('p', 'here', '1+1=', '2')


class Asked(Exception):
  pass


def ask(purpose, **settings):
  """One draw of a workflow whose client, when asked, raises `Asked`."""

  class Client:

    async def generate(self, request):
      raise Asked

  workflow = SingleTurn(
      client=Client(),
      render=lambda problem: (1, 2),
      decode=str,
      score=None,
      sampling=SamplingParams(4, **settings),
      clock=lambda: 0.0,
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
