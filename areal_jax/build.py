"""Builds the policy and the trainer of a run, and exports what it learned."""

from __future__ import annotations

import math
import pathlib
from typing import Any, Callable

import jax

from areal_jax.config import named
from areal_jax.mesh.host import require_whole
from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, lora, parameters, peft
from areal_jax.models.config import ModelConfig
from areal_jax.prepare.prepared import Prepared, PreparedPolicy
from areal_jax.telemetry import run_folder
from areal_jax.tokenizer.files import beside_weights
from areal_jax.train.supervised import supervised_warm_start
from areal_jax.train.trainer import Steps, Trainer, build_steps, compile_ahead


def reference_params(
    prepared: Prepared, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[ModelConfig, Any] | None:
  """Shape and parameters of the reference policy, on a mesh.

  None where it is the policy that training starts from, or none is needed.
  """
  if prepared.reference is None:
    return None
  model, source = prepared.reference
  return model, source.load(model, mesh, rules)


def initial_params(
    prepared: Prepared | PreparedPolicy, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[Any, tuple[str, ...]]:
  """The policy that the settings name, on a mesh.

  Returns:
    Its parameters, and the names of those that `policy.load` 'matching' left at
    their initial values.

  Raises:
    ConfigError: the policy at `policy.path` is not what it was, or nothing of
      it matches.
  """
  settings, model = prepared.settings, prepared.model
  source, seed = prepared.source, settings.seed
  base, left = lora.without(model), ()
  if source is not None and settings.policy.load == 'all':
    params = source.load(model, mesh, rules, seed)
  else:
    params = parameters.init_params(base, seed, mesh, rules)
    if source is not None:
      with named('config.policy.path'):
        params, left = source.load_matching(base, params)
    params = parameters.with_adapters(model, params, seed, mesh, rules)
  if settings.policy.adapter:
    learns, _ = parameters.partition(
        model, parameters.param_shardings(model, mesh, rules)
    )
    adapters = peft.load_peft(settings.policy.adapter, model)
    params = lora.overlaid(params, jax.device_put(adapters, learns))
  return params, left


def warm_started(
    prepared: Prepared,
    params: Any,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    report: Callable[[int, float], None],
) -> Any:
  """The policy that reinforcement learning starts from.

  Args:
    prepared: the run.
    params: the policy as it was loaded or drawn; taken over if there is a warm
      start, and otherwise returned.
    mesh: where they are.
    rules: how they lie there.
    report: called with (steps done, loss) now and then.
  """
  settings = prepared.settings.warm_start
  if not settings.steps:
    return params
  return supervised_warm_start(
      prepared.model,
      params,
      prepared.demonstrations,
      settings,
      mesh,
      rules,
      report,
  )


def compile_training_ahead(
    prepared: Prepared, mesh: jax.sharding.Mesh, rules: Rules
) -> Steps:
  """Begins to compile the programs of a run's trainer, for `build_trainer`.

  Args:
    prepared: the run.
    mesh: the train mesh.
    rules: from logical to mesh axes.
  """
  settings = prepared.settings.train
  reference = prepared.reference and prepared.reference[0]
  steps = build_steps(prepared.model, settings, mesh, rules, reference)
  compile_ahead(steps, settings)
  return steps


def build_trainer(
    prepared: Prepared,
    params: Any,
    mesh: jax.sharding.Mesh,
    rules: Rules,
    steps: Steps | None = None,
) -> Trainer:
  """The trainer of a run.

  Args:
    prepared: the run.
    params: the policy to start from, taken over.
    mesh: the train mesh.
    rules: from logical to mesh axes.
    steps: its programs from `compile_training_ahead`; None for new ones, which
      are compiled when they are called.
  """
  settings = prepared.settings
  rollout = settings.rollout
  return Trainer(
      prepared.model,
      settings.train,
      mesh,
      rules,
      params,
      reference=reference_params(prepared, mesh, rules),
      seed=settings.seed,
      max_age=rollout.eta if rollout.staleness == 'mask' else math.inf,
      steps=steps,
  )


def export_policy(prepared: Prepared, params: Any, run: pathlib.Path) -> None:
  """Writes a policy into the folder of a run, and its adapters by themselves.

  Args:
    prepared: the run.
    params: of the policy.
    run: the folder; it gets a folder for each of the two.
  """
  model = prepared.model
  export_merged(prepared, params, run / run_folder.POLICY)
  if model.lora.projections:
    base = prepared.settings.policy.path
    peft.save_peft(run / run_folder.ADAPTER, model, params, base=base)


def export_merged(
    prepared: Prepared, params: Any, folder: pathlib.Path
) -> None:
  """Writes a policy as transformers loads it: merged, with its tokenizer."""
  model = prepared.model
  if model.lora.projections:
    # On the host: what is compiled at the end of a run would count as a defect.
    model, params = lora.merged(
        model, jax.device_get(require_whole(params, 'the policy'))
    )
  files = beside_weights(prepared.tokenizer_files)
  hf.save_hf(folder, model, params, files=files)


def served_policy(
    prepared: Prepared | PreparedPolicy, mesh: jax.sharding.Mesh, rules: Rules
) -> tuple[ModelConfig, Any]:
  """The policy as engines run it where nothing trains: shape and parameters.

  Raises:
    ConfigError: whatever `initial_params` refuses.
  """
  model = prepared.model
  rollout = prepared.settings.rollout
  params, _ = initial_params(prepared, mesh, rules)
  if rollout.merge_adapters:
    shape = lora.without(model)
    shardings = parameters.param_shardings(shape, mesh, rules)
    return shape, lora.merging(model, rollout.dtype, shardings)(params)
  if rollout.dtype:
    params = jax.tree.map(lambda x: x.astype(rollout.dtype), params)
  return model, params
