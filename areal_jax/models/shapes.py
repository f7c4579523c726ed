"""Shapes of published policies by name, for work without their files.

A row is what the checkpoint's `config.json` says where `config_from_hf` would
not assume it anyway; sources are the files at https://huggingface.co under the
names here. A plan for a machine needs the shape alone, so that nothing has to
be downloaded for it. Whatever loads weights reads the checkpoint's own file.
"""

from __future__ import annotations

import pathlib
from typing import Any

from areal_jax.models.config import ModelConfig
from areal_jax.models.hf_config import config_from_hf

# Endings of a name that leave the shape as it is.
_ENDINGS = ('-Instruct', '-Base')


def _qwen2(
    width: int,
    layers: int,
    heads: int,
    kv_heads: int,
    mlp_width: int,
    vocab_size: int = 152_064,
    **more: Any,
) -> dict[str, Any]:
  """A row of the Qwen2 family."""
  return {
      'model_type': 'qwen2',
      'hidden_size': width,
      'num_hidden_layers': layers,
      'num_attention_heads': heads,
      'num_key_value_heads': kv_heads,
      'intermediate_size': mlp_width,
      'vocab_size': vocab_size,
      'rope_theta': 1_000_000.0,
      **more,
  }


_QWEN_1_5B = _qwen2(1536, 28, 12, 2, 8960, 151_936)
_QWEN_7B = _qwen2(3584, 28, 28, 4, 18_944)
_QWEN_14B = _qwen2(5120, 48, 40, 8, 13_824)
_QWEN_32B = _qwen2(5120, 64, 40, 8, 27_648)
_LLAMA_8B = {
    'model_type': 'llama',
    'hidden_size': 4096,
    'num_hidden_layers': 32,
    'num_attention_heads': 32,
    'num_key_value_heads': 8,
    'intermediate_size': 14_336,
    'vocab_size': 128_256,
    'max_position_embeddings': 131_072,
    'rms_norm_eps': 1e-5,
    'rope_theta': 500_000.0,
    'rope_scaling': {
        'rope_type': 'llama3',
        'factor': 8.0,
        'low_freq_factor': 1.0,
        'high_freq_factor': 4.0,
        'original_max_position_embeddings': 8192,
    },
}
# R1's distillations are of the mathematics models, whose RoPE base is another.
_R1 = {'max_position_embeddings': 131_072, 'rope_theta': 10_000.0}
_R1_LARGE = {'max_position_embeddings': 131_072, 'rms_norm_eps': 1e-5}

SHAPES: dict[str, dict[str, Any]] = {
    'Qwen2.5-0.5B': _qwen2(
        896, 24, 14, 2, 4864, 151_936, tie_word_embeddings=True
    ),
    'Qwen2.5-1.5B': {**_QWEN_1_5B, 'tie_word_embeddings': True},
    'Qwen2.5-3B': _qwen2(
        2048, 36, 16, 2, 11_008, 151_936, tie_word_embeddings=True
    ),
    'Qwen2.5-7B': _QWEN_7B,
    'Qwen2.5-14B': _QWEN_14B,
    'Qwen2.5-32B': _QWEN_32B,
    'DeepSeek-R1-Distill-Qwen-1.5B': {**_QWEN_1_5B, **_R1},
    'DeepSeek-R1-Distill-Qwen-7B': {**_QWEN_7B, **_R1},
    'DeepSeek-R1-Distill-Qwen-14B': {**_QWEN_14B, **_R1_LARGE},
    'DeepSeek-R1-Distill-Qwen-32B': {**_QWEN_32B, **_R1_LARGE},
    'Llama-3.1-8B': _LLAMA_8B,
    'DeepSeek-R1-Distill-Llama-8B': _LLAMA_8B,
    'Qwen3-30B-A3B': {
        'model_type': 'qwen3_moe',
        'hidden_size': 2048,
        'num_hidden_layers': 48,
        'num_attention_heads': 32,
        'num_key_value_heads': 4,
        'head_dim': 128,
        'intermediate_size': 6144,
        'moe_intermediate_size': 768,
        'num_experts': 128,
        'num_experts_per_tok': 8,
        'norm_topk_prob': True,
        'vocab_size': 151_936,
        'max_position_embeddings': 40_960,
        'rope_theta': 1_000_000.0,
    },
}


def published_shape(path: str) -> ModelConfig | None:
  """The shape that the last part of a path names; None if none is known.

  Example: 'models/Qwen2.5-7B-Instruct' is the shape of Qwen2.5-7B.
  """
  name = pathlib.PurePath(path).name
  for ending in _ENDINGS:
    name = name.removesuffix(ending)
  row = SHAPES.get(name)
  if row is None:
    return None
  return config_from_hf(row, f'the shape {name}')
