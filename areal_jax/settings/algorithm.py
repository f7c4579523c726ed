"""Presets of algorithms in the settings."""

from __future__ import annotations

from typing import Any

from areal_jax import config as config_lib
from areal_jax.config import require
from areal_jax.losses import presets
from areal_jax.settings.experiment import Experiment
from areal_jax.settings.rollout import RolloutSettings


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
  """Lists how the settings differ from the preset that they name.

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
