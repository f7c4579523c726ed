"""Tokens and their log-probs: CASES A1, keys, what shapes a distribution."""

import dataclasses
import functools

import hypothesis
from hypothesis import strategies
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.rollout import sampling
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.types import Purpose, SamplingParams
from tests import tiny
from tests.plain_sampling import plain_logps

LOGITS = np.asarray([2.0, 1.0, 0.0], np.float32)


FEATURES = SamplingFeatures(
    penalties=True, max_logit_bias=3, max_top_logps=6, raw_logps=True
)


@functools.partial(jax.jit, static_argnames='most')
def _sample(
    logits, streams, positions, choice, forbidden, history, lengths, most
):
  active = jnp.ones(len(logits), bool)
  counts = sampling.count(choice, history, *lengths, active, logits.shape[1])
  return sampling.sample(
      logits,
      streams,
      positions,
      choice,
      forbidden=forbidden,
      active=active,
      counts=counts,
      most_top_logps=most,
  )


def draw_slots(logits, asked, histories=None, forbidden=None, most=0):
  """One token a slot, from [S, V] logits and S settings.

  `histories` are (prompt, answer) pairs; what a slot's history holds behind
  its end is noise.
  """
  slots, vocabulary = logits.shape
  histories = histories or [((), ())] * slots
  noise = np.random.default_rng(1).integers(0, vocabulary, (slots, 16))
  for row, (prompt, answer) in zip(noise, histories):
    row[: len(prompt) + len(answer)] = [*prompt, *answer]
  lengths = np.array([[len(p), len(p) + len(a)] for p, a in histories]).T
  stream = sampling.stream_key(jnp.zeros(6, jnp.uint32))
  if forbidden is None:
    forbidden = np.zeros(logits.shape, bool)
  requests = [dataclasses.replace(tiny.request(), sampling=a) for a in asked]
  drawn = _sample(
      np.asarray(logits, np.float32),
      jnp.tile(stream, (slots, 1)),
      jnp.arange(slots),
      sampling.choice_of(FEATURES, slots, requests),
      forbidden,
      noise,
      lengths,
      most,
  )
  return jax.device_get(drawn)


def draw(logits=LOGITS, *, n=4000, forbidden=(), **settings):
  """n draws at n positions of one stream."""
  mask = np.zeros((n, len(logits)), bool)
  mask[:, list(forbidden)] = True
  asked = SamplingParams(1, **settings)
  drawn = draw_slots(np.tile(logits, (n, 1)), [asked] * n, forbidden=mask)
  return drawn.tokens, drawn.logps


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


def test_min_p_keeps_tokens_with_a_share_of_the_best_ones_probability():
  # softmax: 0.665, 0.245, 0.090; shares of the best: 1, 0.368, 0.135
  tokens, logps = draw(min_p=0.3)
  assert set(tokens) == {0, 1}
  expected = jax.nn.log_softmax(LOGITS[:2])
  np.testing.assert_allclose(logps, np.asarray(expected)[tokens], rtol=1e-5)
  assert set(draw(min_p=0.4)[0]) == {0}
  assert set(draw(min_p=0.1)[0]) == {0, 1, 2}
  assert set(draw(min_p=1.0)[0]) == {0}


def test_bias_comes_before_penalties_and_both_before_the_temperature():
  asked = SamplingParams(
      1, temperature=0.5, repetition_penalty=2.0, frequency_penalty=0.5,
      presence_penalty=0.25, logit_bias=((1, 2.0),),
  )  # fmt: skip
  logits = np.array([[2.0, -1.0, 0.5, -1.0]])
  asked = dataclasses.replace(asked, top_logps=4, raw_logps=True)
  drawn = draw_slots(logits, [asked], [((0, 3), (1, 1))], most=4)
  # 0: 2 / 2; 1: (-1 + 2) / 2 - 2 * 0.5 - 0.25; 2: untouched; 3: -1 * 2
  expected = jax.nn.log_softmax(np.array([1.0, -0.75, 0.5, -2.0]) / 0.5)
  assert drawn.top_ids.tolist() == [[0, 2, 1, 3]]
  np.testing.assert_allclose(
      drawn.top_logps[0], expected[drawn.top_ids[0]], rtol=1e-5
  )
  raw = jax.nn.log_softmax(logits[0])[drawn.tokens[0]]
  np.testing.assert_allclose(drawn.raw_logps, [raw], rtol=1e-5)


def test_likeliest_tokens_are_told_and_impossible_ones_have_no_mass():
  asked = SamplingParams(1, temperature=100.0, top_k=2, top_logps=3)
  drawn = draw_slots(np.array([LOGITS]), [asked], most=3)
  assert drawn.top_ids[0, :2].tolist() == [0, 1]
  expected = jax.nn.log_softmax(LOGITS[:2] / 100)
  np.testing.assert_allclose(drawn.top_logps[0, :2], expected, rtol=1e-5)
  assert drawn.top_logps[0, 2] == -np.inf


