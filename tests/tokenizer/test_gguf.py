"""A GGUF file's metadata give the tokenizer that was published."""

import json

import pytest
from sentencepiece import sentencepiece_model_pb2

from areal_jax.config import ConfigError
from areal_jax.tokenizer.files import open_tokenizer
from areal_jax.tokenizer.gguf import tokenizer_files


@pytest.fixture(scope='module')
def fields(data_dir):
  """SmolLM2's, as its GGUF file has them."""
  folder = data_dir / 'tokenizers/smollm2'
  described = json.loads((folder / 'tokenizer.json').read_text())
  config = json.loads((folder / 'tokenizer_config.json').read_text())
  vocab = described['model']['vocab']
  merges = [' '.join(pair) for pair in described['model']['merges']]
  special = {token['id'] for token in described['added_tokens']}
  return {
      'tokenizer.ggml.model': 'gpt2',
      'tokenizer.ggml.pre': 'smollm',
      'tokenizer.ggml.tokens': sorted(vocab, key=vocab.get),
      'tokenizer.ggml.token_type': [
          3 if i in special else 1 for i in range(len(vocab))
      ],
      'tokenizer.ggml.merges': merges,
      'tokenizer.ggml.bos_token_id': 1,
      'tokenizer.ggml.eos_token_id': 2,
      'tokenizer.ggml.unknown_token_id': 0,
      'tokenizer.ggml.padding_token_id': 2,
      'tokenizer.chat_template': config['chat_template'],
  }


def test_smollm2_encodes_and_chats_as_published(fields, data_dir, tmp_path):
  for name, content in tokenizer_files(fields).items():
    (tmp_path / name).write_bytes(content)
  ours = open_tokenizer(tmp_path)
  folder = data_dir / 'tokenizers'
  theirs = open_tokenizer(folder / 'smollm2')
  for name in ('vocab_size', 'bos_id', 'eos_ids', 'pad_id'):
    assert getattr(ours.tokenizer, name) == getattr(theirs.tokenizer, name)
  assert ours.chat.source == fields['tokenizer.chat_template']
  texts = ['<|im_start|>user\nHi 1234<|im_end|>\n', "  a\n\n b 3.14 don't é 🙂"]
  for text in texts:
    ids = ours.tokenizer.encode(text)
    assert ids == theirs.tokenizer.encode(text)
    assert ours.tokenizer.decode(ids) == theirs.tokenizer.decode(ids)


def test_digits_that_stay_together_are_seen(fields, data_dir, tmp_path):
  changed = {**fields, 'tokenizer.ggml.pre': 'gpt-2'}
  for name, content in tokenizer_files(changed).items():
    (tmp_path / name).write_bytes(content)
  ours = open_tokenizer(tmp_path).tokenizer.encode('2024\n\n1000 cats')
  theirs = open_tokenizer(data_dir / 'tokenizers/smollm2').tokenizer
  assert ours != theirs.encode('2024\n\n1000 cats')


@pytest.mark.parametrize('name', ['llama2', 'mistral_v1'])
def test_sentencepiece_models_encode_as_published(data_dir, tmp_path, name):
  file = data_dir / f'tokenizers/{name}_tokenizer.model'
  model = sentencepiece_model_pb2.ModelProto()
  model.ParseFromString(file.read_bytes())
  fields = {
      'tokenizer.ggml.model': 'llama',
      'tokenizer.ggml.tokens': [p.piece for p in model.pieces],
      'tokenizer.ggml.scores': [p.score for p in model.pieces],
      'tokenizer.ggml.token_type': [p.type for p in model.pieces],
      'tokenizer.ggml.bos_token_id': 1,
      'tokenizer.ggml.eos_token_id': 2,
      'tokenizer.ggml.unknown_token_id': 0,
  }
  for file, content in tokenizer_files(fields).items():
    (tmp_path / file).write_bytes(content)
  ours = open_tokenizer(tmp_path).tokenizer
  assert (ours.vocab_size, ours.bos_id, ours.eos_ids) == (32000, 1, (2,))
  known = json.loads(
      (data_dir / 'tokenizers/reference_encodings.json').read_text()
  )
  for case in known[f'{name}_tokenizer.model']['cases']:
    assert ours.encode(case['text']) == case['ids']
    assert ours.decode(case['ids']) == case['decoded']


@pytest.mark.parametrize(
    'changes, words',
    [
        (
            {'tokenizer.ggml.model': 'bert'},
            r"tokenizer.ggml.model is 'bert', wanted one of \['gpt2', 'llama'",
        ),
        (
            {'tokenizer.ggml.pre': 'tekken'},
            "tokenizer.ggml.pre is 'tekken', wanted one of .*a tokenizer f",
        ),
        ({'tokenizer.ggml.merges': None}, 'lacks the field .*merges'),
        ({'tokenizer.ggml.model': 'llama'}, 'lacks the field .*scores'),
    ],
)
def test_a_tokenizer_of_another_kind_is_refused(fields, changes, words):
  changed = {**fields, **changes}
  changed = {n: value for n, value in changed.items() if value is not None}
  with pytest.raises(ConfigError, match=words):
    tokenizer_files(changed, 'a.gguf')
