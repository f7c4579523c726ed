"""KL estimators against hand-worked numbers, an exact KL and case A2."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.losses import kl


def test_hand_worked_numbers():
  logps, reference = jnp.array([-1.0]), jnp.array([-1.5])  # d = 0.5
  np.testing.assert_allclose(kl.k1(logps, reference), [0.5])
  np.testing.assert_allclose(kl.k2(logps, reference), [0.125])
  np.testing.assert_allclose(kl.k3(logps, reference), [0.10653066], rtol=1e-5)


def test_k3_keeps_small_differences():
  """exp(-d) - 1 + d loses them in float32; d²/2 to first order."""
  np.testing.assert_allclose(
      kl.k3(jnp.array([1e-3]), jnp.array([0.0])), [4.998334e-07], rtol=1e-3
  )


def _distributions():
  random = np.random.default_rng(1)
  logits, other = jnp.asarray(random.normal(size=(2, 6)), jnp.float32)
  return logits, jax.nn.log_softmax(other)


@pytest.mark.parametrize('kind', ['k1', 'k3'])
def test_mean_over_the_policy_is_the_kl(kind):
  logits, reference = _distributions()
  logps = jax.nn.log_softmax(logits)
  exact = jnp.sum(jnp.exp(logps) * (logps - reference))
  estimates = kl.estimate(kind, logps, reference, jnp.ones(6))
  np.testing.assert_allclose(
      jnp.sum(jnp.exp(logps) * estimates), exact, rtol=1e-5
  )


def test_mean_gradients_are_what_the_docstring_says():
  logits, reference = _distributions()
  probabilities = jax.nn.softmax(logits)

  def mean_gradient(kind):
    def surrogate(logits):
      logps = jax.nn.log_softmax(logits)
      estimates = kl.estimate(kind, logps, reference, jnp.ones(6))
      return jnp.sum(probabilities * estimates)

    return jax.grad(surrogate)(logits)

  def forward(logits):
    logps = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(logps) * (logps - reference))

  def backward(logits):
    logps = jax.nn.log_softmax(logits)
    return jnp.sum(jnp.exp(reference) * (reference - logps))

  np.testing.assert_allclose(mean_gradient('k1'), np.zeros(6), atol=1e-6)
  np.testing.assert_allclose(
      mean_gradient('k2'), jax.grad(forward)(logits), atol=1e-6
  )
  np.testing.assert_allclose(
      mean_gradient('k3'), jax.grad(backward)(logits), atol=1e-6
  )


@pytest.mark.parametrize('kind', ['k1', 'k2', 'k3'])
def test_masked_nan_leaks_into_neither_value_nor_gradient(kind):
  """Case A2: equal to the sequence without the masked token."""

  def total(logps, reference, mask):
    return jnp.sum(kl.estimate(kind, logps, reference, mask))

  value, gradient = jax.value_and_grad(total)(
      jnp.array([-1.0, jnp.nan, -2.0]),
      jnp.array([-1.1, -jnp.inf, -2.0]),
      jnp.array([1, 0, 1]),
  )
  short, short_gradient = jax.value_and_grad(total)(
      jnp.array([-1.0, -2.0]), jnp.array([-1.1, -2.0]), jnp.ones(2)
  )
  np.testing.assert_allclose(value, short, rtol=1e-6)
  np.testing.assert_allclose(
      gradient, [short_gradient[0], 0.0, short_gradient[1]], rtol=1e-6
  )


def test_the_reference_gets_no_gradient():
  gradient = jax.grad(
      lambda r: jnp.sum(kl.estimate('k3', jnp.zeros(2), r, jnp.ones(2)))
  )(jnp.array([-1.0, 1.0]))
  np.testing.assert_array_equal(gradient, [0.0, 0.0])


def test_k3_does_not_overflow():
  value, gradient = jax.value_and_grad(
      lambda x: jnp.sum(kl.k3(x, jnp.zeros(1)))
  )(jnp.array([-1e3]))
  assert np.isfinite(value) and np.all(np.isfinite(gradient))


def test_an_unknown_kind_is_refused():
  with pytest.raises(ValueError, match="kind is 'k4'"):
    kl.estimate('k4', jnp.zeros(1), jnp.zeros(1), jnp.ones(1))
