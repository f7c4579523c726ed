"""Whole runs of a tiny policy: invariants 1, 3 to 5, 11; CASES A8, A11.

Each run is the real thing, threads, processes and files included; only the
model and the number of steps are small.
"""

import asyncio
import dataclasses
import gc
import json
import random
import re
import threading

import jax
import numpy as np
import pytest

from areal_jax import session
from areal_jax.build import initial_params
from areal_jax.cluster.local import Rollout, Stalled, build_rollout
from areal_jax.data.running_totals import texts
from areal_jax.data.stream import ProblemStream
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import MeshSettings, RolloutMesh, TrainMesh, cut
from areal_jax.models import hf
from areal_jax.models import parameters as parameters_lib
from areal_jax.models.config import ModelConfig, MoeSettings
from areal_jax.prepare.prepared import prepare
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout import client
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.rollout.failures import TooManyFailures
from areal_jax.rollout.loop import EngineLoop, EngineStopped
from areal_jax.rollout.workflow import SingleTurn, answer_of, trajectory
from areal_jax.settings.algorithm import use_algorithm
from areal_jax.settings.experiment import Experiment
from areal_jax.settings.rollout import RolloutSettings
from areal_jax.settings.task import PolicySettings, TaskSettings
from areal_jax.telemetry import programs, run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.telemetry.stopwatch import Stopwatch
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.trainer import Pending, Trainer
from areal_jax.types import (
    Completion,
    Group,
    Purpose,
    Request,
    RewardResult,
    RewardStatus,
    StopReason,
)
from areal_jax.weights import Publisher
from tests import records, session_rewards, tiny
from tests.limits import WAIT_S, wait_until


def experiment(folder, **changes):
  """A run of seconds; `changes` are fields by dotted name, '.' as '__'.

  It is exact where it can be, unless they say otherwise.
  """
  settings = Experiment(
      name='run',
      output=str(folder),
      steps=4,
      task=TaskSettings(
          train_problems=32,
          eval_problems=8,
          texts='areal_jax.data.running_totals:texts',
      ),
      policy=PolicySettings(
          model=ModelConfig(
              width=32,
              layers=1,
              heads=4,
              kv_heads=2,
              head_size=8,
              mlp_width=32,
              max_length=64,
          )
      ),
      reward=RewardSettings('tests.session_rewards:ones', timeout_s=60.0),
      rollout=RolloutSettings(
          batch_size=4,
          group_size=4,
          eta=0.0,
          max_new_tokens=16,
          wait_s=WAIT_S,
          engine=EngineSettings(
              slots=8,
              max_length=32,
              max_prompt_length=16,
              page_size=16,
              steps=2,
          ),
      ),
      train=TrainSettings(
          packing=PackingSettings(row_tokens=32, rows=8),
          loss=PolicyLoss(),
          optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.0),
      ),
      evaluation=EvaluationSettings(show=1),
  )
  for name, value in changes.items():
    holder = settings
    *path, last = name.split('__')
    for part in path:
      holder = getattr(holder, part)
    assert hasattr(holder, last)
    setattr(holder, last, value)
  if 'rollout__exact' not in changes:
    settings.rollout.exact = settings.rollout.synchronous
  return settings


def policy_of(result):
  _, params = hf.load_hf(result.folder / run_folder.POLICY, None, None)
  return jax.tree.map(np.asarray, params)


