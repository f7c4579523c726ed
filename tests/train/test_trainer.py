"""The trainer: order, versions, metrics by hand, resume, no recompiling."""

import contextlib
import dataclasses
import threading

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.losses.advantages import (
    AdvantageSettings,
    LengthPenalty,
    Normalization,
)
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.metrics import METRICS
from areal_jax.train import memory, offload
from areal_jax.train import trainer as trainer_lib
from areal_jax.train.batch import mask_stale, minibatches_of
from areal_jax.train.optimizer import OptimizerSettings, learning_rate
from areal_jax.train.outcome import NonFiniteError
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.summary import record_metrics
from areal_jax.train.trainer import Trainer
from areal_jax.types import (
    Draw,
    Group,
    Problem,
    RewardResult,
    RewardStatus,
    Segment,
    StopReason,
    Trajectory,
)
from tests.limits import WAIT_S

CONFIG = ModelConfig(
    vocab_size=12,
    width=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_size=8,
    mlp_width=16,
)
SETTINGS = TrainSettings(
    minibatches=2,
    max_consecutive_skips=1,
    packing=PackingSettings(row_tokens=12, rows=2),
    loss=PolicyLoss(kl_coefficient=0.1),
    optimizer=OptimizerSettings(
        learning_rate=1e-2,
        schedule='cosine',
        warmup_steps=2,
        total_steps=40,
    ),
)


def answer(draw, sample, reward, versions, stop=StopReason.STOP):
  """Prompt of two tokens; one sampled token for each of `versions`."""
  random = np.random.default_rng([draw, sample])
  count = len(versions)
  mask = np.r_[0, 0, np.ones(count)].astype(np.float32)
  ids = np.r_[10, draw % 10, random.integers(0, 10, count)]
  return Trajectory(
      draw_index=draw,
      sample=sample,
      segments=(Segment('prompt', 0, 2), Segment('sampled', 2, count, stop)),
      ids=ids.astype(np.int32),
      loss_mask=mask,
      logps=(-2.5 * mask).astype(np.float32),
      versions=np.r_[-1, -1, versions].astype(np.int32),
      turn_ids=np.zeros(2 + count, np.int32),
      reward=RewardResult(RewardStatus.OK, float(reward)),
      temperature=1.0,
      admitted_version=min(versions),
  )


def group(draw, *members):
  problem = Problem(f'p{draw}', 'test', 'prompt', 'answer')
  return Group(Draw(draw, 0, problem), len(members), members, (), 0)


def batch(first=0, groups=4):
  """Groups of three answers of 2 to 6 tokens, all of version 0."""
  random = np.random.default_rng(first)
  return [
      group(
          draw,
          *(
              answer(draw, s, s % 2, [0] * random.integers(2, 7))
              for s in range(3)
          ),
      )
      for draw in range(first, first + groups)
  ]


@pytest.fixture(scope='module')
def parts():
  settings = slices.MeshSettings(train=slices.TrainMesh(fsdp=2))
  mesh = slices.cut(jax.devices(), settings).train
  rules = Rules()
  params = jax.device_get(parameters.init_params(CONFIG, 0, mesh, rules))
  shardings = parameters.param_shardings(CONFIG, mesh, rules)
  return mesh, rules, lambda: jax.device_put(params, shardings)


@pytest.fixture(scope='module')
def trainer(parts):
  mesh, rules, params = parts
  made = Trainer(CONFIG, SETTINGS, mesh, rules, params())
  made.warm_up()
  return made


@pytest.fixture(scope='module')
def start(trainer):
  """The state at version 0, on the host."""
  return jax.device_get(trainer.state)


@pytest.fixture
def restart(trainer, start):
  """The same compiled trainer, put back to version 0."""
  trainer.state = jax.device_put(start, trainer.state_shardings())
  return trainer


def leaves(trainer_):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(trainer_.params)]


def test_nothing_compiles_after_warm_up(restart):
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    with jax.transfer_guard('disallow'):  # nor is anything sent by accident
      for first, groups in ((0, 4), (4, 2), (6, 9)):  # 1 to 4 microbatches
        restart.step(batch(first, groups))
  finally:
    counter.uninstall()
  assert counter.names_since_warm == []
  assert restart.version == 3


