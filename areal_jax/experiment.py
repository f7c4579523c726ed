"""The tree of settings of a run, and the checks that span rooms.

An experiment file returns an `Experiment` from `get_config()`; flags change its
fields; `prepare` resolves it and opens everything that is cheap to open (task,
tokenizer, reward, the policy's config file), so that a mistake is one clear
line before any device does any work and before anything is written.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import math
import os
import pathlib
import tempfile
from typing import Any, Callable, Literal, Mapping, NoReturn, Sequence

from etils import epath
import jax

from areal_jax import config as config_lib
from areal_jax.buffer import StalenessPolicy
from areal_jax.config import ConfigError, Mistakes, fetching, named, require
from areal_jax.data import problems as problems_lib
from areal_jax.data.problems import check_text
from areal_jax.data.sources import (
    Sources,
    SourceSettings,
    read_source,
    read_sources,
)
from areal_jax.data.stream import Part, content_digest
from areal_jax.losses import presets
from areal_jax.losses.advantages import AdvantageSettings
from areal_jax.mesh.host import require_whole
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import MeshSettings
from areal_jax.models import hf, lora, peft, shapes, transformer
from areal_jax.models.config import ModelConfig, config_to_hf
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.engine import EngineSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.rollout.failures import FailureSettings
from areal_jax.rollout.loop import SwapMode
from areal_jax.sandbox.call import load_function
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.profiling import ProfilingSettings
from areal_jax.tokenizer import special_tokens
from areal_jax.tokenizer.base import Tokenizer, absent_ids, render_prompt
from areal_jax.tokenizer.chat_template import ChatTemplate
from areal_jax.tokenizer.files import (
    Opened,
    beside_weights,
    holds_tokenizer,
    open_tokenizer,
)
from areal_jax.tokenizer.prompt_check import check_prompt
from areal_jax.tokenizer.round_trip import round_trip
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from areal_jax.train import pretrained
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.pretrained import Pretrained
from areal_jax.train.supervised import WarmStartSettings, supervised_warm_start
from areal_jax.train.trainer import (
    Steps,
    Trainer,
    TrainSettings,
    build_steps,
    compile_ahead,
)
from areal_jax.types import Message, Problem, SamplingParams


@dataclasses.dataclass
class TaskSettings:
  """Where problems come from.

  Attributes:
    problems: 'package.module:function', called with split ('train' or 'eval'),
      count and seed.
    train_problems: problems to train on.
    eval_problems: held-out problems.
    train_file: a file with the problems to train on, instead: JSON lines,
      Parquet or ArrayRecord with rows of our own form.
    eval_file: such a file with the held-out problems.
    train_sources: files of any form, mixed by weight, instead.
    eval_sources: such files with the held-out problems.
    too_long: whether a prompt longer than the engine takes is refused, or its
      problem left out and counted.
    texts: function that returns texts to train a tokenizer on; empty for the
      prompts and answers of the problems, and of the demonstrations if there
      is a warm start.
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
  train_sources: tuple[SourceSettings, ...] = ()
  eval_sources: tuple[SourceSettings, ...] = ()
  too_long: Literal['refuse', 'drop'] = 'refuse'
  texts: str = ''
  demonstrations: str = 'areal_jax.data.running_totals:habitual'
  demonstration_count: int = 20_000
  seed: int = 0

  def validate(self, at: str) -> None:
    for name in ('train_problems', 'eval_problems', 'demonstration_count'):
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    for split in ('train', 'eval'):
      file = getattr(self, f'{split}_file')
      sources = getattr(self, f'{split}_sources')
      right = not (file and sources)
      require(right, f'{at}.{split}_file', file, f"'' beside {split}_sources")
    for i, source in enumerate(self.eval_sources):
      require(source.weight == 1, f'{at}.eval_sources[{i}].weight',
              source.weight, '1: each problem is asked')  # fmt: skip


@dataclasses.dataclass
class TokenizerSettings:
  """A tokenizer on disk, or one trained on the task's texts.

  Attributes:
    path: a sentencepiece `.model`, a `tokenizer.json`, a folder with either or
      the folder of a run. Empty for the one that lies with the policy at
      `policy.path`, or, where there is no such policy, to train one when the
      run starts.
    kind: of the one that is trained.
    vocab_size: of the one that is trained; 0 for what 'char' needs.
    add_bos: whether every prompt that is a plain text begins with the BOS id.
    chat_template: Jinja text that renders prompts of several messages; empty
      for the one in the folder.
    chat_variables: what the template may ask for, as `enable_thinking`.
  """

  path: str = ''
  kind: Literal['char', 'bpe', 'unigram'] = 'char'
  vocab_size: int = 0
  add_bos: bool = True
  chat_template: str = ''
  chat_variables: dict[str, Any] = dataclasses.field(default_factory=dict)

  def validate(self, at: str) -> None:
    require(self.vocab_size >= 0, f'{at}.vocab_size', self.vocab_size,
            'at least 0')  # fmt: skip


@dataclasses.dataclass
class PolicySettings:
  """The policy to start from.

  Attributes:
    path: a Hugging Face folder, the folder of a run, or a checkpoint; empty to
      start from random weights.
    load: 'all' takes the whole policy of `path`, its shape included;
      'matching' takes the tensors that fit into `model` and leaves the others
      at their initial values.
    model: its shape where `path` is empty or `load` is 'matching'. The
      vocabulary comes from the tokenizer; compute dtype, layer loop, remat,
      `attention`, adapters (`lora`), `moe.balance` and `moe.replay` are taken
      from here in either case.
    adapter: a folder with adapters in PEFT's layout to begin with, of the kind
      that `model.lora` says; empty for new ones.
  """

  path: str = ''
  load: Literal['all', 'matching'] = 'all'
  adapter: str = ''
  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)


