"""Settings of the policy and what they read from, and write to, config.json."""

import json

import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.models.config import ModelConfig, MoeSettings, RopeScaling
from areal_jax.models.families import FAMILIES
from areal_jax.models.hf_config import config_from_hf, config_to_hf

LLAMA = {
    'model_type': 'llama',
    'vocab_size': 100,
    'hidden_size': 64,
    'intermediate_size': 112,
    'num_hidden_layers': 3,
    'num_attention_heads': 4,
}
INFINITE = float('inf')
LLAMA3 = {
    'rope_type': 'llama3',
    'factor': 8.0,
    'low_freq_factor': 1.0,
    'high_freq_factor': 4.0,
    'original_max_position_embeddings': 32,
}


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(layers=0), 'config.layers is 0, wanted at least 1'),
        (dict(family='gpt2'), r"family is 'gpt2', wanted one of \['llama', "),
        (dict(heads=6, kv_heads=4), 'is 4, wanted a divisor of heads=6'),
        (dict(head_size=7), 'head_size is 7, wanted even'),
        (dict(vocab_multiple=0), 'vocab_multiple is 0'),
        (dict(vocab_size=9, absent_ids=((8, 10),)), 'absent_ids is .*below'),
        (dict(vocab_size=9, absent_ids=((0, 9),)), 'but not all ids'),
        (dict(absent_ids=((5, 7), (6, 9))), 'ascending ranges'),
        (dict(absent_ids=((5, 5),)), 'ascending ranges'),
        (dict(attention_cap=-1.0), 'attention_cap is -1.0, wanted at least 0'),
        (
            dict(sliding_window=4, sliding_layers=(2,)),
            r'sliding_layers is \(2,\), wanted numbers .* below layers=2',
        ),
        (
            dict(sliding_window=4, sliding_layers=(1, 0)),
            r'sliding_layers is \(1, 0\), wanted numbers of layers, ascending',
        ),
        (dict(sliding_layers=(1,)), 'sliding_window is 0, wanted at least 1'),
        (dict(sliding_window=4), 'sliding_window is 4, wanted 0, for no layer'),
        (
            dict(rope_theta=1.0, rope_scaling=RopeScaling('yarn', 4.0)),
            'rope_theta is 1.0, wanted above 1 for yarn',
        ),
        (
            dict(head_size=2, rope_scaling=RopeScaling('dynamic', 4.0)),
            'head_size is 2, wanted above 2',
        ),
        (
            dict(rope_scaling=RopeScaling('yarn', beta_slow=33.0)),
            'beta_fast is 32.0, wanted at least beta_slow=33.0',
        ),
        (dict(layer_loop='loop'), "layer_loop is 'loop', wanted one of"),
        (dict(rope_scaling=RopeScaling('llama3', 0.5)), 'factor is 0.5'),
        (
            dict(rope_scaling=RopeScaling('llama3', 8.0, 4.0, 4.0)),
            'rope_scaling.high_freq_factor is 4.0',
        ),
    ],
)
def test_a_wrong_value_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    resolve(ModelConfig(**changes))


@pytest.mark.parametrize(
    'size, multiple, padded', [(37, 1, 37), (37, 8, 40), (40, 8, 40)]
)
def test_the_vocabulary_is_rounded_up(size, multiple, padded):
  config = ModelConfig(vocab_size=size, vocab_multiple=multiple)
  assert config.padded_vocab_size == padded


def test_ids_are_possible_that_are_neither_padding_nor_absent():
  config = ModelConfig(
      vocab_size=9, vocab_multiple=4, absent_ids=((2, 4), (7, 9))
  )
  assert np.flatnonzero(config.possible_ids).tolist() == [0, 1, 4, 5, 6]
  assert len(config.possible_ids) == 12


