"""The two sides of a run on a topology: their programs and their memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.compile_check.chips import Topology, in_own_slices
from areal_jax.compile_check.findings import Holding
from areal_jax.compile_check.programs import Program, Side, Task
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices
from areal_jax.models import lora, parameters
from areal_jax.prepare.prepared import PreparedShapes
from areal_jax.rollout import memory as rollout_memory
from areal_jax.rollout.engine import Engine
from areal_jax.train.settings import TrainSettings
from areal_jax.train.step import TrainStep
from areal_jax.train.trainer import build_steps

# Programs that only make what the others fill.
_EMPTY = ('initialise', 'zeros', 'no_load')


# Those that hold a gradient.
_WITH_GRADIENTS = ('accumulate', 'accumulate_around', 'apply')


@dataclasses.dataclass(frozen=True)
class Beside:
  """Bytes that one side has on chips on which the other side works.

  Attributes:
    working: while the other side's programs run.
    publishing: while weights go from one to the other.
  """

  working: int
  publishing: int


class TrainSide:
  """The train mesh: its programs and what it holds."""

  def __init__(
      self,
      prepared: PreparedShapes,
      slices: Slices,
      topology: Topology,
      rules: Rules,
  ):
    self._prepared = prepared
    self._whole = slices.train
    self._mesh = in_own_slices(slices.train, topology)
    self._rules = rules
    # A device's experts are chosen as often as those of others, in the mean.
    self._grouped = 1 / rules.parts('expert', self._mesh)
    self._settings = prepared.settings.train
    self._largest = self._settings.packing.shapes[0]
    self._policy, self._critic = self._steps(self._settings)

  def _steps(
      self, settings: TrainSettings
  ) -> tuple[TrainStep, TrainStep | None]:
    prepared = self._prepared
    return build_steps(
        prepared.model, settings, self._mesh, self._rules, prepared.reference
    )

  def tasks(self) -> list[Task]:
    """Programs of a step, for the largest of the shapes."""
    found = []
    for step, prefix, more in (
        (self._policy, '', self._settings.scores),
        (self._critic, 'critic ', ('score',)),
    ):
      if step is None:
        continue
      names = step.programs(*more)
      mesh = mesh_text(self._mesh)
      left_out = set(_EMPTY)
      if ('accumulate_around', self._largest) in names:
        left_out.add('accumulate')  # the same with one input less
      for name, shape in names:
        if name not in left_out and shape in (None, self._largest):
          trace = functools.partial(step.trace, name, shape)
          found.append(
              Task(prefix + name, 'train', mesh, trace, grouped=self._grouped)
          )
    return found

  @functools.cached_property
  def kinds(self) -> dict[str, int]:
    """Bytes a chip of what outlives a program."""
    kinds: dict[str, int] = {'parameters': 0, 'optimizer': 0}
    for step in filter(None, (self._policy, self._critic)):
      for name, role in step.abstract_state.roles.items():
        own = 'parameters' if name == 'policy' else name
        kinds[own] = bytes_of((role.trainable, role.frozen))
        kinds['optimizer'] += bytes_of((role.optimizer, role.counters))
    return kinds

  @property
  def total(self) -> int:
    return sum(self.kinds.values())

  @property
  def offloaded(self) -> int:
    """Bytes a chip that lie in the host's memory between steps."""
    if not self._settings.offload_optimizer:
      return 0
    steps = filter(None, (self._policy, self._critic))
    states = [step.abstract_state for step in steps]
    return bytes_of([r.optimizer for s in states for r in s.roles.values()])

  @property
  def beside(self) -> Beside:
    """Bytes that this side leaves on the chips while the other side works.

    Between steps what rests there; all of a step where neither waits.
    """
    resting = self.total - self.offloaded
    if self._prepared.settings.memory_by_phases:
      return Beside(resting, resting)
    return Beside(self.total + self.gradients + self._batches(), resting)

  @functools.cached_property
  def gradients(self) -> int:
    steps = filter(None, (self._policy, self._critic))
    return max(
        bytes_of(s.abstract_state.roles[s.role].trainable) for s in steps
    )

  @property
  def sent(self) -> Any:
    """Shapes of what each publish sends, and where they lie among all chips."""
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(
            leaf.shape,
            leaf.dtype,
            sharding=jax.sharding.NamedSharding(
                self._whole, leaf.sharding.spec
            ),
        ),
        self._policy.abstract_state.policy.trainable,
    )

  def _batches(self) -> int:
    """Bytes a chip of the microbatches of a step, all of them are there."""
    packing = self._settings.packing
    count = count_microbatches(self._prepared, longest_tokens(self._prepared))
    shards = self._rules.parts('batch', self._mesh)
    # Eight fields of 4 bytes, and proximal log-probs.
    return 36 * count * packing.rows * packing.row_tokens // shards

  def holding(
      self, programs: Sequence[Program], hbm: float, beside: Beside
  ) -> Holding:
    """Returns what a chip holds at its peak.

    Args:
      programs: those of this side and others.
      hbm: bytes of a chip.
      beside: what the other side has there.
    """
    batches = self._batches()
    resident = self.total + batches + beside.working
    moments = {}
    for program in programs:
      if program.side != 'train':
        continue
      held = resident
      if program.name.removeprefix('critic ') in _WITH_GRADIENTS:
        held += self.gradients
      moments[program.name] = _peak(program, held)
    copy = self._published_copy()
    if copy:
      # The step is over, and the optimizers may be away.
      resting = self.total - self.offloaded
      moments['publish'] = resting + beside.publishing + copy
    kinds = {**self.kinds, 'gradients': self.gradients, 'batches': batches}
    kinds |= _worst_of_programs(programs, 'train')
    if copy:
      kinds['copy to publish'] = copy
    if beside.working:
      kinds['rollout'] = beside.working
    failed = _failed(programs, 'train')
    return _holding(self._mesh.size, kinds, moments, hbm, failed)

  def _published_copy(self) -> int:
    """Bytes a chip of the copy that `Publisher` makes before it sends."""
    settings = self._prepared.settings
    if not (settings.rollout.dtype or settings.mesh.colocated):
      return 0
    return bytes_of(cast(self.sent, settings.rollout.dtype))

  def largest_rows(
      self,
      room: float,
      fits: bool,
      tries: int,
      compiled: Callable[[Task], Program],
  ) -> int:
    """Most rows of a microbatch that fit; 0 for none of those tried.

    Doubled while they fit, or halved until they do, down to one for each shard.
    """
    packing = self._settings.packing
    shards = self._rules.parts('batch', self._mesh)
    rows, best = packing.rows, packing.rows if fits else 0
    for _ in range(tries):
      rows = rows * 2 if fits else rows // 2 // shards * shards
      if not rows:
        break
      other = dataclasses.replace(packing, rows=rows, fewer=())
      step, _ = self._steps(dataclasses.replace(self._settings, packing=other))
      trace = functools.partial(step.trace, 'accumulate', other.shapes[0])
      name = f'accumulate, {rows} rows'
      mesh = mesh_text(self._mesh)
      program = compiled(
          Task(name, 'train', mesh, trace, grouped=self._grouped)
      )
      if program.failed:
        break
      held = self.total + self.gradients + self._batches()
      right = not program.refused and _peak(program, held) <= room
      if right:
        best = rows
      if right != fits:
        break
    return best


