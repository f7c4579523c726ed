"""Whether a run fits its machine, and how fast it could be at best.

In come shapes (`experiment.PreparedShapes`) and a topology. The run's programs
are compiled for it: every one of the train step, prefill and decode. Out comes
a `Report`: memory of a chip by kind, costs, the roofline of a training step,
the largest microbatch, what a publish sends, and advice. No parameter exists at
any time.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.compile_check.chips import Topology, in_own_slices
from areal_jax.compile_check.programs import (
    Program,
    Side,
    Task,
    compile_program,
)
from areal_jax.compile_check.reshard import Reshard, reshard
from areal_jax.experiment import PreparedShapes
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices, cut, devices_needed
from areal_jax.models import lora, transformer
from areal_jax.rollout import memory as rollout_memory
from areal_jax.rollout.engine import Engine
from areal_jax.train.step import TrainStep
from areal_jax.train.trainer import TrainSettings, build_steps

# Programs that only make what the others fill.
_EMPTY = ('initialise', 'zeros', 'no_load')
# Those that hold a gradient.
_WITH_GRADIENTS = ('accumulate', 'accumulate_around', 'apply')


@dataclasses.dataclass(frozen=True)
class Holding:
  """What a chip of one side holds.

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
      parameters=_elements(transformer.abstract_params(prepared.model)),
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
    """What is there on the same chips while the other side works.

    Between steps what rests there; all of a step where neither waits.
    """
    resting = self.total - self.offloaded
    if self._prepared.settings.takes_turns:
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
    count = _microbatches(self._prepared, _longest_tokens(self._prepared))
    shards = self._rules.parts('batch', self._mesh)
    # Eight fields of 4 bytes, and proximal log-probs.
    return 36 * count * packing.rows * packing.row_tokens // shards

  def holding(
      self, programs: Sequence[Program], hbm: float, beside: Beside
  ) -> Holding:
    """What a chip holds, at the worst of its moments.

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
  """One replica: its programs and what it holds."""

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
        turns=settings.takes_turns,
    )
    arriving = prepared.model
    self.targets = []
    for mesh in slices.rollout:
      shardings = transformer.param_shardings(arriving, mesh, rules)
      learns, _ = transformer.partition(arriving, shardings)
      self.targets.append(learns)

  @property
  def beside(self) -> Beside:
    """What is there on the same chips while the other side works."""
    return Beside(self._needs.resting, self._needs.arriving)

  def tasks(self) -> list[Task]:
    """Programs of a replica, the largest of each kind."""
    engine, shapes = self._engine, self._engine.share
    weights = engine.abstract_weights(self._settings.rollout.dtype)
    bucket = shapes.longest_piece
    rows, columns = shapes.piece_rows(bucket), shapes.live_buckets[-1]
    extend = functools.partial(engine.trace_extend, weights, rows, bucket)
    generate = functools.partial(engine.trace_generate, weights, columns)
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
    """What a chip holds, at the worst of its moments; see `TrainSide`."""
    needs, state = self._needs, self._engine.abstract_state
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


def advise(prepared: PreparedShapes, report: Report) -> list[str]:
  """What to change, the most effective first."""
  settings, model = prepared.settings, prepared.model
  found = []
  if report.train.fits is False:
    found += _advise_training(prepared, report)
  if report.rollout.fits is False:
    found += _advise_rollout(prepared, report)
  if report.fits and (report.largest_rows or 0) > report.rows:
    found.append(
        f'train.packing.rows={report.largest_rows} fits too: fewer, larger'
        ' microbatches'
    )
  if model.layer_loop == 'unroll' and model.layers > 16:
    found.append(
        "policy.model.layer_loop='scan' compiles one layer instead of"
        f' {model.layers}'
    )
  idle = report.topology.count - report.used
  if idle > 0:
    found.append(
        f'{idle} of {report.topology.count} chips are in no mesh: more'
        ' mesh.train.fsdp or mesh.rollout.replicas'
    )
  step = report.step
  if step is not None and not settings.mesh.colocated:
    slow, fast = sorted((step.train_s, step.rollout_s), reverse=True)
    if slow > 2 * fast:
      side, other = 'train', 'rollout'
      if step.rollout_s > step.train_s:
        side, other = other, side
      found.append(
          f'the {side} mesh takes {slow / fast:.1f} times as long as the'
          f' {other} mesh: give it chips of the other'
      )
  return found


def _advise_training(prepared: PreparedShapes, report: Report) -> list[str]:
  settings, model = prepared.settings, prepared.model
  kinds, hbm = report.train.kinds, report.topology.chip.hbm
  mesh = settings.mesh.train
  found = []
  state = sum(
      kinds.get(name, 0)
      for name in ('parameters', 'optimizer', 'gradients', 'reference',
                   'critic')
  )  # fmt: skip
  if state > 0.6 * hbm:
    least = 2 ** math.ceil(math.log2(mesh.fsdp * state / (0.6 * hbm)))
    found.append(
        f'mesh.train.fsdp={least}: parameters, optimizer and gradients take'
        f' {state / 2**30:.1f} GiB of {hbm / 2**30:.1f}, and a share of that'
        ' over more chips'
    )
    if settings.train.optimizer.kind == 'adamw':
      found.append(
          "train.optimizer.kind='adafactor': a row and a column for each"
          ' matrix in place of two moments'
      )
    if not model.lora.projections:
      found.append(
          'policy.model.lora.projections: adapters need neither moments nor'
          ' gradients of the base'
      )
  if model.remat in ('none', 'dots'):
    found.append("policy.model.remat='full': activations are computed again")
  if model.compute_dtype != 'bfloat16':
    found.append(
        "policy.model.compute_dtype='bfloat16': activations of half the size"
    )
  packing = settings.train.packing
  if report.largest_rows:
    found.append(
        f'train.packing.rows={report.largest_rows} fits, {packing.rows} do not'
    )
  elif packing.rows > mesh.row_shards and report.largest_rows is None:
    found.append(f'train.packing.rows={mesh.row_shards}: one row a chip')
  elif not found or state <= 0.6 * hbm:
    found.append(
        f'mesh.train.context={2 * mesh.context} or'
        f' mesh.train.tensor={2 * mesh.tensor}: a row of {packing.row_tokens}'
        ' tokens is too long for one chip'
    )
  return found


def _advise_rollout(prepared: PreparedShapes, report: Report) -> list[str]:
  settings = prepared.settings
  kinds, hbm = report.rollout.kinds, report.topology.chip.hbm
  engine, found = settings.rollout.engine, []
  if settings.takes_turns and not settings.train.offload_optimizer:
    found.append(
        'train.offload_optimizer=True: moments lie in the memory of the host'
        ' while nobody trains'
    )
  if not settings.rollout.dtype:
    found.append("rollout.dtype='bfloat16': weights of half the size")
  if kinds['parameters'] > 0.6 * hbm:
    found.append(
        f'mesh.rollout.tensor={2 * settings.mesh.rollout.tensor}: weights take'
        f' {kinds["parameters"] / 2**30:.1f} GiB of {hbm / 2**30:.1f}'
    )
  if kinds['cache']:
    room = hbm - report.rollout.peak + kinds['cache']
    shards = settings.mesh.rollout.data
    held = engine.of_shard(shards).total_pages
    pages = int(held * room / kinds['cache'])
    if pages > engine.pages_per_slot:
      found.append(
          f'rollout.engine.pages={shards * pages}: the cache takes'
          f' {kinds["cache"] / 2**30:.1f} GiB, and slots rarely are all of'
          ' max_length at once'
      )
    elif fewer := engine.slots // 2 // shards * shards:
      found.append(f'rollout.engine.slots={fewer}, or more chips')
  return found


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
  count = _microbatches(prepared, answers * (new + prompt))
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
  alone = settings.mesh.colocated or rollout.eta == 0
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
  """How often each program of the train mesh runs in a step."""
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


def _microbatches(prepared: PreparedShapes, tokens: int) -> int:
  """Of a step; a minibatch has one at least."""
  train = prepared.settings.train
  whole = math.ceil(tokens / (train.packing.rows * train.packing.row_tokens))
  return max(train.minibatches, whole)


def _longest_tokens(prepared: PreparedShapes) -> int:
  """Of a step whose prompts and answers are all as long as they may be."""
  rollout = prepared.settings.rollout
  longest = rollout.engine.max_prompt_length + rollout.max_new_tokens
  return rollout.batch_size * rollout.group_size * longest


# Bytes.


def bytes_of(shapes: Any) -> int:
  """Of a device's part of arrays, over a tree of shapes with shardings."""
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
  """What programs need besides what is held: 'temporaries', and 'padding'."""
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
  """Whether the compiler failed at a program of a side."""
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
  """Such as 'data 8 · fsdp 4', axes of size 1 left out."""
  used = [f'{axis} {size}' for axis, size in mesh.shape.items() if size > 1]
  return ' · '.join(used) or 'one chip'


def _elements(shapes: Any) -> int:
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