def test_what_a_file_leaves_unsaid_is_what_its_family_assumes():
  llama = config_from_hf(LLAMA)
  assert (llama.head_size, llama.kv_heads, llama.norm_eps) == (16, 4, 1e-6)
  assert (llama.rope_theta, llama.max_length) == (10_000.0, 2048)
  assert not llama.tied_embeddings and not llama.qkv_bias and not llama.qk_norm
  heads = {'num_attention_heads': 32, 'hidden_size': 1024}
  qwen2 = config_from_hf({**LLAMA, **heads, 'model_type': 'qwen2'})
  assert (qwen2.head_size, qwen2.kv_heads, qwen2.qkv_bias) == (32, 32, True)
  qwen3 = config_from_hf({**LLAMA, **heads, 'model_type': 'qwen3'})
  assert (qwen3.head_size, qwen3.qk_norm, qwen3.qkv_bias) == (128, True, False)
  mistral = config_from_hf({**LLAMA, **heads, 'model_type': 'mistral'})
  assert (mistral.kv_heads, mistral.max_length) == (8, 131_072)
  assert (mistral.sliding_window, mistral.sliding_layers) == (4096, (0, 1, 2))
  gemma2 = config_from_hf({**LLAMA, 'model_type': 'gemma2'})
  assert (gemma2.head_size, gemma2.query_scalar) == (256, 256.0)
  assert (gemma2.attention_cap, gemma2.logit_cap) == (50.0, 30.0)
  assert gemma2.activation == 'gelu_tanh' and gemma2.tied_embeddings
  assert (gemma2.sliding_window, gemma2.sliding_layers) == (4096, (0, 2))
  deep = {'model_type': 'gemma3_text', 'num_hidden_layers': 7}
  gemma3 = config_from_hf({**LLAMA, **deep})
  assert gemma3.sliding_layers == (0, 1, 2, 3, 4, 6)
  assert (gemma3.rope_theta, gemma3.sliding_rope_theta) == (1e6, 1e4)
  assert (gemma3.attention_cap, gemma3.logit_cap) == (0, 0)


def test_null_is_a_word_of_its_own_where_there_may_be_none():
  mistral = {**LLAMA, 'model_type': 'mistral', 'num_key_value_heads': 4}
  assert (
      config_from_hf({**mistral, 'sliding_window': None}).sliding_layers == ()
  )
  gemma2 = {**LLAMA, 'model_type': 'gemma2'}
  uncapped = config_from_hf({**gemma2, 'attn_logit_softcapping': None})
  assert (uncapped.attention_cap, uncapped.logit_cap) == (0, 30.0)


def test_qwen_slides_its_late_layers_if_the_file_says_so():
  qwen = {**LLAMA, 'model_type': 'qwen2', 'num_key_value_heads': 4}
  window = {'sliding_window': 8, 'max_window_layers': 1}
  off = config_from_hf({**qwen, **window})
  assert (off.sliding_window, off.sliding_layers) == (0, ())
  on = config_from_hf({**qwen, **window, 'use_sliding_window': True})
  assert (on.sliding_window, on.sliding_layers) == (8, (1, 2))


def test_layer_types_say_more_than_the_rule_of_the_family():
  kinds = ['full_attention', 'sliding_attention', 'full_attention']
  gemma = config_from_hf(
      {**LLAMA, 'model_type': 'gemma2', 'layer_types': kinds}
  )
  assert gemma.sliding_layers == (1,)


def test_sliding_layers_of_gemma_3_have_a_base_of_their_own():
  gemma = {**LLAMA, 'model_type': 'gemma3_text'}
  linear = {'rope_type': 'linear', 'factor': 8.0}
  old = config_from_hf(
      {**gemma, 'rope_local_base_freq': 5e3, 'rope_scaling': linear}
  )
  new = config_from_hf(
      {
          **gemma,
          'rope_parameters': {
              'full_attention': {**linear, 'rope_theta': 1e6},
              'sliding_attention': {'rope_type': 'default', 'rope_theta': 5e3},
          },
      }
  )
  assert old == new
  assert (old.rope_theta, old.sliding_rope_theta) == (1e6, 5e3)
  assert old.rope_scaling == RopeScaling('linear', 8.0)


def test_scalings_are_read_with_what_they_leave_unsaid():
  length = {'max_position_embeddings': 256}
  read = lambda **rope: config_from_hf(
      {**LLAMA, **length, 'rope_scaling': rope}
  )
  yarn = read(type='yarn', original_max_position_embeddings=64)
  assert yarn.rope_scaling == RopeScaling('yarn', 4.0, original_max_length=64)
  assert yarn.max_length == 256
  # There `max_position_embeddings` is what was trained on.
  dynamic = read(rope_type='dynamic', factor=4.0)
  assert dynamic.rope_scaling == RopeScaling(
      'dynamic', 4.0, original_max_length=256
  )
  assert dynamic.max_length == 1024


