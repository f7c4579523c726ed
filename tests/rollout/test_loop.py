"""Real engine loops in their threads: invariants 4, 6, 11; CASES A8, A9."""

import asyncio
import dataclasses
import functools
import threading

import jax
import numpy as np
import pytest

from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import mesh_of
from areal_jax.models import transformer
from areal_jax.rollout import dispatch as dispatch_lib
from areal_jax.rollout import engine as engine_lib
from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.loop import (
    EngineLoop,
    EngineStopped,
    require_living,
    stop_all,
)
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.rollout.slots import Ticket
from areal_jax.rollout.workflow import answer_of
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.programs import Programs
from areal_jax.types import StopReason
from tests import tiny
from tests.closeness import assert_close
from tests.limits import WAIT_S, wait_until
from tests.plain_sampling import plain_logps

SETTINGS = EngineSettings(
    slots=4,
    max_length=64,
    max_prompt_length=32,
    page_size=8,
    steps=4,
    prefill_rows=4,
)


@pytest.fixture(scope='module')
def engine():
  return Engine(tiny.config(), SETTINGS, tiny.mesh(), Rules())


class Running:
  """A started loop and the answers that came out of it."""

  def __init__(self, engine, swap='recompute', weights=True, **how):
    self.events = EventLog(None)
    self.loop = EngineLoop(engine, '0', swap=swap, events=self.events, **how)
    self.answers = {}
    self.swaps = []
    self._came = threading.Condition()
    self.on_answer = lambda outcome: None
    self.loop.start()
    if weights:
      self.set_weights(0)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.loop.stop()

  def set_weights(self, version):
    # Arrived already: the loop decodes on while a transfer is under way.
    on = self.loop.engine.mesh
    params = jax.block_until_ready(tiny.params(version, on=on))
    self.loop.set_weights(version, params, self.swaps.append)

  def submit(self, *requests):
    """Tickets of the requests, in their order."""
    return [
        self.loop.submit(
            request, lambda outcome, r=request: self._answer(r, outcome)
        )
        for request in requests
    ]

  def _answer(self, request, outcome):
    self.on_answer(outcome)
    with self._came:
      self.answers[request.request_id] = outcome
      self._came.notify_all()

  def wait(self, n):
    with self._came:
      assert self._came.wait_for(lambda: len(self.answers) >= n, WAIT_S)
    return self.answers


def check_labels(request, completion, atol=1e-4):
  """Invariant 4: each token's log-prob is that of the version it names."""
  full = [*request.prompt_ids, *completion.ids]
  n = len(request.prompt_ids)
  for version in set(completion.versions.tolist()):
    scored = tiny.trainer_logps(tiny.params(version), full)[n:]
    chosen = completion.versions == version
    gap = np.abs(scored - completion.logps)[chosen].max()
    assert gap < atol, f'version {version}: gap {gap}'


def swap_in_mid_sentence(engine, swap, tokenizer=None, **sampling):
  """Two long requests and a short one, whose end brings new weights.

  The callback runs in the loop's thread during the dispatch that follows the
  end, so the swap happens at the same token each time: after 8 of 40.
  """
  long = [
      tiny.request(f'long{i}', new=40, draw=i, **sampling) for i in range(2)
  ]
  short = tiny.request('short', new=4, draw=5)
  running = Running(engine, swap, weights=False, tokenizer=tokenizer)
  with running:
    running.on_answer = lambda c: (
        running.set_weights(1) if c.request_id == 'short' else None
    )
    running.submit(*long, short)
    running.set_weights(0)
    answers = running.wait(3)
  return long, answers, running


@pytest.fixture(scope='module')
def featured():
  """An engine that was built for everything, and is short of pages."""
  features = SamplingFeatures(
      penalties=True,
      max_logit_bias=2,
      max_top_logps=3,
      raw_logps=True,
      prompt_logps=True,
  )
  settings = dataclasses.replace(SETTINGS, sampling=features, pages=9, chunk=16)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


def test_what_is_told_goes_to_those_who_ask(featured):
  weights = tiny.params(0)
  curious = tiny.request(
      'curious', new=10, temperature=0.5, raw_logps=True, top_logps=2,
      prompt_logps=True,
  )  # fmt: skip
  with Running(featured) as running:
    running.submit(curious, tiny.request('other', new=10, draw=1))
    answers = running.wait(2)
  got, other = answers['curious'], answers['other']
  assert other.raw_logps is None and other.prompt_logps is None
  assert other.top_ids is None and other.top_logps is None
  full = [*curious.prompt_ids, *got.ids]
  raw = tiny.trainer_logps(weights, full)
  np.testing.assert_allclose(got.raw_logps, raw[3:], atol=1e-4)
  np.testing.assert_allclose(
      got.logps, tiny.trainer_logps(weights, full, 0.5)[3:], atol=1e-4
  )
  assert np.abs(got.raw_logps - got.logps).max() > 1e-2
  assert got.top_ids.shape == got.top_logps.shape == (10, 2)
  assert (got.top_logps[:, 0] >= got.top_logps[:, 1]).all()
  drawn = got.top_ids == got.ids[:, None]
  assert drawn.any()
  np.testing.assert_allclose(
      got.top_logps[drawn], got.logps[drawn.any(axis=1)], atol=1e-6
  )
  assert np.isnan(got.prompt_logps[0]) and got.prompt_version == 0
  np.testing.assert_allclose(got.prompt_logps[1:], raw[1:3], atol=1e-4)


@pytest.mark.parametrize('swap', ['recompute', 'restart'])
def test_penalties_survive_new_weights(featured, swap):
  # A bonus for what was said: an answer that loses its history shows it.
  strong = dict(frequency_penalty=-4.0, repetition_penalty=0.8)
  long, answers, _ = swap_in_mid_sentence(featured, swap, **strong)
  completion = answers['long0']
  n = len(long[0].prompt_ids)
  full = np.array([[*long[0].prompt_ids, *completion.ids]])
  assert len(set(completion.versions)) == (2 if swap == 'recompute' else 1)
  logits = {
      version: np.asarray(
          transformer.forward(
              tiny.config(),
              tiny.params(version),
              full,
              np.arange(full.shape[1])[None],
              np.ones_like(full),
          )
      )[0]
      for version in (0, 1)
  }
  for i, (token, version) in enumerate(
      zip(completion.ids, completion.versions)
  ):
    expected = plain_logps(
        logits[version][n + i - 1],
        long[0].prompt_ids,
        completion.ids[:i].tolist(),
        long[0].sampling,
    )
    np.testing.assert_allclose(completion.logps[i], expected[token], atol=1e-3)


def test_samples_of_one_request_differ_and_share_one_prefill(engine):
  samples = [tiny.request(f'r/{i}', new=12, draw=3, sample=i) for i in range(3)]
  with Running(engine) as running:

    async def ask(n):
      client = EngineClient([running.loop])
      return await asyncio.gather(*map(client.generate, samples[:n]))

    three, two = asyncio.run(ask(3)), asyncio.run(ask(2))
  said = [completion.ids.tolist() for completion in three]
  assert len({tuple(ids) for ids in said}) == 3
  assert [completion.ids.tolist() for completion in two] == said[:2]
  assert running.loop.counts.prefills == 1


