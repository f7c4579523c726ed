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
from areal_jax.models.families import FAMILIES
from areal_jax.models.hf import load_hf, save_hf
from areal_jax.models.hf_config import config_from_hf
from tests.closeness import assert_close

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = 8  # as long as the windows of these models, or a part of them
RELATIVE = 2e-4  # of the largest logit; float32 rounding moves them by 3e-6
LOGPS = 2e-4  # nats
# Log-probs of published tokens, in nats; 0.0072 and 0.075 were seen on CPU.
BFLOAT16_MEAN, BFLOAT16_MOST = 0.015, 0.2
PIECES = (5, 8, 3)  # tokens of a prompt that are prefilled at once


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


# Compiles in half the time; what it runs here is small.
quick_jit = functools.partial(
    jax.jit, compiler_options={'xla_backend_optimization_level': 0}
)


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
    self.score = quick_jit(jax.value_and_grad(self._loss, has_aux=True))

  def _loss(self, params, ids, positions, segments):
    """Mean over tokens that follow one of their own sequence, and logits."""
    logits = transformer.forward(self.config, params, ids, positions, segments)
    logps = jax.nn.log_softmax(logits[:, :-1])
    logps = jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]
    weights = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return -jnp.sum(weights * logps) / weights.sum(), logits

  def rows(self, side: str) -> list[np.ndarray]:
    """Tokens, positions and mask of the batch in rows of twice their length."""
    names = ('input_ids', 'position_ids', 'attention_mask')
    rows = [self.golden[f'{side}/{name}'] for name in names]
    length = rows[0].shape[1]
    ends = (0, length) if side == 'right' else (length, 0)
    return [np.pad(x, [(0, 0), ends]) for x in rows]

  @functools.cached_property
  def scores(self):
    """Of each layout the real places, and loss, logits and gradient."""
    layouts = {side: self.rows(side) for side in ('right', 'left')}
    layouts['packed'] = self._packed()
    return {
        name: (rows[2] > 0, *self.score(self.params, *rows))
        for name, rows in layouts.items()
    }

  def _packed(self) -> list[np.ndarray]:
    """Two sequences in each row, one behind the other."""
    rows = self.rows('right')
    packed = [np.zeros_like(x) for x in rows]
    for row, real in enumerate(rows[2] > 0):
      to, segment = divmod(row, 2)
      start = np.count_nonzero(packed[2][to])
      stop = start + real.sum()
      for target, x in zip(packed, rows):
        target[to, start:stop] = x[row, real]
      packed[2][to, start:stop] = segment + 1
    return packed

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
    program = quick_jit(functools.partial(transformer.prefill, self.config))
    return program(self.params, prompts, lengths)

  @functools.cached_property
  def decode(self):
    """`decode_greedily` compiled; see there."""
    steps = self.golden['greedy/tokens'].shape[1]
    return quick_jit(
        functools.partial(decode_greedily, self.config, steps=steps)
    )


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


def test_every_model_of_the_folder_is_tested(golden_dir):
  """With the folder there, a model that no test sees counts as a failure."""
  records = json.loads((golden_dir / 'models/index.json').read_text())['cases']
  named = {golden_dir / record['dir'] for record in records}
  lying = {path.parent for path in golden_dir.glob('models/*/golden.npz')}
  assert named and named == lying
  assert {f.resolve() for f in found()} == {f.resolve() for f in named}


@folders()
def test_logits_and_loss_padded_on_either_side_and_packed(folder):
  model = load(folder)
  golden = model.golden
  wanted = golden['right/logits'][golden['right/attention_mask'] == 1]
  for real, (loss, logits), _ in model.scores.values():
    # The layouts have the same sequences in the same order.
    assert_logits_close(np.asarray(logits)[real], wanted)
    np.testing.assert_allclose(loss, golden['train/loss'], rtol=1e-5)


@folders()
def test_log_probs_and_entropies(folder):
  model = load(folder)
  for side in ('right', 'left'):
    real, (_, logits), _ = model.scores[side]
    logits, wide = np.asarray(logits, np.float64), model.rows(side)[0]
    best = logits.max(-1, keepdims=True)
    logps = logits - best
    logps -= np.log(np.exp(logps).sum(-1, keepdims=True))
    both = real[:, 1:] & real[:, :-1]
    own = np.take_along_axis(logps[:, :-1], wide[:, 1:, None], -1)[..., 0]
    mask = model.golden[f'{side}/attention_mask'] == 1
    wanted = model.golden[f'{side}/next_token_logprobs']
    wanted = wanted[mask[:, 1:] & mask[:, :-1]]
    np.testing.assert_allclose(own[both], wanted, atol=LOGPS)
    entropy = -(np.exp(logps) * logps).sum(-1)
    wanted = model.golden[f'{side}/entropy'][mask]
    np.testing.assert_allclose(entropy[real], wanted, atol=LOGPS)


@folders()
def test_one_sequence_at_a_time(folder):
  model = load(folder)
  wanted = model.golden['right/logits']
  for row, count in enumerate(model.golden['right/attention_mask'].sum(1)):
    alone = [np.zeros_like(x) for x in model.rows('right')]
    for to, x in zip(alone, model.rows('right')):
      to[0] = x[row]
    (_, logits), _ = model.score(model.params, *alone)
    assert_logits_close(np.asarray(logits)[0, :count], wanted[row, :count])


@folders()
def test_gradient_passes_through_the_table_as_weights_do(folder, tmp_path):
  model = load(folder)
  wanted = st.load_file(folder / 'grads.safetensors')
  for name, (_, _, gradient) in model.scores.items():
    save_hf(tmp_path / name, model.config, gradient)
    got = st.load_file(tmp_path / name / 'model.safetensors')
    assert set(got) == set(wanted)
    for tensor, ours in got.items():
      at = f'{name} {tensor}'
      assert_close({at: ours}, {at: wanted[tensor]}, relative=1e-4)


@folders()
def test_greedy_tokens_through_prefill_and_decode(folder):
  model = load(folder)
  tokens, logps, _ = greedy(model, *model.whole)
  assert_published_tokens(model, tokens, logps)


@folders()
def test_greedy_tokens_of_a_prompt_that_came_in_pieces(folder):
  model = load(folder)
  prompts, lengths = model.prompts

  # One program: pieces of any length, on a prefix that has room for all.
  program = quick_jit(functools.partial(transformer.prefill, model.config))
  pieces = [np.zeros(x.shape, x.dtype) for x in model.whole]
  one_page_a_row = np.arange(len(prompts))[:, None]
  start = 0
  for size in PIECES:
    chunk = np.zeros((len(prompts), max(PIECES)), np.int32)
    chunk[:, :size] = prompts[:, start : start + size]
    here = np.clip(lengths - start, 0, size)
    cached = np.minimum(lengths, start)
    prefix = transformer.Prefix(*pieces, one_page_a_row, cached)
    for whole, part in zip(pieces, program(model.params, chunk, here, prefix)):
      whole[:, :, start : start + size] = part[:, :, :size]
    start += size
  real = np.arange(prompts.shape[1]) < lengths[:, None]
  for got, wanted in zip(pieces, model.whole):
    assert_close(got[:, real], wanted[:, real])
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
    assert_close(logits[row, :count], stories_logits[row, length - 1 : -1])


def test_stories_have_the_published_logits(stories, stories_logits):
  _, _, cases, golden = stories
  for row, case in enumerate(cases):
    wanted = golden[f'logits_{row}']
    got = stories_logits[row, : len(wanted)]
    assert_close(got, wanted)
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
