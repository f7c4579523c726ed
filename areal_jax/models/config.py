"""The settings of the Transformer, and the families it knows.

A family of published checkpoints is a row of `FAMILIES`: the settings that all
its policies share, what its `config.json` leaves unsaid, which of its layers
slide, and the names of tensors in which it differs from Llama.
`config_from_hf` reads such a file, `config_to_hf` writes one; what a checkpoint
uses and this model lacks is refused by name. Weights are left to `hf.py`, the
arithmetic to `transformer.py`, the way to add a family to `docs/models.md`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from typing import Any, Callable, Literal, Mapping, NamedTuple

import numpy as np

from areal_jax.config import ConfigError, require

# Parameters of a block that not every layer has.
MLP_PARAMETERS = ('gate', 'up', 'down')
EXPERT_PARAMETERS = ('router', 'expert_gate', 'expert_up', 'expert_down')


@dataclasses.dataclass
class RopeScaling:
  """How rotary frequencies are stretched for contexts longer than trained.

  'linear' divides them all by `factor`.

  'dynamic' raises the base with the length of the sequence, from
  `original_max_length` on. The length that counts for a position p is p + 1:
  a token is encoded as if it were the last one. So a key's encoding never
  changes while its sequence grows, and prefill, decode and trainer agree.

  'yarn' divides the frequencies that turn less than `beta_slow` times in
  `original_max_length` tokens by `factor`, keeps those that turn more than
  `beta_fast` times, and blends in between; cosines and sines are multiplied by
  `amplitude`.

  'llama3' divides the frequencies whose wavelength exceeds
  `original_max_length / low_freq_factor` by `factor`, keeps those shorter than
  `original_max_length / high_freq_factor`, and blends in between.
  """

  kind: Literal['none', 'linear', 'dynamic', 'yarn', 'llama3'] = 'none'
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_length: int = 8192  # tokens
  beta_fast: float = 32.0  # turns
  beta_slow: float = 1.0  # turns
  attention_factor: float = 0.0  # 0: follows from factor and mscales
  mscale: float = 0.0  # 0: unset
  mscale_all_dim: float = 0.0  # 0: unset
  truncate: bool = True  # the blend begins and ends at whole dimensions

  def validate(self, at: str) -> None:
    numbers = [
        f.name for f in dataclasses.fields(self) if isinstance(f.default, float)
    ]
    for name in numbers:
      value = getattr(self, name)
      require(math.isfinite(value), f'{at}.{name}', value, 'a finite number')
    require(self.factor >= 1, f'{at}.factor', self.factor, 'at least 1')
    for low, high in (
        ('low_freq_factor', 'high_freq_factor'),
        ('beta_slow', 'beta_fast'),
    ):
      least = getattr(self, low)
      require(least > 0, f'{at}.{low}', least, 'more than 0')
      least, most = getattr(self, low), getattr(self, high)
      right = most >= least if high == 'beta_fast' else most > least
      wanted = 'at least' if high == 'beta_fast' else 'more than'
      require(right, f'{at}.{high}', most, f'{wanted} {low}={least}')
    for name in ('attention_factor', 'mscale', 'mscale_all_dim'):
      value = getattr(self, name)
      require(value >= 0, f'{at}.{name}', value, 'at least 0')
    length = self.original_max_length
    require(length >= 1, f'{at}.original_max_length', length, 'at least 1')

  @property
  def amplitude(self) -> float:
    """What cosines and sines are multiplied by: 1 but for 'yarn'.

    0.1 ln(factor) + 1, of https://arxiv.org/abs/2309.00071, or the ratio of two
    such numbers where both mscales weigh the logarithm, as DeepSeek does.
    """
    if self.kind != 'yarn':
      return 1.0
    if self.attention_factor:
      return self.attention_factor
    grown = math.log(self.factor) / 10
    if self.mscale and self.mscale_all_dim:
      return (self.mscale * grown + 1) / (self.mscale_all_dim * grown + 1)
    return grown + 1


# Matrices of a layer that can have an adapter, in the order they are used.
PROJECTIONS = ('query', 'key', 'value', 'out', 'gate', 'up', 'down')
_MLP = PROJECTIONS[4:]


@dataclasses.dataclass
class LoraSettings:
  """Adapters that learn in place of the policy; see `lora.py`.

  Attributes:
    projections: the matrices that have one, of `PROJECTIONS`; empty for none,
      and then the whole policy learns.
    rank: r, columns of A and rows of B.
    alpha: their product is multiplied by alpha / rank.
    rslora: by alpha / sqrt(rank) instead.
    base_dtype: of the frozen parameters.
  """

  projections: tuple[str, ...] = ()
  rank: int = 16
  alpha: float = 32.0
  rslora: bool = False
  base_dtype: Literal['float32', 'bfloat16'] = 'float32'

  def validate(self, at: str) -> None:
    require(self.rank >= 1, f'{at}.rank', self.rank, 'at least 1')
    right = 0 < self.alpha < math.inf
    require(right, f'{at}.alpha', self.alpha, 'above 0 and finite')
    names = self.projections
    right = len({*names} & {*PROJECTIONS}) == len(names)
    wanted = f'some of {PROJECTIONS}, each once'
    require(right, f'{at}.projections', names, wanted)


@dataclasses.dataclass
class MoeSettings:
  """Experts in place of the MLP, and what training does with their routers.

  Attributes:
    experts: E of a sparse layer; 0 for a policy without any.
    chosen: k, experts that a token goes to.
    width: columns of one expert.
    renormalise: whether the weights of the chosen ones add up to 1.
    dense_layers: numbers of the layers that keep a plain MLP.
    balance: what the load-balance loss of training is multiplied by. Any but 0
      costs one more forward pass: see `train.step`.
    replay: whether the trainer sends tokens to the experts that the engine sent
      them to. The engine then records 2 bytes for each choice, that is
      2 L k bytes a token, which travel with the answer until it is trained.
  """

  experts: int = 0
  chosen: int = 2
  width: int = 256
  renormalise: bool = True
  dense_layers: tuple[int, ...] = ()
  balance: float = 0.0
  replay: bool = False

  def validate(self, at: str) -> None:
    most = 32_767  # a choice is recorded in 16 bits
    right = 0 <= self.experts <= most
    require(right, f'{at}.experts', self.experts, f'0 to {most}')
    right = math.isfinite(self.balance) and self.balance >= 0
    require(right, f'{at}.balance', self.balance, 'at least 0 and finite')
    require(self.width >= 1, f'{at}.width', self.width, 'at least 1')
    most = self.experts or most
    wanted = f'1 to experts={most}' if self.experts else f'1 to {most}'
    require(1 <= self.chosen <= most, f'{at}.chosen', self.chosen, wanted)
    if self.experts:
      return
    for name in ('balance', 'replay', 'dense_layers'):
      value = getattr(self, name)
      require(not value, f'{at}.{name}', value, f'none, for {at}.experts is 0')


# What the backward pass computes again, of each layer, to save memory: nothing;
# all but its matrix products (attention's scores and mixture are computed
# again); everything, from the layer's input; everything, with those inputs in
# the host's memory until they are needed.
Remat = Literal['none', 'dots', 'full', 'offload']


@dataclasses.dataclass
class AttentionSettings:
  """Forms of attention to insist on; 'auto' chooses by the platform.

  Which form does what, and what is chosen, stands in `forms.py`. One that
  cannot do what is asked is refused with the reason when a program is traced.

  Attributes:
    rows: that of training and prefill.
    pages: that of decode.
  """

  rows: Literal[
      'auto', 'grouped', 'by_head', 'blockwise', 'splash', 'triton', 'cudnn'
  ] = 'auto'
  pages: Literal['auto', 'gathered', 'mosaic', 'triton'] = 'auto'


@dataclasses.dataclass
class ModelConfig:
  """Shape and arithmetic of one policy. The defaults are a toy."""

  family: str = 'llama'  # row of FAMILIES that it is exported as
  vocab_size: int = 512  # rows of the embedding that exist
  # Ranges [first, end) of ids that the tokenizer lacks. Published embeddings
  # often have more rows than their tokenizer has ids. A run fills this in.
  absent_ids: tuple[tuple[int, int], ...] = ()
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
  post_norms: bool = False  # RMSNorm also of what a block adds to the stream
  unit_offset: bool = False  # norms multiply by 1 + weight
  scaled_embeddings: bool = False  # embeddings are multiplied by sqrt(D)
  query_scalar: float = 0.0  # scores are divided by its root; 0: head_size
  attention_cap: float = 0.0  # scores are cap · tanh(score / cap); 0: none
  logit_cap: float = 0.0  # the same for logits
  sliding_window: int = 0  # tokens seen in a sliding layer, its own included
  sliding_layers: tuple[int, ...] = ()  # numbers of the layers that slide
  sliding_rope_theta: float = 0.0  # theirs, unscaled; 0: that of the others
  moe: MoeSettings = dataclasses.field(default_factory=MoeSettings)
  vocab_multiple: int = 1  # the vocabulary is padded to a multiple of this
  layer_loop: Literal['scan', 'unroll'] = 'unroll'  # scan compiles faster
  compute_dtype: Literal['float32', 'bfloat16'] = 'float32'
  remat: Remat = 'none'  # what of a layer the backward pass computes again
  attention: AttentionSettings = dataclasses.field(
      default_factory=AttentionSettings
  )
  lora: LoraSettings = dataclasses.field(default_factory=LoraSettings)

  def validate(self, at: str) -> None:
    known = self.family in FAMILIES
    require(known, f'{at}.family', self.family, f'one of {[*FAMILIES]}')
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
    for name in (
        'query_scalar',
        'attention_cap',
        'logit_cap',
        'sliding_rope_theta',
    ):
      value = getattr(self, name)
      right = 0 <= value < math.inf
      require(right, f'{at}.{name}', value, 'at least 0 and finite')
    self._validate_absent_ids(at)
    self._validate_sliding(at)
    self._validate_rope(at)
    self._validate_dense_layers(at)
    mlp = [name for name in self.lora.projections if name in _MLP]
    require(
        not (mlp and self.sparse_layers),
        f'{at}.lora.projections',
        self.lora.projections,
        f'none of {_MLP} in a policy with experts, which have no adapters',
    )

  def _validate_absent_ids(self, at: str) -> None:
    bounds = [bound for pair in self.absent_ids for bound in pair]
    ascending = all(a < b for a, b in zip(bounds, bounds[1:]))
    inside = not bounds or (bounds[0] >= 0 and bounds[-1] <= self.vocab_size)
    absent = sum(end - first for first, end in self.absent_ids)
    require(
        ascending and inside and absent < self.vocab_size,
        f'{at}.absent_ids',
        self.absent_ids,
        'ascending ranges (first, end), apart from each other, of some but not'
        f' all ids below vocab_size={self.vocab_size}',
    )

  def _validate_sliding(self, at: str) -> None:
    slide, window = self.sliding_layers, self.sliding_window
    numbers = sorted({n for n in slide if 0 <= n < self.layers})
    require(
        list(slide) == numbers,
        f'{at}.sliding_layers',
        slide,
        f'numbers of layers, ascending, below layers={self.layers}',
    )
    wanted = 'at least 1' if slide else '0, for no layer slides'
    right = window >= 1 if slide else window == 0
    require(right, f'{at}.sliding_window', window, wanted)

  def _validate_dense_layers(self, at: str) -> None:
    dense = self.moe.dense_layers
    numbers = sorted({n for n in dense if 0 <= n < self.layers})
    require(
        list(dense) == numbers and len(dense) < self.layers,
        f'{at}.moe.dense_layers',
        dense,
        f'numbers of layers, ascending, not all of layers={self.layers}',
    )

  def _validate_rope(self, at: str) -> None:
    # Both formulas divide by a number that would be 0.
    if self.rope_scaling.kind == 'yarn':
      theta = self.rope_theta
      require(theta > 1, f'{at}.rope_theta', theta, 'above 1 for yarn')
    if self.rope_scaling.kind == 'dynamic':
      size = self.head_size
      require(size > 2, f'{at}.head_size', size, 'above 2 for dynamic RoPE')

  @property
  def sparse_layers(self) -> tuple[int, ...]:
    """Numbers of the layers that have experts."""
    every = range(self.layers if self.moe.experts else 0)
    return tuple(n for n in every if n not in self.moe.dense_layers)

  @property
  def dense_layers(self) -> tuple[int, ...]:
    """Numbers of the layers that have a plain MLP."""
    sparse = self.sparse_layers
    return tuple(n for n in range(self.layers) if n not in sparse)

  def layers_with(self, parameter: str) -> tuple[int, ...]:
    """Numbers of the layers that have this parameter of a block."""
    if parameter in EXPERT_PARAMETERS:
      return self.sparse_layers
    if parameter in MLP_PARAMETERS:
      return self.dense_layers
    return tuple(range(self.layers))

  @property
  def routing_shape(self) -> tuple[int, int]:
    """Sparse layers, and experts that each sends a token to."""
    return len(self.sparse_layers), self.moe.chosen

  @property
  def padded_vocab_size(self) -> int:
    """V, columns of logits; those from `vocab_size` on are never sampled."""
    step = self.vocab_multiple
    return math.ceil(self.vocab_size / step) * step

  @property
  def possible_ids(self) -> np.ndarray:
    """[V] bool, ids that may be sampled: neither padding nor absent.

    The others have the logit -1e30 wherever this policy makes logits, so engine
    and trainer normalise over the same ids.
    """
    possible = np.arange(self.padded_vocab_size) < self.vocab_size
    for first, end in self.absent_ids:
      possible[first:end] = False
    return possible


# Which layers slide, of [0, layers), by the fields of a config.json that has a
# window but no `layer_types`.
Slides = Callable[[Mapping[str, Any], int, str], list[int]]


def _all_layers(fields: Mapping[str, Any], layers: int, at: str) -> list[int]:
  del fields, at
  return [*range(layers)]


def _all_but_each(
    each: int, fields: Mapping[str, Any], layers: int, at: str
) -> list[int]:
  """Every `each`-th layer is full, unless the file has another pattern."""
  each = _size(fields, 'sliding_window_pattern', each, at)
  return [n for n in range(layers) if (n + 1) % each]


def _late_layers(fields: Mapping[str, Any], layers: int, at: str) -> list[int]:
  first = _size(fields, 'max_window_layers', None, at, least=0)
  return [*range(first, layers)]


@dataclasses.dataclass(frozen=True)
class Family:
  """One row of settings.

  Attributes:
    architecture: the class of transformers.
    settings: fields of `ModelConfig` that all its policies share.
    defaults: what transformers assumes where config.json is silent, by the
      names there. A field that `_DEFAULTS` lacks is read and written for the
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


