"""The schedule by hand and as optax runs it, across a resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.train.optimizer import (
    OptimizerSettings,
    learning_rate,
    make_optimizer,
)


def cosine(**changes):
  values = dict(
      learning_rate=1.0, schedule='cosine', warmup_steps=22, total_steps=220
  )
  return OptimizerSettings(**{**values, **changes})


@pytest.mark.parametrize(
    'step,rate',
    [(0, 0), (11, 0.5), (22, 1), (121, 0.5), (198, 0.0302), (220, 0), (300, 0)],
)
def test_cosine_subtracts_the_warmup_once(step, rate):
  """CASES A18."""
  assert learning_rate(cosine(), step) == pytest.approx(rate, abs=5e-5)


def test_linear_and_constant_by_hand():
  linear = cosine(schedule='linear', final_fraction=0.1)
  assert learning_rate(linear, 121) == pytest.approx(0.55)
  assert learning_rate(linear, 400) == pytest.approx(0.1)
  constant = cosine(schedule='constant', learning_rate=3e-4)
  assert learning_rate(constant, 11) == pytest.approx(1.5e-4)
  assert learning_rate(constant, 9999) == pytest.approx(3e-4)
  assert learning_rate(cosine(warmup_steps=0), 0) == 1.0


def test_traced_schedule_equals_the_plain_one():
  traced = jax.jit(lambda step: learning_rate(cosine(), step))
  for step in (0, 11, 22, 121, 198, 220):
    np.testing.assert_allclose(
        traced(jnp.int32(step)), learning_rate(cosine(), step), atol=1e-6
    )


def test_resume_continues_the_schedule():
  """CASES A18: with unit gradients Adam's step is the learning rate."""
  settings = cosine(
      warmup_steps=4, total_steps=20, weight_decay=0.0, epsilon=1e-30
  )
  optimizer = make_optimizer(settings)
  update = jax.jit(optimizer.update)
  params = {'a': jnp.ones(())}

  def run(state, steps):
    moved = []
    for _ in range(steps):
      change, state = update({'a': jnp.ones(())}, state, params)
      moved.append(-float(change['a']))
    return moved, state

  whole, _ = run(optimizer.init(params), 12)
  before, state = run(optimizer.init(params), 7)
  saved = jax.tree.map(np.asarray, state)
  after, _ = run(saved, 5)
  assert before + after == whole
  wanted = [learning_rate(settings, s) for s in range(12)]
  np.testing.assert_allclose(whole, wanted, atol=1e-5)


@pytest.mark.parametrize(
    'field,value',
    [
        ('learning_rate', -1.0),
        ('beta1', 1.0),
        ('epsilon', 0.0),
        ('gradient_clip', 0.0),
        ('final_fraction', 1.5),
        ('warmup_steps', 220),
    ],
)
def test_bad_settings_are_named(field, value):
  with pytest.raises(ConfigError, match=rf'train\.{field} is {value}'):
    cosine(**{field: value}).validate('train')