def test_more_requests_than_slots_are_all_answered(engine):
  requests = [
      tiny.request(f'{i}', range(1, 3 + i % 5), new=3 + i, draw=i)
      for i in range(11)
  ]
  with Running(engine) as running:
    running.submit(*requests)
    answers = running.wait(11)
  for i, request in enumerate(requests):
    completion = answers[request.request_id]
    assert len(completion.ids) == 3 + i
    assert completion.stop_reason is StopReason.LENGTH
    assert completion.weight_source == 'engine/0'
    check_labels(request, completion)


def test_tokens_do_not_depend_on_the_order_of_arrival(engine):
  requests = [tiny.request(f'{i}', new=12 + i, draw=i) for i in range(9)]
  said = []
  for order in (requests, requests[::-1]):
    with Running(engine) as running:
      running.submit(*order)
      said.append({k: c.ids.tolist() for k, c in running.wait(9).items()})
  assert said[0] == said[1]


def test_stop_id_travels_with_the_completion(engine):
  with Running(engine) as running:
    running.submit(tiny.request('free', new=20))
    free = running.wait(1)['free'].ids.tolist()
    running.submit(tiny.request('stopped', new=20, stop_ids=(free[4],)))
    stopped = running.wait(2)['stopped']
  assert stopped.stop_reason is StopReason.STOP
  assert stopped.stop_id == free[4] == stopped.ids[-1]


def test_group_is_prefilled_once_however_many_samples(engine):
  group = [tiny.request(f'{i}', new=6, sample=i) for i in range(10)]
  with Running(engine, weights=False) as running:
    running.submit(*group)
    running.set_weights(0)
    running.wait(10)
    assert running.loop.counts.prefills == 1
    assert running.loop.counts.prefill_tokens == 2  # the last one is decoded
    assert running.loop.counts.prefix_hits == 9


def test_answers_go_out_while_the_devices_decode_on(engine, monkeypatch):
  happened = []
  dispatch = engine.generate_steps

  def recorded(*args):
    happened.append('dispatch')
    return dispatch(*args)

  monkeypatch.setattr(engine, 'generate_steps', recorded)
  with Running(engine, weights=False) as running:
    running.on_answer = lambda outcome: happened.append(outcome.request_id)
    running.submit(tiny.request('short', new=4), tiny.request('long', new=16))
    running.set_weights(0)
    running.wait(2)
  # The short one ends with the first dispatch, the long one with the fourth.
  # Then none follows, and the last answer does not wait for one.
  assert happened == ['dispatch'] * 2 + ['short'] + ['dispatch'] * 2 + ['long']


def test_dispatches_end_with_a_limit_where_requests_wait(engine, monkeypatch):
  asked = []
  dispatch = engine.generate_steps

  def recorded(params, state, k, *more):
    asked.append(k)
    return dispatch(params, state, k, *more)

  monkeypatch.setattr(engine, 'generate_steps', recorded)
  with Running(engine, weights=False) as running:
    # A dispatch costs something beside its steps.
    running.loop._choice.pace.took(1, 1.1)
    running.loop._choice.pace.took(4, 4.1)
    running.submit(*(tiny.request(f'{i}', new=6, draw=i) for i in range(9)))
    running.set_weights(0)
    running.wait(9)
  # Four slots with 6 steps each: the second dispatch is of 2 where others wait,
  # and as long as it may be where nobody does.
  assert asked == [4, 2, 4, 2, 4, 4]


def test_recompute_swap_keeps_slots_alive_and_labels_true(engine):
  long, answers, running = swap_in_mid_sentence(engine, 'recompute')
  for request in long:
    completion = answers[request.request_id]
    assert completion.versions.tolist() == [0] * 8 + [1] * 32
    check_labels(request, completion)
  assert running.loop.counts.swaps == 2  # the first weights, then the new ones
  assert running.loop.counts.rebuilt_tokens == 2 * (2 + 8)
  assert running.swaps == [0, 1]


def test_labels_one_version_old_are_seen(engine):
  """Planted fault: labels that lag one version behind the weights."""
  long, answers, _ = swap_in_mid_sentence(engine, 'recompute')
  completion = answers['long0']
  completion.versions[8:12] = 0
  with pytest.raises(AssertionError, match='version 0: gap'):
    check_labels(long[0], completion)


def test_keep_swap_is_seen_as_a_stale_cache(engine):
  long, answers, running = swap_in_mid_sentence(engine, 'keep')
  completion = answers['long0']
  assert completion.versions.tolist() == [0] * 8 + [1] * 32
  assert running.loop.counts.rebuilt_tokens == 0
  with pytest.raises(AssertionError, match='version 1: gap'):
    check_labels(long[0], completion)


def test_drain_swap_lets_running_answers_end_first(engine):
  long, answers, _ = swap_in_mid_sentence(engine, 'drain')
  for request in long:
    completion = answers[request.request_id]
    assert set(completion.versions.tolist()) == {0}
    check_labels(request, completion)


def test_restart_swap_leaves_no_token_of_the_old_version(engine):
  long, answers, running = swap_in_mid_sentence(engine, 'restart')
  for request in long:
    completion = answers[request.request_id]
    assert completion.versions.tolist() == [1] * 40
    check_labels(request, completion)
  assert running.loop.counts.restarted_tokens == 2 * 8


def test_restarted_answer_is_that_of_a_fresh_request(engine):
  long, answers, _ = swap_in_mid_sentence(engine, 'restart')
  with Running(engine, weights=False) as running:
    running.set_weights(1)
    running.submit(long[0])
    fresh = running.wait(1)['long0']
  assert fresh.ids.tolist() == answers['long0'].ids.tolist()


@pytest.mark.parametrize('swap', ['recompute', 'keep', 'restart'])
def test_interrupted_answer_keeps_its_budget(engine, swap):
  # CASES A7: three interruptions; what was said counts, the prompt does not.
  long = tiny.request('long', range(1, 20), new=40)
  shorts = [tiny.request(f'{n}', new=n, draw=n) for n in (4, 12, 20)]
  running = Running(engine, swap, weights=False)
  with running:
    versions = iter((1, 2, 3))
    running.on_answer = lambda c: (
        None if c.request_id == 'long' else running.set_weights(next(versions))
    )
    running.submit(long, *shorts)
    running.set_weights(0)
    said = running.wait(4)['long']
  assert len(running.swaps) == 4
  assert len(said.ids) == len(said.versions) == 40
  assert said.stop_reason is StopReason.LENGTH


def test_prefix_does_not_survive_a_weight_update(engine):
  # CASES A9: the same prompt again, greedily, after very different weights.
  request = tiny.request('first', range(1, 12), new=16, temperature=0.0)
  again = tiny.request('again', range(1, 12), new=16, temperature=0.0)
  with Running(engine) as running:
    running.submit(request)
    running.wait(1)
    running.set_weights(1)
    running.submit(again)
    warm = running.wait(2)['again']
  with Running(engine, weights=False) as running:
    running.set_weights(1)
    running.submit(again)
    cold = running.wait(1)['again']
  assert warm.ids.tolist() == cold.ids.tolist()
  assert_close(warm.logps, cold.logps)
  assert set(warm.versions.tolist()) == {1}