# As a Llama has them. A head_dim of None is hidden_size / num_attention_heads,
# and key/value heads of None are as many as query heads.
_DEFAULTS: dict[str, Any] = {
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
        slides=_all_layers,
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
        slides=_all_layers,
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
        slides=_all_layers,
    ),
}

# Names of activations in config.json.
_ACTIVATIONS = {'silu': 'silu', 'gelu_pytorch_tanh': 'gelu_tanh'}
# Numbers that only some families read, and our fields; null is 0 with us.
_NUMBERS = {
    'query_pre_attn_scalar': 'query_scalar',
    'attn_logit_softcapping': 'attention_cap',
    'final_logit_softcapping': 'logit_cap',
}
# Here null is not silence: it says that there is none.
_NULLABLE = (
    'sliding_window',
    'attn_logit_softcapping',
    'final_logit_softcapping',
)
_FULL, _SLIDING = 'full_attention', 'sliding_attention'


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
  _refuse_unknown_parts(hf, at, name)
  said = {k: v for k, v in hf.items() if v is not None or k in _NULLABLE}
  fields = {**_DEFAULTS, **family.defaults, **said}
  layers = _size(fields, 'num_hidden_layers', None, at)
  heads = _size(fields, 'num_attention_heads', None, at)
  width = _size(fields, 'hidden_size', None, at)
  act = _activation_field(family)
  rope = _rope(hf, fields, at, family)
  window, slide = _sliding(fields, at, name, layers)
  config = ModelConfig(
      family=name,
      vocab_size=_size(fields, 'vocab_size', None, at),
      width=width,
      layers=layers,
      heads=heads,
      kv_heads=_size(fields, 'num_key_value_heads', heads, at),
      head_size=_size(fields, 'head_dim', width // heads, at),
      mlp_width=_size(fields, 'intermediate_size', None, at),
      max_length=rope.max_length,
      rope_theta=rope.theta,
      rope_scaling=rope.scaling,
      norm_eps=_number(fields, 'rms_norm_eps', None, at),
      activation=_ACTIVATIONS[_choice(fields, act, _ACTIVATIONS, None, at)],
      tied_embeddings=_truth(fields, 'tie_word_embeddings', at),
      sliding_window=window,
      sliding_layers=slide,
      sliding_rope_theta=rope.sliding_theta,
      moe=_moe(fields, at, family, layers),
      **{
          ours: _number(fields, theirs, None, at)
          for theirs, ours in _NUMBERS.items()
          if theirs in family.defaults and fields[theirs] is not None
      },
      **family.settings,
  )
  rope.scaling.validate(f'{at}: rope_scaling')
  config.validate(at)
  return config


def config_to_hf(config: ModelConfig) -> dict[str, Any]:
  """The `config.json` of a policy, in the spelling of published checkpoints.

  Raises:
    ConfigError: the policy has settings that its family has not.
  """
  family = FAMILIES[config.family]
  _check_family(config)
  activations = {ours: theirs for theirs, ours in _ACTIVATIONS.items()}
  length = config.max_length
  if config.rope_scaling.kind == 'dynamic':
    length = config.rope_scaling.original_max_length
  described = {
      'architectures': [family.architecture],
      'model_type': config.family,
      'vocab_size': config.vocab_size,
      'hidden_size': config.width,
      'intermediate_size': config.mlp_width,
      'num_hidden_layers': config.layers,
      'num_attention_heads': config.heads,
      'num_key_value_heads': config.kv_heads,
      'head_dim': config.head_size,
      'max_position_embeddings': length,
      'rope_theta': config.rope_theta,
      'rope_scaling': _scaling_to_hf(config, family),
      'rms_norm_eps': config.norm_eps,
      _activation_field(family): activations[config.activation],
      'tie_word_embeddings': config.tied_embeddings,
      'attention_bias': False,
  }
  reads = family.defaults
  for theirs, ours in _NUMBERS.items():
    if theirs in reads:
      described[theirs] = getattr(config, ours) or None
  if 'query_pre_attn_scalar' in reads:
    scalar = config.query_scalar or config.head_size
    # transformers wants a whole number where there is one.
    whole = scalar == int(scalar)
    described['query_pre_attn_scalar'] = int(scalar) if whole else scalar
  if 'rope_local_base_freq' in reads:
    local = config.sliding_rope_theta or config.rope_theta
    described['rope_local_base_freq'] = local
  if family.slides is not None:
    described.update(_sliding_to_hf(config, family))
  if 'num_experts' in reads:
    described.update(_moe_to_hf(config, family))
  return described


# Reading.


def _activation_field(family: Family) -> str:
  read = 'hidden_activation' in family.defaults
  return 'hidden_activation' if read else 'hidden_act'


def _refuse_unknown_parts(hf: Mapping[str, Any], at: str, name: str) -> None:
  """Raises if the checkpoint really uses a part that this model lacks."""
  # transformers' qwen2 has its q, k and v biases whatever the file says.
  if name != 'qwen2':
    bias = _truth(hf, 'attention_bias', at)
    require(not bias, f'{at}: attention_bias', bias, f'false for {name}')
  for part in ('mlp_bias', 'use_bidirectional_attention'):
    used = _truth(hf, part, at)
    require(not used, f'{at}: {part}', used, 'false')
  if FAMILIES[name].slides is None and hf.get('sliding_window'):
    used = _truth(hf, 'use_sliding_window', at)
    require(not used, f'{at}: use_sliding_window', used, f'false for {name}')


def _sliding(
    fields: Mapping[str, Any], at: str, name: str, layers: int
) -> tuple[int, tuple[int, ...]]:
  """The window, 0 for none, and the layers that have it."""
  slides = FAMILIES[name].slides
  kinds = fields.get('layer_types')
  # transformers reads no list where all layers are alike.
  if slides is _all_layers:
    kinds = None
  if kinds is not None:
    known = [_FULL] if slides is None else [_FULL, _SLIDING]
    wanted = f'a list of {layers} of {known}'
    require(isinstance(kinds, list), f'{at}: layer_types', kinds, wanted)
    others = [kind for kind in kinds if kind not in known]
    require(not others, f'{at}: layer_types', others, wanted)
    require(len(kinds) == layers, f'{at}: layer_types', kinds, wanted)
  if slides is None:
    return 0, ()
  used = 'use_sliding_window' not in FAMILIES[name].defaults
  used = used or _truth(fields, 'use_sliding_window', at)
  window = fields['sliding_window'] if used else None
  if kinds is None:
    numbers = [] if window is None else slides(fields, layers, at)
  else:
    numbers = [n for n, kind in enumerate(kinds) if kind == _SLIDING]
  if not numbers:
    return 0, ()
  require(window is not None, f'{at}: sliding_window', window,
          f'a number of tokens, for layers {numbers} slide')  # fmt: skip
  return _size(fields, 'sliding_window', None, at), tuple(numbers)


def _moe(
    fields: Mapping[str, Any], at: str, family: Family, layers: int
) -> MoeSettings:
  """The experts of a family that has them.

  Mixtral says in `intermediate_size` how wide they are, always renormalises and
  has no dense layer. transformers 5 writes `num_local_experts` for all.
  """
  reads = family.defaults
  if 'num_experts' not in reads:
    return MoeSettings()
  number = _size(fields, 'num_experts', None, at)
  number = _size(fields, 'num_local_experts', number, at)
  chosen = _size(fields, 'num_experts_per_tok', None, at)
  wanted = f'at most the {number} experts'
  require(chosen <= number, f'{at}: num_experts_per_tok', chosen, wanted)
  width = _size(fields, 'intermediate_size', None, at)
  settings = MoeSettings(
      experts=number,
      chosen=chosen,
      width=_size(fields, 'moe_intermediate_size', width, at),
      renormalise='norm_topk_prob' not in reads
      or _truth(fields, 'norm_topk_prob', at),
  )
  if 'decoder_sparse_step' in reads:
    step = _size(fields, 'decoder_sparse_step', None, at)
    named = fields['mlp_only_layers']
    listed = isinstance(named, (list, tuple))
    require(listed, f'{at}: mlp_only_layers', named, 'a list of layers')
    settings.dense_layers = tuple(
        n for n in range(layers) if n in named or (n + 1) % step
    )
    require(
        len(settings.dense_layers) < layers,
        f'{at}: mlp_only_layers',
        named,
        f'some layer with experts, decoder_sparse_step being {step}',
    )
  return settings


class _Rope(NamedTuple):
  """What a file says of rotary embeddings, and so of lengths.

  Attributes:
    theta: the base.
    sliding_theta: that of sliding layers; 0 for the same.
    scaling: of the layers that do not slide.
    max_length: tokens of context that the policy is meant for.
  """

  theta: float
  sliding_theta: float
  scaling: RopeScaling
  max_length: int


def _rope(
    hf: Mapping[str, Any],
    fields: Mapping[str, Any],
    at: str,
    family: Family,
) -> _Rope:
  """Reads `rope_theta`, `rope_scaling` or `rope_parameters`, and lengths."""
  field = 'rope_parameters' if hf.get('rope_parameters') else 'rope_scaling'
  rope = {} if hf.get(field) is None else hf[field]
  require(isinstance(rope, dict), f'{at}: {field}', rope, 'an object or null')
  local = 0.0
  if 'rope_local_base_freq' in family.defaults:
    local = _number(fields, 'rope_local_base_freq', None, at)
    if _FULL in rope or _SLIDING in rope:
      # transformers 5 has one object for each kind of layer.
      inner = rope.get(_SLIDING) or {}
      where = f'{field}.{_SLIDING}'
      require(isinstance(inner, dict), f'{at}: {where}', inner, 'an object')
      kind = inner.get('rope_type') or 'default'
      plain = kind == 'default'
      require(plain, f'{at}: {where}.rope_type', kind, "'default'")
      local = _number(inner, 'rope_theta', local, f'{at}: {where}')
      field, rope = f'{field}.{_FULL}', rope.get(_FULL) or {}
      require(isinstance(rope, dict), f'{at}: {field}', rope, 'an object')
  # The parts of the object, under names that a message can show.
  parts = {f'{field}.{name}': value for name, value in rope.items()}
  usual = {**_DEFAULTS, **family.defaults}['rope_theta']
  inner = _number(parts, f'{field}.rope_theta', usual, at)
  theta = _number(hf, 'rope_theta', inner, at)
  partial = hf.get('partial_rotary_factor') or rope.get('partial_rotary_factor')
  require(
      partial in (None, 1.0), f'{at}: partial_rotary_factor', partial, '1.0'
  )
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  known = ['default', 'linear', 'dynamic', 'yarn', 'llama3']
  require(kind in known, f'{at}: {field}.rope_type', kind, f'one of {known}')
  longest = _size(fields, 'max_position_embeddings', None, at)
  if kind == 'default':
    return _Rope(theta, local, RopeScaling(), longest)
  number = lambda name, default: _number(parts, f'{field}.{name}', default, at)
  scaling = RopeScaling(kind=kind)
  # Of the object; some files have it beside the object.
  name, original = 'original_max_position_embeddings', None
  if rope.get(name) is not None:
    original = _size(parts, f'{field}.{name}', None, at)
  elif fields.get(name) is not None:
    original = _size(fields, name, None, at)
  if kind == 'dynamic':
    scaling.original_max_length = longest
  if kind in ('yarn', 'llama3'):
    scaling.original_max_length = original or longest
  if kind == 'llama3':
    scaling.low_freq_factor = number('low_freq_factor', None)
    scaling.high_freq_factor = number('high_freq_factor', None)
  stretch = None
  if kind == 'yarn':
    stretch = longest / scaling.original_max_length
    for name in _YARN:
      if rope.get(name):  # transformers takes 0 for unset
        setattr(scaling, name, number(name, None))
    cut = f'{field}.truncate'
    scaling.truncate = _truth({cut: True, **parts}, cut, at)
  scaling.factor = number('factor', stretch)
  length = _stretched(longest, original, scaling, family.counts_stretch)
  return _Rope(theta, local, scaling, length)


def _stretched(
    longest: int,
    original: int | None,
    scaling: RopeScaling,
    counts_stretch: bool,
) -> int:
  """Tokens of context that a policy with scaled embeddings is meant for.

  `max_position_embeddings` is the length before scaling in some files and the
  length after it in others. By `rope_type` the context is

  * dynamic: `max_position_embeddings` · factor, as transformers defines it;
  * linear: the same, but for families whose files count the stretch;
  * yarn: original · factor, or `max_position_embeddings` if that is more. The
    cards of Qwen2.5 and Qwen3 tell their readers to add the scaling and to
    leave the number alone (https://huggingface.co/Qwen/Qwen3-8B);
  * llama3: `max_position_embeddings`, which is less than original · factor in
    Llama 3.2. Where the two lengths are equal, the scaling was added to a file
    that does not count it, and the factor does.

  Args:
    longest: `max_position_embeddings`.
    original: `original_max_position_embeddings`; None if the file has none.
    scaling: what else the file says.
    counts_stretch: see `Family`.
  """
  if scaling.kind == 'dynamic':
    return int(longest * scaling.factor)
  if original is None:
    added = scaling.kind == 'yarn'
    added = added or scaling.kind == 'linear' and not counts_stretch
    return int(longest * scaling.factor) if added else longest
  # A file with less than the original length means it: nobody cuts by chance.
  added = longest == original
  added = added or longest > original and scaling.kind != 'llama3'
  return max(longest, int(original * scaling.factor)) if added else longest


_YARN = (
    'beta_fast',
    'beta_slow',
    'attention_factor',
    'mscale',
    'mscale_all_dim',
)


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
    fields: Mapping[str, Any],
    name: str,
    default: int | None,
    at: str,
    least: int = 1,
) -> int:
  """A whole number of at least `least`."""
  wanted = f'a whole number of at least {least}'
  value = _value(fields, name, default, at, wanted)
  whole = isinstance(value, int) and not isinstance(value, bool)
  require(whole and value >= least, f'{at}: {name}', value, wanted)
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


