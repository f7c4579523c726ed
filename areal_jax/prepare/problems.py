"""The problems of a run, with the token ids of their prompts."""

from __future__ import annotations

import dataclasses
from typing import Any, Mapping, Sequence

from areal_jax.config import ConfigError, named, require
from areal_jax.data import problems as problems_lib
from areal_jax.data.sources import (
    Sources,
    SourceSettings,
    read_source,
    read_sources,
)
from areal_jax.data.stream import Part
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer.base import Tokenizer, render_prompt
from areal_jax.tokenizer.files import Opened
from areal_jax.tokenizer.round_trip import round_trip
from areal_jax.types import Message, Problem


def load_task_problems(settings: Experiment) -> tuple[Sources, Sources]:
  """The problems to train on and the held-out ones."""
  task = settings.task
  found = []
  for split, count, file, sources in (
      ('train', task.train_problems, task.train_file, task.train_sources),
      ('eval', task.eval_problems, task.eval_file, task.eval_sources),
  ):
    if sources:
      found.append(read_sources(sources, f'config.task.{split}_sources'))
    elif file:
      with named(f'config.task.{split}_file'):
        found.append(read_source(SourceSettings(file)))
    else:
      with named('config.task.problems'):
        problems = problems_lib.load_problems(
            task.problems, split=split, count=count, seed=task.seed
        )
      part = Part(problems[0].source, len(problems))
      found.append(Sources(tuple(problems), (part,)))
  train, evaluation = found
  both = {p.id for p in train.problems} & {p.id for p in evaluation.problems}
  require(
      not both,
      f'config.task.eval_{"sources" if task.eval_sources else "file"}',
      sorted(both)[:3],
      'no problem id that is trained on as well',
  )
  check_numbers(settings, train, evaluation, {})
  return train, evaluation


def check_numbers(
    settings: Experiment,
    train: Sources,
    evaluation: Sources,
    left_out: Mapping[str, int],
) -> None:
  """Refuses fewer problems than a batch, or none to evaluate on."""
  less = ', '.join(f'{n} {name}' for name, n in left_out.items() if n)
  at = f'config.task (less {less})' if less else 'config.task'
  problems_lib.require_batches(train.problems, settings.rollout.batch_size, at)
  held_out = len(evaluation.problems)
  require(held_out >= 1, f'the number of held-out problems in {at}', held_out,
          'at least 1')  # fmt: skip


def with_prompt(sources: Sources, prompts: Mapping[str, Any]) -> Sources:
  """The problems whose prompts are there, and the parts that they make up."""
  problems, parts = [], []
  start = 0
  for part in sources.parts:
    of_part = sources.problems[start : start + part.size]
    start += part.size
    kept = [problem for problem in of_part if problem.id in prompts]
    problems += kept
    if kept:
      parts.append(dataclasses.replace(part, size=len(kept)))
  return Sources(tuple(problems), tuple(parts), sources.bad_rows)


def render_prompts(
    settings: Experiment,
    opened: Opened,
    sources: Sources,
    prompts: dict[str, tuple[int, ...]],
    changed: list[str],
) -> int:
  """Adds the ids of each prompt that is no longer than the engine takes.

  Args:
    settings: of the run.
    opened: the tokenizer.
    sources: their problems.
    prompts: the ids are added to these, by problem id.
    changed: what the tokenizer does to prompts by its own rules is added.

  Returns:
    The number of the others.
  """
  limit = settings.rollout.engine.max_prompt_length
  too_long = 0
  for problem in sources.problems:
    with named(f'the prompt of problem {problem.id!r}'):
      ids = render_prompt(
          opened.tokenizer,
          problem.prompt,
          add_bos=settings.tokenizer.add_bos,
          chat=opened.chat,
      )
      change = _prompt_change(settings, opened, problem.prompt, ids)
    if len(ids) <= limit:
      prompts[problem.id] = tuple(ids)
      changed += [f'{problem.id!r}: {change}'] if change else []
      continue
    too_long += 1
    require(
        settings.task.too_long == 'drop',
        f'the prompt of problem {problem.id!r}',
        f'{len(ids)} tokens',
        f'at most config.rollout.engine.max_prompt_length={limit}, or'
        " config.task.too_long='drop'",
    )
  return too_long


def _prompt_change(
    settings: Experiment,
    opened: Opened,
    prompt: str | tuple[Message, ...],
    ids: Sequence[int],
) -> str:
  """Describes what the tokenizer changes in a prompt; see `round_trip`.

  Raises:
    ConfigError: it loses something.
  """
  if not isinstance(prompt, str):
    return round_trip(opened.tokenizer, opened.chat.render(prompt), ids)
  front = 1 if settings.tokenizer.add_bos else 0
  return round_trip(opened.tokenizer, prompt, ids[front:])


def lost_answers(
    tokenizer: Tokenizer, problems: Sequence[Problem]
) -> list[str]:
  """Describes what the tokenizer loses in right answers, a line each."""
  lost = []
  for problem in problems:
    try:
      round_trip(tokenizer, problem.answer, tokenizer.encode(problem.answer))
    except ConfigError as error:
      lost.append(f'{problem.id!r}: {error}')
  return lost
