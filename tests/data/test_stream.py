"""The order of drawing."""

import dataclasses
import itertools
import json

from hypothesis import given, settings, strategies
import pytest

from areal_jax.config import ConfigError
from areal_jax.data.stream import Part, ProblemStream, content_digest
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


MIXTURE = (Part('easy', 10, 3.0), Part('hard', 25, 1.0))


def mixture(seed: int = 3) -> ProblemStream:
  return ProblemStream(problems(35), seed=seed, parts=MIXTURE)


def test_sources_are_drawn_by_their_weights():
  draws = list(itertools.islice(mixture(), 120))
  easy = [int(d.problem.id[1:]) < 10 for d in draws]
  for n in range(1, 121):  # evenly spread, not only in the end
    assert abs(sum(easy[:n]) - 0.75 * n) <= 1
  # Each source has epochs of its own: 9 of 10 problems, 1 of 25.
  of_easy = [d for d, is_easy in zip(draws, easy) if is_easy]
  for epoch in range(9):
    drawn = of_easy[10 * epoch : 10 * (epoch + 1)]
    assert {d.epoch for d in drawn} == {epoch}
    assert sorted(d.problem.id for d in drawn) == [f'p{i}' for i in range(10)]
  of_hard = [d for d, is_easy in zip(draws, easy) if not is_easy]
  assert sorted(d.problem.id for d in of_hard[:25]) == sorted(
      f'p{i}' for i in range(10, 35)
  )
  assert [d.epoch for d in of_hard] == [0] * 25 + [1] * 5


@pytest.mark.parametrize('taken', [0, 1, 50])
def test_state_of_a_mixture_says_where_each_source_is(taken):
  first = mixture()
  drawn = ids(first, taken)
  state = json.loads(json.dumps(first.state()))
  easy = sum(int(i[1:]) < 10 for i in drawn)
  assert state['positions'] == [easy, taken - easy]
  second = mixture()
  second.restore(state)
  assert list(itertools.islice(second, 60)) == list(itertools.islice(first, 60))
  assert second.state() == first.state()


def test_adding_a_source_leaves_the_order_of_the_first():
  alone = ProblemStream(problems(10), seed=3)
  both = [i for i in ids(mixture(), 20) if int(i[1:]) < 10]
  assert both == ids(alone, len(both))


@pytest.mark.parametrize('count', [1, 2, 3])
def test_hosts_together_make_every_draw_once(count):
  whole = list(itertools.islice(mixture(), 60))
  hosts = [mixture().shard(index, count) for index in range(count)]
  drawn = [list(itertools.islice(host, 60 // count)) for host in hosts]
  assert (
      sorted(
          (d for of_host in drawn for d in of_host), key=lambda d: d.draw_index
      )
      == whole
  )


def test_host_resumes_among_the_others():
  first = mixture().shard(1, 3)
  ids(first, 11)
  state = json.loads(json.dumps(first.state()))
  second = mixture().shard(1, 3)
  second.restore(state)
  assert next(second) == next(first)
  assert next(second).draw_index == 1 + 3 * 12
  for other in (mixture(), mixture().shard(2, 3), mixture().shard(1, 2)):
    with pytest.raises(ConfigError, match=r'shard of the saved .* is \[1, 3\]'):
      other.restore(state)


@pytest.mark.parametrize(
    'index, count, message',
    [
        (0, 0, 'shard count is 0, wanted at least 1'),
        (2, 2, 'shard index is 2, wanted 0..1'),
        (-1, 2, 'shard index is -1'),
    ],
)
def test_host_that_does_not_exist_is_refused(index, count, message):
  with pytest.raises(ConfigError, match=message):
    mixture().shard(index, count)


def test_stream_that_was_drawn_from_is_not_shared_out():
  stream = mixture()
  next(stream)
  with pytest.raises(ConfigError, match='next draw of a stream to shard is 1'):
    stream.shard(0, 2)


def test_state_of_another_mixture_is_refused():
  state = mixture().state()
  parts = (Part('easy', 10, 2.0), MIXTURE[1])
  with pytest.raises(ConfigError, match='sources of the saved data state'):
    ProblemStream(problems(35), seed=3, parts=parts).restore(state)


@pytest.mark.parametrize(
    'parts, message',
    [
        ((Part('a', 34),), 'all sources is 34, wanted the 35 problems'),
        ((Part('a', 0), Part('b', 35)), "problems of source 'a' is 0"),
        ((Part('a', 35, 0.0),), "weight of source 'a' is 0.0, wanted above 0"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts, message):
  with pytest.raises(ConfigError, match=message):
    ProblemStream(problems(35), seed=0, parts=parts)


def test_all_that_problems_say_is_in_their_digest():
  first = problems(3)
  alike = [dataclasses.replace(problem) for problem in first]
  assert content_digest(first) == content_digest(alike)
  swapped = [
      dataclasses.replace(one, prompt=other.prompt, answer=other.answer)
      for one, other in zip(first, reversed(first))
  ]
  others = [swapped, first[::-1], first[:2]]
  for change in ({'answer': 'x'}, {'prompt': 'x'}, {'meta': {'tests': [1]}}):
    others.append([dataclasses.replace(first[0], **change), *first[1:]])
  digests = {content_digest(other) for other in others}
  assert len(digests) == len(others) and content_digest(first) not in digests


def test_new_data_begin_at_their_first_problem_under_later_draw_indices():
  old, new = ProblemStream(problems(7), seed=5), problems(5)
  taken = [next(old).draw_index for _ in range(9)]
  stream, plain = (ProblemStream(new, seed=5) for _ in range(2))
  stream.begin_at(old.state()['next_draw_index'])
  for k in range(3):
    draw, other = next(stream), next(plain)
    assert draw.draw_index == len(taken) + k
    assert (draw.problem, draw.epoch) == (other.problem, other.epoch)
  again = ProblemStream(new, seed=5)
  again.restore(json.loads(json.dumps(stream.state())))
  assert [next(again) for _ in range(9)] == [next(stream) for _ in range(9)]
