"""Sources: files, their forms, and how their questions are put."""

import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.data.sources import SourceSettings, read_source, read_sources
from areal_jax.data.stream import Part
from areal_jax.types import Message, Problem
from tests.data.files import write

OWN = [{'id': i, 'prompt': f'{i}=', 'answer': i} for i in 'ab']
GSM8K = [{'question': f'{i}?', 'answer': f'#### {i}'} for i in range(3)]


def double(row):
  """A form of somebody's own."""
  return {
      'prompt': row['q'] * 2,
      'answer': str(row['n']),
      'meta': {'n': row['n']},
  }


def no_dict(row):
  """A form that makes no row."""
  return [row]


def of_two(row, more):
  """A form that takes too much."""
  return {**row, **more}


def test_own_rows_keep_their_ids(tmp_path):
  path = write(tmp_path / 'own.jsonl', OWN)
  found = read_source(SourceSettings(str(path)))
  assert found.problems == (
      Problem('a', 'own', 'a=', 'a'),
      Problem('b', 'own', 'b=', 'b'),
  )
  assert found.parts == (Part('own', 2),)


def test_published_rows_are_numbered(tmp_path):
  path = write(tmp_path / 'g.array_record', GSM8K)
  found = read_source(SourceSettings(str(path), form='gsm8k', limit=2))
  assert found.problems == (
      Problem('g/0', 'g', '0?', '0'),
      Problem('g/1', 'g', '1?', '1'),
  )
  named = read_source(SourceSettings(str(path), form='gsm8k', name='school'))
  assert [p.id for p in named.problems] == [f'school/{i}' for i in range(3)]


def test_columns_can_be_named(tmp_path):
  rows = [{'q': 'one?', 'n': 1, 'other': 0}]
  path = write(tmp_path / 'x.parquet', rows)
  settings = SourceSettings(str(path), form='columns', prompt='q', answer='n')
  assert read_source(settings).problems == (Problem('x/0', 'x', 'one?', '1'),)


@pytest.mark.parametrize('name', ['x.jsonl', 'x.parquet', 'x.array_record'])
def test_columns_can_lie_inside_others(tmp_path, name):
  rows = [
      {'prompt': f'{i}?', 'reward_model': {'ground_truth': i, 'style': 'rule'}}
      for i in range(2)
  ]
  settings = SourceSettings(
      str(write(tmp_path / name, rows)),
      form='columns',
      answer='reward_model.ground_truth',
  )
  assert [p.answer for p in read_source(settings).problems] == ['0', '1']


HALF = '{"id": "a\\ud83d", "prompt": "x", "answer": ""}'
MESSAGE = '{"role": "user", "content": "\\udc00"}'


@pytest.mark.parametrize(
    'line, field',
    [
        (HALF, 'id'),
        ('{"id": "a", "prompt": "say \\ud83d now", "answer": "4"}', 'prompt'),
        (f'{{"id": "a", "prompt": [{MESSAGE}], "answer": "4"}}', 'prompt'),
        ('{"id": "a", "prompt": "x", "answer": "\\udfff"}', 'answer'),
        (
            '{"id": "a", "source": "\\ud800", "prompt": "x", "answer": ""}',
            'source',
        ),
        (
            '{"id": "a", "prompt": "x", "answer": "",'
            ' "meta": {"k": ["\\udc00"]}}',
            'meta',
        ),
    ],
)
def test_half_of_a_character_is_named_by_file_and_line(tmp_path, line, field):
  path = tmp_path / 'x.jsonl'
  path.write_text('{"id": "fine", "prompt": "\\ud83d\\ude00", "answer": ""}\n')
  assert read_source(SourceSettings(str(path))).problems[0].prompt == '😀'
  with path.open('a') as file:
    file.write(line)
  wanted = rf'x.jsonl line 2: {field} holds .\\ud[89a-f]... in .* half of a'
  with pytest.raises(ConfigError, match=wanted):
    read_source(SourceSettings(str(path)))
  left = read_source(SourceSettings(str(path), bad_rows='drop'))
  assert len(left.problems) == len(left.bad_rows) == 1


def test_form_can_be_a_function(tmp_path):
  path = write(tmp_path / 'x.jsonl', [{'q': 'ab', 'n': 1}])
  settings = SourceSettings(str(path), form='tests.data.test_sources:double')
  assert read_source(settings).problems == (
      Problem('x/0', 'x', 'abab', '1', {'n': 1}),
  )


@pytest.mark.parametrize(
    'form, message',
    [
        ('tests.data.test_sources:missing', "has no 'missing'"),
        ('tests.data.test_sources:no_dict', r'no_dict returned is \[\{'),
        ('tests.data.test_sources:of_two', 'cannot be called with a row'),
        ('tests.data.test_sources:double', "line 2: .* failed: KeyError: 'q'"),
    ],
)
def test_function_that_makes_no_problem_is_named(tmp_path, form, message):
  path = write(tmp_path / 'x.jsonl', [{'q': 'ab', 'n': 1}, {}])
  with pytest.raises(ConfigError, match=message):
    read_source(SourceSettings(str(path), form=form))