def assert_same_bits(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


def rows_of(result, name):
  return read_jsonl(result.folder / name)


@pytest.fixture(scope='module')
def synchronous(tmp_path_factory):
  return session.run(experiment(tmp_path_factory.mktemp('synchronous')))


@pytest.fixture(scope='module')
def asynchronous(tmp_path_factory):
  return session.run(
      experiment(
          # Without a bound the engine is hardly ever idle, so swaps find slots
          # full of half answers, however fast this machine trains. The limit of
          # ready groups keeps a slow first step from leaving a stock of version
          # 0 that lasts the whole run.
          tmp_path_factory.mktemp('asynchronous'),
          rollout__eta=float('inf'),
          rollout__max_ready=8,
          steps=12,
      )
  )


# Invariant 5.


def plain_loop(settings):
  """Generate B groups, train, repeat: no thread, no queue, no ledger."""
  prepared = prepare(settings)
  settings = prepared.settings
  slices = cut(jax.devices(), settings.mesh)
  rules = Rules()
  params, _ = initial_params(prepared, slices.train, rules)
  trainer = Trainer(prepared.model, settings.train, slices.train, rules, params)
  engine = Engine(
      prepared.model, settings.rollout.engine, slices.rollout[0], rules
  )
  draws = ProblemStream(prepared.train, seed=settings.seed)
  state = engine.init_decode_state()
  for _ in range(settings.steps):
    weights = jax.device_put(
        trainer.params, engine.param_shardings, may_alias=False
    )
    groups = []
    for _ in range(settings.rollout.batch_size):
      state, group = one_group(
          prepared, engine, weights, state, next(draws), trainer.version
      )
      groups.append(group)
    trainer.step(groups)
  return jax.tree.map(np.asarray, trainer.params)


def one_group(prepared, engine, weights, state, draw, version):
  prompt = prepared.prompts[draw.problem.id]
  size = prepared.settings.rollout.group_size
  requests = [
      Request(
          request_id=f'{draw.draw_index}/{sample}',
          prompt_ids=prompt,
          sampling=prepared.sampling,
          draw_index=draw.draw_index,
          sample=sample,
      )
      for sample in range(size)
  ]
  prompt = np.asarray(prompt, np.int32)
  tables = engine.own_tables()
  for slot in range(size):  # each by itself: nothing is shared here
    state = engine.extend_whole(weights, state, prompt, tables[slot])
  state = engine.occupy(state, range(size), requests, [prompt] * size)
  ids, logps = [[] for _ in requests], [[] for _ in requests]
  active = True
  while active:
    state, result = engine.generate_steps(weights, state, 2)
    for slot in range(size):
      chosen = np.asarray(result.valid)[slot]
      ids[slot] += np.asarray(result.tokens)[slot][chosen].tolist()
      logps[slot] += np.asarray(result.logps)[slot][chosen].tolist()
    active = bool(np.asarray(result.active).any())
  members = []
  for sample, request in enumerate(requests):
    stopped = ids[sample][-1] in prepared.sampling.stop_ids
    completion = Completion(
        request_id=request.request_id,
        ids=np.asarray(ids[sample], np.int32),
        logps=np.asarray(logps[sample], np.float32),
        versions=np.full(len(ids[sample]), version, np.int32),
        stop_reason=StopReason.STOP if stopped else StopReason.LENGTH,
    )
    text = prepared.tokenizer.decode(answer_of(completion).tolist())
    score = session_rewards.ones(draw.problem, text)
    members.append(
        trajectory(
            draw,
            sample,
            prompt,
            completion,
            RewardResult(RewardStatus.OK, score),
            temperature=prepared.sampling.temperature,
            admitted_version=version,
            timestamps={},
        )
    )
  return state, Group(draw, size, tuple(members), (), version)


def test_collector_leaves_modules_alone_while_a_run_goes_on(
    tmp_path, monkeypatch
):
  class Seen(Exception):
    pass

  def first(*_):
    raise Seen(gc.get_freeze_count())

  monkeypatch.setattr(session, '_first_params', first)
  with pytest.raises(Seen) as seen:
    session.run(experiment(tmp_path))
  assert seen.value.args[0] > 100_000
  assert gc.get_freeze_count() == 0


def test_eta_zero_equals_a_plain_loop_bit_for_bit(synchronous, tmp_path):
  expected = plain_loop(experiment(tmp_path))
  assert_same_bits(policy_of(synchronous), expected)


def test_training_moved_the_policy(synchronous, tmp_path):
  # Without this the test above could compare two policies that stood still.
  start = plain_loop(experiment(tmp_path, steps=1))
  moved = policy_of(synchronous)
  assert not np.array_equal(start['embedding'], moved['embedding'])


def test_eta_zero_is_the_same_however_engines_dispatch(synchronous, tmp_path):
  other = session.run(
      experiment(tmp_path, rollout__swap='restart', rollout__staleness='fifo')
  )
  assert_same_bits(policy_of(synchronous), policy_of(other))


def test_another_seed_is_another_run(synchronous, tmp_path):
  """The control of the bit-for-bit tests."""
  other = plain_loop(experiment(tmp_path, seed=2))
  ours = policy_of(synchronous)
  assert not np.array_equal(other['embedding'], ours['embedding'])


def test_eta_zero_trains_only_tokens_of_its_own_version(synchronous):
  for sample in rows_of(synchronous, 'samples.jsonl'):
    assert set(sample['versions']) == {sample['step'] - 1}
  assert synchronous.summary['staleness_max'] == 0
  assert synchronous.summary['mixed_version_fraction'] == 0


def test_eta_zero_alone_is_synchronous_and_not_exact(tmp_path, monkeypatch):
  built = []

  def kept(*arguments, **named):
    built.append(build_rollout(*arguments, **named))
    return built[-1]

  monkeypatch.setattr(session, 'build_rollout', kept)
  result = session.run(experiment(tmp_path, rollout__exact=False))
  assert [loop.exact for loop in built[0].loops] == [False]
  for sample in rows_of(result, 'samples.jsonl'):
    assert set(sample['versions']) == {sample['step'] - 1}
  assert result.summary['staleness_max'] == 0


# The asynchronous run.


def test_asynchronous_run_is_stale_and_interrupts_answers(asynchronous):
  summary = asynchronous.summary
  assert summary['staleness_mean'] > 0.3
  assert summary['mixed_version_fraction'] > 0.1
  assert summary['engine_trainer_logprob_gap_max'] < 1e-4
  assert summary['recompiles_after_warmup'] == 0, summary[
      'recompiled_after_warmup'
  ]


def test_what_caches_saved_and_slots_did_is_told(asynchronous):
  summary = asynchronous.summary
  last = [r for r in rows_of(asynchronous, 'metrics.jsonl') if 'loss' in r][-1]
  assert summary['prefix_hits'] >= last['prefix_hits'] > 12 * 4  # siblings
  assert summary['prefix_tokens'] >= summary['prefix_hits']
  assert summary['rebuilt_tokens'] >= last['rebuilt_tokens'] > 0
  assert summary['preemptions'] == last['preemptions'] == 0
  assert 8 <= summary['peak_pages'] <= 8 * 2  # slots of two pages each
  assert 0.5 < summary['slots_busy_fraction'] <= 1


@pytest.mark.parametrize('name', ['synchronous', 'asynchronous'])
def test_every_draw_is_accounted_for(name, request):
  summary = request.getfixturevalue(name).summary
  assert summary['drawn'] == (
      summary['trained'] + summary['dropped'] + summary['in_flight']
  )
  assert summary['trained'] == 4 * summary['steps']


def test_nothing_is_held_back_after_the_first_step(monkeypatch, tmp_path):
  """Of what is to be compiled; nor is it before there is one."""
  held = []
  record = session.Session._step

  def step(self, *args, **kwargs):
    held.append(self._compiles in programs._busy)
    return record(self, *args, **kwargs)

  monkeypatch.setattr(session.Session, '_step', step)
  session.run(experiment(tmp_path, steps=3, rollout__eta=1.0))
  assert held == [True, False, False]
  assert not programs._busy and not programs._patient


def test_every_draw_is_trained_once(asynchronous):
  trained = [
      (s['draw_index'], s['sample'])
      for s in rows_of(asynchronous, 'samples.jsonl')
  ]
  assert len(trained) == len(set(trained)) == 4 * 4 * 12


def test_versions_in_an_answer_never_fall(asynchronous):
  # CASES A8: per-token versions, as many as log-probs, non-decreasing.
  for sample in rows_of(asynchronous, 'samples.jsonl'):
    assert sample['versions'] == sorted(sample['versions'])
    assert len(sample['versions']) == len(sample['logps'])
    assert max(sample['versions']) < sample['step']


def test_slots_alive_before_a_swap_are_alive_after(asynchronous):
  swaps = [
      e for e in rows_of(asynchronous, 'events.jsonl') if e['kind'] == 'swap'
  ]
  alive = [s['fields'] for s in swaps]
  assert any(a['alive_before'] for a in alive)
  for counts in alive:
    assert counts['alive_before'] == counts['alive_after']


def test_run_leaves_everything_that_it_promises(asynchronous):
  names = {path.name for path in asynchronous.folder.iterdir()}
  assert names >= {
      'config.json',
      'metrics.jsonl',
      'events.jsonl',
      'trace.json',
      'samples.jsonl',
      'curves.png',
      'summary.json',
      'tensorboard',
      'tokenizer.model',
      'policy',
  }
  policy = {path.name for path in (asynchronous.folder / 'policy').iterdir()}
  assert policy >= {'config.json', 'model.safetensors', 'tokenizer.model'}
  written = json.loads((asynchronous.folder / 'summary.json').read_text())
  for key in (
      'eval_before', 'eval_after', 'wall_s', 'steps', 'eta', 'staleness_max',
      'staleness_mean', 'mixed_version_fraction', 'drawn', 'trained',
      'dropped', 'in_flight', 'rollout_tokens_per_s', 'trained_tokens_per_s',
      'rollout_idle_fraction', 'train_idle_fraction',
      'recompiles_after_warmup', 'engine_trainer_logprob_gap_max',
      'swap_stall_ms_p50', 'peak_rss_bytes', 'slots_busy_fraction',
      'rebuilt_tokens', 'prefix_hits', 'prefix_tokens', 'preemptions',
      'peak_pages',
  ):  # fmt: skip
    assert key in written
  trace = json.loads((asynchronous.folder / 'trace.json').read_text())
  lanes = {
      e['args']['name']
      for e in trace['traceEvents']
      if e['name'] == 'thread_name'
  }
  for lane in ('generate', 'prefill', 'rebuild', 'swap', 'reward', 'train',
               'publish'):  # fmt: skip
    assert any(name.startswith(lane) for name in lanes), lane
  config = json.loads((asynchronous.folder / 'config.json').read_text())
  assert config['rollout']['eta'] == 'inf'


def test_second_run_of_a_name_keeps_the_first(asynchronous):
  again = experiment(asynchronous.folder.parent, steps=1)
  result = session.run(again)
  assert result.folder.name == 'run-2'
  assert (
      json.loads((asynchronous.folder / 'summary.json').read_text())['steps']
      == 12
  )


def test_a_run_whose_tokens_are_all_too_old_ends_and_trains_none(
    tmp_path, monkeypatch
):
  """Policy `mask` with a limit that no token keeps."""
  build = Trainer.__init__

  def built(self, *args, **settings):
    build(self, *args, **settings)
    self._max_age = -1

  monkeypatch.setattr(Trainer, '__init__', built)
  result = session.run(experiment(tmp_path, steps=2, rollout__staleness='mask'))
  rows = read_jsonl(result.folder / 'metrics.jsonl')
  rows = [row for row in rows if 'reward_mean' in row]
  assert [row['masked_fraction'] for row in rows] == [1, 1]
  assert rows[-1]['trained_tokens_per_s'] == 0
  assert not any('staleness_mean' in row for row in rows)
  assert result.summary['steps'] == 2
  assert result.summary['staleness_mean'] == 0


def test_run_without_a_first_evaluation_says_nothing_of_before(
    tmp_path, capsys
):
  result = session.run(experiment(tmp_path, steps=1, evaluation__before=False))
  assert result.summary['eval_before'] is None
  assert result.summary['eval_score_before'] is None
  after = result.summary['eval_after']
  assert f'accuracy {after:.3f} in' in capsys.readouterr().err
  found = rows_of(result, run_folder.EVALUATIONS)
  assert {row['version'] for row in found} == {1}


def test_generation_goes_on_while_a_step_is_being_written_down(
    tmp_path, monkeypatch
):
  """Invariant 11: logging cannot pause generation.

  The first write of a step does not return before all that the ledger admits
  has been generated: beside 4 groups that the next step trains, 4 more.
  """
  full = threading.Event()
  record = session.Session._record

  def slow(self, step, *rest):
    if step.version == 0:
      ledger = self._controller.ledger
      reached = self._async.run(
          wait_until(lambda: ledger.ready == ledger.training == 4),
          timeout_s=WAIT_S,
      )
      assert reached
      full.set()
    record(self, step, *rest)

  async def wait_until(condition):
    while not condition():
      await asyncio.sleep(0.01)
    return True

  monkeypatch.setattr(session.Session, '_record', slow)
  session.run(experiment(tmp_path, steps=2, rollout__eta=1.0))
  assert full.is_set()


def test_weights_are_handed_to_engines_when_they_are_computed(
    tmp_path, monkeypatch
):
  """Engines admit nobody while they are promised weights (invariant 11)."""
  steps, done, handed = [], [], []
  hand_out, wait, publish = Trainer.hand_out, Pending.wait, Publisher.publish

  def handed_out(self, groups):
    steps.append(hand_out(self, groups))
    return steps[-1]

  def waited(self):
    moment = wait(self)
    done.append(self)
    return moment

  def published(self, version, params, *rest):
    handed.append(version == 0 or steps[version - 1] in done)
    return publish(self, version, params, *rest)

  monkeypatch.setattr(Trainer, 'hand_out', handed_out)
  monkeypatch.setattr(Pending, 'wait', waited)
  monkeypatch.setattr(Publisher, 'publish', published)
  session.run(experiment(tmp_path, steps=3, rollout__eta=1.0))
  assert handed == [True] * 4


def written_steps(folder):
  """Steps in the logs of a run: metrics, spans, samples."""
  metrics = read_jsonl(folder / 'metrics.jsonl')
  events = read_jsonl(folder / 'events.jsonl')
  samples = read_jsonl(folder / 'samples.jsonl')
  return (
      [row['step'] for row in metrics if 'loss' in row],
      [e['version'] + 1 for e in events
       if (e['kind'], e['lane']) == ('step', 'train')],
      sorted({row['step'] for row in samples}),
  )  # fmt: skip


def test_every_step_is_written_down_under_its_own_number(
    synchronous, asynchronous
):
  for result in (synchronous, asynchronous):
    steps = list(range(1, result.summary['steps'] + 1))
    assert written_steps(result.folder) == (steps, steps, steps)


def test_the_last_step_is_written_down_however_the_run_ends(
    tmp_path, monkeypatch
):
  step = session.Session._step

  def ends(self, trainer, *rest):
    if trainer.version == 2:  # the numbers of step 2 are not read yet
      assert self._handed_out.values is None
      raise ConnectionError('the controller went away')
    return step(self, trainer, *rest)

  monkeypatch.setattr(session.Session, '_step', ends)
  with pytest.raises(ConnectionError, match='went away'):
    session.run(experiment(tmp_path))
  assert written_steps(tmp_path / 'run') == ([1, 2], [1, 2], [1, 2])


# Evaluation beside training: invariant 11, CASES A19.


def evaluated_versions(result):
  return [
      row['version']
      for row in rows_of(result, 'metrics.jsonl')
      if 'eval_accuracy' in row
  ]


def test_evaluation_leaves_training_as_it_was_bit_for_bit(
    synchronous, tmp_path
):
  result = session.run(
      experiment(
          tmp_path,
          evaluation=EvaluationSettings(
              every=2, samples=3, ks=(1, 3), temperature=1.0, threshold=0.5
          ),
      )
  )
  assert_same_bits(policy_of(synchronous), policy_of(result))
  samples = rows_of(result, 'samples.jsonl')
  assert samples == rows_of(synchronous, 'samples.jsonl')
  # How many draws begin after the last step is up to the end of the run.
  for name in ('trained', 'dropped'):
    assert result.summary[name] == synchronous.summary[name]
  assert evaluated_versions(result) == [0, 2, 4]
  assert result.summary['recompiles_after_warmup'] == 0

  answers = rows_of(result, 'evaluations.jsonl')
  for version in (0, 2, 4):
    asked = [a for a in answers if a['version'] == version]
    assert [(a['draw_index'], a['sample']) for a in asked] == [
        (draw, sample) for draw in range(8) for sample in range(3)
    ]
    right = np.mean([a['score'] >= 0.5 for a in asked])
    (row,) = [
        row
        for row in rows_of(result, 'metrics.jsonl')
        if row['version'] == version and 'eval_accuracy' in row
    ]
    assert row['eval_accuracy'] == pytest.approx(right)
    assert row['eval_pass_at_1'] == pytest.approx(right)
    assert row['eval_pass_at_3'] >= row['eval_pass_at_1']
  trained = {s['prompt'] for s in samples}
  held_out = {p.prompt for p in prepare(experiment(tmp_path)).evaluation}
  assert not trained & held_out


def test_training_goes_on_while_an_evaluation_is_held_up(tmp_path, monkeypatch):
  """The evaluation of version 2 gets no score before the last step is over.

  Were anything of training to wait for it, the run would not end.
  """
  begun, ended = threading.Event(), threading.Event()
  record, score = session.Session._record, session.Session._score

  def recorded(self, step, *rest):
    rows = record(self, step, *rest)
    begun.set()
    if step.version == 5:
      ended.set()
    return rows

  async def held_up(self, scorer, lane, draw, text):
    while lane == 'evaluate' and begun.is_set() and not ended.is_set():
      await asyncio.sleep(0.01)
    return await score(self, scorer, lane, draw, text)

  monkeypatch.setattr(session.Session, '_record', recorded)
  monkeypatch.setattr(session.Session, '_score', held_up)
  result = session.run(
      experiment(
          tmp_path, steps=6, rollout__eta=float('inf'), evaluation__every=2
      )
  )
  # Version 4 was due in the meantime: skipped, and said so.
  assert evaluated_versions(result) == [0, 2, 6]
  assert result.summary['evaluations_skipped'] == 1
  events = rows_of(result, 'events.jsonl')
  (skip,) = [e for e in events if e['kind'] == 'skip']
  assert (skip['version'], skip['lane']) == (4, 'evaluate')
  (held,) = [e for e in events if e['kind'] == 'evaluate' and e['version'] == 2]
  steps = [
      e for e in events if e['kind'] == 'step' and e['mono'] > held['mono']
  ]
  assert [s['version'] for s in steps] == [2, 3, 4, 5]
  assert all(
      s['mono'] + s['duration'] < held['mono'] + held['duration'] for s in steps
  )
  # Training generated on under newer weights all the while.
  generated = [
      e['version']
      for e in events
      if e['kind'] == 'generate' and e['lane'] == 'generate/0'
      and held['mono'] < e['mono'] < held['mono'] + held['duration']
  ]  # fmt: skip
  assert max(generated) > 2
  assert {
      e['version']
      for e in events
      if e['kind'] == 'generate' and e['lane'] == 'evaluate/0'
  } == {0, 2, 6}


def test_evaluation_that_fails_ends_the_run_with_its_reason(
    tmp_path, monkeypatch
):
  begun = threading.Event()
  record, score = session.Session._record, session.Session._score

  def recorded(self, *rest):
    rows = record(self, *rest)
    begun.set()
    return rows

  async def fails(self, scorer, lane, draw, text):
    if lane == 'evaluate' and begun.is_set():
      raise LookupError('no judge')
    return await score(self, scorer, lane, draw, text)

  monkeypatch.setattr(session.Session, '_record', recorded)
  monkeypatch.setattr(session.Session, '_score', fails)
  with pytest.raises(LookupError, match='no judge'):
    session.run(experiment(tmp_path, steps=30, evaluation__every=1))


# Other shapes of machine and of algorithm.


@pytest.mark.parametrize(
    'mesh',
    [
        MeshSettings(TrainMesh(2, 2), RolloutMesh(2, 2)),
        MeshSettings(TrainMesh(4, 1), RolloutMesh(2, 2), colocated=True),
    ],
    ids=['4+2x2', 'colocated'],
)
def test_eight_devices_train_and_generate_side_by_side(
    mesh, synchronous, tmp_path
):
  # Evaluation at version 2 adds a second loop, with collectives, to each slice.
  result = session.run(
      experiment(
          tmp_path, mesh=mesh, steps=4, rollout__eta=0.0, evaluation__every=2
      )
  )
  # The same random numbers on other meshes: equal but for rounding, which may
  # flip a token here and there and so is compared on the first step alone.
  first = rows_of(result, 'metrics.jsonl')[1]
  alone = rows_of(synchronous, 'metrics.jsonl')[1]
  assert first['reward_mean'] == pytest.approx(alone['reward_mean'], abs=0.02)
  assert first['loss'] == pytest.approx(alone['loss'], abs=0.05)
  assert result.summary['engine_trainer_logprob_gap_max'] < 1e-4
  assert result.summary['recompiles_after_warmup'] == 0


def test_colocated_phases_leave_each_other_the_room_and_change_no_bit(
    synchronous, tmp_path
):
  shared = dict(
      mesh=MeshSettings(colocated=True),
      train__offload_optimizer=True,
      checkpoint=CheckpointSettings(every=2, keep_last=9),
  )
  whole = session.run(experiment(tmp_path, **shared))
  assert_same_bits(policy_of(synchronous), policy_of(whole))
  summary = whole.summary
  # The cache while it trains, the moments while it generates.
  assert summary['cache_bytes'] > 0 and summary['cache_releases'] >= 4
  rows = [r for r in rows_of(whole, 'metrics.jsonl') if 'loss' in r]
  parameters = sum(x.nbytes for x in jax.tree.leaves(policy_of(whole)))
  for row in rows:
    assert row['offloaded_bytes'] >= 2 * parameters
    assert row['offload_s'] > 0
  assert summary['recompiles_after_warmup'] == 0
  # Saved from the host's memory, and taken up by devices of another number.
  half = str(whole.folder / run_folder.CHECKPOINTS / '00000002')
  again = session.run(experiment(tmp_path / 'again', resume=half))
  assert again.summary['attempt'] == 1
  assert_same_bits(policy_of(synchronous), policy_of(again))


@pytest.mark.parametrize('swap', ['keep', 'drain', 'restart'])
def test_other_swap_modes_run(swap, tmp_path):
  # What each does to an answer is tested, token by token, in test_loop.py.
  result = session.run(
      experiment(
          tmp_path, rollout__eta=float('inf'), rollout__swap=swap, steps=6
      )
  )
  if swap != 'keep':  # CASES A8: no answer of two versions
    assert result.summary['mixed_version_fraction'] == 0
    assert result.summary['engine_trainer_logprob_gap_max'] < 1e-4


def test_minibatches_and_a_reference_policy(tmp_path):
  result = session.run(
      experiment(
          tmp_path,
          rollout__eta=1.0,
          train__minibatches=2,
          train__loss=PolicyLoss(kl_coefficient=0.1),
      )
  )
  metrics = rows_of(result, 'metrics.jsonl')[1:-1]
  assert metrics[0]['kl_reference'] >= 0
  assert metrics[-1]['kl_reference'] > metrics[0]['kl_reference']
  assert result.summary['engine_trainer_logprob_gap_max'] < 1e-4


def test_no_id_that_the_tokenizer_lacks_is_sampled_or_trained(tmp_path):
  path = train_sentencepiece(texts(), tmp_path / 'own.model')
  size = SentencePieceTokenizer(path).vocab_size
  policy = ModelConfig(
      vocab_size=3 * size, width=32, layers=1, heads=4, kv_heads=2,
      head_size=8, mlp_width=32, max_length=64,
  )  # fmt: skip
  weights = parameters_lib.init_params(policy, 0, None, None)
  hf.save_hf(tmp_path / 'policy', policy, weights)
  folder = str(tmp_path / 'policy')
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          rollout__eta=1.0,
          policy__path=folder,
          tokenizer__path=str(path),
          train__reference_path=folder,
          train__loss=PolicyLoss(kl_coefficient=0.1),
      )
  )
  samples = rows_of(result, 'samples.jsonl')
  drawn = [token for sample in samples for token in sample['ids']]
  # Two thirds of a random policy's tokens would be outside.
  assert len(drawn) > 200 and max(drawn) < size
  assert result.summary['engine_trainer_logprob_gap_max'] < 1e-4
  first = rows_of(result, 'metrics.jsonl')[1]
  # Both are normalised over the same ids: no distance before an update.
  assert first['kl_reference'] == pytest.approx(0, abs=1e-6)
  assert first['entropy'] < np.log(size) + 1e-6
  saved = json.loads((result.folder / 'policy/config.json').read_text())
  assert saved['vocab_size'] == 3 * size


