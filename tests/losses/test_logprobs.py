"""Log-probs of tokens against hand-worked numbers and a slow plain version."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.losses import logprobs, supervised
from tests.closeness import assert_close

# Compiled once a shape, where eager operations would be compiled one by one.
token_logps = jax.jit(logprobs.token_logps)

_LOG_SOFTMAX_420 = -0.142932  # log_softmax([4, 2, 0])[0]


def _plain(logits, ids, segment_ids, temperatures):
  """One token after the other, in float64."""
  rows, tokens = ids.shape
  logps, entropy = np.zeros((rows, tokens)), np.zeros((rows, tokens))
  for b in range(rows):
    for t in range(1, tokens):
      if segment_ids[b, t] == 0 or segment_ids[b, t] != segment_ids[b, t - 1]:
        continue
      scaled = logits[b, t - 1].astype(np.float64) / (temperatures[b, t] or 1)
      logp = scaled - np.log(np.exp(scaled).sum())
      logps[b, t] = logp[ids[b, t]]
      entropy[b, t] = -(np.exp(logp) * logp).sum()
  return logps, entropy


@pytest.fixture(scope='module')
def packed():
  """Two rows: segments of 3 and 4 with padding of 1; one segment of 8."""
  random = np.random.default_rng(0)
  return dict(
      logits=random.normal(size=(2, 8, 5), scale=2).astype(np.float32),
      ids=random.integers(0, 5, (2, 8)).astype(np.int32),
      segment_ids=np.array([[1, 1, 1, 2, 2, 2, 2, 0], [1] * 8], np.int32),
      temperatures=random.choice([0.5, 1.0, 1.5], (2, 8)).astype(np.float32),
  )


def test_temperature_divides_before_the_softmax():
  """Case A1."""
  logits = jnp.array([[[2.0, 1.0, 0.0], [9.0, 9.0, 9.0]]])
  logps, _ = token_logps(
      logits, jnp.array([[1, 0]]), jnp.ones((1, 2), int), jnp.full((1, 2), 0.5)
  )
  np.testing.assert_allclose(logps, [[0.0, _LOG_SOFTMAX_420]], atol=1e-5)


def test_temperature_is_that_of_the_predicted_token():
  logits = jnp.array([[[2.0, 1.0, 0.0]] * 2])
  temperatures = jnp.array([[7.0, 0.5]])
  logps, _ = token_logps(
      logits, jnp.array([[1, 0]]), jnp.ones((1, 2), int), temperatures
  )
  np.testing.assert_allclose(logps[0, 1], _LOG_SOFTMAX_420, atol=1e-5)


def test_temperature_zero_counts_as_one(packed):
  at = {
      t: token_logps(
          **{**packed, 'temperatures': np.full((2, 8), t, np.float32)}
      )[0]
      for t in (0.0, 1.0)
  }
  np.testing.assert_array_equal(at[0.0], at[1.0])


def test_agrees_with_the_plain_version(packed):
  logps, entropy = token_logps(**packed)
  plain_logps, plain_entropy = _plain(**packed)
  np.testing.assert_allclose(logps, plain_logps, atol=2e-6)
  np.testing.assert_allclose(entropy, plain_entropy, atol=2e-6)
  assert logps.dtype == entropy.dtype == jnp.float32


def test_log_probs_at_temperature_one_are_caught(packed):
  """Planted fault: the trainer forgets the temperature."""
  plain, _ = _plain(**packed)
  faulty = {**packed, 'temperatures': np.ones((2, 8), np.float32)}
  gap = lambda inputs: np.abs(token_logps(**inputs)[0] - plain).mean()
  assert gap(packed) < 1e-4
  assert gap(faulty) > 0.05


def test_first_tokens_and_padding_have_zero(packed):
  logps, entropy = token_logps(**packed)
  expected = [[0, 1, 1, 0, 1, 1, 1, 0], [0] + [1] * 7]
  np.testing.assert_array_equal(np.asarray(logps) != 0, expected)
  np.testing.assert_array_equal(np.asarray(entropy) != 0, expected)


def test_neighbours_in_a_row_do_not_matter(packed):
  """The second segment alone in a row has the same log-probs."""
  part = {k: v[:1, 3:7] for k, v in packed.items()}
  alone = token_logps(**part)[0]
  np.testing.assert_allclose(
      alone, token_logps(**packed)[0][:1, 3:7], atol=1e-6
  )


def test_uniform_logits_have_the_entropy_of_the_vocabulary():
  _, entropy = token_logps(
      jnp.zeros((1, 2, 8)),
      jnp.zeros((1, 2), int),
      jnp.ones((1, 2), int),
      jnp.ones((1, 2)),
  )
  np.testing.assert_allclose(entropy, [[0.0, np.log(8)]], rtol=1e-6)


def test_nan_logits_that_predict_nothing_touch_nothing(packed):
  """Attention over nothing but padding leaves NaN in padded rows."""

  def loss(logits):
    inputs = {**packed, 'logits': logits}
    logps, entropy = token_logps(**inputs)
    return jnp.sum(logps) + jnp.sum(entropy)

  step = jax.jit(jax.value_and_grad(loss))
  poisoned = packed['logits'].copy()
  poisoned[0, [2, 6, 7]] = np.nan  # ends of both segments, padding
  poisoned[1, 7] = np.inf
  value, gradient = step(jnp.asarray(poisoned))
  clean, clean_gradient = step(jnp.asarray(packed['logits']))
  assert value == clean
  np.testing.assert_array_equal(gradient, clean_gradient)
  assert not np.any(np.asarray(gradient)[0, [2, 6, 7]])


def test_a_ruled_out_token_leaves_entropy_and_gradient_finite():
  def entropy(logits):
    _, entropy = token_logps(
        logits[None],
        jnp.array([[0, 1]]),
        jnp.ones((1, 2), int),
        jnp.ones((1, 2)),
    )
    return entropy[0, 1]

  logits = jnp.array([[1.0, 0.0, -jnp.inf], [0.0, 0.0, 0.0]])
  value, gradient = jax.jit(jax.value_and_grad(entropy))(logits)
  p = 1 / (1 + np.exp(-1))
  expected = -p * np.log(p) - (1 - p) * np.log(1 - p)
  np.testing.assert_allclose(value, expected, rtol=1e-6)
  assert np.all(np.isfinite(gradient))


def _taught(mask, ids, segment_ids):
  """Positions whose prediction gets a gradient from the supervised loss."""

  def loss(logits):
    logps, _ = token_logps(logits, ids, segment_ids, jnp.ones(ids.shape))
    return supervised.sft_loss(logps, mask, denominator=mask.sum())

  gradient = jax.jit(jax.grad(loss))(jnp.zeros((*ids.shape, 8)))
  return np.any(np.asarray(gradient) != 0, axis=-1)


# Case A6: pad id and end id are both 0. Prompt [3], answer [5, 7, 0], padding.
_IDS = jnp.array([[3, 5, 7, 0, 0, 0]])
_SEGMENT_IDS = jnp.array([[1, 1, 1, 1, 0, 0]])
_MASK = np.array([[0, 1, 1, 1, 0, 0]], np.float32)


def test_end_token_is_learnt_where_it_equals_padding():
  taught = _taught(_MASK, _IDS, _SEGMENT_IDS)
  # The logits one position earlier predict each token of the answer.
  np.testing.assert_array_equal(taught, [[1, 1, 1, 0, 0, 0]])


@pytest.mark.parametrize('shift', [-1, 1])
def test_a_mask_shifted_by_one_is_caught(shift):
  """Planted fault: the answer's own tokens are no longer what is taught."""
  right = _taught(_MASK, _IDS, _SEGMENT_IDS)
  faulty = _taught(np.roll(_MASK, shift, axis=1), _IDS, _SEGMENT_IDS)
  assert not np.array_equal(faulty, right)