@pytest.mark.parametrize(
    'settings, prompt',
    [
        ({}, '0?'),
        ({'template': 'Q: {prompt} {x}'}, 'Q: 0? {x}'),
        ({'chat': True}, (Message('user', '0?'),)),
        (
            {'chat': True, 'system': 'Be terse.', 'template': '{prompt}\nA:'},
            (Message('system', 'Be terse.'), Message('user', '0?\nA:')),
        ),
    ],
)
def test_question_is_put_as_the_settings_say(tmp_path, settings, prompt):
  path = write(tmp_path / 'x.jsonl', GSM8K)
  found = read_source(SourceSettings(str(path), form='gsm8k', **settings))
  assert found.problems[0].prompt == prompt


def test_messages_of_a_row_stay_and_take_no_template(tmp_path):
  asked = [{'role': 'user', 'content': '8,3:9,1'}]
  path = str(write(tmp_path / 'x.parquet', [{'prompt': asked}]))
  form = dict(form='arithmetic_sequence', chat=True)
  found = read_source(SourceSettings(path, **form, system='s')).problems[0]
  assert found.prompt == (Message('system', 's'), Message('user', '8,3:9,1'))
  with pytest.raises(ConfigError, match='row 0: the prompt is 1 chat messages'):
    read_source(SourceSettings(path, **form, template='{prompt}!'))
  asked.insert(0, {'role': 'system', 'content': 'already'})
  path = str(write(tmp_path / 'x.parquet', [{'prompt': asked}]))
  with pytest.raises(ConfigError, match='wanted one of the two'):
    read_source(SourceSettings(path, **form, system='s'))


def test_bad_row_is_named_or_left_out_and_counted(tmp_path):
  rows = [*GSM8K, {'question': 'q', 'answer': 'none'}]
  path = str(write(tmp_path / 'x.jsonl', rows))
  with pytest.raises(ConfigError, match="x.jsonl line 4: answer is 'none'"):
    read_source(SourceSettings(path, form='gsm8k'))
  found = read_source(SourceSettings(path, form='gsm8k', bad_rows='drop'))
  assert len(found.problems) == found.parts[0].size == 3
  assert len(found.bad_rows) == 1
  assert 'x.jsonl line 4' in found.bad_rows[0]


def test_file_without_a_good_row_is_refused(tmp_path):
  path = str(write(tmp_path / 'x.jsonl', GSM8K))
  with pytest.raises(ConfigError, match='holds no good row.*line 1 has fields'):
    read_source(SourceSettings(path, bad_rows='drop'))


def test_published_math_has_four_rows_without_an_answer(data_dir):
  path = data_dir / 'datasets' / 'math_train.jsonl'
  if not path.is_file():
    pytest.skip(f'no file {path}')
  with pytest.raises(ConfigError, match='math_train.jsonl line 887 has fields'):
    read_source(SourceSettings(str(path), form='math'))
  found = read_source(SourceSettings(str(path), form='math', bad_rows='drop'))
  assert (len(found.problems), len(found.bad_rows)) == (7470, 4)


def test_sources_stand_one_behind_another(tmp_path):
  settings = (
      SourceSettings(str(write(tmp_path / 'own.jsonl', OWN)), weight=3.0),
      SourceSettings(
          str(write(tmp_path / 'g.parquet', GSM8K)), form='gsm8k', name='school'
      ),
  )
  found = read_sources(settings, 'config.task.train_sources')
  assert [p.id for p in found.problems] == [
      'a', 'b', 'school/0', 'school/1', 'school/2',
  ]  # fmt: skip
  assert found.parts == (Part('own', 2, 3.0), Part('school', 3, 1.0))


def test_id_of_two_sources_is_refused(tmp_path):
  (tmp_path / 'other').mkdir()
  settings = [
      SourceSettings(str(write(folder / 'g.jsonl', GSM8K)), form='gsm8k')
      for folder in (tmp_path, tmp_path / 'other')
  ]
  with pytest.raises(
      ConfigError,
      match=r"at\[1\]: .*other/g.jsonl line 1: id is 'g/0', which .*g.jsonl"
      ' line 1 has too',
  ):
    read_sources(settings, 'at')


@pytest.mark.parametrize(
    'changes, message',
    [
        ({'path': ''}, "path is '', wanted a file"),
        ({'form': 'gsm'}, "form is 'gsm', wanted one of .*'gsm8k'"),
        ({'format': 'csv'}, "format is 'csv', wanted one of"),
        ({'weight': 0.0}, 'weight is 0.0, wanted above 0 and finite'),
        ({'weight': float('inf')}, 'weight is inf'),
        ({'limit': -1}, 'limit is -1'),
        ({'prompt': 'q'}, "prompt is 'q', wanted '' unless form is 'columns'"),
        ({'template': 'Q:'}, "template is 'Q:', wanted one '{prompt}' in it"),
        ({'system': 'x'}, "system is 'x', wanted '' unless chat is True"),
        ({'bad_rows': 'keep'}, "bad_rows is 'keep', wanted one of"),
    ],
)
def test_wrong_setting_is_named(changes, message):
  settings = SourceSettings(**{'path': 'x.jsonl', **changes})
  with pytest.raises(ConfigError, match=f'^config.{message}'):
    resolve(settings)