def test_critic_and_dynamic_sampling_in_a_run(tmp_path):
  """Every draw has one place, and every trained group something to compare."""
  made = experiment(
      tmp_path, rollout__eta=1.0, rollout__dynamic_sampling_tries=50
  )
  use_algorithm(made, 'ppo')
  made.rollout.dynamic_sampling = True
  result = session.run(made)
  summary = result.summary
  assert summary['dropped_by_reason']['uninformative'] > 0
  assert summary['drawn'] == (
      summary['trained'] + summary['dropped'] + summary['in_flight']
  )
  steps = [r for r in rows_of(result, 'metrics.jsonl') if 'loss' in r]
  assert all(row['zero_variance_fraction'] == 0 for row in steps)
  assert steps[-1]['dropped_uninformative'] > 0
  assert all(row['critic_loss'] >= 0 for row in steps)
  assert summary['recompiles_after_warmup'] == 0
  assert (
      json.loads((result.folder / 'config.json').read_text())['algorithm']
      == 'ppo'
  )


def test_failed_rewards_are_counted_and_never_scored(tmp_path):
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          reward__function='tests.session_rewards:fails_for_even_sums',
      )
  )
  summary = result.summary
  assert summary['rewards']['error'] > 0
  assert summary['dropped_by_reason']['failed'] == summary['dropped'] > 0
  assert summary['drawn'] == (
      summary['trained'] + summary['dropped'] + summary['in_flight']
  )


