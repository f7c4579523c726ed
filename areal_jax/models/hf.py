"""Checkpoints in the Hugging Face layout, read and written by one table.

In goes a folder with `config.json` and safetensors files (one, or several with
an index); out come the settings and the parameters, on their devices. The table
`ROWS` pairs each published tensor name with our parameter, and is read from
left to right by `load_hf` and from right to left by `save_hf`.

Neither holds a whole policy in host memory. Reading, each device's part of a
parameter is cut out of the files by itself and is gone from the host before the
next; writing, one parameter is fetched at a time. Tokenizers are left to
`areal_jax.tokenizer`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import pathlib
import re
from typing import Any, Mapping

import jax
import numpy as np
import safetensors

from areal_jax.config import ConfigError, require, resolve
from areal_jax.files import check_content, read_json
from areal_jax.mesh.host import require_whole
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, parameters, published
from areal_jax.models.config import ModelConfig
from areal_jax.models.families import FAMILIES
from areal_jax.models.hf_config import config_from_hf, config_to_hf

Params = dict[str, Any]

_CONFIG = published.CONFIG
# Bytes that are read at once, so that a tensor need not be there twice.
_CHUNK = 1 << 20
# Tables that old checkpoints store; they follow from the settings.
_IGNORED = re.compile(r'\.rotary_emb\.inv_freq$')


@dataclasses.dataclass(frozen=True)
class Row:
  """A published tensor and ours.

  Where the name has a {layer}, published tensors are stacked along our first
  axis, one for each layer that has it; where it has an {expert}, along our
  second one too. What follows is of the axes behind them.

  `inputs` is the number of our axes that a matrix sums over. Published ones
  are [outputs, inputs], ours have the inputs first and heads as an axis of
  their own. None keeps the order of axes.
  """

  hf: str  # the first one's, where families differ
  path: tuple[str, ...]
  inputs: int | None = None

  def groups(self, rank: int) -> tuple[tuple[int, ...], ...]:
    """Our axes, of one tensor, behind each of the published ones."""
    axes = tuple(range(rank))
    if self.inputs is not None:
      return axes[self.inputs :], axes[: self.inputs]
    # A bias of heads is flat there; the embedding has two axes in both.
    return ((0,), (1,)) if self.path == ('embedding',) else (axes,)

  def hf_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The published shape of one tensor of ours."""
    groups = self.groups(len(shape))
    return tuple(math.prod(shape[a] for a in group) for group in groups)

  def write(self, ours: np.ndarray) -> np.ndarray:
    """Converts one parameter to its published tensors."""
    order = [a for group in self.groups(ours.ndim) for a in group]
    return ours.transpose(order).reshape(self.hf_shape(ours.shape))


_L = 'model.layers.{layer}.'
_E = _L + 'mlp.experts.{expert}.'
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
    # Families with the norm after attention have another name for the next.
    Row(
        _L + 'post_attention_layernorm.weight',
        ('blocks', 'attention_post_norm'),
    ),
    Row(_L + 'post_attention_layernorm.weight', ('blocks', 'mlp_norm')),
    Row(_L + 'mlp.gate_proj.weight', ('blocks', 'gate'), 1),
    Row(_L + 'mlp.up_proj.weight', ('blocks', 'up'), 1),
    Row(_L + 'mlp.down_proj.weight', ('blocks', 'down'), 1),
    Row(_L + 'mlp.gate.weight', ('blocks', 'router'), 1),
    Row(_E + 'gate_proj.weight', ('blocks', 'expert_gate'), 1),
    Row(_E + 'up_proj.weight', ('blocks', 'expert_up'), 1),
    Row(_E + 'down_proj.weight', ('blocks', 'expert_down'), 1),
    Row(_L + 'post_feedforward_layernorm.weight', ('blocks', 'mlp_post_norm')),
    Row('model.norm.weight', ('final_norm',)),
    Row('lm_head.weight', ('unembedding',), 1),
    # Heads in its place: of TRL's critics, and of transformers' classifiers.
    Row('v_head.summary.weight', ('value_head',), 1),
    Row('v_head.summary.bias', ('value_head_bias',)),
    Row('score.weight', ('reward_head',), 1),
)
_NO_HEAD = 'lm_head.weight'


