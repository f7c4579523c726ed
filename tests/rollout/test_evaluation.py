"""Statistics with hand-worked numbers, and evaluators that really ask.

CASES A19: every example once, the same ids each time, off the training path.
"""

import asyncio
import contextlib
import itertools
import math
import queue

import jax
import numpy as np
import pytest

from areal_jax import config
from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import LoraSettings
from areal_jax.rollout import memory
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.evaluation import (
    Answer,
    EvaluationSettings,
    evaluation_of,
    majority_at_k,
    pass_at_k,
    table_text,
    tabulate,
)
from areal_jax.rollout.evaluator import Evaluator
from areal_jax.rollout.loop import EngineLoop, EngineStopped
from areal_jax.rollout.workflow import SingleTurn, WorkflowContext
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.metrics import METRICS, registered
from areal_jax.types import (
    Problem,
    Purpose,
    RewardResult,
    RewardStatus,
    SamplingParams,
    StopReason,
)
from tests import tiny
from tests.limits import WAIT_S, wait_until

# Statistics.


def answer(problem, sample, score, **changes):
  """An answer of 10 tokens; no score stands for an unparseable one."""
  status = RewardStatus.UNPARSEABLE if score is None else RewardStatus.OK
  fields = dict(
      draw_index=problem,
      problem_id=f'p/{problem}',
      source='test',
      sample=sample,
      status=status,
      score=score,
      length=10,
      stop_reason=StopReason.STOP,
      text=f'{score}',
  )
  return Answer(**{**fields, **changes})


def settings(samples=4, **changes):
  return EvaluationSettings(samples=samples, temperature=1.0, **changes)


def test_pass_at_k_by_hand():
  assert pass_at_k(4, 1, 1) == 0.25
  assert pass_at_k(4, 1, 2) == 0.5  # 1 - C(3, 2) / C(4, 2) = 1 - 3 / 6
  assert pass_at_k(4, 3, 2) == 1.0  # no two of them are both wrong
  assert pass_at_k(5, 2, 3) == pytest.approx(0.9)  # 1 - C(3, 3) / C(5, 3)
  assert pass_at_k(3, 0, 3) == 0.0
  with pytest.raises(ValueError, match='k in 1..n'):
    pass_at_k(3, 1, 4)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_answer():
  right = [True, False, False, True, False, False]
  for k in range(1, 7):
    subsets = list(itertools.combinations(right, k))
    share = np.mean([any(subset) for subset in subsets])
    assert pass_at_k(6, 2, k) == pytest.approx(share)


def test_majority_by_hand():
  # Two say a (right), one b, one c. All four: a wins.
  ballots, right = ['a', 'a', 'b', 'c'], [True, True, False, False]
  assert majority_at_k(ballots, right, 4) == 1.0
  # Runs of three: aab and caa elect a; abc and bca are a tie of three.
  assert majority_at_k(ballots, right, 3) == pytest.approx(
      (1 + 1 + 1 / 3 + 1 / 3) / 4
  )
  # Alone, each is its own majority: pass@1.
  assert majority_at_k(ballots, right, 1) == 0.5
  # A wrong majority beats a right minority.
  assert majority_at_k(['x', 'x', 'y'], [False, False, True], 3) == 0.0


def test_answers_without_a_vote_abstain():
  assert majority_at_k([None, None, 'a'], [False, False, True], 3) == 1.0
  assert majority_at_k([None, None], [False, False], 2) == 0.0


def test_vote_judged_both_ways_counts_by_its_share():
  assert majority_at_k(['4', '4', '5'], [True, False, False], 3) == 0.5


def test_accuracy_is_the_mean_over_problems_with_its_standard_error():
  # Shares right: 1, 0.5, 0.25, 0.25; mean 0.5, deviations 0.5, 0, -1/4, -1/4,
  # squares 0.25 + 0.0625 + 0.0625 = 0.375, / 3 = 0.125, / 4 = 0.03125.
  right = [[1, 1, 1, 1], [1, 1, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]]
  answers = [
      answer(p, s, float(r))
      for p, row in enumerate(right)
      for s, r in enumerate(row)
  ]
  table = tabulate(answers, settings(ks=(2,)))
  assert table.accuracy == table.score_mean == 0.5
  assert table.standard_error == pytest.approx(math.sqrt(0.03125))
  # C(2, 2) = 1 and C(3, 2) = 3 of 6 pairs are wrong: 1, 5/6, 1/2, 1/2.
  assert table.pass_at == {2: pytest.approx((1 + 5 / 6 + 1 / 2 + 1 / 2) / 4)}
  assert (table.problems, table.answers, table.failed) == (4, 16, 0)


