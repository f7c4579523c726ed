"""Schedules and AdamW against the authors' trainer (transformers, torch)."""

import json

import jax
import numpy as np
import optax
import pytest

from areal_jax.train.optimizer import (
    OptimizerSettings,
    learning_rate,
    make_optimizer,
)


@pytest.fixture(scope='module')
def golden(golden_dir):
  index = json.loads((golden_dir / 'index.json').read_text())
  data = np.load(golden_dir / 'areal/optim.npz')
  cases = {
      case['case']: case
      for case in index['cases']
      if case.get('file') == 'areal/optim.npz'
  }
  return cases, data


def test_schedules_equal_the_authors(golden):
  """Up to the end of training, where ours rests and their cosine rises again.

  Ours warms up from 0 and theirs from the final fraction: with one, only what
  follows the warm-up is compared.
  """
  cases, data = golden
  compared = 0
  for name, case in cases.items():
    args = case['args']
    if 'num_warmup_steps' in args:
      schedule, warmup = 'cosine', args['num_warmup_steps']
      total, final = args['num_training_steps'], args['min_lr_ratio']
    elif 'positional' in args:
      schedule, final = name, 0.0
      warmup, total = (args['positional'] + [10**6])[:2]
    else:
      continue
    settings = OptimizerSettings(
        learning_rate=args['lr'],
        schedule=schedule,
        warmup_steps=warmup,
        total_steps=total,
        final_fraction=final,
    )
    rates = data[f'{name}/out/lr'][: total + 1]
    first = warmup if final else 0
    ours = [learning_rate(settings, s) for s in range(first, len(rates))]
    np.testing.assert_allclose(ours, rates[first:], atol=1e-9, err_msg=name)
    compared += 1
  assert compared == 5


def test_adamw_with_clipping_equals_torch(golden):
  cases, data = golden
  names = [n for n, c in cases.items() if 'AdamW' in c['function']]
  assert names
  for name in names:
    args = cases[name]['args']
    optimizer = make_optimizer(
        OptimizerSettings(
            learning_rate=args['lr'],
            beta1=args['betas'][0],
            beta2=args['betas'][1],
            epsilon=args['eps'],
            weight_decay=args['weight_decay'],
            gradient_clip=args['gradient_clipping'],
        )
    )
    params = [data[f'{name}/in/param{i}_0'] for i in (0, 1)]
    state = optimizer.init(params)

    @jax.jit
    def update(gradients, state, params, optimizer=optimizer):
      changes, state = optimizer.update(gradients, state, params)
      return optax.apply_updates(params, changes), state

    step = 0
    while f'{name}/in/grad0_{step}' in data:
      gradients = [data[f'{name}/in/grad{i}_{step}'] for i in (0, 1)]
      params, state = update(gradients, state, params)
      step += 1
      for i in (0, 1):
        key = f'{name}/out/param{i}_{step}'
        if key in data:
          np.testing.assert_allclose(params[i], data[key], rtol=1e-5, atol=1e-6)
    assert step >= 3
