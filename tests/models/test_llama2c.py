"""llama2.c checkpoints become the folder that was published of them."""

import json

import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError
from areal_jax.models import llama2c
from areal_jax.models.hf_config import config_from_hf


def test_stories_become_the_published_folder_bit_for_bit(tmp_path, data_dir):
  stories = data_dir / 'models/stories260K'
  llama2c.write_hf(stories / 'stories260K.bin', tmp_path)
  weights = 'model.safetensors'
  got = (tmp_path / weights).read_bytes()
  assert got == (stories / 'hf' / weights).read_bytes()
  ours, theirs = (
      json.loads((folder / 'config.json').read_text())
      for folder in (tmp_path, stories / 'hf')
  )
  assert config_from_hf(ours) == config_from_hf(theirs)
  for name in ('bos_token_id', 'eos_token_id', 'torch_dtype'):
    assert ours[name] == theirs[name]


def write(path, header, numbers):
  path.write_bytes(
      np.array(header, '<i4').tobytes() + np.array(numbers, '<f4').tobytes()
  )


def test_a_negative_vocabulary_has_an_unembedding_of_its_own(tmp_path):
  # Width 2, MLP 1, one layer, one head, 3 ids, 1 position.
  count = 3 * 2 + 2 + 4 * 4 + 2 + 3 * 2 + 2 + 2 + 3 * 2
  write(tmp_path / 'a.bin', [2, 1, 1, 1, 1, -3, 1], range(count))
  config = llama2c.write_hf(tmp_path / 'a.bin', tmp_path / 'hf')
  assert config.vocab_size == 3 and not config.tied_embeddings
  got = st.load_file(tmp_path / 'hf/model.safetensors')
  last = np.arange(count - 6, count, dtype=np.float32).reshape(3, 2)
  np.testing.assert_array_equal(got['lm_head.weight'], last)
  # Behind it stand the two rotary tables, one number each.
  norm = np.arange(count - 10, count - 8, dtype=np.float32)
  np.testing.assert_array_equal(got['model.norm.weight'], norm)


@pytest.mark.parametrize(
    'header, count, words',
    [
        ([2, 1, 1], 0, 'has 12 bytes, wanted at least 28'),
        ([2, 1, 1, 1, 1, 3, 1], 35, 'bytes is 168, wanted 172 by its header'),
        ([2, 1, 1, 3, 1, 3, 1], 36, r'header is \[2, 1, 1, 3, 1, 3, 1\]'),
        ([0x616B3432, 1, 2, 2, 1, 1, 3], 40, 'header is .*legacy format'),
    ],
)
def test_what_is_no_such_file_is_refused(tmp_path, header, count, words):
  write(tmp_path / 'a.bin', header, range(count))
  with pytest.raises(ConfigError, match=words):
    llama2c.write_hf(tmp_path / 'a.bin', tmp_path / 'hf')
  assert not (tmp_path / 'hf').exists()


def test_a_file_that_is_not_there_is_refused(tmp_path):
  with pytest.raises(ConfigError, match='llama2.c file is .*a.bin'):
    llama2c.read_config(tmp_path / 'a.bin')