def test_unparseable_is_wrong_and_failed_counts_nowhere():
  answers = [
      answer(0, 0, 1.0),
      answer(0, 1, None),
      answer(1, 0, 1.0),
      answer(1, 1, None, status=RewardStatus.TIMEOUT),
  ]
  table = tabulate(answers, settings(2, ks=(1, 2)))
  assert table.accuracy == 0.75  # a half and a whole
  assert table.score_mean == 1.0  # only what was scored
  assert (table.answers, table.failed, table.unparseable) == (3, 1, 1)
  # The second problem has one answer left: too few for k = 2.
  assert table.pass_at == {1: 0.75, 2: 1.0}
  assert table.majority_at == {1: 0.75, 2: 1.0}


def test_threshold_says_what_is_right():
  answers = [answer(0, 0, 0.4), answer(1, 0, 0.6)]
  assert tabulate(answers, settings(1, threshold=0.5)).accuracy == 0.5
  assert tabulate(answers, settings(1, threshold=0.4)).accuracy == 1.0


def test_lengths_and_truncation():
  answers = [
      answer(0, i, 1.0, length=n, stop_reason=reason)
      for i, (n, reason) in enumerate([
          (1, StopReason.STOP), (3, StopReason.STOP), (5, StopReason.STOP),
          (11, StopReason.LENGTH),
      ])
  ]  # fmt: skip
  table = tabulate(answers, settings())
  assert table.length_mean == 5.0
  assert table.length_percentiles[50] == 4.0
  assert table.truncated_fraction == 0.25


def test_one_problem_has_no_standard_error():
  assert math.isnan(tabulate([answer(0, 0, 1.0)], settings(1)).standard_error)


def test_sources_have_tables_of_their_own():
  answers = [
      answer(p, s, float(p == 0), source='easy' if p == 0 else 'hard')
      for p in range(3)
      for s in range(2)
  ]
  result = evaluation_of(reversed(answers), 7, settings(2, ks=(2,)))
  assert result.version == 7
  assert result.answers == tuple(answers)  # in order again
  assert result.by_source['easy'].accuracy == 1.0
  assert result.by_source['hard'].accuracy == 0.0
  assert result.by_source['hard'].problems == 2
  assert result.whole.accuracy == pytest.approx(1 / 3)
  lines = table_text(result).splitlines()
  assert [line.split()[0] for line in lines] == [
      'source', 'easy', 'hard', 'all',
  ]  # fmt: skip
  assert lines[0].split()[6:8] == ['pass@2', 'maj@2']
  assert lines[3].split()[1:5] == ['3', '6', '0', '0.333']
  assert result.metrics()['eval_maj_at_2'] == pytest.approx(1 / 3)


def test_metrics_are_the_statistics_under_their_names():
  answers = [
      answer(0, 0, 1.0, length=4),
      answer(0, 1, 0.0, length=8, stop_reason=StopReason.LENGTH),
      answer(1, 0, 1.0, length=6),
      answer(1, 1, None, status=RewardStatus.ERROR, length=0),
  ]
  found = evaluation_of(answers, 3, settings(2, ks=(1, 2))).metrics()
  assert found == pytest.approx({
      'eval_accuracy': 0.75,  # a half and a whole
      'eval_standard_error': 0.25,
      'eval_score_mean': 0.75,
      'eval_length_mean': 6.0,
      'eval_truncated_fraction': 1 / 3,
      'eval_failed': 1,
      'eval_pass_at_1': 0.75,
      'eval_pass_at_2': 1.0,
      'eval_maj_at_1': 0.75,
      'eval_maj_at_2': found['eval_maj_at_2'],  # shown above
  })
  assert all(registered(name) in METRICS for name in found)


