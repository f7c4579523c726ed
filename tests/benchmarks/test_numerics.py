"""The gap between engine and trainer, on a random policy."""

import shutil

import jax
import pytest

from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf import save_hf
from benchmarks.numerics import measure


@pytest.mark.slow
def test_rounding_layers_to_bf16_widens_the_gap(data_dir, tmp_path):
  config = ModelConfig(
      vocab_size=49152,
      width=32,
      layers=2,
      heads=4,
      kv_heads=2,
      head_size=8,
      mlp_width=48,
  )
  params = parameters.init_params(config, 0, None, None)
  # Sharper than initial weights, of which every token is about as likely.
  params['embedding'] *= 20.0
  save_hf(tmp_path, config, jax.device_get(params))
  for file in (data_dir / 'tokenizers/smollm2').iterdir():
    shutil.copy(file, tmp_path)
  rows = measure(str(tmp_path), ['float32', 'bfloat16'], 2, 4)
  found = {row.row: row for row in rows}
  exact = found['engine float32, trainer float32: largest gap, nats']
  assert exact.met and exact.bar == '<= 0.0001'
  mean = lambda engine, trainer: found[
      f'engine {engine}, trainer {trainer}: mean gap, nats'
  ].value
  assert mean('float32', 'float32') < 1e-5
  assert mean('bfloat16', 'float32') > 10 * mean('float32', 'float32')
  assert mean('float32', 'bfloat16') > 10 * mean('float32', 'float32')
  assert found['engine bfloat16: tokens'].value >= 8
