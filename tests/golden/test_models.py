"""The policy against transformers, and the published stories260K.

No model is chosen by its folder's name: all that the golden folder holds must
agree, in every way that the policy is run.
"""

import dataclasses
import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.models import transformer
from areal_jax.models.config import FAMILIES, config_from_hf
from areal_jax.models.hf import load_hf, save_hf

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = 8  # as long as the windows of these models, or a part of them
RELATIVE = 2e-4  # of the largest logit; float32 rounding moves them by 3e-6
LOGPS = 2e-4  # nats
# Log-probs of published tokens, in nats; seen were 0 and 0.
BFLOAT16_MEAN, BFLOAT16_MOST = 0.02, 0.3
PIECES = (4, 5, 7)  # tokens of a prompt that are prefilled at once


def golden_folder() -> pathlib.Path:
  return pathlib.Path(
      os.environ.get('AREAL_GOLDEN') or _ROOT / '../shared/golden'
  )


def found() -> list[pathlib.Path]:
  """Folders of golden models whose family the table has."""
  files = sorted(golden_folder().glob('models/*/config.json'))
  return [
      f.parent
      for f in files
      if json.loads(f.read_text())['model_type'] in FAMILIES
  ]


def folders() -> pytest.MarkDecorator:
  """Parametrises a test over the golden models."""
  if golden_folder().is_dir():
    return pytest.mark.parametrize('folder', found(), ids=lambda f: f.name)
  why = f'AREAL_GOLDEN: no folder {golden_folder()}'
  skip = pytest.mark.skip(reason=why)
  return pytest.mark.parametrize('folder', [pytest.param(None, marks=skip)])


class Model:
  """A golden model, its numbers, and programs that several tests share.

  Layers are scanned here, which compiles fastest and is hardest where they are
  not alike; that unrolled ones are the same is shown at `models/`.
  """

  def __init__(self, folder: pathlib.Path):
    self.golden = np.load(folder / 'golden.npz')
    self.config, self.params = load_hf(
        folder, None, None, overrides=dict(layer_loop='scan')
    )
    self.score = jax.jit(jax.value_and_grad(self._loss, has_aux=True))
    self.forward = jax.jit(functools.partial(transformer.forward, self.config))

  def _loss(self, params, ids, positions, mask):
    logits = transformer.forward(self.config, params, ids, positions, mask)
    logps = jax.nn.log_softmax(logits[:, :-1])
    logps = jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]
    weights = mask[:, 1:] * mask[:, :-1]
    return -jnp.sum(weights * logps) / weights.sum(), logits

  @functools.cached_property
  def scores(self):
    """Loss, logits and gradient of the batch, padded on either side."""
    results = {}
    for side in ('right', 'left'):
      names = ('input_ids', 'position_ids', 'attention_mask')
      inputs = [self.golden[f'{side}/{name}'] for name in names]
      results[side] = self.score(self.params, *inputs)
    return results

  @functools.cached_property
  def prompts(self):
    """[S, T] padded on the right to the width of all pieces, and lengths."""
    lengths = self.golden['greedy/prompt_lens']
    left = self.golden['greedy/prompt_ids_left']
    prompts = np.zeros((len(left), sum(PIECES)), np.int32)
    for row, length in enumerate(lengths):
      prompts[row, :length] = left[row, left.shape[1] - length :]
    return prompts, lengths

  @functools.cached_property
  def whole(self):
    """Keys and values of the prompts, prefilled at once."""
    prompts, lengths = self.prompts
    program = jax.jit(functools.partial(transformer.prefill, self.config))
    return program(self.params, prompts, lengths)

  @functools.cached_property
  def decode(self):
    """`decode_greedily` compiled; see there."""
    steps = self.golden['greedy/tokens'].shape[1]
    return jax.jit(functools.partial(decode_greedily, self.config, steps=steps))


@functools.cache
def load(folder: pathlib.Path) -> Model:
  return Model(folder)