def test_answer_twice_and_no_answer_are_refused():
  with pytest.raises(ValueError, match='2 answers at 1 places'):
    evaluation_of([answer(0, 0, 1.0)] * 2, 0, settings(1))
  failed = answer(0, 0, None, status=RewardStatus.ERROR, detail='no verifier')
  with pytest.raises(ValueError, match='0 of 1 .* no verifier'):
    evaluation_of([failed], 0, settings(1))


def test_vote_function_is_named_by_a_setting():
  vote = settings(vote='builtins:len').load_vote('at')
  answers = [answer(0, s, 1.0, text=t) for s, t in enumerate('ab')]
  answers.append(answer(0, 2, 0.0, text='cc'))
  assert tabulate(answers, settings(3), vote).majority_at == {3: 1.0}
  assert tabulate(answers, settings(3)).majority_at == {3: pytest.approx(2 / 3)}
  with pytest.raises(ConfigError, match=r'at.vote'):
    settings(vote='builtins:never').load_vote('at')


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'every': -1}, r'at.every is -1'),
        ({'ks': (5,)}, r'at.ks is \(5,\), wanted different numbers from 1'),
        ({'ks': (2, 2)}, r'at.ks is \(2, 2\)'),
        ({'ks': (0,)}, r'at.ks is \(0,\)'),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, message):
  with pytest.raises(ConfigError, match=message):
    config.resolve(settings(**changes), 'at')


def test_ks_default_to_the_samples():
  assert settings(8).all_ks == (8,)
  assert settings(8, ks=(4, 1)).all_ks == (1, 4)
  assert EvaluationSettings().all_ks == ()


# Memory.


def test_decode_state_and_weights_are_counted_as_they_are():
  engine = Engine(tiny.config(), ENGINE, tiny.mesh(), Rules())
  state = engine.init_decode_state()
  held = sum(x.nbytes for x in jax.tree.leaves(state))
  assert memory.decode_state_bytes(engine) == held
  weights = sum(x.nbytes for x in jax.tree.leaves(tiny.params()))
  assert memory.weights_bytes(engine) == weights
  assert memory.weights_bytes(engine, 'bfloat16') == weights // 2


def test_a_devices_part_is_counted_on_more_devices():
  one = Engine(tiny.config(), ENGINE, tiny.mesh(), Rules())
  two = Engine(tiny.config(), ENGINE, tiny.mesh(1, 2), Rules())
  cache = one.state_shapes.keys.size * 4 * 2
  half = memory.decode_state_bytes(one) - cache // 2
  assert memory.decode_state_bytes(two) == half


def test_what_does_not_fit_is_refused_with_the_numbers():
  needed = memory.Estimate(
      weights=100, weight_sets=3, decode_state=1_000, decode_states=2
  )
  assert needed.total == 2_300
  stats = {'bytes_limit': 5_000, 'bytes_in_use': 2_701}
  with pytest.raises(ConfigError) as caught:
    memory.require_room(needed, stats, 'device 0')
  for number in ('2,300 bytes on device 0', '3 sets of weights of 100',
                 '2 decode states of 1,000', 'at most 2,299'):  # fmt: skip
    assert number in str(caught.value)
  memory.require_room(needed, {**stats, 'bytes_in_use': 2_700}, 'device 0')
  memory.require_room(needed, None, 'a CPU')


def test_evaluation_beside_training_holds_weights_and_a_cache_more():
  engine = Engine(tiny.config(), ENGINE, tiny.mesh(), Rules())
  counts = [
      (e.weight_sets, e.decode_states)
      for e in (
          memory.estimate(engine, '', trains=False, pins=False),
          memory.estimate(engine, '', trains=True, pins=False),
          memory.estimate(engine, '', trains=True, pins=True),
      )
  ]
  assert counts == [(1, 1), (2, 1), (3, 2)]


def test_side_by_side_all_of_it_is_there_at_any_time():
  needed = memory.Estimate(100, 3, 1_000, 2, shared=7)
  assert needed.total == needed.generating == needed.arriving == 2_307
  assert needed.resting == 2_307