@pytest.mark.parametrize('swap', ['recompute', 'keep', 'drain', 'restart'])
def test_request_after_new_weights_never_starts_on_old_ones(engine, swap):
  late = tiny.request('late', new=6, draw=9)
  running = Running(engine, swap, weights=False)
  with running:

    def bring(completion):
      if completion.request_id == 'short':
        running.set_weights(1)
        running.submit(late)

    running.on_answer = bring
    running.submit(
        tiny.request('long', new=40), tiny.request('short', new=4, draw=5)
    )
    running.set_weights(0)
    answers = running.wait(3)
  assert set(answers['late'].versions.tolist()) == {1}
  check_labels(late, answers['late'])


def test_newest_weights_win(engine):
  with Running(engine, weights=False) as running:
    running.set_weights(1)
    running.loop.set_weights(0, tiny.params(0), running.swaps.append)
    running.submit(tiny.request())
    assert set(running.wait(1)['r'].versions.tolist()) == {1}


def test_aborted_request_answers_with_what_it_has(engine):
  with Running(engine) as running:

    def give_up(completion):
      if completion.request_id == 'short':
        running.loop.abort([long, Ticket()])  # and one of nobody's

    running.on_answer = give_up
    long, _ = running.submit(
        tiny.request('long', new=60), tiny.request('short', new=4, draw=5)
    )
    answers = running.wait(2)
    assert answers['long'].stop_reason is StopReason.ABORTED
    assert 4 <= len(answers['long'].ids) < 60
    running.submit(tiny.request('next', new=5, draw=6))
    assert len(running.wait(3)['next'].ids) == 5


def test_request_asked_again_under_its_id_is_not_aborted_with_the_first(
    engine, free
):
  """The first one is given up, and the loop has not looked yet."""
  request = tiny.request('again', new=20)
  answers = []
  with Running(engine, weights=False) as running:
    first = running.loop.submit(request, answers.append)
    with running.loop._wake:  # the loop sees all of it at once
      running.loop.abort([first])
      running.submit(request)
    running.set_weights(0)
    answer = running.wait(1)['again']
  assert [a.stop_reason for a in answers] == [StopReason.ABORTED]
  assert answer.stop_reason is StopReason.LENGTH
  assert answer.ids.tolist() == free['0'].ids.tolist()


@pytest.mark.parametrize('timeouts', [6])
def test_request_that_timed_out_is_answered_when_asked_again(
    engine, free, timeouts
):
  request = tiny.request('again', new=20)

  async def ask():
    client = EngineClient([running.loop])
    for _ in range(timeouts):
      waiting = asyncio.ensure_future(client.generate(request))
      await asyncio.sleep(0)
      waiting.cancel()
      await asyncio.wait([waiting])
      yield await client.generate(request)

  async def ask_all():
    return [answer async for answer in ask()]

  with Running(engine) as running:
    answers = asyncio.run(ask_all())
  for answer in answers:
    assert answer.stop_reason is StopReason.LENGTH
    assert answer.ids.tolist() == free['0'].ids.tolist()


def test_ticket_outlives_a_new_beginning(engine):
  """What began anew, on new weights, is still the request of its ticket."""
  running = Running(engine, 'restart', weights=False)
  with running:

    def swapped(version):
      running.swaps.append(version)
      running.loop.abort([ticket])

    def bring(outcome):
      if outcome.request_id == 'short':
        params = jax.block_until_ready(tiny.params(1, on=engine.mesh))
        running.loop.set_weights(1, params, swapped)

    running.on_answer = bring
    ticket, _ = running.submit(
        tiny.request('long', new=60), tiny.request('short', new=4, draw=5)
    )
    running.set_weights(0)
    assert running.wait(2)['long'].stop_reason is StopReason.ABORTED


def test_dead_engine_answers_everyone_with_the_cause(engine):
  running = Running(engine, weights=False)
  running.submit(tiny.request('a'), tiny.request('b', draw=1))
  running.loop.set_weights(0, {'not': np.zeros(3)}, running.swaps.append)
  for outcome in running.wait(2).values():
    assert isinstance(outcome, EngineStopped)
    assert outcome.__cause__ is running.loop.failure() is not None
  with pytest.raises(EngineStopped, match='no longer takes requests'):
    running.submit(tiny.request('c'))
  running.loop.stop()


class Dying:
  """An engine of which some calls of one method raise, by their number."""

  def __init__(self, engine, method, numbers):
    self._engine = engine
    self._method = method
    self._numbers = numbers
    self._calls = 0

  def __getattr__(self, name):
    if name == self._method:
      self._calls += 1
      if self._calls in self._numbers:
        raise ConnectionError(f'call {self._calls} of {name}')
    return getattr(self._engine, name)


@pytest.mark.parametrize('numbers', [{1}, {3}, {2, 5}])
def test_dead_thread_begins_anew_and_everyone_gets_the_same_answer(
    engine, free, numbers
):
  dying = Dying(engine, 'generate_steps', numbers)
  # Six requests for four slots: some wait when the thread dies.
  requests = [tiny.request(f'{i}', new=20, draw=i % 4) for i in range(6)]
  with Running(dying, restarts=2) as running:
    running.submit(*requests)
    answers = running.wait(6)
    assert running.loop.counts.deaths == len(numbers)
    assert 'ConnectionError: call' in running.loop.last_death
    assert running.loop.failure() is None
    assert running.events.count('restart') == len(numbers)
  for i in range(6):
    assert answers[f'{i}'].ids.tolist() == free[f'{i % 4}'].ids.tolist()
    assert answers[f'{i}'].logps.tolist() == free[f'{i % 4}'].logps.tolist()


def test_weights_that_a_thread_died_on_are_taken_by_the_next(engine):
  dying = Dying(engine, 'init_decode_state', {1})
  with Running(dying, weights=False, restarts=1) as running:
    running.set_weights(3)
    running.submit(tiny.request())
    assert set(running.wait(1)['r'].versions.tolist()) == {3}
    assert running.swaps == [3]


def test_thread_that_dies_too_often_ends_with_the_last_cause(engine):
  dying = Dying(engine, 'generate_steps', {1, 2, 3})
  running = Running(dying, restarts=2)
  running.submit(tiny.request())
  (outcome,) = running.wait(1).values()
  assert isinstance(outcome, EngineStopped)
  assert 'call 3' in str(running.loop.failure())
  running.loop.stop()


class Late:
  """One program of an engine is compiled when the test says so."""

  def __init__(self, engine, monkeypatch, name):
    self.gate = threading.Event()
    self.programs = Programs()
    # Another program comes first, so that the thread has one to hurry past.
    self.programs.plan([(('other',), self._compile), (name, lambda: None)])
    monkeypatch.setattr(engine, 'programs', self.programs)

  def _compile(self):
    assert self.gate.wait(WAIT_S)

  def wait_until_awaited(self, loop):
    wait_until(lambda: 'waits for a program' in loop.explain())


