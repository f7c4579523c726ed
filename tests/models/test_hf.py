"""Checkpoints pass through the table both ways, or are refused by name."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, parameters
from areal_jax.models.config import ModelConfig
from areal_jax.models.families import FAMILIES
from areal_jax.models.hf import check_hf, load_hf, load_matching, save_hf
from tests import files, tiny
from tests.limits import WAIT_S


def make_config(**changes):
  settings = dict(
      vocab_size=6,
      width=8,
      layers=2,
      heads=4,
      kv_heads=2,
      head_size=4,
      mlp_width=12,
      tied_embeddings=False,
      family='qwen2',
      qkv_bias=True,
  )
  return ModelConfig(**{**settings, **changes})


def make_params(config, dtype=np.float32):
  """Every number another one, so that an exchange of two shows."""
  count = iter(range(10**6))
  return jax.tree.map(
      lambda p: np.array(
          [next(count) % 251 for _ in range(p.size)], dtype
      ).reshape(p.shape),
      parameters.abstract_params(config),
  )


@pytest.fixture
def saved(tmp_path):
  """A folder with a checkpoint, its settings and its parameters."""
  config = make_config()
  params = make_params(config)
  save_hf(tmp_path, config, params)
  return tmp_path, config, params


def change(folder, edit):
  path = folder / 'model.safetensors'
  tensors = st.load_file(path)
  edit(tensors)
  st.save_file(tensors, path)


@pytest.mark.parametrize(
    'changes',
    [
        dict(),
        dict(family='llama', qkv_bias=False, tied_embeddings=True),
        dict(family='qwen3', qkv_bias=False, qk_norm=True),
        dict(family='mistral', qkv_bias=False),
        dict(
            family='gemma2',
            qkv_bias=False,
            query_scalar=4.0,
            **FAMILIES['gemma2'].settings,
        ),
    ],
)
def test_a_checkpoint_survives_export_and_import(tmp_path, changes):
  config = make_config(**changes)
  params = make_params(config)
  save_hf(tmp_path, config, params)
  got_config, got = load_hf(tmp_path, None, None)
  assert got_config == resolve(config)
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_published_matrices_are_outputs_by_inputs_heads_first(saved):
  folder, _, params = saved
  tensors = st.load_file(folder / 'model.safetensors')
  blocks = params['blocks']
  # Output row 5 of the queries is number 1 of head 1.
  query = tensors['model.layers.1.self_attn.q_proj.weight']
  np.testing.assert_array_equal(query[5], blocks['query'][1, :, 1, 1])
  # Input column 9 of the output projection is number 1 of head 2.
  out = tensors['model.layers.0.self_attn.o_proj.weight']
  np.testing.assert_array_equal(out[:, 9], blocks['out'][0, 2, 1])
  bias = tensors['model.layers.0.self_attn.k_proj.bias']
  np.testing.assert_array_equal(bias, blocks['key_bias'][0].ravel())
  np.testing.assert_array_equal(
      tensors['lm_head.weight'], params['unembedding'].T
  )


def test_parameters_are_loaded_onto_their_devices(saved):
  folder, _, params = saved
  mesh = tiny.mesh(2, 2)
  config, got = load_hf(folder, mesh, Rules())
  wanted = parameters.param_shardings(config, mesh, Rules())
  assert jax.tree.map(lambda x: x.sharding, got) == wanted
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_the_vocabulary_is_padded_on_import_and_cut_on_export(saved, tmp_path):
  folder, _, params = saved
  config, got = load_hf(folder, None, None, overrides=dict(vocab_multiple=4))
  assert config.padded_vocab_size == 8
  assert got['embedding'].shape == (8, 8) and not got['embedding'][6:].any()
  assert got['unembedding'].shape == (8, 8)
  np.testing.assert_array_equal(got['embedding'][:6], params['embedding'])
  save_hf(tmp_path / 'again', config, got)
  first, second = (
      st.load_file(f / 'model.safetensors')
      for f in (folder, tmp_path / 'again')
  )
  assert set(first) == set(second)
  for name in first:
    np.testing.assert_array_equal(first[name], second[name])


@pytest.mark.parametrize('dtype', [jnp.bfloat16, np.float16])
def test_half_precision_is_read_as_float32(tmp_path, dtype):
  config = make_config()
  params = make_params(config, dtype)
  save_hf(tmp_path, config, params)
  stored = st.load_file(tmp_path / 'model.safetensors')
  assert stored['model.norm.weight'].dtype == dtype
  _, got = load_hf(tmp_path, None, None)
  assert {x.dtype.name for x in jax.tree.leaves(got)} == {'float32'}
  jax.tree.map(np.testing.assert_array_equal, got, params)


@pytest.mark.parametrize('stored', ['float32', 'float16', 'bfloat16'])
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_parameters_have_the_dtype_that_is_asked_for(tmp_path, stored, dtype):
  config = make_config()
  generator = np.random.default_rng(0)
  params = jax.tree.map(
      lambda p: generator.standard_normal(p.shape, np.float32),
      parameters.abstract_params(config),
  )
  save_hf(tmp_path, config, params, dtype=stored)
  described = json.loads((tmp_path / 'config.json').read_text())
  assert described['torch_dtype'] == stored
  _, got = load_hf(tmp_path, None, None, dtype=dtype)
  jax.tree.map(
      lambda ours, p: np.testing.assert_array_equal(
          np.asarray(ours), p.astype(stored).astype(dtype), strict=True
      ),
      got,
      params,
  )


@pytest.mark.parametrize('shape', [(1, 1), (4, 1), (1, 2), (2, 2)])
def test_every_cut_of_the_parameters_is_read(tmp_path, monkeypatch, shape):
  # A few numbers at once, so that tensors come in pieces.
  monkeypatch.setattr(hf, '_CHUNK', 100)
  config = make_config()
  params = make_params(config)
  save_hf(tmp_path, config, params)
  mesh = tiny.mesh(*shape)
  padded = dict(vocab_multiple=8)
  for rules in (Rules(), Rules(layer='fsdp', embed=None, head='tensor',
                               heads=None, kv_heads=None)):  # fmt: skip
    if shape[0] == 4 and rules.layer:
      continue  # two layers do not divide over it
    config, got = load_hf(tmp_path, mesh, rules, overrides=padded)
    wanted = parameters.param_shardings(config, mesh, rules)
    assert jax.tree.map(lambda x: x.sharding, got) == wanted
    cut = {'embedding': np.s_[:6], 'unembedding': np.s_[:, :6]}
    for name, keep in cut.items():
      assert np.abs(got[name]).sum() == np.abs(params[name]).sum()
      got[name] = np.asarray(got[name])[keep]
    jax.tree.map(np.testing.assert_array_equal, got, params)


def test_a_policy_is_exported_in_several_files_and_in_any_dtype(tmp_path):
  config, params = make_config(), make_params(make_config())
  save_hf(tmp_path / 'one', config, params, dtype='bfloat16')
  on = jax.device_put(
      params, parameters.param_shardings(config, tiny.mesh(2, 2), Rules())
  )
  save_hf(tmp_path / 'more', config, on, dtype='bfloat16', limit=500)
  index = tmp_path / 'more/model.safetensors.index.json'
  where = json.loads(index.read_text())['weight_map']
  one = st.load_file(tmp_path / 'one/model.safetensors')
  assert set(where) == set(one) and len(set(where.values())) > 3
  # Layer by layer: those of layer 1 lie behind all of layer 0.
  layers = [
      [file for name, file in where.items() if f'layers.{n}.' in name]
      for n in (0, 1)
  ]
  assert max(layers[0]) <= min(layers[1])
  for name, file in where.items():
    found = st.load_file(tmp_path / 'more' / file)
    size = sum(tensor.nbytes for tensor in found.values())
    assert size <= 500 or len(found) == 1
    np.testing.assert_array_equal(found[name], one[name], strict=True)
  _, got = load_hf(tmp_path / 'more', None, None)
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_files_and_fields_go_along(tmp_path):
  config, params = make_config(), make_params(make_config())
  files, more = {'tokenizer.json': b'{}'}, {'eos_token_id': 7}
  save_hf(tmp_path, config, params, files=files, more=more)
  assert (tmp_path / 'tokenizer.json').read_bytes() == b'{}'
  described = json.loads((tmp_path / 'config.json').read_text())
  assert described['eos_token_id'] == 7


@pytest.fixture(scope='module')
def memory(tmp_path_factory):
  """Peaks of host memory in a process that reads and writes a policy."""
  done = subprocess.run(
      [sys.executable, '-m', 'tests.models.hf_memory',
       tmp_path_factory.mktemp('memory')],
      cwd=pathlib.Path(__file__).resolve().parents[2],
      # Memory that is let go of goes back to the machine at once.
      env={**os.environ, 'MALLOC_MMAP_THRESHOLD_': '65536'},
      stdout=subprocess.PIPE, text=True, check=True, timeout=WAIT_S,
  )  # fmt: skip
  return json.loads(done.stdout)


@pytest.mark.parametrize('way', ['read float32', 'read bfloat16', 'write'])
def test_host_memory_holds_one_part_beside_what_is_kept(memory, way):
  seen = memory[way]
  assert seen['peak'] < seen['kept'] + 1.3 * seen['largest'], seen


@pytest.mark.parametrize('way', ['read whole', 'write whole'])
def test_all_tensors_in_host_memory_are_seen(memory, way):
  seen = memory[way]
  assert seen['peak'] > seen['kept'] + 2 * seen['largest'], seen


def test_a_checkpoint_in_several_files_is_read_by_its_index(saved):
  folder, _, params = saved
  tensors = st.load_file(folder / 'model.safetensors')
  (folder / 'model.safetensors').unlink()
  names, index = sorted(tensors), {}
  for part, chosen in enumerate((names[::2], names[1::2])):
    file = f'model-{part}.safetensors'
    st.save_file({n: tensors[n] for n in chosen}, folder / file)
    index.update(dict.fromkeys(chosen, file))
  path = folder / 'model.safetensors.index.json'
  path.write_text(json.dumps({'weight_map': index}))
  _, got = load_hf(folder, None, None)
  jax.tree.map(np.testing.assert_array_equal, got, params)
  (folder / 'model-1.safetensors').unlink()
  with pytest.raises(ConfigError, match='there is no file .*model-1'):
    load_hf(folder, None, None)


def test_a_missing_tensor_is_named(saved):
  folder, _, _ = saved
  change(folder, lambda t: t.pop('model.layers.1.mlp.up_proj.weight'))
  with pytest.raises(
      ConfigError, match='lacks 1 tensors: model.layers.1.mlp.up_proj.weight'
  ):
    load_hf(folder, None, None)


def renamed(folder, rename):
  """Gives every tensor another name."""
  path = folder / 'model.safetensors'
  tensors = st.load_file(path)
  st.save_file({rename(name): x for name, x in tensors.items()}, path)


@pytest.mark.parametrize(
    'rename',
    [
        'base_model.model.{}'.format,
        'module.{}'.format,
        '_fsdp_wrapped_module.{}'.format,
        '_orig_mod.{}'.format,
        'language_model.{}'.format,
        'module.base_model.model.{}'.format,
        lambda name: name.replace(
            'model.layers.', 'model._fsdp_wrapped_module.layers.'
        ).replace('.mlp.', '._checkpoint_wrapped_module.mlp.'),
        lambda name: name.replace('model.', 'model.language_model.', 1),
        lambda name: name.removeprefix('model.'),
        lambda name: f'base_model.model.{name.removeprefix("model.")}',
    ],
    ids=['peft', 'ddp', 'fsdp', 'compiled', 'inner', 'two', 'inside',
         'inner5', 'bare', 'peft_bare'],
)  # fmt: skip
def test_wrappers_of_training_are_no_part_of_a_name(saved, rename):
  folder, config, params = saved
  renamed(folder, rename)
  check_hf(folder)
  _, got = load_hf(folder, None, None)
  jax.tree.map(np.testing.assert_array_equal, got, params)
  fresh = jax.tree.map(jnp.zeros_like, params)
  got, left = load_matching(folder, config, fresh)
  assert not left
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_a_name_that_two_tensors_have_without_wrappers_is_refused(saved):
  folder, _, _ = saved
  name = 'model.norm.weight'
  change(folder, lambda t: t.update({f'module.{name}': np.zeros(8, 'f')}))
  with pytest.raises(
      ConfigError, match=f'tensors .*{name} and .*{name}, which are both {name}'
  ):
    load_hf(folder, None, None)


@pytest.mark.parametrize('stored', ['lora_A.default', 'base_layer'])
def test_adapters_that_are_not_merged_are_refused(saved, stored):
  folder, _, _ = saved
  front = 'base_model.model.model.layers.0.self_attn.q_proj'
  name = f'{front}.{stored}.weight'
  change(folder, lambda t: t.update({name: np.zeros((2, 8), 'f')}))
  with pytest.raises(ConfigError, match='not merged.*merge_and_unload'):
    load_hf(folder, None, None)


def test_a_part_that_is_no_language_model_is_refused_as_it_is_named(saved):
  folder, _, _ = saved
  renamed(folder, 'language_model.{}'.format)
  name = 'vision_tower.patch.weight'
  change(folder, lambda t: t.update({name: np.zeros(3, 'f')}))
  with pytest.raises(ConfigError, match=f'1 tensors with no place .* {name}'):
    load_hf(folder, None, None)


def test_a_model_without_its_head_is_told_what_could_be_meant(saved):
  folder, _, _ = saved
  change(folder, lambda t: t.pop('lm_head.weight'))
  with pytest.raises(
      ConfigError, match='lacks 1 tensors: lm_head.weight.*tie_word_embeddings'
  ):
    load_hf(folder, None, None)


def test_tensors_of_another_model_are_named(saved):
  folder, _, _ = saved
  renamed(folder, 'transformer.h.{}'.format)
  with pytest.raises(ConfigError, match='it has transformer.h.'):
    load_hf(folder, None, None)


@pytest.mark.parametrize(
    'name, remedy',
    [
        ('pytorch_model.bin', 'PyTorch that can run code.*save_pretrained'),
        ('pytorch_model-00001-of-00002.bin', 'PyTorch that can run code'),
        ('consolidated.00.pth', 'PyTorch that can run code'),
        ('adapter_model.safetensors', 'adapters alone: policy.path is'),
        ('model-00001-of-00002.safetensors', 'without model.safetensors.index'),
        ('consolidated.safetensors', 'has to be called model.safetensors'),
        ('model-Q4_K_M.gguf', 'areal_jax.convert'),
    ],
)
def test_weights_in_another_form_are_named_with_the_remedy(saved, name, remedy):
  folder, _, _ = saved
  (folder / 'model.safetensors').rename(folder / name)
  with pytest.raises(
      ConfigError, match=f'no file .*model.safetensors, but {name}, .*{remedy}'
  ):
    check_hf(folder)


@pytest.mark.parametrize(
    'name',
    ['config.json', 'model.safetensors', 'model.safetensors.index.json'],
)
def test_pointers_in_place_of_files_are_named(saved, name):
  folder, _, _ = saved
  (folder / name).write_text(files.POINTER)
  with pytest.raises(ConfigError, match=f'{name} is a Git LFS pointer for 99'):
    load_hf(folder, None, None)


def test_a_tensor_without_a_place_is_named(saved):
  folder, _, _ = saved
  change(
      folder,
      lambda t: t.update(
          {'model.layers.2.mlp.up_proj.weight': np.zeros(3, 'f')}
      ),
  )
  with pytest.raises(
      ConfigError, match='1 tensors with no place .* model.layers.2.mlp.up_proj'
  ):
    load_hf(folder, None, None)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(saved):
  folder, _, _ = saved
  name = 'model.layers.0.self_attn.k_proj.weight'
  change(folder, lambda t: t.update({name: np.zeros((16, 8), 'f')}))
  with pytest.raises(
      ConfigError, match=rf'{name} has shape \(16, 8\), wanted \(8, 8\)'
  ):
    load_hf(folder, None, None)


def test_a_tensor_of_whole_numbers_is_refused(saved):
  folder, _, _ = saved
  name = 'model.norm.weight'
  change(folder, lambda t: t.update({name: np.zeros(8, np.int8)}))
  with pytest.raises(ConfigError, match=f'{name} is I8, wanted float32'):
    load_hf(folder, None, None)


def test_a_copy_of_the_tied_matrix_is_accepted_and_another_one_refused(
    tmp_path,
):
  config = make_config(tied_embeddings=True)
  params = make_params(config)
  save_hf(tmp_path, config, params)
  copy = params['embedding'].copy()
  change(tmp_path, lambda t: t.update({'lm_head.weight': copy}))
  _, got = load_hf(tmp_path, None, None)
  jax.tree.map(np.testing.assert_array_equal, got, params)
  copy[0, 0] += 1
  change(tmp_path, lambda t: t.update({'lm_head.weight': copy}))
  with pytest.raises(ConfigError, match='no place .* lm_head.weight'):
    load_hf(tmp_path, None, None)


def test_tables_of_rotary_frequencies_are_passed_over(saved):
  folder, _, params = saved
  name = 'model.layers.0.self_attn.rotary_emb.inv_freq'
  change(folder, lambda t: t.update({name: np.zeros(2, 'f')}))
  _, got = load_hf(folder, None, None)
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_files_that_are_not_there_or_not_readable_are_named(saved, tmp_path):
  folder, _, _ = saved
  with pytest.raises(ConfigError, match='there is no file .*config.json'):
    load_hf(tmp_path / 'nowhere', None, None)
  (folder / 'model.safetensors').write_bytes(b'not it')
  with pytest.raises(ConfigError, match='model.safetensors is not safetensors'):
    load_hf(folder, None, None)
  (folder / 'model.safetensors.index.json').write_text('{"weights": 3}')
  with pytest.raises(ConfigError, match='weight_map is None, wanted a file'):
    load_hf(folder, None, None)
  (folder / 'config.json').write_text('[]')
  with pytest.raises(ConfigError, match=r'config.json is \[\], wanted a JSON'):
    load_hf(folder, None, None)
  (folder / 'config.json').write_text('{')
  with pytest.raises(ConfigError, match='config.json is not JSON'):
    load_hf(folder, None, None)


def test_an_unknown_override_is_refused_by_name(saved):
  with pytest.raises(ConfigError, match="overrides has 'wdith', wanted one of"):
    load_hf(saved[0], None, None, overrides={'wdith': 3})
