"""A real pretrained policy learns, in short: the stories experiment.

The whole claim, three seeds with controls and a look at the English, is the
slow test of benchmarks/learning.py.
"""

import importlib.util

import pytest

from areal_jax import session
from areal_jax.telemetry.jsonl import read_jsonl
from tests.conftest import ROOT


def experiment(data_dir, folder, **changes):
  path = ROOT / 'experiments' / 'stories260k.py'
  spec = importlib.util.spec_from_file_location('stories260k', path)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  settings = module.get_config()
  model = data_dir / 'models' / 'stories260K'
  if not model.is_dir():
    pytest.skip(f'no model {model}')
  settings.policy.path = str(model / 'hf')
  settings.tokenizer.path = str(model / 'tok512.model')
  settings.output = str(folder)
  settings.steps = 8
  settings.evaluation.show = 0
  for name, value in changes.items():
    setattr(settings.train.optimizer, name, value)
  return settings


def test_stories_learn_to_speak_and_rate_zero_does_not(data_dir, tmp_path):
  learnt = session.run(experiment(data_dir, tmp_path)).summary
  still = session.run(experiment(data_dir, tmp_path, learning_rate=0.0)).summary
  assert still['eval_score_after'] < 0.2
  assert learnt['eval_score_after'] > still['eval_score_after'] + 0.3
  assert learnt['engine_trainer_logprob_gap_max'] < 1e-4
  kl = [
      row['kl_reference']
      for row in read_jsonl(tmp_path / 'stories260k' / 'metrics.jsonl')
      if 'kl_reference' in row
  ]
  assert kl[0] < 1e-3 and max(kl) < 1.0
