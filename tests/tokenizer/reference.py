"""Published tokenizers with what the libraries of their makers do with them."""

import functools
import gzip
import json
import pathlib
import tempfile

from areal_jax.tokenizer.files import Opened, open_tokenizer

NAMES = (
    'llama2_tokenizer.model',
    'mistral_v1_tokenizer.model',
    'stories260K/tok512.model',
    'smollm2/tokenizer.json',
    'gpt2/tokenizer.json',
    'qwen3/tokenizer.json.gz',
)


@functools.cache
def opened(data: pathlib.Path, name: str) -> Opened:
  """A tokenizer with its neighbours, gunzipped where need be."""
  parts = ('tokenizers', 'models')
  paths = [data / part / name for part in parts]
  source = next((path for path in paths if path.is_file()), None)
  assert source is not None, f'none of {paths}'
  if source.suffix == '.model':
    return open_tokenizer(source)
  with tempfile.TemporaryDirectory() as folder:
    for other in source.parent.iterdir():
      content = other.read_bytes()
      if other.suffix == '.gz':
        content = gzip.decompress(content)
      pathlib.Path(folder, other.name.removesuffix('.gz')).write_bytes(content)
    return open_tokenizer(folder)


def expected(data: pathlib.Path) -> dict[str, dict]:
  """Size of the vocabulary and cases, by the name of the tokenizer."""
  file = data / 'tokenizers' / 'reference_encodings.json'
  return json.loads(file.read_text('utf-8'))
