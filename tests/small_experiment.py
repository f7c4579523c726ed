"""A whole experiment that is right and small, for tests that vary one thing."""

import os
from typing import Any

from areal_jax.models.config import ModelConfig
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.settings.experiment import Experiment
from areal_jax.settings.rollout import RolloutSettings
from areal_jax.settings.task import PolicySettings, TaskSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.supervised import WarmStartSettings


def experiment(output: str | os.PathLike, **changes: Any) -> Experiment:
  """Settings of a run of one step; `changes` by dotted name, '.' as '__'."""
  settings = Experiment(
      name='small',
      output=str(output),
      steps=1,
      task=TaskSettings(
          train_problems=8,
          eval_problems=4,
          texts='areal_jax.data.running_totals:texts',
          demonstration_count=8,
      ),
      policy=PolicySettings(
          model=ModelConfig(
              width=32,
              layers=1,
              heads=4,
              kv_heads=2,
              head_size=8,
              mlp_width=48,
              max_length=64,
          )
      ),
      warm_start=WarmStartSettings(
          steps=0,
          batch=4,
          warmup_steps=0,
          packing=PackingSettings(row_tokens=32, rows=4),
      ),
      rollout=RolloutSettings(
          batch_size=4,
          group_size=2,
          max_new_tokens=16,
          engine=EngineSettings(
              slots=4,
              max_length=32,
              max_prompt_length=16,
              page_size=16,
              steps=2,
          ),
      ),
      # Short rewards, which a busy machine may hold up.
      reward=RewardSettings(
          'areal_jax.rewards.running_totals:exact', timeout_s=60.0
      ),
      train=TrainSettings(packing=PackingSettings(row_tokens=32, rows=4)),
  )
  for name, value in changes.items():
    change(settings, name.replace('__', '.'), value)
  return settings


def change(settings: Any, path: str, value: Any) -> None:
  """Assigns to the field that a dotted name names."""
  *above, last = path.split('.')
  for name in above:
    settings = getattr(settings, name)
  setattr(settings, last, value)