@pytest.mark.parametrize(
    'name', [('init',), ('extend', 4, 16), ('occupy',), ('generate', 4, 8)]
)
def test_loop_waits_for_a_program_and_says_so(engine, monkeypatch, name):
  late, lock = Late(engine, monkeypatch, name), threading.Lock()
  with Running(engine, dispatch_lock=lock) as running:
    running.submit(*(tiny.request(f'{i}', (i, 1)) for i in range(4)))
    late.wait_until_awaited(running.loop)
    text = running.loop.explain()
    assert f'waits for a program, {" ".join(map(str, name))} for ' in text
    assert 'compiles other for' in text and '1 programs to follow' in text
    assert running.loop.health() == 'busy'
    assert lock.acquire(blocking=False)  # others may use the devices
    lock.release()
    late.gate.set()
    assert all(len(answer.ids) for answer in running.wait(4).values())
    assert 'waits for a program' not in running.loop.explain()
  late.programs.close()


def test_loop_that_waits_for_a_program_can_be_stopped(engine, monkeypatch):
  late = Late(engine, monkeypatch, ('occupy',))
  running = Running(engine)
  running.submit(tiny.request())
  late.wait_until_awaited(running.loop)
  running.loop.stop()  # while the compiler is at work
  assert isinstance(running.wait(1)['r'], EngineStopped)
  assert running.loop.failure() is None
  late.gate.set()
  late.programs.close()


def test_thread_that_does_not_end_is_left_behind_and_says_what_it_does(engine):
  """A device that never comes back; its sibling is ended all the same."""
  gate, begun = threading.Event(), threading.Event()

  class Stuck(Dying):

    def __getattr__(self, name):
      if name == 'generate_steps':
        begun.set()
        assert gate.wait(60)
      return super().__getattr__(name)

  running, other = Running(Stuck(engine, '', ())), Running(engine)
  running.submit(tiny.request('r'))
  assert begun.wait(60)
  stuck = running.loop
  stuck.stop = functools.partial(stuck.stop, limit_s=0.1)
  with pytest.raises(TimeoutError, match='engine 0 has not ended.*decodes'):
    stop_all([other.loop, stuck])
  assert other.loop.health() == 'dead' and stuck._thread.daemon
  gate.set()
  EngineLoop.stop(stuck)
  assert len(running.answers) == 1  # whoever waits is told in the end


def test_what_a_compilation_raised_reaches_the_request(engine, monkeypatch):
  def refuses():
    raise NotImplementedError('no such instruction on this chip')

  programs = Programs()
  programs.plan([(('occupy',), refuses)])
  monkeypatch.setattr(engine, 'programs', programs)
  with Running(engine) as running:
    running.submit(tiny.request())
    cause = running.wait(1)['r'].__cause__
  assert isinstance(cause, NotImplementedError)
  assert str(cause) == 'no such instruction on this chip'


def test_explanation_says_who_waits_for_the_engine(engine):
  with Running(engine, weights=False) as running:
    running.submit(tiny.request('asked'))
    text = running.loop.explain()
    assert 'no weights; 1 requests queued, the oldest for' in text
    seen = []
    running.on_answer = lambda c: seen.append(running.loop.explain())
    running.submit(tiny.request('long', new=40, draw=1))
    running.set_weights(2)
    running.wait(2)
  assert 'engine 0: decodes for' in seen[0] and 'version 2' in seen[0]
  assert 'long, ' in seen[0] and 'tokens of at most 40, for' in seen[0]


def test_client_spreads_draws_and_keeps_groups_together(engine):
  with Running(engine) as one, Running(engine) as two:
    two.loop.name = '1'
    client = EngineClient([one.loop, two.loop])

    async def ask():
      return await asyncio.gather(
          *(
              client.generate(tiny.request(f'{d}/{s}', new=8, draw=d, sample=s))
              for d in range(4)
              for s in range(3)
          )
      )

    completions = asyncio.run(ask())
  by_draw = {}
  for c in completions:
    by_draw.setdefault(c.request_id.split('/')[0], set()).add(c.weight_source)
  assert all(len(sources) == 1 for sources in by_draw.values())
  assert {s for sources in by_draw.values() for s in sources} == {
      'engine/0',
      'engine/1',
  }


def ask_client(client, requests):
  async def ask():
    return await asyncio.gather(
        *(client.generate(request) for request in requests),
        return_exceptions=True,
    )

  return asyncio.run(ask())


def test_dead_replica_gets_no_request_beside_a_living_one(engine, free):
  dead, alive = Running(Dying(engine, 'init_decode_state', {1})), None
  with dead:
    dead.submit(tiny.request('kills'))
    dead.wait(1)
    assert dead.loop.health() == 'dead' and dead.loop.load == 0
    with Running(engine) as alive:
      client = EngineClient([dead.loop, alive.loop])
      requests = [tiny.request(f'{d}', new=20, draw=d) for d in range(4)]
      answers = ask_client(client, requests)
      require_living([dead.loop, alive.loop], evicts=True)
      with pytest.raises(ConnectionError, match='init_decode_state'):
        require_living([dead.loop, alive.loop], evicts=False)
  for d, answer in enumerate(answers):
    assert answer.ids.tolist() == free[f'{d}'].ids.tolist()


def test_requests_of_a_replica_that_dies_are_answered_by_another(engine, free):
  """Each group stays together, and says what it would have said."""
  dying = Dying(engine, 'generate_steps', {2})
  with Running(dying) as one, Running(engine) as two:
    two.loop.name = '1'
    client = EngineClient([one.loop, two.loop])
    requests = [tiny.request(f'{d}', new=20, draw=d) for d in range(4)]
    answers = ask_client(client, requests)
    assert one.loop.failure() is not None and one.events.count('evict') == 1
  assert [a.weight_source for a in answers] == ['engine/1'] * 4
  for d, answer in enumerate(answers):
    assert answer.ids.tolist() == free[f'{d}'].ids.tolist()


def test_last_replica_that_dies_answers_with_its_cause(engine):
  with (
      Running(Dying(engine, 'generate_steps', {1})) as one,
      Running(Dying(engine, 'generate_steps', {2})) as two,
  ):
    client = EngineClient([one.loop, two.loop])
    requests = [tiny.request(f'{d}', new=20, draw=d) for d in range(4)]
    answers = ask_client(client, requests)
    assert all(isinstance(a, EngineStopped) for a in answers)
    assert all(isinstance(a.__cause__, ConnectionError) for a in answers)
    with pytest.raises(ConnectionError):
      require_living([one.loop, two.loop], evicts=True)
    # And a request that comes later is told the cause, too.
    (late,) = ask_client(client, [tiny.request('late')])
    assert isinstance(late.__cause__, ConnectionError)


def test_dead_loop_holds_no_weights(engine):
  with Running(Dying(engine, 'generate_steps', {1})) as running:
    running.submit(tiny.request())
    running.wait(1)
    running.set_weights(1)
    assert running.loop._weights is None and running.loop._pending is None


