"""The compiled step: the cut of a batch, what moves, and what must not."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models import moe, parameters, transformer
from areal_jax.models.config import LoraSettings, ModelConfig, MoeSettings
from areal_jax.telemetry.events import EventLog
from areal_jax.train import (
    checkpoint,
    checkpoint_tensors,
    checkpoint_writer,
    packing,
)
from areal_jax.train.objectives import policy_objective, supervised_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.outcome import NonFiniteError
from areal_jax.train.packing import PackingSettings, Shape
from areal_jax.train.step import TrainStep
from areal_jax.types import Microbatch
from tests.closeness import assert_close

CONFIG = ModelConfig(
    vocab_size=12,
    width=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_size=8,
    mlp_width=16,
)
RULES = Rules()
SHAPE = PackingSettings(row_tokens=32, rows=4)
OPTIMIZER = OptimizerSettings(learning_rate=1e-2, weight_decay=0.1)
LOSS_TOKENS = (1, 3, 5, 7)


def train_mesh(fsdp):
  settings = slices.MeshSettings(train=slices.TrainMesh(fsdp=fsdp))
  return slices.cut(jax.devices(), settings).train


def policy_step(
    mesh, config=CONFIG, optimizer=OPTIMIZER, shape=SHAPE, **changes
):
  return TrainStep(
      config,
      policy_objective(PolicyLoss()),
      optimizer,
      mesh,
      RULES,
      shape,
      **changes,
  )


@functools.cache
def host_params():
  """The same weights for all meshes, drawn once: drawing them compiles."""
  return jax.device_get(parameters.init_params(CONFIG, 0, None, None))


def fresh_state(step, mesh):
  shardings = parameters.param_shardings(CONFIG, mesh, RULES)
  return step.initial_state(jax.device_put(host_params(), shardings))


def answers(seed=0):
  """Sequences with prompts of 3 and 1, 3, 5 and 7 loss tokens, as arrays."""
  random = np.random.default_rng(seed)
  result = []
  for count in LOSS_TOKENS:
    length = 3 + count
    mask = np.r_[np.zeros(3), np.ones(count)].astype(np.float32)
    result.append(
        {
            'ids': random.integers(0, 12, length).astype(np.int32),
            'loss_mask': mask,
            'behavior_logps': (-2.4 + 0.3 * random.normal(size=length)) * mask,
            'advantages': random.normal() * mask,
            'versions': np.where(mask > 0, 0, -1),
            'temperatures': 0.7,
        }
    )
  return result


def one_row_each(sequences) -> Microbatch:
  """Padded: a row a sequence."""
  padded = packing.empty(SHAPE)
  arrays = padded.arrays()
  for row, sequence in enumerate(sequences):
    _write(arrays, sequence, row, 0, 1)
  return padded


def all_in_one_row(sequences) -> Microbatch:
  """Packed: three rows stay empty."""
  packed = packing.empty(SHAPE)
  start = 0
  for segment, sequence in enumerate(sequences, start=1):
    _write(packed.arrays(), sequence, 0, start, segment)
    start += len(sequence['ids'])
  return packed


def _write(arrays, sequence, row, start, segment):
  length = len(sequence['ids'])
  at = (row, slice(start, start + length))
  for name, value in sequence.items():
    arrays[name][at] = value
  arrays['positions'][at] = np.arange(length)
  arrays['segment_ids'][at] = segment


def total_of(step, state, microbatches, denominator=None, **kwargs):
  if denominator is None:
    denominator = sum(m.loss_mask.sum() for m in microbatches)
  placed = [step.place(m, denominator, 0) for m in microbatches]
  return step.accumulate(state, placed, **kwargs)


def held(state):
  """What an update moves: parameters and moments."""
  return jax.device_get((state.policy.trainable, state.policy.optimizer))


def assert_same(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other)):
    np.testing.assert_array_equal(a, b)


def assert_same_sums(one, other):
  """Gradients each by its own size; losses and statistics are sums over tokens
  of which each counts about 1 / 16, and may cancel."""
  assert one.keys() == other.keys()
  assert_close(one['gradient'], other['gradient'])
  rest = lambda total: {k: v for k, v in total.items() if k != 'gradient'}
  assert_close(rest(one), rest(other), size=0.1)


@pytest.fixture(scope='module')
def mesh():
  return train_mesh(2)


@pytest.fixture(scope='module')
def step(mesh):
  return policy_step(mesh, max_consecutive_skips=2)


@pytest.fixture(scope='module')
def recompute(mesh):
  """The step of a run with several minibatches."""
  return policy_step(mesh, recompute_proximal=True)


@pytest.fixture(scope='module')
def whole(step, mesh):
  """Sums of the four answers in one padded microbatch on two shards."""
  state = fresh_state(step, mesh)
  return jax.device_get(total_of(step, state, [one_row_each(answers())]))


@pytest.fixture(scope='module')
def others():
  """The step on one and on four shards."""
  return [(policy_step(m), m) for m in (train_mesh(1), train_mesh(4))]


def test_gradient_does_not_depend_on_the_cut(step, mesh, others, whole):
  """CASES A3: 1, 2, 4 microbatches; 1, 2, 4 shards; packed and padded."""
  assert any(np.abs(g).max() > 1e-2 for g in jax.tree.leaves(whole['gradient']))
  for one_step, one_mesh in [(step, mesh), *others]:
    state = fresh_state(one_step, one_mesh)
    for lay in (one_row_each, all_in_one_row):
      for parts in (1, 2, 4):
        cut = np.array_split(np.arange(4), parts)
        microbatches = [lay([answers()[i] for i in part]) for part in cut]
        total = jax.device_get(total_of(one_step, state, microbatches, 16.0))
        assert_same_sums(total, whole)


def test_gradient_does_not_depend_on_how_many_logits_there_are(mesh, whole):
  """Six positions of a row at a time, as with a large vocabulary."""
  few = policy_step(mesh, logit_bytes=4 * 12 * 2 * 6)
  state = fresh_state(few, mesh)
  for lay in (one_row_each, all_in_one_row):
    total = jax.device_get(total_of(few, state, [lay(answers())]))
    assert_same_sums(total, whole)


def test_denominator_of_each_part_would_be_wrong(step, mesh, whole):
  """The fault that A3 is about: every microbatch divides by its own tokens."""
  state = fresh_state(step, mesh)
  halves = [
      total_of(step, state, [one_row_each(answers()[i : i + 2])])
      for i in (0, 2)
  ]
  mean = [float(h['loss']) / 2 for h in halves]
  assert abs(sum(mean) - whole['loss']) > 1e-3


def test_supervised_loss_is_the_mean_over_tokens(mesh, recompute):
  """CASES A3: not the mean of the sequences' means."""
  supervised = TrainStep(
      CONFIG, supervised_objective, OPTIMIZER, mesh, RULES, SHAPE
  )
  state = fresh_state(supervised, mesh)
  padded = one_row_each(answers())
  total = total_of(supervised, state, [padded])
  batch = recompute.place(padded, 1.0, 0)
  logps = np.asarray(recompute.score(state, batch))
  by_token = -(logps * padded.loss_mask).sum() / 16
  by_sequence = -np.mean(
      (logps * padded.loss_mask).sum(1) / padded.loss_mask.sum(1)
  )
  np.testing.assert_allclose(total['loss'], by_token, rtol=1e-5)
  assert abs(by_token - by_sequence) > 1e-3
  assert total['stats']['tokens_sum'] == 16