def test_caches_that_are_let_go_of_are_not_there_while_others_train():
  # An evaluation goes on: weights and a cache of its own.
  needed = memory.Estimate(100, 3, 1_000, 2, shared=7, turns=True)
  assert needed.generating == 2_207  # new weights come between the phases
  assert needed.arriving == 1_307  # and then the cache is not there
  assert needed.resting == 1_207  # neither is, while the other side trains
  assert needed.total == 2_207
  # Where weights are what is large, their arrival is the worst.
  needed = memory.Estimate(1_000, 2, 100, 1, turns=True)
  assert (needed.generating, needed.arriving) == (1_100, 2_000)
  assert (needed.resting, needed.total) == (1_000, 2_000)


def test_what_takes_turns_is_refused_by_the_worst_of_its_moments():
  needed = memory.Estimate(100, 3, 1_000, 2, turns=True)
  stats = {'bytes_limit': 2_200, 'bytes_in_use': 0}
  memory.require_room(needed, stats, 'device 0')
  with pytest.raises(ConfigError, match='2,200 bytes .* in turn'):
    memory.require_room(needed, {**stats, 'bytes_in_use': 1}, 'device 0')


def test_versions_of_adapters_share_their_base():
  adapted = tiny.config(lora=LoraSettings(projections=('query',), rank=2))
  adapters = 2 * (32 * 2 + 2 * 32) * 4
  base = sum(x.nbytes for x in jax.tree.leaves(tiny.params()))
  apart = memory.estimate(
      Engine(adapted, ENGINE, tiny.mesh(), Rules()), '', trains=True, pins=True
  )
  assert (apart.weights, apart.shared) == (adapters, base)
  merged = memory.estimate(
      Engine(tiny.config(), ENGINE, tiny.mesh(), Rules()),
      '', trains=True, pins=True, merges=adapted,
  )  # fmt: skip
  assert (merged.weights, merged.shared) == (base, base)
  assert merged.total - apart.total == 3 * (base - adapters)


# Evaluators on real engines.

ENGINE = EngineSettings(
    slots=4,
    max_length=64,
    max_prompt_length=32,
    page_size=8,
    steps=4,
    prefill_rows=4,
)
PROBLEMS = [
    Problem(f'eval/{i}', 'even' if i % 2 == 0 else 'odd', str(i), '')
    for i in range(10)
]


@pytest.fixture(scope='module')
def engine():
  return Engine(tiny.config(), ENGINE, tiny.mesh(), Rules())


class Numbers:
  """Writes ids as numbers with blanks between them."""

  run_ids = frozenset()

  def decode(self, ids):
    return ' '.join(map(str, ids))


class Asked:
  """An evaluator of some replicas, and all that was asked and scored."""

  def __init__(self, engine, replicas=3):
    self.events = EventLog(None)
    self.evaluator = Evaluator([
        EngineLoop(
            engine, f'evaluate/{i}', swap='drain', events=self.events,
            tokenizer=Numbers(), lane=f'evaluate/{i}',
        )
        for i in range(replicas)
    ])  # fmt: skip
    self.scored = []
    self.requests = []
    self.before_score = lambda draw: None

  def __enter__(self):
    self.evaluator.start()
    return self

  def __exit__(self, *_):
    self.evaluator.stop()

  async def generate(self, request):
    completion = await self.evaluator.client.generate(request)
    self.requests.append((request, completion.weight_source))
    return completion

  async def score(self, draw, text):
    self.scored.append((draw.problem.id, text))
    self.before_score(draw)
    return RewardResult(RewardStatus.OK, float(draw.draw_index))

  def evaluate(
      self, version=0, problems=PROBLEMS, wait_s=WAIT_S, stops=(), **changes
  ):
    params = jax.block_until_ready(tiny.params(version))
    chosen = EvaluationSettings(**{'samples': 2, 'temperature': 1.0, **changes})
    return self.evaluator.evaluate(
        version,
        [params] * len(self.evaluator.loops),
        problems,
        SingleTurn(
            WorkflowContext(
                client=self,
                render=lambda problem: (1, 2, 3 + int(problem.prompt)),
                decode=Numbers().decode,
                score=self.score,
                sampling=SamplingParams(
                    max_new_tokens=6,
                    temperature=chosen.temperature,
                    stop_ids=(4,),
                    stop_strings=stops,
                ),
                clock=lambda: 0.0,
            )
        ),
        chosen,
        decode=Numbers().decode,
        wait_s=wait_s,
    )