def load_hf(
    folder: str | pathlib.Path,
    mesh: jax.sharding.Mesh | None,
    rules: Rules | None,
    *,
    overrides: Mapping[str, Any] | None = None,
    dtype: str = 'float32',
    head: heads.HeadKind | None = None,
) -> tuple[ModelConfig, Params]:
  """Reads a checkpoint folder.

  Args:
    folder: with `config.json` and safetensors in float32, bfloat16 or float16.
    mesh: where the parameters go; None for the default device.
    rules: how they lie there.
    overrides: fields of `ModelConfig` to set after reading, such as
      `vocab_multiple`, `layer_loop` or `compute_dtype`.
    dtype: of the parameters, whatever that of the files.
    head: that of a critic or a reward model, which has it in place of an
      unembedding; None for a policy.

  Returns:
    The resolved settings, and the parameters.

  Raises:
    ConfigError: a file that is missing or not readable; a setting this model
      lacks; a tensor that is missing, left over, or of another shape.
  """
  folder = pathlib.Path(folder)
  config = _load_config(folder, overrides or {})
  shapes, shardings = _shapes(config, head), None
  if mesh is not None and head is None:
    shardings = parameters.param_shardings(config, mesh, rules)
  elif mesh is not None:
    shardings = heads.param_shardings(config, head, mesh, rules)
  params: Params = {}
  with contextlib.ExitStack() as stack:
    source = _Source(folder, config, stack, head)
    rows = _rows(config, shapes)
    _check_names(source, config, rows, head)
    for row in rows:
      where = None if shardings is None else _at(shardings, row.path)
      shape = _at(shapes, row.path).shape
      _put(params, row.path, source.load(row, shape, where, dtype))
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
  taken = jax.tree.map(lambda leaf: leaf, params)
  left = []
  with contextlib.ExitStack() as stack:
    source = _Source(pathlib.Path(folder), config, stack)
    for row in _rows(config, params):
      leaf = _at(params, row.path)
      if source.fits(row):
        leaf = source.load(row, leaf.shape, leaf.sharding, leaf.dtype)
        _put(taken, row.path, leaf)
      else:
        left.append('/'.join(row.path))
  return taken, tuple(left)


def check_hf(folder: str | pathlib.Path) -> None:
  """Reads the headers of a checkpoint folder alone, and no device.

  Raises:
    ConfigError: whatever `load_hf` would refuse.
  """
  folder = pathlib.Path(folder)
  config = _load_config(folder, {})
  with contextlib.ExitStack() as stack:
    source = _Source(folder, config, stack)
    rows = _rows(config, source.shapes)
    _check_names(source, config, rows)
    for row in rows:
      source.check(row)


