"""Folders are written whole, as others write them, or not at all."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError
from areal_jax.models import published
from areal_jax.models.published import Shape, half_split, write_folder


def tensors():
  """Names out of order, numbers of two widths."""
  generator = np.random.default_rng(0)
  return {
      'b.weight': generator.standard_normal((3, 5), np.float32),
      'a.bias': np.arange(7).astype(jnp.bfloat16),
      'é.weight': np.arange(6, dtype=np.float16).reshape(2, 3),
      'c': generator.standard_normal(4, np.float32),
  }


def shapes(of):
  return [Shape(n, t.shape, t.dtype) for n, t in of.items()]


def write(folder, of, order=None, **settings):
  names = order or [*of]
  given = ((name, of[name]) for name in names)
  write_folder(folder, {'a': 1}, shapes(of), given, **settings)


def test_one_file_is_byte_for_byte_that_of_the_safetensors_package(tmp_path):
  of = tensors()
  # Whatever the order in which they come.
  write(tmp_path / 'ours', of, order=sorted(of, reverse=True))
  st.save_file(of, tmp_path / 'theirs', metadata={'format': 'pt'})
  ours = (tmp_path / 'ours' / published.WEIGHTS).read_bytes()
  assert ours == (tmp_path / 'theirs').read_bytes()
  assert not (tmp_path / 'ours' / published.INDEX).exists()


def test_several_files_keep_to_the_limit_and_are_indexed(tmp_path):
  of = tensors()  # 60, 14, 12 and 16 bytes
  write(tmp_path, of, limit=30)
  index = json.loads((tmp_path / published.INDEX).read_text())
  assert index['metadata']['total_size'] == 60 + 14 + 12 + 16
  first, second, third = (f'model-0000{i}-of-00003.safetensors' for i in '123')
  assert index['weight_map'] == {
      'b.weight': first,  # larger than the limit, so by itself
      'a.bias': second,
      'é.weight': second,
      'c': third,
  }
  for name, file in index['weight_map'].items():
    np.testing.assert_array_equal(st.load_file(tmp_path / file)[name], of[name])


def test_weights_that_were_there_are_gone(tmp_path):
  of = tensors()
  write(tmp_path, of, limit=30)
  write(tmp_path, of)
  names = sorted(path.name for path in tmp_path.iterdir())
  assert names == ['config.json', 'model.safetensors']


def test_tensors_are_cast_to_what_was_announced(tmp_path):
  wide = np.array([1.0, 1 + 2**-9, 3e38], np.float32)
  announced = [Shape('a', (3,), np.dtype('bfloat16'))]
  write_folder(tmp_path, {}, announced, [('a', wide)])
  got = st.load_file(tmp_path / 'model.safetensors')['a']
  np.testing.assert_array_equal(got, wide.astype(jnp.bfloat16))


@pytest.mark.parametrize(
    'names, fault',
    [
        (['c', 'c'], 'tensor c has no place, or came twice'),
        (['b.weight', 'c'], r"tensors \['a.bias', 'é.weight'\] never came"),
    ],
)
def test_a_tensor_twice_or_never_is_seen(tmp_path, names, fault):
  with pytest.raises(ValueError, match=fault):
    write(tmp_path, tensors(), order=names)


def test_a_tensor_of_another_shape_is_seen(tmp_path):
  with pytest.raises(ValueError, match=r'a is \(3,\), wanted \(2,\)'):
    write_folder(
        tmp_path,
        {},
        [Shape('a', (2,), np.dtype('float32'))],
        [('a', np.zeros(3, np.float32))],
    )


def test_whole_numbers_are_refused(tmp_path):
  with pytest.raises(ConfigError, match="dtype of a is 'int32', wanted one of"):
    write(tmp_path, {'a': np.zeros(3, np.int32)})


def test_a_folder_is_there_when_it_is_whole(tmp_path):
  target = tmp_path / 'deep/target'
  with published.whole_folder(target, '--to') as folder:
    (folder / 'file').write_text('text')
    assert not target.exists()
  assert (target / 'file').read_text() == 'text'
  assert [path.name for path in target.parent.iterdir()] == ['target']


def half(path):
  with published.whole_folder(path, '--to') as folder:
    (folder / 'file').write_text('text')
    raise KeyboardInterrupt


def test_a_folder_that_is_interrupted_leaves_nothing(tmp_path):
  with pytest.raises(KeyboardInterrupt):
    half(tmp_path / 'target')
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize('kind', ['file', 'folder'])
def test_what_is_there_is_not_overwritten(tmp_path, kind):
  target = tmp_path / 'target'
  target.write_text('mine') if kind == 'file' else target.mkdir()
  with pytest.raises(ConfigError, match='--to is .*target.*not there yet'):
    half(target)


def test_a_folder_below_a_file_is_refused(tmp_path):
  (tmp_path / 'file').write_text('')
  with pytest.raises(ConfigError, match='folder that can be written'):
    half(tmp_path / 'file/target')


def test_rotary_rows_are_put_in_order():
  # Two heads of size 6; row numbers stand for themselves.
  rows = np.arange(12).reshape(12, 1)
  got = half_split(rows, 2)[:, 0].tolist()
  assert got == [0, 2, 4, 1, 3, 5, 6, 8, 10, 7, 9, 11]