# Writing.


def _check_family(config: ModelConfig) -> None:
  """Raises if a setting is not as the policy's family has it."""
  name, family = config.family, FAMILIES[config.family]
  plain = {f.name: f.default for f in dataclasses.fields(ModelConfig)}
  shared = {key for row in FAMILIES.values() for key in row.settings}
  fixed = {key: family.settings.get(key, plain[key]) for key in sorted(shared)}
  for theirs, ours in _NUMBERS.items():
    if theirs not in family.defaults:
      fixed[ours] = plain[ours]
  if family.slides is None:
    fixed['sliding_layers'] = ()
  if family.slides is _all_layers and config.sliding_layers:
    fixed['sliding_layers'] = tuple(range(config.layers))
  if 'rope_local_base_freq' not in family.defaults:
    fixed['sliding_rope_theta'] = 0.0
  if 'num_experts' not in family.defaults:
    require(not config.moe.experts, 'moe.experts', config.moe.experts,
            f'0 in family {name!r}')  # fmt: skip
  else:
    _check_moe(config, family)
  for key, wanted in fixed.items():
    seen = getattr(config, key)
    require(seen == wanted, key, seen, f'{wanted!r} in family {name!r}')


def _check_moe(config: ModelConfig, family: Family) -> None:
  moe, name = config.moe, config.family
  right = moe.experts > 0
  require(right, 'moe.experts', moe.experts, f'above 0 in family {name!r}')
  if 'norm_topk_prob' not in family.defaults:
    require(moe.renormalise, 'moe.renormalise', False, f'True in {name!r}')
  if 'mlp_only_layers' not in family.defaults:
    dense = moe.dense_layers
    require(not dense, 'moe.dense_layers', dense, f'none in family {name!r}')


