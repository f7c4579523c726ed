"""What a check finds: memory of a chip, a step at its roofline, the report."""

from __future__ import annotations

import dataclasses
from typing import Mapping

from areal_jax.compile_check.chips import Topology
from areal_jax.compile_check.programs import Program
from areal_jax.compile_check.reshard import Reshard


@dataclasses.dataclass(frozen=True)
class Holding:
  """Bytes that a chip of one side holds.

  Attributes:
    chips: of that side.
    kinds: bytes by kind, as much as there is of each at any time.
    peak: most bytes at one time.
    at: when that is.
    fits: whether a chip has as many; None where nobody knows, since the
      compiler failed at a program and the others fit.
  """

  chips: int
  kinds: Mapping[str, int]
  peak: int
  at: str
  fits: bool | None


@dataclasses.dataclass(frozen=True)
class Step:
  """A training step at its roofline.

  Attributes:
    answers: trained.
    tokens: sampled ones, of all answers.
    microbatches: that they fill.
    calls: of each program of the train mesh.
    train_s: seconds of the train mesh.
    decode_steps: of every replica.
    rollout_s: seconds of the replicas.
    publish_s: seconds that the links need for new weights, beside the rest.
    seconds: of the step: the longer of the two sides, or both where they take
      turns.
    tokens_per_s: sampled and trained.
  """

  answers: int
  tokens: int
  microbatches: int
  calls: Mapping[str, int]
  train_s: float
  decode_steps: int
  rollout_s: float
  publish_s: float
  seconds: float
  tokens_per_s: float


@dataclasses.dataclass(frozen=True)
class Report:
  """Everything that was found.

  Attributes:
    name: of the experiment.
    model: where its policy's shape is from.
    parameters: of the policy.
    topology: what it was compiled for.
    used: chips of it that the meshes cover.
    fits: whether both sides do; None where nobody knows.
    train: what a chip of the train mesh holds.
    rollout: what a chip of a replica holds.
    programs: as compiled.
    reshard: what a publish sends.
    step: at its roofline; None where a program was not compiled.
    rows: of a microbatch, as the settings say.
    largest_rows: most rows that fit; 0 for none, None where nobody asked.
    advice: what would make it fit, or fit better.
  """

  name: str
  model: str
  parameters: int
  topology: Topology
  used: int
  fits: bool | None
  train: Holding
  rollout: Holding
  programs: tuple[Program, ...]
  reshard: Reshard
  step: Step | None
  rows: int
  largest_rows: int | None
  advice: tuple[str, ...]

  @property
  def failures(self) -> tuple[str, ...]:
    """Programs that the compiler failed at, each with its mesh and why."""
    return tuple(f'{p.name} on {p.failed}' for p in self.programs if p.failed)