def test_reward_that_always_fails_ends_the_run_with_its_reason(tmp_path):
  settings = experiment(
      tmp_path, reward__function='tests.session_rewards:always_raises'
  )
  with pytest.raises((TooManyFailures, ValueError), match='verifier|scored'):
    session.run(settings)
  assert (tmp_path / 'run' / 'events.jsonl').exists()


def test_stalled_wait_says_who_waits_for_whom(tmp_path, monkeypatch):
  settings = experiment(tmp_path, rollout__wait_s=5.0, rollout__group_s=60.0)

  async def never(self, request):
    await asyncio.Event().wait()

  generate = client.EngineClient.generate

  async def only_evaluation(self, request):
    if request.purpose.name == 'EVAL':
      return await generate(self, request)
    return await never(self, request)

  monkeypatch.setattr(client.EngineClient, 'generate', only_evaluation)
  evaluate = session.Session._evaluate_before

  def compiled(self, version):  # or five seconds may be too short for that
    for loop in self._rollout.loops:
      loop.engine.programs.wait_for_all()
    return evaluate(self, version)

  monkeypatch.setattr(session.Session, '_evaluate_before', compiled)
  with pytest.raises(Stalled, match=r'3 groups running \(draws 0, 1, 2\)'):
    session.run(settings)


