"""Chat templates: how the messages of a chat become one text.

A template is Jinja, as Hugging Face folders publish it. It is other people's
code, so it runs in Jinja's immutable sandbox: it can read the messages and
nothing else, and changes nothing. It gets the functions that published
templates expect, but `strftime_now` only where `variables` give it a fixed
date: a prompt that changes with the date could not be drawn again after a
restart, and most templates have a date of their own for where it is missing.
"""

from __future__ import annotations

import datetime
import json
import os
import pathlib
from typing import Any, Callable, Mapping, NoReturn, Sequence

import jinja2
from jinja2 import ext, nodes, parser, sandbox, utils

from areal_jax.config import ConfigError, require
from areal_jax.tokenizer.special_tokens import (
    CONFIG,
    read_config,
    token_texts,
)
from areal_jax.types import Message

FILE = 'chat_template.jinja'
_NOW = 'strftime_now'


class ChatTemplate:
  """Renders messages to the text that the policy goes on from.

  Args:
    source: the Jinja text.
    at: where it comes from, for messages.
    tokens: texts of special tokens by the names that templates know
      (`bos_token`, `eos_token`, ...).
    variables: further values that the template may ask for, such as
      `enable_thinking`. A date for 'strftime_now', such as '2024-07-26', makes
      it the function of that name, which always tells this date.

  Attributes:
    source: the Jinja text.
    printed: names that have been printed without having a value.

  Raises:
    ConfigError: the text is no Jinja template, or a date is none.
  """

  def __init__(
      self,
      source: str,
      at: str = 'chat template',
      *,
      tokens: Mapping[str, str] | None = None,
      variables: Mapping[str, Any] | None = None,
  ):
    self.source = source
    self.printed: set[str] = set()
    self._at = at
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, _Generation],
        undefined=_noted_in(self.printed),
    )
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = _refuse
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateSyntaxError as error:
      raise ConfigError(
          f'{at} line {error.lineno} is no Jinja: {error.message}'
      ) from error
    self._values = {**(tokens or {}), **(variables or {})}
    date = self._values.get(_NOW)
    if date is not None:
      self._values[_NOW] = _fixed_date(date)

  def render(self, messages: Sequence[Message], *, header: bool = True) -> str:
    """The text of the messages, up to where the policy's answer begins.

    Args:
      messages: of the chat.
      header: whether what stands before an answer is written behind them.

    Raises:
      ConfigError: the template refuses the messages or fails on them; has its
        words.
    """
    plain = [{'role': m.role, 'content': m.content} for m in messages]
    try:
      return self._template.render(
          messages=plain, add_generation_prompt=header, **self._values
      )
    # What templates, which are programs, raise beside Jinja's own.
    except (
        jinja2.TemplateError,
        ArithmeticError,
        AttributeError,
        LookupError,
        TypeError,
        ValueError,
    ) as error:
      roles = [message.role for message in messages]
      raise ConfigError(
          f'{self._at} refuses messages of {roles}: {error}{_remedy(error)}'
      ) from error


def read_chat_template(
    folder: str | os.PathLike,
    *,
    override: str = '',
    variables: Mapping[str, Any] | None = None,
) -> ChatTemplate | None:
  """The chat template of a tokenizer's folder; None if it has none.

  `chat_template.jinja` comes before the field of `tokenizer_config.json`, as in
  transformers; of several templates in there, 'default' is taken.

  Args:
    folder: where the two files may lie.
    override: a Jinja text, instead of what the folder has.
    variables: see `ChatTemplate`.

  Raises:
    ConfigError: a file that cannot be read, or no Jinja in it.
  """
  folder = pathlib.Path(folder)
  config = read_config(folder / CONFIG)
  tokens = token_texts(folder)
  at, source = str(folder / CONFIG), config.get('chat_template')
  if override:
    at, source = 'chat template', override
  elif (folder / FILE).is_file():
    at = str(folder / FILE)
    try:
      source = (folder / FILE).read_text('utf-8')
    except UnicodeDecodeError as error:
      raise ConfigError(f'{at} is not UTF-8: {error}') from error
  elif isinstance(source, list):
    named = {t.get('name'): t.get('template') for t in source if _is_dict(t)}
    source = named.get('default')
    require(source is not None, f'{at}: names of chat_template', [*named],
            "'default' among them")  # fmt: skip
  if source is None:
    return None
  require(isinstance(source, str), f'{at}: chat_template', source, 'a text')
  return ChatTemplate(source, at, tokens=tokens, variables=variables)


def _is_dict(value: Any) -> bool:
  return isinstance(value, dict)


def _noted_in(names: set[str]) -> type[jinja2.Undefined]:
  """Stands for a missing value: prints nothing and notes its name."""

  class Noted(jinja2.Undefined):

    def __str__(self) -> str:
      if self._undefined_obj is utils.missing:  # a variable, not a field
        names.add(str(self._undefined_name))
      return super().__str__()

  return Noted


def _fixed_date(value: Any) -> Callable[[str], str]:
  """`strftime_now` of templates, which always tells the same date."""
  try:
    date = datetime.datetime.fromisoformat(value)
  except (TypeError, ValueError) as error:
    raise ConfigError(
        f"chat_variables['{_NOW}'] is {value!r}, wanted a date such as"
        " '2024-07-26'"
    ) from error
  return date.strftime


def _remedy(error: Exception) -> str:
  """Says what to do about a value that a template needs."""
  if not isinstance(error, jinja2.UndefinedError):
    return ''
  if _NOW in str(error):
    return (
        f"; set tokenizer.chat_variables={{'{_NOW}': '2024-07-26'}}, a date"
        ' that stays the same, so that prompts can be drawn again after a'
        ' restart'
    )
  return '; set it in tokenizer.chat_variables'


def _refuse(message: str) -> NoReturn:
  """`raise_exception` of templates."""
  raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
  """`tojson` of templates; Jinja's own escapes what HTML would misread."""
  return json.dumps(
      value,
      ensure_ascii=ensure_ascii,
      indent=indent,
      separators=separators,
      sort_keys=sort_keys,
  )


class _Generation(ext.Extension):
  """`{% generation %}`, which marks answers for training: read as nothing."""

  tags = {'generation'}

  def parse(self, stream: parser.Parser) -> list[nodes.Node]:
    next(stream.stream)
    return stream.parse_statements(['name:endgeneration'], drop_needle=True)