_INPUTS = ('ids', 'segment_ids', 'temperatures')
_CHUNKS = (1, 3, 4, 7, 8)  # of rows of 8; 3 and 7 leave spare places


@pytest.fixture(scope='module')
def hidden(packed):
  """States of width 6, an unembedding, and a mask that rows fill unevenly."""
  random = np.random.default_rng(1)
  rest = {name: packed[name] for name in _INPUTS}
  return dict(
      rest,
      states=random.normal(size=(2, 8, 6)).astype(np.float32),
      matrix=random.normal(size=(6, 5)).astype(np.float32),
      mask=np.array([[0, 0, 1, 0, 1, 0, 0, 0], [0] + [1] * 7], np.float32),
  )


def _taught_states(matrix, states, mask, chunk, pieces, **inputs):
  """A loss with weights of its own for each token; values come along."""
  logps, entropy = logprobs.masked_logps(
      lambda x: x @ matrix,
      states,
      **inputs,
      mask=mask,
      chunk=chunk,
      pieces=pieces,
  )
  weights = jnp.arange(1.0, 17.0).reshape(2, 8)
  return jnp.sum(weights * logps - 0.3 * weights * entropy), (logps, entropy)


_by_chunk = jax.jit(
    jax.value_and_grad(_taught_states, argnums=(0, 1), has_aux=True),
    static_argnames=('chunk', 'pieces'),
)


