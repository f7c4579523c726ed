"""Settings of the policy and what they read from, and write to, config.json."""

import dataclasses
import json

import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.models.config import (
    FAMILIES,
    ModelConfig,
    RopeScaling,
    config_from_hf,
    config_to_hf,
)

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
        (dict(heads=6, kv_heads=4), 'is 4, wanted a divisor of heads=6'),
        (dict(head_size=7), 'head_size is 7, wanted even'),
        (dict(vocab_multiple=0), 'vocab_multiple is 0'),
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
        ({'model_type': 'gemma2'}, r"is 'gemma2', .*'llama', 'qwen2'"),
        ({'model_type': None}, 'model_type is None'),
        ({'vocab_size': None}, 'vocab_size is missing'),
        ({'hidden_act': 'relu'}, "hidden_act is 'relu'"),
        ({'attention_bias': True}, 'attention_bias is True'),
        ({'mlp_bias': True}, 'mlp_bias is True'),
        (
            {'rope_scaling': {'type': 'yarn', 'factor': 4.0}},
            r"rope_scaling.rope_type is 'yarn', .*'default', 'llama3'",
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
                'max_window_layers': 2,
            },
            'sliding_window is 8, wanted none in use: max_window_layers=2',
        ),
        (
            {'layer_types': ['full_attention', 'sliding_attention']},
            r"layer_types is \['sliding_attention'\]",
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
                'use_sliding_window': True,
                'sliding_window': 8,
                'max_window_layers': '2',
            },
            "max_window_layers is '2', wanted a whole number",
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
        {
            'use_sliding_window': True,
            'sliding_window': 8,
            'max_window_layers': 3,
        },
        {'layer_types': ['full_attention'] * 3},
        {'rope_scaling': {'rope_type': 'default'}},
        {'rope_parameters': {'rope_type': 'default', 'rope_theta': 10_000.0}},
        {'attention_bias': False, 'mlp_bias': False},
    ],
)
def test_what_is_named_but_not_used_is_accepted(changes):
  assert config_from_hf({**LLAMA, **changes}) == config_from_hf(LLAMA)


@pytest.mark.parametrize('name', FAMILIES)
@pytest.mark.parametrize('scaling', [RopeScaling(), RopeScaling('llama3', 8.0)])
def test_settings_survive_the_way_to_config_json_and_back(name, scaling):
  family = FAMILIES[name]
  config = ModelConfig(
      kv_heads=2,
      activation='gelu_tanh',
      tied_embeddings=False,
      rope_scaling=scaling,
      qkv_bias=family.qkv_bias,
      qk_norm=family.qk_norm,
  )
  written = json.loads(json.dumps(config_to_hf(config)))
  assert written['model_type'] == name
  assert written['architectures'] == [family.architecture]
  assert config_from_hf(written) == config


def test_settings_of_no_family_cannot_be_written():
  config = dataclasses.replace(ModelConfig(), qkv_bias=True, qk_norm=True)
  with pytest.raises(ConfigError, match=r'\(True, True\), which no family has'):
    config_to_hf(config)