def test_what_is_sent_to_devices_by_accident_is_refused(restart, monkeypatch):
  """Planted fault: a scalar of the host where a program of the step runs."""
  apply = restart._step.apply

  def forgetful(state, total, *, teaches):
    total = {**total, 'loss': total['loss'] + np.float32(0)}
    return apply(state, total, teaches=teaches)

  monkeypatch.setattr(restart._step, 'apply', forgetful)
  with pytest.raises(Exception, match='Disallowed host-to-device transfer'):
    restart.step(batch())


@pytest.fixture
def no_waiting(monkeypatch):
  """A context in which this thread may not wait for a device.

  All ways in which an array of a device becomes one of the host, and the wait
  for it. Other threads may: they do not keep the next step from being handed
  out.
  """
  forbids = threading.local()

  def guarded(function):
    def call(*arguments, **named):
      if getattr(forbids, 'now', False):
        raise RuntimeError('the host waits for a device')
      return function(*arguments, **named)

    return call

  array = type(jax.numpy.zeros(0))
  value = array._value
  read = property(guarded(lambda x: value.__get__(x)))
  monkeypatch.setattr(array, '_value', read)
  monkeypatch.setattr(jax, 'device_get', guarded(jax.device_get))
  wait = guarded(jax.block_until_ready)
  monkeypatch.setattr(jax, 'block_until_ready', wait)

  @contextlib.contextmanager
  def forbidden():
    forbids.now = True
    try:
      yield
    finally:
      forbids.now = False

  return forbidden


def test_a_step_waits_for_nothing_and_its_numbers_come_later(
    restart, start, no_waiting
):
  one_by_one = [restart.step(batch(step)) for step in range(3)]
  straight = jax.device_get(restart.state)
  restart.state = jax.device_put(start, restart.state_shardings())
  restart.step(batch(9))  # its version was put on the devices to begin with
  restart.state = jax.device_put(start, restart.state_shardings())
  assert restart.version == 0
  restart.state = dataclasses.replace(restart.state, version=0)
  with no_waiting():
    pending = [restart.hand_out(batch(step)) for step in range(3)]
  assert restart.version == 3
  # In any order, under their own step.
  assert [p.read() for p in pending[::-1]] == one_by_one[::-1]
  jax.tree.map(
      np.testing.assert_array_equal, jax.device_get(restart.state), straight
  )


@pytest.mark.parametrize('name', ['float', 'device_get', 'block_until_ready'])
def test_a_step_that_waits_is_seen(restart, monkeypatch, no_waiting, name):
  """Planted fault: a step looks at what came of its own update."""
  apply = restart._step.apply
  looks = {'float': float}.get(name) or (lambda x: getattr(jax, name)(x))

  def curious(state, total, *, teaches):
    state, outcome = apply(state, total, teaches=teaches)
    looks(outcome['loss'])
    return state, outcome

  monkeypatch.setattr(restart._step, 'apply', curious)
  restart.state = dataclasses.replace(restart.state, version=0)
  with no_waiting(), pytest.raises(RuntimeError, match='the host waits'):
    restart.hand_out(batch())


def test_what_is_handed_out_after_the_end_moves_nothing(restart):
  """Step 0 ends the run; step 1, which is sound, came before that was heard."""
  bad = batch()
  for index, group_ in enumerate(bad):
    logps = [np.full_like(t.logps, np.nan) for t in group_.trajectories]
    bad[index] = dataclasses.replace(
        group_,
        trajectories=tuple(
            dataclasses.replace(t, logps=own)
            for t, own in zip(group_.trajectories, logps)
        ),
    )
  ended = restart.hand_out(bad)  # two minibatches, where one may be skipped
  state = jax.device_get(restart.state)
  after = restart.hand_out(batch(4))
  with pytest.raises(NonFiniteError, match='step 0: 2 updates'):
    ended.read()
  with pytest.raises(NonFiniteError, match='step 1: 2 updates'):
    after.read()
  jax.tree.map(
      np.testing.assert_array_equal,
      jax.device_get(restart.state),
      dataclasses.replace(state, version=2),
  )
  assert restart.state.policy.counters.skipped_updates == 2


