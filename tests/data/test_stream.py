"""The order of drawing."""

import itertools
import json

from hypothesis import given, settings, strategies
import pytest

from areal_jax.config import ConfigError
from areal_jax.data.stream import ProblemStream
from areal_jax.types import Problem, Purpose


def problems(count: int) -> list[Problem]:
  return [Problem(f'p{i}', 'test', str(i), '') for i in range(count)]


def ids(stream, count: int) -> list[str]:
  return [draw.problem.id for draw in itertools.islice(stream, count)]


@given(count=strategies.integers(1, 40), seed=strategies.integers(0, 2**40))
@settings(max_examples=10, deadline=None)
def test_every_problem_is_drawn_once_an_epoch(count, seed):
  stream = ProblemStream(problems(count), seed=seed)
  draws = list(itertools.islice(stream, 3 * count))
  assert [d.draw_index for d in draws] == list(range(3 * count))
  for epoch in range(3):
    of_epoch = draws[epoch * count : (epoch + 1) * count]
    assert {d.epoch for d in of_epoch} == {epoch}
    assert sorted(d.problem.id for d in of_epoch) == sorted(
        p.id for p in problems(count)
    )


def test_epochs_seeds_and_purposes_have_orders_of_their_own():
  def order(seed, purpose=Purpose.TRAIN, epoch=0):
    stream = ProblemStream(problems(100), seed=seed, purpose=purpose)
    return tuple(ids(stream, 100 * (epoch + 1))[-100:])

  orders = {
      order(0),
      order(0, epoch=1),
      order(1),  # grain alone would give it the order of seed 0's epoch 1
      order(1, epoch=1),
      order(0, Purpose.EVAL),
      tuple(p.id for p in problems(100)),
  }
  assert len(orders) == 6
  assert order(0) == order(0)


def test_draw_carries_its_purpose():
  stream = ProblemStream(problems(2), seed=0, purpose=Purpose.EVAL)
  draw = next(stream)
  assert (draw.purpose, draw.attempt) == (Purpose.EVAL, 0)


@pytest.mark.parametrize('taken', [0, 3, 7, 20])
def test_restored_stream_goes_on_where_the_first_was(taken):
  first = ProblemStream(problems(7), seed=5)
  ids(first, taken)
  state = json.loads(json.dumps(first.state()))
  second = ProblemStream(problems(7), seed=5)
  second.restore(state)
  assert list(itertools.islice(second, 15)) == list(itertools.islice(first, 15))
  assert second.state() == first.state()


@pytest.mark.parametrize(
    'other, message',
    [
        ({'problems': problems(8)}, 'problems of the saved .* is 7, wanted 8'),
        ({'problems': problems(8)[1:]}, 'ids_digest of the saved data state'),
        ({'seed': 6}, 'seed of the saved data state is 5, wanted 6'),
        ({'purpose': Purpose.EVAL}, 'purpose of the saved data state is 0'),
    ],
)
def test_state_of_another_stream_is_refused(other, message):
  state = ProblemStream(problems(7), seed=5).state()
  arguments = {'problems': problems(7), 'seed': 5, **other}
  stream = ProblemStream(arguments.pop('problems'), **arguments)
  with pytest.raises(ConfigError, match=message):
    stream.restore(state)


def test_problems_must_be_there_and_differ():
  with pytest.raises(ConfigError, match='number of problems is 0'):
    ProblemStream([], seed=0)
  with pytest.raises(ConfigError, match=r"problem ids is \['p0'\]"):
    ProblemStream(problems(2) + problems(1), seed=0)
