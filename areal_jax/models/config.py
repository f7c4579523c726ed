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
import sys
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
    low, high = self.low_freq_factor, self.high_freq_factor
    for name in ('factor', 'low_freq_factor', 'high_freq_factor'):
      value = getattr(self, name)
      require(math.isfinite(value), f'{at}.{name}', value, 'a finite number')
    require(self.factor >= 1, f'{at}.factor', self.factor, 'at least 1')
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
    for name in ('rope_theta', 'norm_eps'):
      value = getattr(self, name)
      right = 0 < value < math.inf
      require(right, f'{at}.{name}', value, 'above 0 and finite')

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
    ConfigError: a field that is missing, is of another type, or asks for what
      this model lacks.
  """
  name = _choice(hf, 'model_type', FAMILIES, None, at)
  family = FAMILIES[name]
  layers = _size(hf, 'num_hidden_layers', None, at)
  heads = _size(hf, 'num_attention_heads', None, at)
  width = _size(hf, 'hidden_size', None, at)
  _refuse_unknown_parts(hf, at, name, layers)
  activation = _choice(hf, 'hidden_act', _ACTIVATIONS, 'silu', at)
  theta, scaling = _rope(hf, at, family)
  config = ModelConfig(
      vocab_size=_size(hf, 'vocab_size', None, at),
      width=width,
      layers=layers,
      heads=heads,
      kv_heads=_size(hf, 'num_key_value_heads', family.kv_heads or heads, at),
      head_size=_size(hf, 'head_dim', family.head_size or width // heads, at),
      mlp_width=_size(hf, 'intermediate_size', None, at),
      max_length=_size(hf, 'max_position_embeddings', family.max_length, at),
      rope_theta=theta,
      rope_scaling=scaling,
      norm_eps=_number(hf, 'rms_norm_eps', family.norm_eps, at),
      activation=_ACTIVATIONS[activation],
      tied_embeddings=_truth(hf, 'tie_word_embeddings', at),
      qkv_bias=family.qkv_bias,
      qk_norm=family.qk_norm,
  )
  scaling.validate(f'{at}: rope_scaling')
  config.validate(at)
  return config


def _value(
    fields: Mapping[str, Any], name: str, default: Any, at: str, wanted: str
) -> Any:
  """A field, or the default where it is absent or null."""
  value = fields.get(name)
  value = default if value is None else value
  if value is None:
    raise ConfigError(f'{at}: {name} is missing, wanted {wanted}')
  return value


def _size(
    fields: Mapping[str, Any], name: str, default: int | None, at: str
) -> int:
  """A whole number of at least 1."""
  wanted = 'a whole number of at least 1'
  value = _value(fields, name, default, at, wanted)
  whole = isinstance(value, int) and not isinstance(value, bool)
  require(whole and value >= 1, f'{at}: {name}', value, wanted)
  return value


def _number(
    fields: Mapping[str, Any], name: str, default: float | None, at: str
) -> float:
  """A finite number above 0."""
  wanted = 'a finite number above 0'
  value = _value(fields, name, default, at, wanted)
  number = isinstance(value, (int, float)) and not isinstance(value, bool)
  # Not merely below infinity: Python has whole numbers that no float can hold.
  right = number and 0 < value <= sys.float_info.max
  require(right, f'{at}: {name}', value, wanted)
  return float(value)


def _truth(fields: Mapping[str, Any], name: str, at: str) -> bool:
  """A truth value; absent is false."""
  value = _value(fields, name, False, at, '')
  require(isinstance(value, bool), f'{at}: {name}', value, 'true or false')
  return value


def _choice(
    fields: Mapping[str, Any],
    name: str,
    options: Mapping[str, Any],
    default: str | None,
    at: str,
) -> str:
  """The name of one of the options."""
  value = fields.get(name)
  value = default if value is None else value
  known = isinstance(value, str) and value in options
  require(known, f'{at}: {name}', value, f'one of {[*options]}')
  return value


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
    bias = _truth(hf, 'attention_bias', at)
    require(not bias, f'{at}: attention_bias', bias, f'false for {name}')
  bias = _truth(hf, 'mlp_bias', at)
  require(not bias, f'{at}: mlp_bias', bias, 'false')
  kinds = hf.get('layer_types')
  if kinds is not None:
    wanted = "a list of 'full_attention' alone"
    right = isinstance(kinds, list)
    require(right, f'{at}: layer_types', kinds, wanted)
    others = [kind for kind in kinds if kind != 'full_attention']
    require(not others, f'{at}: layer_types', others, wanted)
  elif _truth(hf, 'use_sliding_window', at) and hf.get('sliding_window'):
    # transformers slides the layers from max_window_layers (28) on.
    first = hf.get('max_window_layers', 28)
    whole = isinstance(first, int)
    require(whole, f'{at}: max_window_layers', first, 'a whole number')
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
  rope = {} if hf.get(field) is None else hf[field]
  require(isinstance(rope, dict), f'{at}: {field}', rope, 'an object or null')
  # The parts of the object, under names that a message can show.
  parts = {f'{field}.{name}': value for name, value in rope.items()}
  inner = _number(parts, f'{field}.rope_theta', family.rope_theta, at)
  theta = _number(hf, 'rope_theta', inner, at)
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  partial = hf.get('partial_rotary_factor') or rope.get('partial_rotary_factor')
  require(
      partial in (None, 1.0), f'{at}: partial_rotary_factor', partial, '1.0'
  )
  known = ['default', 'llama3']
  require(kind in known, f'{at}: {field}.rope_type', kind, f'one of {known}')
  if kind == 'default':
    return theta, RopeScaling()
  length = 'original_max_position_embeddings'
  return theta, RopeScaling(
      kind='llama3',
      factor=_number(parts, f'{field}.factor', None, at),
      low_freq_factor=_number(parts, f'{field}.low_freq_factor', None, at),
      high_freq_factor=_number(parts, f'{field}.high_freq_factor', None, at),
      original_max_length=_size(parts, f'{field}.{length}', None, at),
  )
