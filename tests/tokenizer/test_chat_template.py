"""Chat templates: published ones, and what they may and may not do."""

import json

import pytest

from areal_jax.config import ConfigError
from areal_jax.tokenizer.chat_template import ChatTemplate, read_chat_template
from areal_jax.types import Message

ASK = (Message('user', 'What is 7 plus 5?'),)


def test_smollm2_renders_its_published_prompt(data_dir):
  folder = data_dir / 'tokenizers/smollm2'
  reference = data_dir / 'models/smollm2_135m_instruct/reference.json'
  if not folder.is_dir() or not reference.is_file():
    pytest.skip(f'no {folder} or {reference}')
  wanted = json.loads(reference.read_text())['chat']['prompt_text']
  assert read_chat_template(folder).render(ASK) == wanted


@pytest.mark.parametrize(
    'variables, end',
    [
        ({}, '<|im_start|>assistant\n'),
        ({'enable_thinking': True}, '<|im_start|>assistant\n'),
        (
            {'enable_thinking': False},
            '<|im_start|>assistant\n<think>\n\n</think>\n\n',
        ),
    ],
)
def test_qwen3_takes_its_variables(data_dir, variables, end):
  folder = data_dir / 'tokenizers/qwen3'
  if not folder.is_dir():
    pytest.skip(f'no folder {folder}')
  chat = read_chat_template(folder, variables=variables)
  messages = (Message('system', 'Think.'), *ASK)
  assert chat.render(messages) == (
      '<|im_start|>system\nThink.<|im_end|>\n'
      f'<|im_start|>user\n{ASK[0].content}<|im_end|>\n{end}'
  )


def test_template_sees_messages_and_special_tokens():
  source = (
      '{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m["content"] }}'
      '{% endfor %}{% if add_generation_prompt %}:{% endif %}'
  )
  chat = ChatTemplate(source, tokens={'bos_token': '<s>'})
  assert chat.render((*ASK, Message('tool', '{"a": "<b>"}'))) == (
      '<s>[user]What is 7 plus 5?[tool]{"a": "<b>"}:'
  )


@pytest.mark.parametrize(
    'source, text',
    [
        (
            '{% if true %}\n  a\n{% endif %}\nb',
            '  a\nb',
        ),  # blocks leave no line
        ('{{ {"é": "<x>"} | tojson }}', '{"é": "<x>"}'),  # nothing is escaped
        ('{{ [1] | tojson(indent=2) }}', '[\n  1\n]'),
        ('{% for i in [1, 2] %}{% break %}{% endfor %}ok', 'ok'),
        ('a{% generation %}b{% endgeneration %}c', 'abc'),
        (
            '{% if strftime_now is defined %}now{% else %}then{% endif %}',
            'then',
        ),
    ],
)
def test_templates_are_read_as_published_ones_expect(source, text):
  assert ChatTemplate(source).render(ASK) == text


@pytest.mark.parametrize(
    'source, message',
    [
        ("{{ raise_exception('no system') }}", r"of \['user'\]: no system"),
        ('{{ nothing.at.all }}', 'undefined'),
        ('{{ 1 + "a" }}', 'unsupported operand'),
        ('{{ 1 // 0 }}', 'zero'),
        ('{{ messages.append(1) }}', 'unsafe|not safely'),
        ('{{ messages.__class__.__mro__ }}', 'unsafe'),
        ('{{ range(10**9) | list }}', 'Range'),
    ],
)
def test_template_that_fails_is_named(source, message):
  chat = ChatTemplate(source, 'this.jinja')
  with pytest.raises(ConfigError, match=f'this.jinja refuses.*{message}'):
    chat.render(ASK)


def test_text_that_is_no_template_is_named_by_line():
  with pytest.raises(ConfigError, match='this.jinja line 2 is no Jinja'):
    ChatTemplate('a\n{% if %}', 'this.jinja')


def write(folder, config=None, template=None):
  if config is not None:
    (folder / 'tokenizer_config.json').write_text(json.dumps(config))
  if template is not None:
    (folder / 'chat_template.jinja').write_text(template)
  return folder


@pytest.mark.parametrize(
    'config, template, override, text',
    [
        ({'chat_template': 'field'}, None, '', 'field'),
        ({'chat_template': 'field'}, 'file', '', 'file'),
        ({'chat_template': 'field'}, 'file', 'given', 'given'),
        (None, 'file', '', 'file'),
        (
            {
                'chat_template': [
                    {'name': 'tool_use', 'template': 'tools'},
                    {'name': 'default', 'template': 'plain'},
                ]
            },
            None,
            '',
            'plain',
        ),
        (
            {'bos_token': '<s>', 'eos_token': {'content': '</s>'}},
            '{{ bos_token }}x{{ eos_token }}',
            '',
            '<s>x</s>',
        ),
    ],
)
def test_folder_has_one_template(tmp_path, config, template, override, text):
  folder = write(tmp_path, config, template)
  assert read_chat_template(folder, override=override).render(ASK) == text


@pytest.mark.parametrize('config', [None, {}, {'chat_template': None}])
def test_folder_may_have_none(tmp_path, config):
  assert read_chat_template(write(tmp_path, config)) is None


@pytest.mark.parametrize(
    'content, message',
    [
        ('{', 'tokenizer_config.json is not JSON'),
        ('[]', r'tokenizer_config.json is \[\], wanted a JSON object'),
        ('{"chat_template": 3}', 'chat_template is 3, wanted a text'),
        ('{"chat_template": [{"name": "x"}]}', r"is \['x'\], wanted 'default'"),
    ],
)
def test_file_that_holds_something_else_is_named(tmp_path, content, message):
  (tmp_path / 'tokenizer_config.json').write_text(content)
  with pytest.raises(ConfigError, match=message):
    read_chat_template(tmp_path)


def test_date_of_a_template_is_the_one_that_is_set():
  source = "{{ strftime_now('%d %b %Y') }} {{ messages[0].content }}"
  with pytest.raises(
      ConfigError,
      match="'strftime_now' is undefined; set .*2024-07-26",
  ):
    ChatTemplate(source).render(ASK)
  dated = ChatTemplate(source, variables={'strftime_now': '2024-07-26'})
  assert dated.render(ASK).startswith('26 Jul 2024 ')
  with pytest.raises(ConfigError, match="is 'today', wanted a date such as"):
    ChatTemplate(source, variables={'strftime_now': 'today'})


def test_function_that_is_missing_is_named_with_the_setting():
  with pytest.raises(
      ConfigError, match="'tool_text' is undefined; set it in tokenizer.chat_va"
  ):
    ChatTemplate('{{ tool_text(1) }}').render(ASK)


def test_header_of_the_answer_can_be_left_out():
  source = '{{ messages[0].content }}{{ add_generation_prompt }}'
  assert ChatTemplate(source).render(ASK).endswith('True')
  assert ChatTemplate(source).render(ASK, header=False).endswith('False')
