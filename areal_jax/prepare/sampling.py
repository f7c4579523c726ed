"""How answers of training and evaluation are sampled."""

from __future__ import annotations

from typing import Any

from areal_jax.config import ConfigError, require
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer import special_tokens
from areal_jax.tokenizer.base import Tokenizer
from areal_jax.types import SamplingParams


def evaluation_sampling(
    settings: Experiment, tokenizer: Tokenizer
) -> SamplingParams:
  """Returns the sampling of evaluation; refuses what the engine lacks."""
  asked, features = settings.evaluation, settings.rollout.engine.sampling
  limit = settings.rollout.max_new_tokens
  require(
      asked.min_new_tokens <= limit,
      'config.evaluation.min_new_tokens',
      asked.min_new_tokens,
      f'at most rollout.max_new_tokens={limit}',
  )
  sampling = sampling_params(settings, tokenizer, **asked.sampling)
  refusal = features.refusal(sampling, tokenizer.vocab_size)
  if refusal:
    raise ConfigError(f'config.evaluation: {refusal}')
  return sampling


def sampling_params(
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
