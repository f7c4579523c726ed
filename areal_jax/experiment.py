"""The tree of settings of a run, and the checks that span rooms.

An experiment file returns an `Experiment` from `get_config()`; flags change its
fields; `prepare` resolves it and opens everything that is cheap to open (task,
tokenizer, reward, the policy's config file), so that a mistake is one clear
line before any device does any work and before anything is written.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import os
import pathlib
import tempfile
from typing import Any, Literal

from areal_jax import config as config_lib
from areal_jax.buffer import StalenessPolicy
from areal_jax.config import ConfigError, named, require
from areal_jax.data import problems as problems_lib
from areal_jax.mesh.slices import MeshSettings
from areal_jax.models import hf
from areal_jax.models.config import ModelConfig, config_from_hf, config_to_hf
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.engine import EngineSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.rollout.loop import SwapMode
from areal_jax.sandbox.call import load_function
from areal_jax.tokenizer.base import Tokenizer, render_prompt
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from areal_jax.train.supervised import WarmStartSettings
from areal_jax.train.trainer import TrainSettings
from areal_jax.types import Problem, SamplingParams


@dataclasses.dataclass
class TaskSettings:
  """Where problems come from.

  Attributes:
    problems: 'package.module:function', called with split ('train' or 'eval'),
      count and seed.
    train_problems: problems to train on.
    eval_problems: held-out problems.
    train_file: JSON lines with the problems to train on, instead.
    eval_file: JSON lines with the held-out problems, instead.
    texts: function that returns texts to train a tokenizer on.
    demonstrations: function of (count, seed) that returns (prompt, answer)
      pairs for the warm start.
    demonstration_count: how many of them.
    seed: of the task itself; the run's seed does not change the problems.
  """

  problems: str = 'areal_jax.data.running_totals:problems'
  train_problems: int = 1024
  eval_problems: int = 256
  train_file: str = ''
  eval_file: str = ''
  texts: str = 'areal_jax.data.running_totals:texts'
  demonstrations: str = 'areal_jax.data.running_totals:habitual'
  demonstration_count: int = 20_000
  seed: int = 0

  def validate(self, at: str) -> None:
    for name in ('train_problems', 'eval_problems', 'demonstration_count'):
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')


@dataclasses.dataclass
class TokenizerSettings:
  """A sentencepiece model: one on disk, or one trained on the task's texts.

  Attributes:
    path: a `.model` file; empty to train one when the run starts.
    kind: of the one that is trained.
    vocab_size: of the one that is trained; 0 for what 'char' needs.
    add_bos: whether every prompt begins with the BOS id.
  """

  path: str = ''
  kind: Literal['char', 'bpe', 'unigram'] = 'char'
  vocab_size: int = 0
  add_bos: bool = True

  def validate(self, at: str) -> None:
    require(self.vocab_size >= 0, f'{at}.vocab_size', self.vocab_size,
            'at least 0')  # fmt: skip


@dataclasses.dataclass
class PolicySettings:
  """The policy to start from.

  Attributes:
    path: a Hugging Face folder; empty to start from random weights.
    model: its shape where `path` is empty. The vocabulary comes from the
      tokenizer; compute dtype, layer loop and remat are taken from here in
      either case.
  """

  path: str = ''
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)


@dataclasses.dataclass
class RolloutSettings:
  """How answers are generated, and how far ahead of training.

  Attributes:
    batch_size: B, groups a training step.
    group_size: G, samples a problem.
    eta: η, versions that generation may run ahead; 0 is synchronous, `inf` has
      no bound.
    staleness: order and bound of what is trained, see `buffer.py`.
    swap: what new weights do to running answers, see `rollout/loop.py`.
    temperature: of the training samples.
    max_new_tokens: longest answer.
    stop_at_eos: whether the tokenizer's end-of-sequence ids end an answer.
    stop_ids: further ids that end one.
    max_running: groups under way at once; 0 for as many as fill all slots and
      one more for each replica.
    dtype: of the weights on the rollout side; empty to leave it.
    wait_s: longest time that training waits for a batch.
    engine: shapes of one engine.
  """

  batch_size: int = 16
  group_size: int = 8
  eta: float = 1.0
  staleness: StalenessPolicy = 'soft'
  swap: SwapMode = 'recompute'
  temperature: float = 1.0
  max_new_tokens: int = 32
  stop_at_eos: bool = True
  stop_ids: tuple[int, ...] = ()
  max_running: int = 0
  dtype: Literal['', 'float32', 'bfloat16'] = ''
  wait_s: float = 600.0
  engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)

  def validate(self, at: str) -> None:
    for name in ('batch_size', 'group_size', 'max_new_tokens'):
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    require(self.eta >= 0, f'{at}.eta', self.eta, 'at least 0')
    require(
        0 < self.temperature < math.inf,
        f'{at}.temperature',
        self.temperature,
        'more than 0 and finite: greedy answers teach nothing',
    )
    require(self.max_running >= 0, f'{at}.max_running', self.max_running,
            'at least 0')  # fmt: skip
    require(0 < self.wait_s < math.inf, f'{at}.wait_s', self.wait_s,
            'more than 0 and finite: no wait is without end')  # fmt: skip
    longest = self.engine.max_prompt_length + self.max_new_tokens
    require(
        longest <= self.engine.max_length,
        f'{at}.max_new_tokens',
        self.max_new_tokens,
        f'at most {self.engine.max_length - self.engine.max_prompt_length}:'
        f' engine.max_length={self.engine.max_length} less'
        f' engine.max_prompt_length={self.engine.max_prompt_length}',
    )


@dataclasses.dataclass
class Experiment:
  """Everything that a run depends on.

  Attributes:
    name: folder of the run under `output`.
    output: folder of all runs.
    seed: of weights, sampling and data order.
    steps: training steps.
    shuffle_rewards: a control: rewards are dealt out anew at random among the
      answers of a batch, so nothing can be learned but by accident.
    sample_bytes: limit of samples.jsonl.
  """

  name: str = 'experiment'
  output: str = 'runs'
  seed: int = 1
  steps: int = 100
  shuffle_rewards: bool = False
  sample_bytes: int = 20_000_000
  task: TaskSettings = dataclasses.field(default_factory=TaskSettings)
  tokenizer: TokenizerSettings = dataclasses.field(
      default_factory=TokenizerSettings
  )
  policy: PolicySettings = dataclasses.field(default_factory=PolicySettings)
  warm_start: WarmStartSettings = dataclasses.field(
      default_factory=lambda: WarmStartSettings(steps=0)
  )
  mesh: MeshSettings = dataclasses.field(default_factory=MeshSettings)
  rollout: RolloutSettings = dataclasses.field(default_factory=RolloutSettings)
  train: TrainSettings = dataclasses.field(default_factory=TrainSettings)
  reward: RewardSettings = dataclasses.field(
      default_factory=lambda: RewardSettings(
          'areal_jax.rewards.running_totals:exact'
      )
  )
  evaluation: EvaluationSettings = dataclasses.field(
      default_factory=EvaluationSettings
  )

  def validate(self, at: str) -> None:
    single = not set(self.name) & set('/\\\0')
    single = single and self.name not in ('', '.', '..')
    require(single, f'{at}.name', self.name, 'one folder name')
    for name, seed in (
        ('seed', self.seed),
        ('task.seed', self.task.seed),
        ('warm_start.seed', self.warm_start.seed),
    ):  # numpy takes none below 0, and a random stream is named by 32 bits
      require(0 <= seed < 2**32, f'{at}.{name}', seed, '0 to 2**32 - 1')
    require(self.steps >= 1, f'{at}.steps', self.steps, 'at least 1')
    require(self.sample_bytes >= 1000, f'{at}.sample_bytes',
            self.sample_bytes, 'at least 1000')  # fmt: skip
    rollout, train = self.rollout, self.train
    require(
        rollout.batch_size >= train.minibatches,
        f'{at}.train.minibatches',
        train.minibatches,
        f'at most rollout.batch_size={rollout.batch_size}',
    )
    longest = rollout.engine.max_prompt_length + rollout.max_new_tokens
    require(
        train.packing.row_tokens >= longest,
        f'{at}.train.packing.row_tokens',
        train.packing.row_tokens,
        f'at least {longest}, the longest prompt and answer',
    )
    shards = self.mesh.train.fsdp
    packings = {'train': train.packing}
    if self.warm_start.steps:
      packings['warm_start'] = self.warm_start.packing
    for name, packing in packings.items():
      rows = packing.rows
      require(
          rows % shards == 0,
          f'{at}.{name}.packing.rows',
          rows,
          f'a multiple of mesh.train.fsdp={shards}',
      )


config_lib.open_for_flags(Experiment)


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What a run needs besides devices, checked.

  Attributes:
    settings: the resolved tree.
    model: the policy's shape, vocabulary and padding filled in.
    tokenizer: reads and writes text.
    tokenizer_model: bytes of its sentencepiece model.
    train: problems to train on.
    evaluation: held-out problems.
    prompts: token ids of every problem's prompt, by problem id.
    demonstrations: (prompt ids, answer ids) of the warm start.
    sampling: how training answers are sampled.
    evaluation_sampling: how evaluation answers are.
  """

  settings: Experiment
  model: ModelConfig
  tokenizer: Tokenizer
  tokenizer_model: bytes
  train: tuple[Problem, ...]
  evaluation: tuple[Problem, ...]
  prompts: dict[str, tuple[int, ...]]
  demonstrations: tuple[tuple[list[int], list[int]], ...]
  sampling: SamplingParams
  evaluation_sampling: SamplingParams

  @property
  def max_running(self) -> int:
    """Groups under way at once."""
    rollout = self.settings.rollout
    if rollout.max_running:
      return rollout.max_running
    replicas = self.settings.mesh.rollout.replicas
    slots = rollout.engine.slots * replicas
    return math.ceil(slots / rollout.group_size) + replicas


