"""The policy against transformers, and the published stories260K.

No model is chosen by its folder's name: those of a family that the table has
must agree, all others must be refused by the name of their family.
"""

import functools
import json
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError
from areal_jax.models import transformer
from areal_jax.models.config import FAMILIES, config_from_hf
from areal_jax.models.hf import load_hf, save_hf

_ROOT = pathlib.Path(__file__).resolve().parents[2]
PAGE = 16
LOGITS, LOGPS = 2e-4, 2e-4  # float32 rounding moves the logits by up to 1e-4


def folders(known: bool) -> pytest.MarkDecorator:
  """Parametrises a test over the golden models that we have, or lack."""
  golden = pathlib.Path(
      os.environ.get('AREAL_GOLDEN') or _ROOT / '../shared/golden'
  )
  if not golden.is_dir():
    skip = pytest.mark.skip(reason=f'AREAL_GOLDEN: no folder {golden}')
    return pytest.mark.parametrize('folder', [pytest.param(None, marks=skip)])
  found = [
      path.parent
      for path in sorted(golden.glob('models/*/config.json'))
      if (json.loads(path.read_text())['model_type'] in FAMILIES) == known
  ]
  assert found or not known, f'{golden}/models has no model of {[*FAMILIES]}'
  return pytest.mark.parametrize('folder', found, ids=lambda f: f.name)


@functools.cache
def load(folder: pathlib.Path):
  return *load_hf(folder, None, None), np.load(folder / 'golden.npz')


def greedy(config, params, prompts, lengths, steps):
  """Prefills the prompts and decodes greedily through a paged cache.

  Args:
    config: of the policy.
    params: of the policy.
    prompts: [S, T] padded on the right.
    lengths: [S] of the prompts.
    steps: tokens to decode.

  Returns:
    [S, steps] tokens and their log-probs, [S, steps, V] logits.
  """
  slots, width = prompts.shape
  pages = -(-(width + steps) // PAGE)
  table = np.arange(slots * pages).reshape(slots, pages)[:, ::-1]
  width = -(-width // PAGE) * PAGE
  prompts = np.pad(prompts, [(0, 0), (0, width - prompts.shape[1])])
  first = table[:, : width // PAGE]

  @jax.jit
  def program(params):
    filled = transformer.prefill(config, params, prompts, lengths)
    shape = (config.layers, slots, -1, PAGE, *filled[0].shape[3:])
    blank = jnp.zeros((config.layers, table.size, PAGE, *shape[4:]))
    cache = [blank.at[:, first].set(x.reshape(shape)) for x in filled]

    def step(carry, _):
      ids, positions, cache = carry
      logits, *cache = transformer.decode(
          config, params, ids, positions, *cache, table, jnp.ones(slots, bool)
      )
      best = logits.argmax(-1).astype(ids.dtype)
      logps = jax.nn.log_softmax(logits)[jnp.arange(slots), best]
      return (best, positions + 1, cache), (best, logps, logits)

    # The last token of a prompt is decoded, which writes its entry again.
    last = prompts[np.arange(slots), lengths - 1]
    start = jnp.asarray(last), jnp.asarray(lengths - 1), cache
    _, (tokens, logps, logits) = jax.lax.scan(step, start, length=steps)
    return tokens.T, logps.T, jnp.swapaxes(logits, 0, 1)

  return [np.asarray(x) for x in program(params)]


@folders(known=True)
def test_logits_loss_and_gradient_of_a_padded_batch(folder, tmp_path):
  config, params, golden = load(folder)
  ids, mask = golden['right/input_ids'], golden['right/attention_mask']
  weights = mask[:, 1:] * mask[:, :-1]

  def loss(params):
    logits = transformer.forward(
        config, params, ids, golden['right/position_ids'], mask
    )
    logps = jax.nn.log_softmax(logits[:, :-1])
    logps = jnp.take_along_axis(logps, ids[:, 1:, None], -1)[..., 0]
    return -jnp.sum(weights * logps) / weights.sum(), logits

  (value, logits), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      params
  )
  real = mask == 1
  np.testing.assert_allclose(
      np.asarray(logits)[real], golden['right/logits'][real], atol=LOGITS
  )
  np.testing.assert_allclose(value, golden['train/loss'], rtol=1e-5)
  # The gradient passes through the table as weights do.
  save_hf(tmp_path, config, gradient)
  got = st.load_file(tmp_path / 'model.safetensors')
  wanted = st.load_file(folder / 'grads.safetensors')
  assert set(got) == set(wanted)
  for name, ours in got.items():
    np.testing.assert_allclose(
        ours, wanted[name], rtol=1e-3, atol=1e-5, err_msg=name
    )


@folders(known=True)
def test_logits_of_the_same_sequences_packed_into_one_row(folder):
  config, params, golden = load(folder)
  real = golden['right/attention_mask'] == 1
  segments = np.broadcast_to(np.arange(1, len(real) + 1)[:, None], real.shape)
  program = jax.jit(functools.partial(transformer.forward, config))
  logits = program(
      params,
      golden['right/input_ids'][real][None],
      golden['right/position_ids'][real][None],
      segments[real][None],
  )
  np.testing.assert_allclose(
      logits[0], golden['right/logits'][real], atol=LOGITS
  )


@folders(known=True)
def test_greedy_tokens_through_prefill_and_decode(folder):
  config, params, golden = load(folder)
  lengths = golden['greedy/prompt_lens']
  prompts = np.zeros_like(golden['greedy/prompt_ids_left'])
  for row, length in enumerate(lengths):
    prompts[row, :length] = golden['greedy/prompt_ids_left'][row, -length:]
  steps = golden['greedy/tokens'].shape[1]
  tokens, logps, _ = greedy(config, params, prompts, lengths, steps)
  for row, margins in enumerate(golden['greedy/top2_margin']):
    # From a tie on, either continuation is right.
    ties = np.flatnonzero(margins < 2 * LOGITS)
    stop = ties[0] if len(ties) else steps
    assert stop > 0
    np.testing.assert_array_equal(
        tokens[row, :stop], golden['greedy/tokens'][row, :stop]
    )
    np.testing.assert_allclose(
        logps[row, :stop],
        golden['greedy/logprobs_single'][row, :stop],
        atol=LOGPS,
    )


@folders(known=True)
def test_both_spellings_of_config_json_mean_the_same(folder):
  old, new = (
      config_from_hf(json.loads((folder / name).read_text()))
      for name in ('config.json', 'config.v5.json')
  )
  assert old == new


@folders(known=False)
def test_a_family_that_is_not_in_the_table_is_refused_by_name(folder):
  name = json.loads((folder / 'config.json').read_text())['model_type']
  with pytest.raises(ConfigError, match=f"model_type is '{name}', wanted one"):
    load_hf(folder, None, None)


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
  tokens, logps, logits = greedy(config, params, prompts, lengths, 200)
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


def test_a_published_bfloat16_checkpoint_is_read(data_dir):
  config, params = load_hf(data_dir / 'models/arith_llama_random', None, None)
  assert (config.vocab_size, config.layers) == (16, 4)
  assert sum(x.size for x in jax.tree.leaves(params)) == 795_776
  assert params['unembedding'].dtype == jnp.float32