def fails_in_training(monkeypatch, numbers):
  """Those calls of the training engine's decode step raise."""
  step, calls = Engine.generate_steps, iter(range(1, 10**6))

  def dying(self, *args):
    training = threading.current_thread().name.startswith('engine-0')
    if training and next(calls) in numbers:
      raise ConnectionError('the device went away')
    return step(self, *args)

  monkeypatch.setattr(Engine, 'generate_steps', dying)


def test_engine_that_dies_changes_no_bit_of_the_run(
    synchronous, tmp_path, monkeypatch, capsys
):
  fails_in_training(monkeypatch, {5, 20})
  result = session.run(experiment(tmp_path))
  assert_same_bits(policy_of(synchronous), policy_of(result))
  assert result.summary['engine_deaths'] == 2
  assert 'engine 0 died (ConnectionError: the device' in capsys.readouterr().err


def test_engine_that_dies_ends_the_wait_for_it_and_the_run_if_so_set(
    tmp_path, monkeypatch
):
  """No step comes behind the death, though a wait may last for an hour."""
  fails_in_training(monkeypatch, {5})
  order = []
  ended, hand_out = EngineLoop._ended, Trainer.hand_out

  def died(self, kind, cause, trace):
    if cause is not None:
      order.append('death')
    return ended(self, kind, cause, trace)

  def handed_out(self, groups):
    order.append('step')
    return hand_out(self, groups)

  monkeypatch.setattr(EngineLoop, '_ended', died)
  monkeypatch.setattr(Trainer, 'hand_out', handed_out)
  with pytest.raises((ConnectionError, EngineStopped)) as caught:
    session.run(
        experiment(tmp_path, failures__engine='stop', rollout__wait_s=3600.0)
    )
  assert 'went away' in str(caught.value) + str(caught.value.__cause__)
  assert order == ['step'] * (len(order) - 1) + ['death']


