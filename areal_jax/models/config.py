"""The settings of the Transformer and their checks: `ModelConfig`.

Which families of published checkpoints there are stands in `families.py`; how
settings are read from a `config.json` and written to one in `hf_config.py`; the
arithmetic in `transformer.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import numpy as np

from areal_jax.config import require
from areal_jax.models.families import FAMILIES

# Parameters of a block that not every layer has.
MLP_PARAMETERS = ('gate', 'up', 'down')
EXPERT_PARAMETERS = ('router', 'expert_gate', 'expert_up', 'expert_down')


@dataclasses.dataclass
class RopeScaling:
  """Settings that stretch rotary frequencies to contexts longer than trained.

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
    """Returns the factor of cosines and sines; 1 except for 'yarn'.

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
