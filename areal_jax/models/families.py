"""The families of published checkpoints: the table `FAMILIES`.

A row holds the settings that all policies of a family share, what its
`config.json` leaves unsaid, which of its layers slide, and the names of tensors
in which it differs from Llama. `hf_config.py` reads and writes settings by it,
`hf.py` tensors. How to add a family stands in `docs/models.md`.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Mapping

from areal_jax.models.hf_fields import read_size

# Which layers slide, of [0, layers), by the fields of a config.json that has a
# window but no `layer_types`.
Slides = Callable[[Mapping[str, Any], int, str], list[int]]


def all_layers(fields: Mapping[str, Any], layers: int, at: str) -> list[int]:
  """Every layer slides."""
  del fields, at
  return [*range(layers)]


def _all_but_each(
    each: int, fields: Mapping[str, Any], layers: int, at: str
) -> list[int]:
  """Every `each`-th layer is full, unless the file has another pattern."""
  each = read_size(fields, 'sliding_window_pattern', each, at)
  return [n for n in range(layers) if (n + 1) % each]


def _late_layers(fields: Mapping[str, Any], layers: int, at: str) -> list[int]:
  """The layers from `max_window_layers` on slide."""
  first = read_size(fields, 'max_window_layers', None, at, least=0)
  return [*range(first, layers)]


@dataclasses.dataclass(frozen=True)
class Family:
  """One row of `FAMILIES`.

  Attributes:
    architecture: the class of transformers.
    settings: fields of `ModelConfig` that all its policies share.
    defaults: what transformers assumes where config.json is silent, by the
      names there. A field that `DEFAULTS` lacks is read and written for the
      families that name it here, and for no other.
    slides: which layers do; None if no policy of the family has a window.
    counts_stretch: whether `max_position_embeddings` of its files is the length
      after linear scaling, not before it.
    tensors: published names, by the last part of our path, that differ from
      those in `hf.ROWS`.
  """

  architecture: str
  settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  slides: Slides | None = None
  counts_stretch: bool = False
  tensors: Mapping[str, str] = dataclasses.field(default_factory=dict)


# What transformers assumes for Llama where a field is absent. A head_dim of
# None is hidden_size / num_attention_heads; key/value heads of None are as many
# as query heads.
DEFAULTS: dict[str, Any] = {
    'head_dim': None,
    'num_key_value_heads': None,
    'max_position_embeddings': 2048,
    'rope_theta': 10_000.0,
    'rms_norm_eps': 1e-6,
    'hidden_act': 'silu',
    'tie_word_embeddings': False,
}
_QWEN: dict[str, Any] = {
    'num_key_value_heads': 32,
    'max_position_embeddings': 32768,
    'use_sliding_window': False,
    'sliding_window': 4096,
    'max_window_layers': 28,
}
_GEMMA: dict[str, Any] = {
    'head_dim': 256,
    'num_key_value_heads': 4,
    'hidden_activation': 'gelu_pytorch_tanh',
    'tie_word_embeddings': True,
    'query_pre_attn_scalar': 256,
    'sliding_window': 4096,
    'final_logit_softcapping': None,
}
_GEMMA_SETTINGS = dict(
    post_norms=True, unit_offset=True, scaled_embeddings=True
)
_GEMMA_TENSORS = {
    'mlp_norm': 'model.layers.{layer}.pre_feedforward_layernorm.weight'
}
_MIXTRAL_TENSORS = {
    name: f'model.layers.{{layer}}.block_sparse_moe.{theirs}.weight'
    for name, theirs in (
        ('router', 'gate'),
        ('expert_gate', 'experts.{expert}.w1'),
        ('expert_up', 'experts.{expert}.w3'),
        ('expert_down', 'experts.{expert}.w2'),
    )
}
FAMILIES: dict[str, Family] = {
    # Llama 2 and 3, SmolLM2, R1-Distill-Llama.
    'llama': Family('LlamaForCausalLM'),
    # Qwen2, Qwen2.5, R1-Distill-Qwen.
    'qwen2': Family(
        'Qwen2ForCausalLM',
        settings=dict(qkv_bias=True),
        defaults=_QWEN,
        slides=_late_layers,
    ),
    'qwen3': Family(
        'Qwen3ForCausalLM',
        settings=dict(qk_norm=True),
        defaults={**_QWEN, 'head_dim': 128},
        slides=_late_layers,
    ),
    'mistral': Family(
        'MistralForCausalLM',
        defaults={
            'num_key_value_heads': 8,
            'max_position_embeddings': 131_072,
            'sliding_window': 4096,
        },
        slides=all_layers,
    ),
    'gemma2': Family(
        'Gemma2ForCausalLM',
        settings=_GEMMA_SETTINGS,
        defaults={
            **_GEMMA,
            'max_position_embeddings': 8192,
            'attn_logit_softcapping': 50.0,
            'final_logit_softcapping': 30.0,
        },
        slides=functools.partial(_all_but_each, 2),
        tensors=_GEMMA_TENSORS,
    ),
    # transformers caps no scores there, whatever the file says.
    'gemma3_text': Family(
        'Gemma3ForCausalLM',
        settings=dict(_GEMMA_SETTINGS, qk_norm=True),
        defaults={
            **_GEMMA,
            'max_position_embeddings': 131_072,
            'rope_theta': 1_000_000.0,
            'rope_local_base_freq': 10_000.0,
        },
        slides=functools.partial(_all_but_each, 6),
        counts_stretch=True,
        tensors=_GEMMA_TENSORS,
    ),
    'mixtral': Family(
        'MixtralForCausalLM',
        defaults={
            'num_key_value_heads': 8,
            'max_position_embeddings': 131_072,
            'rope_theta': 1_000_000.0,
            'rms_norm_eps': 1e-5,
            'sliding_window': None,
            'num_experts': 8,
            'num_experts_per_tok': 2,
        },
        slides=all_layers,
        tensors=_MIXTRAL_TENSORS,
    ),
    'qwen3_moe': Family(
        'Qwen3MoeForCausalLM',
        settings=dict(qk_norm=True),
        defaults={
            'num_key_value_heads': 4,
            'max_position_embeddings': 32768,
            'use_sliding_window': False,
            'sliding_window': 4096,
            'num_experts': 128,
            'num_experts_per_tok': 8,
            'moe_intermediate_size': 768,
            'norm_topk_prob': False,
            'decoder_sparse_step': 1,
            'mlp_only_layers': (),
        },
        slides=all_layers,
    ),
}