def test_masked_answer_leaves_loss_and_denominator(step, mesh):
  """CASES A4: masking the truncated answer does not shrink the gradient."""
  state = fresh_state(step, mesh)
  kept, cut = answers()[2:]
  cut = {**cut, 'loss_mask': 0 * cut['loss_mask']}
  together = total_of(step, state, [one_row_each([kept, cut])])
  alone = total_of(step, state, [one_row_each([kept])])
  assert together['stats']['tokens_sum'] == 5
  assert_same_sums(jax.device_get(together), jax.device_get(alone))


def test_batch_without_any_loss_token_moves_nothing(step, mesh):
  """CASES A4: all masked gives 0, finite, and no optimizer step."""
  state = fresh_state(step, mesh)
  before = held(state)
  masked = [{**a, 'loss_mask': 0 * a['loss_mask']} for a in answers()]
  total = total_of(step, state, [one_row_each(masked)])
  assert total['loss'] == 0
  assert all(not np.any(g) for g in jax.tree.leaves(total['gradient']))
  state, outcome = step.apply(state, total, teaches=False)
  assert not step.fetch([outcome], 0)[0].applied
  assert_same(held(state), before)


def test_idle_update_moves_neither_parameters_nor_moments(step, mesh):
  """CASES A5, with momentum and weight decay waiting to act."""
  state = fresh_state(step, mesh)
  real = one_row_each(answers())
  state, _ = step.apply(state, total_of(step, state, [real]), teaches=True)
  before = held(state)
  flat = one_row_each([{**a, 'advantages': 0.0} for a in answers()])
  total = total_of(step, state, [flat])
  state, outcome = step.apply(state, total, teaches=False)
  (seen,) = step.fetch([outcome], 1)
  assert not seen.applied and seen.idle_updates == 1
  assert seen.consecutive_skips == 0
  assert_same(held(state), before)
  # Training goes on, and the schedule did not count the idle update.
  state, outcome = step.apply(
      state, total_of(step, state, [real]), teaches=True
  )
  assert step.fetch([outcome], 2)[0].applied
  assert state.policy.counters.applied_updates == 2
  moved = jax.tree.leaves(jax.device_get(state.policy.trainable))
  assert any(np.any(a != b) for a, b in zip(moved, jax.tree.leaves(before[0])))