@pytest.mark.parametrize('eta', [0.0, 1.0])
@pytest.mark.parametrize('how', ['hangs', 'is cancelled'])
def test_answer_that_never_comes_ends_no_run_and_is_counted(
    tmp_path, monkeypatch, how, eta
):
  """One answer of every fourth group, from the first step on."""
  call = SingleTurn.__call__

  async def ends_quietly(self, draw, sample, version):
    train = draw.purpose is Purpose.TRAIN
    if train and draw.draw_index % 4 == 0 and sample == 1:
      if how == 'is cancelled':
        raise asyncio.CancelledError
      await asyncio.Event().wait()
    return await call(self, draw, sample, version)

  monkeypatch.setattr(SingleTurn, '__call__', ends_quietly)
  # Under fifo as many are trained whatever comes first.
  result = session.run(
      experiment(
          tmp_path,
          rollout__eta=eta,
          rollout__staleness='fifo',
          rollout__group_s=0.2,
      )
  )
  summary = result.summary
  assert summary['trained'] == 16 and summary['unfinished_members'] >= 4
  assert summary['failed_members'] >= 4
  flow = summary['trained'] + summary['dropped'] + summary['in_flight']
  assert summary['drawn'] == flow
  rows = rows_of(result, run_folder.METRICS)
  assert rows[-2]['unfinished_members'] >= 3
  kinds = [row['kind'] for row in rows_of(result, run_folder.EVENTS)]
  assert kinds.count('unfinished') == summary['unfinished_members']


