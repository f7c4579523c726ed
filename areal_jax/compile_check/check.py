"""Whether a run fits its machine, and how fast it could be at best.

In come shapes (`experiment.PreparedShapes`) and a topology. The run's programs
are compiled for it: every one of the train step, prefill and decode. Out comes
a `Report`: memory of a chip by kind, costs, the roofline of a training step,
the largest microbatch, what a publish sends, and advice. No parameter exists at
any time.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Callable, Sequence

from areal_jax.compile_check.advice import advise
from areal_jax.compile_check.chips import Topology
from areal_jax.compile_check.findings import Report, Step
from areal_jax.compile_check.programs import (
    Program,
    Task,
    compile_program,
)
from areal_jax.compile_check.reshard import Reshard, reshard
from areal_jax.compile_check.sides import (
    Beside,
    RolloutSide,
    TrainSide,
    count_elements,
    count_microbatches,
)
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut, devices_needed
from areal_jax.models import parameters
from areal_jax.prepare.prepared import PreparedShapes
from areal_jax.train.settings import TrainSettings


def check(
    prepared: PreparedShapes,
    topology: Topology,
    *,
    answer_tokens: int = 0,
    search: int = 4,
    effort: float = -1.0,
    tell: Callable[[Program], None] = lambda program: None,
) -> Report:
  """Compiles what a run would, and says what came of it.

  Args:
    prepared: the run.
    topology: the machine.
    answer_tokens: of an answer on average; 0 for half of the most.
    search: how often the rows of a microbatch are doubled while they fit, or
      halved until they do, to find the most; each compiles a gradient.
    effort: of the compiler, see `programs.compile_program`.
    tell: called with each program as soon as it is there.

  Raises:
    ConfigError: meshes that the topology has too few chips for, or whatever
      else a run with these settings would refuse.
  """
  settings, rules = prepared.settings, Rules()
  devices = topology.devices()
  slices = cut(devices, settings.mesh)
  train = TrainSide(prepared, slices, topology, rules)
  rollout = RolloutSide(prepared, slices, topology, rules)
  programs = []
  # Nobody knows what less of it leaves out where it is an estimate anyway.
  effort = 0.0 if topology.is_estimate else effort

  def compiled(task: Task) -> Program:
    program = compile_program(task, devices[0], effort)
    tell(program)
    return program

  for task in (*train.tasks(), *rollout.tasks()):
    programs.append(compiled(task))
  hbm = topology.chip.hbm
  nothing = Beside(0, 0)
  colocated = settings.mesh.colocated
  holdings = {
      'train': train.holding(
          programs, hbm, rollout.beside if colocated else nothing
      ),
      'rollout': rollout.holding(
          programs, hbm, train.beside if colocated else nothing
      ),
  }
  verdicts = [holding.fits for holding in holdings.values()]
  fits = None if None in verdicts and False not in verdicts else all(verdicts)
  largest = None
  if search and holdings['train'].fits is not None:
    largest = train.largest_rows(
        hbm - (rollout.beside.working if colocated else 0),
        holdings['train'].fits,
        search,
        compiled,
    )
  crossing = reshard(train.sent, rollout.targets, settings.rollout.dtype)
  found = Report(
      name=settings.name,
      model=settings.policy.path or 'policy.model of the settings',
      parameters=count_elements(parameters.abstract_params(prepared.model)),
      topology=topology,
      used=devices_needed(settings.mesh),
      fits=fits,
      train=holdings['train'],
      rollout=holdings['rollout'],
      programs=tuple(programs),
      reshard=crossing,
      step=_step(prepared, topology, programs, crossing, answer_tokens),
      rows=settings.train.packing.rows,
      largest_rows=largest,
      advice=(),
  )
  return dataclasses.replace(found, advice=tuple(advise(prepared, found)))


# A step.


def _step(
    prepared: PreparedShapes,
    topology: Topology,
    programs: Sequence[Program],
    crossing: Reshard,
    answer_tokens: int,
) -> Step | None:
  """A training step at its roofline; None where a program is not there."""
  if any(program.cost is None for program in programs):
    return None
  settings, rollout = prepared.settings, prepared.settings.rollout
  chip = topology.chip
  seconds = {p.name: p.roofline(chip).seconds for p in programs}
  answers = rollout.batch_size * rollout.group_size
  new = answer_tokens or rollout.max_new_tokens // 2
  prompt = rollout.engine.max_prompt_length // 2
  count = count_microbatches(prepared, answers * (new + prompt))
  calls = _calls(settings.train, count, [p.name for p in programs])
  train_s = sum(n * seconds[name] for name, n in calls.items())
  replicas = settings.mesh.rollout.replicas
  engine = rollout.engine
  decode = math.ceil(answers * new / (engine.slots * replicas))
  piece = engine.longest_piece
  shards = settings.mesh.rollout.data * replicas
  room = piece * engine.piece_rows(piece) * shards
  pieces = math.ceil(rollout.batch_size * prompt / room)
  rollout_s = decode * seconds['generate'] + pieces * seconds['extend']
  both = [train_s, rollout_s]
  alone = settings.mesh.colocated or rollout.takes_turns
  whole = sum(both) if alone else max(both)
  return Step(
      answers=answers,
      tokens=answers * new,
      microbatches=count,
      calls=calls,
      train_s=train_s,
      decode_steps=decode,
      rollout_s=rollout_s,
      publish_s=max(crossing.received, crossing.sent) / chip.link_rate,
      seconds=whole,
      tokens_per_s=answers * new / whole,
  )


def _calls(
    settings: TrainSettings, count: int, names: Sequence[str]
) -> dict[str, int]:
  """Counts the calls of each program of the train mesh in one step."""
  first = math.ceil(count / settings.minibatches)
  rest = count - first if settings.recomputes_proximal else 0
  # Those without log-probs of before are counted as if they had them.
  calls = {
      'accumulate': count,
      'accumulate_around': count,
      'score': rest + (first if 'score' in settings.scores else 0),
      'score_reference': count,
      'load': count,
      'apply': settings.minibatches,
      'critic accumulate': count,
      'critic score': count,
      'critic apply': settings.minibatches,
  }
  return {name: calls[name] for name in names if name in calls}