def test_request_that_does_not_fit_is_refused_at_the_client(engine):
  with Running(engine) as running:
    client = EngineClient([running.loop])
    with pytest.raises(ValueError, match='prompt of 40 tokens'):
      asyncio.run(client.generate(tiny.request(prompt=range(40))))


# Pages.


def ask(engine, requests, **how):
  """Answers by name, and what the loop counted."""
  with Running(engine, **how) as running:
    running.submit(*requests)
    return running.wait(len(requests)), running.loop


def same_answers(got, wanted):
  for name, completion in wanted.items():
    assert got[name].ids.tolist() == completion.ids.tolist(), name
    assert_close(got[name].logps, completion.logps)
    assert got[name].versions.tolist() == completion.versions.tolist()
    assert got[name].stop_reason is completion.stop_reason


@pytest.fixture(scope='module')
def tight():
  """Pages for little more than one of the four slots."""
  settings = dataclasses.replace(SETTINGS, pages=9, chunk=16)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


@pytest.mark.parametrize('seed', range(4))
def test_preempted_answers_are_those_of_an_undisturbed_run(engine, tight, seed):
  random = np.random.default_rng(seed)
  requests = [
      tiny.request(
          f'{i}',
          random.integers(0, 40, random.integers(1, 20)).tolist(),
          new=int(random.integers(2, 44)),
          draw=i,
          temperature=float(random.choice([0.0, 0.7, 1.0])),
          stop_ids=(int(random.integers(0, 40)),),
      )
      for i in range(12)
  ]
  # Siblings, so that what is shared is given back and found again.
  requests += [
      dataclasses.replace(r, request_id=f'{r.request_id}b', sample=1)
      for r in requests[:4]
  ]
  undisturbed, loop = ask(engine, requests)
  assert loop.counts.preemptions == 0
  got, loop = ask(tight, requests)
  same_answers(got, undisturbed)
  assert loop.counts.preemptions > 0
  assert loop.counts.peak_pages <= 9
  assert loop._slots.cache.used == 0  # and every page has come back


@pytest.fixture(scope='module')
def halves(featured):
  """The same in two data shards, each as short of pages, and warm."""
  settings = dataclasses.replace(
      featured.settings, pages=2 * featured.settings.pages
  )
  mesh = mesh_of(jax.devices()[:2], data=2)
  made = Engine(tiny.config(), settings, mesh, Rules().for_rollout())
  made.warm_up(tiny.params(on=mesh))
  return made


def demanding_requests():
  random = np.random.default_rng(7)
  return [
      tiny.request(
          f'{i}',
          random.integers(0, 40, random.integers(1, 20)).tolist(),
          new=int(random.integers(20, 44)),
          draw=i,
          seed=int(random.integers(0, 3)),
          temperature=float(random.choice([0.0, 0.8])),
          repetition_penalty=float(random.choice([0.8, 1.0, 1.3])),
          frequency_penalty=float(random.choice([-1.0, 0.0, 0.7])),
          presence_penalty=float(random.choice([-0.5, 0.0, 1.0])),
          logit_bias=((3, 2.0),) if i % 3 == 0 else (),
          min_new_tokens=int(random.integers(0, 12)),
          stop_ids=(int(random.integers(0, 40)),),
          top_p=float(random.choice([0.8, 1.0])),
          raw_logps=bool(i % 2),
          top_logps=i % 4,
          prompt_logps=i % 5 == 0,
      )
      for i in range(10)
  ]


@pytest.fixture(scope='module')
def undisturbed(featured):
  """What each of the demanding requests is answered alone."""
  found = {}
  for request in demanding_requests():  # alone there are pages enough
    answers, loop = ask(featured, [request])
    assert loop.counts.preemptions == 0
    found |= answers
  return found


def test_penalties_and_seeds_survive_preemption(featured, undisturbed):
  requests = demanding_requests()
  got, loop = ask(featured, requests)
  assert loop.counts.preemptions > 0
  same_answers(got, undisturbed)
  for name, wanted in undisturbed.items():
    for told in ('raw_logps', 'top_logps', 'prompt_logps', 'top_ids'):
      one, other = getattr(got[name], told), getattr(wanted, told)
      assert (one is None) == (other is None), (name, told)
      if one is not None:
        assert_close(one, other)
  # Planted fault: without what came before, other tokens would be said.
  penalised = next(
      r
      for r in requests
      if r.sampling.frequency_penalty > 0 and not r.sampling.logit_bias
  )
  said = undisturbed[penalised.request_id].ids.tolist()
  forgetful = dataclasses.replace(
      penalised,
      request_id='forgetful',
      sampling=dataclasses.replace(
          penalised.sampling,
          frequency_penalty=0.0,
          presence_penalty=0.0,
          repetition_penalty=1.0,
      ),
  )
  other, _ = ask(featured, [forgetful])
  assert other['forgetful'].ids.tolist() != said


def test_data_shards_answer_as_one_device_does(halves, undisturbed):
  requests = demanding_requests()
  requests += [  # which go where their siblings are
      dataclasses.replace(r, request_id=f'{r.request_id}b', sample=1)
      for r in requests[:4]
  ]
  tiny.params(0, on=halves.mesh)  # made by programs that are not the engine's
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    got, loop = ask(halves, requests)
  finally:
    counter.uninstall()
  same_answers(got, undisturbed)
  assert counter.names_since_warm == []
  assert loop.counts.preemptions > 0
  assert 9 < loop.counts.peak_pages <= 18  # of both shards
  assert loop._slots.cache.used == 0


@pytest.mark.parametrize('swap', ['recompute', 'restart'])
def test_data_shards_swap_in_mid_sentence_as_one_device_does(
    featured, halves, swap
):
  strong = dict(frequency_penalty=-4.0, repetition_penalty=0.8, temperature=0.7)
  _, wanted, _ = swap_in_mid_sentence(featured, swap, **strong)
  long, got, running = swap_in_mid_sentence(halves, swap, **strong)
  same_answers(got, wanted)
  assert len(long) == 2 and running.loop.counts.swaps == 2


def test_each_part_of_exact_has_a_name(engine):
  for exact in (False, True):
    loop = EngineLoop(
        engine, '0', swap='recompute', events=EventLog(None), exact=exact
    )
    assert (loop.exact, loop.one_width, loop.all_slots) == (exact,) * 3
    cache = loop._slots.cache
    assert (cache.one_by_one, cache.whole_pieces) == (exact,) * 2


@pytest.mark.slow
def test_data_shards_give_the_same_bits_whatever_else_is_asked():
  settings = dataclasses.replace(SETTINGS, slots=2)
  mesh = mesh_of(jax.devices()[:2], data=2)
  two = Engine(tiny.config(), settings, mesh, Rules().for_rollout())
  settings = dataclasses.replace(SETTINGS, slots=1)
  one = Engine(tiny.config(), settings, tiny.mesh(), Rules())
  requests = [tiny.request(f'{i}', new=9 + i, draw=i) for i in range(5)]
  said = []
  for engine in (one, two):  # a shard has the shapes of the one
    answers, _ = ask(engine, requests, exact=True)
    said.append({n: (a.ids.tolist(), a.logps.tolist())
                 for n, a in answers.items()})  # fmt: skip
  assert said[0] == said[1]