ORIGINAL = 'original_max_position_embeddings'


@pytest.mark.parametrize(
    'longest, rope, tokens',
    [
        # As the cards of Qwen2.5 and Qwen3 write it, in both spellings.
        (64, {'type': 'yarn', 'factor': 4.0, ORIGINAL: 64}, 256),
        (80, {'rope_type': 'yarn', 'factor': 4.0, ORIGINAL: 64}, 256),
        (64, {'rope_type': 'yarn', 'factor': 4.0}, 256),
        (256, {'rope_type': 'yarn', 'factor': 4.0, ORIGINAL: 64}, 256),
        (256, {'rope_type': 'yarn', 'factor': 2.0, ORIGINAL: 64}, 256),
        (64, {'rope_type': 'linear', 'factor': 4.0}, 256),
        (256, {'rope_type': 'linear', 'factor': 4.0, ORIGINAL: 64}, 256),
        (64, {'rope_type': 'linear', 'factor': 4.0, ORIGINAL: 64}, 256),
        (64, {'rope_type': 'dynamic', 'factor': 4.0}, 256),
        # Llama 3.2 is meant for half of original times factor.
        (128, {**LLAMA3, 'factor': 8.0, ORIGINAL: 32}, 128),
        (32, {**LLAMA3, 'factor': 8.0, ORIGINAL: 32}, 256),
    ],
)
@pytest.mark.parametrize('field', ['rope_scaling', 'rope_parameters'])
def test_the_length_counts_the_factor_once(field, longest, rope, tokens):
  file = {**LLAMA, 'max_position_embeddings': longest, field: rope}
  assert config_from_hf(file).max_length == tokens


def test_an_original_length_beside_the_scaling_is_read():
  rope = {'rope_type': 'yarn', 'factor': 4.0}
  length = {'max_position_embeddings': 80, ORIGINAL: 64}
  read = config_from_hf({**LLAMA, **length, 'rope_scaling': rope})
  assert read.rope_scaling.original_max_length == 64
  assert read.max_length == 256


def test_gemma_3_counts_what_its_scaling_adds():
  rope = {'rope_type': 'linear', 'factor': 8.0}
  length = {'max_position_embeddings': 128, 'rope_scaling': rope}
  gemma = {**LLAMA, 'model_type': 'gemma3_text', 'hidden_act': None}
  assert config_from_hf({**gemma, **length}).max_length == 128


def test_rope_is_read_in_both_spellings():
  old = config_from_hf({**LLAMA, 'rope_theta': 5e5, 'rope_scaling': LLAMA3})
  new = config_from_hf(
      {**LLAMA, 'rope_parameters': {**LLAMA3, 'rope_theta': 5e5}}
  )
  assert old == new
  assert old.rope_theta == 5e5
  assert old.rope_scaling == RopeScaling('llama3', 8.0, 1.0, 4.0, 32)