def test_long_answers_outlive_the_time_limit_of_their_group(tmp_path):
  """The first ones wait for programs, thousands of times as long."""
  result = session.run(experiment(tmp_path, steps=2, rollout__group_s=1e-3))
  assert result.summary['trained'] == 8
  assert result.summary['unfinished_members'] == 0
  assert result.summary['failed_members'] == 0


def test_answers_that_do_not_parse_are_cautioned_against_and_end_no_run(
    tmp_path, capsys
):
  made = experiment(tmp_path, failures__breaker_answers=16)
  made.failures.breaker_ratio = 0.5
  made.reward.function = 'tests.session_rewards:seldom_parses'
  result = session.run(made)
  assert result.summary['trained'] == 16
  said = capsys.readouterr().err
  assert 'caution: reward_unparseable_fraction is' in said
  assert 'answers that the verifier cannot read are not trained' in said
  assert 'reward_unparseable_fraction' in result.summary['unhealthy']


@pytest.mark.parametrize('kind', ['rollout', 'evaluation'])
def test_run_goes_on_without_an_engine_that_is_dead_for_good(
    tmp_path, monkeypatch, capsys, kind
):
  """One of two replicas; those that evaluate are told apart by their name."""
  step = Engine.generate_steps
  dies = 'engine-0' if kind == 'rollout' else 'engine-evaluate/1'

  def dying(self, *args):
    if threading.current_thread().name.startswith(dies):
      raise ConnectionError('the device went away')
    return step(self, *args)

  monkeypatch.setattr(Engine, 'generate_steps', dying)
  result = session.run(
      experiment(
          tmp_path,
          mesh=MeshSettings(rollout=RolloutMesh(replicas=2)),
          failures__engine_restarts=1,
      )
  )
  summary, rows = result.summary, rows_of(result, run_folder.METRICS)
  assert summary['engines_evicted'] == 1 and summary['engine_deaths'] == 2
  flow = summary['trained'] + summary['dropped'] + summary['in_flight']
  assert summary['drawn'] == flow and summary['trained'] == 16
  said = capsys.readouterr().err
  name = dies.removeprefix('engine-')
  assert f'engine {name} died (ConnectionError: the device went away)' in said
  assert 'death 2 and its last; the replicas that are left answer' in said
  told = [row['engines_evicted'] for row in rows if 'engines_evicted' in row]
  assert len(told) == 4 and told[-1] == 1


