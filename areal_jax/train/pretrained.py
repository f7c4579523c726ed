"""Where a policy comes from: a published one, a run of ours, or a checkpoint.

`find` says what lies at a path before any device works: a folder in the Hugging
Face layout, the folder of a run (the policy that it ended with, or else its
last whole checkpoint), or one checkpoint, of which the parameters alone are
taken. Either is then loaded whole, or as far as it fits.
"""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

from etils import epath
import jax

from areal_jax.config import (
    ConfigError,
    fetching,
    from_dict,
    require,
    resolve,
    to_dict,
)
from areal_jax.files import read_json
from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, lora, parameters, peft
from areal_jax.models.config import LoraSettings, ModelConfig
from areal_jax.models.hf_config import config_from_hf, config_to_hf
from areal_jax.telemetry import run_folder
from areal_jax.train import checkpoint, checkpoint_tensors
from areal_jax.train.checkpoint import CheckpointError, Saved

Params = dict[str, Any]

SHAPE = 'policy.json'  # part of a checkpoint, see `shape_part`
_LORA = 'lora'  # in it, where the policy has adapters
_WANTED = (
    'a Hugging Face folder with a config.json, the folder of a run, or a'
    ' checkpoint'
)


@dataclasses.dataclass(frozen=True)
class Pretrained:
  """A policy that is saved somewhere, of one of two kinds.

  Attributes:
    folder: in the Hugging Face layout; None for a checkpoint.
    saved: a checkpoint; None for a folder.
  """

  folder: pathlib.Path | None
  saved: Saved | None = None

  @property
  def place(self) -> str:
    """Its folder, or that of the checkpoint; either may hold a tokenizer."""
    return str(self.folder or self.saved.path)

  def shape(self) -> ModelConfig:
    """The policy's shape, unresolved. Headers are checked, no array is read.

    Raises:
      ConfigError: a file that is missing or wrong, or another kind of model.
    """
    if self.saved is not None:
      at = f'{self.saved.path / SHAPE}'
      return config_from_hf(_read_shape(self.saved), at)
    file = self.folder / 'config.json'
    published = read_json(file)
    hf.check_hf(self.folder)
    return config_from_hf(published, str(file))

  def load(
      self,
      config: ModelConfig,
      mesh: jax.sharding.Mesh,
      rules: Rules,
      seed: int = 0,
  ) -> Params:
    """All of its parameters, for a policy that runs as `config` says.

    Adapters of a checkpoint go on if `config` asks for the same ones, and are
    merged into their base otherwise.

    Args:
      config: of the policy.
      mesh: where the parameters go.
      rules: how they lie there.
      seed: of adapters that are new.

    Raises:
      ConfigError: they are not those of such a policy.
    """
    base = lora.without(config)
    if self.saved is None:
      params = hf.load_params(self.folder, base, mesh, rules)
      return parameters.with_adapters(config, params, seed, mesh, rules)
    held = self._adapters()
    saved_as = dataclasses.replace(base, lora=held)
    like = _like(saved_as, mesh, rules)
    try:
      found, _ = checkpoint_tensors.restore_params(
          self.saved, like, vocabulary_axes(config)
      )
    except CheckpointError as error:
      raise ConfigError(str(error)) from error
    params = _placed(like, found)
    wanted = dataclasses.replace(config.lora, base_dtype=held.base_dtype)
    if held.projections and to_dict(wanted) == to_dict(held):
      dtypes = parameters.abstract_params(config)
      return jax.tree.map(lambda x, d: x.astype(d.dtype), params, dtypes)
    if held.projections:
      shardings = parameters.param_shardings(base, mesh, rules)
      params = lora.merging(saved_as, '', shardings)(params)
    return parameters.with_adapters(config, params, seed, mesh, rules)

  def _adapters(self) -> LoraSettings:
    """The kind of adapters that a checkpoint has, if any."""
    held = _read_shape(self.saved).get(_LORA, {})
    at = f'{self.saved.path / SHAPE}: {_LORA}'
    return resolve(from_dict(LoraSettings, held, at), at)

  def load_matching(
      self, config: ModelConfig, params: Params
  ) -> tuple[Params, tuple[str, ...]]:
    """Takes what fits into `params`, and names what was left as it is.

    Args:
      config: of the policy that it goes into.
      params: its initial parameters, where they belong.

    Raises:
      ConfigError: nothing fits, or a file cannot be read.
    """
    if self.saved is None:
      taken, left = hf.load_matching(self.folder, config, params)
    else:
      like = jax.tree.map(
          lambda leaf: jax.ShapeDtypeStruct(
              leaf.shape, leaf.dtype, sharding=leaf.sharding
          ),
          params,
      )
      held = self._adapters().projections
      require(not held, f'lora.projections of checkpoint {self.saved.path}',
              held, "none, or policy.load='all'")  # fmt: skip
      # Another number of tokens is another vocabulary, and not its padding.
      same = _read_shape(self.saved)['vocab_size'] == config.vocab_size
      found, left = checkpoint_tensors.restore_params(
          self.saved, like, vocabulary_axes(config) if same else {},
          matching=True,
      )  # fmt: skip
      taken = _placed(params, found)
    if len(left) == len(jax.tree.leaves(params)):
      where = self.folder if self.saved is None else self.saved.path
      raise ConfigError(
          f'{where} has no tensor of the name and shape of any in this policy,'
          ' wanted some that match'
      )
    return taken, left