def test_the_first_step_waits_for_what_it_calls_alone(parts):
  """The smaller microbatch is still to be compiled when it has been trained."""
  mesh, rules, params = parts
  settings = dataclasses.replace(
      SETTINGS,
      minibatches=1,
      loss=PolicyLoss(),
      packing=PackingSettings(row_tokens=12, rows=4, fewer=(2,)),
  )
  steps = trainer_lib.build_steps(CONFIG, settings, mesh, rules)
  gate = threading.Event()
  compile_ = steps[0]._compile
  counter = CompilationCounter().install()

  def slow(name, shape):
    if shape is not None and shape.rows == 2:
      assert gate.wait(WAIT_S)
    else:
      compile_(name, shape)

  steps[0]._compile = slow
  try:
    trainer_lib.compile_ahead(steps, settings)
    trainer_lib.compile_ahead(steps, settings)  # again changes nothing
    made = Trainer(CONFIG, settings, mesh, rules, params(), steps=steps)
    counter.mark_warm()
    made.step(batch(0, 3))  # four rows
    assert 'accumulate 2 12' in steps[0].ahead.explain()
    assert steps[0].ahead.done == 4
  finally:
    gate.set()
    steps[0].ahead.close()
    counter.uninstall()
  assert counter.names_since_warm == []


def test_version_counts_steps_and_not_updates(restart):
  restart.step(batch())
  assert restart.version == 1
  assert restart.state.policy.counters.applied_updates == 2


def test_order_of_arrival_changes_no_bit(restart, start):
  metrics = restart.step(batch())
  straight = leaves(restart)
  restart.state = jax.device_put(start, restart.state_shardings())
  shuffled = [
      dataclasses.replace(g, trajectories=g.trajectories[::-1])
      for g in batch()[::-1]
  ]
  assert restart.step(shuffled) == metrics
  for a, b in zip(straight, leaves(restart)):
    np.testing.assert_array_equal(a, b)


def test_resume_equals_the_uninterrupted_run(restart, parts):
  """CASES A18: in bits, the learning rate included."""
  rates = []
  for step in range(2):
    rates.append(restart.step(batch(step))['learning_rate'])
  saved = jax.device_get(restart.state)
  for step in range(2, 4):
    rates.append(restart.step(batch(step))['learning_rate'])
  whole = leaves(restart)
  restart.state = jax.device_put(saved, restart.state_shardings())
  assert restart.version == 2
  resumed = [restart.step(batch(step))['learning_rate'] for step in range(2, 4)]
  assert resumed == rates[2:]
  # Two updates a step; the metric is that of the second.
  wanted = [learning_rate(SETTINGS.optimizer, s) for s in (1, 3, 5, 7)]
  np.testing.assert_allclose(rates, wanted, rtol=1e-6)
  for a, b in zip(whole, leaves(restart)):
    np.testing.assert_array_equal(a, b)


def test_optimizer_on_the_host_between_steps_changes_no_bit(
    restart, start, monkeypatch
):
  for step in range(3):
    restart.step(batch(step))
  straight = jax.device_get(restart.state)
  away = dataclasses.replace(SETTINGS, offload_optimizer=True)
  monkeypatch.setattr(restart, '_settings', away)
  monkeypatch.setattr(restart, 'offloaded', offload.Offloaded())
  restart.restore(lambda like: jax.device_put(start, restart.state_shardings()))
  for step in range(3):
    held = jax.tree.leaves(restart.state.policy.optimizer)
    assert {leaf.sharding.memory_kind for leaf in held} == {'pinned_host'}
    arrays = jax.tree.leaves(restart.params)
    assert 'pinned_host' not in {leaf.sharding.memory_kind for leaf in arrays}
    restart.step(batch(step))
  told = restart.offloaded.metrics()
  assert told['offloaded_bytes'] == sum(leaf.nbytes for leaf in held) > 0
  one = slices.cut(jax.devices(), slices.MeshSettings()).train
  needed = memory.estimate(CONFIG, away, one, Rules())
  assert needed.offloaded == told['offloaded_bytes']
  assert 0 < told['offload_s'] < 10
  assert restart.version == 3
  jax.tree.map(
      np.testing.assert_array_equal, jax.device_get(restart.state), straight
  )


