"""DPO, IPO and the reward model over the train step: CASES A3 for pairs."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, parameters
from areal_jax.train import packing
from areal_jax.train import preferences as lib
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.preferences import PreferenceSettings
from areal_jax.train.step import TrainStep
from tests.train.test_step import (
    CONFIG,
    RULES,
    assert_same_sums,
    host_params,
    train_mesh,
)

# Four pairs: odd answers are preferred to even ones.
PAIRS = [
    ([1, 2], [3, 5], [4]),
    ([2], [7, 3, 9], [6, 8]),
    ([4, 4, 4], [5], [2, 2, 2, 2]),
    ([9, 1], [11, 1], [10, 0]),
]
SETTINGS = PreferenceSettings(
    steps=8,
    batch=4,
    report_every=2,
    beta=0.5,
    packing=PackingSettings(row_tokens=16, rows=2),
    optimizer=OptimizerSettings(learning_rate=1e-2, weight_decay=0.0),
)


def placed(params, mesh, kind='policy'):
  shardings = (
      parameters.param_shardings(CONFIG, mesh, RULES)
      if kind == 'policy'
      else heads.param_shardings(CONFIG, kind, mesh, RULES)
  )
  return jax.device_put(params, shardings)


@functools.cache
def scorer():
  return jax.device_get(
      heads.with_head(CONFIG, 'reward', host_params(), 0, None, None)
  )


def test_a_pair_lies_in_one_row_preferred_first():
  (packed,) = packing.pack_pairs(PAIRS[:2], PackingSettings(16, 1))
  np.testing.assert_array_equal(
      packed.ids[0], [1, 2, 3, 5, 1, 2, 4, 2, 7, 3, 9, 2, 6, 8, 0, 0]
  )
  np.testing.assert_array_equal(
      packed.segment_ids[0], [1] * 4 + [2] * 3 + [3] * 4 + [4] * 3 + [0] * 2
  )
  np.testing.assert_array_equal(
      packed.loss_mask[0], [0, 0, 1, 1, 0, 0, 1, 0, 1, 1, 1, 0, 1, 1, 0, 0]
  )
  np.testing.assert_array_equal(
      packed.positions[0], [0, 1, 2, 3, 0, 1, 2, 0, 1, 2, 3, 0, 1, 2, 0, 0]
  )
  chosen, rejected, pairs = lib.by_pair(
      np.arange(16.0)[None], packed.loss_mask, packed.segment_ids
  )
  np.testing.assert_array_equal(chosen[0, :3], [5, 8 + 9 + 10, 0])
  np.testing.assert_array_equal(rejected[0, :3], [6, 12 + 13, 0])
  np.testing.assert_array_equal(pairs[0], [1, 1] + [0] * 6)
  with pytest.raises(ValueError, match='pair 1 has 1 prompt and .3, 0. answer'):
    packing.pack_pairs([PAIRS[0], ([2], [7, 3, 9], [])], SETTINGS.packing)
  with pytest.raises(ValueError, match='packing.row_tokens=6 together'):
    packing.pack_pairs(PAIRS, PackingSettings(6, 1))


def gradient_of(step, params, parts):
  state = step.initial_state(params)
  batches = [
      step.place(m, 4.0, 0)
      for part in parts
      for m in packing.pack_pairs([PAIRS[i] for i in part], SETTINGS.packing)
  ]
  total = step.accumulate(state, batches)
  return jax.device_get(total)


@pytest.mark.parametrize('kind', ['policy', 'reward'])
def test_gradient_does_not_depend_on_the_cut(kind):
  objective, params = lib.reward_objective, scorer()
  if kind == 'policy':
    objective, params = lib.preference_objective(SETTINGS), host_params()
  found = []
  for fsdp, parts in ((1, [range(4)]), (2, [[0], [1, 2], [3]])):
    mesh = train_mesh(fsdp)
    step = TrainStep(
        CONFIG,
        objective,
        SETTINGS.optimizer,
        mesh,
        RULES,
        SETTINGS.packing,
        kind=kind,
        reference=CONFIG if kind == 'policy' else None,
    )
    found.append(gradient_of(step, placed(params, mesh, kind), parts))
  assert found[0]['stats']['pairs_sum'] == 4
  # The reference is the policy itself here, so the margin is 0.
  if kind == 'policy':
    np.testing.assert_allclose(found[0]['loss'], np.log(2), rtol=1e-5)
  assert_same_sums(*found)


def test_preferred_answers_become_likelier_than_the_others():
  mesh, losses = train_mesh(1), []
  trained = lib.train_preferences(
      CONFIG,
      placed(host_params(), mesh),
      PAIRS,
      SETTINGS,
      mesh,
      RULES,
      lambda done, loss: losses.append((done, loss)),
  )
  assert [done for done, _ in losses] == [2, 4, 6, 8]
  assert losses[-1][1] < 0.5 < losses[0][1] <= np.log(2) + 1e-5
  assert set(trained) == set(host_params())


def test_ipo_stops_at_its_margin():
  mesh, losses = train_mesh(1), []
  settings = dataclasses.replace(SETTINGS, kind='ipo', steps=30)
  lib.train_preferences(
      CONFIG,
      placed(host_params(), mesh),
      PAIRS,
      settings,
      mesh,
      RULES,
      lambda done, loss: losses.append(loss),
  )
  # At first (0 - 1 / (2 β))² = 1, then every margin goes to 1 and no further.
  assert losses[0] > 0.5 and losses[-1] < 0.05


def test_reward_model_scores_preferred_answers_higher():
  mesh = train_mesh(1)
  trained = lib.train_reward_model(
      CONFIG, placed(scorer(), mesh, 'reward'), PAIRS, SETTINGS, mesh, RULES
  )
  packed = packing.pack_pairs(PAIRS, SETTINGS.packing)
  for m in packed:
    said = heads.scores(
        CONFIG, jax.device_get(trained), m.ids, m.positions, m.segment_ids
    )
    chosen, rejected, pairs = lib.by_pair(
        said, m.segment_ids > 0, m.segment_ids
    )
    assert np.all(np.asarray(chosen > rejected)[np.asarray(pairs) > 0])


def test_wrong_settings_and_pairs_are_refused():
  mesh = train_mesh(1)

  def train(settings, pairs=PAIRS):
    lib.train_preferences(CONFIG, None, pairs, settings, mesh, Rules())

  with pytest.raises(ConfigError, match='preferences.beta is 0, wanted more'):
    train(dataclasses.replace(SETTINGS, beta=0))
  with pytest.raises(ValueError, match='3 pairs, wanted at least a batch of 4'):
    train(SETTINGS, PAIRS[:3])
