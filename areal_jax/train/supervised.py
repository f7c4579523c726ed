"""A supervised warm start: the policy imitates demonstrations.

It is the same step as policy training with another objective. Batches are
packed on the host while the devices work on earlier ones, and losses are read
back once in a while, so the devices never wait for the host.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Callable, Iterable, Iterator, Sequence

import jax
from jax.sharding import Mesh
import numpy as np

from areal_jax.config import require
from areal_jax.mesh.rules import Rules
from areal_jax.models.config import ModelConfig
from areal_jax.train import packing
from areal_jax.train.objectives import supervised_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.state import TrainState
from areal_jax.train.step import TrainStep
from areal_jax.types import Microbatch

# A prompt and the answer to imitate, token ids.
Demonstration = tuple[Sequence[int], Sequence[int]]


@dataclasses.dataclass
class WarmStartSettings:
  """Settings of supervised training before reinforcement learning.

  Attributes:
    steps: updates; 0 leaves the policy as it is.
    batch: demonstrations an update.
    seed: of the order of demonstrations, new in each epoch.
    report_every: updates between two reports.
    packing: shape of a microbatch; one a step is fastest, so rows · row_tokens
      should exceed the tokens of a batch a little.
    learning_rate: peak; it falls to 0 along a cosine.
    warmup_steps: updates of its linear rise.
    weight_decay: decoupled, on every parameter.
    gradient_clip: bound on the global norm.
  """

  steps: int = 1200
  batch: int = 64
  seed: int = 0
  report_every: int = 50
  packing: PackingSettings = dataclasses.field(
      default_factory=lambda: PackingSettings(row_tokens=128, rows=12)
  )
  learning_rate: float = 3e-3
  warmup_steps: int = 50
  weight_decay: float = 0.0
  gradient_clip: float = 1.0

  def validate(self, at: str) -> None:
    for name, least in (('steps', 0), ('batch', 1), ('report_every', 1)):
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')
    if self.steps > 0:
      self.optimizer.validate(at)

  @property
  def optimizer(self) -> OptimizerSettings:
    """AdamW as small language models are commonly trained."""
    return OptimizerSettings(
        learning_rate=self.learning_rate,
        schedule='cosine',
        warmup_steps=self.warmup_steps,
        total_steps=self.steps,
        epsilon=1e-8,
        weight_decay=self.weight_decay,
        gradient_clip=self.gradient_clip,
    )


def supervised_warm_start(
    config: ModelConfig,
    params: Any,
    demonstrations: Sequence[Demonstration],
    settings: WarmStartSettings,
    mesh: Mesh,
    rules: Rules,
    on_report: Callable[[int, float], None] | None = None,
) -> Any:
  """Trains the policy on demonstrations, mean loss over answer tokens.

  Args:
    config: the model.
    params: on the mesh; taken over, not to be used again by the caller.
    demonstrations: prompt and answer ids. The answer is learnt, with the stop
      id if it ends with one; the prompt is only read.
    settings: see `WarmStartSettings`.
    mesh: the train mesh.
    rules: from logical axes to mesh axes.
    on_report: called with the updates done and the mean loss, in nats a token,
      since the last report.

  Returns:
    The trained parameters, on the mesh.

  Raises:
    ValueError: fewer demonstrations than a batch, one that is longer than a
      row or without an answer.
    NonFiniteError: gradients without a value.
  """
  if not settings.steps:
    return params
  sequences = _sequences(demonstrations, settings)
  step = TrainStep(
      config,
      supervised_objective,
      settings.optimizer,
      mesh,
      rules,
      settings.packing,
  )

  def packed():
    for chosen in batches(
        len(sequences), settings.steps, settings.batch, settings.seed
    ):
      batch = [sequences[index] for index in chosen]
      tokens = sum(np.count_nonzero(mask) for _, mask in batch)
      yield packing.pack_tokens(batch, settings.packing), tokens

  state = step.initial_state(params)
  state = run_updates(step, state, packed(), settings.report_every, on_report)
  return state.policy.params


def run_updates(
    step: TrainStep,
    state: TrainState,
    packed: Iterable[tuple[Sequence[Microbatch], float]],
    report_every: int,
    on_report: Callable[[int, float], None] | None = None,
) -> TrainState:
  """Runs an update a batch, and reads the loss now and then.

  Args:
    step: its programs.
    state: is donated.
    packed: microbatches of each update and what its loss is divided by.
    report_every: updates between two reports.
    on_report: called with the updates done and the mean loss since the last
      report.

  Raises:
    NonFiniteError: gradients without a value.
  """
  waiting, done = [], 0

  def report() -> None:
    losses = [outcome.loss for outcome in step.fetch(waiting, done)]
    waiting.clear()
    if on_report is not None:
      on_report(done, float(np.mean(losses)))

  for microbatches, denominator in packed:
    with jax.transfer_guard('disallow'):  # what crosses says so
      placed = [step.place(m, denominator, 0) for m in microbatches]
      total = step.accumulate(state, placed)
      state, outcome = step.apply(state, total, teaches=True)
    waiting.append(outcome)
    done += 1
    if done % report_every == 0:
      report()
  if waiting:
    report()
  return state


def _sequences(
    demonstrations: Sequence[Demonstration], settings: WarmStartSettings
) -> list[tuple[np.ndarray, np.ndarray]]:
  """Ids and the mask that is 1 on the answer; checked before device work."""
  if len(demonstrations) < settings.batch:
    raise ValueError(
        f'{len(demonstrations)} demonstrations, wanted at least a batch of'
        f' {settings.batch}'
    )
  longest = settings.packing.row_tokens
  sequences = []
  for index, (prompt, answer) in enumerate(demonstrations):
    length = len(prompt) + len(answer)
    if not len(prompt) or not len(answer) or length > longest:
      raise ValueError(
          f'demonstration {index} has {len(prompt)} prompt and {len(answer)}'
          f' answer tokens, wanted at least one of each and at most'
          f' packing.row_tokens={longest} together'
      )
    ids = np.concatenate([prompt, answer]).astype(np.int32)
    mask = (np.arange(length) >= len(prompt)).astype(np.float32)
    sequences.append((ids, mask))
  return sequences


def batches(
    count: int, steps: int, batch: int, seed: int
) -> Iterator[np.ndarray]:
  """Indices of each update's examples; a new order every epoch."""
  random = np.random.default_rng(seed)
  order = np.empty(0, np.int64)
  for _ in range(steps):
    if len(order) < batch:
      order = np.concatenate([order, random.permutation(count)])
    yield order[:batch]
    order = order[batch:]