def flat_batch(first):
  """A batch whose rewards are all equal, so no token has an advantage."""
  return [
      dataclasses.replace(
          g,
          trajectories=tuple(
              dataclasses.replace(t, reward=RewardResult(RewardStatus.OK, 0.3))
              for t in g.trajectories
          ),
      )
      for g in batch(first)
  ]


def test_kl_is_trained_where_no_token_has_an_advantage(restart):
  """Once the policy has left its reference, the KL has a gradient alone."""
  metrics = restart.step(flat_batch(0))
  assert metrics['skipped_steps'] == 2  # the policy still is its reference
  restart.step(batch(4))
  metrics = restart.step(batch(8))
  assert metrics['kl_reference'] > 0
  before = leaves(restart)
  metrics = restart.step(flat_batch(12))
  assert metrics['zero_variance_fraction'] == 1.0
  assert metrics['skipped_steps'] == 2
  assert metrics['gradient_norm'] > 0 and metrics['update_norm'] > 0
  assert any((a != b).any() for a, b in zip(before, leaves(restart)))


@pytest.mark.parametrize(
    ('changes', 'balances', 'teaches'),
    [
        (dict(loss=PolicyLoss()), False, False),
        (dict(loss=PolicyLoss(kl_coefficient=0.5)), False, True),
        (dict(loss=PolicyLoss(entropy_coefficient=0.1)), False, True),
        (dict(loss=PolicyLoss()), True, True),
        (
            dict(loss=PolicyLoss(kl_coefficient=0.5), mask_truncated=True),
            False,
            False,  # every answer is masked: there is no token to learn from
        ),
    ],
    ids=['nothing', 'kl', 'entropy', 'balance', 'no token'],
)
def test_every_term_of_the_loss_teaches(changes, balances, teaches):
  groups = flat_batch(0)
  if changes.get('mask_truncated'):
    groups = [
        dataclasses.replace(
            g,
            trajectories=tuple(
                answer(t.draw_index, t.sample, 0.3, [0], StopReason.LENGTH)
                for t in g.trajectories
            ),
        )
        for g in groups
    ]
  settings = dataclasses.replace(SETTINGS, minibatches=1, **changes)
  (part,) = minibatches_of(groups, settings, balances=balances)
  assert part.teaches is teaches


@pytest.mark.parametrize('why', ['fresh', 'stale', 'truncated'])
def test_length_penalty_does_not_depend_on_what_is_trained(why):
  """50 and 100 tokens, penalty (100, 20): rewards 1 and 0, so ±0.5."""
  settings = dataclasses.replace(
      SETTINGS,
      minibatches=1,
      mask_truncated=True,
      packing=PackingSettings(row_tokens=128, rows=2),
      advantages=AdvantageSettings(
          length_penalty=LengthPenalty(longest=100, buffer=20),
          sequences=Normalization('group'),
      ),
  )
  stop = StopReason.LENGTH if why == 'truncated' else StopReason.STOP
  versions = [3] * 40 + [5] * 60
  members = (answer(0, 0, 1.0, [5] * 50), answer(0, 1, 1.0, versions, stop))
  group = dataclasses.replace(batch()[0], trajectories=members)
  if why == 'stale':
    group = mask_stale(group, 5, 1)
    assert group.trajectories[1].loss_mask.sum() == 60
  (part,) = minibatches_of([group], settings)
  (microbatch,) = part.microbatches
  trained = {'fresh': 100, 'stale': 60, 'truncated': 0}[why]
  assert part.tokens == 50 + trained
  for sample, wanted in ((50, 0.5), (100, -0.5)):
    rows = microbatch.segment_ids
    place = [
        (row, segment)
        for row in range(len(rows))
        for segment in set(rows[row]) - {0}
        if (rows[row] == segment).sum() == sample + 2
    ]
    ((row, segment),) = place
    here = rows[row] == segment
    advantages = microbatch.advantages[row][here]
    mask = microbatch.loss_mask[row][here]
    np.testing.assert_allclose(advantages, wanted * mask, rtol=1e-6)


