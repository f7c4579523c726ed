"""The settings of the Transformer, and the families it knows.

A family of published checkpoints is a row of `FAMILIES`: the settings in which
it differs from the others, and what its `config.json` leaves unsaid.
`config_from_hf` reads such a file, `config_to_hf` writes one; what a checkpoint
uses and this model lacks is refused by name. Weights are left to `hf.py`, the
arithmetic to `transformer.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, Mapping

from areal_jax.config import ConfigError, require


@dataclasses.dataclass
class RopeScaling:
  """How rotary frequencies are stretched for contexts longer than trained.

  'llama3' divides the frequencies whose wavelength exceeds
  `original_max_length / low_freq_factor` by `factor`, keeps those shorter than
  `original_max_length / high_freq_factor`, and blends in between.
  """

  kind: Literal['none', 'llama3'] = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_length: int = 8192  # tokens

  def validate(self, at: str) -> None:
    require(self.factor >= 1, f'{at}.factor', self.factor, 'at least 1')
    low, high = self.low_freq_factor, self.high_freq_factor
    require(low > 0, f'{at}.low_freq_factor', low, 'more than 0')
    require(
        high > low,
        f'{at}.high_freq_factor',
        high,
        f'more than low_freq_factor={low}',
    )
    length = self.original_max_length
    require(length >= 1, f'{at}.original_max_length', length, 'at least 1')


@dataclasses.dataclass
class ModelConfig:
  """Shape and arithmetic of one policy. The defaults are a toy."""

  vocab_size: int = 512  # ids that exist
  width: int = 96  # D
  layers: int = 2  # L
  heads: int = 4  # N, query heads
  kv_heads: int = 4  # K; N / K query heads share one
  head_size: int = 24  # H
  mlp_width: int = 256
  max_length: int = 2048  # tokens of context the policy is meant for
  rope_theta: float = 10_000.0
  rope_scaling: RopeScaling = dataclasses.field(default_factory=RopeScaling)
  norm_eps: float = 1e-6
  activation: Literal['silu', 'gelu_tanh'] = 'silu'
  tied_embeddings: bool = True  # logits through the embedding's transpose
  qkv_bias: bool = False
  qk_norm: bool = False  # RMSNorm over H of queries and keys, before RoPE
  vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this
  layer_loop: Literal['scan', 'unroll'] = 'unroll'  # scan compiles faster
  compute_dtype: Literal['float32', 'bfloat16'] = 'float32'
  remat: bool = False  # recompute layers in the backward pass

  def validate(self, at: str) -> None:
    sizes = (
        'vocab_size',
        'width',
        'layers',
        'heads',
        'kv_heads',
        'head_size',
        'mlp_width',
        'max_length',
        'vocab_multiple',
    )
    for name in sizes:
      size = getattr(self, name)
      require(size >= 1, f'{at}.{name}', size, 'at least 1')
    require(
        self.heads % self.kv_heads == 0,
        f'{at}.kv_heads',
        self.kv_heads,
        f'a divisor of heads={self.heads}',
    )
    require(self.head_size % 2 == 0, f'{at}.head_size', self.head_size, 'even')
    require(self.rope_theta > 0, f'{at}.rope_theta', self.rope_theta, 'above 0')
    require(self.norm_eps > 0, f'{at}.norm_eps', self.norm_eps, 'above 0')

  @property
  def padded_vocab_size(self) -> int:
    """V, columns of logits; those from `vocab_size` on are never sampled."""
    step = self.vocab_multiple
    return math.ceil(self.vocab_size / step) * step


@dataclasses.dataclass(frozen=True)
class Family:
  """One row of settings; `head_size` and `kv_heads` None follow the heads."""

  architecture: str
  qkv_bias: bool = False
  qk_norm: bool = False
  # What transformers assumes where config.json is silent.
  head_size: int | None = None
  kv_heads: int | None = None
  norm_eps: float = 1e-6
  rope_theta: float = 10_000.0
  max_length: int = 2048


FAMILIES: dict[str, Family] = {
    'llama': Family('LlamaForCausalLM'),
    'qwen2': Family(
        'Qwen2ForCausalLM', qkv_bias=True, kv_heads=32, max_length=32768
    ),
    'qwen3': Family(
        'Qwen3ForCausalLM',
        qk_norm=True,
        head_size=128,
        kv_heads=32,
        max_length=32768,
    ),
}

# Names of activations in config.json.
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}


def config_from_hf(
    hf: Mapping[str, Any], at: str = 'config.json'
) -> ModelConfig:
  """The settings that a Hugging Face `config.json` describes.

  Reads the spelling of published checkpoints (`rope_theta`, `rope_scaling`)
  and that of transformers 5 (`rope_parameters`, `layer_types`).

  Args:
    hf: the parsed file.
    at: its name, for messages.

  Raises:
    ConfigError: a missing field, or one that asks for what this model lacks.
  """
  name = hf.get('model_type')
  require(name in FAMILIES, f'{at}: model_type', name, f'one of {[*FAMILIES]}')
  family = FAMILIES[name]

  def needed(field: str) -> Any:
    if hf.get(field) is None:
      raise ConfigError(f'{at}: {field} is missing, wanted a number')
    return hf[field]

  def optional(field: str, default: Any) -> Any:
    value = hf.get(field)
    return default if value is None else value

  layers, heads = needed('num_hidden_layers'), needed('num_attention_heads')
  width = needed('hidden_size')
  _refuse_unknown_parts(hf, at, name, layers)
  activation = optional('hidden_act', 'silu')
  require(
      activation in _ACTIVATIONS,
      f'{at}: hidden_act',
      activation,
      f'one of {[*_ACTIVATIONS]}',
  )
  theta, scaling = _rope(hf, at, family)
  config = ModelConfig(
      vocab_size=needed('vocab_size'),
      width=width,
      layers=layers,
      heads=heads,
      kv_heads=optional('num_key_value_heads', family.kv_heads or heads),
      head_size=optional('head_dim', family.head_size or width // heads),
      mlp_width=needed('intermediate_size'),
      max_length=optional('max_position_embeddings', family.max_length),
      rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=float(optional('rms_norm_eps', family.norm_eps)),
      activation=_ACTIVATIONS[activation],
      tied_embeddings=optional('tie_word_embeddings', False),
      qkv_bias=family.qkv_bias,
      qk_norm=family.qk_norm,
  )
  scaling.validate(f'{at}: rope_scaling')
  config.validate(at)
  return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """The `config.json` of a policy, in the spelling of published checkpoints.

  Raises:
    ConfigError: no family has these biases and norms.
  """
  name, family = _family_of(config)
  scaling = None
  if config.rope_scaling.kind == 'llama3':
    rope = config.rope_scaling
    scaling = {
        'rope_type': 'llama3',
        'factor': rope.factor,
        'low_freq_factor': rope.low_freq_factor,
        'high_freq_factor': rope.high_freq_factor,
        'original_max_position_embeddings': rope.original_max_length,
    }
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  return {
      'architectures': [family.architecture],
      'model_type': name,
      'vocab_size': config.vocab_size,
      'hidden_size': config.width,
      'intermediate_size': config.mlp_width,
      'num_hidden_layers': config.layers,
      'num_attention_heads': config.heads,
      'num_key_value_heads': config.kv_heads,
      'head_dim': config.head_size,
      'max_position_embeddings': config.max_length,
      'rope_theta': config.rope_theta,
      'rope_scaling': scaling,
      'rms_norm_eps': config.norm_eps,
      'hidden_act': activations[config.activation],
      'tie_word_embeddings': config.tied_embeddings,
      'attention_bias': False,
  }


def _family_of(config: ModelConfig) -> tuple[str, Family]:
  """The row that has the policy's biases and norms."""
  wanted = config.qkv_bias, config.qk_norm
  for name, family in FAMILIES.items():
    if (family.qkv_bias, family.qk_norm) == wanted:
      return name, family
  rows = {n: (f.qkv_bias, f.qk_norm) for n, f in FAMILIES.items()}
  raise ConfigError(
      f'(qkv_bias, qk_norm) is {wanted}, which no family has; wanted those of'
      f' {rows}'
  )