@pytest.mark.parametrize(
    'changes, message',
    [
        (
            {'model_type': 'gpt2'},
            r"is 'gpt2', .*'llama', 'qwen2', 'qwen3', 'mistral', 'gemma2'",
        ),
        ({'model_type': None}, 'model_type is None'),
        ({'vocab_size': None}, 'vocab_size is missing'),
        ({'hidden_act': 'relu'}, "hidden_act is 'relu'"),
        ({'attention_bias': True}, 'attention_bias is True'),
        ({'mlp_bias': True}, 'mlp_bias is True'),
        (
            {'rope_scaling': {'type': 'longrope', 'factor': 4.0}},
            r"rope_scaling.rope_type is 'longrope', .*'default', 'linear'",
        ),
        (
            {'rope_scaling': {'type': 'linear'}},
            'rope_scaling.factor is missing',
        ),
        (
            {
                'model_type': 'gemma3_text',
                'rope_parameters': {'sliding_attention': {'rope_type': 'yarn'}},
            },
            r"sliding_attention.rope_type is 'yarn', wanted 'default'",
        ),
        (
            {'model_type': 'gemma2', 'use_bidirectional_attention': True},
            'use_bidirectional_attention is True, wanted false',
        ),
        (
            {'rope_scaling': {'rope_type': 'llama3', 'factor': 8.0}},
            'rope_scaling.low_freq_factor is missing',
        ),
        ({'partial_rotary_factor': 0.5}, 'partial_rotary_factor is 0.5'),
        (
            {
                'use_sliding_window': True,
                'sliding_window': 8,
            },
            'use_sliding_window is True, wanted false for llama',
        ),
        (
            {'layer_types': ['full_attention', 'sliding_attention']},
            r"layer_types is \['sliding_attention'\], wanted a list of 3",
        ),
        (
            {'model_type': 'qwen2', 'layer_types': ['sliding_attention'] * 3},
            r'sliding_window is None, .* for layers \[0, 1, 2\] slide',
        ),
        (
            {'model_type': 'gemma2', 'layer_types': ['sliding_attention']},
            r"layer_types is \['sliding_attention'\], wanted a list of 3",
        ),
        ({'num_key_value_heads': 3}, 'kv_heads is 3, wanted a divisor'),
    ],
)
def test_what_the_model_lacks_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    config_from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'hidden_size': '64'}, "hidden_size is '64', wanted a whole number"),
        ({'hidden_size': True}, 'hidden_size is True, wanted a whole number'),
        ({'num_attention_heads': 0}, 'num_attention_heads is 0, .* at least 1'),
        ({'num_hidden_layers': 2.5}, 'num_hidden_layers is 2.5'),
        ({'vocab_size': [100]}, r'vocab_size is \[100\]'),
        ({'head_dim': -8}, 'head_dim is -8'),
        (
            {'model_type': ['llama']},
            r"model_type is \['llama'\], wanted one of",
        ),
        ({'hidden_act': {}}, 'hidden_act is {}, wanted one of'),
        ({'rope_theta': 'x'}, "rope_theta is 'x', wanted a finite number"),
        ({'rope_theta': float('inf')}, 'rope_theta is inf, wanted a finite'),
        ({'rope_theta': 10**400}, 'rope_theta is 1000'),
        ({'rms_norm_eps': 'small'}, "rms_norm_eps is 'small'"),
        ({'rms_norm_eps': 0}, 'rms_norm_eps is 0, wanted .* above 0'),
        ({'rope_scaling': 3}, 'rope_scaling is 3, wanted an object or null'),
        ({'rope_parameters': [1]}, r'rope_parameters is \[1\], wanted an obj'),
        (
            {'rope_scaling': {**LLAMA3, 'factor': '8'}},
            "rope_scaling.factor is '8', wanted a finite number",
        ),
        (
            {
                'rope_scaling': {
                    **LLAMA3,
                    'original_max_position_embeddings': 32.5,
                }
            },
            'rope_scaling.original_max_position_embeddings is 32.5',
        ),
        (
            {'rope_scaling': {'rope_type': ['x']}},
            r"rope_scaling.rope_type is \['x'\]",
        ),
        ({'tie_word_embeddings': 'no'}, "tie_word_embeddings is 'no', .* true"),
        ({'attention_bias': 'no'}, "attention_bias is 'no'"),
        ({'layer_types': 'full_attention'}, "layer_types is 'full_attention'"),
        (
            {
                'model_type': 'qwen2',
                'use_sliding_window': True,
                'sliding_window': 8,
                'max_window_layers': '2',
            },
            "max_window_layers is '2', wanted a whole number",
        ),
        (
            {'model_type': 'mistral', 'sliding_window': 0},
            'sliding_window is 0, wanted a whole number of at least 1',
        ),
        (
            {'model_type': 'gemma2', 'attn_logit_softcapping': 'high'},
            "attn_logit_softcapping is 'high', wanted a finite number",
        ),
    ],
)
def test_a_value_of_another_type_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=f'config.json: {message}'):
    config_from_hf({**LLAMA, **changes})


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(rope_theta=INFINITE), 'config.rope_theta is inf'),
        (dict(norm_eps=INFINITE), 'config.norm_eps is inf'),
        *(
            (
                dict(rope_scaling=RopeScaling('llama3', **{name: INFINITE})),
                f'rope_scaling.{name} is inf, wanted a finite number',
            )
            for name in ('factor', 'low_freq_factor', 'high_freq_factor')
        ),
    ],
)
def test_infinity_is_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    resolve(ModelConfig(**changes))


