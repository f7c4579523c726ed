"""Checks of settings that cannot work with one another."""

from __future__ import annotations

import typing

from areal_jax.config import require
from areal_jax.losses import presets
from areal_jax.rollout.workflow import SINGLE_TURN

if typing.TYPE_CHECKING:
  from areal_jax.settings.experiment import Experiment


def check_algorithm(settings: Experiment, at: str) -> None:
  """Refuses parts of an algorithm that cannot work with one another.

  Raises:
    ConfigError: names the field, its value and the value wanted.
  """
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
  require(
      advantages.turn_discount == 1 or rollout.workflow != SINGLE_TURN,
      f'{at}.train.advantages.turn_discount',
      advantages.turn_discount,
      f'1 with rollout.workflow={rollout.workflow!r}: an answer of one turn has'
      ' nothing to discount',
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
