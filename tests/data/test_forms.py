"""What rows of published data sets, and of our own form, become."""

import decimal
import json

import pytest

from areal_jax.config import ConfigError
from areal_jax.data import forms
from areal_jax.data.rows import read_rows
from areal_jax.types import Message, Problem

GOOD = {'id': 'a', 'prompt': '2+2=', 'answer': '4'}


def made(form: str, **columns) -> Problem:
  return forms.form_problem(forms.FORMS[form], columns, 'x/0', 'x', 'f line 1')


@pytest.mark.parametrize(
    'value, text',
    [
        ('\\frac12 ', '\\frac12 '),
        (7, '7'),
        (145.0, '145'),
        (2.5, '2.5'),
        (1e30, '1e+30'),
        (decimal.Decimal('2.50'), '2.50'),
        (decimal.Decimal('3.00'), '3'),
    ],
)
def test_numbers_are_texts_as_they_are_written(value, text):
  assert forms.text_of(value) == text


@pytest.mark.parametrize(
    'solution, gold',
    [
        ('2 + 3 = <<2+3=5>>5\n#### 5', '5'),
        ('#### 1,234,000', '1234000'),
        ('#### 3 #### -4.5 ', '-4.5'),
        ('#### $1,080', '$1080'),
        ('#### 1, 2', '1, 2'),
    ],
)
def test_gsm8k_answer_is_behind_the_hashes(solution, gold):
  assert made('gsm8k', question='q', answer=solution).answer == gold


@pytest.mark.parametrize(
    'prompt, terms',
    [
        ('8,3:9,4', '7,2,6,1'),  # 3 - 5 = -2 = 7, then 2, then -3 = 6, then 1
        ('3,3:9,6', '3,3,3,3,3,3'),
        ('7,8:9,2', '0,1'),
        ('5,8:9,0', ''),
    ],
)
def test_arithmetic_sequence_goes_on(prompt, terms):
  messages = [{'role': 'user', 'content': prompt}]
  problem = made('arithmetic_sequence', prompt=messages)
  assert problem.prompt == (Message('user', prompt),)
  assert problem.answer == terms
  assert made('arithmetic_sequence', prompt=prompt).answer == terms


def test_svamp_question_has_two_columns():
  problem = made(
      'svamp', Body='Tom has 3. ', Question='How many?', Answer=3.0, Type='Sum'
  )
  assert problem == Problem(
      'x/0', 'x', 'Tom has 3. How many?', '3', {'Type': 'Sum'}
  )


def test_math_keeps_what_tables_are_made_by():
  problem = made(
      'math', problem='$1+1$?', answer='2', level=3, subject=None, solution='s'
  )
  assert problem == Problem('x/0', 'x', '$1+1$?', '2', {'level': 3})


@pytest.mark.parametrize(
    'form, columns, message',
    [
        ('gsm8k', {'question': 'q'}, r"misses \['answer'\]"),
        ('gsm8k', {'question': 'q', 'answer': None}, r"misses \['answer'\]"),
        (
            'gsm8k',
            {'question': 'q', 'answer': '5'},
            "answer is '5', .* '#### N'",
        ),
        ('gsm8k', {'question': 'q', 'answer': '####'}, "answer is '####'"),
        ('gsm8k', {'question': 'q', 'answer': 5}, 'answer is 5, wanted a text'),
        ('gsm8k', {'question': '', 'answer': '#### 5'}, "question is ''"),
        ('gsm8k', {'question': 3, 'answer': '#### 5'}, 'question is 3'),
        (
            'math',
            {'problem': 'p', 'answer': ' '},
            "answer is ' ', wanted a text",
        ),
        ('math', {'problem': 'p', 'answer': True}, 'answer is True'),
        ('math', {'problem': 'p', 'answer': float('nan')}, 'answer is nan'),
        ('math', {'problem': 'p', 'answer': float('inf')}, 'answer is inf'),
        ('math', {'problem': 'p', 'answer': [1]}, r'answer is \[1\]'),
        ('svamp', {'Body': 'b', 'Question': 3, 'Answer': 1}, 'Question is 3'),
        ('arithmetic_sequence', {'prompt': '1,2:0,3'}, 'modulus of at least 1'),
        ('arithmetic_sequence', {'prompt': '1;2'}, "prompt is '1;2', wanted"),
        (
            'arithmetic_sequence',
            {'prompt': [{'role': 'user'}]},
            "prompt is {'role': 'user'}, wanted a text, or a list",
        ),
    ],
)
def test_row_of_another_form_is_named(form, columns, message):
  with pytest.raises(ConfigError, match=f'^f line 1.*{message}'):
    made(form, **columns)