def prepare(experiment: Experiment) -> Prepared:
  """Resolves the settings and opens what they name.

  Raises:
    ConfigError: anything in them that cannot work.
  """
  settings = config_lib.resolve(experiment)
  _check_output(settings)
  settings.reward.check('config.reward')
  train, evaluation = _problems(settings)
  tokenizer, tokenizer_model = _tokenizer(settings)
  model = _model(settings, tokenizer)
  prompts = {
      problem.id: _prompt(settings, tokenizer, problem)
      for problem in (*train, *evaluation)
  }
  return Prepared(
      settings=settings,
      model=model,
      tokenizer=tokenizer,
      tokenizer_model=tokenizer_model,
      train=train,
      evaluation=evaluation,
      prompts=prompts,
      demonstrations=_demonstrations(settings, tokenizer),
      sampling=_sampling(settings, tokenizer, settings.rollout.temperature),
      evaluation_sampling=_sampling(
          settings, tokenizer, settings.evaluation.temperature
      ),
  )


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


def _problems(
    settings: Experiment,
) -> tuple[tuple[Problem, ...], tuple[Problem, ...]]:
  task = settings.task
  found = []
  for split, count, file in (
      ('train', task.train_problems, task.train_file),
      ('eval', task.eval_problems, task.eval_file),
  ):
    if file:
      with named(f'config.task.{split}_file'):
        found.append(problems_lib.read_jsonl(file))
    else:
      with named('config.task.problems'):
        found.append(
            problems_lib.load_problems(
                task.problems, split=split, count=count, seed=task.seed
            )
        )
  train, evaluation = found
  problems_lib.require_batches(
      train, settings.rollout.batch_size, 'config.task'
  )
  both = {p.id for p in train} & {p.id for p in evaluation}
  require(
      not both,
      'config.task.eval_file',
      sorted(both)[:3],
      'no problem id that is trained on as well',
  )
  return tuple(train), tuple(evaluation)