def test_preemption_keeps_what_was_said_and_its_versions(engine, tight):
  answers = {}
  for name, chosen in (('free', engine), ('tight', tight)):
    long, got, running = swap_in_mid_sentence(chosen, 'recompute')
    answers[name] = got
    for request in long:
      versions = got[request.request_id].versions.tolist()
      assert versions == sorted(versions) and len(versions) == 40
      check_labels(request, got[request.request_id])
  assert running.loop.counts.preemptions > 0
  assert answers['tight']['long0'].versions.tolist() == [0] * 8 + [1] * 32


def test_preempted_answers_end_before_a_drain_swaps(tight):
  long, answers, running = swap_in_mid_sentence(tight, 'drain')
  assert running.loop.counts.preemptions > 0
  for request in long:
    assert set(answers[request.request_id].versions.tolist()) == {0}
    check_labels(request, answers[request.request_id])


def test_preempted_answers_restart_too(tight):
  long, answers, running = swap_in_mid_sentence(tight, 'restart')
  assert running.loop.counts.preemptions > 0
  for request in long:
    assert set(answers[request.request_id].versions.tolist()) == {1}
    check_labels(request, answers[request.request_id])


def test_shared_pages_are_rebuilt_once_a_swap(engine):
  prompt = list(range(1, 20))  # 18 are cached: two pages of 8 and 2 tokens
  group = [tiny.request(f'{i}', prompt, new=30, sample=i) for i in range(3)]
  running = Running(engine, weights=False)
  with running:
    running.on_answer = lambda c: (
        running.set_weights(1) if c.request_id == 'short' else None
    )
    running.submit(*group, tiny.request('short', new=4, draw=5))
    running.set_weights(0)
    answers = running.wait(4)
  for request in group:
    completion = answers[request.request_id]
    assert completion.versions.tolist() == [0] * 8 + [1] * 22
    check_labels(request, completion)
  # 16 once, and of each what is behind them.
  assert running.loop.counts.rebuilt_tokens == 16 + 3 * (2 + 8)


def test_next_turn_goes_on_from_what_is_cached(engine):
  first = tiny.request('first', range(1, 12), new=14)
  with Running(engine) as running:
    running.submit(first)
    said = running.wait(1)['first'].ids.tolist()
    second = tiny.request(
        'second', [*first.prompt_ids, *said, 7, 8], new=20, draw=1
    )
    running.submit(second)
    warm = running.wait(2)['second']
    # 24 of the 25 tokens were cached, three pages of 8.
    assert running.loop.counts.prefix_tokens == 24
    # Planted fault (CASES A9): the same turn after new weights finds nothing.
    running.set_weights(1)
    running.submit(dataclasses.replace(second, request_id='third'))
    running.wait(3)
    assert running.loop.counts.prefix_tokens == 24
  cold, loop = ask(engine, [second])
  assert loop.counts.prefix_tokens == 0
  same_answers({'second': warm}, cold)
  check_labels(second, warm)


def test_long_prompt_is_cached_between_decode_steps(monkeypatch):
  settings = dataclasses.replace(
      SETTINGS, max_prompt_length=60, chunk=16, steps=2
  )
  pieces = Engine(tiny.config(), settings, tiny.mesh(), Rules())
  requests = [
      tiny.request('decodes', new=24),
      tiny.request('long', range(1, 31), new=20, draw=1),
      tiny.request('longer', np.arange(55) % 40, new=8, draw=2),
  ]
  kinds = []
  for name in ('extend', 'generate_steps'):

    def told(*args, name=name, program=getattr(pieces, name)):
      kinds.append(name)
      return program(*args)

    monkeypatch.setattr(pieces, name, told)
  with Running(pieces, weights=False) as running:
    running.submit(*requests)
    running.set_weights(0)
    got = running.wait(3)
  whole = dataclasses.replace(settings, chunk=64)
  wanted, _ = ask(Engine(tiny.config(), whole, tiny.mesh(), Rules()), requests)
  same_answers(got, wanted)
  # 2 tokens; 16 + 13; 16 + 16 + 16 + 6: no two long pieces side by side.
  assert kinds.count('extend') == 7
  last = len(kinds) - kinds[::-1].index('extend')
  assert kinds[:last].count('generate_steps') >= 3
  assert (
      max(len(run) for run in ''.join(k[0] for k in kinds[2:]).split('g')) <= 2
  )  # one of each kind


@pytest.fixture(scope='module')
def wide():
  """Page tables of 8, 16 or 33 columns."""
  settings = dataclasses.replace(SETTINGS, max_length=264)
  assert settings.live_buckets == (8, 16, 33)
  # 16 of 25 are not worth a program.
  less = dataclasses.replace(SETTINGS, max_length=200)
  assert less.live_buckets == (8, 25)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


@pytest.mark.parametrize('exact', [False, True])
def test_answers_are_the_same_however_wide_the_tables_are(
    wide, exact, monkeypatch
):
  widths = []
  dispatch = wide.generate_steps

  def recorded(params, state, k, tables, slots):
    widths.append(tables.shape[1])
    return dispatch(params, state, k, tables, slots)

  monkeypatch.setattr(wide, 'generate_steps', recorded)
  short = tiny.request('short', new=20)
  alone, _ = ask(wide, [short], exact=exact)
  assert set(widths) == ({33} if exact else {8})
  with Running(wide, exact=exact) as running:
    running.on_answer = lambda c: (
        running.submit(short) if c.request_id == 'first' else None
    )
    running.submit(
        tiny.request('long', new=190, draw=1),
        tiny.request('first', new=150, draw=3),
    )
    late = running.wait(3)
  assert set(widths) == ({33} if exact else {8, 16, 33})
  same_answers(late, alone)
  check_labels(short, late['short'])
  if exact:
    assert late['short'].logps.tolist() == alone['short'].logps.tolist()


@pytest.fixture(scope='module')
def broad():
  """Decode steps of 16 slots, or of 8."""
  settings = dataclasses.replace(SETTINGS, slots=16)
  assert settings.decode_rows == (16, 8)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


def test_few_who_are_left_of_each_shard_decode_by_themselves(
    broad, monkeypatch
):
  settings = dataclasses.replace(SETTINGS, slots=20)
  mesh = mesh_of(jax.devices()[:2], data=2)
  two = Engine(tiny.config(), settings, mesh, Rules().for_rollout())
  asked = []
  dispatch = two.generate_steps

  def recorded(params, state, k, tables, slots):
    asked.append(slots)
    return dispatch(params, state, k, tables, slots)

  monkeypatch.setattr(two, 'generate_steps', recorded)
  # In turn to the shards: four stay in slots 0 to 8 of the first.
  requests = [
      tiny.request(f'{i}', (i, 1), new=12 if i % 4 == 0 else 4, draw=i)
      for i in range(16)
  ]
  got, _ = ask(two, requests)
  alone, _ = ask(broad, requests)
  same_answers(got, alone)
  few = next(slots for slots in asked if slots is not None)
  assert few.tolist() == [0, 2, 4, 6, 1, *range(10, 15)]
  assert all(len(slots) == 10 for slots in asked[1:])


