"""How far engine and trainer are apart on real weights, in fp32 and bf16.

  python -m benchmarks.numerics --policy=SmolLM2-135M-Instruct
  python -m benchmarks.numerics --policy=SmolLM2-135M-Instruct \
    --compute=float32

The engine of experiments/smollm2.py answers questions with the same weights
that the trainer then scores the answers with, so every difference of a token's
log-prob is of numerics alone. `--compute` names the dtypes that the layers are
computed in; each engine is compared with each trainer. Parameters stay float32,
and norms, softmax, rotations and log-probs are computed in it in either case.

The gap is |log p (engine) - log p (trainer)| of a sampled token, in nats; an
importance weight is off by a factor of exp(gap). Matching dtypes do not make
bf16 exact: prefill, decode and training round in shapes of their own. `--short`
takes 2 questions and 4 answers to each.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax import command
from areal_jax.build import initial_params
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.prepare.prepared import Prepared, prepare
from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.loop import EngineLoop
from areal_jax.rollout.workflow import SingleTurn, WorkflowContext
from areal_jax.telemetry.events import EventLog
from areal_jax.train import packing
from areal_jax.train.objectives import policy_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.state import Role, TrainState
from areal_jax.train.step import TrainStep
from areal_jax.types import Draw, RewardResult, RewardStatus, Trajectory
from benchmarks import report
from experiments import smollm2

# Of invariant 8 in docs/invariants.md.
_FP32 = '<= 0.0001'


def measure(
    policy: str, dtypes: Sequence[str], questions: int, samples: int
) -> list[report.Row]:
  """Mean and largest gap of each engine and each trainer."""
  experiment = smollm2.get_config()
  experiment.policy.path = experiment.tokenizer.path = policy
  experiment.task.train_problems = questions
  experiment.rollout.batch_size = min(8, questions)
  experiment.rollout.group_size = samples
  prepared = prepare(experiment)
  settings, rules = slices.MeshSettings(), Rules()
  mesh = slices.cut(slices.machine_devices(settings), settings).train
  params, _ = initial_params(prepared, mesh, rules)
  answers = {}
  for engine in dtypes:
    model = dataclasses.replace(prepared.model, compute_dtype=engine)
    answers[engine] = asyncio.run(
        _answers(prepared, model, params, mesh, rules)
    )
  rows = []
  for trainer in dtypes:
    model = dataclasses.replace(prepared.model, compute_dtype=trainer)
    step = TrainStep(
        model,
        policy_objective(PolicyLoss()),
        OptimizerSettings(),
        mesh,
        rules,
        prepared.settings.train.packing,
    )
    for engine, said in answers.items():
      logps = np.concatenate([t.logps[t.sampled] for t in said])
      shape = prepared.settings.train.packing
      gap = np.abs(logps - _scores(step, params, said, shape))
      name = f'engine {engine}, trainer {trainer}'
      rows.append(report.Row(f'{name}: mean gap, nats', float(gap.mean())))
      name, largest = f'{name}: largest gap, nats', float(gap.max())
      if engine == trainer == 'float32':
        rows.append(report.bounded(name, largest, _FP32))
      else:
        rows.append(report.Row(name, largest))
  for engine, said in answers.items():
    tokens = sum(float(t.loss_mask.sum()) for t in said)
    rows.append(report.Row(f'engine {engine}: tokens', tokens))
  return rows


async def _answers(
    prepared: Prepared,
    model: ModelConfig,
    params: Any,
    mesh: jax.sharding.Mesh,
    rules: Rules,
) -> list[Trajectory]:
  """Trajectories of all questions and samples, under version 0."""

  async def score(draw, text):
    del draw, text  # nothing is learnt here
    return RewardResult(RewardStatus.OK, 0.0)

  rollout = prepared.settings.rollout
  loop = EngineLoop(
      Engine(model, rollout.engine, mesh, rules),
      '0',
      swap='drain',
      events=EventLog(None),
  )
  loop.set_weights(0, params, lambda version: None)
  loop.start()
  workflow = SingleTurn(
      WorkflowContext(
          client=EngineClient([loop]),
          render=lambda problem: prepared.prompts[problem.id],
          decode=lambda ids: prepared.tokenizer.decode(ids.tolist()),
          score=score,
          sampling=prepared.sampling,
          clock=lambda: 0.0,
      )
  )
  try:
    return await asyncio.gather(
        *(
            workflow(Draw(index, 0, problem), sample, 0)
            for index, problem in enumerate(prepared.train)
            for sample in range(rollout.group_size)
        )
    )
  finally:
    loop.stop()


def _scores(
    step: TrainStep,
    params: Any,
    trajectories: Sequence[Trajectory],
    shape: PackingSettings,
) -> np.ndarray:
  """Log-probs of the sampled tokens as the trainer computes them, in order."""
  # Only read: no optimizer is needed to score.
  state = TrainState({'policy': Role(params, {})})
  # The place of each token among all of them travels as its advantage.
  places, total = [], 0
  for trajectory in trajectories:
    length = len(trajectory.ids)
    places.append(np.arange(total, total + length, dtype=np.float32))
    total += length
  scores = np.zeros(total, np.float32)
  for microbatch in packing.pack(trajectories, places, shape):
    logps = jax.device_get(step.score(state, step.place(microbatch, 1.0, 0)))
    real = microbatch.segment_ids > 0
    scores[microbatch.advantages[real].astype(int)] = logps[real]
  masks = np.concatenate([t.loss_mask for t in trajectories])
  return scores[masks > 0]


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  questions, samples = flags.FLAGS.questions, flags.FLAGS.samples
  if flags.FLAGS.short:
    questions, samples = 2, 4
  rows = measure(flags.FLAGS.policy, flags.FLAGS.compute, questions, samples)
  report.show('numerics', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_string(
      'policy', None, 'Hugging Face folder with its tokenizer.', required=True
  )
  flags.DEFINE_list('compute', ['float32', 'bfloat16'], 'Dtypes of the layers.')
  flags.DEFINE_integer('samples', 8, 'Answers a question.')
  flags.DEFINE_integer('questions', 16, 'Questions.')
  flags.DEFINE_bool('short', False, '2 questions, 4 answers.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