def test_a_gradient_of_zero_moves_nothing(step, mesh):
  """Weight decay and momentum would, where a term of the loss may be 0."""
  state = fresh_state(step, mesh)
  real = one_row_each(answers())
  state, _ = step.apply(state, total_of(step, state, [real]), teaches=True)
  before = held(state)
  flat = one_row_each([{**a, 'advantages': 0.0} for a in answers()])
  state, outcome = step.apply(
      state, total_of(step, state, [flat]), teaches=True
  )
  (seen,) = step.fetch([outcome], 1)
  assert not seen.applied and seen.idle_updates == 1
  assert_same(held(state), before)


def test_nonfinite_gradient_is_skipped_and_named(step, mesh):
  state = fresh_state(step, mesh)
  real = one_row_each(answers())
  before = held(state)

  def poisoned(state):
    total = total_of(step, state, [real])
    leaf = total['gradient']['final_norm']
    values = np.array(leaf)
    values[3] = np.inf
    total['gradient']['final_norm'] = jax.device_put(values, leaf.sharding)
    return step.apply(state, total, teaches=True)

  def sound(state):
    return step.apply(state, total_of(step, state, [real]), teaches=True)

  for skips in (1, 2):
    state, outcome = poisoned(state)
    assert_same(held(state), before)
    (seen,) = step.fetch([outcome], 6)
    assert seen.nonfinite == ('final_norm',)
    assert (seen.applied, seen.skipped_updates) == (False, skips)
  state, outcome = sound(state)
  (seen,) = step.fetch([outcome], 7)
  assert seen.applied and seen.consecutive_skips == 0
  assert seen.skipped_updates == 2
  # Three in a row are the end: what comes after them moves nothing.
  before = held(state)
  for _ in range(3):
    state, outcome = poisoned(state)
  with pytest.raises(
      NonFiniteError,
      match='step 8: 3 updates in a row.*at most.*=2; this time in final_norm',
  ):
    step.fetch([outcome], 8)
  state, outcome = sound(state)
  with pytest.raises(NonFiniteError, match='step 9: 3 .*=2; no further one'):
    step.fetch([outcome], 9)
  assert_same(held(state), before)
  counters = jax.device_get(state.policy.counters)
  assert (counters.applied_updates, counters.skipped_updates) == (1, 5)