@dataclasses.dataclass
class RolloutSettings:
  """How answers are generated, and how far ahead of training.

  Attributes:
    batch_size: B, groups a training step.
    group_size: G, samples a problem.
    eta: η, versions that generation may run ahead; 0 is synchronous, `inf` has
      no bound.
    exact: whether equal seeds give equal bits, which only eta = 0 can promise:
      a run then equals a plain loop, and a resumed run one that never stopped.
      It costs speed, see docs/decisions/engine.md: prompts are prefilled one by
      one, page tables are always of the widest width, a decode step takes all
      slots, and only whole pieces of a prompt are found in the cache.
    staleness: order and bound of what is trained, see `buffer.py`.
    swap: what new weights do to running answers, see `rollout/loop.py`.
    temperature: of the training samples; nothing else may shape what they are
      drawn from, see `types.SamplingParams.untrainable`.
    max_new_tokens: longest answer.
    stop_at_eos: whether the tokenizer's end-of-sequence ids end an answer.
      False without `stop_ids` and `stop_strings` says that every answer is
      meant to go on to `max_new_tokens`.
    stop_ids: further ids that end one.
    stop_strings: texts that end one; it is scored without them.
    max_running: as many answers are under way at once as so many groups have;
      0 for as many groups as fill all slots and half of them again, at least
      one more for each replica.
    dynamic_sampling: whether groups whose answers all have the same score are
      dropped and further ones drawn in their place, so that every group of a
      batch has something to compare (DAPO, https://arxiv.org/abs/2503.14476).
    dynamic_sampling_tries: how often the batch may be drawn anew, so to speak:
      after this many times batch_size drops in a step, groups are drawn that
      are trained whatever their scores.
    max_ready: no group is started while so many finished ones wait for
      training. Where η has no bound, this is what bounds the host's memory;
      those under way still finish.
    dtype: of the weights on the rollout side; empty to leave it.
    merge_adapters: whether engines add each version's adapters to the frozen
      matrices, which takes memory for whole versions, or run both side by side,
      which takes a product more in each adapted projection.
    wait_s: longest time that training waits for a batch.
    group_s: seconds that the answers of a group may take, those left out in
      which an engine or a verifier works for the group: a long answer is not a
      workflow that hangs. What is still missing then is an unfinished answer,
      see `failures.unfinished`. 0 for half of `wait_s`, so that a group that is
      dropped can be replaced before training gives up.
    engine: shapes of one engine.
  """

  batch_size: int = 16
  group_size: int = 8
  eta: float = 1.0
  exact: bool = False
  staleness: StalenessPolicy = 'soft'
  swap: SwapMode = 'recompute'
  temperature: float = 1.0
  max_new_tokens: int = 32
  stop_at_eos: bool = True
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  max_running: int = 0
  dynamic_sampling: bool = False
  dynamic_sampling_tries: int = 10
  max_ready: int = 4096
  dtype: Literal['', 'float32', 'bfloat16'] = ''
  merge_adapters: bool = False
  wait_s: float = 600.0
  group_s: float = 0.0
  engine: EngineSettings = dataclasses.field(default_factory=EngineSettings)

  def validate(self, at: str) -> None:
    for name in ('batch_size', 'group_size', 'max_new_tokens'):
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    require(self.eta >= 0, f'{at}.eta', self.eta, 'at least 0')
    require(
        self.synchronous or not self.exact,
        f'{at}.exact',
        self.exact,
        f'False with {at}.eta={self.eta:g}, or {at}.eta=0: above 0 new weights'
        ' come in the middle of answers, which are then computed by other'
        ' programs, and a batch holds whatever was finished first, so bits'
        ' depend on the moment',
    )
    require(
        0 < self.temperature < math.inf,
        f'{at}.temperature',
        self.temperature,
        'more than 0 and finite: greedy answers teach nothing',
    )
    for stop in self.stop_strings:
      require(bool(stop) and '\ufffd' not in stop, f'{at}.stop_strings', stop,
              'texts of at least one character, without U+FFFD: it stands for'
              ' half a character')  # fmt: skip
    require(self.max_running >= 0, f'{at}.max_running', self.max_running,
            'at least 0')  # fmt: skip
    require(self.dynamic_sampling_tries >= 1, f'{at}.dynamic_sampling_tries',
            self.dynamic_sampling_tries, 'at least 1')  # fmt: skip
    require(
        not self.dynamic_sampling or self.group_size > 1,
        f'{at}.dynamic_sampling',
        self.dynamic_sampling,
        'False with group_size=1: one answer never differs from itself, so'
        ' every group would be dropped',
    )
    require(self.max_ready >= self.batch_size, f'{at}.max_ready',
            self.max_ready, f'at least batch_size={self.batch_size}, or no'
            ' batch is ever complete')  # fmt: skip
    require(0 < self.wait_s < math.inf, f'{at}.wait_s', self.wait_s,
            'more than 0 and finite: no wait is without end')  # fmt: skip
    require(0 <= self.group_s < math.inf, f'{at}.group_s', self.group_s,
            'at least 0 and finite: a workflow may hang')  # fmt: skip
    longest = self.engine.max_prompt_length + self.max_new_tokens
    require(
        longest <= self.engine.max_length,
        f'{at}.max_new_tokens',
        self.max_new_tokens,
        f'at most {self.engine.max_length - self.engine.max_prompt_length}:'
        f' engine.max_length={self.engine.max_length} less'
        f' engine.max_prompt_length={self.engine.max_prompt_length}',
    )

  @property
  def synchronous(self) -> bool:
    """Whether every trained token is of the version that its step starts from.

    That is what eta = 0 means for an algorithm.
    """
    return self.eta == 0

  @property
  def takes_turns(self) -> bool:
    """Whether nothing is generated for training while training goes on.

    That is what eta = 0 means for the devices.
    """
    return self.eta == 0

  @property
  def group_limit_s(self) -> float:
    """Seconds of `group_s`, worked out where it is 0."""
    return self.group_s or self.wait_s / 2


