"""Preference pairs on the quickstart's task: DPO, and a reward model.

  python -m experiments.preferences --loss=dpo
  python -m experiments.preferences --loss=reward_model

The preferred answer to a sum writes every running total ('3+5+7=' -> '8;15.'),
the other one stops one total too early. A policy that imitated both for a while
learns to prefer the whole ones (DPO), or the same trunk with another head
learns to tell them apart. Prints the loss, and the share of held-out pairs that
come out right. Nothing is downloaded.
"""

from __future__ import annotations

import dataclasses
import pathlib
import tempfile
from typing import Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax.config import resolve
from areal_jax.data import running_totals
from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut, machine_devices
from areal_jax.models import heads, parameters, transformer
from areal_jax.tokenizer.files import open_tokenizer
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from areal_jax.train import packing, preferences
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.preferences import Pair, PreferenceSettings
from areal_jax.train.supervised import supervised_warm_start
from experiments import quickstart

_LOSS = flags.DEFINE_enum(
    'loss', 'dpo', ['dpo', 'ipo', 'reward_model'], 'What is minimised.'
)
_STEPS = flags.DEFINE_integer('steps', 60, 'Updates.')
_IMITATED = flags.DEFINE_integer('imitated', 300, 'Updates of the warm start.')


def make_pairs(count: int, encode) -> list[Pair]:
  """Whole and short answers to sums of three numbers or more."""
  found = []
  for prompt, answer in running_totals.demonstrations(2 * count, seed=0):
    whole = answer.rstrip('.').split(';')
    if len(whole) > 1:
      short = ';'.join(whole[:-1]) + '.'
      found.append((encode(prompt), encode(answer), encode(short)))
  return found[:count]


def share_right(config, params, pairs: Sequence[Pair], loss: str) -> float:
  """Share of pairs whose preferred answer has the higher score."""
  right = []
  for m in packing.pack_pairs(pairs, PackingSettings(row_tokens=96, rows=14)):
    rows = (m.ids, m.positions, m.segment_ids)
    if loss == 'reward_model':
      said, mask = heads.scores(config, params, *rows), m.segment_ids
    else:
      logits = transformer.forward(config, params, *rows)
      said, mask = (
          logprobs.token_logps(logits, m.ids, m.segment_ids, m.temperatures)[0],
          m.loss_mask,
      )
    chosen, rejected, there = preferences.by_pair(said, mask, m.segment_ids)
    right.append(np.asarray(chosen > rejected)[np.asarray(there) > 0])
  return float(np.mean(np.concatenate(right)))


def main(argv: Sequence[str]) -> None:
  """Imitates, then learns from pairs."""
  del argv
  settings = quickstart.get_config()
  mesh, rules = (
      cut(machine_devices(settings.mesh), settings.mesh).train,
      Rules(),
  )
  with tempfile.TemporaryDirectory() as folder:
    tokenizer = open_tokenizer(
        train_sentencepiece(
            running_totals.texts(),
            pathlib.Path(folder) / 't.model',
            kind='char',
        )
    ).tokenizer
  config = resolve(
      dataclasses.replace(
          settings.policy.model, vocab_size=tokenizer.vocab_size
      )
  )
  examples = [
      (tokenizer.encode(prompt), tokenizer.encode(answer))
      for prompt, answer in running_totals.habitual(20_000, seed=0)
  ]
  start = dataclasses.replace(settings.warm_start, steps=_IMITATED.value)
  params = supervised_warm_start(
      config,
      parameters.init_params(config, settings.seed, mesh, rules),
      examples,
      start,
      mesh,
      rules,
  )
  pairs = make_pairs(2_000, tokenizer.encode)
  pairs, held_out = pairs[:-256], pairs[-256:]
  asked = PreferenceSettings(
      kind='ipo' if _LOSS.value == 'ipo' else 'sigmoid',
      steps=_STEPS.value,
      batch=32,
      packing=PackingSettings(row_tokens=96, rows=14),
      optimizer=OptimizerSettings(learning_rate=3e-4, weight_decay=0.0),
  )
  learn = preferences.train_preferences
  if _LOSS.value == 'reward_model':
    learn = preferences.train_reward_model
    params = heads.with_head(
        config, 'reward', params, settings.seed, mesh, rules
    )
  before = share_right(config, params, held_out, _LOSS.value)
  params = learn(
      config,
      params,
      pairs,
      asked,
      mesh,
      rules,
      lambda done, loss: print(f'{done}: loss {loss:.3f}', flush=True),
  )
  after = share_right(config, jax.device_get(params), held_out, _LOSS.value)
  print(f'preferred answers ahead: {before:.3f} -> {after:.3f}')


if __name__ == '__main__':
  app.run(main)