def test_reused_proximal_equals_recomputed(step, mesh, recompute, whole):
  """With one minibatch the proximal policy is the one that learns."""
  state = fresh_state(recompute, mesh)
  batch = recompute.place(one_row_each(answers()), 16.0, 0)
  logps = recompute.score(state, batch)
  total = jax.device_get(recompute.accumulate(state, [batch], [logps]))
  assert_same_sums(total, whole)
  # And it is used: another centre changes the ratio.
  shifted = jax.device_put(np.asarray(logps) - 0.1, logps.sharding)
  total = recompute.accumulate(state, [batch], [shifted])
  np.testing.assert_allclose(
      total['stats']['ratio_max'], np.exp(0.1), rtol=1e-4
  )
  with pytest.raises(
      ValueError, match='given, wanted.*recompute_proximal=True'
  ):
    step.accumulate(state, [batch], [logps])
  with pytest.raises(
      ValueError, match=r"inputs \['denominator', 'kept'\] were"
  ):
    step.place(one_row_each(answers()), 16.0, 0, kept=1.0)


def test_mask_shifted_by_one_is_caught(step, mesh, recompute):
  """Engine log-probs lie where the mask does; one off, and the gap shows."""
  state = fresh_state(recompute, mesh)
  right = one_row_each(answers())
  batch = recompute.place(right, 16.0, 0)
  logps = np.asarray(recompute.score(state, batch))
  right = dataclasses.replace(right, behavior_logps=logps * right.loss_mask)
  total = total_of(step, state, [right])
  assert total['stats']['fresh_tokens_sum'] == 16
  assert total['stats']['fresh_gap_max'] < 1e-5
  wrong = dataclasses.replace(
      right,
      loss_mask=np.roll(right.loss_mask, -1, axis=1),
      versions=np.zeros_like(right.versions),
  )
  assert total_of(step, state, [wrong])['stats']['fresh_gap_max'] > 0.1


def test_fresh_tokens_are_those_of_the_version(step, mesh):
  state = fresh_state(step, mesh)
  batch = step.place(one_row_each(answers()), 16.0, 1)
  stats = jax.device_get(step.accumulate(state, [batch])['stats'])
  assert stats['fresh_tokens_sum'] == 0 and stats['gap_sum'] > 0


def test_gap_is_summed_by_age(step, mesh):
  """The sums over ages 0, 1, 2 and more are those of a slow plain loop."""
  right = one_row_each(answers())
  ages = np.arange(right.versions.size).reshape(right.versions.shape) % 6
  aged = dataclasses.replace(right, versions=(7 - ages).astype(np.int32))
  state = fresh_state(step, mesh)
  batch = step.place(aged, 16.0, 7)
  stats = jax.device_get(step.accumulate(state, [batch])['stats'])
  buckets = range(4)
  tokens = stats['age_tokens_sum'].tolist()
  mask = right.loss_mask > 0
  assert tokens == [(mask & (np.minimum(ages, 3) == b)).sum() for b in buckets]
  assert min(tokens) > 0
  # One version later every token is one older, and only the last two merge.
  later = step.place(aged, 16.0, 8)
  moved = jax.device_get(step.accumulate(state, [later])['stats'])
  gaps = stats['age_gap_sum']
  assert sum(gaps) == pytest.approx(float(stats['gap_sum']), rel=1e-5)
  expected = [0.0, gaps[0], gaps[1], gaps[2] + gaps[3]]
  np.testing.assert_allclose(moved['age_gap_sum'], expected, rtol=1e-5)


def test_rows_that_do_not_divide_are_refused():
  with pytest.raises(ConfigError, match='packing.rows is 4.*multiple of the 8'):
    policy_step(slices.mesh_of(jax.devices(), fsdp=4, data=2))
  with pytest.raises(ConfigError, match='row_tokens is 32.*of the 3 shards'):
    policy_step(slices.mesh_of(jax.devices()[:3], context=3))


# Several shapes.


def test_shapes_mix_in_one_minibatch(mesh, whole):
  """Each has programs of its own, and sums add up across them."""
  shapes = PackingSettings(row_tokens=32, rows=4, shorter=(16,), fewer=(2,))
  step = policy_step(mesh, shape=shapes)
  state = fresh_state(step, mesh)
  first, second = packing.empty(Shape(2, 16)), packing.empty(Shape(4, 32))
  for cut, chosen in ((first, answers()[:2]), (second, answers()[2:])):
    for row, sequence in enumerate(chosen):
      _write(cut.arrays(), sequence, row, 0, 1)
  total = jax.device_get(total_of(step, state, [first, second], 16.0))
  assert_same_sums(total, whole)
  with pytest.raises(ValueError, match=r'rows=1, row_tokens=16.*wanted one of'):
    step.place(packing.empty(Shape(1, 16)), 16.0, 0)