def test_silence_is_told_with_the_reward_that_hangs(tmp_path, capsys):
  """The hanging answer is killed, counted, and never scored 0."""
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          reward__function='tests.session_rewards:hangs_in_training',
          reward__timeout_s=2.5,
          failures__quiet_s=0.7,
      )
  )
  said = capsys.readouterr().err
  assert 'nothing has moved for' in said
  assert 'waits for 4 groups' in said
  # On a busy machine the others may be waiting still.
  jobs = r'[1-9]\d* reward jobs of tests\.session_rewards:hangs_in_training'
  assert re.search(jobs, said)
  summary = result.summary
  assert summary['silences'] >= 1 and summary['rewards']['timeout'] >= 1
  assert summary['failed_members'] == summary['rewards']['timeout']
  scored = rows_of(result, 'samples.jsonl')
  assert len(scored) == 2 * 16 - summary['failed_members']
  rows = rows_of(result, run_folder.METRICS)
  failed = [row['groups_failed'] for row in rows if 'groups_failed' in row]
  steps = [row for row in rows if 'reward_timeouts' in row]
  assert steps[-1]['reward_timeouts'] == summary['rewards']['timeout']
  assert steps[-1]['reward_errors'] == summary['rewards']['error'] == 0
  assert 0 < steps[-1]['rss_bytes'] <= summary['peak_rss_bytes']
  assert steps[-1]['step_s'] > 0
  assert failed == sorted(failed) and failed[-1] >= 1


def test_shuffled_rewards_are_the_same_rewards():
  groups = [records.group(i, scores=[0.0, 1.0, 2.0 + i]) for i in range(4)]
  dealt = session.shuffle_rewards(groups, random.Random(0))

  def scores(groups):
    return [t.reward.score for g in groups for t in g.trajectories]

  assert sorted(scores(dealt)) == sorted(scores(groups))
  assert scores(dealt) != scores(groups)
  assert dataclasses.replace(dealt[0], trajectories=()) == dataclasses.replace(
      groups[0], trajectories=()
  )


# A policy with experts.


@pytest.mark.slow  # 25 seconds on two cores, most of them compiling
def test_a_sparse_policy_trains_with_its_engines_routing(tmp_path):
  model = ModelConfig(
      family='mixtral',
      width=32,
      layers=1,
      heads=4,
      kv_heads=2,
      head_size=8,
      max_length=64,
      moe=MoeSettings(experts=4, width=16, balance=0.01, replay=True),
  )
  settings = experiment(tmp_path, policy__model=model, rollout__eta=1.0)
  result = session.run(settings)
  rows = [r for r in rows_of(result, 'metrics.jsonl') if 'router_balance' in r]
  assert len(rows) == 4
  for row in rows:
    assert 1 <= row['router_balance'] <= 4  # 2 where even, 4 if all to one
    assert 0 < row['router_entropy'] <= np.log(4) + 1e-5
    assert row['router_load_max'] >= 1
  gaps = [row.get('logprob_gap_fresh_max', 0.0) for row in rows]
  assert 0 < max(gaps) < 1e-4
  config, params = hf.load_hf(result.folder / run_folder.POLICY, None, None)
  assert config.moe.experts == 4
  start = parameters_lib.init_params(config, settings.seed, None, None)
  moved = params['blocks']['router'] - start['blocks']['router']
  assert 0 < np.abs(moved).max() < 0.5


IDLE = EngineSettings(
    slots=2, max_length=32, max_prompt_length=16, page_size=8, steps=2
)


def test_idle_share_counts_the_pause_that_goes_on():
  """3 s without work, 28 ms of it, 4 s without: 0.996 and not 0.43."""
  now = 100.0
  engine = Engine(tiny.config(), IDLE, tiny.mesh(), Rules())
  events = EventLog(None)
  loop = EngineLoop(engine, '0', swap='recompute', events=events)
  loop.counts.idle = Stopwatch(lambda: now)
  rollout = Rollout(
      (loop,), client.EngineClient([loop]), Publisher([], events=events)
  )
  book = session.Book(now, rollout, clock=lambda: now)
  answers = []

  def answer(outcome):  # in the loop's thread, which works meanwhile
    nonlocal now
    now += 0.028
    answers.append(outcome)

  def waits():
    return 'waits for requests' in loop.explain()

  loop.start()
  try:
    wait_until(waits, 'the first pause')
    now += 3.0
    loop.set_weights(0, tiny.params(0, on=engine.mesh), lambda version: None)
    loop.submit(tiny.request('one', new=4), answer)
    wait_until(lambda: answers and waits(), 'the second pause')
    now += 4.0
    rates = book.rates(book.mark())
  finally:
    loop.stop()
  np.testing.assert_allclose(rates['rollout_idle_fraction'], 7.0 / 7.028)