def save_hf(
    folder: str | pathlib.Path,
    config: ModelConfig,
    params: Params,
    *,
    dtype: str | None = None,
    limit: int = published.LIMIT,
    files: Mapping[str, bytes] | None = None,
    more: Mapping[str, Any] | None = None,
    head: heads.HeadKind | None = None,
) -> None:
  """Writes `config.json` and safetensors, one file or several with an index.

  Args:
    folder: made if it is not there; weights that it had are replaced.
    config: of the policy.
    params: of the policy, every part addressable from this process.
    dtype: of the tensors; None for that of each parameter.
    limit: bytes of tensors in one file, if there is more than one in it.
    files: others that go along, such as those of its tokenizer.
    more: fields of `config.json` that are none of the policy's, such as
      `eos_token_id`.
    head: that of a critic or a reward model; None for a policy.

  Raises:
    ConfigError: no family of published checkpoints has these settings, or a
      dtype is none that is published.
  """
  plain = _shapes(_unpadded(config), head)
  rows = _rows(config, plain)
  shapes = []
  for row, name, place in _in_order(config, rows):
    sizes = row.hf_shape(_at(plain, row.path).shape[len(place) :])
    kind = np.dtype(dtype or _at(params, row.path).dtype)
    shapes.append(published.Shape(name, sizes, kind))

  def tensors():
    for row in rows:
      shape = _at(plain, row.path).shape
      ours = _to_host(_at(params, row.path))
      ours = ours[tuple(slice(size) for size in shape)]  # less the padded ids
      for name, place in _parts(config, row):
        yield name, row.write(ours[place])
      del ours  # before the next one is fetched

  described = {**config_to_hf(config), **(more or {})}
  if head == 'reward':
    # As transformers names its classifiers; one label is a number.
    described['architectures'] = [
        name.replace('ForCausalLM', 'ForSequenceClassification')
        for name in described['architectures']
    ]
    described['id2label'] = {'0': 'LABEL_0'}
  described['torch_dtype'] = dtype or str(params['embedding'].dtype)
  published.write_folder(
      pathlib.Path(folder), described, shapes, tensors(),
      limit=limit, files=files,
  )  # fmt: skip


# Reading.


class _Source:
  """The open files of a folder; cuts parameters out of them.

  Attributes:
    folder: of the files.
    config: of the policy.
    tensors: every tensor by its published name.
    shapes: our parameters as they are published, without padded ids.
  """

  def __init__(
      self,
      folder: pathlib.Path,
      config: ModelConfig,
      stack: contextlib.ExitStack,
      head: heads.HeadKind | None = None,
  ):
    self.folder = folder
    self.config = config
    self.tensors = _open_tensors(folder, stack)
    self.shapes = _shapes(_unpadded(config), head)

  def fits(self, row: Row) -> bool:
    """Returns whether published tensors make up a parameter of this shape."""
    parts = _parts(self.config, row)
    more = {
        row.hf.format(layer=self.config.layers, expert=0),
        row.hf.format(layer=0, expert=self.config.moe.experts),
    } - {name for name, _ in parts}
    if more & set(self.tensors):
      return False  # there are more layers, or more experts
    wanted = self._wanted(row)
    return all(
        name in self.tensors
        and not self._difference(self._header(name), wanted)
        for name, _ in parts
    )

  def check(self, row: Row) -> None:
    """Raises if a header says another shape, or a type that is not read."""
    wanted = self._wanted(row)
    for name, _ in _parts(self.config, row):
      difference = self._difference(self._header(name), wanted)
      if difference:
        raise ConfigError(f'{self.folder}: tensor {name} {difference}')

  def load(
      self,
      row: Row,
      shape: tuple[int, ...],
      sharding: jax.sharding.Sharding | None,
      dtype: Any,
  ) -> jax.Array:
    """Loads one parameter onto its devices.

    Args:
      row: of the table.
      shape: with padded ids, whose weights are zeros.
      sharding: where each part goes; None for the default device.
      dtype: of the parameter.
    """
    self.check(row)
    whole = tuple(slice(0, size) for size in shape)
    if sharding is None:
      return jax.device_put(self._block(row, whole, dtype))
    # Equal parts go to several devices: each is read once.
    devices: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    parts = sharding.addressable_devices_indices_map(shape)
    for device, index in parts.items():
      spans = tuple(s.indices(n)[:2] for s, n in zip(index, shape))
      devices.setdefault(spans, []).append(device)
    placed = {}
    for spans, alike in devices.items():
      block = self._block(row, tuple(slice(*span) for span in spans), dtype)
      for device in alike:
        placed[device] = jax.device_put(block, device)
      # Or the host would hold parts that wait for their transfer.
      jax.block_until_ready([placed[device] for device in alike])
    return jax.make_array_from_single_device_arrays(
        shape, sharding, [placed[device] for device in parts]
    )

  def _block(
      self, row: Row, index: tuple[slice, ...], dtype: Any
  ) -> np.ndarray:
    """A part of a parameter, cut out of its published tensors."""
    shape = _at(self.shapes, row.path).shape
    sizes = tuple(span.stop - span.start for span in index)
    real = tuple(
        slice(min(span.start, size), min(span.stop, size))
        for span, size in zip(index, shape)
    )
    padded = real != index
    block = (np.zeros if padded else np.empty)(sizes, np.dtype(dtype))
    filled = block[tuple(slice(s.stop - s.start) for s in real)]
    if not filled.size:
      return block
    for name, place in _parts(self.config, row):
      deep = len(place)
      within = [p - s.start for p, s in zip(place, real)]
      if all(0 <= w < n for w, n in zip(within, filled.shape)):
        header = self._header(name)
        _cut(row, header, shape[deep:], real[deep:], filled[tuple(within)])
    return block

  def _wanted(self, row: Row) -> tuple[int, ...]:
    """The published shape of each of a row's tensors."""
    _, place = _parts(self.config, row)[0]
    return row.hf_shape(_at(self.shapes, row.path).shape[len(place) :])

  def _header(self, name: str) -> Any:
    return self.tensors[name].header()

  def _difference(self, header: Any, wanted: tuple[int, ...]) -> str:
    """Describes what is wrong with a tensor; empty if nothing is."""
    shape, kind = tuple(header.get_shape()), header.get_dtype()
    if shape != wanted:
      return f'has shape {shape}, wanted {wanted} by {_CONFIG}'
    if kind not in published.KINDS.values():
      return (
          f'is {kind}, wanted float32 (F32), bfloat16 (BF16) or float16 (F16)'
      )
    return ''