def test_fewer_rows_that_do_not_divide_are_refused(mesh):
  with pytest.raises(
      ConfigError, match='packing.fewer is 3.*multiple of the 2'
  ):
    policy_step(mesh, shape=PackingSettings(32, 4, fewer=(3,)))


# Memory, by what the compiler says of its programs.


def memory_of(step, name, shape=Shape(4, 32)):
  of_batch = name not in ('apply', 'zeros')
  program = step._program(name, shape if of_batch else None)
  return program.memory_analysis()


def size_of(tree):
  return sum(leaf.nbytes for leaf in jax.tree.leaves(tree))


def test_buffers_are_donated(step, mesh):
  """The new state lies where the old one did, and so do the sums."""
  alone = train_mesh(1)
  one = policy_step(alone)
  state = fresh_state(one, alone)
  assert memory_of(one, 'apply').alias_size_in_bytes >= size_of(
      (state.policy.trainable, state.policy.optimizer)
  )
  assert memory_of(one, 'accumulate').alias_size_in_bytes >= size_of(
      state.policy.trainable
  )
  state = fresh_state(step, mesh)
  total = total_of(step, state, [one_row_each(answers())])
  step.apply(state, total, teaches=True)
  gone = jax.tree.leaves((state.policy.trainable, state.policy.optimizer))
  assert all(leaf.is_deleted() for leaf in gone)
  # The sums are let go of by the caller; they cannot be the new parameters.
  assert not any(g.is_deleted() for g in jax.tree.leaves(total['gradient']))


def test_logits_are_never_all_there():
  """Memory does not follow tokens times vocabulary; see `logit_bytes`."""
  alone = train_mesh(1)
  config = dataclasses.replace(CONFIG, vocab_size=4096)
  logits = 4 * 32 * 64 * 4096  # 32 MiB

  def temporary(rows, logit_bytes):
    shape = PackingSettings(64, rows)
    step = policy_step(
        alone, config=config, shape=shape, logit_bytes=logit_bytes
    )
    memory = memory_of(step, 'accumulate', Shape(rows, 64))
    return memory.temp_size_in_bytes

  few = temporary(32, 2**20)
  assert few < logits / 4
  assert temporary(64, 2**20) - few < logits / 4  # twice the tokens
  # Planted fault: all at once. The loss holds several arrays of that size.
  assert temporary(32, 2**30) > 2 * logits


def test_bfloat16_computes_and_float32_is_kept(mesh):
  """Steps too small for bfloat16 add up in the parameters."""
  config = dataclasses.replace(CONFIG, compute_dtype='bfloat16')
  small = OptimizerSettings(learning_rate=1e-5, weight_decay=0.0)
  step = policy_step(mesh, config=config, optimizer=small)
  state = fresh_state(step, mesh)
  before = jax.device_get(state.policy.trainable)
  program = step._program('accumulate', Shape(4, 32)).as_text()
  assert 'bf16' in program
  for _ in range(3):
    total = total_of(step, state, [one_row_each(answers())])
    assert {g.dtype for g in jax.tree.leaves(total['gradient'])} == {
        np.dtype(np.float32)
    }
    state, _ = step.apply(state, total, teaches=True)
  moved = state.policy
  floats = {
      leaf.dtype
      for leaf in jax.tree.leaves((moved.trainable, moved.optimizer))
      if leaf.ndim
  }
  assert floats == {np.dtype(np.float32)}
  norm = np.asarray(moved.trainable['final_norm'])
  assert np.any(norm != before['final_norm'])
  # Planted fault: kept in bfloat16 it would not have moved at all.
  as_bfloat16 = norm.astype(jax.numpy.bfloat16)
  np.testing.assert_array_equal(
      as_bfloat16, before['final_norm'].astype(jax.numpy.bfloat16)
  )


# Optimizers.

KINDS = ('adamw', 'adafactor', 'muon')


def optimizer_of(kind):
  return OptimizerSettings(kind=kind, learning_rate=1e-2, weight_decay=0.1)


def supervised_step(mesh, kind):
  return TrainStep(
      CONFIG, supervised_objective, optimizer_of(kind), mesh, RULES, SHAPE
  )