def decode_greedily(config, params, keys, values, last, lengths, *, steps):
  """Decodes through a paged cache that begins as these keys and values.

  Args:
    config: of the policy.
    params: of the policy.
    keys: [L, S, T, K, H] of the prompts.
    values: [L, S, T, K, H] of the prompts.
    last: [S] last token of each, which is decoded: that writes its entry again.
    lengths: [S] of the prompts.
    steps: tokens to decode.

  Returns:
    [S, steps] tokens and their log-probs, [S, steps, V] logits.
  """
  slots, width = keys.shape[1:3]
  pages = -(-(width + steps) // PAGE)
  table = np.arange(slots * pages).reshape(slots, pages)[:, ::-1]
  first = table[:, : -(-width // PAGE)]

  def paged(x):
    x = jnp.pad(x, [(0, 0), (0, 0), (0, -width % PAGE), (0, 0), (0, 0)])
    blank = jnp.zeros((config.layers, table.size, PAGE, *x.shape[3:]))
    shape = (config.layers, slots, -1, PAGE, *x.shape[3:])
    return blank.at[:, first].set(x.reshape(shape))

  def step(carry, _):
    ids, positions, cache = carry
    logits, *cache = transformer.decode(
        config, params, ids, positions, *cache, table, jnp.ones(slots, bool)
    )
    best = logits.argmax(-1).astype(ids.dtype)
    logps = jax.nn.log_softmax(logits)[jnp.arange(slots), best]
    return (best, positions + 1, cache), (best, logps, logits)

  start = jnp.asarray(last), lengths - 1, [paged(keys), paged(values)]
  _, (tokens, logps, logits) = jax.lax.scan(step, start, length=steps)
  return tokens.T, logps.T, jnp.swapaxes(logits, 0, 1)


def greedy(model: Model, keys, values, rows=slice(None)):
  """Greedy tokens and log-probs of these prompts from their cache."""
  prompts, lengths = (x[rows] for x in model.prompts)
  last = prompts[np.arange(len(lengths)), lengths - 1]
  return [
      np.asarray(x)
      for x in model.decode(model.params, keys, values, last, lengths)
  ]


def assert_logits_close(got, wanted):
  scale = np.abs(wanted).max()
  np.testing.assert_allclose(got, wanted, rtol=0, atol=RELATIVE * scale)


def assert_published_tokens(model: Model, tokens, logps, rows=slice(None)):
  golden, steps = model.golden, tokens.shape[1]
  for row, margins in enumerate(golden['greedy/top2_margin'][rows]):
    # From a tie on, either continuation is right.
    ties = np.flatnonzero(margins < 1e-3)
    stop = ties[0] if len(ties) else steps
    assert stop > 0
    np.testing.assert_array_equal(
        tokens[row, :stop], golden['greedy/tokens'][rows][row, :stop]
    )
    np.testing.assert_allclose(
        logps[row, :stop],
        golden['greedy/logprobs_single'][rows][row, :stop],
        atol=LOGPS,
    )


@folders()
def test_logits_and_loss_of_a_batch_padded_on_either_side(folder):
  model = load(folder)
  golden = model.golden
  for side, ((loss, logits), _) in model.scores.items():
    real = golden[f'{side}/attention_mask'] == 1
    logits = np.asarray(logits)
    assert_logits_close(logits[real], golden[f'{side}/logits'][real])
    np.testing.assert_allclose(loss, golden['train/loss'], rtol=1e-5)
    logps = np.asarray(jax.nn.log_softmax(logits))
    both = real[:, 1:] & real[:, :-1]
    own = np.take_along_axis(
        logps[:, :-1], golden[f'{side}/input_ids'][:, 1:, None], -1
    )[..., 0]
    wanted = golden[f'{side}/next_token_logprobs']
    np.testing.assert_allclose(own[both], wanted[both], atol=LOGPS)
    entropy = -(np.exp(logps) * logps).sum(-1)
    np.testing.assert_allclose(
        entropy[real], golden[f'{side}/entropy'][real], atol=LOGPS
    )


@folders()
def test_gradient_passes_through_the_table_as_weights_do(folder, tmp_path):
  model = load(folder)
  wanted = st.load_file(folder / 'grads.safetensors')
  for side, (_, gradient) in model.scores.items():
    save_hf(tmp_path / side, model.config, gradient)
    got = st.load_file(tmp_path / side / 'model.safetensors')
    assert set(got) == set(wanted)
    for name, ours in got.items():
      np.testing.assert_allclose(
          ours, wanted[name], rtol=1e-3, atol=1e-5, err_msg=f'{side} {name}'
      )


@folders()
def test_one_sequence_at_a_time_and_all_packed_into_one_row(folder):
  model = load(folder)
  golden = model.golden
  real = golden['right/attention_mask'] == 1
  ids, positions = golden['right/input_ids'], golden['right/position_ids']
  segments = np.broadcast_to(np.arange(1, len(real) + 1)[:, None], real.shape)
  packed = [x[real][None] for x in (ids, positions, segments)]
  logits = model.forward(model.params, *packed)
  assert_logits_close(logits[0], golden['right/logits'][real])
  # Padded to the length of the packed row, for which there is a program.
  for row, count in enumerate(real.sum(1)):
    alone = [np.zeros_like(x) for x in packed]
    for to, x in zip(alone, (ids, positions, real)):
      to[0, :count] = x[row, :count]
    logits = model.forward(model.params, *alone)
    assert_logits_close(logits[0, :count], golden['right/logits'][row, :count])


@folders()
def test_greedy_tokens_through_prefill_and_decode(folder):
  model = load(folder)
  tokens, logps, _ = greedy(model, *model.whole)
  assert_published_tokens(model, tokens, logps)


@folders()
def test_greedy_tokens_of_a_prompt_that_came_in_pieces(folder):
  model = load(folder)
  prompts, lengths = model.prompts

  @jax.jit
  def in_pieces(params):
    prefix, start = None, 0
    for size in PIECES:
      chunk = prompts[:, start : start + size]
      here = np.clip(lengths - start, 0, size)
      keys, values = transformer.prefill(
          model.config, params, chunk, here, prefix
      )
      if prefix is not None:
        keys = jnp.concatenate([prefix.keys, keys], 2)
        values = jnp.concatenate([prefix.values, values], 2)
      start += size
      prefix = transformer.Prefix(keys, values, np.minimum(lengths, start))
    return prefix.keys, prefix.values

  pieces = in_pieces(model.params)
  real = np.arange(prompts.shape[1]) < lengths[:, None]
  for got, wanted in zip(pieces, model.whole):
    np.testing.assert_allclose(got[:, real], wanted[:, real], atol=1e-4)
  tokens, logps, _ = greedy(model, *pieces)
  assert_published_tokens(model, tokens, logps)


@folders()
def test_both_spellings_of_config_json_mean_the_same(folder):
  old, new = (
      config_from_hf(json.loads((folder / name).read_text()))
      for name in ('config.json', 'config.v5.json')
  )
  assert old == new


@pytest.fixture(scope='module')
def stories(data_dir):
  """Settings, parameters and what the published model says."""
  folder = data_dir / 'models/stories260K'
  config, params = load_hf(folder / 'hf', None, None)
  cases = json.loads((folder / 'reference.json').read_text())['cases']
  return config, params, cases, np.load(folder / 'reference.npz')


@pytest.fixture(scope='module')
def stories_logits(stories):
  """[cases, T, V] of the training walk over the greedy texts."""
  config, params, cases, golden = stories
  ids = np.stack([golden[f'ids_{n}'] for n in range(len(cases))])
  positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  program = jax.jit(functools.partial(transformer.forward, config))
  return np.asarray(program(params, ids, positions, np.ones_like(ids)))


def test_stories_are_decoded_to_the_published_tokens(stories, stories_logits):
  config, params, cases, golden = stories
  lengths = np.array([len(c['prompt_ids']) for c in cases])
  prompts = np.zeros((len(cases), lengths.max()), np.int32)
  for row, case in enumerate(cases):
    prompts[row, : lengths[row]] = case['prompt_ids']
  program = jax.jit(functools.partial(transformer.prefill, config))
  last = prompts[np.arange(len(cases)), lengths - 1]
  decode = jax.jit(functools.partial(decode_greedily, config, steps=200))
  cache = program(params, prompts, lengths)
  tokens, logps, logits = map(np.asarray, decode(params, *cache, last, lengths))
  for row, length in enumerate(lengths):
    count = 201 - length
    wanted = golden[f'ids_{row}']
    np.testing.assert_array_equal(tokens[row, :count], wanted[length:])
    np.testing.assert_allclose(
        logps[row, :count],
        golden[f'logprobs_{row}'][length - 1 :],
        atol=LOGPS,
    )
    # The engine's walk and the trainer's agree closer than with others.
    np.testing.assert_allclose(
        logits[row, :count], stories_logits[row, length - 1 : -1], atol=5e-5
    )


def test_stories_have_the_published_logits(stories, stories_logits):
  _, _, cases, golden = stories
  for row, case in enumerate(cases):
    wanted = golden[f'logits_{row}']
    got = stories_logits[row, : len(wanted)]
    np.testing.assert_allclose(got, wanted, atol=1e-4)
    for position, value in case['logsumexp'].items():
      summed = jax.nn.logsumexp(stories_logits[row, int(position)])
      assert float(summed) == pytest.approx(value, abs=1e-4)


def test_the_training_walk_prefers_the_published_tokens(
    stories, stories_logits
):
  _, _, cases, golden = stories
  for row, case in enumerate(cases):
    length = len(case['prompt_ids'])
    np.testing.assert_array_equal(
        stories_logits[row, length - 1 : -1].argmax(-1),
        golden[f'ids_{row}'][length:],
    )


def test_stories_in_bfloat16_stay_close_to_float32(stories, stories_logits):
  config, params, cases, golden = stories
  half = dataclasses.replace(config, compute_dtype='bfloat16')
  ids = np.stack([golden[f'ids_{n}'] for n in range(len(cases))])
  positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  program = jax.jit(functools.partial(transformer.forward, half))
  logits = program(params, ids, positions, np.ones_like(ids))
  assert logits.dtype == jnp.float32
  one, other = (
      np.asarray(
          jnp.take_along_axis(
              jax.nn.log_softmax(x[:, :-1]), ids[:, 1:, None], -1
          )
      )
      for x in (logits, stories_logits)
  )
  gap = np.abs(one - other)
  assert 1e-5 < gap.mean() < BFLOAT16_MEAN and gap.max() < BFLOAT16_MOST


def test_a_published_bfloat16_checkpoint_is_read(data_dir):
  config, params = load_hf(data_dir / 'models/arith_llama_random', None, None)
  assert (config.vocab_size, config.layers) == (16, 4)
  assert sum(x.size for x in jax.tree.leaves(params)) == 795_776
  assert params['unembedding'].dtype == jnp.float32
