"""Adapters as PEFT folders: names, shapes, values, and what is refused."""

import json

import jax
import numpy as np
import pytest
import safetensors.numpy

from areal_jax.config import ConfigError
from areal_jax.models import lora, parameters, peft
from areal_jax.models.config import PROJECTIONS, LoraSettings
from tests import files, tiny

CONFIG = tiny.config(
    lora=LoraSettings(projections=PROJECTIONS, rank=3, alpha=6.0)
)


@pytest.fixture(scope='module')
def params():
  rng = np.random.default_rng(0)
  return jax.tree.map(
      lambda x: rng.normal(size=x.shape).astype('f'),
      parameters.abstract_params(CONFIG),
  )


@pytest.fixture
def folder(params, tmp_path):
  peft.save_peft(tmp_path, CONFIG, params, base='some/policy')
  return tmp_path


def test_tensors_have_the_names_and_shapes_of_peft(folder):
  tensors = safetensors.numpy.load_file(folder / 'adapter_model.safetensors')
  assert len(tensors) == 7 * 2 * 2  # projections, layers, A and B
  before = 'base_model.model.model.layers.1.'
  shapes = {
      name.removeprefix(before): tensor.shape
      for name, tensor in tensors.items()
      if name.startswith(before)
  }
  assert shapes['self_attn.q_proj.lora_A.weight'] == (3, 32)
  assert shapes['self_attn.k_proj.lora_B.weight'] == (16, 3)
  assert shapes['self_attn.o_proj.lora_A.weight'] == (3, 32)
  assert shapes['mlp.gate_proj.lora_B.weight'] == (48, 3)
  assert shapes['mlp.down_proj.lora_A.weight'] == (3, 48)


def test_published_product_is_the_change_of_the_published_matrix(
    folder, params
):
  """W' = W + alpha / r · B A, with matrices as torch keeps them."""
  tensors = safetensors.numpy.load_file(folder / 'adapter_model.safetensors')
  _, merged = lora.merged(CONFIG, params)
  for name, module in (
      ('query', 'self_attn.q_proj'), ('out', 'self_attn.o_proj'),
      ('down', 'mlp.down_proj'),
  ):  # fmt: skip
    at = f'base_model.model.model.layers.0.{module}.lora_'
    product = tensors[f'{at}B.weight'] @ tensors[f'{at}A.weight']
    change = merged['blocks'][name][0] - params['blocks'][name][0]
    inputs = product.shape[1]
    np.testing.assert_allclose(
        change.reshape(inputs, -1).T, 2 * product, atol=1e-4
    )


def test_what_is_written_is_read_back(folder, params):
  got = peft.load_peft(folder, CONFIG)
  learns, _ = parameters.partition(CONFIG, params)
  jax.tree.map(np.testing.assert_array_equal, got, learns)
  assert peft.read_settings(folder) == CONFIG.lora
  described = json.loads((folder / 'adapter_config.json').read_text())
  assert described['base_model_name_or_path'] == 'some/policy'


def describe(folder, **changes):
  path = folder / 'adapter_config.json'
  path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'peft_type': 'IA3'}, "peft_type is 'IA3', wanted 'LORA'"),
        ({'use_dora': True}, 'use_dora is True, wanted False'),
        ({'rank_pattern': {'q_proj': 8}}, 'rank_pattern is {.*, wanted {}'),
        (
            {'target_modules': ['q_proj', 'lm_head']},
            r"target_modules is \['q_proj', 'lm_head'\], wanted some of",
        ),
        ({'r': 4}, r'lora.rank is 3, wanted 4 as in'),
        ({'lora_alpha': 1.5}, r'lora.alpha is 6.0, wanted 1.5 as in'),
        (
            {'target_modules': ['q_proj']},
            r"lora.projections is .*, wanted \('query',\) as in",
        ),
    ],
)
def test_other_adapters_are_refused(folder, changes, words):
  describe(folder, **changes)
  with pytest.raises(ConfigError, match=words):
    peft.load_peft(folder, CONFIG)


def test_tensors_that_do_not_match_are_named(folder):
  path = folder / 'adapter_model.safetensors'
  tensors = safetensors.numpy.load_file(path)
  name = 'base_model.model.model.layers.0.mlp.up_proj.lora_B.weight'
  for change, words in (
      ({name: tensors[name].T.copy()}, rf'{name} has shape \(3, 48\), wanted'),
      ({'extra': tensors[name]}, '1 tensors with no place .* extra'),
  ):
    safetensors.numpy.save_file({**tensors, **change}, path)
    with pytest.raises(ConfigError, match=words):
      peft.load_peft(folder, CONFIG)
  del tensors[name]
  safetensors.numpy.save_file(tensors, path)
  with pytest.raises(ConfigError, match=f'lacks tensor {name}'):
    peft.load_peft(folder, CONFIG)


def test_a_policy_without_adapters_has_none_to_write(tmp_path, params):
  with pytest.raises(ConfigError, match='lora.projections is .., wanted some'):
    peft.save_peft(tmp_path, lora.without(CONFIG), params)


def test_adapters_in_another_form_are_named_with_the_remedy(folder):
  weights = folder / 'adapter_model.safetensors'
  weights.rename(folder / 'adapter_model.bin')
  with pytest.raises(ConfigError, match='but adapter_model.bin, weights in a'):
    peft.load_peft(folder, CONFIG)
  weights.write_text(files.POINTER)
  with pytest.raises(ConfigError, match='is a Git LFS pointer for 99 bytes'):
    peft.load_peft(folder, CONFIG)