def _refuse_unknown_parts(
    hf: Mapping[str, Any], at: str, name: str, layers: int
) -> None:
  """Raises if the checkpoint really uses a part that this model lacks."""
  # transformers' qwen2 has its q, k and v biases whatever the file says.
  if name != 'qwen2':
    bias = hf.get('attention_bias') or False
    require(not bias, f'{at}: attention_bias', bias, f'false for {name}')
  bias = hf.get('mlp_bias') or False
  require(not bias, f'{at}: mlp_bias', bias, 'false')
  kinds = hf.get('layer_types')
  if kinds is not None:
    others = sorted(set(kinds) - {'full_attention'})
    require(not others, f'{at}: layer_types', others, "only 'full_attention'")
  elif hf.get('use_sliding_window') and hf.get('sliding_window'):
    # transformers slides the layers from max_window_layers (28) on.
    first = hf.get('max_window_layers', 28)
    require(
        first >= layers,
        f'{at}: sliding_window',
        hf['sliding_window'],
        f'none in use: max_window_layers={first} is below {layers} layers',
    )


def _rope(
    hf: Mapping[str, Any], at: str, family: Family
) -> tuple[float, RopeScaling]:
  """Base and scaling of the rotary embedding."""
  field = 'rope_parameters' if hf.get('rope_parameters') else 'rope_scaling'
  rope = hf.get(field) or {}
  theta = hf.get('rope_theta') or rope.get('rope_theta') or family.rope_theta
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  partial = hf.get('partial_rotary_factor') or rope.get('partial_rotary_factor')
  require(
      partial in (None, 1.0), f'{at}: partial_rotary_factor', partial, '1.0'
  )
  known = ['default', 'llama3']
  require(kind in known, f'{at}: {field}.rope_type', kind, f'one of {known}')
  if kind == 'default':
    return float(theta), RopeScaling()

  def needed(part: str) -> Any:
    if rope.get(part) is None:
      raise ConfigError(f'{at}: {field}.{part} is missing, wanted a number')
    return rope[part]

  return float(theta), RopeScaling(
      kind='llama3',
      factor=float(needed('factor')),
      low_freq_factor=float(needed('low_freq_factor')),
      high_freq_factor=float(needed('high_freq_factor')),
      original_max_length=int(needed('original_max_position_embeddings')),
  )