def _plain_by_chunk(matrix, states, mask, **inputs):
  def loss(matrix, states):
    scores = token_logps(states @ matrix, **inputs)
    logps, entropy = (jnp.where(mask > 0, s, 0.0) for s in scores)
    weights = jnp.arange(1.0, 17.0).reshape(2, 8)
    return jnp.sum(weights * logps - 0.3 * weights * entropy), (logps, entropy)

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(matrix, states)


def _by_chunk_of(hidden, chunk, pieces=1):
  matrix, states, mask = (hidden[k] for k in ('matrix', 'states', 'mask'))
  rest = {name: hidden[name] for name in _INPUTS}
  return _by_chunk(matrix, states, mask, chunk=chunk, pieces=pieces, **rest)


@pytest.mark.parametrize(
    'chunk, pieces', [*((chunk, 1) for chunk in _CHUNKS), (3, 2), (1, 4)]
)
def test_chunks_have_the_value_and_gradient_of_all_logits(
    hidden, chunk, pieces
):
  rest = {name: hidden[name] for name in _INPUTS}
  plain = _plain_by_chunk(
      hidden['matrix'], hidden['states'], hidden['mask'], **rest
  )
  found = _by_chunk_of(hidden, chunk, pieces)
  assert_close(found, plain, relative=2e-6)  # the loss is -203
  logps = np.asarray(found[0][1][0])
  np.testing.assert_array_equal(logps != 0, hidden['mask'] > 0)


def test_a_chunk_left_out_is_caught(hidden):
  """Planted fault: the row with most loss tokens loses its last chunk."""
  short = {**hidden, 'mask': hidden['mask'] * (np.arange(8) < 7)}
  whole, faulty = _by_chunk_of(hidden, 4), _by_chunk_of(short, 4)
  assert not np.allclose(whole[1][0], faulty[1][0], atol=2e-5)


def test_chunks_need_less_memory_than_all_logits():
  rows, tokens, width, vocabulary = 4, 64, 8, 4096
  shape = lambda dtype, *s: jax.ShapeDtypeStruct(s, dtype)
  whole = shape(jnp.int32, rows, tokens)
  inputs = dict(
      matrix=shape(jnp.float32, width, vocabulary),
      states=shape(jnp.float32, rows, tokens, width),
      mask=shape(jnp.float32, rows, tokens),
      ids=whole,
      segment_ids=whole,
      temperatures=shape(jnp.float32, rows, tokens),
  )

  def loss(matrix, states, mask, chunk, **rest):
    logps, entropy = logprobs.masked_logps(
        lambda x: x @ matrix, states, **rest, mask=mask, chunk=chunk
    )
    return jnp.sum(logps + entropy)

  gradient = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnames='chunk')

  def bytes_needed(chunk):
    compiled = gradient.lower(
        inputs['matrix'], inputs['states'], inputs['mask'], chunk=chunk,
        **{name: inputs[name] for name in _INPUTS},
    ).compile()  # fmt: skip
    return compiled.memory_analysis().temp_size_in_bytes

  logits = 4 * rows * tokens * vocabulary
  assert bytes_needed(tokens) >= logits
  assert bytes_needed(8) < logits


def test_half_precision_logits_are_taken_to_float32_first(packed):
  half = {**packed, 'logits': jnp.asarray(packed['logits'], jnp.bfloat16)}
  logps, _ = token_logps(**half)
  exact = {**packed, 'logits': np.asarray(half['logits'], np.float32)}
  np.testing.assert_allclose(logps, _plain(**exact)[0], atol=2e-6)
  assert logps.dtype == jnp.float32
