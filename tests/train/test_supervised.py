"""The warm start learns, reports seldom, and says what is wrong."""

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.train.packing import PackingSettings
from areal_jax.train.supervised import WarmStartSettings, supervised_warm_start

CONFIG = ModelConfig(
    vocab_size=12,
    width=16,
    layers=1,
    heads=2,
    kv_heads=1,
    head_size=8,
    mlp_width=16,
)
# Answer with the successor of the prompt's token, then stop (id 0).
DEMONSTRATIONS = [([11, d], [d + 1, 0]) for d in range(1, 9)]


def settings(**changes):
  values = dict(
      steps=60,
      batch=8,
      report_every=20,
      learning_rate=3e-2,
      warmup_steps=5,
      packing=PackingSettings(row_tokens=16, rows=2),
  )
  return WarmStartSettings(**{**values, **changes})


def warm_start(settings_, params, demonstrations=None, on_report=None):
  if demonstrations is None:
    demonstrations = DEMONSTRATIONS
  mesh = slices.cut(jax.devices(), slices.MeshSettings()).train
  return supervised_warm_start(
      CONFIG, params, demonstrations, settings_, mesh, Rules(), on_report
  )


def test_demonstrations_are_learnt_to_their_end():
  mesh = slices.cut(jax.devices(), slices.MeshSettings()).train
  params = parameters.init_params(CONFIG, 0, mesh, Rules())
  reports = []
  params = warm_start(
      settings(), params, on_report=lambda *report: reports.append(report)
  )
  assert [done for done, _ in reports] == [20, 40, 60]
  assert reports[0][1] > reports[1][1] > reports[2][1]
  ids = np.array([[11, d, d + 1] for d in range(1, 9)])
  positions = np.broadcast_to(np.arange(3), ids.shape)
  logits = jax.jit(
      lambda params: transformer.forward(
          CONFIG, params, ids, positions, np.ones_like(ids)
      )
  )(params)
  np.testing.assert_array_equal(
      np.argmax(logits[:, 1:], -1), [[d + 1, 0] for d in range(1, 9)]
  )


def test_no_steps_leave_the_policy_alone():
  params = {'embedding': np.ones((12, 16))}
  assert warm_start(settings(steps=0), params) is params


def test_bad_input_is_refused_before_any_device_work():
  with pytest.raises(ValueError, match='8 demonstrations.*batch of 9'):
    warm_start(settings(batch=9), {})
  for wrong in (([1], []), ([], [1]), ([1], [2] * 16)):
    with pytest.raises(ValueError, match='demonstration 1 has .*row_tokens=16'):
      warm_start(settings(batch=1), {}, [([1], [2]), wrong])
  with pytest.raises(ConfigError, match='at.batch is 0'):
    settings(batch=0).validate('at')
  with pytest.raises(ConfigError, match='warmup_steps is 60.*total_steps=60'):
    settings(warmup_steps=60).validate('at')