def _moe_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
  moe = config.moe
  described: dict[str, Any] = {
      'num_experts_per_tok': moe.chosen,
      'router_aux_loss_coef': moe.balance,
      'output_router_logits': False,
  }
  if 'mlp_only_layers' not in family.defaults:  # Mixtral
    return described | {
        'num_local_experts': moe.experts,
        'intermediate_size': moe.width,
    }
  return described | {
      'num_experts': moe.experts,
      'moe_intermediate_size': moe.width,
      'norm_topk_prob': moe.renormalise,
      'decoder_sparse_step': 1,
      'mlp_only_layers': list(moe.dense_layers),
  }


def _sliding_to_hf(config: ModelConfig, family: Family) -> dict[str, Any]:
  slide = config.sliding_layers
  described: dict[str, Any] = {'sliding_window': config.sliding_window or None}
  if 'use_sliding_window' in family.defaults:
    described['use_sliding_window'] = bool(slide)
  if 'max_window_layers' in family.defaults:
    described['max_window_layers'] = slide[0] if slide else config.layers
  if family.slides is not _all_layers:
    described['layer_types'] = [
        _SLIDING if n in slide else _FULL for n in range(config.layers)
    ]
  return described


def _scaling_to_hf(
    config: ModelConfig, family: Family
) -> dict[str, Any] | None:
  rope = config.rope_scaling
  if rope.kind == 'none':
    return None
  described: dict[str, Any] = {'rope_type': rope.kind, 'factor': rope.factor}
  if rope.kind in ('yarn', 'llama3'):
    length = rope.original_max_length
    described['original_max_position_embeddings'] = length
  if rope.kind == 'linear' and not family.counts_stretch:
    # Says that `max_position_embeddings` is the length after scaling.
    before = max(1, int(config.max_length / rope.factor))
    described['original_max_position_embeddings'] = before
  if rope.kind == 'llama3':
    described['low_freq_factor'] = rope.low_freq_factor
    described['high_freq_factor'] = rope.high_freq_factor
  if rope.kind == 'yarn':
    numbers = {name: getattr(rope, name) for name in _YARN}
    described.update({k: v for k, v in numbers.items() if v})
    described['truncate'] = rope.truncate
  return described