@pytest.mark.parametrize(
    'row, message',
    [
        ({'id': 'b', 'prompt': 'x'}, r"misses \['answer'\]"),
        ({**GOOD, 'id': None}, 'id is None, wanted a text or a number'),
        ({**GOOD, 'id': ''}, "id is ''"),
        ({**GOOD, 'answer': True}, 'answer is True, wanted a text or a number'),
        (
            {**GOOD, 'answer': [4]},
            r'answer is \[4\], wanted a text or a',
        ),
        ({**GOOD, 'answer': float('nan')}, 'answer is nan'),
        ({**GOOD, 'prompt': ''}, "prompt is ''"),
        ({**GOOD, 'prompt': ' \n'}, r"prompt is ' \\n'"),
        ({**GOOD, 'prompt': []}, r'prompt is \[\]'),
        ({**GOOD, 'prompt': [{'role': 'user'}]}, 'content'),
        ({**GOOD, 'prompt': ['x']}, "prompt is 'x'"),
        ({**GOOD, 'meta': 1}, 'meta is 1'),
        ({**GOOD, 'level': 1}, 'level'),
    ],
)
def test_bad_row_of_our_own_form_is_named(row, message):
  with pytest.raises(ConfigError, match=f'^f line 3.*{message}'):
    forms.own_problem(row, 'x', 'f line 3')


@pytest.mark.parametrize(
    'answer, text', [(2, '2'), (2.0, '2'), (-0.5, '-0.5'), ('', ''), (' ', ' ')]
)
def test_a_number_in_our_own_form_is_read_as_text(answer, text):
  row = {'id': 7, 'prompt': 'x', 'answer': answer}
  assert forms.own_problem(row, 's', '') == Problem('7', 's', 'x', text)


def test_a_dotted_name_is_a_field_inside_a_column():
  form = forms.Form(('extra.asked',), 'reward_model.ground_truth')
  columns = {
      'extra': {'asked': 'one?', 'n': None},
      'reward_model': {'ground_truth': 1.0, 'style': 'rule'},
  }
  found = forms.form_problem(form, columns, 'x/0', 'x', 'f line 1')
  assert found == Problem('x/0', 'x', 'one?', '1')
  # A column of that very name comes first.
  columns['reward_model.ground_truth'] = 2
  found = forms.form_problem(form, columns, 'x/0', 'x', 'f line 1')
  assert found.answer == '2'


def test_a_missing_field_inside_a_column_names_those_that_are_there():
  form = forms.Form(('prompt',), 'reward_model.gold')
  columns = {'prompt': 'p', 'reward_model': {'ground_truth': 1}}
  with pytest.raises(
      ConfigError,
      match=r"\['prompt', 'reward_model.ground_truth'\], and misses"
      r" \['reward_model.gold'\]",
  ):
    forms.form_problem(form, columns, 'x/0', 'x', 'f line 1')


def test_rows_of_our_own_form_become_problems():
  assert forms.own_problem(GOOD, 'sums', '') == Problem(
      'a', 'sums', '2+2=', '4'
  )
  row = {
      'id': 'b',
      'source': 'web',
      'prompt': [{'role': 'user', 'content': 'Hé'}],
      'answer': '',
      'meta': {'level': 3},
  }
  assert forms.own_problem(row, 'sums', '') == Problem(
      'b', 'web', (Message('user', 'Hé'),), '', {'level': 3}
  )
  # A column that other rows have is null in a Parquet file.
  row = {**GOOD, 'source': None, 'meta': None}
  assert forms.own_problem(row, 'sums', '') == Problem('a', 'sums', '2+2=', '4')


@pytest.mark.parametrize(
    'name, form, rows',
    [
        ('gsm8k_train.jsonl', 'gsm8k', 7473),
        ('math500.jsonl', 'math', 400),
        ('aime2024.jsonl', 'math', 30),
        ('amc23.jsonl', 'math', 40),
        ('svamp_test.jsonl', 'svamp', 1000),
        ('arithmetic_sequence_train.parquet', 'arithmetic_sequence', 800),
    ],
)
def test_published_file_is_of_its_form(data_dir, name, form, rows):
  path = data_dir / 'datasets' / name
  if not path.is_file():
    pytest.skip(f'no file {path}')
  found = read_rows(path)
  assert len(found) == rows
  problems = [
      forms.form_problem(forms.FORMS[form], row.columns, str(i), name, row.at)
      for i, row in enumerate(found)
  ]
  json.dumps([problem.meta for problem in problems])
  if form == 'gsm8k':
    assert all(float(problem.answer) == int(float(problem.answer))
               for problem in problems)  # fmt: skip
    assert problems[0].prompt.startswith('Natalia sold clips')
    assert problems[0].answer == '72'
  if form == 'arithmetic_sequence':
    counts = [int(p.prompt[0].content.split(',')[-1]) for p in problems]
    assert [len(p.answer.split(',')) if p.answer else 0 for p in problems] == (
        counts
    )
