"""The whole tree of settings of a run, and the checks that span rooms.

An experiment file returns an `Experiment` from `get_config()`, and flags change
its fields. `prepare/` then resolves the tree and opens what it names.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

from areal_jax import config as config_lib
from areal_jax.config import require
from areal_jax.mesh.slices import MeshSettings
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.rollout.failures import FailureSettings
from areal_jax.settings.checks import check_algorithm
from areal_jax.settings.rollout import RolloutSettings
from areal_jax.settings.task import (
    PolicySettings,
    TaskSettings,
    TokenizerSettings,
)
from areal_jax.telemetry.profiling import ProfilingSettings
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.supervised import WarmStartSettings


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
    metrics_sink: 'package.module:function' that builds where each row of
      metrics goes besides the files of the run, see docs/extend.md; empty for
      nowhere. A replay writes its files alone.
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
  metrics_sink: str = ''
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
    check_algorithm(self, at)
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
    """Returns whether training and engines use the same memory in turn.

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
