"""The presets in the real train step: cuts, shards, critic, reference, masks.

Parameters are compared after a step of an optimizer whose update is the
gradient: with an epsilon far above every gradient Adam divides by nothing else.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.losses import importance, logprobs, presets
from areal_jax.losses.advantages import AdvantageSettings, Normalization
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.metrics import METRICS
from areal_jax.train import memory, packing
from areal_jax.train import trainer as lib
from areal_jax.train.batch import BatchScores, minibatches_of
from areal_jax.train.critic import CriticSettings
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.trainer import Trainer
from areal_jax.types import StopReason
from tests.closeness import assert_close
from tests.train.test_trainer import answer, group

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
GRADIENT = OptimizerSettings(
    learning_rate=1e6, epsilon=1e6, weight_decay=0.0, gradient_clip=math.inf
)
# What is computed over a sequence, over a minibatch and against a reference,
# all at once.
EVERYTHING = PolicyLoss(
    ratio_level='sequence',
    weight_level='sequence_mean',
    weight_rules=(WeightRule('sequence', metric='k3', upper=0.5),),
    second_moment=0.3,
    aggregation='sequence_mean_of_means',
    kl_coefficient=0.1,
    entropy_coefficient=0.01,
)


def mesh(fsdp):
  settings = slices.MeshSettings(train=slices.TrainMesh(fsdp=fsdp))
  return slices.cut(jax.devices(), settings).train


@functools.cache
def host_params(seed=0):
  return jax.device_get(parameters.init_params(CONFIG, seed, None, None))


def trainer(settings, fsdp=1, **more):
  on = mesh(fsdp)
  shardings = parameters.param_shardings(CONFIG, on, RULES)
  params = jax.device_put(host_params(), shardings)
  return Trainer(CONFIG, settings, on, RULES, params, **more)


def settings(loss=PolicyLoss(), advantages=None, rows=8, tokens=12, **more):
  advantages = advantages or AdvantageSettings()
  made = TrainSettings(
      packing=PackingSettings(row_tokens=tokens, rows=rows),
      loss=loss,
      advantages=advantages,
      optimizer=GRADIENT,
      critic=CriticSettings(optimizer=GRADIENT),
  )
  return resolve(dataclasses.replace(made, **more))


def batch(first=0, groups=4):
  """Groups of three answers of 2 to 6 tokens, of several versions."""
  random = np.random.default_rng(first)
  made = []
  for draw in range(first, first + groups):
    members = []
    for sample in range(3):
      one = answer(
          draw, sample, sample % 2, np.sort(random.integers(0, 3, 2 + sample))
      )
      noise = 0.4 * random.standard_normal(len(one.ids))
      logps = (one.logps + noise * one.loss_mask).astype(np.float32)
      members.append(dataclasses.replace(one, logps=logps))
    made.append(group(draw, *members))
  return made


def moved(made, before):
  """Differences of all parameters that learn, by role."""
  after = jax.device_get(made.state.roles)
  return {
      name: jax.tree.map(np.subtract, role.trainable, before[name].trainable)
      for name, role in after.items()
      if role.trainable
  }


def assert_same_movement(one, other):
  assert jax.tree.structure(one) == jax.tree.structure(other)
  for role in one:
    largest = max(np.abs(x).max() for x in jax.tree.leaves(one[role]))
    assert largest > 1e-4
    # Adam divides by the size of a gradient, so that roundings of small ones
    # move a parameter as those of large ones do.
    assert_close(one[role], other[role], relative=1e-3)


def step_from(made, version, groups):
  """Movement and metrics of one step that starts at a version."""
  before = jax.device_get(made.state.roles)
  made.state = dataclasses.replace(made.state, version=version)
  metrics = made.step(groups)
  return moved(made, before), metrics


def cut_invariant(loss, advantages):
  """One padded microbatch on one device, and several packed on four."""
  whole = trainer(settings(loss, advantages, rows=12))
  cut = trainer(settings(loss, advantages, rows=4, tokens=17), fsdp=4)
  one, one_metrics = step_from(whole, 2, batch())
  other, other_metrics = step_from(cut, 2, batch())
  assert_same_movement(one, other)
  for name, value in one_metrics.items():
    if name != 'padding_fraction':
      assert other_metrics[name] == pytest.approx(value, rel=2e-4, abs=1e-5)


@pytest.mark.parametrize(
    ('loss', 'advantages'),
    [
        (EVERYTHING, AdvantageSettings(kl_coefficient=0.05)),
        (presets.PRESETS['ppo'](6).loss, presets.PRESETS['ppo'](6).advantages),
    ],
    ids=['everything', 'critic'],
)
def test_step_does_not_depend_on_cut_and_shards(loss, advantages):
  cut_invariant(loss, advantages)


@pytest.mark.slow
@pytest.mark.parametrize('name', sorted(presets.PRESETS))
def test_no_preset_depends_on_cut_and_shards(name):
  chosen = presets.preset(name, longest=6)
  cut_invariant(chosen.loss, chosen.advantages)


def test_second_moment_judged_by_microbatch_would_depend_on_the_cut():
  """The fault that the mask over the whole minibatch is there for."""
  made = settings(EVERYTHING, rows=4)
  (part,) = minibatches_of(batch(), made)
  own = np.stack([np.full_like(m.loss_mask, -2.5) for m in part.microbatches])
  behavior = np.stack([m.behavior_logps for m in part.microbatches])
  masks = np.stack([m.loss_mask for m in part.microbatches])
  keep = functools.partial(importance.second_moment_keep, threshold=0.1)
  assert len(masks) > 1
  whole = keep(own, behavior, masks)
  parts = [keep(o, b, m) for o, b, m in zip(own, behavior, masks)]
  assert 0 < whole.sum() < masks.sum()
  assert np.any(whole != np.stack(parts))


@pytest.fixture(scope='module')
def several():
  """A trainer of three minibatches."""
  made = trainer(settings(minibatches=3, optimizer=OptimizerSettings(1e-2)))
  made.warm_up()
  return made


def test_proximal_for_free_equals_the_full_recompute(several):
  """The first minibatch gives its own; three forward passes become two."""
  start = jax.device_get(several.state)
  metrics = several.step(batch())
  ours = jax.device_get(several.state.policy.trainable)
  step, _ = lib.build_steps(CONFIG, several._settings, mesh(1), RULES)
  state = jax.device_put(start, step.state_shardings())
  placed = [
      [step.place(m, part.denominator, 0) for m in part.microbatches]
      for part in minibatches_of(batch(), several._settings)
  ]
  proximal = [[step.score(state, b) for b in batches] for batches in placed]
  for batches, logps in zip(placed, proximal):
    total = step.accumulate(state, batches, logps)
    state, _ = step.apply(state, total, teaches=True)
  theirs = jax.device_get(state.policy.trainable)
  assert_close(ours, theirs)
  # The later ones do need them: by then the weights have moved.
  assert abs(metrics['ratio_max'] - 1) > 1e-3 and metrics['kl_update'] > 0


def test_one_update_a_step_has_a_ratio_of_one():
  made = trainer(settings())
  _, metrics = step_from(made, 2, batch())
  assert metrics['ratio_mean'] == metrics['ratio_max'] == 1.0
  assert metrics['clip_fraction'] == metrics['kl_update'] == 0.0


# The critic.


@pytest.fixture(scope='module')
def critical():
  """PPO with its critic; both learn quickly, and the critic starts alone."""
  chosen = presets.preset('ppo', longest=6)
  rate = OptimizerSettings(learning_rate=3e-2, weight_decay=0.0)
  made = trainer(
      settings(
          dataclasses.replace(chosen.loss, kl_coefficient=0.1),
          chosen.advantages,
          minibatches=2,
          optimizer=rate,
          critic=CriticSettings(warmup_steps=2, optimizer=rate),
      ),
      fsdp=2,
  )
  made.warm_up()
  return made


@pytest.fixture(scope='module')
def start(critical):
  return jax.device_get(critical.state)


@pytest.fixture
def restart(critical, start):
  critical.state = jax.device_put(start, critical.state_shardings())
  return critical


def leaves(tree):
  return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def equal(one, other):
  return all(np.array_equal(a, b) for a, b in zip(leaves(one), leaves(other)))


def test_critic_starts_alone_and_the_policy_is_published_as_it_was(restart):
  before = jax.device_get(restart.state.roles)
  metrics = restart.step(batch())
  assert restart.version == 1 and metrics['skipped_steps'] == 2
  roles = jax.device_get(restart.state.roles)
  assert equal(roles['policy'].trainable, before['policy'].trainable)
  assert not equal(roles['critic'].trainable, before['critic'].trainable)
  assert roles['critic'].counters.applied_updates == 2
  restart.step(batch(4))
  restart.step(batch(8))  # the warm-up is over
  after = restart.state.policy
  assert not equal(after.trainable, before['policy'].trainable)
  assert after.counters.applied_updates == 2


def test_critic_learns_what_answers_are_worth(restart):
  metrics = [restart.step(batch()) for _ in range(12)]
  losses = [m['critic_loss'] for m in metrics]
  assert losses[-1] < 0.5 * losses[0]
  assert metrics[-1]['explained_variance'] > metrics[0]['explained_variance']
  assert metrics[-1]['return_mean'] == pytest.approx(1 / 3, abs=0.2)


def test_nothing_compiles_after_warm_up_with_a_critic(restart):
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    for first, groups in ((0, 4), (4, 2), (6, 9)):
      metrics = restart.step(batch(first, groups))
  finally:
    counter.uninstall()
  assert counter.names_since_warm == []
  assert set(metrics) - {'trained_tokens'} <= set(METRICS)
  assert all(math.isfinite(value) for value in metrics.values())


def test_critic_resumes_bit_for_bit(restart):
  for step in range(3):
    restart.step(batch(step))
  saved = jax.device_get(restart.state)
  restart.step(batch(3))
  whole = jax.device_get(restart.state.roles)
  restart.state = jax.device_put(saved, restart.state_shardings())
  restart.step(batch(3))
  assert equal(whole, jax.device_get(restart.state.roles))


def test_advantages_are_those_of_the_critics_values():
  """The value of a token is what the critic said before it was sampled."""
  chosen = presets.preset('ppo', longest=6)
  made = trainer(settings(chosen.loss, chosen.advantages))
  groups = batch()
  scores = made._score_batch(groups)
  params = jax.device_get(made.state.roles['critic'].params)
  for index, one in enumerate(t for g in groups for t in g.trajectories):
    said = np.asarray(
        heads.values(
            CONFIG,
            params,
            one.ids[None],
            np.arange(len(one.ids))[None],
            np.ones_like(one.ids)[None],
        )
    )[0]
    assert_close(scores.values[index][1:], said[:-1])
    if index == 2:
      break
  # GAE by hand for the first answer: gamma 1, lambda 0.95.
  first = groups[0].trajectories[0]
  values = scores.values[0][first.loss_mask > 0]
  after, wanted = 0.0, []
  for at in range(len(values) - 1, -1, -1):
    following = values[at + 1] if at + 1 < len(values) else 0.0
    reward = first.reward.score if at + 1 == len(values) else 0.0
    after = reward + following - values[at] + 0.95 * after
    wanted.insert(0, after + values[at])
  (part,) = minibatches_of(groups, made._settings, scores=scores)
  place = packing.lay(
      [len(t.ids) for g in groups for t in g.trajectories],
      made._settings.packing,
  ).places[0]
  found = part.returns[place.microbatch][place.row][place.start :]
  found = found[: len(first.ids)][first.loss_mask > 0]
  np.testing.assert_allclose(found, wanted, atol=1e-5)


# The reference.


def logps_of(params, one):
  row = one.ids[None]
  logits = transformer.forward(
      CONFIG, params, row, np.arange(len(one.ids))[None], np.ones_like(row)
  )
  return np.asarray(
      logprobs.token_logps(
          logits, row, np.ones_like(row), np.ones(row.shape, np.float32)
      )[0]
  )[0]


def test_kl_in_the_reward_is_that_of_the_sampled_tokens():
  """A_t = -c Σ_{s ≥ t} (log π_behav - log π_ref), without any reward."""
  made = trainer(
      settings(
          advantages=AdvantageSettings(
              reward_scale=0.0, sequences=Normalization(), kl_coefficient=0.5
          )
      )
  )
  groups = batch(groups=1)
  scores = made._score_batch(groups)
  (part,) = minibatches_of(groups, made._settings, scores=scores)
  trajectories = groups[0].trajectories
  places = packing.lay(
      [len(t.ids) for t in trajectories], made._settings.packing
  ).places
  total = tokens = 0.0
  for one, place in zip(trajectories, places):
    mask = one.loss_mask > 0
    gap = (one.logps - logps_of(host_params(), one))[mask]
    wanted = -0.5 * np.cumsum(gap[::-1])[::-1]
    row = part.microbatches[place.microbatch].advantages[place.row]
    found = row[place.start : place.start + len(one.ids)][mask]
    np.testing.assert_allclose(found, wanted, atol=1e-4)
    total, tokens = total + gap.sum(), tokens + mask.sum()
  assert part.teaches
  metrics = made.step(groups)
  assert metrics['kl_reference'] == pytest.approx(total / tokens, abs=1e-4)


def test_distillation_takes_a_teachers_log_probs_for_rewards():
  chosen = presets.preset('distillation', longest=6)
  groups = batch(groups=1)
  trajectories = groups[0].trajectories
  teacher = [np.linspace(-3, -1, len(t.ids)) for t in trajectories]
  made = settings(chosen.loss, chosen.advantages)
  (part,) = minibatches_of(
      groups, made, scores=BatchScores(reference_logps=teacher)
  )
  lengths = [len(t.ids) for t in trajectories]
  places = packing.lay(lengths, made.packing).places
  rows = [m.advantages for m in part.microbatches]
  found = packing.gather(rows, places, lengths)
  for one, given, advantages in zip(trajectories, teacher, found):
    # log teacher - log π of each sampled token: the policy gradient of the
    # reverse KL a token.
    wanted = np.where(one.loss_mask > 0, given - one.logps, 0.0)
    np.testing.assert_allclose(advantages, wanted, atol=1e-6)


def test_reference_may_be_of_another_shape():
  """A teacher: the student comes nearer to it on the tokens it is asked."""
  shape = dataclasses.replace(CONFIG, width=24)
  on = mesh(1)
  teacher = parameters.init_params(shape, 5, on, RULES)
  teacher['embedding'] *= 20.0  # so that it prefers something
  made = trainer(
      settings(
          PolicyLoss(kl_coefficient=10.0, kl_kind='k2'),
          optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.0),
      ),
      reference=(shape, teacher),
  )
  metrics = [made.step(batch()) for _ in range(6)]
  assert metrics[-1]['kl_reference'] < 0.9 * metrics[0]['kl_reference']
  assert made.state.roles['reference'].frozen['embedding'].shape == (12, 24)


# Masks, settings, memory.


def test_truncated_answers_leave_loss_and_denominator():
  """CASES A4: what is left weighs as it would without them."""
  made = settings(mask_truncated=True)
  groups = batch(groups=2)
  members = groups[0].trajectories
  cut = dataclasses.replace(
      members[1],
      segments=(
          members[1].segments[0],
          dataclasses.replace(
              members[1].segments[1], stop_reason=StopReason.LENGTH
          ),
      ),
  )
  groups[0] = dataclasses.replace(
      groups[0], trajectories=(members[0], cut, members[2])
  )
  (whole,) = minibatches_of(batch(groups=2), made)
  (part,) = minibatches_of(groups, made)
  gone = np.count_nonzero(cut.loss_mask)
  assert part.denominator == part.tokens == whole.tokens - gone
  # Its reward still counts in its group.
  kept = minibatches_of(groups, settings())[0].microbatches[0].advantages
  seen = part.microbatches[0].advantages
  assert np.count_nonzero(seen) == np.count_nonzero(kept) - gone
  np.testing.assert_array_equal(seen[seen != 0], kept[seen != 0])
  metrics = trainer(made).step(groups)
  sampled = whole.tokens
  assert metrics['masked_fraction'] == pytest.approx(gone / sampled)


@pytest.mark.parametrize(
    ('changes', 'named'),
    [
        (dict(reference_path='x'), "reference_path is 'x', wanted ''"),
        (
            dict(loss=PolicyLoss(second_moment=0.1, proximal='loglinear')),
            "second_moment is 0.1, wanted None unless loss.proximal is 'exact'",
        ),
        (
            dict(critic=CriticSettings(warmup_steps=-1)),
            'warmup_steps is -1, wanted at least 0',
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(changes, named):
  with pytest.raises(ConfigError, match=named):
    resolve(dataclasses.replace(TrainSettings(), **changes), 'train')


def test_memory_of_critic_and_reference_is_counted():
  size = 4 * sum(x.size for x in jax.tree.leaves(host_params()))
  plain = memory.estimate(CONFIG, settings(), mesh(1), RULES)
  counters = 4 * 6  # scalars of optimizer and counters
  assert abs(plain.roles['policy'] - 3 * size) <= counters
  assert plain.gradients == size
  chosen = presets.preset('ppo', longest=6)
  loss = dataclasses.replace(chosen.loss, kl_coefficient=0.1)
  asked = settings(loss, chosen.advantages)
  full = memory.estimate(CONFIG, asked, mesh(1), RULES)
  assert full.roles['reference'] == size
  assert full.roles['critic'] > 2.5 * size
  assert full.total > plain.total + 3 * size
  shared = memory.estimate(CONFIG, asked, mesh(2), RULES)
  assert shared.total < 0.75 * full.total
  stats = {'bytes_limit': full.total + 100, 'bytes_in_use': 100}
  memory.require_room(full, stats, 'chip')
  stats['bytes_in_use'] += 1
  with pytest.raises(ConfigError, match='config.train needs .* on chip .*most'):
    memory.require_room(full, stats, 'chip')
  memory.require_room(full, stats, 'chip', held=1)


def test_moments_on_the_host_are_not_counted_between_steps():
  size = 4 * sum(x.size for x in jax.tree.leaves(host_params()))
  plain = memory.estimate(CONFIG, settings(), mesh(1), RULES)
  assert plain.offloaded == 0
  assert plain.resting == plain.total - plain.gradients
  asked = dataclasses.replace(settings(), offload_optimizer=True)
  away = memory.estimate(CONFIG, asked, mesh(1), RULES)
  assert away.total == plain.total  # during a step they are back
  assert 2 * size <= away.offloaded <= 2 * size + 4 * 4  # and few scalars
  assert away.resting == plain.resting - away.offloaded
  by_hand = memory.Estimate({'policy': 300, 'critic': 330}, 110, 420)
  assert (by_hand.total, by_hand.resting) == (740, 210)