@dataclasses.dataclass
class Experiment:
  """Everything that a run depends on.

  Attributes:
    algorithm: the preset that `use_algorithm` put into the settings, changed or
      not; empty for settings of one's own. A command line's
      `--config.algorithm=NAME` calls it, and single fields given beside it come
      after it.
    name: folder of the run under `output`.
    output: folder of all runs.
    seed: of weights, sampling and data order.
    steps: training steps.
    shuffle_rewards: a control: rewards are dealt out anew at random among the
      answers of a batch, so nothing can be learned but by accident.
    sample_bytes: limit of samples.jsonl, and that of evaluations.jsonl.
    event_bytes: limit of events.jsonl. The trace is made of it in memory, at
      thirteen times its size.
    schedule_bytes: limit of schedule.bin, from which a run can be trained
      again; 0 to record none.
    resume: empty for a new run; 'auto' goes on with the run of this name from
      its last whole checkpoint, or starts it anew if it had none yet; the
      folder of a run goes on with that one; a checkpoint starts a new run that
      goes on from there.
    changed_data: what a run does that goes on with other problems, or prompts
      rendered in another way, than its checkpoint was saved with: 'refuse', or
      'restart', which draws the new data from their beginning. What was drawn
      from the old ones and is still in flight is trained as it was drawn.
    replay: the folder of a run, or its schedule.bin: its batches are trained
      again, in their order, without any rollout. Empty to run.
    replay_until: last step that is trained again; 0 for all that are recorded.
    profiling: which steps are profiled, and what a signal asks for.
    checkpoint: when the state of the run is saved, and what is kept.
    failures: what becomes of them by kind, and when silence is told.
  """

  algorithm: str = ''
  name: str = 'experiment'
  output: str = 'runs'
  seed: int = 1
  steps: int = 100
  shuffle_rewards: bool = False
  sample_bytes: int = 20_000_000
  event_bytes: int = 100_000_000
  schedule_bytes: int = 200_000_000
  resume: str = ''
  changed_data: Literal['refuse', 'restart'] = 'refuse'
  replay: str = ''
  replay_until: int = 0
  profiling: ProfilingSettings = dataclasses.field(
      default_factory=ProfilingSettings
  )
  checkpoint: CheckpointSettings = dataclasses.field(
      default_factory=CheckpointSettings
  )
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
  failures: FailureSettings = dataclasses.field(default_factory=FailureSettings)

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
    for name in ('sample_bytes', 'event_bytes'):
      value = getattr(self, name)
      require(value >= 1000, f'{at}.{name}', value, 'at least 1000')
    require(self.schedule_bytes == 0 or self.schedule_bytes >= 10_000,
            f'{at}.schedule_bytes', self.schedule_bytes,
            '0 to record none, or at least 10000')  # fmt: skip
    require(self.replay_until >= 0, f'{at}.replay_until', self.replay_until,
            'at least 0')  # fmt: skip
    require(bool(self.replay) or not self.replay_until, f'{at}.replay_until',
            self.replay_until, '0 without a replay')  # fmt: skip
    require(not self.replay or self.resume != 'auto', f'{at}.resume',
            self.resume, 'a checkpoint to replay from, or empty')  # fmt: skip
    for name in ('last_step', 'memory_step'):
      value = getattr(self.profiling, name)
      require(value <= self.steps, f'{at}.profiling.{name}', value,
              f'at most steps={self.steps}')  # fmt: skip
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
    require(
        self.mesh.colocated or not train.offload_optimizer,
        f'{at}.train.offload_optimizer',
        train.offload_optimizer,
        'False unless mesh.colocated: nobody else needs the room',
    )
    _check_algorithm(self, at)
    self._validate_adapters(at)
    mesh = self.mesh.train
    packings = {'train': train.packing}
    if self.warm_start.steps:
      packings['warm_start'] = self.warm_start.packing
    for name, packing in packings.items():
      for largest, others, sizes, axes in (
          ('rows', 'fewer', packing.numbers, ('data', 'fsdp', 'expert')),
          ('row_tokens', 'shorter', packing.lengths, ('context',)),
      ):
        parts = {axis: getattr(mesh, axis) for axis in axes}
        used = [f'{axis}={n}' for axis, n in parts.items() if n > 1]
        for size in sizes:
          field = largest if size == getattr(packing, largest) else others
          require(
              size % math.prod(parts.values()) == 0,
              f'{at}.{name}.packing.{field}',
              size,
              f'a multiple of mesh.train.{" · ".join(used)}',
          )

  @property
  def memory_by_phases(self) -> bool:
    """Whether training and engines have the same memory one after the other.

    They do where they share devices and take turns on them.
    """
    return self.mesh.colocated and self.rollout.takes_turns

  def _validate_adapters(self, at: str) -> None:
    names = self.policy.model.lora.projections
    if names:
      require(
          not self.warm_start.steps,
          f'{at}.warm_start.steps',
          self.warm_start.steps,
          f'0 with policy.model.lora.projections={names}: adapters need a base'
          ' that has been trained, by a run of its own',
      )
      return
    some = 'policy.model.lora.projections to name some'
    for name, value in (
        ('rollout.merge_adapters', self.rollout.merge_adapters),
        ('policy.adapter', self.policy.adapter),
    ):
      wanted = f'{type(value)()!r}, or {some}'
      require(not value, f'{at}.{name}', value, wanted)


