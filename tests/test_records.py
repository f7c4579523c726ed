"""Records come back from bytes as they were, bit for bit."""

import dataclasses
import enum
import io
import json
import types as python_types

import numpy as np
import pytest

from areal_jax import records, types
from tests import records as small


def same(one, other):
  """Equal in type, value and every bit, nested records included."""
  assert type(one) is type(other), (one, other)
  if dataclasses.is_dataclass(one):
    for field in dataclasses.fields(one):
      same(getattr(one, field.name), getattr(other, field.name))
  elif isinstance(one, np.ndarray):
    assert one.dtype == other.dtype and one.shape == other.shape
    assert one.tobytes() == other.tobytes()
  elif isinstance(one, dict):
    assert list(one) == list(other)
    for key in one:
      same(one[key], other[key])
  elif isinstance(one, (tuple, list)):
    assert len(one) == len(other)
    for a, b in zip(one, other):
      same(a, b)
  elif isinstance(one, float) and one != one:
    assert other != other
  else:
    assert one == other


def rich_group():
  """A group with everything that a field may hold."""
  odd = np.array([0.1, np.nan, -np.inf, -0.0], np.float32)
  trajectory = dataclasses.replace(
      small.trajectory(7, 1, versions=[3, 4], logps=[-0.1, -2.5e-8]),
      parent=0,
      token_rewards=odd,
      routing=np.arange(24, dtype=np.int32).reshape(4, 2, 3),
      reward=types.RewardResult(
          types.RewardStatus.OK, 0.1, {'format': 1.0, 'x': 1 / 3}, 'fine', 0.5
      ),
      timestamps={'started': 1.25, 'scored': float('inf')},
  )
  problem = types.Problem(
      'train/7',
      'chat',
      (types.Message('user', 'π?'), types.Message('assistant', '3.14')),
      '3.14159',
      {'level': 5, 'tags': ['a', ('b', None)], 'deep': {'yes': True}},
  )
  draw = types.Draw(7, 2, problem, types.Purpose.TRAIN, attempt=3)
  return types.Group(
      draw, 3, (trajectory, small.trajectory(7, 2)), ((0, 'timeout'),), 3
  )


@pytest.mark.parametrize(
    'value',
    [
        rich_group(),
        {'ready': (small.group(0), small.group(5, version=2)), 'running': ()},
        types.Request('r', (1, 2), types.SamplingParams(4, stop_ids=(0,))),
        [None, True, 3, -0.0, 0.1, float('nan'), float('-inf'), 'text', ()],
        np.float16([[1.5, 2.5]]),
        np.array(3, np.int64),
        (np.float32(0.1), np.float64(0.1), np.int64(3), np.bool_(True)),
        np.zeros((0, 4), bool),
    ],
    ids=lambda value: type(value).__name__,
)
def test_round_trip_is_exact(value):
  same(value, records.loads(records.dumps(value)))


def test_arrays_come_back_apart():
  # They are stored one behind another; a change of one is not to reach others.
  one, other = records.loads(
      records.dumps([np.zeros(3, np.int32), np.zeros(2, np.int32)])
  )
  one[:] = 1
  assert other.tolist() == [0, 0] and one.flags.owndata


def test_read_only_mapping_comes_back_as_a_dict():
  meta = python_types.MappingProxyType({'a': 1})
  draw = types.Draw(0, 0, types.Problem('p', 's', 'x', 'y', meta))
  assert records.loads(records.dumps(draw)).problem.meta == {'a': 1}


def test_many_short_arrays_are_few_members():
  groups = [small.group(i, size=4) for i in range(50)]
  with np.load(io.BytesIO(records.dumps(groups))) as members:
    assert len(members.files) <= 4


class Other(enum.Enum):
  A = 1


@pytest.mark.parametrize(
    'value, words',
    [
        ({'a': [1, {2}]}, r"value\['a'\]\[1\] is a set"),
        ({1: 2}, r'value has the key 1, wanted text'),
        ({'!': 2}, "value has the key '!'"),
        (np.array([object()]), 'value is an array of object'),
        (b'ids', 'value is a bytes'),
        (Other.A, 'value is a Other, wanted a record of types.py'),
        (
            types.Problem('p', 's', 'x', 'y', {'at': {1, 2}}),
            r"value.meta\['at'\] is a set",
        ),
    ],
)
def test_what_cannot_be_kept_is_named(value, words):
  with pytest.raises(TypeError, match=words):
    records.dumps(value)


def rewritten(value, change):
  """The bytes of a value, with its JSON text changed."""
  with np.load(io.BytesIO(records.dumps(value))) as members:
    found = {name: members[name] for name in members.files}
  tree = change(json.loads(found['tree'].tobytes()))
  found['tree'] = np.frombuffer(json.dumps(tree).encode(), np.uint8)
  file = io.BytesIO()
  np.savez(file, **found)
  return file.getvalue()


def test_field_of_a_later_version_is_refused_by_name():
  data = rewritten(small.draw(0), lambda tree: {**tree, 'colour': 'red'})
  with pytest.raises(ValueError, match=r"a Draw of the records has \['colour'"):
    records.loads(data)


def test_field_that_an_earlier_version_lacked_takes_its_default():
  def change(tree):
    del tree['attempt']
    return tree

  same(records.loads(rewritten(small.draw(0), change)), small.draw(0))


def test_unknown_record_is_refused_by_name():
  data = rewritten(small.draw(0), lambda tree: {**tree, '!': 'Drawing'})
  with pytest.raises(ValueError, match="records hold a 'Drawing'"):
    records.loads(data)


def test_other_bytes_are_refused():
  with pytest.raises(ValueError, match='wanted an npz file'):
    records.loads(b'{"ready": []}')