class RolloutSide:
  """The programs of one replica, and the memory that it holds."""

  def __init__(
      self,
      prepared: PreparedShapes,
      slices: Slices,
      topology: Topology,
      rules: Rules,
  ):
    settings, rules = prepared.settings, rules.for_rollout()
    replica = in_own_slices(slices.rollout[0], topology)
    self._settings = settings
    self._replicas = len(slices.rollout)
    merges = prepared.model if settings.rollout.merge_adapters else None
    served = lora.without(prepared.model) if merges else prepared.model
    self._engine = Engine(served, settings.rollout.engine, replica, rules)
    self._needs = rollout_memory.estimate(
        self._engine,
        settings.rollout.dtype,
        trains=True,
        pins=settings.evaluation.every > 0,
        merges=merges,
        turns=settings.memory_by_phases,
    )
    arriving = prepared.model
    self.targets = []
    for mesh in slices.rollout:
      shardings = parameters.param_shardings(arriving, mesh, rules)
      learns, _ = parameters.partition(arriving, shardings)
      self.targets.append(learns)

  @property
  def beside(self) -> Beside:
    """Bytes that this side leaves on the chips while the other side works."""
    return Beside(self._needs.resting, self._needs.arriving)

  def tasks(self) -> list[Task]:
    """Programs of a replica, the largest of each kind."""
    engine, shapes = self._engine, self._engine.share
    weights = engine.abstract_weights(self._settings.rollout.dtype)
    bucket = shapes.longest_piece
    rows, columns = shapes.piece_rows(bucket), shapes.live_buckets[-1]
    extend = functools.partial(
        engine.jitted.trace_extend, weights, rows, bucket
    )
    generate = functools.partial(engine.jitted.trace_generate, weights, columns)
    # All of the cache is live, which may be less than all slots could have.
    live = min(1.0, shapes.total_pages / (shapes.slots * columns))
    mesh = mesh_text(engine.mesh)
    grouped = 1 / engine.rules.parts('expert', engine.mesh)
    return [
        Task('extend', 'rollout', mesh, extend, grouped=grouped),
        Task('generate', 'rollout', mesh, generate, live, grouped),
    ]

  def holding(
      self, programs: Sequence[Program], hbm: float, beside: Beside
  ) -> Holding:
    """Returns what a chip holds at its peak; see `TrainSide`."""
    needs, state = self._needs, self._engine.jitted.abstract_state
    cache = bytes_of((state.keys, state.values))
    kinds = {
        'parameters': needs.shared + needs.weights * needs.weight_sets,
        'cache': cache * needs.decode_states,
        'slots': (needs.decode_state - cache) * needs.decode_states,
        **_worst_of_programs(programs, 'rollout'),
    }
    if beside.working:
      kinds['train'] = beside.working
    moments = {
        program.name: _peak(program, needs.generating + beside.working)
        for program in programs
        if program.side == 'rollout'
    }
    moments['new weights'] = needs.arriving + beside.publishing
    chips = self._engine.mesh.size * self._replicas
    failed = _failed(programs, 'rollout')
    return _holding(chips, kinds, moments, hbm, failed)