def some_settings(random: np.random.Generator, vocabulary: int):
  """A slot's settings, each feature used by half of the slots."""

  def maybe(off, on):
    return on if random.random() < 0.5 else off

  ids = random.choice(vocabulary, FEATURES.max_logit_bias, replace=False)
  bias = random.uniform(-3, 3, random.integers(1, len(ids) + 1))
  return SamplingParams(
      1,
      temperature=maybe(1.0, maybe(0.0, random.uniform(0.2, 2))),
      top_k=maybe(0, int(random.integers(1, vocabulary + 3))),
      top_p=maybe(1.0, random.uniform(0.05, 0.99)),
      min_p=maybe(0.0, random.uniform(0.01, 0.9)),
      repetition_penalty=maybe(1.0, random.uniform(0.5, 2)),
      frequency_penalty=maybe(0.0, random.uniform(-1, 1)),
      presence_penalty=maybe(0.0, random.uniform(-1, 1)),
      logit_bias=maybe((), tuple(zip(ids.tolist(), bias.tolist()))),
  )


def some_slots(seed, slots=6, vocabulary=6):
  """Logits, settings, histories and forbidden tokens of slots."""
  random = np.random.default_rng(seed)
  histories = [
      tuple(
          random.integers(0, vocabulary, random.integers(1, 8)).tolist()
          for _ in range(2)
      )
      for _ in range(slots)
  ]
  forbidden = random.random((slots, vocabulary)) < 0.1
  forbidden[:, 0] = False
  return (
      random.normal(0, 2, (slots, vocabulary)),
      [some_settings(random, vocabulary) for _ in range(slots)],
      histories,
      forbidden,
  )


def told_logps(drawn):
  """[S, V] log-probs, put in order of the ids."""
  logps = np.empty_like(drawn.top_logps)
  np.put_along_axis(logps, drawn.top_ids, drawn.top_logps, axis=1)
  return logps


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(strategies.integers(0, 2**32 - 1))
def test_distribution_equals_that_of_the_plain_version(seed):
  logits, asked, histories, forbidden = some_slots(seed)
  # One slot that wants the likeliest is enough for all to be worked out.
  asked[0] = dataclasses.replace(asked[0], top_logps=6, raw_logps=True)
  drawn = draw_slots(logits, asked, histories, forbidden, most=6)
  told = told_logps(drawn)
  for s, settings in enumerate(asked):
    plain = plain_logps(
        logits[s], *histories[s], settings, np.flatnonzero(forbidden[s])
    )
    np.testing.assert_allclose(told[s], plain, atol=1e-4)
    token = drawn.tokens[s]
    np.testing.assert_allclose(drawn.logps[s], plain[token], atol=1e-4)
    if settings.temperature == 0:
      assert plain[token] == plain.max()
    raw = jax.nn.log_softmax(logits[s])[token]
    np.testing.assert_allclose(drawn.raw_logps[s], raw, atol=1e-4)


@pytest.mark.parametrize(
    'fault',
    [
        lambda prompt, answer: ((), answer),  # the prompt is not penalised
        lambda prompt, answer: ((*prompt, *answer), ()),  # nothing is answer
        lambda prompt, answer: (prompt, answer[:-1]),  # one token behind
    ],
)
def test_a_wrongly_counted_history_is_seen(fault):
  asked = SamplingParams(
      1, repetition_penalty=1.5, frequency_penalty=0.3, presence_penalty=0.2,
      top_logps=6,
  )  # fmt: skip
  logits = some_slots(0)[0]
  drawn = draw_slots(logits, [asked] * 6, [((1, 2), (3, 4))] * 6, most=6)
  plain = plain_logps(logits[0], *fault((1, 2), (3, 4)), asked)
  assert np.abs(told_logps(drawn)[0] - plain).max() > 0.01


def test_a_slot_that_uses_nothing_is_untouched_by_those_that_do():
  logits, asked, histories, forbidden = some_slots(3)
  asked[2] = SamplingParams(1)
  forbidden[:] = False
  crowded = draw_slots(logits, asked, histories, forbidden, most=6)
  alone = draw_slots(
      logits, [SamplingParams(1)] * 6, histories, forbidden, most=6
  )
  assert crowded.tokens[2] == alone.tokens[2]
  assert crowded.logps[2] == alone.logps[2]  # bit for bit


def test_engine_without_features_has_neither_arrays_nor_counts_for_them():
  choice = sampling.choice_of(SamplingFeatures(), 4, [tiny.request()])
  assert len(jax.tree.leaves(choice)) == 4
  ones = np.ones(4, np.int32)
  none = sampling.count(choice, np.ones((4, 8), int), ones, ones, ones > 0, 6)
  assert none is None and sampling.counted(none, ones, ones > 0) is None
  assert len(jax.tree.leaves(sampling.blank(SamplingFeatures(), 4, 2))) == 2


