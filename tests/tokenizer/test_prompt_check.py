"""What templates get wrong in silence, with published tokenizers."""

import pytest

from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.tokenizer.prompt_check import check_prompt
from areal_jax.types import Message
from tests.tokenizer import reference

ASK = (Message('user', 'What is 7 plus 5?'),)
IM_END = 2  # of SmolLM2
TURNS = (
    '{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>'
    '\n{% endfor %}'
)
HEADER = '{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}'


@pytest.fixture
def smollm2(data_dir):
  return reference.opened(data_dir, 'smollm2/tokenizer.json')


def check(opened, source=None, prompt=ASK, **changes):
  tokens = {'bos_token': '<|im_start|>', 'eos_token': '<|im_end|>'}
  chat = opened.chat if source is None else ChatTemplate(source, tokens=tokens)
  settings = dict(
      add_bos=False,
      chat=chat,
      stop_ids=opened.tokenizer.eos_ids,
      stop_strings=(),
  )
  return check_prompt(opened.tokenizer, prompt, **{**settings, **changes})


@pytest.mark.parametrize(
    'name', ['smollm2/tokenizer.json', 'qwen3/tokenizer.json.gz']
)
def test_published_templates_are_sound(data_dir, name):
  assert check(reference.opened(data_dir, name)) == []


def test_sound_templates_of_other_forms_have_no_fault(smollm2):
  assert check(smollm2, TURNS + HEADER) == []
  # As Llama 2 and Mistral have it: an answer follows the question at once.
  inside = (
      "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}"
      '[INST] {{ m.content }} [/INST]{% else %} {{ m.content }}'
      '{{ eos_token }}{% endif %}{% endfor %}'
  )
  assert check(smollm2, inside) == []
  assert check(smollm2, prompt='7+5=') == []


def test_turn_that_ends_with_no_stop_is_told(smollm2):
  (fault,) = check(smollm2, stop_ids=(0,))
  assert "ends an answer with '<|im_end|>\\n', which is no stop" in fault
  assert f'rollout.stop_ids=({IM_END},)' in fault
  assert check(smollm2, stop_ids=(0, IM_END)) == []
  assert check(smollm2, stop_ids=(), stop_strings=('<|im_end|>',)) == []


def test_answer_without_a_header_is_told(smollm2):
  (fault,) = check(smollm2, TURNS)
  assert 'writes no header for the answer' in fault
  assert "'<|im_start|>assistant\\n' stands before the answer" in fault


def test_special_token_that_stands_twice_is_told(smollm2):
  (fault,) = check(smollm2, '{{ bos_token }}' + TURNS + HEADER, prompt=ASK)[:1]
  assert "'<|im_start|>' stands twice in a row in the prompt" in fault
  # The text brings the token that is put in front of texts as well.
  (fault,) = check(smollm2, prompt='<|im_start|>7+5=', add_bos=True)
  assert "'<|im_start|>' stands twice in a row in the prompt" in fault
  # Twice at the end of an answer.
  twice = TURNS.replace('<|im_end|>', '<|im_end|><|im_end|>') + HEADER
  assert "'<|im_end|>' stands twice" in check(smollm2, twice)[0]


def test_chat_without_the_beginning_of_its_tokenizer_is_told(smollm2):
  plain = '{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}'
  (fault,) = check(smollm2, plain)
  assert "never writes '<|im_start|>'" in fault


def test_name_that_is_printed_without_a_value_is_told(smollm2):
  source = '<|im_start|>{{ date_string }}<|im_end|>' + TURNS + HEADER
  (fault,) = check(smollm2, source)
  assert "prints 'date_string', which has no value" in fault
  guarded = '{% if date_string %}{{ date_string }}{% endif %}'
  guarded += '{{ date_string is defined and date_string or "" }}'
  assert check(smollm2, guarded + TURNS + HEADER) == []


def test_full_turn_that_fails_or_lacks_the_answer_is_told(smollm2):
  refuses = (
      "{% if messages[-1].role == 'assistant' %}"
      "{{ raise_exception('no answers here') }}{% endif %}"
  )
  (fault,) = check(smollm2, refuses + TURNS + HEADER)
  assert 'could not be seen' in fault and 'no answers here' in fault
  forgets = TURNS.replace('messages', 'messages[:1]') + HEADER
  (fault,) = check(smollm2, forgets)
  assert 'leaves the answer out' in fault
