"""GGUF files, the format of llama.cpp, as folders in the Hugging Face layout.

Settings and names go through one table an architecture, quantised tensors
become floats, and where a file has its rotary rows interleaved they are put in
order. Its tokenizer is left to `areal_jax.tokenizer.gguf`.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
from typing import Any, Iterator, Mapping

import gguf
import numpy as np

from areal_jax.config import ConfigError, require
from areal_jax.files import check_content
from areal_jax.models import published, rope
from areal_jax.models.config import ModelConfig, RopeScaling
from areal_jax.models.families import FAMILIES
from areal_jax.models.hf_config import config_to_hf


@dataclasses.dataclass(frozen=True)
class Architecture:
  """The layout of one family in a GGUF file.

  `interleaved` says whether rows of queries and keys are in the order of
  Meta's checkpoints, pairs (2i, 2i + 1).
  """

  interleaved: bool = False


# Under the names of our families.
ARCHITECTURES = {
    'llama': Architecture(interleaved=True),
    'qwen2': Architecture(),
    'qwen3': Architecture(),
}

_NAMES = {
    'token_embd': 'model.embed_tokens',
    'output_norm': 'model.norm',
    'output': 'lm_head',
}
_LAYER_NAMES = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'attn_q_norm': 'self_attn.q_norm',
    'attn_k_norm': 'self_attn.k_norm',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}
# Divisors of the rotary frequencies; in config.json they are settings.
_ROPE = 'rope_freqs.weight'
_TOKENS = {
    'bos_token_id': 'tokenizer.ggml.bos_token_id',
    'eos_token_id': 'tokenizer.ggml.eos_token_id',
    'pad_token_id': 'tokenizer.ggml.padding_token_id',
}


@dataclasses.dataclass(frozen=True)
class File:
  """A GGUF file: its metadata as plain values, its tensors by name."""

  path: str
  fields: Mapping[str, Any]
  tensors: Mapping[str, gguf.ReaderTensor]

  @property
  def architecture(self) -> Architecture:
    return ARCHITECTURES[self.fields['general.architecture']]

  def config(self) -> ModelConfig:
    """The policy's settings.

    Raises:
      ConfigError: a field that is missing or asks for what this model lacks.
    """
    arch = self._field('general.architecture')
    require(arch in ARCHITECTURES, f'{self.path}: general.architecture', arch,
            f'one of {[*ARCHITECTURES]}')  # fmt: skip
    width = self._field(f'{arch}.embedding_length')
    heads = self._field(f'{arch}.attention.head_count')
    head_size = self.fields.get(f'{arch}.attention.key_length', width // heads)
    turned = self.fields.get(f'{arch}.rope.dimension_count', head_size)
    require(turned == head_size, f'{self.path}: {arch}.rope.dimension_count',
            turned, f'the head size, {head_size}')  # fmt: skip
    for name in ('token_embd.weight', 'output_norm.weight'):
      if name not in self.tensors:
        raise ConfigError(f'{self.path} lacks the tensor {name}')
    theta = float(self.fields.get(f'{arch}.rope.freq_base', 10_000.0))
    config = ModelConfig(
        family=arch,
        vocab_size=int(self.tensors['token_embd.weight'].shape[1]),
        width=width,
        layers=self._field(f'{arch}.block_count'),
        heads=heads,
        kv_heads=self.fields.get(f'{arch}.attention.head_count_kv', heads),
        head_size=head_size,
        mlp_width=self._field(f'{arch}.feed_forward_length'),
        max_length=self._field(f'{arch}.context_length'),
        rope_theta=_short(theta),
        norm_eps=_short(
            self._field(f'{arch}.attention.layer_norm_rms_epsilon')
        ),
        tied_embeddings='output.weight' not in self.tensors,
        **FAMILIES[arch].settings,
    )
    config.validate(self.path)
    kind = self.fields.get(f'{arch}.rope.scaling.type', 'none')
    require(kind == 'none', f'{self.path}: {arch}.rope.scaling.type', kind,
            "'none'")  # fmt: skip
    if _ROPE in self.tensors:
      config = self._scaled(config)
    return config

  def _field(self, name: str) -> Any:
    if name not in self.fields:
      raise ConfigError(f'{self.path} lacks the field {name}')
    return self.fields[name]

  def _scaled(self, config: ModelConfig) -> ModelConfig:
    """Adds the scaling that explains the divisors of the frequencies."""
    divisors = _read(self.tensors[_ROPE]).ravel()
    # The slowest waves are divided by the whole factor; the rest of Llama
    # 3.1's, 3.2's and 3.3's settings is the same in all of them.
    scaling = RopeScaling(
        kind='llama3',
        factor=float(divisors.max()),
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_length=8192,
    )
    scaled = dataclasses.replace(config, rope_scaling=scaling)
    wanted = rope.rope_frequencies(config) / rope.rope_frequencies(scaled)
    right = divisors.shape == wanted.shape
    right = right and np.allclose(divisors, wanted, rtol=1e-3)
    if not right:
      raise ConfigError(
          f'{self.path}: {_ROPE} is none of the scalings of Llama 3.1 and'
          ' later, which alone can be read from a GGUF file'
      )
    return scaled


def open_gguf(path: str | os.PathLike) -> File:
  """Reads the metadata of a file, and no tensor.

  Raises:
    ConfigError: it is not there, or no GGUF.
  """
  path = pathlib.Path(path)
  require(path.is_file(), 'GGUF file', str(path), 'a file')
  check_content(path)
  try:
    reader = gguf.GGUFReader(path)
  # What the reader raises for bytes that are something else or cut off.
  except (ValueError, IndexError, KeyError, OverflowError) as error:
    raise ConfigError(f'{path} is no GGUF file: {error}') from error
  fields = {name: field.contents() for name, field in reader.fields.items()}
  return File(str(path), fields, {t.name: t for t in reader.tensors})


def write_hf(
    file: File,
    folder: pathlib.Path,
    *,
    dtype: str = 'float32',
    files: Mapping[str, bytes] | None = None,
    limit: int = published.LIMIT,
) -> ModelConfig:
  """Writes a file's policy as a folder in the Hugging Face layout.

  Args:
    file: open.
    folder: to be made.
    dtype: of the tensors.
    files: that go along, such as those of the tokenizer.
    limit: see `published.write_folder`.

  Returns:
    The policy's settings.

  Raises:
    ConfigError: a setting or tensor that this model has no place for, or a
      quantisation that cannot be undone.
  """
  config = file.config()
  described = config_to_hf(config)
  described['torch_dtype'] = dtype
  for name, field in _TOKENS.items():
    if field in file.fields:
      described[name] = file.fields[field]
  names = {
      name: _published_name(file.path, name)
      for name in file.tensors
      if name != _ROPE
  }
  shapes = [
      published.Shape(
          name,
          tuple(int(n) for n in reversed(file.tensors[theirs].shape)),
          np.dtype(dtype),
      )
      for theirs, name in names.items()
  ]
  published.write_folder(
      folder, described, shapes, _tensors(file, config, names),
      files=files, limit=limit,
  )  # fmt: skip
  return config


# Helpers.


def _tensors(
    file: File, config: ModelConfig, names: Mapping[str, str]
) -> Iterator[tuple[str, np.ndarray]]:
  """Tensors as they are published, dequantised one at a time."""
  heads = {'attn_q': config.heads, 'attn_k': config.kv_heads}
  for theirs, name in names.items():
    tensor = _read(file.tensors[theirs])
    kind = theirs.split('.')[-2]
    if file.architecture.interleaved and kind in heads:
      tensor = published.half_split(tensor, heads[kind])
    yield name, tensor


def _published_name(path: str, name: str) -> str:
  """'blk.3.attn_q.weight' -> 'model.layers.3.self_attn.q_proj.weight'."""
  parts = name.split('.')
  if parts[0] == 'blk' and len(parts) == 4 and parts[2] in _LAYER_NAMES:
    return f'model.layers.{parts[1]}.{_LAYER_NAMES[parts[2]]}.{parts[3]}'
  if len(parts) == 2 and parts[0] in _NAMES:
    return f'{_NAMES[parts[0]]}.{parts[1]}'
  raise ConfigError(
      f'{path} has the tensor {name}, wanted one of {sorted(_NAMES)} or of'
      f' {sorted(_LAYER_NAMES)} in a layer blk.N'
  )


def _read(tensor: gguf.ReaderTensor) -> np.ndarray:
  """The numbers in float32, [outputs, inputs] as they are published."""
  try:
    return gguf.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ConfigError(
        f'tensor {tensor.name} is {tensor.tensor_type.name}, which cannot be'
        ' turned into floats'
    ) from error


def _short(value: float) -> float:
  """The shortest number that is this one in float32: 9.999999747e-06, 1e-5."""
  return float(str(np.float32(value)))