config_lib.open_for_flags(Experiment)


def use_algorithm(experiment: Experiment, name: str) -> Experiment:
  """Puts a preset of `losses/presets.py` into the settings; returns them.

  Sets `train.advantages`, `train.loss` and `rollout.dynamic_sampling`, whatever
  they were. Call it after `rollout.max_new_tokens` is set, which some presets
  go by; change single fields afterwards.

  Raises:
    ConfigError: no such preset.
  """
  known = sorted(presets.PRESETS)
  require(name in known, 'config.algorithm', name, f'one of {known}')
  chosen = presets.preset(name, longest=experiment.rollout.max_new_tokens)
  experiment.algorithm = name
  experiment.train.advantages = chosen.advantages
  experiment.train.loss = chosen.loss
  experiment.rollout.dynamic_sampling = chosen.dynamic_sampling
  return experiment


def algorithm_changes(settings: Experiment) -> list[str]:
  """How the settings differ from the preset that they name.

  Returns:
    Lines such as 'train.loss.clip_high: 0.28 -> 0.3'; none without a preset.
  """
  if not settings.algorithm:
    return []
  whole = use_algorithm(
      Experiment(
          rollout=RolloutSettings(
              max_new_tokens=settings.rollout.max_new_tokens
          )
      ),
      settings.algorithm,
  )
  lines = []
  for at in ('train.advantages', 'train.loss', 'rollout.dynamic_sampling'):
    before, after = whole, settings
    for name in at.split('.'):
      before, after = getattr(before, name), getattr(after, name)
    lines += _differences(
        at, config_lib.to_dict(before), config_lib.to_dict(after)
    )
  return lines


def _differences(at: str, before: Any, after: Any) -> list[str]:
  if not isinstance(before, dict):
    return [] if before == after else [f'{at}: {before} -> {after}']
  return [
      line
      for name in before
      for line in _differences(f'{at}.{name}', before[name], after[name])
  ]


def cautions(settings: Experiment) -> list[str]:
  """What works but is hardly meant, each with the reason, one line each."""
  rollout, loss = settings.rollout, settings.train.loss
  advantages = settings.train.advantages
  penalty = advantages.length_penalty
  found = _unrated(settings)
  if rollout.exact:
    found.append(
        'config.rollout.exact is True, for equal bits: prompts are prefilled'
        ' one by one and every decode step takes all slots and the widest page'
        ' tables, so the rollout of distinct prompts took 2.0 to 3.3 times as'
        ' long where it was measured'
    )
  by_sequence = loss.ratio_level == 'sequence'
  token_rules = [r for r in loss.weight_rules if r.level == 'token']
  if by_sequence and (loss.weight_level == 'token' or token_rules):
    found.append(
        'config.train.loss: the ratio is that of a sequence and weights or'
        ' rules are those of tokens; all tokens of a sequence are worth the'
        ' same, so what is cut from one token is made up by the others'
    )
  failures = settings.failures
  tries = 1 + failures.retries * (failures.unfinished == 'retry')
  waits = rollout.eta == 0 or rollout.staleness == 'fifo'
  if waits and tries * rollout.group_limit_s >= rollout.wait_s:
    found.append(
        'config.rollout.group_s: an answer that hangs is given up after'
        f' {tries} times {rollout.group_limit_s:g} s, and training, which waits'
        f' for its group, gives up after wait_s={rollout.wait_s:g} s'
    )
  if rollout.dynamic_sampling and not _compares_in_group(advantages):
    found.append(
        'config.rollout.dynamic_sampling is True and advantages compare with'
        ' the batch: groups of equal scores would have taught something there,'
        ' and without them the batch is another'
    )
  if loss.kl_coefficient and advantages.kl_coefficient:
    found.append(
        'config.train: both kl_coefficients are above 0, so the distance from'
        ' the reference is charged for twice'
    )
  if penalty.longest > rollout.max_new_tokens:
    found.append(
        f'config.train.advantages.length_penalty.longest is {penalty.longest}'
        f' and rollout.max_new_tokens {rollout.max_new_tokens}: no answer is'
        ' ever long enough for all of it'
    )
  if penalty.longest and settings.train.mask_truncated:
    found.append(
        'config.train.mask_truncated is True and there is a length_penalty: the'
        ' answers that it is highest for are not trained'
    )
  return found


def _unrated(settings: Experiment) -> list[str]:
  """A caution where evaluation rates only some of the checkpoints."""
  saves, every = settings.checkpoint, settings.evaluation.every
  if not saves.best_by_evaluation:
    return []
  last = settings.steps
  saved = [s for s in range(1, last + 1) if saves.due(s, last)]
  rated = [s for s in saved if s == last or every and s % every == 0]
  if rated == saved:
    return []
  return [
      f'config.checkpoint.keep_best={saves.keep_best!r} can choose among'
      f' {len(rated)} of {len(saved)} checkpoints, those of versions that are'
      f' evaluated: checkpoint.every is {saves.every} and evaluation.every'
      f' {every}'
  ]


def _compares_in_group(advantages: AdvantageSettings) -> bool:
  return 'group' in (advantages.sequences.mean, advantages.tokens.mean)


