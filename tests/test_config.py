"""Settings are checked, frozen, written without secrets, and open for flags."""

import copy
import dataclasses
import json
from typing import Any, Literal

import pytest

from areal_jax.config import (
    ConfigError,
    Mistakes,
    fetching,
    from_dict,
    named,
    open_for_flags,
    require,
    resolve,
    to_dict,
    unknown_field,
)


@dataclasses.dataclass
class Inner:
  size: int = 4
  rate: float = 0.5

  def validate(self, at: str) -> None:
    require(self.size >= 1, f'{at}.size', self.size, 'at least 1')

  @property
  def double(self) -> int:
    return 2 * self.size


@dataclasses.dataclass
class Outer:
  name: str = 'run'
  on: bool = False
  kind: Literal['a', 'b'] = 'a'
  clip: float | None = None
  ids: tuple[int, ...] = ()
  pair: tuple[int, str] = (1, 'x')
  table: dict[str, int] = dataclasses.field(default_factory=dict)
  anything: Any = None
  inner: Inner = dataclasses.field(default_factory=Inner)

  def validate(self, at: str) -> None:
    require(
        self.inner.size < 100, f'{at}.inner.size', self.inner.size, 'below 100'
    )


def test_resolved_settings_are_a_frozen_copy():
  settings = Outer(inner=Inner(size=7))
  frozen = resolve(settings)
  with pytest.raises(AttributeError, match='Outer.name cannot be set'):
    frozen.name = 'other'
  with pytest.raises(AttributeError, match='Inner.size cannot be set'):
    frozen.inner.size = 8
  settings.inner.size = 8
  assert frozen.inner.size == 7
  assert isinstance(frozen.inner, Inner)
  assert frozen.inner.double == 14


def test_resolved_settings_hash_as_they_compare():
  one = resolve(Outer(table={'b': 2, 'a': 1}))
  same = resolve(Outer(table={'a': 1, 'b': 2}))
  other = resolve(Outer(table={'a': 1, 'b': 3}))
  assert one == same
  assert hash(one) == hash(same)
  assert one != other
  assert len({one, same, other}) == 2


def test_a_changed_copy_of_resolved_settings_is_resolved():
  frozen = dataclasses.replace(resolve(Outer()), name='other')
  assert frozen.name == 'other'
  with pytest.raises(AttributeError, match='the settings are resolved'):
    frozen.name = 'third'
  assert resolve(frozen) == frozen
  assert copy.deepcopy(frozen) == frozen


@pytest.mark.parametrize(
    'change, says',
    [
        ({'name': 3}, 'config.name is 3, wanted a str'),
        ({'on': 1}, 'config.on is 1, wanted a bool'),
        ({'kind': 'c'}, "config.kind is 'c', wanted one of ['a', 'b']"),
        ({'clip': 'x'}, "config.clip is 'x', wanted float | None"),
        ({'clip': True}, 'config.clip is True, wanted float | None'),
        ({'ids': 3}, 'config.ids is 3, wanted tuple[int, ...]'),
        ({'ids': (1, 2.5)}, 'config.ids[1] is 2.5, wanted a whole number'),
        ({'pair': (1,)}, 'config.pair is (1,), wanted tuple[int, str]'),
        ({'pair': (1, 2)}, 'config.pair[1] is 2, wanted a str'),
        ({'table': []}, 'config.table is [], wanted dict[str, int]'),
        ({'inner': 3}, 'config.inner is 3, wanted a Inner'),
        (
            {'inner': Inner(size=2.0)},
            'config.inner.size is 2.0, wanted a whole number',
        ),
        (
            {'inner': Inner(size=True)},
            'config.inner.size is True, wanted a whole number',
        ),
        (
            {'inner': Inner(rate='1')},
            "config.inner.rate is '1', wanted a number",
        ),
        (
            {'inner': Inner(rate=float('nan'))},
            'config.inner.rate is nan, wanted a number',
        ),
        (
            {'inner': Inner(size=0)},
            'config.inner.size is 0, wanted at least 1',
        ),
        (
            {'inner': Inner(size=100)},
            'config.inner.size is 100, wanted below 100',
        ),
    ],
)
def test_a_wrong_value_is_named_by_its_path(change, says):
  with pytest.raises(ConfigError) as error:
    resolve(Outer(**change))
  assert str(error.value) == says


