"""Each fault planted in what a real engine said, and named."""

import dataclasses

import jax
import numpy as np
import pytest

from areal_jax.doctor.attribution import Paths, attribute
from areal_jax.mesh.rules import Rules
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.rollout.workflow import trajectory
from areal_jax.types import RewardResult, RewardStatus
from tests import records, tiny
from tests.rollout.test_loop import SETTINGS, Running, swap_in_mid_sentence


@pytest.fixture(scope='module')
def engine():
  """An engine that may penalise too."""
  features = SamplingFeatures(penalties=True)
  settings = dataclasses.replace(SETTINGS, sampling=features)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


@pytest.fixture(scope='module')
def paths():
  return paths_of(0, 1)


def paths_of(*versions):
  # Older versions lie on the host.
  weights = {version: tiny.params(version) for version in versions}
  weights |= {v: jax.device_get(weights[v]) for v in versions[:-1]}
  return Paths(
      tiny.config(), weights, mesh=tiny.mesh(), rules=Rules(), length=64
  )


def recorded(request, completion):
  return trajectory(
      records.draw(request.draw_index),
      request.sample,
      request.prompt_ids,
      completion,
      RewardResult(RewardStatus.OK, 1.0),
      temperature=request.sampling.temperature,
      admitted_version=0,
      timestamps={},
  )


def answered(engine, version=0, **sampling):
  requests = [
      tiny.request(f'{i}', range(1, 8), new=20, draw=i, **sampling)
      for i in range(3)
  ]
  with Running(engine, weights=False) as running:
    running.set_weights(version)
    running.submit(*requests)
    answers = running.wait(3)
  return [recorded(r, answers[r.request_id]) for r in requests]


@pytest.fixture(scope='module')
def sharp(engine):
  """Answers at temperature 0.7 under version 1."""
  return answered(engine, version=1, temperature=0.7)


def swapped(engine, swap):
  long, answers, _ = swap_in_mid_sentence(engine, swap)
  return [recorded(r, answers[r.request_id]) for r in long]


def test_sound_engine_has_a_gap_of_numerics_alone(sharp, paths):
  found = attribute(sharp, paths)
  assert found.cause == 'numerics' and found.answers['numerics'] == 3
  assert found.gap < 1e-4
  assert sum(found.parts.values()) == pytest.approx(found.gap, abs=1e-5)


def test_sound_swap_has_a_gap_of_numerics_alone(engine, paths):
  found = attribute(swapped(engine, 'recompute'), paths)
  assert found.cause == 'numerics' and found.gap < 1e-4


def test_logps_before_the_temperature_are_a_sampling_transform(sharp, paths):
  planted = [
      dataclasses.replace(
          t,
          logps=np.where(
              t.versions >= 0, paths.engine(t, temperature=1.0), 0
          ).astype(np.float32),
      )
      for t in sharp
  ]
  found = attribute(planted, paths)
  assert found.cause == 'sampling transform'
  assert found.parts['sampling transform'] == pytest.approx(found.gap, rel=0.01)
  assert found.answers['sampling transform'] == 3


@pytest.mark.parametrize(
    'transform',
    [
        {'top_k': 5},
        {'top_p': 0.83},
        {'min_p': 0.6},
        {'repetition_penalty': 1.2},
        {'frequency_penalty': 0.5},
        {'presence_penalty': 0.77},
    ],
    ids=lambda t: next(iter(t)),
)
def test_narrowed_and_penalised_sampling_is_a_sampling_transform(
    engine, paths, transform
):
  """The engine narrows or penalises; the record has the temperature alone."""
  planted = answered(engine, version=1, temperature=0.9, **transform)
  assert attribute(planted, paths, transforms=[]).gap > 1e-3
  # 0.77 is none of the usual ones: it has to be named.
  named = [transform] if transform == {'presence_penalty': 0.77} else []
  found = attribute(planted, paths, transforms=named)
  assert found.cause == 'sampling transform'
  assert found.answers['sampling transform'] == 3
  if named:
    assert attribute(planted, paths).answers['sampling transform'] < 3


def test_what_narrowed_a_distribution_is_found_by_its_number(engine, paths):
  for name, value, error in (
      ('top_k', 5, 0), ('top_p', 0.83, 0.05), ('min_p', 0.6, 0.03)
  ):  # fmt: skip
    for record in answered(engine, version=1, **{name: value}):
      (got,) = [n[name] for n in paths.narrowings(record) if name in n]
      assert abs(got - value) <= error, (name, got)


def test_labels_one_version_off_are_stale_weights(engine, paths):
  planted = [
      dataclasses.replace(t, versions=np.where(t.versions >= 0, 1, -1))
      for t in answered(engine, version=0)
  ]
  found = attribute(planted, paths)
  assert found.cause == 'stale weights'
  assert found.answers['stale weights'] == 3


def test_labels_three_versions_off_are_stale_weights(engine):
  planted = [
      dataclasses.replace(t, versions=np.where(t.versions >= 0, 4, -1))
      for t in answered(engine, version=1)
  ]
  several = paths_of(1, 2, 3, 4)
  found = attribute(planted, several)
  assert found.cause == 'stale weights'
  assert found.answers['stale weights'] == 3
  several.versions = (3, 4)  # without the weights of then nobody can tell
  assert attribute(planted, several).cause == 'wrong tokens'


def test_caches_that_a_swap_has_kept_are_a_stale_cache(engine, paths):
  found = attribute(swapped(engine, 'keep'), paths)
  assert found.cause == 'stale cache'
  assert found.answers['stale cache'] == 2


def test_prompt_cached_under_old_weights_is_a_stale_cache(sharp, paths):
  # CASES A9: the prefix cache survives a weight update.
  planted = [
      dataclasses.replace(
          t,
          logps=np.where(t.versions >= 0, paths.kept(t, prompt=0), 0).astype(
              np.float32
          ),
      )
      for t in sharp
  ]
  assert attribute(planted, paths).cause == 'stale cache'


def test_ids_that_were_not_sampled_are_wrong_tokens(sharp, paths):
  # CASES A25: encoding a text again gives other ids.
  planted = []
  for t in sharp:
    ids = t.ids.copy()
    ids[10:14] = (ids[10:14] + 3) % tiny.VOCABULARY
    planted.append(dataclasses.replace(t, ids=ids))
  found = attribute(planted, paths)
  assert found.cause == 'wrong tokens'
  assert 'wrong tokens' in str(found) and 'nats a token' in str(found)


def test_a_fault_in_one_answer_of_three_is_told_apart(sharp, paths):
  ids = sharp[0].ids.copy()
  ids[12] = (ids[12] + 5) % tiny.VOCABULARY
  found = attribute([dataclasses.replace(sharp[0], ids=ids), *sharp[1:]], paths)
  assert found.answers['wrong tokens'] == 1 and found.answers['numerics'] == 2