def _check_algorithm(settings: Experiment, at: str) -> None:
  """Refuses parts of an algorithm that cannot work with one another."""
  rollout, train = settings.rollout, settings.train
  loss, advantages = train.loss, train.advantages
  known = ['', *sorted(presets.PRESETS)]
  require(settings.algorithm in known, f'{at}.algorithm', settings.algorithm,
          f'one of {known}')  # fmt: skip
  for name in ('sequences', 'tokens'):
    normal = getattr(advantages, name)
    for part in ('mean', 'std'):
      level = getattr(normal, part)
      require(
          level != 'group' or rollout.group_size > 1,
          f'{at}.train.advantages.{name}.{part}',
          level,
          'another with rollout.group_size=1: an answer that is alone in its'
          ' group has nothing to be compared with, and an advantage of 0',
      )
  # The ratio to the behavior policy is in w, or in ρ where the proximal policy
  # is the behavior policy and the objective has a ρ.
  corrected = (
      loss.objective != 'reinforce'
      if loss.proximal == 'behavior'
      else loss.weight_level != 'none'
  )
  require(
      corrected or rollout.synchronous,
      f'{at}.train.loss.weight_level',
      loss.weight_level,
      "'token' or 'sequence_mean' and a proximal policy other than 'behavior'"
      f' with rollout.eta={rollout.eta:g}: without a ratio to the policy that'
      ' sampled them, answers of older weights are trained as if the newest had'
      ' given them',
  )
  taught = advantages.reward_scale == 0
  require(
      not taught or advantages.kl_coefficient > 0 and train.reference_path,
      f'{at}.train.reference_path',
      train.reference_path,
      "a teacher's folder, and a train.advantages.kl_coefficient above 0, with"
      ' train.advantages.reward_scale=0: nothing else would be learnt',
  )
  critic = train.critic
  require(
      advantages.critic or critic.warmup_steps == 0,
      f'{at}.train.critic.warmup_steps',
      critic.warmup_steps,
      '0 without train.advantages.critic: there is no critic to warm up',
  )
  require(
      critic.warmup_steps < settings.steps,
      f'{at}.train.critic.warmup_steps',
      critic.warmup_steps,
      f'less than steps={settings.steps}, or the policy never learns',
  )


