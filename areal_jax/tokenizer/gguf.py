"""The tokenizer in a GGUF file, as files in the Hugging Face layout.

A GGUF file has tokens and special ids as metadata. A byte-level BPE ('gpt2')
has merges too, and the name of its pre-tokenizer, which stands for code in
llama.cpp: for the names in `PRE_TOKENIZERS` that code is known, for others the
published tokenizer has to come from elsewhere. A sentencepiece model ('llama')
has scores.
"""

from __future__ import annotations

import json
from typing import Any, Mapping

from sentencepiece import sentencepiece_model_pb2

from areal_jax.config import ConfigError, require
from areal_jax.tokenizer import huggingface_tokenizer, special_tokens

_BYTES = {
    'type': 'ByteLevel',
    'add_prefix_space': False,
    'trim_offsets': True,
    'use_regex': True,
}


def _split(pattern: str) -> list[dict[str, Any]]:
  """Splits text by a pattern; what does not match is left to bytes."""
  return [
      {
          'type': 'Split',
          'pattern': {'Regex': pattern},
          'behavior': 'Isolated',
          'invert': False,
      },
      {**_BYTES, 'use_regex': False},
  ]


# How a text is cut before merges apply, by llama.cpp's name for it. The
# patterns are those of the published tokenizers.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
    r'| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
PRE_TOKENIZERS = {
    'gpt-2': [_BYTES],
    'smollm': [{'type': 'Digits', 'individual_digits': True}, _BYTES],
    'llama-bpe': _split(_WORDS.replace('DIGITS', '{1,3}')),
    'qwen2': _split(_WORDS.replace('DIGITS', '')),
}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_AT = 'tokenizer.ggml.'
_INSTEAD = 'a tokenizer folder must be given instead'
_NAMED = {
    'bos_token': 'bos_token_id',
    'eos_token': 'eos_token_id',
    'pad_token': 'padding_token_id',
    'unk_token': 'unknown_token_id',
}


def tokenizer_files(
    fields: Mapping[str, Any], at: str = 'GGUF'
) -> dict[str, bytes]:
  """The files of the tokenizer that a file's metadata describe.

  Args:
    fields: the metadata.
    at: name of the file, for messages.

  Returns:
    Contents by name: `tokenizer_config.json`, and `tokenizer.json` or
    `tokenizer.model`.

  Raises:
    ConfigError: a tokenizer of another kind, or a pre-tokenizer that is not
      known.
  """
  kind = fields.get(_AT + 'model')
  require(kind in _KINDS, f'{at}: {_AT}model', kind,
          f'one of {[*_KINDS]}, or {_INSTEAD}')  # fmt: skip
  _require_fields(fields, ('tokens', 'token_type'), at)
  tokens = fields[_AT + 'tokens']
  config = {
      name: tokens[fields[_AT + field]]
      for name, field in _NAMED.items()
      if _AT + field in fields
  }
  if 'tokenizer.chat_template' in fields:
    config['chat_template'] = fields['tokenizer.chat_template']
  name, build = _KINDS[kind]
  if name == huggingface_tokenizer.FILE:
    # Without it transformers takes the class of the policy's family, which may
    # cut texts in a way of its own.
    config['tokenizer_class'] = 'PreTrainedTokenizerFast'
  return {name: build(fields, at), special_tokens.CONFIG: _json(config)}


# One function a kind. Each returns the content of the tokenizer's main file.


def _byte_level(fields: Mapping[str, Any], at: str) -> bytes:
  """A `tokenizer.json` of byte-level BPE."""
  pre = fields.get(_AT + 'pre', 'gpt-2')
  require(pre in PRE_TOKENIZERS, f'{at}: {_AT}pre', pre,
          f'one of {[*PRE_TOKENIZERS]}, or {_INSTEAD}')  # fmt: skip
  _require_fields(fields, ('merges',), at)
  tokens = fields[_AT + 'tokens']
  kinds = fields[_AT + 'token_type']
  added = [
      {
          'id': i,
          'content': token,
          'single_word': False,
          'lstrip': False,
          'rstrip': False,
          'normalized': False,
          'special': kind == _CONTROL,
      }
      for i, (token, kind) in enumerate(zip(tokens, kinds))
      if kind in (_CONTROL, _USER_DEFINED)
  ]
  cuts = PRE_TOKENIZERS[pre]
  return _json(
      {
          'version': '1.0',
          'truncation': None,
          'padding': None,
          'added_tokens': added,
          'normalizer': {'type': 'NFC'} if pre == 'qwen2' else None,
          'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': cuts},
          'post_processor': None,
          'decoder': {**_BYTES, 'add_prefix_space': True},
          'model': {
              'type': 'BPE',
              'dropout': None,
              'unk_token': None,
              'continuing_subword_prefix': '',
              'end_of_word_suffix': '',
              'fuse_unk': False,
              'byte_fallback': False,
              'ignore_merges': pre == 'llama-bpe',
              'vocab': {token: i for i, token in enumerate(tokens)},
              'merges': [m.split(' ') for m in fields[_AT + 'merges']],
          },
      }
  )


def _sentencepiece(fields: Mapping[str, Any], at: str) -> bytes:
  """A sentencepiece model of BPE with bytes for what it has no piece for."""
  _require_fields(fields, ('scores',), at)
  model = sentencepiece_model_pb2.ModelProto()
  # Kinds of tokens have the numbers that sentencepiece gives them.
  for token, score, kind in zip(
      fields[_AT + 'tokens'], fields[_AT + 'scores'], fields[_AT + 'token_type']
  ):
    model.pieces.add(piece=token, score=score, type=kind)
  trainer = model.trainer_spec
  trainer.model_type = trainer.BPE
  trainer.vocab_size = len(model.pieces)
  trainer.byte_fallback = True
  for name, field in _NAMED.items():
    one = name.removesuffix('_token')
    setattr(trainer, f'{one}_id', fields.get(_AT + field, -1))
    if _AT + field in fields:
      setattr(
          trainer, f'{one}_piece', fields[_AT + 'tokens'][fields[_AT + field]]
      )
  normalizer = model.normalizer_spec
  normalizer.name = 'identity'
  normalizer.add_dummy_prefix = fields.get(_AT + 'add_space_prefix', True)
  normalizer.remove_extra_whitespaces = False
  return model.SerializeToString()


_KINDS = {
    'gpt2': (huggingface_tokenizer.FILE, _byte_level),
    'llama': ('tokenizer.model', _sentencepiece),
}


def _require_fields(
    fields: Mapping[str, Any], names: tuple[str, ...], at: str
) -> None:
  for name in names:
    if _AT + name not in fields:
      raise ConfigError(f'{at} lacks the field {_AT}{name}; {_INSTEAD}')


def _json(value: Any) -> bytes:
  return (json.dumps(value, ensure_ascii=False, indent=1) + '\n').encode()