@pytest.mark.parametrize('exact', [False, True])
def test_few_who_are_left_decode_by_themselves(broad, exact, monkeypatch):
  rows = []
  dispatch = broad.generate_steps

  def recorded(params, state, k, tables, slots):
    rows.append(len(tables))
    assert slots is None or len(set(slots.tolist())) == len(slots) == 8
    return dispatch(params, state, k, tables, slots)

  monkeypatch.setattr(broad, 'generate_steps', recorded)
  # Those who are left sit between slots whose answers have ended.
  requests = [
      tiny.request(f'{i}', new=24 if i % 5 == 1 else 4, draw=i)
      for i in range(16)
  ]
  got, _ = ask(broad, requests, exact=exact)
  assert rows == ([16] * 6 if exact else [16] + [8] * 5)
  alone, _ = ask(broad, requests[1:2], exact=exact)
  same_answers({'1': got['1']}, alone)
  for request in requests:
    check_labels(request, got[request.request_id])


def test_program_of_few_rows_is_compiled_when_it_would_often_be_used(
    monkeypatch,
):
  monkeypatch.setattr(dispatch_lib, '_WORTH_COMPILING', 16)
  settings = dataclasses.replace(SETTINGS, slots=16)
  engine = Engine(tiny.config(), settings, tiny.mesh(), Rules())
  engine.compile_ahead(engine.abstract_weights())
  name = engine_lib.generate_name(8, 8)
  rows = []
  dispatch = engine.generate_steps

  def recorded(params, state, k, tables, slots):
    rows.append(len(tables))
    if len(rows) == dispatch_lib._WORTH_COMPILING:
      engine.programs.wait(name)  # as if it took no time
    return dispatch(params, state, k, tables, slots)

  monkeypatch.setattr(engine, 'generate_steps', recorded)
  asked = [tiny.request(f'{i}', new=40, draw=i) for i in range(5)]
  with Running(engine) as running:
    for request in asked:  # one after another, 10 dispatches each
      running.submit(request)
      running.wait(1 + asked.index(request))
  few = rows.index(8)
  assert few == dispatch_lib._WORTH_COMPILING and set(rows[few + 1 :]) == {8}


def test_a_prompt_alone_does_not_wait_for_a_program_of_its_own(monkeypatch):
  """The trainer's come first; those for several prompts do as well."""
  settings = dataclasses.replace(SETTINGS, slots=8, chunk=64, prefill_rows=4)
  engine = Engine(tiny.config(), settings, tiny.mesh(), Rules())
  sent = []
  extend = engine.extend

  def recorded(params, state, pieces):
    sent.append(pieces.ids.shape)
    return extend(params, state, pieces)

  monkeypatch.setattr(engine, 'extend', recorded)
  trainer, done = Programs(), threading.Event()
  trainer.plan([(('accumulate',), done.wait)])
  try:
    engine.compile_ahead(engine.abstract_weights())
    requests = [tiny.request(f'{i}', (i, 1, 2)) for i in range(2)]
    with Running(engine) as running:
      running.submit(requests[0])
      running.wait(1)
      done.set()
      engine.programs.wait_for_all()
      running.submit(requests[1])
      answers = running.wait(2)
  finally:
    done.set()
    trainer.close()
    engine.programs.close()
  assert sent == [(4, 16), (1, 16)]
  for request in requests:
    check_labels(request, answers[request.request_id])


@pytest.mark.parametrize('exact', [True, False])
def test_exact_loops_give_the_same_bits_whatever_was_asked_before(
    engine, exact
):
  request = tiny.request('r', range(1, 20), new=20)
  other = tiny.request('o', range(1, 24), new=20, draw=1)
  alone, _ = ask(engine, [request], exact=exact)
  after, loop = ask(engine, [other, request], exact=exact)
  assert loop.counts.prefix_hits == (not exact)
  same_answers(after, alone)
  if exact:
    assert after['r'].logps.tolist() == alone['r'].logps.tolist()


def test_loop_that_takes_weights_in_is_busy_and_not_dead(engine, monkeypatch):
  # CASES A14: a run that goes on at version 10, whose weights take long.
  params = tiny.params(1)
  begun, gate, lay_out = threading.Event(), threading.Event(), engine.lay_out

  def held(*args):
    begun.set()
    assert gate.wait(WAIT_S)
    return lay_out(*args)

  running = Running(engine, weights=False, restarts=3)
  with running:
    loop = running.loop
    running.submit(tiny.request('first', new=6))
    assert loop.health() == 'waiting'
    monkeypatch.setattr(engine, 'lay_out', held)
    loop.set_weights(10, params, running.swaps.append)
    assert begun.wait(WAIT_S)
    # Nobody who asks waits for the weights: they are still to come.
    for _ in range(20):
      assert loop.health() == 'busy'
      loop.explain()
    assert not running.swaps
    gate.set()
    assert set(running.wait(1)['first'].versions.tolist()) == {10}
    assert loop.counts.deaths == 0
  assert loop.health() == 'dead'
  assert 'engine 0: dead (stopped)' in loop.explain()
  assert loop._state is None  # the last evaluation has the room


def test_loop_that_ended_of_an_exception_is_dead_and_says_why(
    engine, monkeypatch
):
  def fail(*args):
    raise RuntimeError('planted')

  with Running(engine) as running:
    monkeypatch.setattr(engine, 'generate_steps', fail)
    running.submit(tiny.request('r', new=6))
    assert isinstance(running.wait(1)['r'], EngineStopped)
    assert running.loop.health() == 'dead'
    assert 'engine 0: dead (planted), it last decodes' in (
        running.loop.explain()
    )


def test_cache_is_let_go_of_while_nothing_is_to_do(engine):
  with Running(engine, release_idle=True) as running:
    running.submit(tiny.request('a', new=9))
    first = running.wait(1)['a']

    def let_go():
      running.loop.abort(['nobody'])  # wakes it, and it goes idle again
      return running.loop._state is None

    wait_until(let_go, 'an idle loop without a cache')
    running.submit(tiny.request('b', new=9))
    second = running.wait(2)['b']
  assert first.ids.tolist() == second.ids.tolist()


def test_nothing_compiles_after_warm_up_whatever_comes(tight):
  tight.warm_up(tiny.params())
  tiny.params(1)  # made by programs that are not the engine's
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    for swap in ('recompute', 'restart'):
      swap_in_mid_sentence(tight, swap)
    ask(
        tight,
        [
            tiny.request(f'{n}', range(n), new=60 - n, draw=n)
            for n in (1, 8, 9, 17, 30, 32)
        ],
    )
  finally:
    counter.uninstall()
  assert counter.names_since_warm == []