def find(path: str, at: str) -> Pretrained:
  """Finds the policy at a path.

  Args:
    path: the setting's value.
    at: the setting's name, for messages.

  Raises:
    ConfigError: none of the things that it may be, or a checkpoint that is not
      whole.
  """
  place = epath.Path(path)
  if checkpoint.is_one(place):
    try:
      return Pretrained(None, checkpoint.verify(place))
    except CheckpointError as error:
      raise ConfigError(f'{at}: {error}') from error
  folder = pathlib.Path(path)
  ended = folder / run_folder.POLICY
  if (ended / 'config.json').is_file():
    return Pretrained(ended)
  for inside in (place, place / run_folder.CHECKPOINTS):
    if checkpoint.steps(inside):
      saved, refused = checkpoint.latest(inside)
      require(saved is not None, at, path,
              f'a whole checkpoint, but {"; ".join(refused)}')  # fmt: skip
      return Pretrained(None, saved)
  if (folder / peft.CONFIG).is_file():
    raise ConfigError(
        f'{at} is {path!r}, which holds adapters alone ({peft.CONFIG}), wanted'
        ' the policy that they belong to; the adapters go in policy.adapter'
    )
  right = (folder / 'config.json').is_file()
  require(right, at, path, _WANTED + fetching(path))
  return Pretrained(folder)


def shape_part(config: ModelConfig) -> dict[str, Any]:
  """The part `SHAPE` of a checkpoint: `config_to_hf`, and its adapters."""
  adapters = {_LORA: to_dict(config.lora)} if config.lora.projections else {}
  return {**config_to_hf(config), **adapters}


def vocabulary_axes(config: ModelConfig) -> dict[str, int]:
  """Axis of the vocabulary, which is padded, by name of the parameter."""
  axes = jax.tree.leaves_with_path(
      parameters.logical_axes(config),
      is_leaf=lambda x: isinstance(x, tuple),
  )
  return {
      path[-1].key: names.index('vocab')
      for path, names in axes
      if 'vocab' in names
  }


def _read_shape(saved: Saved) -> dict[str, Any]:
  return saved.read_json(SHAPE)


def _like(
    config: ModelConfig, mesh: jax.sharding.Mesh, rules: Rules
) -> dict[str, Any]:
  """Shapes and shardings of a policy's parameters."""
  return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding
      ),
      parameters.abstract_params(config),
      parameters.param_shardings(config, mesh, rules),
  )


def _placed(tree: Params, found: dict[str, Any]) -> Params:
  """The tree with the leaves of these names replaced."""
  return jax.tree.map_with_path(
      lambda path, leaf: found.get(checkpoint_tensors.name_of(path), leaf), tree
  )
