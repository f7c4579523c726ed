"""Files of others: what lies in place of the one that was meant."""

import pytest

from areal_jax.config import ConfigError
from areal_jax.files import check_content, read_json
from tests import files


def test_pointer_of_git_lfs_is_named_with_the_remedy(tmp_path):
  path = tmp_path / 'model.safetensors'
  path.write_text(files.POINTER)
  with pytest.raises(
      ConfigError,
      match='model.safetensors is a Git LFS pointer for 99 bytes, .* lfs pull',
  ):
    check_content(path)


@pytest.mark.parametrize('front', ['', '\n  '])
def test_web_page_is_named(tmp_path, front):
  path = tmp_path / 'config.json'
  path.write_text(front + files.PAGE)
  with pytest.raises(ConfigError, match='config.json is a web page, wanted'):
    check_content(path)


def test_other_content_and_no_file_at_all_are_passed_over(tmp_path):
  path = tmp_path / 'x.bin'
  check_content(path)
  path.write_bytes(bytes(range(256)))
  check_content(path)


@pytest.mark.parametrize(
    'content, message',
    [
        (b'{', 'is not JSON'),
        (b'{"a": "\xff"}', 'is not JSON'),
        (b'[1]', r'is \[1\], wanted a JSON object'),
        (files.POINTER.encode(), 'is a Git LFS pointer'),
    ],
)
def test_json_that_is_no_object_is_named(tmp_path, content, message):
  (tmp_path / 'config.json').write_bytes(content)
  with pytest.raises(ConfigError, match=f'config.json {message}'):
    read_json(tmp_path / 'config.json')
  with pytest.raises(ConfigError, match='there is no file .*other.json'):
    read_json(tmp_path / 'other.json')
