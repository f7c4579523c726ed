"""Adapters as folders in the layout of the PEFT library.

A folder has `adapter_config.json` and `adapter_model.safetensors`. Names follow
the table of `hf.py`: what it calls `<module>.weight` has
`base_model.model.<module>.lora_A.weight` [r, inputs] and `lora_B.weight`
[outputs, r] here. The base is not in it.
"""

from __future__ import annotations

import json
import math
import pathlib
from typing import Any, Iterator

import numpy as np
import safetensors
import safetensors.numpy

from areal_jax.config import ConfigError, fetching, require
from areal_jax.files import check_content, read_json
from areal_jax.mesh.host import require_whole
from areal_jax.models import hf, lora, published
from areal_jax.models.config import PROJECTIONS, LoraSettings, ModelConfig

CONFIG = 'adapter_config.json'
WEIGHTS = 'adapter_model.safetensors'

# What PEFT knows and we lack, with the values that ask for nothing.
_UNUSED: dict[str, tuple[Any, ...]] = {
    'bias': ('none', None),
    'modules_to_save': (None, []),
    'use_dora': (False, None),
    'rank_pattern': ({}, None),
    'alpha_pattern': ({}, None),
    'fan_in_fan_out': (False, None),
    'layers_to_transform': (None, []),
    'exclude_modules': (None, []),
    'trainable_token_indices': (None,),
    'target_parameters': (None, []),
}


def save_peft(
    folder: str | pathlib.Path,
    config: ModelConfig,
    params: dict[str, Any],
    *,
    base: str = '',
) -> None:
  """Writes the adapters of a policy.

  Args:
    folder: made if it is not there; files of these names are replaced.
    config: of the policy.
    params: of the policy, or its adapters alone.
    base: where readers find the base; empty if nowhere.

  Raises:
    ConfigError: the policy has no adapters.
  """
  names = config.lora.projections
  require(bool(names), 'lora.projections', names, 'some to be written')
  tensors = {}
  for projection, adapter in params['blocks'][lora.ADAPTERS].items():
    require_whole(adapter, f'the adapter of {projection}')
    a, b = np.asarray(adapter['a']), np.asarray(adapter['b'])
    rank = a.shape[-1]
    for layer in range(config.layers):
      name_a, name_b = _names(projection, layer)
      tensors[name_a] = np.ascontiguousarray(a[layer].reshape(-1, rank).T)
      tensors[name_b] = np.ascontiguousarray(b[layer].reshape(rank, -1).T)
  described = {
      'peft_type': 'LORA',
      'task_type': 'CAUSAL_LM',
      'base_model_name_or_path': base or None,
      'r': config.lora.rank,
      'lora_alpha': config.lora.alpha,
      'use_rslora': config.lora.rslora,
      'lora_dropout': 0.0,
      'target_modules': [_module(name).rpartition('.')[2] for name in names],
      'bias': 'none',
      'fan_in_fan_out': False,
      'inference_mode': True,
  }
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / CONFIG).write_text(json.dumps(described, indent=2) + '\n')
  safetensors.numpy.save_file(
      tensors, folder / WEIGHTS, metadata={'format': 'pt'}
  )


def read_settings(folder: str | pathlib.Path) -> LoraSettings:
  """Rank, scale and projections of the adapters in a folder.

  Raises:
    ConfigError: a file that is missing or not readable, or adapters of another
      kind.
  """
  path = pathlib.Path(folder) / CONFIG
  if not path.is_file():
    hint = fetching(str(folder))
    raise ConfigError(f'there is no file {path}{hint}')
  described = read_json(path)
  kind = described.get('peft_type')
  require(kind == 'LORA', f'{path}: peft_type', kind, "'LORA'")
  for name, idle in _UNUSED.items():
    value = described.get(name, idle[0])
    require(value in idle, f'{path}: {name}', value, f'{idle[0]!r}')
  known = {_module(name).rpartition('.')[2]: name for name in PROJECTIONS}
  modules = described.get('target_modules')
  right = isinstance(modules, list) and modules and set(modules) <= set(known)
  require(right, f'{path}: target_modules', modules, f'some of {list(known)}')
  rank, alpha = described.get('r'), described.get('lora_alpha')
  require(isinstance(rank, int), f'{path}: r', rank, 'a whole number')
  number = isinstance(alpha, (int, float))
  require(number, f'{path}: lora_alpha', alpha, 'a number')
  settings = LoraSettings(
      projections=tuple(n for m, n in known.items() if m in modules),
      rank=rank,
      alpha=float(alpha),
      rslora=bool(described.get('use_rslora')),
  )
  settings.validate(f'{path}: lora')
  return settings


