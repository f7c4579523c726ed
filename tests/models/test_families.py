"""A family is added by the lines that docs/models.md shows."""

import functools
import json
import pathlib
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.families import FAMILIES, Family
from areal_jax.models.hf import load_hf, save_hf
from areal_jax.models.hf_config import config_from_hf
from tests.closeness import assert_close

DOCS = pathlib.Path(__file__).resolve().parents[2] / 'docs/models.md'
GEMMA = {
    'model_type': 'gemma',
    'vocab_size': 20,
    'hidden_size': 16,
    'intermediate_size': 24,
    'num_hidden_layers': 2,
    'num_attention_heads': 2,
    'num_key_value_heads': 1,
    'head_dim': 8,
}


@pytest.fixture
def families():
  """The table with the row of the page; as it was after the test."""
  before = dict(FAMILIES)
  (lines,) = re.findall(r'```python\n(.*?)```', DOCS.read_text(), re.S)
  exec(lines, {'FAMILIES': FAMILIES, 'Family': Family})
  yield FAMILIES
  FAMILIES.clear()
  FAMILIES.update(before)


def test_the_page_names_every_family_of_the_table():
  for name in FAMILIES:
    assert f'| `{name}` |' in DOCS.read_text()


def test_a_family_of_a_few_lines_is_read_run_and_written(families, tmp_path):
  config = config_from_hf(GEMMA)
  rng = np.random.default_rng(0)
  params = jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype('f') / 3,
      parameters.abstract_params(config),
  )
  save_hf(tmp_path / 'gemma', config, params)
  written = json.loads((tmp_path / 'gemma/config.json').read_text())
  assert written['architectures'] == ['GemmaForCausalLM']
  config, params = load_hf(tmp_path / 'gemma', None, None)
  # The same function as a Llama: norms by 1 + w, rows times sqrt(D).
  shift = lambda path, x: x + ('norm' in jax.tree_util.keystr(path))
  twin = jax.tree.map_with_path(shift, params)
  twin['unembedding'] = params['embedding'].T
  twin['embedding'] = params['embedding'] * 4
  llama = ModelConfig(
      vocab_size=20,
      width=16,
      layers=2,
      heads=2,
      kv_heads=1,
      head_size=8,
      mlp_width=24,
      activation='gelu_tanh',
      tied_embeddings=False,
  )
  ids = jnp.arange(10)[None] % 7
  run = lambda config, params: jax.jit(
      functools.partial(transformer.forward, config)
  )(params, ids, jnp.arange(10)[None], jnp.ones_like(ids))
  got, wanted = run(config, params), run(llama, twin)
  assert_close(got, wanted)
  assert np.abs(got).max() > 0.5


def test_without_the_row_the_family_is_refused():
  with pytest.raises(ConfigError, match="model_type is 'gemma', wanted one"):
    config_from_hf(GEMMA)
