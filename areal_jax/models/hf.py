"""Checkpoints in the Hugging Face layout, read and written by one table.

In goes a folder with `config.json` and safetensors files (one, or several with
an index); out come the settings and the parameters, float32 and on their
devices. The table `ROWS` pairs each published tensor name with our parameter,
and is read from left to right by `load_hf` and from right to left by `save_hf`.
Tokenizers are left to `areal_jax.tokenizer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
import re
from typing import Any, Mapping

import jax
import numpy as np
import safetensors
import safetensors.numpy

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.models import transformer
from areal_jax.models.config import ModelConfig, config_from_hf, config_to_hf

Params = dict[str, Any]

_CONFIG = 'config.json'
_INDEX = 'model.safetensors.index.json'
_WEIGHTS = 'model.safetensors'
_DTYPES = ('F32', 'BF16', 'F16')  # as the headers of safetensors name them
# Tables that old checkpoints store; they follow from the settings.
_IGNORED = re.compile(r'\.rotary_emb\.inv_freq$')


@dataclasses.dataclass(frozen=True)
class Row:
  """A published tensor and ours.

  `inputs` is the number of our axes that a matrix sums over. Published ones
  are [outputs, inputs], ours have the inputs first and heads as an axis of
  their own. None keeps the order of axes.
  """

  hf: str  # with {layer} where there is one a layer
  path: tuple[str, ...]
  inputs: int | None = None

  def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The published shape of one layer's tensor of ours."""
    if self.inputs is not None:
      split = self.inputs
      return math.prod(shape[split:]), math.prod(shape[:split])
    # A bias of heads is flat there; the embedding has two axes in both.
    return shape if self.path == ('embedding',) else (math.prod(shape),)

  def read(self, theirs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    theirs = theirs if self.inputs is None else theirs.T
    return theirs.reshape(shape)

  def write(self, ours: np.ndarray) -> np.ndarray:
    shape = self.hf_shape(ours.shape)
    if self.inputs is None:
      return ours.reshape(shape)
    return np.ascontiguousarray(ours.reshape(shape[::-1]).T)


_L = 'model.layers.{layer}.'
ROWS = (
    Row('model.embed_tokens.weight', ('embedding',)),
    Row(_L + 'input_layernorm.weight', ('blocks', 'attention_norm')),
    Row(_L + 'self_attn.q_proj.weight', ('blocks', 'query'), 1),
    Row(_L + 'self_attn.k_proj.weight', ('blocks', 'key'), 1),
    Row(_L + 'self_attn.v_proj.weight', ('blocks', 'value'), 1),
    Row(_L + 'self_attn.o_proj.weight', ('blocks', 'out'), 2),
    Row(_L + 'self_attn.q_proj.bias', ('blocks', 'query_bias')),
    Row(_L + 'self_attn.k_proj.bias', ('blocks', 'key_bias')),
    Row(_L + 'self_attn.v_proj.bias', ('blocks', 'value_bias')),
    Row(_L + 'self_attn.q_norm.weight', ('blocks', 'query_norm')),
    Row(_L + 'self_attn.k_norm.weight', ('blocks', 'key_norm')),
    Row(_L + 'post_attention_layernorm.weight', ('blocks', 'mlp_norm')),
    Row(_L + 'mlp.gate_proj.weight', ('blocks', 'gate'), 1),
    Row(_L + 'mlp.up_proj.weight', ('blocks', 'up'), 1),
    Row(_L + 'mlp.down_proj.weight', ('blocks', 'down'), 1),
    Row('model.norm.weight', ('final_norm',)),
    Row('lm_head.weight', ('unembedding',), 1),
)


def load_hf(
    folder: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
    *,
    overrides: Mapping[str, Any] | None = None,
) -> tuple[ModelConfig, Params]:
  """Reads a checkpoint folder.

  Args:
    folder: with `config.json` and safetensors in float32, bfloat16 or float16.
    mesh: where the parameters go; None for the default device.
    rules: how they lie there.
    overrides: fields of `ModelConfig` to set after reading, such as
      `vocab_multiple`, `layer_loop` or `compute_dtype`.

  Returns:
    The resolved settings, and the parameters in float32.

  Raises:
    ConfigError: a file that is missing or not readable; a setting this model
      lacks; a tensor that is missing, left over, or of another shape.
  """
  folder = pathlib.Path(folder)
  config = _load_config(folder, overrides or {})
  # The published vocabulary has no padding.
  plain = dataclasses.replace(config, vocab_multiple=1)
  shapes = transformer.abstract_params(plain)
  axes = transformer.logical_axes(config)
  shardings = None
  if mesh is not None:
    shardings = transformer.param_shardings(config, mesh, rules)
  rows = _rows(shapes)
  params: Params = {}
  with contextlib.ExitStack() as stack:
    tensors = _open_tensors(folder, stack)
    _check_names(folder, config, tensors, rows)
    for row in rows:
      shape = _at(shapes, row.path).shape
      ours = _read_row(folder, tensors, row, shape)
      ours = _pad_vocab(ours, _at(axes, row.path), config)
      where = None if shardings is None else _at(shardings, row.path)
      _put(params, row.path, jax.device_put(ours, where))
  return config, params


def load_params(
    folder: str | pathlib.Path,
    config: ModelConfig,
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
) -> Params:
  """The parameters of a checkpoint, for a policy that runs as `config` says.

  Raises:
    ConfigError: whatever `load_hf` refuses.
  """
  overrides = {
      name: getattr(config, name)
      for name in ('vocab_multiple', 'layer_loop', 'compute_dtype', 'remat')
  }
  return load_hf(folder, mesh, rules, overrides=overrides)[1]


def load_matching(
    folder: str | pathlib.Path, config: ModelConfig, params: Params
) -> tuple[Params, tuple[str, ...]]:
  """Takes from a checkpoint what fits, and leaves the rest as it is.

  A parameter fits if the folder has tensors of its name, shape and number of
  layers, of whatever policy they are.

  Args:
    folder: with safetensors.
    config: of the policy that they go into.
    params: its parameters, where they belong.

  Returns:
    Those parameters with some replaced, and the names of those that were left,
    such as 'blocks/query'.

  Raises:
    ConfigError: a file that is missing or not readable.
  """
  folder = pathlib.Path(folder)
  shapes = transformer.abstract_params(
      dataclasses.replace(config, vocab_multiple=1)
  )
  axes = transformer.logical_axes(config)
  taken = jax.tree.map(lambda leaf: leaf, params)
  left = []
  with contextlib.ExitStack() as stack:
    tensors = _open_tensors(folder, stack)
    for row in _rows(params):
      shape = _at(shapes, row.path).shape
      if not _fits(tensors, row, shape):
        left.append('/'.join(row.path))
        continue
      ours = _read_row(folder, tensors, row, shape)
      ours = _pad_vocab(ours, _at(axes, row.path), config)
      where = _at(params, row.path).sharding
      _put(taken, row.path, jax.device_put(ours, where))
  return taken, tuple(left)


def check_hf(folder: str | pathlib.Path) -> None:
  """Reads the headers of a checkpoint folder alone, and no device.

  Raises:
    ConfigError: whatever `load_hf` would refuse.
  """
  folder = pathlib.Path(folder)
  config = _load_config(folder, {})
  shapes = transformer.abstract_params(config)
  rows = _rows(shapes)
  with contextlib.ExitStack() as stack:
    tensors = _open_tensors(folder, stack)
    _check_names(folder, config, tensors, rows)
    for row in rows:
      shape = _at(shapes, row.path).shape
      layered = '{layer}' in row.hf
      for layer in range(shape[0] if layered else 1):
        name = row.hf.format(layer=layer)
        _check_tensor(
            folder, tensors, name, row.hf_shape(shape[1:] if layered else shape)
        )


def save_hf(
    folder: str | pathlib.Path, config: ModelConfig, params: Params
) -> None:
  """Writes `config.json` and `model.safetensors`, in the parameters' dtype.

  Args:
    folder: made if it is not there; files of these names are replaced.
    config: of the policy.
    params: of the policy, every part addressable from this process.

  Raises:
    ConfigError: no family of published checkpoints has these settings.
  """
  folder = pathlib.Path(folder)
  described = config_to_hf(config)
  described['torch_dtype'] = str(params['embedding'].dtype)
  axes = transformer.logical_axes(config)
  tensors = {}
  for row in _rows(params):
    ours = np.asarray(_at(params, row.path))
    ours = _cut_vocab(ours, _at(axes, row.path), config)
    if '{layer}' in row.hf:
      for layer, part in enumerate(ours):
        tensors[row.hf.format(layer=layer)] = row.write(part)
    else:
      tensors[row.hf] = row.write(ours)
  folder.mkdir(parents=True, exist_ok=True)
  (folder / _CONFIG).write_text(json.dumps(described, indent=2) + '\n')
  # Readers of the Hugging Face libraries ask which framework wrote it.
  safetensors.numpy.save_file(
      tensors, folder / _WEIGHTS, metadata={'format': 'pt'}
  )


# Helpers.


def _load_config(
    folder: pathlib.Path, overrides: Mapping[str, Any]
) -> ModelConfig:
  hf = _read_json(folder / _CONFIG)
  config = config_from_hf(hf, str(folder / _CONFIG))
  known = [f.name for f in dataclasses.fields(ModelConfig)]
  for name in overrides:
    if name not in known:
      raise ConfigError(f'overrides has {name!r}, wanted one of {known}')
  return resolve(dataclasses.replace(config, **overrides), str(folder))


def _read_json(path: pathlib.Path) -> dict[str, Any]:
  if not path.is_file():
    raise ConfigError(f'there is no file {path}')
  try:
    return json.loads(path.read_text())
  except json.JSONDecodeError as error:
    raise ConfigError(f'{path} is not JSON: {error}') from error


def _open_tensors(
    folder: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, Any]:
  """Every tensor name of the folder with the open file that has it."""
  if (folder / _INDEX).is_file():
    names = sorted(set(_read_json(folder / _INDEX)['weight_map'].values()))
  else:
    names = [_WEIGHTS]
  tensors = {}
  for name in names:
    path = folder / name
    if not path.is_file():
      raise ConfigError(f'there is no file {path}')
    try:
      file = stack.enter_context(safetensors.safe_open(path, 'numpy'))
    except safetensors.SafetensorError as error:
      raise ConfigError(f'{path} is not safetensors: {error}') from error
    tensors.update(dict.fromkeys(file.keys(), file))
  return tensors


def _check_names(
    folder: pathlib.Path,
    config: ModelConfig,
    tensors: Mapping[str, Any],
    rows: list[Row],
) -> None:
  """Raises if the folder lacks a tensor, or has one that has no place."""
  layers = range(config.layers)
  wanted = {row.hf.format(layer=layer) for row in rows for layer in layers}
  missing = sorted(wanted - set(tensors))
  if missing:
    raise ConfigError(f'{folder} lacks {len(missing)} tensors: {_few(missing)}')
  extra = sorted(n for n in set(tensors) - wanted if _IGNORED.search(n) is None)
  # Some writers store the tied matrix twice; two different ones are not tied.
  head = 'lm_head.weight'
  if config.tied_embeddings and head in extra:
    tied = [tensors[n].get_tensor(n) for n in (head, ROWS[0].hf)]
    if np.array_equal(*tied):
      extra.remove(head)
  if extra:
    raise ConfigError(
        f'{folder} has {len(extra)} tensors with no place in a policy of'
        f' {config.layers} layers, tied_embeddings {config.tied_embeddings},'
        f' qkv_bias {config.qkv_bias}, qk_norm {config.qk_norm}: {_few(extra)}'
    )


def _few(names: list[str]) -> str:
  return ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')


def _read_row(
    folder: pathlib.Path,
    tensors: Mapping[str, Any],
    row: Row,
    shape: tuple[int, ...],
) -> np.ndarray:
  """One parameter in float32, its layers stacked."""
  if '{layer}' not in row.hf:
    return _read_tensor(folder, tensors, row, row.hf, shape)
  ours = np.empty(shape, np.float32)
  for layer in range(shape[0]):
    name = row.hf.format(layer=layer)
    ours[layer] = _read_tensor(folder, tensors, row, name, shape[1:])
  return ours


def _read_tensor(
    folder: pathlib.Path,
    tensors: Mapping[str, Any],
    row: Row,
    name: str,
    shape: tuple[int, ...],
) -> np.ndarray:
  _check_tensor(folder, tensors, name, row.hf_shape(shape))
  theirs = tensors[name].get_tensor(name)
  return row.read(theirs.astype(np.float32), shape)


def _fits(
    tensors: Mapping[str, Any], row: Row, shape: tuple[int, ...]
) -> bool:
  """Whether the published tensors of a row make up a parameter like this."""
  names, inner = [row.hf], shape
  if '{layer}' in row.hf:
    if row.hf.format(layer=shape[0]) in tensors:
      return False  # there are more layers
    names = [row.hf.format(layer=layer) for layer in range(shape[0])]
    inner = shape[1:]
  wanted = row.hf_shape(inner)
  headers = [tensors[n].get_slice(n) if n in tensors else None for n in names]
  return all(
      h is not None
      and tuple(h.get_shape()) == wanted
      and h.get_dtype() in _DTYPES
      for h in headers
  )


def _check_tensor(
    folder: pathlib.Path,
    tensors: Mapping[str, Any],
    name: str,
    wanted: tuple[int, ...],
) -> None:
  """Raises if the header says another shape, or a type that is not read."""
  header = tensors[name].get_slice(name)
  shape, kind = tuple(header.get_shape()), header.get_dtype()
  if shape != wanted:
    raise ConfigError(
        f'{folder}: tensor {name} has shape {shape}, wanted {wanted} by'
        f' {_CONFIG}'
    )
  if kind not in _DTYPES:
    raise ConfigError(
        f'{folder}: tensor {name} is {kind}, wanted float32 (F32), bfloat16'
        ' (BF16) or float16 (F16)'
    )


def _rows(params: Params) -> list[Row]:
  """The rows of the table that this policy has parameters for."""
  blocks = params['blocks']
  return [
      row
      for row in ROWS
      if row.path[-1] in (blocks if row.path[0] == 'blocks' else params)
  ]


def _at(tree: Params, path: tuple[str, ...]) -> Any:
  for name in path:
    tree = tree[name]
  return tree


def _put(tree: Params, path: tuple[str, ...], leaf: Any) -> None:
  for name in path[:-1]:
    tree = tree.setdefault(name, {})
  tree[path[-1]] = leaf


def _pad_vocab(
    array: np.ndarray, axes: tuple[str, ...], config: ModelConfig
) -> np.ndarray:
  """Adds the padded ids, with zeros for weights."""
  more = config.padded_vocab_size - config.vocab_size
  return np.pad(array, [(0, more if a == 'vocab' else 0) for a in axes])


def _cut_vocab(
    array: np.ndarray, axes: tuple[str, ...], config: ModelConfig
) -> np.ndarray:
  """Removes the padded ids."""
  keep = tuple(
      slice(config.vocab_size) if a == 'vocab' else slice(None) for a in axes
  )
  return array[keep]