def _tokenizer(settings: Experiment) -> tuple[Tokenizer, bytes]:
  wanted = settings.tokenizer
  if wanted.path:
    with named('config.tokenizer.path'):
      tokenizer = SentencePieceTokenizer(wanted.path)
    return tokenizer, pathlib.Path(wanted.path).read_bytes()
  texts = _call(settings.task.texts, 'config.task.texts')
  with tempfile.TemporaryDirectory() as folder, named('config.tokenizer'):
    path = train_sentencepiece(
        texts,
        pathlib.Path(folder) / 'tokenizer.model',
        kind=wanted.kind,
        vocab_size=wanted.vocab_size or None,
    )
    return SentencePieceTokenizer(path), path.read_bytes()


def _call(spec: str, at: str, *arguments: Any) -> Any:
  """What the task's function returns; one that takes others is refused."""
  function = load_function(spec, at)
  try:
    inspect.signature(function).bind(*arguments)
  except (TypeError, ValueError) as error:  # ValueError: it has no signature
    raise ConfigError(
        f'{at} is {spec!r}, which cannot be called with {arguments}: {error}'
    ) from error
  return function(*arguments)


def _model(settings: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  """The policy's shape: from its folder or from the settings."""
  policy = settings.policy
  model = policy.model
  if policy.path:
    file = pathlib.Path(policy.path) / 'config.json'
    require(file.is_file(), 'config.policy.path', policy.path,
            'a Hugging Face folder with a config.json')  # fmt: skip
    try:
      published = json.loads(file.read_bytes())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
      raise ConfigError(f'{file} is not JSON: {error}') from error
    right = isinstance(published, dict)
    require(right, str(file), published, 'a JSON object')
    hf.check_hf(policy.path)
    model = dataclasses.replace(
        config_from_hf(published, str(file)),
        layer_loop=model.layer_loop,
        compute_dtype=model.compute_dtype,
        remat=model.remat,
    )
    require(
        tokenizer.vocab_size <= model.vocab_size,
        'config.tokenizer.path',
        f'{settings.tokenizer.path} with {tokenizer.vocab_size} ids',
        f'at most the {model.vocab_size} of config.policy.path',
    )
  else:
    model = dataclasses.replace(model, vocab_size=tokenizer.vocab_size)
  mesh = settings.mesh
  model = dataclasses.replace(
      model, vocab_multiple=math.lcm(mesh.train.tensor, mesh.rollout.tensor)
  )
  engine = settings.rollout.engine
  require(
      engine.max_length <= model.max_length,
      'config.rollout.engine.max_length',
      engine.max_length,
      f'at most the {model.max_length} tokens that the policy is meant for',
  )
  _check_division(model, settings)
  model = config_lib.resolve(model, 'config.policy.model')
  with named('config.policy.model'):
    config_to_hf(model)  # the run ends by saving it in that form
  return model


def _check_division(model: ModelConfig, settings: Experiment) -> None:
  """Refuses a mesh over which the policy does not divide."""
  mesh = settings.mesh
  for axis, parts, sizes in (
      ('train.fsdp', mesh.train.fsdp, ('width',)),
      ('train.tensor', mesh.train.tensor, ('heads', 'mlp_width')),
      ('rollout.tensor', mesh.rollout.tensor, ('heads', 'mlp_width')),
  ):
    for name in sizes:
      size = getattr(model, name)
      require(
          size % parts == 0,
          f'config.mesh.{axis}',
          parts,
          f"a divisor of the policy's {name}={size}",
      )


def _prompt(
    settings: Experiment, tokenizer: Tokenizer, problem: Problem
) -> tuple[int, ...]:
  with named(f'the prompt of problem {problem.id!r}'):
    ids = render_prompt(
        tokenizer, problem.prompt, add_bos=settings.tokenizer.add_bos
    )
  limit = settings.rollout.engine.max_prompt_length
  require(
      len(ids) <= limit,
      f'the prompt of problem {problem.id!r}',
      f'{len(ids)} tokens',
      f'at most config.rollout.engine.max_prompt_length={limit}',
  )
  return tuple(ids)


def _demonstrations(
    settings: Experiment, tokenizer: Tokenizer
) -> tuple[tuple[list[int], list[int]], ...]:
  """Token ids of the warm start's pairs, each answer ended like a sample."""
  if not settings.warm_start.steps:
    return ()
  task = settings.task
  at = 'config.task.demonstrations'
  found = list(
      _call(task.demonstrations, at, task.demonstration_count, task.seed)
  )
  require(
      len(found) >= settings.warm_start.batch,
      f'the number of {at}',
      len(found),
      f'at least warm_start.batch={settings.warm_start.batch}',
  )
  end = list(tokenizer.eos_ids[:1]) if settings.rollout.stop_at_eos else []
  pairs = []
  for i, pair in enumerate(found):
    right = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
    )
    require(right, f'item {i} of {at}', pair, 'a prompt and an answer')
    prompt, answer = pair
    with named(f'item {i} of {at}'):
      ids = render_prompt(tokenizer, prompt, add_bos=settings.tokenizer.add_bos)
    ending = tokenizer.encode(answer) + end
    require(bool(ending), f'item {i} of {at}', pair, 'an answer of some token')
    pairs.append((ids, ending))
  longest = max(len(p) + len(a) for p, a in pairs)
  row = settings.warm_start.packing.row_tokens
  require(
      longest <= row,
      'config.warm_start.packing.row_tokens',
      row,
      f'at least {longest}, the longest demonstration',
  )
  return tuple(pairs)


def _sampling(
    settings: Experiment, tokenizer: Tokenizer, temperature: float
) -> SamplingParams:
  rollout = settings.rollout
  stops = (
      *(tokenizer.eos_ids if rollout.stop_at_eos else ()),
      *rollout.stop_ids,
  )
  room = rollout.engine.max_stop_ids
  require(
      len(stops) <= room,
      'config.rollout.engine.max_stop_ids',
      room,
      f'at least {len(stops)}, the stop ids {stops}',
  )
  for stop in rollout.stop_ids:
    require(
        0 <= stop < tokenizer.vocab_size,
        'config.rollout.stop_ids',
        stop,
        f"one of the tokenizer's {tokenizer.vocab_size} ids",
    )
  return SamplingParams(
      max_new_tokens=rollout.max_new_tokens,
      temperature=temperature,
      stop_ids=stops,
      seed=settings.seed,
  )