def updated(step, state, count):
  """The state after so many updates on one minibatch, and their losses."""
  placed = [step.place(one_row_each(answers()), 16.0, 0)]
  outcomes = []
  for _ in range(count):
    total = step.accumulate(state, placed)
    state, outcome = step.apply(state, total, teaches=True)
    outcomes.append(outcome)
  return state, [o.loss for o in step.fetch(outcomes, 0)]


@pytest.mark.parametrize('kind', KINDS)
def test_every_optimizer_learns_on_shards_as_on_one_device(
    kind, mesh, tmp_path
):
  """Its state lies with its parameters and survives a checkpoint."""
  step = supervised_step(mesh, kind)
  state, losses = updated(step, fresh_state(step, mesh), 12)
  assert losses[-1] < 0.7 * losses[0]
  for leaf, sharding in zip(
      jax.tree.leaves(state.policy.optimizer),
      jax.tree.leaves(step.state_shardings().policy.optimizer),
      strict=True,
  ):
    assert leaf.sharding == sharding
    if leaf.ndim > 2:  # of the matrices; what is smaller is whole
      assert not sharding.is_fully_replicated
  # Written, read, and gone on with: the same as without.
  writer = checkpoint_writer.Checkpointer(
      tmp_path / 'checkpoints',
      checkpoint.CheckpointSettings(),
      events=EventLog(None),
  )
  writer.save(1, dataclasses.replace(state, version=1), {})
  writer.close()
  saved, _ = checkpoint.latest(tmp_path / 'checkpoints')
  restored = checkpoint_tensors.restore_state(saved, step.abstract_state)
  assert_same(held(restored), held(state))
  assert updated(step, restored, 2)[1] == updated(step, state, 2)[1]
  # One device, where sums are in another order.
  alone = train_mesh(1)
  other = supervised_step(alone, kind)
  _, wanted = updated(other, fresh_state(other, alone), 12)
  np.testing.assert_allclose(losses, wanted, rtol=2e-3)


@pytest.mark.parametrize('kind', KINDS)
def test_what_does_not_learn_has_no_optimizer_state(kind):
  alone = train_mesh(1)
  config = dataclasses.replace(
      CONFIG, lora=LoraSettings(('query', 'down'), rank=2)
  )
  step = policy_step(alone, config=config, optimizer=optimizer_of(kind))
  state = step.abstract_state.policy
  adapters = {leaf.shape for leaf in jax.tree.leaves(state.trainable)}
  moments = {leaf.shape for leaf in jax.tree.leaves(state.optimizer)}
  # Counts, the coefficients of Muon, and what Adafactor does not factor.
  assert {shape for shape in moments if len(shape) > 1} == adapters
  frozen = {leaf.shape for leaf in jax.tree.leaves(state.frozen)}
  assert not moments & frozen - {(1,)}


# Experts.

SPARSE = dataclasses.replace(
    CONFIG,
    family='mixtral',
    layers=2,
    moe=MoeSettings(experts=4, chosen=2, width=8, balance=0.5),
)


def sparse_step(mesh, config=SPARSE, **changes):
  return TrainStep(
      config,
      policy_objective(PolicyLoss()),
      OPTIMIZER,
      mesh,
      RULES,
      SHAPE,
      **changes,
  )


@functools.cache
def sparse_params():
  params = jax.device_get(parameters.init_params(SPARSE, 0, None, None))
  params['blocks']['router'] = 8 * params['blocks']['router']
  return params


def sparse_state(step, mesh):
  shardings = parameters.param_shardings(SPARSE, mesh, RULES)
  return step.initial_state(jax.device_put(sparse_params(), shardings))


@pytest.fixture(scope='module')
def sparse(mesh):
  step = sparse_step(mesh)
  return step, sparse_state(step, mesh)


@pytest.fixture(scope='module')
def sparse_whole(sparse):
  return jax.device_get(total_of(*sparse, [one_row_each(answers())]))


