"""The settings of a policy from a Hugging Face `config.json`, and back.

`config_from_hf` reads such a file, `config_to_hf` writes one, both by the
policy's row of `families.FAMILIES`. What a checkpoint uses and this model lacks
is refused by the name of the field. Weights are left to `hf.py`.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, NamedTuple

from areal_jax.config import require
from areal_jax.models.config import ModelConfig, MoeSettings, RopeScaling
from areal_jax.models.families import DEFAULTS, FAMILIES, Family, all_layers
from areal_jax.models.hf_fields import (
    read_choice,
    read_number,
    read_size,
    read_truth,
)

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
  name = read_choice(hf, 'model_type', FAMILIES, None, at)
  family = FAMILIES[name]
  _refuse_unknown_parts(hf, at, name)
  said = {k: v for k, v in hf.items() if v is not None or k in _NULLABLE}
  fields = {**DEFAULTS, **family.defaults, **said}
  layers = read_size(fields, 'num_hidden_layers', None, at)
  heads = read_size(fields, 'num_attention_heads', None, at)
  width = read_size(fields, 'hidden_size', None, at)
  act = _activation_field(family)
  rope = _rope(hf, fields, at, family)
  window, slide = _sliding(fields, at, name, layers)
  config = ModelConfig(
      family=name,
      vocab_size=read_size(fields, 'vocab_size', None, at),
      width=width,
      layers=layers,
      heads=heads,
      kv_heads=read_size(fields, 'num_key_value_heads', heads, at),
      head_size=read_size(fields, 'head_dim', width // heads, at),
      mlp_width=read_size(fields, 'intermediate_size', None, at),
      max_length=rope.max_length,
      rope_theta=rope.theta,
      rope_scaling=rope.scaling,
      norm_eps=read_number(fields, 'rms_norm_eps', None, at),
      activation=_ACTIVATIONS[read_choice(fields, act, _ACTIVATIONS, None, at)],
      tied_embeddings=read_truth(fields, 'tie_word_embeddings', at),
      sliding_window=window,
      sliding_layers=slide,
      sliding_rope_theta=rope.sliding_theta,
      moe=_moe(fields, at, family, layers),
      **{
          ours: read_number(fields, theirs, None, at)
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


def _activation_field(family: Family) -> str:
  read = 'hidden_activation' in family.defaults
  return 'hidden_activation' if read else 'hidden_act'


def _refuse_unknown_parts(hf: Mapping[str, Any], at: str, name: str) -> None:
  """Raises if the checkpoint really uses a part that this model lacks."""
  # transformers' qwen2 has its q, k and v biases whatever the file says.
  if name != 'qwen2':
    bias = read_truth(hf, 'attention_bias', at)
    require(not bias, f'{at}: attention_bias', bias, f'false for {name}')
  for part in ('mlp_bias', 'use_bidirectional_attention'):
    used = read_truth(hf, part, at)
    require(not used, f'{at}: {part}', used, 'false')
  if FAMILIES[name].slides is None and hf.get('sliding_window'):
    used = read_truth(hf, 'use_sliding_window', at)
    require(not used, f'{at}: use_sliding_window', used, f'false for {name}')


def _sliding(
    fields: Mapping[str, Any], at: str, name: str, layers: int
) -> tuple[int, tuple[int, ...]]:
  """The window, 0 for none, and the layers that have it."""
  slides = FAMILIES[name].slides
  kinds = fields.get('layer_types')
  # transformers reads no list where all layers are alike.
  if slides is all_layers:
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
  used = used or read_truth(fields, 'use_sliding_window', at)
  window = fields['sliding_window'] if used else None
  if kinds is None:
    numbers = [] if window is None else slides(fields, layers, at)
  else:
    numbers = [n for n, kind in enumerate(kinds) if kind == _SLIDING]
  if not numbers:
    return 0, ()
  require(window is not None, f'{at}: sliding_window', window,
          f'a number of tokens, for layers {numbers} slide')  # fmt: skip
  return read_size(fields, 'sliding_window', None, at), tuple(numbers)


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
  number = read_size(fields, 'num_experts', None, at)
  number = read_size(fields, 'num_local_experts', number, at)
  chosen = read_size(fields, 'num_experts_per_tok', None, at)
  wanted = f'at most the {number} experts'
  require(chosen <= number, f'{at}: num_experts_per_tok', chosen, wanted)
  width = read_size(fields, 'intermediate_size', None, at)
  settings = MoeSettings(
      experts=number,
      chosen=chosen,
      width=read_size(fields, 'moe_intermediate_size', width, at),
      renormalise='norm_topk_prob' not in reads
      or read_truth(fields, 'norm_topk_prob', at),
  )
  if 'decoder_sparse_step' in reads:
    step = read_size(fields, 'decoder_sparse_step', None, at)
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
    local = read_number(fields, 'rope_local_base_freq', None, at)
    if _FULL in rope or _SLIDING in rope:
      # transformers 5 has one object for each kind of layer.
      inner = rope.get(_SLIDING) or {}
      where = f'{field}.{_SLIDING}'
      require(isinstance(inner, dict), f'{at}: {where}', inner, 'an object')
      kind = inner.get('rope_type') or 'default'
      plain = kind == 'default'
      require(plain, f'{at}: {where}.rope_type', kind, "'default'")
      local = read_number(inner, 'rope_theta', local, f'{at}: {where}')
      field, rope = f'{field}.{_FULL}', rope.get(_FULL) or {}
      require(isinstance(rope, dict), f'{at}: {field}', rope, 'an object')
  # The parts of the object, under names that a message can show.
  parts = {f'{field}.{name}': value for name, value in rope.items()}
  usual = {**DEFAULTS, **family.defaults}['rope_theta']
  inner = read_number(parts, f'{field}.rope_theta', usual, at)
  theta = read_number(hf, 'rope_theta', inner, at)
  partial = hf.get('partial_rotary_factor') or rope.get('partial_rotary_factor')
  require(
      partial in (None, 1.0), f'{at}: partial_rotary_factor', partial, '1.0'
  )
  kind = rope.get('rope_type') or rope.get('type') or 'default'
  known = ['default', 'linear', 'dynamic', 'yarn', 'llama3']
  require(kind in known, f'{at}: {field}.rope_type', kind, f'one of {known}')
  longest = read_size(fields, 'max_position_embeddings', None, at)
  if kind == 'default':
    return _Rope(theta, local, RopeScaling(), longest)
  number = lambda name, default: read_number(
      parts, f'{field}.{name}', default, at
  )
  scaling = RopeScaling(kind=kind)
  # Of the object; some files have it beside the object.
  name, original = 'original_max_position_embeddings', None
  if rope.get(name) is not None:
    original = read_size(parts, f'{field}.{name}', None, at)
  elif fields.get(name) is not None:
    original = read_size(fields, name, None, at)
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
    scaling.truncate = read_truth({cut: True, **parts}, cut, at)
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
  if family.slides is all_layers and config.sliding_layers:
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
  if family.slides is not all_layers:
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
