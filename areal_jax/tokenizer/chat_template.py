"""Chat templates: how the messages of a chat become one text.

A template is Jinja, as Hugging Face folders publish it. It is other people's
code, so it runs in Jinja's immutable sandbox: it can read the messages and
nothing else, and changes nothing. It gets the functions that published
templates expect, but `strftime_now`: a prompt that changes with the date could
not be drawn again after a restart, and templates have a fixed date for where it
is missing.
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any, Mapping, NoReturn, Sequence

import jinja2
from jinja2 import ext, nodes, parser, sandbox

from areal_jax.config import ConfigError, require
from areal_jax.tokenizer.special_tokens import (
    CONFIG,
    read_config,
    token_texts,
)
from areal_jax.types import Message

FILE = 'chat_template.jinja'


class ChatTemplate:
  """Renders messages to the text that the policy goes on from.

  Args:
    source: the Jinja text.
    at: where it comes from, for messages.
    tokens: texts of special tokens by the names that templates know
      (`bos_token`, `eos_token`, ...).
    variables: further values that the template may ask for, such as
      `enable_thinking`.

  Raises:
    ConfigError: the text is no Jinja template.
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
    self._at = at
    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, _Generation],
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

  def render(self, messages: Sequence[Message]) -> str:
    """The text of the messages, up to where the policy's answer begins.

    Raises:
      ConfigError: the template refuses the messages or fails on them; has its
        words.
    """
    plain = [{'role': m.role, 'content': m.content} for m in messages]
    try:
      return self._template.render(
          messages=plain, add_generation_prompt=True, **self._values
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
          f'{self._at} refuses messages of {roles}: {error}'
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