def test_zero_variance_batch_is_idle_and_training_goes_on(parts):
  """CASES A5, with weight decay that would act."""
  mesh, rules, params = parts
  settings = dataclasses.replace(SETTINGS, loss=PolicyLoss())
  restart = Trainer(CONFIG, settings, mesh, rules, params())
  restart.step(batch())
  before = jax.device_get(restart.state)
  metrics = restart.step(flat_batch(4))
  assert metrics['zero_variance_fraction'] == 1.0
  assert metrics['skipped_steps'] == 2
  assert restart.version == 2
  assert restart.state.policy.counters.idle_updates == 2
  after = jax.device_get(restart.state.policy)
  for part in ('trainable', 'optimizer'):
    for a, b in zip(
        jax.tree.leaves(getattr(before.policy, part)),
        jax.tree.leaves(getattr(after, part)),
        strict=True,
    ):
      np.testing.assert_array_equal(a, b)
  restart.step(batch(8))
  assert restart.state.policy.counters.applied_updates == 4


def test_nonfinite_engine_log_prob_ends_the_run_with_names(restart):
  bad = batch()
  first = bad[0].trajectories[0]
  logps = first.logps.copy()
  logps[2] = np.nan
  members = (dataclasses.replace(first, logps=logps), *bad[0].trajectories[1:])
  bad[0] = dataclasses.replace(bad[0], trajectories=members)
  metrics = restart.step(bad)  # one of two minibatches
  assert metrics['skipped_steps'] == 1
  assert np.isfinite(metrics['gradient_norm'])
  bad[2] = dataclasses.replace(
      bad[0], draw=dataclasses.replace(bad[2].draw, draw_index=7)
  )
  with pytest.raises(NonFiniteError, match='step 1: 2 updates.*loss.*query'):
    restart.step(bad)
  assert all(np.isfinite(leaf).all() for leaf in leaves(restart))


def test_metrics_are_registered_and_complete(restart):
  metrics = restart.step(batch())
  assert set(metrics) - {'trained_tokens'} <= set(METRICS)
  assert all(np.isfinite(value) for value in metrics.values())
  tokens = sum(t.loss_mask.sum() for g in batch() for t in g.trajectories)
  assert metrics['trained_tokens'] == tokens
  assert metrics['reward_mean'] == pytest.approx(1 / 3)
  assert metrics['kl_reference'] == pytest.approx(0, abs=1e-3)
  assert metrics['importance_weight_mean'] > 0
  assert 0 < metrics['effective_sample_size'] <= 1
  assert 'logprob_gap_fresh_max' in metrics
  # Version 1 now: no token is fresh any more.
  metrics = restart.step(batch(4))
  assert 'logprob_gap_fresh_max' not in metrics
  assert metrics['logprob_gap_mean'] > 0
  assert metrics['staleness_mean'] == 1.0


def test_gaps_are_told_by_the_age_of_the_tokens(restart):
  metrics = restart.step(batch())
  for name in ('logprob_gap', 'logprob_gap_p99', 'logprob_gap_max', 'kl_k1',
               'kl_k3', 'effective_sample_size'):  # fmt: skip
    assert f'{name}_staleness_0' in metrics
    assert f'{name}_staleness_1' not in metrics  # there is no such token
  assert (
      metrics['logprob_gap_staleness_0']
      <= metrics['logprob_gap_p99_staleness_0']
      <= metrics['logprob_gap_max_staleness_0']
  )
  assert metrics['kl_k3_staleness_0'] >= 0