def test_all_mistakes_are_told_at_once_and_none_that_follows_from_another():
  outer = Outer(name=3, kind='c', inner=Inner(size=500, rate='x'))
  outer.inner.sise = 5
  with pytest.raises(ConfigError) as error:
    resolve(outer)
  assert error.value.mistakes == (
      'config.name is 3, wanted a str',
      "config.kind is 'c', wanted one of ['a', 'b']",
      "config.inner has no field 'sise', wanted 'size'",
      "config.inner.rate is 'x', wanted a number",
      'config.inner.size is 500, wanted below 100',
  )


@dataclasses.dataclass
class Parts:
  """Checks that read what another has refused."""

  whole: int = 8
  parts: int = 2
  names: tuple[str, ...] = ('a',)

  def validate(self, at: str) -> None:
    require(self.parts >= 1, f'{at}.parts', self.parts, 'at least 1')
    require(self.whole > self.parts, f'{at}.whole', self.whole, 'more')
    require(bool(self.names), f'{at}.names', self.names, 'some')
    require(self.whole % self.parts == 0, f'{at}.whole', self.whole, 'even')


@pytest.mark.parametrize(
    'change, says',
    [
        ({'parts': 0}, ['parts is 0, wanted at least 1']),  # and divides by it
        ({'parts': -1, 'whole': -5}, ['parts is -1, wanted at least 1']),
        (
            {'parts': 'x', 'whole': 1, 'names': ()},
            ["parts is 'x', wanted a whole number", 'names is (), wanted some'],
        ),
        (
            {'parts': 0, 'names': ()},
            ['parts is 0, wanted at least 1', 'names is (), wanted some'],
        ),
        (
            {'whole': 1, 'names': ()},
            ['whole is 1, wanted more', 'names is (), wanted some'],
        ),
    ],
)
def test_a_check_that_reads_a_refused_setting_says_nothing(change, says):
  with pytest.raises(ConfigError) as error:
    resolve(Parts(**change))
  assert list(error.value.mistakes) == [f'config.{line}' for line in says]


def test_mistakes_of_blocks_are_told_together_and_other_errors_pass():
  mistakes = Mistakes()
  mistakes.tell()
  for name in ('a', 'b', 'a'):
    with mistakes, named('at'):
      require(False, name, 1, 'another')
  with pytest.raises(ConfigError) as error:
    mistakes.tell()
  assert error.value.mistakes == (
      'at: a is 1, wanted another', 'at: b is 1, wanted another'
  )  # fmt: skip
  with pytest.raises(KeyError), mistakes:
    raise KeyError('x')


def test_wrong_fields_of_a_written_tree_are_told_together():
  with pytest.raises(ConfigError) as error:
    from_dict(Outer, {'nmae': 'x', 'inner': {'sise': 3}})
  assert error.value.mistakes == (
      "config has no field 'nmae', wanted 'name'",
      "config.inner has no field 'sise', wanted 'size'",
  )


