"""Checkpoints of llama2.c, as folders in the Hugging Face layout.

The legacy format: seven little-endian int32 (width, MLP width, layers, heads,
KV heads, vocabulary, longest sequence), then float32 tensors, those of the
layers stacked. A vocabulary below 0 says that the unembedding is one of its
own, which then stands at the end. See `legacy_export` in `export.py` of
https://github.com/karpathy/llama2.c.
"""

from __future__ import annotations

import math
import os
import pathlib
from typing import Iterator, Mapping

import numpy as np

from areal_jax.config import ConfigError, require
from areal_jax.files import check_content
from areal_jax.models import published
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf_config import config_to_hf

_HEADER = 7
_SPECIAL = {'bos_token_id': 1, 'eos_token_id': 2}  # of its tokenizers
# Fixed in llama2.c.
_EPS, _THETA = 1e-5, 10_000.0


def read_config(path: str | os.PathLike) -> ModelConfig:
  """The policy's settings.

  Raises:
    ConfigError: the file is not there, or is none of this format.
  """
  path = pathlib.Path(path)
  require(path.is_file(), 'llama2.c file', str(path), 'a file')
  check_content(path)
  header = np.fromfile(path, '<i4', _HEADER)
  if len(header) < _HEADER:
    size = path.stat().st_size
    raise ConfigError(f'{path} has {size} bytes, wanted at least 28')
  width, mlp, layers, heads, kv_heads, vocab, length = header.tolist()
  right = min(width, mlp, layers, heads, kv_heads, abs(vocab), length) > 0
  right = right and width % heads == 0 and heads % kv_heads == 0
  right = right and (width // heads) % 2 == 0
  require(right, f'{path}: header', header.tolist(),
          'sizes of a llama2.c checkpoint (legacy format)')  # fmt: skip
  config = ModelConfig(
      vocab_size=abs(vocab),
      width=width,
      layers=layers,
      heads=heads,
      kv_heads=kv_heads,
      head_size=width // heads,
      mlp_width=mlp,
      max_length=length,
      rope_theta=_THETA,
      norm_eps=_EPS,
      tied_embeddings=vocab > 0,
  )
  wanted = 4 * (_HEADER + sum(math.prod(s) for _, s in _layout(config)))
  size = path.stat().st_size
  require(size == wanted, f'{path}: bytes', size,
          f'{wanted} by its header, {header.tolist()}')  # fmt: skip
  return config


def write_hf(
    path: str | os.PathLike,
    folder: pathlib.Path,
    *,
    dtype: str = 'float32',
    files: Mapping[str, bytes] | None = None,
    limit: int = published.LIMIT,
) -> ModelConfig:
  """Writes a checkpoint as a folder in the Hugging Face layout.

  Args:
    path: of the .bin.
    folder: to be made.
    dtype: of the tensors.
    files: that go along, such as those of the tokenizer.
    limit: see `published.write_folder`.

  Returns:
    The policy's settings.

  Raises:
    ConfigError: whatever `read_config` refuses.
  """
  config = read_config(path)
  shapes = []
  for name, sizes in _layout(config):
    layered = '{layer}' in name
    shapes += [
        published.Shape(name.format(layer=layer), inner, np.dtype(dtype))
        for layer in range(config.layers if layered else 1)
        for inner in [sizes[1:] if layered else sizes]
        if name
    ]
  published.write_folder(
      folder,
      {**config_to_hf(config), **_SPECIAL, 'torch_dtype': dtype},
      shapes,
      _tensors(pathlib.Path(path), config),
      files=files,
      limit=limit,
  )
  return config


# Helpers.


def _layout(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
  """Published names and sizes in the order of the file; '' is passed over."""
  c = config
  deep, at = c.layers, 'model.layers.{layer}.'
  queries, keys = c.heads * c.head_size, c.kv_heads * c.head_size
  tensors = [
      ('model.embed_tokens.weight', (c.vocab_size, c.width)),
      (at + 'input_layernorm.weight', (deep, c.width)),
      (at + 'self_attn.q_proj.weight', (deep, queries, c.width)),
      (at + 'self_attn.k_proj.weight', (deep, keys, c.width)),
      (at + 'self_attn.v_proj.weight', (deep, keys, c.width)),
      (at + 'self_attn.o_proj.weight', (deep, c.width, queries)),
      (at + 'post_attention_layernorm.weight', (deep, c.width)),
      (at + 'mlp.gate_proj.weight', (deep, c.mlp_width, c.width)),
      (at + 'mlp.down_proj.weight', (deep, c.width, c.mlp_width)),
      (at + 'mlp.up_proj.weight', (deep, c.mlp_width, c.width)),
      ('model.norm.weight', (c.width,)),
      ('', (2, c.max_length, c.head_size // 2)),  # cosines and sines
  ]
  if not c.tied_embeddings:
    tensors.append(('lm_head.weight', (c.vocab_size, c.width)))
  return tensors


def _tensors(
    path: pathlib.Path, config: ModelConfig
) -> Iterator[tuple[str, np.ndarray]]:
  """Tensors as they are published, one layer of one after another."""
  numbers = np.memmap(path, '<f4', 'r', offset=4 * _HEADER)
  start = 0
  for name, sizes in _layout(config):
    stop = start + math.prod(sizes)
    stacked = numbers[start:stop].reshape(sizes)
    start = stop
    if '{layer}' not in name:
      if name:
        yield name, stacked
      continue
    for layer, tensor in enumerate(stacked):
      if 'q_proj' in name:
        tensor = published.half_split(tensor, config.heads)
      if 'k_proj' in name:
        tensor = published.half_split(tensor, config.kv_heads)
      yield name.format(layer=layer), tensor
