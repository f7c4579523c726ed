"""Shapes of the policy and its reference, and the meshes they divide over."""

from __future__ import annotations

import dataclasses
import math

from etils import epath

from areal_jax import config as config_lib
from areal_jax.config import fetching, named, require
from areal_jax.models import peft, shapes
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf_config import config_to_hf
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer.base import Tokenizer, absent_ids
from areal_jax.train import pretrained
from areal_jax.train.pretrained import Pretrained


def shape_at(settings: Experiment, at: str, path: str) -> ModelConfig:
  """The shape of what lies at a path, or of what its name says."""
  if epath.Path(path).exists():
    shape = pretrained.find(path, f'config.{at}').shape()
    return _as_it_runs(settings, shape, at)
  shape = shapes.published_shape(path)
  wanted = f'a policy, or a path that ends with one of {[*shapes.SHAPES]}'
  require(shape is not None, f'config.{at}', path, wanted + fetching(path))
  return _as_it_runs(settings, shape, at)


def policy_shape(
    settings: Experiment, source: Pretrained | None, tokenizer: Tokenizer
) -> ModelConfig:
  """The policy's shape: from its folder or from the settings."""
  if source is not None and settings.policy.load == 'all':
    model = _loaded_shape(settings, source, tokenizer, 'policy.path')
  else:
    model = own_shape(settings, tokenizer)
  model = checked_shape(settings, model)
  if settings.policy.adapter:
    with named('config.policy.adapter'):
      peft.load_peft(settings.policy.adapter, model)
  return model


def own_shape(settings: Experiment, tokenizer: Tokenizer) -> ModelConfig:
  """The shape that the settings themselves describe."""
  size = tokenizer.vocab_size
  return dataclasses.replace(
      settings.policy.model,
      vocab_size=size,
      absent_ids=absent_ids(tokenizer, size),
      vocab_multiple=_vocab_multiple(settings),
  )


def checked_shape(settings: Experiment, model: ModelConfig) -> ModelConfig:
  """The policy's shape, resolved, if the run can have it."""
  engine = settings.rollout.engine
  require(
      engine.max_length <= model.max_length,
      'config.rollout.engine.max_length',
      engine.max_length,
      f'at most the {model.max_length} tokens that the policy is meant for',
  )
  check_division(model, settings)
  engine.check_shards(settings.mesh.rollout.data, 'config.rollout.engine')
  model = config_lib.resolve(model, 'config.policy.model')
  with named('config.policy.model'):
    config_to_hf(model)  # the run ends by saving it in that form
  return model


def _loaded_shape(
    settings: Experiment, source: Pretrained, tokenizer: Tokenizer, at: str
) -> ModelConfig:
  """The shape of a saved policy, to run as the settings say."""
  model = _as_it_runs(settings, source.shape(), at)
  require(
      tokenizer.vocab_size <= model.vocab_size,
      'config.tokenizer.path',
      f"{settings.tokenizer.path or 'that of the policy'} with"
      f' {tokenizer.vocab_size} ids',
      f'at most the {model.vocab_size} of config.{at}',
  )
  return dataclasses.replace(
      model, absent_ids=absent_ids(tokenizer, model.vocab_size)
  )


def _as_it_runs(
    settings: Experiment, shape: ModelConfig, at: str
) -> ModelConfig:
  """A published shape with what the settings say of how it is run."""
  ours = settings.policy.model
  experts, adapters = shape.moe, shape.lora
  if at == 'policy.path':
    adapters = ours.lora
    # How the routers are trained is no part of a published shape.
    experts = dataclasses.replace(
        experts, balance=ours.moe.balance, replay=ours.moe.replay
    )
  return dataclasses.replace(
      shape,
      moe=experts,
      lora=adapters,
      layer_loop=ours.layer_loop,
      compute_dtype=ours.compute_dtype,
      remat=ours.remat,
      attention=ours.attention,
      vocab_multiple=_vocab_multiple(settings),
  )


def _vocab_multiple(settings: Experiment) -> int:
  return math.lcm(settings.mesh.train.tensor, settings.mesh.rollout.tensor)


def open_reference(
    settings: Experiment, tokenizer: Tokenizer
) -> tuple[ModelConfig, Pretrained] | None:
  """Shape and place of the policy at `train.reference_path`."""
  path = settings.train.reference_path
  if not path:
    return None
  at = 'train.reference_path'
  source = pretrained.find(path, f'config.{at}')
  with named(f'config.{at}'):
    model = _loaded_shape(settings, source, tokenizer, at)
    check_division(model, settings)
    return config_lib.resolve(model, f'config.{at}'), source


def open_policy(settings: Experiment) -> Pretrained | None:
  """Opens `policy.path`; returns None where it is empty."""
  path = settings.policy.path
  return pretrained.find(path, 'config.policy.path') if path else None


def check_division(model: ModelConfig, settings: Experiment) -> None:
  """Refuses a mesh over which the policy does not divide."""
  train, rollout = settings.mesh.train, settings.mesh.rollout
  over_tensor = {'heads': model.heads}
  if model.dense_layers:
    over_tensor['mlp_width'] = model.mlp_width
  experts = {'moe.experts': model.moe.experts} if model.sparse_layers else {}
  for mesh, axes, sizes in (
      ('train', ('fsdp', 'expert'), {'width': model.width}),
      ('train', ('tensor',), over_tensor),
      ('rollout', ('tensor',), over_tensor),
      ('train', ('expert', 'tensor'), experts),
      ('rollout', ('expert', 'tensor'), experts),
  ):
    of = {axis: getattr(getattr(settings.mesh, mesh), axis) for axis in axes}
    used = {axis: parts for axis, parts in of.items() if parts > 1}
    for name, size in sizes.items():
      require(
          size % math.prod(of.values()) == 0,
          f'config.mesh.{mesh}.{" · ".join(used)}',
          math.prod(of.values()),
          f"a divisor of the policy's {name}={size}",
      )
  for mesh, parts in (('train', train.expert), ('rollout', rollout.expert)):
    require(
        parts == 1 or bool(model.sparse_layers),
        f'config.mesh.{mesh}.expert',
        parts,
        '1 for a policy without experts',
    )