@dataclasses.dataclass(frozen=True)
class Prepared:
  """What a run needs besides devices, checked.

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
    """What the run asks and scores by, hashed: see `resume.place_draws`.

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
    """What works but is hardly meant of the data and the tokenizer."""
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
    settings.evaluation.load_vote('config.evaluation')
  with mistakes:
    train, evaluation = _problems(settings)
  with mistakes:
    pairs = _demonstrations(settings)
  with mistakes:
    opened = _named_tokenizer(settings)
  with mistakes:
    source = _pretrained(settings)
  mistakes.tell()
  opened = opened or _unnamed_tokenizer(
      settings, source, lambda: _own_texts(settings, train, evaluation, pairs)
  )
  tokenizer = opened.tokenizer
  model = _model(settings, source, tokenizer)
  prompts: dict[str, tuple[int, ...]] = {}
  left_out = {}
  changed: list[str] = []
  for split, sources in (('train', train), ('eval', evaluation)):
    left_out[f'{split}_bad_rows'] = len(sources.bad_rows)
    left_out[f'{split}_too_long'] = _prompts(
        settings, opened, sources, prompts, changed
    )
  train, evaluation = (_with_prompt(s, prompts) for s in (train, evaluation))
  _check_numbers(settings, train, evaluation, left_out)
  sampling = _sampling(
      settings, tokenizer, temperature=settings.rollout.temperature
  )
  return Prepared(
      settings=settings,
      model=model,
      source=source,
      reference=_reference(settings, tokenizer),
      tokenizer=tokenizer,
      chat=opened.chat,
      tokenizer_files=opened.files,
      train=train.problems,
      parts=train.parts,
      evaluation=evaluation.problems,
      left_out=left_out,
      prompts=prompts,
      demonstrations=_demonstrated_ids(settings, tokenizer, pairs),
      sampling=sampling,
      evaluation_sampling=_evaluation_sampling(settings, tokenizer),
      changed_prompts=tuple(changed),
      lost_answers=tuple(_lost_answers(tokenizer, train.problems)),
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
  """What a trained policy needs to answer, checked; no task is in it.

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
  source = _pretrained(settings)
  # Nothing is asked yet, so there is no text to train a tokenizer on.
  at = settings.tokenizer.path or _own_tokenizer(settings, source)
  if at is None:
    _refuse_without_tokenizer(settings, source)
  tokenizer = _opened_tokenizer(settings, at).tokenizer
  with named('config.tokenizer'):  # one prompt, to see that there can be any
    render_prompt(tokenizer, '0', add_bos=settings.tokenizer.add_bos)
  return PreparedPolicy(
      settings=settings,
      model=_model(settings, source, tokenizer),
      source=source,
      tokenizer=tokenizer,
      sampling=_sampling(settings, tokenizer, **choice),
  )


@dataclasses.dataclass(frozen=True)
class PreparedShapes:
  """What the programs of a run are made of, checked; no file of it is needed.

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
    model = _shape_at(settings, 'policy.path', path)
  else:
    texts = lambda: _own_texts(
        settings, *_problems(settings), _demonstrations(settings)
    )
    opened = _named_tokenizer(settings) or _unnamed_tokenizer(
        settings, _pretrained(settings), texts
    )
    model = _own_shape(settings, opened.tokenizer)
  model = _checked_model(settings, model)
  path, reference = settings.train.reference_path, None
  if path:
    at = 'train.reference_path'
    reference = _shape_at(settings, at, path)
    _check_division(reference, settings)
    reference = config_lib.resolve(reference, f'config.{at}')
  return PreparedShapes(settings, model, reference)


def _shape_at(settings: Experiment, at: str, path: str) -> ModelConfig:
  """The shape of what lies at a path, or of what its name says."""
  if epath.Path(path).exists():
    shape = pretrained.find(path, f'config.{at}').shape()
    return _as_it_runs(settings, shape, at)
  shape = shapes.published_shape(path)
  wanted = f'a policy, or a path that ends with one of {[*shapes.SHAPES]}'
  require(shape is not None, f'config.{at}', path, wanted + fetching(path))
  return _as_it_runs(settings, shape, at)


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


def _problems(settings: Experiment) -> tuple[Sources, Sources]:
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
  _check_numbers(settings, train, evaluation, {})
  return train, evaluation


def _check_numbers(
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


def _with_prompt(sources: Sources, prompts: Mapping[str, Any]) -> Sources:
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


def _named_tokenizer(settings: Experiment) -> Opened | None:
  """The tokenizer at `tokenizer.path`; None if that is empty."""
  path = settings.tokenizer.path
  return _opened_tokenizer(settings, path) if path else None


def _unnamed_tokenizer(
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
    own = _own_tokenizer(settings, source)
    if own is not None:
      return _opened_tokenizer(settings, own)
    if settings.policy.load == 'all':
      _refuse_without_tokenizer(settings, source)
  task = settings.task
  found = _call(task.texts, 'config.task.texts') if task.texts else texts()
  with tempfile.TemporaryDirectory() as folder, named('config.tokenizer'):
    path = train_sentencepiece(
        found,
        pathlib.Path(folder) / 'tokenizer.model',
        kind=wanted.kind,
        vocab_size=wanted.vocab_size or None,
    )
    return open_tokenizer(path, **_chat_settings(settings))


def _opened_tokenizer(settings: Experiment, path: str) -> Opened:
  with named('config.tokenizer.path'):
    return open_tokenizer(path, **_chat_settings(settings))


def _chat_settings(settings: Experiment) -> dict[str, Any]:
  wanted = settings.tokenizer
  return dict(template=wanted.chat_template, variables=wanted.chat_variables)


def _own_tokenizer(settings: Experiment, source: Pretrained) -> str | None:
  """The folder with the tokenizer of a policy; None if none lies with it."""
  folders = (source.place, settings.policy.path)  # the latter may be a run's
  return next((f for f in folders if holds_tokenizer(f)), None)


def _refuse_without_tokenizer(
    settings: Experiment, source: Pretrained
) -> NoReturn:
  """Says what is missing: in a new tokenizer a policy's ids mean nothing."""
  source.shape()  # a policy that cannot be read is the first thing to say
  raise ConfigError(
      "config.tokenizer.path is '', and no tokenizer.json or tokenizer.model"
      f' lies with config.policy.path={settings.policy.path!r}, wanted the path'
      ' of the tokenizer that this policy was trained with'
  )


def _own_texts(
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


def _model(
    settings: Experiment, source: Pretrained | None, tokenizer: Tokenizer
) -> ModelConfig:
  """The policy's shape: from its folder or from the settings."""
  if source is not None and settings.policy.load == 'all':
    model = _loaded_shape(settings, source, tokenizer, 'policy.path')
  else:
    model = _own_shape(settings, tokenizer)
  model = _checked_model(settings, model)
  if settings.policy.adapter:
    with named('config.policy.adapter'):
      peft.load_peft(settings.policy.adapter, model)
  return model


def _own_shape(settings: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  """The shape that the settings themselves describe."""
  size = tokenizer.vocab_size
  return dataclasses.replace(
      settings.policy.model,
      vocab_size=size,
      absent_ids=absent_ids(tokenizer, size),
      vocab_multiple=_vocab_multiple(settings),
  )


def _checked_model(settings: Experiment, model: ModelConfig) -> ModelConfig:
  """The policy's shape, resolved, if the run can have it."""
  engine = settings.rollout.engine
  require(
      engine.max_length <= model.max_length,
      'config.rollout.engine.max_length',
      engine.max_length,
      f'at most the {model.max_length} tokens that the policy is meant for',
  )
  _check_division(model, settings)
  engine.check_shards(settings.mesh.rollout.data, 'config.rollout.engine')
  model = config_lib.resolve(model, 'config.policy.model')
  with named('config.policy.model'):
    config_to_hf(model)  # the run ends by saving it in that form
  return model


def _loaded_shape(
    settings: Experiment, source: Pretrained, tokenizer: Tokenizer, at: str
) -> ModelConfig:
  """The shape of a saved policy, to run as the settings say."""
  model = _as_it_runs(settings, source.shape(), at)
  require(
      tokenizer.vocab_size <= model.vocab_size,
      'config.tokenizer.path',
      f"{settings.tokenizer.path or 'that of the policy'} with"
      f' {tokenizer.vocab_size} ids',
      f'at most the {model.vocab_size} of config.{at}',
  )
  return dataclasses.replace(
      model, absent_ids=absent_ids(tokenizer, model.vocab_size)
  )


def _as_it_runs(
    settings: Experiment, shape: ModelConfig, at: str
) -> ModelConfig:
  """A published shape with what the settings say of how it is run."""
  ours = settings.policy.model
  experts, adapters = shape.moe, shape.lora
  if at == 'policy.path':
    adapters = ours.lora
    # How the routers are trained is no part of a published shape.
    experts = dataclasses.replace(
        experts, balance=ours.moe.balance, replay=ours.moe.replay
    )
  return dataclasses.replace(
      shape,
      moe=experts,
      lora=adapters,
      layer_loop=ours.layer_loop,
      compute_dtype=ours.compute_dtype,
      remat=ours.remat,
      attention=ours.attention,
      vocab_multiple=_vocab_multiple(settings),
  )


def _vocab_multiple(settings: Experiment) -> int:
  return math.lcm(settings.mesh.train.tensor, settings.mesh.rollout.tensor)


def _reference(
    settings: Experiment, tokenizer: Tokenizer
) -> tuple[ModelConfig, Pretrained] | None:
  """Shape and place of the policy at `train.reference_path`."""
  path = settings.train.reference_path
  if not path:
    return None
  at = 'train.reference_path'
  source = pretrained.find(path, f'config.{at}')
  with named(f'config.{at}'):
    model = _loaded_shape(settings, source, tokenizer, at)
    _check_division(model, settings)
    return config_lib.resolve(model, f'config.{at}'), source


def reference_params(
    prepared: Prepared, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[ModelConfig, Any] | None:
  """Shape and parameters of the reference policy, on a mesh.

  None where it is the policy that training starts from, or none is needed.
  """
  if prepared.reference is None:
    return None
  model, source = prepared.reference
  return model, source.load(model, mesh, rules)


def _pretrained(settings: Experiment) -> Pretrained | None:
  """What lies at `policy.path`; None where it is empty."""
  path = settings.policy.path
  return pretrained.find(path, 'config.policy.path') if path else None


def initial_params(
    prepared: Prepared | PreparedPolicy, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[Any, tuple[str, ...]]:
  """The policy that the settings name, on a mesh.

  Returns:
    Its parameters, and the names of those that `policy.load` 'matching' left at
    their initial values.

  Raises:
    ConfigError: the policy at `policy.path` is not what it was, or nothing of
      it matches.
  """
  settings, model = prepared.settings, prepared.model
  source, seed = prepared.source, settings.seed
  base, left = lora.without(model), ()
  if source is not None and settings.policy.load == 'all':
    params = source.load(model, mesh, rules, seed)
  else:
    params = transformer.init_params(base, seed, mesh, rules)
    if source is not None:
      with named('config.policy.path'):
        params, left = source.load_matching(base, params)
    params = transformer.with_adapters(model, params, seed, mesh, rules)
  if settings.policy.adapter:
    learns, _ = transformer.partition(
        model, transformer.param_shardings(model, mesh, rules)
    )
    adapters = peft.load_peft(settings.policy.adapter, model)
    params = lora.overlaid(params, jax.device_put(adapters, learns))
  return params, left


def warm_started(
    prepared: Prepared,
    params: Any,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    report: Callable[[int, float], None],
) -> Any:
  """The policy that reinforcement learning starts from.

  Args:
    prepared: the run.
    params: the policy as it was loaded or drawn; taken over if there is a warm
      start, and otherwise returned.
    mesh: where they are.
    rules: how they lie there.
    report: called with (steps done, loss) now and then.
  """
  settings = prepared.settings.warm_start
  if not settings.steps:
    return params
  return supervised_warm_start(
      prepared.model,
      params,
      prepared.demonstrations,
      settings,
      mesh,
      rules,
      report,
  )


def compile_training_ahead(
    prepared: Prepared, mesh: jax.sharding.Mesh, rules: Rules
) -> Steps:
  """Begins to compile the programs of a run's trainer, for `build_trainer`.

  Args:
    prepared: the run.
    mesh: the train mesh.
    rules: from logical to mesh axes.
  """
  settings = prepared.settings.train
  reference = prepared.reference and prepared.reference[0]
  steps = build_steps(prepared.model, settings, mesh, rules, reference)
  compile_ahead(steps, settings)
  return steps


def build_trainer(
    prepared: Prepared,
    params: Any,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    steps: Steps | None = None,
) -> Trainer:
  """The trainer of a run.

  Args:
    prepared: the run.
    params: the policy to start from, taken over.
    mesh: the train mesh.
    rules: from logical to mesh axes.
    steps: its programs from `compile_training_ahead`; None for new ones, which
      are compiled when they are called.
  """
  settings = prepared.settings
  rollout = settings.rollout
  return Trainer(
      prepared.model,
      settings.train,
      mesh,
      rules,
      params,
      reference=reference_params(prepared, mesh, rules),
      seed=settings.seed,
      max_age=rollout.eta if rollout.staleness == 'mask' else math.inf,
      steps=steps,
  )


def export_policy(prepared: Prepared, params: Any, run: pathlib.Path) -> None:
  """Writes a policy into the folder of a run, and its adapters by themselves.

  Args:
    prepared: the run.
    params: of the policy.
    run: the folder; it gets a folder for each of the two.
  """
  model = prepared.model
  export_merged(prepared, params, run / run_folder.POLICY)
  if model.lora.projections:
    base = prepared.settings.policy.path
    peft.save_peft(run / run_folder.ADAPTER, model, params, base=base)


def export_merged(
    prepared: Prepared, params: Any, folder: pathlib.Path
) -> None:
  """Writes a policy as transformers loads it: merged, with its tokenizer."""
  model = prepared.model
  if model.lora.projections:
    # On the host: what is compiled at the end of a run would count as a defect.
    model, params = lora.merged(
        model, jax.device_get(require_whole(params, 'the policy'))
    )
  files = beside_weights(prepared.tokenizer_files)
  hf.save_hf(folder, model, params, files=files)


def served_policy(
    prepared: Prepared | PreparedPolicy, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[ModelConfig, Any]:
  """The policy as engines run it where nothing trains: shape and parameters.

  Raises:
    ConfigError: whatever `initial_params` refuses.
  """
  model = prepared.model
  rollout = prepared.settings.rollout
  params, _ = initial_params(prepared, mesh, rules)
  if rollout.merge_adapters:
    shape = lora.without(model)
    shardings = transformer.param_shardings(shape, mesh, rules)
    return shape, lora.merging(model, rollout.dtype, shardings)(params)
  if rollout.dtype:
    params = jax.tree.map(lambda x: x.astype(rollout.dtype), params)
  return model, params


def _check_division(model: ModelConfig, settings: Experiment) -> None:
  """Refuses a mesh over which the policy does not divide."""
  train, rollout = settings.mesh.train, settings.mesh.rollout
  over_tensor = {'heads': model.heads}
  if model.dense_layers:
    over_tensor['mlp_width'] = model.mlp_width
  experts = {'moe.experts': model.moe.experts} if model.sparse_layers else {}
  for mesh, axes, sizes in (
      ('train', ('fsdp', 'expert'), {'width': model.width}),
      ('train', ('tensor',), over_tensor),
      ('rollout', ('tensor',), over_tensor),
      ('train', ('expert', 'tensor'), experts),
      ('rollout', ('expert', 'tensor'), experts),
  ):
    of = {axis: getattr(getattr(settings.mesh, mesh), axis) for axis in axes}
    used = {axis: parts for axis, parts in of.items() if parts > 1}
    for name, size in sizes.items():
      require(
          size % math.prod(of.values()) == 0,
          f'config.mesh.{mesh}.{" · ".join(used)}',
          math.prod(of.values()),
          f"a divisor of the policy's {name}={size}",
      )
  for mesh, parts in (('train', train.expert), ('rollout', rollout.expert)):
    require(
        parts == 1 or bool(model.sparse_layers),
        f'config.mesh.{mesh}.expert',
        parts,
        '1 for a policy without experts',
    )


def _prompts(
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
  """What the tokenizer changes in a prompt, see `round_trip`.

  Raises:
    ConfigError: it loses something.
  """
  if not isinstance(prompt, str):
    return round_trip(opened.tokenizer, opened.chat.render(prompt), ids)
  front = 1 if settings.tokenizer.add_bos else 0
  return round_trip(opened.tokenizer, prompt, ids[front:])


def _lost_answers(
    tokenizer: Tokenizer, problems: Sequence[Problem]
) -> list[str]:
  """What the tokenizer loses in right answers, a line each."""
  lost = []
  for problem in problems:
    try:
      round_trip(tokenizer, problem.answer, tokenizer.encode(problem.answer))
    except ConfigError as error:
      lost.append(f'{problem.id!r}: {error}')
  return lost


def _demonstrations(settings: Experiment) -> tuple[tuple[str, str], ...]:
  """The warm start's pairs of prompt and answer; none without a warm start."""
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
  for i, pair in enumerate(found):
    right = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
    )
    require(right, f'item {i} of {at}', pair, 'a prompt and an answer')
    for text in pair:
      check_text(text, f'item {i} of {at}')
  return tuple(map(tuple, found))


def _demonstrated_ids(
    settings: Experiment,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
) -> tuple[tuple[list[int], list[int]], ...]:
  """Token ids of the warm start's pairs, each answer ended like a sample."""
  if not pairs:
    return ()
  end = list(tokenizer.eos_ids[:1]) if settings.rollout.stop_at_eos else []
  add_bos = settings.tokenizer.add_bos
  found = []
  for i, (prompt, answer) in enumerate(pairs):
    at = f'item {i} of config.task.demonstrations'
    with named(at):
      ids = render_prompt(tokenizer, prompt, add_bos=add_bos)
      ending = tokenizer.encode(answer)
      round_trip(tokenizer, prompt, ids[1:] if add_bos else ids)
      round_trip(tokenizer, answer, ending)
    ending += end
    require(bool(ending), at, (prompt, answer), 'an answer of some token')
    found.append((ids, ending))
  longest = max(len(p) + len(a) for p, a in found)
  row = settings.warm_start.packing.row_tokens
  require(
      longest <= row,
      'config.warm_start.packing.row_tokens',
      row,
      f'at least {longest}, the longest demonstration',
  )
  return tuple(found)


def _evaluation_sampling(
    settings: Experiment, tokenizer: Tokenizer
) -> SamplingParams:
  """How evaluation answers are sampled, if the engine is built for that."""
  asked, features = settings.evaluation, settings.rollout.engine.sampling
  limit = settings.rollout.max_new_tokens
  require(
      asked.min_new_tokens <= limit,
      'config.evaluation.min_new_tokens',
      asked.min_new_tokens,
      f'at most rollout.max_new_tokens={limit}',
  )
  sampling = _sampling(settings, tokenizer, **asked.sampling)
  refusal = features.refusal(sampling, tokenizer.vocab_size)
  if refusal:
    raise ConfigError(f'config.evaluation: {refusal}')
  return sampling


def _sampling(
    settings: Experiment, tokenizer: Tokenizer, **choice: Any
) -> SamplingParams:
  """Limits, stops and seed of the settings, and how tokens are chosen."""
  rollout = settings.rollout
  stops = (
      *(tokenizer.eos_ids if rollout.stop_at_eos else ()),
      *rollout.stop_ids,
  )
  require(
      bool(stops or rollout.stop_strings) or not rollout.stop_at_eos,
      'config.rollout.stop_at_eos',
      True,
      'an id or a text that ends an answer: no file of the tokenizer names one'
      f' ({", ".join(special_tokens.FILES)}), so set rollout.stop_ids or'
      ' stop_strings; or False, if every answer is meant to go on to'
      ' max_new_tokens',
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
        0 <= stop < tokenizer.vocab_size and stop not in tokenizer.missing_ids,
        'config.rollout.stop_ids',
        stop,
        f"one of the tokenizer's {tokenizer.vocab_size} ids",
    )
  return SamplingParams(
      max_new_tokens=rollout.max_new_tokens,
      stop_ids=stops,
      stop_strings=rollout.stop_strings,
      seed=settings.seed,
      **choice,
  )