def test_balance_is_over_the_minibatch_whatever_the_cut(sparse, sparse_whole):
  other_mesh = train_mesh(4)
  other = sparse_step(other_mesh)
  for step, state in (sparse, (other, sparse_state(other, other_mesh))):
    for lay in (one_row_each, all_in_one_row):
      for parts in (1, 2, 4):
        cut = np.array_split(np.arange(4), parts)
        microbatches = [lay([answers()[i] for i in part]) for part in cut]
        total = jax.device_get(total_of(step, state, microbatches, 16.0))
        assert_same_sums(total, sparse_whole)


def test_balance_of_each_part_would_be_wrong(sparse, sparse_whole):
  """The fault that the test above is about: each part counts its own tokens."""
  step, state = sparse
  counts = []
  for sequence in answers():
    total = total_of(step, state, [one_row_each([sequence])], 16.0)
    counts.append(jax.device_get(total['routing']))
  whole = sparse_whole['routing']
  assert whole['tokens'] == 28 == sum(c['tokens'] for c in counts)
  right = moe.balance_loss(whole['counts'], whole['mass'], whole['tokens'])
  wrong = np.mean(
      [moe.balance_loss(c['counts'], c['mass'], c['tokens']) for c in counts]
  )
  assert abs(float(right) - wrong) > 1e-2


def test_balance_reaches_the_routers_and_its_coefficient_counts(
    mesh, sparse, sparse_whole
):
  config = dataclasses.replace(
      SPARSE, moe=dataclasses.replace(SPARSE.moe, balance=0.0)
  )
  step = sparse_step(mesh, config)
  plain = jax.device_get(
      total_of(step, sparse_state(step, mesh), [one_row_each(answers())])
  )
  routing = sparse_whole['routing']
  spread = moe.balance_loss(
      **{k: routing[k] for k in ('counts', 'mass', 'tokens')}
  )
  np.testing.assert_allclose(
      sparse_whole['loss'] - plain['loss'], 0.5 * spread, rtol=1e-4
  )
  moved = sparse_whole['gradient']['blocks']['router']
  assert np.abs(moved - plain['gradient']['blocks']['router']).max() > 1e-3


def test_statistics_of_routers_are_those_of_the_minibatch(sparse):
  step, _ = sparse
  state = sparse_state(step, train_mesh(2))
  halves = [one_row_each(answers()[i : i + 2]) for i in (0, 2)]
  total = total_of(step, state, halves, 16.0)
  routing = jax.device_get(total['routing'])
  _, outcome = step.apply(state, total, teaches=True)
  stats = step.fetch([outcome], 0)[0].stats
  counts = routing['counts']
  assert counts.sum() == 2 * 2 * 28  # layers, choices, tokens
  assert stats['router_load_max'] == pytest.approx(
      np.mean(counts.max(1) / counts.mean(1)), rel=1e-5
  )
  assert stats['router_unused'] == pytest.approx((counts == 0).mean())
  assert stats['router_entropy'] == pytest.approx(
      routing['entropy'].mean() / 28, rel=1e-5
  )


def test_a_dense_policy_has_no_statistics_of_routers(step, mesh):
  state = fresh_state(step, mesh)
  total = total_of(step, state, [one_row_each(answers())])
  assert total['routing'] == {}
  _, outcome = step.apply(state, total, teaches=True)
  names = step.fetch([outcome], 0)[0].stats
  assert not [name for name in names if name.startswith('router_')]


def test_replayed_choices_are_those_of_the_microbatch(mesh, sparse):
  replaying = sparse_step(mesh, replayed=SPARSE.routing_shape)
  state = sparse_state(replaying, mesh)
  rows = one_row_each(answers())

  def logps(routing):
    batch = dataclasses.replace(rows, routing=routing)
    placed = replaying.place(batch, 16.0, 0)
    return np.asarray(replaying.score(state, placed))

  shape = (*rows.ids.shape, *SPARSE.routing_shape)
  free = logps(np.full(shape, moe.UNKNOWN, np.int16))
  _, routing = jax.jit(functools.partial(transformer.forward_routed, SPARSE))(
      sparse_params(), rows.ids, rows.positions, rows.segment_ids
  )
  own = np.swapaxes(np.asarray(routing.experts), 0, 1).reshape(shape)
  own = own.astype(np.int16)
  assert_close(logps(own), free)
  late = np.roll(own, 1, axis=1)  # planted fault: one token late
  assert np.abs(logps(late) - free).max() > 1e-2