@pytest.mark.parametrize(
    'path, says',
    [
        ('Qwen/Qwen2.5-0.5B', 'hf download Qwen/Qwen2.5-0.5B --local-dir'),
        ('runs/quickstart', ''),  # the folder runs is here
        ('/abs/model', ''),
        ('./a/b', ''),
        ('a/b/c', ''),
        ('model', ''),
    ],
)
def test_a_repository_is_told_from_a_path(path, says, tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  (tmp_path / 'runs').mkdir()
  found = fetching(path)
  assert (says in found) and bool(found) == bool(says)


def test_values_come_in_the_declared_type():
  frozen = resolve(Outer(clip=2, ids=[1, 2], inner=Inner(rate=1)))
  assert isinstance(frozen.clip, float)
  assert isinstance(frozen.inner.rate, float)
  assert frozen.ids == (1, 2)
  assert resolve(Outer(clip=None)).clip is None


@pytest.mark.parametrize('value', [{'name': 'x'}, None, Outer])
def test_what_is_no_settings_dataclass_is_refused(value):
  with pytest.raises(ConfigError, match='config is .*, wanted a dataclass'):
    resolve(value)


def test_an_attribute_that_is_no_field_is_refused():
  settings = Outer()
  settings.inner.sise = 5
  with pytest.raises(ConfigError) as error:
    resolve(settings)
  says = "config.inner has no field 'sise', wanted 'size'"
  assert str(error.value) == says


def test_a_name_like_no_other_is_answered_with_all_of_them():
  assert unknown_field('config', 'zzz', ['b', 'a']) == (
      "config has no field 'zzz', wanted one of ['a', 'b']"
  )


def test_a_lower_rooms_complaint_gets_the_settings_name():
  with pytest.raises(ConfigError, match='^config.size: x is 1, wanted 2$'):
    with named('config.size'):
      require(False, 'x', 1, '2')
  with pytest.raises(KeyError):
    with named('config.size'):
      raise KeyError('not a mistake of the user')


def test_plain_data_goes_through_json():
  settings = resolve(Outer(clip=float('inf'), ids=(1, 2), table={'a': 1}))
  got = json.loads(json.dumps(to_dict(settings), allow_nan=False))
  assert got['clip'] == 'inf'
  assert got['ids'] == [1, 2]
  assert got['table'] == {'a': 1}
  assert got['inner'] == {'size': 4, 'rate': 0.5}


@dataclasses.dataclass
class Keys:
  api_key: str = 'abc'
  hub_token: str = 'abc'
  password: str = ''
  row_tokens: int = 96
  tokenizer: str = 'tok512.model'
  command: str = 'run --key hf_AbCdEfGhIjKl --task=disk-sorting'
  headers: dict[str, str] = dataclasses.field(
      default_factory=lambda: {'Authorization': 'Bearer x', 'Accept': 'y'}
  )


def test_secrets_are_not_written_down():
  got = to_dict(Keys())
  assert got == {
      'api_key': '<redacted>',
      'hub_token': '<redacted>',
      'password': '',
      'row_tokens': 96,
      'tokenizer': 'tok512.model',
      'command': 'run --key <redacted> --task=disk-sorting',
      'headers': {'Authorization': '<redacted>', 'Accept': 'y'},
  }


def test_flags_see_plain_types():
  open_for_flags(Outer)
  types = {field.name: field.type for field in dataclasses.fields(Outer)}
  assert types['kind'] is str
  assert types['inner'] is Inner
  # The types as written are still what resolve checks.
  with pytest.raises(ConfigError, match="wanted one of \\['a', 'b'\\]"):
    resolve(Outer(kind='c'))


@dataclasses.dataclass
class _Item:
  size: int = 1

  def validate(self, at: str) -> None:
    require(self.size >= 1, f'{at}.size', self.size, 'at least 1')


@dataclasses.dataclass
class _Several:
  items: tuple[_Item, ...] = ()


def test_settings_in_a_tuple_are_checked_and_frozen():
  settings = resolve(_Several((_Item(1), _Item(2))))
  with pytest.raises(AttributeError, match='the settings are resolved'):
    settings.items[1].size = 3
  assert hash(settings) == hash(resolve(_Several([_Item(1), _Item(2)])))
  with pytest.raises(ConfigError, match=r'config.items\[1\].size is 0, wanted'):
    resolve(_Several((_Item(1), _Item(0))))
  with pytest.raises(ConfigError, match=r'config.items\[0\] is 3, wanted a'):
    resolve(_Several((3,)))
