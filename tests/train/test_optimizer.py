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


# Kinds.

MATRICES = {'blocks': {'gate': (2, 128, 160)}, 'embedding': (16, 4)}
SIDES = {'blocks': {'gate': ((1,), (2,))}, 'embedding': None}


def kind_of(kind, **changes):
  values = dict(learning_rate=0.01, weight_decay=0.0, gradient_clip=np.inf)
  return OptimizerSettings(kind=kind, **{**values, **changes})


def drawn(seed):
  random = np.random.default_rng(seed)
  return jax.tree.map(
      lambda shape: jnp.asarray(random.normal(size=shape), jnp.float32),
      MATRICES,
      is_leaf=lambda x: isinstance(x, tuple),
  )


def one_update(settings, gradient, params):
  optimizer = make_optimizer(settings, SIDES)
  return jax.jit(optimizer.update)(gradient, optimizer.init(params), params)


def test_adafactor_keeps_a_row_and_a_column():
  params = drawn(0)
  _, state = one_update(kind_of('adafactor'), drawn(1), params)
  shapes = sorted(x.shape for x in jax.tree.leaves(state) if x.size > 1)
  assert shapes == [(2, 128), (2, 160), (16, 4)]
  _, adam = one_update(kind_of('adamw'), drawn(1), params)
  size = lambda tree: sum(x.size for x in jax.tree.leaves(tree))
  assert size(state) < size(adam) / 100


def test_muon_makes_every_direction_of_a_matrix_equally_large():
  """Of each layer by itself, at the RMS of AdamW; the rest is AdamW."""
  gradient = drawn(1)
  scale = np.array([1.0, 100.0])[:, None, None]
  gradient['blocks']['gate'] = gradient['blocks']['gate'] * scale
  changes, state = one_update(kind_of('muon'), gradient, drawn(0))
  plain, _ = one_update(kind_of('adamw'), gradient, drawn(0))
  np.testing.assert_allclose(
      changes['embedding'], plain['embedding'], rtol=1e-5
  )
  for change, own in zip(changes['blocks']['gate'], gradient['blocks']['gate']):
    sizes = np.linalg.svd(change, compute_uv=False)
    # Newton-Schulz ends between 0.7 and 1.2; 0.2 sqrt(160) times the rate.
    sizes = sizes / (0.01 * 0.2 * np.sqrt(160))
    assert 0.6 < sizes.min() and sizes.max() < 1.3
    spread = np.linalg.svd(own, compute_uv=False)
    assert spread.max() / spread.min() > 5
    # Downhill, and neither layer's scale matters.
    assert np.sum(change * own) < 0
  rms = np.sqrt(np.mean(np.square(changes['blocks']['gate']), axis=(1, 2)))
  np.testing.assert_allclose(rms, 0.01 * 0.2, rtol=0.2)
  momenta = [x.shape for x in jax.tree.leaves(state) if x.ndim == 3]
  assert momenta == [(2, 128, 160)]  # one, and not AdamW's two


def test_update_of_stacked_layers_as_one_matrix_is_seen():
  """The fault that the test above is about: layers orthogonal to another."""
  wrong = {'blocks': {'gate': ((0, 1), (2,))}, 'embedding': None}
  optimizer = make_optimizer(kind_of('muon'), wrong)
  params = drawn(0)
  update = jax.jit(optimizer.update)
  changes, _ = update(drawn(1), optimizer.init(params), params)
  sizes = np.linalg.svd(changes['blocks']['gate'][0], compute_uv=False)
  assert sizes.max() / sizes.min() > 3


@pytest.mark.parametrize('kind', ['adamw', 'adafactor', 'muon'])
def test_decay_is_on_every_parameter_and_follows_the_rate(kind):
  params = drawn(0)
  zeros = jax.tree.map(jnp.zeros_like, params)
  settings = kind_of(kind, weight_decay=0.5)
  changes, _ = one_update(settings, zeros, params)
  jax.tree.map(
      lambda change, x: np.testing.assert_allclose(
          change, -0.01 * 0.5 * x, rtol=1e-5
      ),
      changes,
      params,
  )


@pytest.mark.parametrize('kind', ['adamw', 'adafactor', 'muon'])
def test_warm_up_and_clipping_hold_for_every_kind(kind):
  settings = kind_of(kind, warmup_steps=2, gradient_clip=1.0)
  optimizer = make_optimizer(settings, SIDES)
  update, params = jax.jit(optimizer.update), drawn(0)
  state, norms = optimizer.init(params), []
  for _ in range(3):
    changes, state = update(drawn(1), state, params)
    norms.append(float(np.linalg.norm(changes['blocks']['gate'])))
  # Rates 0, 1/2, 1 of the peak; the gradient is the same each time.
  assert norms[0] == 0 and norms[2] == pytest.approx(2 * norms[1], rel=0.1)
  # Clipping comes first: ten times the gradient is the same update.
  large = jax.tree.map(lambda g: 10 * g, drawn(1))
  state = optimizer.init(params)
  changes = [update(g, state, params)[1] for g in (drawn(1), large)]
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-12),
      *changes,
  )


@pytest.mark.parametrize(
    'field,value',
    [
        ('learning_rate', -1.0),
        ('beta1', 1.0),
        ('momentum', 1.0),
        ('epsilon', 0.0),
        ('gradient_clip', 0.0),
        ('final_fraction', 1.5),
        ('warmup_steps', 220),
    ],
)
def test_bad_settings_are_named(field, value):
  with pytest.raises(ConfigError, match=rf'train\.{field} is {value}'):
    cosine(**{field: value}).validate('train')
