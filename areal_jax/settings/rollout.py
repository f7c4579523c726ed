"""Settings of generation, and of how far it may run ahead of training."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from areal_jax.buffer import StalenessPolicy
from areal_jax.config import require
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.loop import SwapMode
from areal_jax.rollout.workflow import SINGLE_TURN, load_workflow


@dataclasses.dataclass
class RolloutSettings:
  """Settings of generation, and of how far it may run ahead of training.

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
    workflow: 'package.module:function' that builds what turns a draw into a
      scored answer, see `rollout/workflow.py` and docs/extend.md. The default
      asks once.
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
  workflow: str = SINGLE_TURN
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

  def check(self, at: str) -> None:
    """Imports the workflow.

    Apart from `validate`, so that a config can be read where the workflow's
    libraries are not installed.

    Raises:
      ConfigError: see `load_workflow`.
    """
    load_workflow(self.workflow, f'{at}.workflow')

  @property
  def synchronous(self) -> bool:
    """Returns whether each trained token is of its step's first version.

    That is what eta = 0 means for an algorithm.
    """
    return self.eta == 0

  @property
  def takes_turns(self) -> bool:
    """Returns whether nothing is generated while training goes on.

    That is what eta = 0 means for the devices.
    """
    return self.eta == 0

  @property
  def group_limit_s(self) -> float:
    """Seconds of `group_s`, worked out where it is 0."""
    return self.group_s or self.wait_s / 2
