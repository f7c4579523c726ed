"""The tokenizer of a run.

It is the one that the settings name, or the policy's own, or a new one that is
trained on the texts of the task.
"""

from __future__ import annotations

import inspect
import pathlib
import tempfile
from typing import Any, Callable, NoReturn, Sequence

from areal_jax.config import ConfigError, named
from areal_jax.data.sources import Sources
from areal_jax.sandbox.call import load_function
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.tokenizer.files import Opened, holds_tokenizer, open_tokenizer
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from areal_jax.train.pretrained import Pretrained


def named_tokenizer(settings: Experiment) -> Opened | None:
  """The tokenizer at `tokenizer.path`; None if that is empty."""
  path = settings.tokenizer.path
  return opened_tokenizer(settings, path) if path else None


def unnamed_tokenizer(
    settings: Experiment,
    source: Pretrained | None,
    texts: Callable[[], list[str]],
) -> Opened:
  """The policy's own tokenizer, or a new one.

  Args:
    settings: of the run.
    source: what lies at `policy.path`.
    texts: returns those of the task, should a tokenizer be trained on them.
  """
  wanted = settings.tokenizer
  if source is not None:
    own = policy_tokenizer(settings, source)
    if own is not None:
      return opened_tokenizer(settings, own)
    if settings.policy.load == 'all':
      refuse_without_tokenizer(settings, source)
  task = settings.task
  found = call_named(task.texts, 'config.task.texts') if task.texts else texts()
  with tempfile.TemporaryDirectory() as folder, named('config.tokenizer'):
    path = train_sentencepiece(
        found,
        pathlib.Path(folder) / 'tokenizer.model',
        kind=wanted.kind,
        vocab_size=wanted.vocab_size or None,
    )
    return open_tokenizer(path, **_chat_settings(settings))


def opened_tokenizer(settings: Experiment, path: str) -> Opened:
  """Opens the tokenizer at a path, with the chat settings."""
  with named('config.tokenizer.path'):
    return open_tokenizer(path, **_chat_settings(settings))


def _chat_settings(settings: Experiment) -> dict[str, Any]:
  wanted = settings.tokenizer
  return dict(template=wanted.chat_template, variables=wanted.chat_variables)


def policy_tokenizer(settings: Experiment, source: Pretrained) -> str | None:
  """The folder with the tokenizer of a policy; None if none lies with it."""
  folders = (source.place, settings.policy.path)  # the latter may be a run's
  return next((f for f in folders if holds_tokenizer(f)), None)


def refuse_without_tokenizer(
    settings: Experiment, source: Pretrained
) -> NoReturn:
  """Says what is missing: in a new tokenizer a policy's ids mean nothing."""
  source.shape()  # a policy that cannot be read is the first thing to say
  raise ConfigError(
      "config.tokenizer.path is '', and no tokenizer.json or tokenizer.model"
      f' lies with config.policy.path={settings.policy.path!r}, wanted the path'
      ' of the tokenizer that this policy was trained with'
  )


def task_texts(
    settings: Experiment,
    train: Sources,
    evaluation: Sources,
    pairs: Sequence[tuple[str, str]],
) -> list[str]:
  """Prompts and answers of the task, to train a tokenizer on."""
  template = settings.tokenizer.chat_template
  chat = ChatTemplate(template) if template else None
  texts = [text for pair in pairs for text in pair]
  for problem in (*train.problems, *evaluation.problems):
    prompt = problem.prompt
    if isinstance(prompt, str):
      texts.append(prompt)
    elif chat is None:
      texts += [message.content for message in prompt]
    else:
      texts.append(chat.render(prompt))
    texts.append(problem.answer)
  return texts


def call_named(spec: str, at: str, *arguments: Any) -> Any:
  """Calls a function of the task; refuses one with another signature."""
  function = load_function(spec, at)
  try:
    inspect.signature(function).bind(*arguments)
  except (TypeError, ValueError) as error:  # ValueError: it has no signature
    raise ConfigError(
        f'{at} is {spec!r}, which cannot be called with {arguments}: {error}'
    ) from error
  return function(*arguments)