def test_ten_examples_on_three_replicas_are_each_scored_once(engine):
  with Asked(engine) as asked:
    result = asyncio.run(asked.evaluate(samples=1))
  assert sorted(p for p, _ in asked.scored) == sorted(p.id for p in PROBLEMS)
  assert [a.problem_id for a in result.answers] == [p.id for p in PROBLEMS]
  assert result.whole.problems == result.whole.answers == 10
  assert result.whole.score_mean == 4.5  # over 0..9, not over 9 or 12
  assert result.by_source['odd'].score_mean == 5.0
  assert {source for _, source in asked.requests} == {
      f'engine/evaluate/{i}' for i in range(3)
  }


def test_twice_gives_the_same_ids_and_the_same_answers(engine):
  results = []
  for replicas in (3, 1):  # and on another number of replicas
    with Asked(engine, replicas) as asked:
      results.append(asyncio.run(asked.evaluate()))
      results.append(asyncio.run(asked.evaluate()))
  assert len({r.answers for r in results}) == 1


def test_texts_are_scored_and_kept_up_to_the_stop_string(engine):
  with Asked(engine, 1) as asked:
    free = asyncio.run(asked.evaluate()).answers
    stop = max((a.text for a in free), key=len)[4:7]
    asked.scored.clear()
    cut = asyncio.run(asked.evaluate(stops=(stop,))).answers
  texts = [a.text.partition(stop)[0] for a in free]
  assert [a.text for a in cut] == texts
  assert sorted(text for _, text in asked.scored) == sorted(texts)
  for before, after in zip(free, cut):
    ended = after.stop_reason is StopReason.STOP_STRING
    assert ended == (stop in before.text)
  assert any(stop in a.text for a in free)


def test_requests_name_streams_that_training_does_not_use(engine):
  with Asked(engine, 1) as asked:
    asyncio.run(asked.evaluate())
  assert {r.purpose for r, _ in asked.requests} == {Purpose.EVAL}
  ids = [r.request_id for r, _ in asked.requests]
  assert len(set(ids)) == 20
  assert all(name.startswith('eval/') for name in ids)


def test_answers_are_those_of_the_version_and_record_says_which(engine):
  with Asked(engine, 1) as asked:
    first = asyncio.run(asked.evaluate(0))
    second = asyncio.run(asked.evaluate(1))
    again = asyncio.run(asked.evaluate(1))
  assert (first.version, second.version) == (0, 1)
  assert [a.text for a in first.answers] != [a.text for a in second.answers]
  assert second.answers == again.answers
  # A fresh evaluator that never held version 0 says the same.
  with Asked(engine, 1) as asked:
    assert asyncio.run(asked.evaluate(1)).answers == second.answers


def test_text_is_what_was_scored_and_length_counts_the_stop_id(engine):
  with Asked(engine, 1) as asked:
    result = asyncio.run(asked.evaluate(samples=4))
  assert sorted((a.problem_id, a.text) for a in result.answers) == sorted(
      asked.scored
  )
  for a in result.answers:
    stopped = a.stop_reason is StopReason.STOP
    assert a.length == len(a.text.split()) + stopped
    assert stopped or a.length == 6


def test_weights_are_held_only_while_evaluating(engine):
  with Asked(engine, 1) as asked:
    (loop,) = asked.evaluator.loops
    seen = []
    asked.before_score = lambda draw: seen.append(loop._weights.version)
    asyncio.run(asked.evaluate(3))
    assert set(seen) == {3}
    # The loop's own thread lets go of them.
    wait_until(lambda: loop._weights is None)


def test_spans_stay_out_of_the_lanes_of_training(engine):
  with Asked(engine, 1) as asked:
    asyncio.run(asked.evaluate())
  for kind in ('generate', 'prefill', 'swap', 'idle'):
    everywhere = asked.events.count(kind)
    assert everywhere == asked.events.count(kind, 'evaluate/0') > 0