class Syllables:
  """Two letters an id; a few ids may have other bytes, halves of characters."""

  vocab_size = tiny.VOCABULARY
  bos_id, eos_ids, pad_id, run_ids = None, (), 0, frozenset()

  def __init__(self, **other):
    letters = 'abcdefgh'
    self.bytes = [
        (letters[i // 8] + letters[i % 8].upper()).encode()
        for i in range(self.vocab_size)
    ]
    for i, content in other.items():
      self.bytes[int(i)] = content

  def decode(self, ids):
    return b''.join(self.bytes[i] for i in ids).decode('utf-8', 'replace')

  def tokens_with(self, ids, string):
    """How many of the ids it takes to have the string: the plain way."""
    held = [n for n in range(len(ids) + 1) if string in self.decode(ids[:n])]
    return held[0] if held else None


@pytest.fixture(scope='module')
def free(engine):
  """What requests say that nothing ends but their limit, after 20 tokens."""
  with Running(engine) as running:
    running.submit(*(tiny.request(f'{i}', new=20, draw=i) for i in range(4)))
    return running.wait(4)


def ends_at(completion, free, tokens):
  """The first tokens of the free answer, with the labels that they had."""
  assert completion.stop_reason is StopReason.STOP_STRING
  assert completion.stop_id is None
  assert completion.ids.tolist() == free.ids[:tokens].tolist()
  assert completion.logps.tolist() == free.logps[:tokens].tolist()
  assert completion.versions.tolist() == free.versions[:tokens].tolist()


def test_stop_string_ends_one_answer_and_leaves_the_others(engine, free):
  syllables = Syllables()
  ids = free['0'].ids.tolist()
  text = syllables.decode(ids)
  # From inside of the fourth token, the last of the first dispatch, to inside
  # of the fifth.
  string = text[7:9]
  tokens = syllables.tokens_with(ids, string)
  assert tokens == 5
  with Running(engine, tokenizer=syllables) as running:
    running.submit(
        tiny.request('0', new=20, stop_strings=(string,)),
        *(tiny.request(f'{i}', new=20, draw=i) for i in (1, 2, 3)),
        *(
            tiny.request(f'again{i}', new=20, draw=i, stop_strings=('zz',))
            for i in range(4)
        ),
    )
    answers = running.wait(8)
    counts = running.loop.counts
  said = answers['0']
  ends_at(said, free['0'], tokens)
  assert said.stop_string == string
  assert said.text_end == text.index(string)
  assert answer_of(said).tolist() == ids[:tokens]
  assert counts.discarded_tokens == 3  # of two dispatches of four
  for i in range(4):
    for name in ([f'{i}'] if i else []) + [f'again{i}']:
      assert answers[name].stop_reason is StopReason.LENGTH
      assert answers[name].stop_string is answers[name].text_end is None
      assert answers[name].ids.tolist() == free[f'{i}'].ids.tolist()
  # Planted fault: a search of what each dispatch brought sees no string yet.
  parts = [syllables.decode(ids[:4]), syllables.decode(ids[4:tokens])]
  assert not any(string in part for part in parts)


def test_stop_string_of_a_character_that_two_dispatches_bring(engine, free):
  ids = free['1'].ids.tolist()
  assert ids[3] != ids[4]
  halves = {str(ids[3]): b'i\xf0\x9f', str(ids[4]): b'\x99\x82j'}
  syllables = Syllables(**halves)
  tokens = syllables.tokens_with(ids, '🙂')
  with Running(engine, tokenizer=syllables) as running:
    running.submit(tiny.request('1', new=20, draw=1, stop_strings=('🙂',)))
    said = running.wait(1)['1']
  ends_at(said, free['1'], tokens)
  whole = syllables.decode(said.ids.tolist())
  assert whole.endswith('i🙂j') and whole[: said.text_end].endswith('i')


def test_minimum_and_limit_hold_with_stop_strings(engine, free):
  syllables = Syllables()
  ids = free['2'].ids.tolist()
  string = syllables.decode(ids[7:8])  # the last token of the second dispatch
  first = syllables.tokens_with(ids, string)
  ask = lambda name, **how: tiny.request(
      name, draw=2, stop_strings=(string,), **how
  )
  with Running(engine, tokenizer=syllables) as running:
    running.submit(
        ask('at the limit', new=first),
        ask('one too few', new=first - 1),
        ask('later', new=20, min_new_tokens=first + 1),
    )
    answers = running.wait(3)
  ends_at(answers['at the limit'], free['2'], first)
  short = answers['one too few']
  assert short.stop_reason is StopReason.LENGTH
  assert short.ids.tolist() == ids[: first - 1]
  assert len(answers['later'].ids) > first


def test_stop_id_that_completes_a_string_is_the_reason(engine, free):
  syllables = Syllables()
  ids = free['3'].ids.tolist()
  string = syllables.decode(ids[5:6])
  with Running(engine, tokenizer=syllables) as running:
    running.submit(
        tiny.request(
            '3', new=20, draw=3, stop_ids=(ids[5],), stop_strings=(string,)
        )
    )
    said = running.wait(1)['3']
  assert said.stop_reason is StopReason.STOP
  assert (said.stop_id, said.stop_string, said.text_end) == (ids[5], None, None)
  assert said.ids.tolist() == ids[: ids.index(ids[5]) + 1]


@pytest.mark.parametrize('swap', ['recompute', 'restart'])
def test_stop_string_across_a_swap_keeps_true_labels(engine, swap):
  syllables = Syllables()
  _, free, _ = swap_in_mid_sentence(engine, swap)
  text = syllables.decode(free['long0'].ids.tolist())
  string = text[15:23]  # eight of version 0 came first, where it is kept
  long, answers, running = swap_in_mid_sentence(
      engine, swap, syllables, stop_strings=(string,)
  )
  assert text.index(string) == 15
  ends_at(answers['long0'], free['long0'], 12)
  check_labels(long[0], answers['long0'])
  assert answers['long0'].text_end == 15
  expected = [0] * 8 + [1] * 4 if swap == 'recompute' else [1] * 12
  assert answers['long0'].versions.tolist() == expected
  assert answers['long1'].ids.tolist() == free['long1'].ids.tolist()


def test_stop_strings_without_a_tokenizer_are_refused(engine):
  with Running(engine) as running:
    with pytest.raises(ValueError, match='has no tokenizer to read its'):
      running.submit(tiny.request('r', stop_strings=('.',)))


# What crosses between host and devices.


class Forgetful(Engine):
  """Planted fault: a decode step is handed an array of the host."""

  def generate_steps(self, params, state, *more):
    state, result = super().generate_steps(params, state, *more)
    everyone = np.zeros(self.settings.slots, np.int32)
    return dataclasses.replace(state, length=state.length + everyone), result


def test_what_is_sent_to_devices_by_accident_ends_the_loop():
  forgetful = Forgetful(tiny.config(), SETTINGS, tiny.mesh(), Rules())
  with Running(forgetful) as running:
    running.submit(tiny.request())
    (outcome,) = running.wait(1).values()
  assert isinstance(outcome, EngineStopped)
  assert 'Disallowed host-to-device transfer' in str(outcome.__cause__)


def test_who_gets_an_answer_may_send_to_devices(engine):
  with Running(engine) as running:
    running.on_answer = lambda completion: np.ones(3) + jax.numpy.ones(3)
    running.submit(tiny.request())
    assert running.wait(1)['r'].stop_reason is StopReason.LENGTH