def test_tokens_that_are_too_old_are_not_trained(restart, monkeypatch):
  """Policy `mask`: they leave loss, denominator and staleness alone."""
  monkeypatch.setattr(restart, '_max_age', 0)
  restart.step(batch())
  metrics = restart.step(batch(4))  # all of version 0, trained from version 1
  assert metrics['masked_fraction'] == 1 and metrics['trained_tokens'] == 0
  assert 'staleness_max' not in metrics
  assert metrics['head_staleness_max'] == 1 and metrics['skipped_steps'] == 2
  assert metrics['reward_mean'] == pytest.approx(1 / 3)


def test_version_labels_give_the_staleness_metrics():
  """By hand, at version 5: ages 0 0 | 2 1 0 | 3 3 3 and 4."""
  groups = [
      group(
          0,
          answer(0, 0, 1, [5, 5]),
          answer(0, 1, 0, [3, 4, 5], StopReason.LENGTH),
      ),
      group(1, answer(1, 0, 0.5, [2, 2, 2]), answer(1, 1, 0.5, [1])),
  ]
  metrics = record_metrics(groups, 5, [g.trajectories for g in groups])
  assert metrics == {
      'reward_mean': pytest.approx(0.5),
      'reward_std': pytest.approx(np.sqrt(0.125)),
      'zero_variance_fraction': 0.5,
      'response_length_mean': 2.25,
      'truncated_fraction': 0.25,
      'mixed_version_fraction': 0.25,
      'head_staleness_max': 4.0,
      'staleness_mean': pytest.approx(16 / 9),
      'staleness_max': 4.0,
  }


def test_advantages_follow_the_group_ids_and_not_the_order():
  """A failed member leaves its group smaller and no other group changed."""
  groups = batch()
  groups[0] = dataclasses.replace(
      groups[0],
      trajectories=groups[0].trajectories[1:],
      failed=((0, 'timeout'),),
  )
  whole = minibatches_of(batch(), SETTINGS)
  partial = minibatches_of(groups, SETTINGS)
  for a, b in zip(whole[1].microbatches, partial[1].microbatches, strict=True):
    np.testing.assert_array_equal(a.advantages, b.advantages)
  assert partial[0].denominator < whole[0].denominator


def test_minibatches_hold_whole_groups_in_order():
  parts_ = minibatches_of(batch(groups=5), SETTINGS)
  lengths = [
      sum(t.loss_mask.sum() for t in g.trajectories) for g in batch(groups=5)
  ]
  assert [p.denominator for p in parts_] == [sum(lengths[:3]), sum(lengths[3:])]
  assert all(p.teaches for p in parts_)


def test_rewarded_answers_become_likelier(restart):
  groups = batch()
  tokens = groups[0].trajectories[1]  # the one of its group with reward 1

  def logp():
    def score(params):
      logits = transformer.forward(
          CONFIG,
          params,
          tokens.ids[None],
          np.arange(len(tokens.ids))[None],
          np.ones_like(tokens.ids)[None],
      )
      return jax.nn.log_softmax(logits[0])

    found = np.asarray(jax.jit(score)(jax.device_get(restart.params)))
    at = np.arange(1, len(tokens.ids) - 1)
    return found[at, tokens.ids[at + 1]].sum()

  before = logp()
  for _ in range(4):
    restart.step(groups)
  assert logp() > before + 0.1


def test_bad_batches_are_refused_before_any_device_work(restart):
  with pytest.raises(ValueError, match='1 groups for train.minibatches=2'):
    restart.step(batch(groups=1))
  with pytest.raises(ValueError, match='draw 0 comes twice'):
    restart.step(batch()[:1] * 2)
  with pytest.raises(ValueError, match='draw 9 has no trajectories'):
    restart.step([*batch(), group(9)])
  member = dataclasses.replace(
      answer(9, 0, 1, [0]), reward=RewardResult(RewardStatus.TIMEOUT)
  )
  with pytest.raises(ValueError, match="draw 9 sample 0.*'timeout'"):
    restart.step([*batch(), group(9, member)])
  assert restart.version == 0
  with pytest.raises(ConfigError, match='train.minibatches is 0'):
    TrainSettings(minibatches=0).validate('train')
