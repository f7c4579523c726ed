"""The tree of settings of a run, and the checks that span rooms.

An experiment file returns an `Experiment` from `get_config()`; flags change its
fields; `prepare` resolves it and opens everything that is cheap to open (task,
tokenizer, reward, the policy's config file), so that a mistake is one clear
line before any device does any work and before anything is written.
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
import tempfile
from typing import Literal

from areal_jax import config as config_lib
from areal_jax.buffer import StalenessPolicy
from areal_jax.config import ConfigError, require
from areal_jax.data import problems as problems_lib
from areal_jax.mesh.slices import MeshSettings
from areal_jax.models.config import ModelConfig, config_from_hf
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
        self.temperature > 0,
        f'{at}.temperature',
        self.temperature,
        'more than 0: greedy answers teach nothing',
    )
    require(self.max_running >= 0, f'{at}.max_running', self.max_running,
            'at least 0')  # fmt: skip
    require(self.wait_s > 0, f'{at}.wait_s', self.wait_s, 'more than 0')
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
    for name, rows in (
        ('train', train.packing.rows),
        ('warm_start', self.warm_start.packing.rows),
    ):
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
      found.append(problems_lib.read_jsonl(file))
    else:
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
    tokenizer = SentencePieceTokenizer(wanted.path)
    return tokenizer, pathlib.Path(wanted.path).read_bytes()
  texts = load_function(settings.task.texts, 'config.task.texts')()
  with tempfile.TemporaryDirectory() as folder:
    path = train_sentencepiece(
        texts,
        pathlib.Path(folder) / 'tokenizer.model',
        kind=wanted.kind,
        vocab_size=wanted.vocab_size or None,
    )
    return SentencePieceTokenizer(path), path.read_bytes()


def _model(settings: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  """The policy's shape: from its folder or from the settings."""
  policy = settings.policy
  model = policy.model
  if policy.path:
    file = pathlib.Path(policy.path) / 'config.json'
    require(file.is_file(), 'config.policy.path', policy.path,
            'a Hugging Face folder with a config.json')  # fmt: skip
    try:
      published = json.loads(file.read_text())
    except json.JSONDecodeError as error:
      raise ConfigError(f'{file} is not JSON: {error}') from error
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
  return config_lib.resolve(model, 'config.policy.model')


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
  function = load_function(task.demonstrations, 'config.task.demonstrations')
  require(
      task.demonstration_count >= settings.warm_start.batch,
      'config.task.demonstration_count',
      task.demonstration_count,
      f'at least warm_start.batch={settings.warm_start.batch}',
  )
  end = list(tokenizer.eos_ids[:1]) if settings.rollout.stop_at_eos else []
  pairs = []
  for prompt, answer in function(task.demonstration_count, task.seed):
    ids = render_prompt(tokenizer, prompt, add_bos=settings.tokenizer.add_bos)
    pairs.append((ids, tokenizer.encode(answer) + end))
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
  stops = (*(tokenizer.eos_ids if rollout.stop_at_eos else ()), *rollout.stop_ids)
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