def test_training_loop_on_the_same_engine_is_left_alone(engine):
  """Two loops, one engine: what either says is what it says alone."""
  request = tiny.request('train/0/0', new=40)

  def train(beside):
    answers = queue.SimpleQueue()
    loop = EngineLoop(engine, '0', swap='recompute', events=EventLog(None))
    loop.start()
    with beside as asked:
      loop.set_weights(1, jax.block_until_ready(tiny.params(1)), lambda v: None)
      loop.submit(request, answers.put)
      result = asyncio.run(asked.evaluate(0)) if asked else None
      answer = answers.get(timeout=WAIT_S)
    loop.stop()
    assert set(answer.versions.tolist()) == {1}
    return answer.ids.tolist(), result

  alone, _ = train(contextlib.nullcontext())
  beside, evaluated = train(Asked(engine, 1))
  assert alone == beside
  with Asked(engine, 1) as asked:
    assert asyncio.run(asked.evaluate(0)).answers == evaluated.answers


def test_dead_engine_ends_the_evaluation_with_its_cause(engine):
  with Asked(engine, 1) as asked:
    (loop,) = asked.evaluator.loops
    loop.set_weights(5, {'not': np.zeros(3)}, lambda taken: None)
    with pytest.raises(EngineStopped):
      # Its own version is older, so the broken weights stay.
      asyncio.run(asked.evaluate(0))
    with pytest.raises(type(loop.failure())):
      asked.evaluator.check()


def test_failed_scores_are_recorded_with_their_reason(engine):
  async def score(draw, text):
    if draw.draw_index == 0:
      return RewardResult(RewardStatus.TIMEOUT, detail='too long')
    if draw.draw_index == 1:
      return RewardResult(RewardStatus.UNPARSEABLE)
    return RewardResult(RewardStatus.OK, 1.0)

  with Asked(engine, 1) as asked:
    asked.score = score
    result = asyncio.run(asked.evaluate(samples=1))
  assert result.whole.failed == 1
  assert result.whole.accuracy == pytest.approx(8 / 9)
  assert result.answers[0].detail == 'reward timeout: too long'
  assert result.answers[0].text  # what was said is kept
  row = next(result.rows())
  assert (row['version'], row['status']) == (0, RewardStatus.TIMEOUT)


def test_evaluation_that_stands_still_says_whose_answer_is_missing(engine):
  async def score(draw, text):
    if draw.draw_index == 7:
      await asyncio.Event().wait()
    return RewardResult(RewardStatus.OK, 1.0)

  with Asked(engine, 1) as asked:
    asyncio.run(asked.evaluate(samples=1))  # compiles all that it needs
    asked.score = score
    with pytest.raises(TimeoutError, match='9 of 10 .* eval/7 sample 0$'):
      asyncio.run(asked.evaluate(samples=1, wait_s=4.0))


def test_answer_whose_workflow_cancels_itself_is_a_failed_answer(engine):
  """A library's CancelledError; nothing waits for the answer any more."""

  async def score(draw, text):
    if draw.draw_index == 7:
      asyncio.current_task().cancel()
      await asyncio.sleep(0)
    return RewardResult(RewardStatus.OK, 1.0)

  with Asked(engine, 1) as asked:
    asked.score = score
    result = asyncio.run(asked.evaluate(samples=1))
  assert result.whole.failed == 1 and result.whole.answers == 9
  assert result.answers[7].status is RewardStatus.ERROR
  assert result.answers[7].detail == 'the workflow was cancelled from within'


def test_evaluation_goes_on_on_the_loops_that_live(engine):
  with Asked(engine, 2) as asked:
    asked.evaluator.loops[0].stop()
    result = asyncio.run(asked.evaluate(samples=1))
  assert result.whole.answers == 10
  assert {source for _, source in asked.requests} == {'engine/evaluate/1'}


def test_no_problem_is_refused(engine):
  with pytest.raises(ValueError, match='0 evaluation problems'):
    asyncio.run(Asked(engine, 1).evaluate(problems=[]))
