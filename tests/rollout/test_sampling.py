"""Tokens and their log-probs: CASES A1, keys, top-k and top-p."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rollout import sampling
from areal_jax.types import Purpose
from tests import tiny

LOGITS = np.asarray([2.0, 1.0, 0.0], np.float32)


@jax.jit
def _sample(logits, streams, positions, temperature, top_k, top_p, forbidden):
  return sampling.sample(
      logits,
      streams,
      positions,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      forbidden=forbidden,
  )


def draw(
    logits=LOGITS, *, n=4000, temperature=1.0, top_k=0, top_p=1.0, forbidden=()
):
  """n draws at n positions of one stream."""
  mask = np.zeros((n, len(logits)), bool)
  mask[:, list(forbidden)] = True
  stream = sampling.stream_key(jnp.zeros(6, jnp.uint32))
  tokens, logps = _sample(
      jnp.tile(jnp.asarray(logits), (n, 1)),
      jnp.tile(stream, (n, 1)),
      jnp.arange(n),
      jnp.full(n, temperature),
      jnp.full(n, top_k, jnp.int32),
      jnp.full(n, top_p),
      mask,
  )
  return np.asarray(tokens), np.asarray(logps)


def test_logp_is_that_of_the_tempered_distribution():
  tokens, logps = draw(temperature=0.5)
  # CASES A1: log_softmax([4, 2, 0])[0]; at temperature 1 it were -0.4076.
  np.testing.assert_allclose(logps[tokens == 0], -0.1429, atol=1e-4)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 1.5])
def test_frequencies_follow_the_distribution(temperature):
  tokens, _ = draw(temperature=temperature)
  expected = jax.nn.softmax(LOGITS / temperature)
  seen = np.bincount(tokens, minlength=3) / len(tokens)
  np.testing.assert_allclose(seen, expected, atol=4 * 0.5 / np.sqrt(4000))


def test_greedy_takes_the_best_and_reports_its_logp_at_temperature_one():
  tokens, logps = draw(temperature=0.0, n=8)
  assert (tokens == 0).all()
  np.testing.assert_allclose(logps, jax.nn.log_softmax(LOGITS)[0], rtol=1e-6)


def test_top_k_draws_from_k_tokens_and_renormalises():
  tokens, logps = draw(top_k=2)
  assert set(tokens) == {0, 1}
  expected = jax.nn.log_softmax(LOGITS[:2])
  np.testing.assert_allclose(logps, np.asarray(expected)[tokens], rtol=1e-5)


def test_top_p_keeps_the_smallest_set_that_reaches_p():
  # softmax: 0.665, 0.245, 0.090; the first two reach 0.9
  tokens, logps = draw(top_p=0.9)
  assert set(tokens) == {0, 1}
  expected = jax.nn.log_softmax(LOGITS[:2])
  np.testing.assert_allclose(logps, np.asarray(expected)[tokens], rtol=1e-5)
  assert set(draw(top_p=0.5)[0]) == {0}
  assert set(draw(top_p=0.95)[0]) == {0, 1, 2}


def test_forbidden_token_is_never_drawn_and_has_no_mass():
  tokens, logps = draw(forbidden=[0])
  assert set(tokens) == {1, 2}
  expected = jax.nn.log_softmax(LOGITS[1:])
  np.testing.assert_allclose(logps, np.asarray(expected)[tokens - 1], rtol=1e-5)


def test_stream_depends_on_each_of_its_names_and_on_nothing_else():
  base = tiny.request(seed=3, draw=4, sample=5)
  changed = [
      tiny.request(seed=4, draw=4, sample=5),
      tiny.request(seed=3, draw=5, sample=5),
      tiny.request(seed=3, draw=4, sample=6),
      dataclasses.replace(base, turn=1),
      dataclasses.replace(base, branch=1),
      dataclasses.replace(base, purpose=Purpose.EVAL),
  ]
  keys = {
      tuple(np.asarray(sampling.stream_key(sampling.stream_words(r))))
      for r in [base, *changed]
  }
  assert len(keys) == 7
  renamed = dataclasses.replace(base, request_id='another attempt')
  np.testing.assert_array_equal(
      sampling.stream_words(renamed), sampling.stream_words(base)
  )