def load_peft(
    folder: str | pathlib.Path, config: ModelConfig
) -> dict[str, Any]:
  """The adapters of a folder, for a policy with adapters of that kind.

  Args:
    folder: with both files.
    config: of the policy.

  Returns:
    {'blocks': {'adapters': {projection: {'a', 'b'}}}}, numpy arrays in float32.

  Raises:
    ConfigError: other adapters than `config.lora` says, or a tensor that is
      missing, left over, or of another shape.
  """
  folder = pathlib.Path(folder)
  found = read_settings(folder)
  for name in ('rank', 'alpha', 'rslora'):
    seen, wanted = getattr(config.lora, name), getattr(found, name)
    require(seen == wanted, f'lora.{name}', seen, f'{wanted} as in {folder}')
  names = config.lora.projections
  wanted = found.projections
  require(sorted(names) == sorted(wanted), 'lora.projections', names,
          f'{wanted} as in {folder}')  # fmt: skip
  path = folder / WEIGHTS
  if not path.is_file():
    raise ConfigError(f'there is no file {path}{published.instead(folder)}')
  check_content(path)
  try:
    tensors = safetensors.numpy.load_file(path)
  except safetensors.SafetensorError as error:
    raise ConfigError(f'{path} is not safetensors: {error}') from error
  adapters = {}
  for projection, shape_a, shape_b in lora.shapes(config):
    layers_a, layers_b = [], []
    for layer in range(config.layers):
      name_a, name_b = _names(projection, layer)
      layers_a.append(_take(tensors, path, name_a, shape_a))
      layers_b.append(_take(tensors, path, name_b, shape_b))
    adapters[projection] = {'a': np.stack(layers_a), 'b': np.stack(layers_b)}
  if tensors:
    some = ', '.join(sorted(tensors)[:4])
    raise ConfigError(
        f'{path} has {len(tensors)} tensors with no place in a policy of'
        f' {config.layers} layers: {some}'
    )
  return {'blocks': {lora.ADAPTERS: adapters}}


def _take(
    tensors: dict[str, np.ndarray],
    path: pathlib.Path,
    name: str,
    shape: tuple[int, ...],
) -> np.ndarray:
  """Takes one layer's part out of what was read; `shape` is ours."""
  if name not in tensors:
    raise ConfigError(f'{path} lacks tensor {name}')
  theirs = tensors.pop(name)
  if name.endswith('lora_A.weight'):
    wanted = shape[-1], math.prod(shape[:-1])
  else:
    wanted = math.prod(shape[1:]), shape[0]
  if theirs.shape != wanted:
    raise ConfigError(
        f'{path}: tensor {name} has shape {theirs.shape}, wanted {wanted}'
    )
  return theirs.astype(np.float32).T.reshape(shape)


def _names(projection: str, layer: int) -> Iterator[str]:
  """The published names of A and B of one layer."""
  module = _module(projection).format(layer=layer)
  return (f'base_model.model.{module}.lora_{x}.weight' for x in 'AB')


def _module(projection: str) -> str:
  """The published module of a projection, with {layer} in it."""
  (row,) = [row for row in hf.ROWS if row.path == ('blocks', projection)]
  return row.hf.removesuffix('.weight')