@pytest.mark.parametrize(
    'changes',
    [
        {'use_sliding_window': False, 'sliding_window': 8},
        {'layer_types': ['full_attention'] * 3},
        {'rope_scaling': {'rope_type': 'default'}},
        {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0}},
        {'attention_bias': False, 'mlp_bias': False},
    ],
)
def test_what_is_named_but_not_used_is_accepted(changes):
  assert config_from_hf({**LLAMA, **changes}) == config_from_hf(LLAMA)


# Each with a number that is no default.
SCALINGS = [
    RopeScaling(),
    RopeScaling('llama3', 8.0),
    RopeScaling('linear', 3.0),
    RopeScaling('dynamic', 3.0, original_max_length=100),
    RopeScaling(
        'yarn', 3.0, beta_fast=16.0, mscale=0.5, original_max_length=100,
        truncate=False,
    ),
]  # fmt: skip


def of_family(name, **changes):
  """A policy of the family, with every setting that it may have."""
  family = FAMILIES[name]
  settings = dict(
      family=name,
      layers=3,
      kv_heads=2,
      activation='gelu_tanh',
      tied_embeddings=False,
      **family.settings,
  )
  if family.slides is not None:
    slide = family.slides({**family.defaults, 'max_window_layers': 1}, 3, '')
    settings.update(sliding_window=8, sliding_layers=tuple(slide))
  if 'num_experts' in family.defaults:
    # Mixtral says it of the experts; the other's are as wide by chance.
    width = ModelConfig().mlp_width
    settings.update(moe=MoeSettings(experts=6, chosen=3, width=width))
  for theirs, ours in {
      'query_pre_attn_scalar': 'query_scalar',
      'attn_logit_softcapping': 'attention_cap',
      'final_logit_softcapping': 'logit_cap',
      'rope_local_base_freq': 'sliding_rope_theta',
  }.items():
    if theirs in family.defaults:
      settings[ours] = 7.0
  return ModelConfig(**{**settings, **changes})


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('scaling', SCALINGS, ids=lambda s: s.kind)
def test_settings_survive_the_way_to_config_json_and_back(name, scaling):
  config = of_family(name, rope_scaling=scaling)
  if scaling.kind == 'dynamic':
    config.max_length = 300
  written = json.loads(json.dumps(config_to_hf(resolve(config))))
  assert written['model_type'] == name
  assert written['architectures'] == [FAMILIES[name].architecture]
  assert config_from_hf(written) == config


def test_a_policy_without_windows_or_caps_survives_too():
  config = of_family(
      'gemma2', sliding_window=0, sliding_layers=(), logit_cap=0.0
  )
  assert config_from_hf(config_to_hf(config)) == config


def test_a_scalar_that_is_unset_is_written_as_the_head_size():
  written = config_to_hf(of_family('gemma2', query_scalar=0.0))
  assert written['query_pre_attn_scalar'] == written['head_dim'] == 24


@pytest.mark.parametrize(
    'name, changes, message',
    [
        (
            'llama',
            dict(qk_norm=True),
            "qk_norm is True, wanted False in family 'llama'",
        ),
        ('qwen3', dict(qk_norm=False), 'qk_norm is False, wanted True in'),
        ('mistral', dict(logit_cap=3.0), 'logit_cap is 3.0, wanted 0.0 in'),
        (
            'mistral',
            dict(sliding_layers=(1,)),
            r'sliding_layers is \(1,\), wanted \(0, 1, 2\) in family',
        ),
        (
            'llama',
            dict(sliding_layers=(1,)),
            r'sliding_layers is \(1,\), wanted \(\) in family',
        ),
        (
            'gemma2',
            dict(sliding_rope_theta=5.0),
            'sliding_rope_theta is 5.0, wanted 0.0 in',
        ),
    ],
)
def test_settings_that_the_family_has_not_cannot_be_written(
    name, changes, message
):
  with pytest.raises(ConfigError, match=message):
    config_to_hf(of_family(name, **changes))


