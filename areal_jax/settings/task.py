"""Settings of the task, the tokenizer and the policy to start from."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

from areal_jax.config import require
from areal_jax.data.sources import SourceSettings
from areal_jax.models.config import ModelConfig


@dataclasses.dataclass
class TaskSettings:
  """Settings of the problems, tokenizer texts and demonstrations.

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