@pytest.mark.parametrize(
    'asked, named',
    [
        (
            dict(repetition_penalty=1.2),
            'sampling.repetition_penalty is 1.2, wanted 1:'
            ' rollout.engine.sampling.penalties is off',
        ),
        (dict(presence_penalty=1.0), 'presence_penalty is 1.0, wanted 0'),
        (dict(frequency_penalty=1.0), 'frequency_penalty is 1.0, wanted 0'),
        (dict(raw_logps=True), 'raw_logps is True, wanted False'),
        (dict(prompt_logps=True), 'engine.sampling.prompt_logps is off'),
        (
            dict(top_logps=3),
            'top_logps asks for 3, wanted at most 2:'
            ' rollout.engine.sampling.max_top_logps',
        ),
        (
            dict(logit_bias=((0, 1.0), (1, 1.0))),
            'logit_bias asks for 2, wanted at most 1',
        ),
        (dict(logit_bias=((40, 1.0),)), 'names id 40, wanted at most 39'),
    ],
)
def test_what_the_engine_was_not_built_for_is_refused(asked, named):
  features = SamplingFeatures(max_top_logps=2, max_logit_bias=1)
  assert named in features.refusal(SamplingParams(1, **asked), 40)
  plain = SamplingParams(1, top_p=0.5, min_p=0.1, top_logps=2)
  assert features.refusal(plain, 40) == ''


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


def test_the_first_of_equal_largest_ones_is_taken():
  rng = np.random.default_rng(0)
  values = rng.integers(-3, 4, (50, 9)).astype(np.float32)  # full of ties
  values[0] = sampling.IMPOSSIBLE
  best = values.max(-1, keepdims=True)
  got = sampling._place_of_largest(jnp.asarray(values), jnp.asarray(best))
  np.testing.assert_array_equal(got, values.argmax(-1))


@pytest.mark.parametrize('size', [1, 2, 7, 18, 512, 1000])
def test_a_draw_is_where_the_sums_pass_its_shares(size):
  rng = np.random.default_rng(size)
  masses = rng.random((40, size)).astype(np.float32) ** 4
  masses[rng.random(masses.shape) < 0.3] = 0
  masses[:, rng.integers(size)] = 1  # no slot without any
  uniform = rng.random((40, 2)).astype(np.float32)
  tokens, total = sampling._draw(jnp.asarray(masses), jnp.asarray(uniform))
  np.testing.assert_allclose(total, masses.sum(-1, dtype=float), rtol=1e-6)
  width = 1 << (size.bit_length() // 2)
  for row, (u, v), token in zip(masses.astype(float), uniform, tokens):
    blocks = [row[i : i + width] for i in range(0, size, width)]
    ends = np.cumsum([block.sum() for block in blocks])
    block = np.searchsorted(ends, u * ends[-1], side='right')
    inside = np.cumsum(blocks[block])
    place = np.searchsorted(inside, v * inside[-1], side='right')
    assert token == block * width + place


def test_no_share_draws_a_token_without_mass():
  largest = 1 - 2.0**-24
  rng = np.random.default_rng(0)
  masses = rng.random((3, 200)).astype(np.float32)
  masses[:, 150:], masses[1, :7], masses[2, ::3] = 0, 0, 0
  for share in (0.0, largest):
    uniform = jnp.full((3, 2), share, jnp.float32)
    tokens, _ = sampling._draw(jnp.asarray(masses), uniform)
    possible = [np.flatnonzero(row) for row in masses]
    ends = [p[0] if share == 0 else p[-1] for p in possible]
    np.testing.assert_array_equal(tokens, ends)


def test_uniform_numbers_fill_their_range_and_differ_by_stream_and_place():
  streams = jax.random.bits(jax.random.key(0), (5000, 2), jnp.uint32)
  once = np.asarray(sampling._uniform(streams, jnp.zeros(5000, jnp.int32)))
  again = np.asarray(sampling._uniform(streams, jnp.ones(5000, jnp.int32)))
  assert once.min() >= 0
  assert once.max() < 1
  # Means, and products of what should not depend on each other.
  pairs = [once[:, 0], once[:, 1], again[:, 0], again[:, 1]]
  correlations = np.corrcoef([*pairs, np.roll(once[:, 0], 1)]) - np.eye(5)
  assert np.abs(correlations).max() < 5 / np.sqrt(5000)
  for numbers in pairs:
    assert abs(numbers.mean() - 0.5) < 5 * np.sqrt(1 / 12 / 5000)
    counts = np.bincount((numbers * 16).astype(int), minlength=16)
    assert ((counts - 312.5) ** 2 / 312.5).sum() < 40  # 15 degrees of freedom