def bytes_of(shapes: Any) -> int:
  """Sums the bytes of one device's part of a tree of shapes with shardings."""
  return sum(
      int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
      * np.dtype(leaf.dtype).itemsize
      for leaf in jax.tree.leaves(shapes)
  )


def cast(shapes: Any, dtype: str) -> Any:
  """Shapes with another floating dtype; '' leaves them."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding)
      if dtype and jnp.issubdtype(x.dtype, jnp.floating)
      else x,
      shapes,
  )


def _peak(program: Program, held: int) -> int:
  """Most bytes while a program runs, `held` being there anyway."""
  memory = program.memory
  if memory is None:
    return max(program.refused, held)
  # Layouts of arguments may be padded; they are part of what is held.
  padding = max(0, memory.arguments - int(program.cost.arguments))
  return held + padding + memory.results + memory.temporaries + memory.code


def _worst_of_programs(
    programs: Sequence[Program], side: Side
) -> dict[str, int]:
  """Returns the largest extra memory of programs: 'temporaries', 'padding'."""
  found = [p for p in programs if p.side == side and p.memory is not None]
  kinds = {
      'temporaries': max(
          (p.memory.temporaries + p.memory.results for p in found), default=0
      ),
      'padding': max(
          (p.memory.arguments - int(p.cost.arguments) for p in found),
          default=0,
      ),
      'code': max((p.memory.code for p in found), default=0),
  }
  return {name: size for name, size in kinds.items() if size > 0}


def _failed(programs: Sequence[Program], side: Side) -> bool:
  """Returns whether the compiler failed at a program of a side."""
  return any(p.failed for p in programs if p.side == side)


def _holding(
    chips: int,
    kinds: Mapping[str, int],
    moments: Mapping[str, int],
    hbm: float,
    failed: bool,
) -> Holding:
  at = max(moments, key=moments.get)
  peak = moments[at]
  fits = False if peak > hbm else None if failed else True
  return Holding(chips, dict(kinds), peak, at, fits)


def mesh_text(mesh: jax.sharding.Mesh) -> str:
  """Formats a mesh as 'data 8 · fsdp 4', without axes of size 1."""
  used = [f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1]
  return ' · '.join(used) or 'one chip'


def count_elements(shapes: Any) -> int:
  """Counts the elements of all arrays of a tree of shapes."""
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))


def count_microbatches(prepared: PreparedShapes, tokens: int) -> int:
  """Counts the microbatches of a step, at least one a minibatch."""
  train = prepared.settings.train
  whole = math.ceil(tokens / (train.packing.rows * train.packing.row_tokens))
  return max(train.minibatches, whole)


def longest_tokens(prepared: PreparedShapes) -> int:
  """Counts the tokens of a step in which everything has its maximum length."""
  rollout = prepared.settings.rollout
  longest = rollout.engine.max_prompt_length + rollout.max_new_tokens
  return rollout.batch_size * rollout.group_size * longest