def _cut(
    row: Row,
    header: Any,
    shape: tuple[int, ...],
    index: tuple[slice, ...],
    out: np.ndarray,
) -> None:
  """Reads a part of one published tensor into ours, a few rows at a time.

  Args:
    row: of the table.
    header: of the published tensor, which slices it without reading the rest.
    shape: of our tensor.
    index: the part of it.
    out: of the part's shape, to be filled.
  """
  groups = row.groups(len(shape))
  order = [axis for group in groups for axis in group]
  # Of a group of our axes in one published axis, a range of the first is a
  # range there; the others are read whole and cut afterwards.
  firsts = [group[0] for group in groups]
  units = [math.prod(shape[a] for a in group[1:]) for group in groups]
  spans = [
      slice(index[a].start * unit, index[a].stop * unit)
      for a, unit in zip(firsts, units)
  ]
  lead = firsts[0]
  width = math.prod(s.stop - s.start for s in spans[1:])
  step = max(1, _CHUNK // (4 * units[0] * width))
  rest = tuple(slice(None) if a in firsts else s for a, s in enumerate(index))
  for start in range(index[lead].start, index[lead].stop, step):
    stop = min(start + step, index[lead].stop)
    spans[0] = slice(start * units[0], stop * units[0])
    theirs = header[tuple(spans)]
    sizes = {a: index[a].stop - index[a].start for a in firsts}
    sizes[lead] = stop - start
    theirs = theirs.reshape([sizes.get(a, shape[a]) for a in order])
    place = [slice(None)] * len(shape)
    first = index[lead].start
    place[lead] = slice(start - first, stop - first)
    out[tuple(place)] = theirs.transpose(np.argsort(order))[rest]


# Helpers.


def _load_config(
    folder: pathlib.Path, overrides: Mapping[str, Any]
) -> ModelConfig:
  hf = read_json(folder / _CONFIG)
  config = config_from_hf(hf, str(folder / _CONFIG))
  known = [f.name for f in dataclasses.fields(ModelConfig)]
  for name in overrides:
    if name not in known:
      raise ConfigError(f'overrides has {name!r}, wanted one of {known}')
  return resolve(dataclasses.replace(config, **overrides), str(folder))


@dataclasses.dataclass(frozen=True)
class _Stored:
  """A tensor in an open file, under the name that the file has for it."""

  file: Any
  name: str

  def header(self) -> Any:
    """Shape and type; slicing it reads that part of the numbers."""
    return self.file.get_slice(self.name)


def _open_tensors(
    folder: pathlib.Path, stack: contextlib.ExitStack
) -> dict[str, _Stored]:
  """Every tensor of the folder by its published name, see `plain_name`."""
  names = [published.WEIGHTS]
  index = folder / published.INDEX
  if index.is_file():
    where = read_json(index).get('weight_map')
    require(isinstance(where, dict), f'{index}: weight_map', where,
            'a file for each tensor')  # fmt: skip
    names = sorted(set(where.values()))
  tensors: dict[str, _Stored] = {}
  for name in names:
    path = folder / name
    if not path.is_file():
      raise ConfigError(f'there is no file {path}{published.instead(folder)}')
    check_content(path)
    try:
      file = stack.enter_context(safetensors.safe_open(path, 'numpy'))
    except safetensors.SafetensorError as error:
      raise ConfigError(f'{path} is not safetensors: {error}') from error
    for stored in file.keys():
      plain = plain_name(stored)
      other = tensors.get(plain)
      if other is not None and other.name != stored:
        raise ConfigError(
            f'{folder} has tensors {other.name} and {stored}, which are both'
            f' {plain} without their wrappers, wanted one of them'
        )
      tensors[plain] = _Stored(file, stored)
  _check_merged(folder, tensors)
  return tensors


def plain_name(stored: str) -> str:
  """A tensor's published name, without what training wrapped around it.

  Wrappers of PyTorch put their name into those of the tensors: FSDP, gradient
  checkpointing and `torch.compile` anywhere, DistributedDataParallel and PEFT
  in front. A language model that was saved out of a larger one is called
  `language_model`, and one saved without its head lacks `model`.
  """
  parts = [part for part in stored.split('.') if part not in _WRAPPERS]
  for front in _FRONTS:
    if tuple(parts[: len(front)]) == front:
      parts = parts[len(front) :]
  if tuple(parts[:2]) == ('model', 'language_model'):
    parts = ['model', *parts[2:]]
  if parts and parts[0] in _INSIDE:
    parts = ['model', *parts]
  return '.'.join(parts)


# Parts of names that stand anywhere, those that stand in front, outer ones
# first, and what a model begins with that lacks its own name.
_WRAPPERS = (
    '_fsdp_wrapped_module',
    '_checkpoint_wrapped_module',
    '_orig_mod',
)
_FRONTS = (('module',), ('base_model', 'model'), ('language_model',))
_INSIDE = ('embed_tokens', 'layers', 'norm')
_ADAPTED = re.compile(r'\.(lora_[AB]|lora_embedding_[AB]|base_layer)\.')


def _check_merged(folder: pathlib.Path, tensors: Mapping[str, _Stored]) -> None:
  """Raises if adapters lie beside the matrices that they change."""
  found = sorted(t.name for t in tensors.values() if _ADAPTED.search(t.name))
  if found:
    raise ConfigError(
        f'{folder} has {len(found)} tensors of adapters that are not merged:'
        f' {_few(found)}, wanted plain weights: merge them with PEFT'
        ' (`merge_and_unload`, then `save_pretrained`), or save the adapters by'
        ' themselves and name their folder in policy.adapter'
    )


def _check_names(
    source: _Source,
    config: ModelConfig,
    rows: list[Row],
    head: heads.HeadKind | None = None,
) -> None:
  """Raises if the folder lacks a tensor, or has one that has no place."""
  folder, tensors = source.folder, source.tensors
  wanted = {name for row in rows for name, _ in _parts(config, row)}
  missing = sorted(wanted - set(tensors))
  if missing:
    why = ''
    if missing == [_NO_HEAD]:
      why = ', wanted it, or tie_word_embeddings true in its config.json'
    elif not wanted & set(tensors):
      why = f'; it has {_few(sorted(t.name for t in tensors.values()))}'
    raise ConfigError(
        f'{folder} lacks {len(missing)} tensors: {_few(missing)}{why}'
    )
  extra = sorted(n for n in set(tensors) - wanted if _IGNORED.search(n) is None)
  # Some writers store the tied matrix twice; two different ones are not tied.
  if head is not None and _NO_HEAD in extra:
    extra.remove(_NO_HEAD)  # TRL leaves it there, beside the critic's
  if config.tied_embeddings and _NO_HEAD in extra:
    if _equal(*(tensors[n].header() for n in (_NO_HEAD, ROWS[0].hf))):
      extra.remove(_NO_HEAD)
  if extra:
    raise ConfigError(
        f'{folder} has {len(extra)} tensors with no place in a policy of family'
        f' {config.family!r} with {config.layers} layers, tied_embeddings'
        f' {config.tied_embeddings}: {_few([tensors[n].name for n in extra])}'
    )


def _equal(one: Any, other: Any) -> bool:
  """Returns whether two matrices are equal, a few rows at a time."""
  shape = one.get_shape()
  if shape != other.get_shape():
    return False
  rows, step = shape[0], max(1, _CHUNK // (4 * shape[-1]))
  spans = (slice(n, min(n + step, rows)) for n in range(0, rows, step))
  return all(np.array_equal(one[span], other[span]) for span in spans)


def _few(names: list[str]) -> str:
  return ', '.join(names[:4]) + (', ...' if len(names) > 4 else '')


def _shapes(config: ModelConfig, head: heads.HeadKind | None) -> Params:
  """The parameters of a policy, or of a trunk with a head."""
  if head is None:
    return parameters.abstract_params(config)
  return heads.abstract_params(config, head)


def _rows(config: ModelConfig, params: Params) -> list[Row]:
  """The rows that this policy has parameters for, by its family's names."""
  blocks, names = params['blocks'], FAMILIES[config.family].tensors
  return [
      dataclasses.replace(row, hf=names.get(row.path[-1], row.hf))
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


def _unpadded(config: ModelConfig) -> ModelConfig:
  """The published vocabulary has no padding."""
  return dataclasses.replace(config, vocab_multiple=1)


def _parts(config: ModelConfig, row: Row) -> list[tuple[str, tuple[int, ...]]]:
  """Published tensors that make up a parameter, with their places in it."""
  if '{layer}' not in row.hf:
    return [(row.hf, ())]
  layers = config.layers_with(row.path[-1])
  if '{expert}' not in row.hf:
    return [(row.hf.format(layer=n), (i,)) for i, n in enumerate(layers)]
  return [
      (row.hf.format(layer=n, expert=e), (i, e))
      for i, n in enumerate(layers)
      for e in range(config.moe.experts)
  ]


def _in_order(
    config: ModelConfig, rows: list[Row]
) -> list[tuple[Row, str, tuple[int, ...]]]:
  """All published tensors, layer by layer between what stands around them."""
  first = next(n for n, row in enumerate(rows) if row.path[0] == 'blocks')
  keyed = []
  for number, row in enumerate(rows):
    for name, place in _parts(config, row):
      layer = -1 if number < first else config.layers
      if place:
        layer = config.layers_with(row.path[-1])[place[0]]
      keyed.append(((layer, number, place), (row, name, place)))
  return [part for _, part in sorted(keyed, key=lambda k: k[0])]


def _to_host(leaf: Any) -> np.ndarray:
  """A whole parameter in host memory, of which jax keeps no copy.

  It would with `np.asarray`, for as long as the parameter lives.
  """
  if not isinstance(leaf, jax.Array):
    return np.asarray(leaf)
  require_whole(leaf, 'a parameter to be saved')
  whole = np.empty(leaf.shape, leaf.dtype)
  for shard in leaf.addressable_shards:
    if shard.replica_id == 0:
      part = shard.data
      whole[shard.index] = np.asarray(
          jax.make_array_from_single_device_arrays(
              part.shape, part.sharding, [part]
          )
      )
  return whole
