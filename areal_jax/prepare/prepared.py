"""Opens what the settings of a run name, and checks it.

Everything here is cheap: the task, the tokenizer, the reward, the policy's
config file. So a mistake is one clear line before any device works and before
anything is written.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import os
import pathlib
from typing import Any, Mapping

from areal_jax import config as config_lib
from areal_jax.cluster.metric_sink import load_sink
from areal_jax.config import Mistakes, named, require
from areal_jax.data.stream import Part, content_digest
from areal_jax.models.config import ModelConfig
from areal_jax.prepare.demonstrations import (
    encode_demonstrations,
    load_demonstrations,
)
from areal_jax.prepare.problems import (
    check_numbers,
    load_task_problems,
    lost_answers,
    render_prompts,
    with_prompt,
)
from areal_jax.prepare.sampling import evaluation_sampling, sampling_params
from areal_jax.prepare.shapes import (
    check_division,
    checked_shape,
    open_policy,
    open_reference,
    own_shape,
    policy_shape,
    shape_at,
)
from areal_jax.prepare.tokenizers import (
    named_tokenizer,
    opened_tokenizer,
    policy_tokenizer,
    refuse_without_tokenizer,
    task_texts,
    unnamed_tokenizer,
)
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer.base import Tokenizer, render_prompt
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.tokenizer.prompt_check import check_prompt
from areal_jax.train.pretrained import Pretrained
from areal_jax.types import Problem, SamplingParams


@dataclasses.dataclass(frozen=True)
class Prepared:
  """Everything that a run needs besides devices, checked.

  Attributes:
    settings: the resolved tree.
    model: the policy's shape, vocabulary and padding filled in.
    source: what lies at `policy.path`, None if it is empty.
    reference: shape of the policy at `train.reference_path` and what lies
      there; None if it is empty.
    tokenizer: reads and writes text.
    chat: renders the messages of a chat; None if there is no template.
    tokenizer_files: the tokenizer's files, by name in the folder of the run.
    train: problems to train on.
    parts: which of them are of which source.
    evaluation: held-out problems.
    left_out: number of problems left out, by split and reason.
    prompts: token ids of every problem's prompt, by problem id.
    demonstrations: (prompt ids, answer ids) of the warm start.
    sampling: how training answers are sampled.
    evaluation_sampling: how evaluation answers are.
    changed_prompts: what the tokenizer's own rules change in prompts, such as
      composing letters, a line each.
    lost_answers: right answers that the tokenizer cannot write, a line each.
    prompt_faults: what looks wrong about one prompt and a full turn, a line
      each; see `check_prompt`.
  """

  settings: Experiment
  model: ModelConfig
  source: Pretrained | None
  reference: tuple[ModelConfig, Pretrained] | None
  tokenizer: Tokenizer
  chat: ChatTemplate | None
  tokenizer_files: Mapping[str, bytes]
  train: tuple[Problem, ...]
  parts: tuple[Part, ...]
  evaluation: tuple[Problem, ...]
  left_out: Mapping[str, int]
  prompts: dict[str, tuple[int, ...]]
  demonstrations: tuple[tuple[list[int], list[int]], ...]
  sampling: SamplingParams
  evaluation_sampling: SamplingParams
  changed_prompts: tuple[str, ...]
  lost_answers: tuple[str, ...]
  prompt_faults: tuple[str, ...]

  @functools.cached_property
  def _known(self) -> dict[str, Problem]:
    return {p.id: p for p in (*self.train, *self.evaluation)}

  def prompt_ids(self, problem: Problem) -> tuple[int, ...]:
    """Token ids of a problem's prompt.

    One that a checkpoint brought may have the id of another one by now, and is
    rendered from what it says itself.

    Args:
      problem: as it was drawn.
    """
    known = self._known.get(problem.id)
    if known is not None and known.prompt == problem.prompt:
      return self.prompts[problem.id]
    add_bos = self.settings.tokenizer.add_bos
    return tuple(
        render_prompt(
            self.tokenizer, problem.prompt, add_bos=add_bos, chat=self.chat
        )
    )

  def data_digests(self) -> dict[str, str]:
    """Digests of what the run asks and scores by: see `resume.place_draws`.

    Prompts as token ids are what chat template, its variables, system text and
    tokenizer make of the problems.
    """
    found = {}
    for split, problems in (
        ('train', self.train),
        ('evaluation', self.evaluation),
    ):
      ids = repr([self.prompts[p.id] for p in problems]).encode()
      found[f'{split}_problems'] = content_digest(problems)
      found[f'{split}_prompts'] = hashlib.blake2b(ids).hexdigest()[:32]
    return found

  @property
  def cautions(self) -> list[str]:
    """Warnings about valid but suspicious data and tokenizers."""
    return [
        f'{what.format(len(found))}, such as that of {found[0]}'
        for what, found in (
            ('the tokenizer changes {} prompts', self.changed_prompts),
            ('the policy cannot write {} right answers', self.lost_answers),
        )
        if found
    ] + [*self.prompt_faults]

  @property
  def max_running(self) -> int:
    """Groups whose answers are under way at once; see `Controller`."""
    rollout = self.settings.rollout
    if rollout.max_running:
      return rollout.max_running
    replicas = self.settings.mesh.rollout.replicas
    slots = rollout.engine.slots * replicas
    # Answers end between dispatches, several at a time, and the next ones are
    # asked for by another thread: with one group in reserve 0.82 of the slots
    # were busy, with half the slots' worth 0.92 (benchmarks/async_vs_sync.py).
    filled = slots / rollout.group_size
    return max(math.ceil(filled) + replicas, math.ceil(1.5 * filled))


def prepare(experiment: Experiment) -> Prepared:
  """Resolves the settings and opens what they name.

  Raises:
    ConfigError: anything in them that cannot work.
  """
  settings = config_lib.resolve(experiment)
  mistakes = Mistakes()
  with mistakes:
    _check_output(settings)
  with mistakes:
    settings.reward.check('config.reward')
  with mistakes:
    settings.rollout.check('config.rollout')
  with mistakes:
    settings.evaluation.load_vote('config.evaluation')
  with mistakes:
    load_sink(settings.metrics_sink, 'config.metrics_sink')
  with mistakes:
    train, evaluation = load_task_problems(settings)
  with mistakes:
    pairs = load_demonstrations(settings)
  with mistakes:
    opened = named_tokenizer(settings)
  with mistakes:
    source = open_policy(settings)
  mistakes.tell()
  opened = opened or unnamed_tokenizer(
      settings, source, lambda: task_texts(settings, train, evaluation, pairs)
  )
  tokenizer = opened.tokenizer
  model = policy_shape(settings, source, tokenizer)
  prompts: dict[str, tuple[int, ...]] = {}
  left_out = {}
  changed: list[str] = []
  for split, sources in (('train', train), ('eval', evaluation)):
    left_out[f'{split}_bad_rows'] = len(sources.bad_rows)
    left_out[f'{split}_too_long'] = render_prompts(
        settings, opened, sources, prompts, changed
    )
  train, evaluation = (with_prompt(s, prompts) for s in (train, evaluation))
  check_numbers(settings, train, evaluation, left_out)
  sampling = sampling_params(
      settings, tokenizer, temperature=settings.rollout.temperature
  )
  return Prepared(
      settings=settings,
      model=model,
      source=source,
      reference=open_reference(settings, tokenizer),
      tokenizer=tokenizer,
      chat=opened.chat,
      tokenizer_files=opened.files,
      train=train.problems,
      parts=train.parts,
      evaluation=evaluation.problems,
      left_out=left_out,
      prompts=prompts,
      demonstrations=encode_demonstrations(settings, tokenizer, pairs),
      sampling=sampling,
      evaluation_sampling=evaluation_sampling(settings, tokenizer),
      changed_prompts=tuple(changed),
      lost_answers=tuple(lost_answers(tokenizer, train.problems)),
      prompt_faults=tuple(
          check_prompt(
              tokenizer,
              train.problems[0].prompt,
              add_bos=settings.tokenizer.add_bos,
              chat=opened.chat,
              stop_ids=sampling.stop_ids,
              stop_strings=sampling.stop_strings,
          )
      ),
  )


@dataclasses.dataclass(frozen=True)
class PreparedPolicy:
  """Everything that a trained policy needs to answer, checked; without a task.

  Attributes:
    settings: the resolved tree.
    model: the policy's shape.
    source: what lies at `policy.path`.
    tokenizer: reads and writes text.
    sampling: how its answers are sampled.
  """

  settings: Experiment
  model: ModelConfig
  source: Pretrained
  tokenizer: Tokenizer
  sampling: SamplingParams


def prepare_policy(experiment: Experiment, **choice: Any) -> PreparedPolicy:
  """Resolves the settings and opens the policy that they name.

  Args:
    experiment: the settings.
    **choice: how tokens are chosen, as in `SamplingParams`.

  Raises:
    ConfigError: anything in them that cannot work.
  """
  settings = config_lib.resolve(experiment)
  require(bool(settings.policy.path), 'config.policy.path',
          settings.policy.path, 'the folder of a trained policy')  # fmt: skip
  source = open_policy(settings)
  # Nothing is asked yet, so there is no text to train a tokenizer on.
  at = settings.tokenizer.path or policy_tokenizer(settings, source)
  if at is None:
    refuse_without_tokenizer(settings, source)
  tokenizer = opened_tokenizer(settings, at).tokenizer
  with named('config.tokenizer'):  # one prompt, to see that there can be any
    render_prompt(tokenizer, '0', add_bos=settings.tokenizer.add_bos)
  return PreparedPolicy(
      settings=settings,
      model=policy_shape(settings, source, tokenizer),
      source=source,
      tokenizer=tokenizer,
      sampling=sampling_params(settings, tokenizer, **choice),
  )


@dataclasses.dataclass(frozen=True)
class PreparedShapes:
  """The shapes of a run's programs, checked; no file of the run is needed.

  Attributes:
    settings: the resolved tree.
    model: the policy's shape.
    reference: that of the policy at `train.reference_path`; None if it is
      empty.
  """

  settings: Experiment
  model: ModelConfig
  reference: ModelConfig | None


def prepare_shapes(experiment: Experiment) -> PreparedShapes:
  """Resolves the settings and finds the shapes of the policies they name.

  Where nothing lies at a path, its last part may name a published shape, see
  `models/shapes.py`; the vocabulary is then the policy's own. A policy from
  random weights has the vocabulary of the tokenizer.

  Raises:
    ConfigError: anything in them that cannot work.
  """
  settings = config_lib.resolve(experiment)
  path, taken = settings.policy.path, settings.policy.load == 'all'
  if path and taken:
    model = shape_at(settings, 'policy.path', path)
  else:
    texts = lambda: task_texts(
        settings, *load_task_problems(settings), load_demonstrations(settings)
    )
    opened = named_tokenizer(settings) or unnamed_tokenizer(
        settings, open_policy(settings), texts
    )
    model = own_shape(settings, opened.tokenizer)
  model = checked_shape(settings, model)
  path, reference = settings.train.reference_path, None
  if path:
    at = 'train.reference_path'
    reference = shape_at(settings, at, path)
    check_division(reference, settings)
    reference = config_lib.resolve(reference, f'config.{at}')
  return PreparedShapes(settings, model, reference)


def _check_output(settings: Experiment) -> None:
  """Refuses a folder that the run could not be written into, making none."""
  folder = pathlib.Path(settings.output).absolute()
  while not os.path.lexists(folder):
    folder = folder.parent
  require(
      folder.is_dir() and os.access(folder, os.W_OK | os.X_OK),
      'config.output',
      settings.output,
      f'a folder that can be written, which {str(folder)!r} is not',
  )