# Experts.

QWEN3_MOE = {
    **LLAMA,
    'model_type': 'qwen3_moe',
    'num_experts': 8,
    'num_experts_per_tok': 3,
    'moe_intermediate_size': 40,
    'num_key_value_heads': 2,
}
MIXTRAL = {
    **LLAMA,
    'model_type': 'mixtral',
    'num_local_experts': 8,
    'num_key_value_heads': 2,
}


@pytest.mark.parametrize(
    'changes, wanted',
    [
        (dict(), MoeSettings(8, 3, 40, renormalise=False)),
        (dict(norm_topk_prob=True), MoeSettings(8, 3, 40)),
        (
            dict(mlp_only_layers=[1]),
            MoeSettings(8, 3, 40, renormalise=False, dense_layers=(1,)),
        ),
        (
            dict(decoder_sparse_step=2),
            MoeSettings(8, 3, 40, renormalise=False, dense_layers=(0, 2)),
        ),
    ],
)
def test_experts_are_read_and_written(changes, wanted):
  config = config_from_hf({**QWEN3_MOE, **changes})
  assert config.moe == wanted
  assert config_from_hf(config_to_hf(config)) == config


def test_mixtral_says_how_wide_experts_are_where_others_have_an_mlp():
  config = config_from_hf(MIXTRAL)
  assert config.moe == MoeSettings(8, 2, 112)
  assert config_from_hf(config_to_hf(config)) == config


@pytest.mark.parametrize(
    'fields, message',
    [
        ({**QWEN3_MOE, 'num_experts_per_tok': 9}, 'per_tok is 9, wanted at'),
        ({**QWEN3_MOE, 'num_experts': 0}, 'num_experts is 0'),
        (
            {**QWEN3_MOE, 'mlp_only_layers': [0, 1, 2]},
            r'mlp_only_layers is \[0, 1, 2\], wanted some layer with experts',
        ),
        ({**QWEN3_MOE, 'mlp_only_layers': 1}, 'mlp_only_layers is 1'),
    ],
)
def test_experts_that_cannot_be_are_refused(fields, message):
  with pytest.raises(ConfigError, match=message):
    config_from_hf(fields)


@pytest.mark.parametrize(
    'changes, message',
    [
        (dict(moe=MoeSettings(4, 5)), 'moe.chosen is 5'),
        (dict(moe=MoeSettings(40_000)), 'moe.experts is 40000'),
        (dict(moe=MoeSettings(balance=0.1)), 'moe.balance is 0.1, wanted none'),
        (dict(moe=MoeSettings(replay=True)), 'moe.replay is True, wanted none'),
        (dict(moe=MoeSettings(4, balance=-1.0)), 'moe.balance is -1.0'),
        (dict(moe=MoeSettings(4, dense_layers=(0, 1))), 'dense_layers is'),
        (dict(moe=MoeSettings(4, dense_layers=(2,))), 'dense_layers is'),
        (
            dict(moe=MoeSettings(4, dense_layers=(0, 1)), layer_loop='scan'),
            'dense_layers is .0, 1., wanted numbers .* not all of layers=2',
        ),
    ],
)
def test_wrong_settings_of_experts_are_refused_by_name(changes, message):
  with pytest.raises(ConfigError, match=message):
    resolve(ModelConfig(**changes))


@pytest.mark.parametrize(
    'family, experts, message',
    [
        (
            'llama',
            MoeSettings(4),
            "moe.experts is 4, wanted 0 in family 'llama'",
        ),
        ('mixtral', MoeSettings(), 'moe.experts is 0, wanted above 0'),
        ('mixtral', MoeSettings(4, renormalise=False), 'moe.renormalise is F'),
        ('mixtral', MoeSettings(4, dense_layers=(0,)), 'moe.dense_layers is'),
    ],
)
def test_experts_that_a_family_lacks_are_not_exported(family, experts, message):
  with pytest.raises(ConfigError, match=message):
    config_to_hf(ModelConfig(family=family, moe=experts))
