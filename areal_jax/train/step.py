"""The jitted train step: microbatches in, one optimizer update out.

A minibatch is cut into microbatches of a few static shapes [B, T]; `accumulate`
adds the gradient of each to a running sum, and `apply` makes one update of it.
The host calls them in a loop, so any number of microbatches of any of the
shapes runs the same compiled programs. Losses are divided by the token count of
the whole minibatch, which is handed in, so the sum does not depend on the cut.

What is minimised comes in as an `Objective`; policy and supervised training
are two of them over the same programs. Everything is compiled ahead of time,
by a thread in the order of need: a compiled program refuses any other shape or
sharding instead of building itself anew in the middle of a run.

Three things may come of a minibatch (`Counters`): it is applied; it is idle,
because no token had anything to teach, and then neither parameters nor moments
move, not even by weight decay or momentum; or it is skipped, because its
gradient was not finite, and then again nothing moves. When one more than
`max_consecutive_skips` were skipped in a row, the run is at its end: whatever
is handed out before the host hears of it moves nothing and is not counted.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from areal_jax.config import require
from areal_jax.losses import logprobs, statistics
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads, lora, moe, parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.moe import Routing
from areal_jax.telemetry.programs import Name, Programs
from areal_jax.train import packing as packing_lib
from areal_jax.train.objectives import Batch, Objective, Scores
from areal_jax.train.optimizer import (
    OptimizerSettings,
    learning_rate,
    make_optimizer,
    squared_norms,
)
from areal_jax.train.outcome import NonFiniteError, UpdateOutcome
from areal_jax.train.packing import PackingSettings, Shape
from areal_jax.train.placement import (
    NetworkKind,
    PyTree,
    abstract_network,
    moment_shardings,
    shardings_of,
    with_shardings,
    zeros,
)
from areal_jax.train.state import Counters, Role, TrainState
from areal_jax.types import Microbatch

# The loss holds a few arrays of this size at once, instead of some of the size
# of a whole microbatch's logits.
LOGIT_BYTES = 1 << 27
# Where rows are cut, the gradient of the unembedding is summed over devices for
# each part anew: with parts of the size above, a row of 32,768 tokens and a
# vocabulary of 152,000 that was most of what a step sent.
LOGIT_BYTES_OF_CHIPS = 1 << 29


class TrainStep:
  """The compiled programs of training for one network and mesh.

  Holds no training state: states go in and come out, and those that went in
  are donated (their buffers are gone). A state may have further roles: one step
  trains the policy of it, another one its critic.

  Args:
    config: the model.
    objective: what is minimised.
    optimizer: schedule, clipping, and what makes an update of a gradient.
    mesh: the train mesh.
    rules: from logical axes to mesh axes; rows are cut as 'batch'.
    packing: the shapes [B, T] of microbatches; each has programs of its own.
    kind: what the network says of a token: 'policy' its log-prob, 'value' what
      a critic expects before it, 'reward' the score of the sequence that ends
      with it. A critic is kept as role 'critic', the others as 'policy'.
    reference: shape of the frozen policy that the state has as role
      'reference'; None without one.
    scores_reference: whether the objective is given its log-probs.
    inputs: what `place` sends beside the fields of a microbatch, by name: ()
      for a float32 scalar, ('batch', 'time') for float32 [B, T].
    recompute_proximal: whether `accumulate` may be given proximal log-probs.
      Without, the proximal policy is the one that learns: right for the first
      update of a step.
    max_consecutive_skips: how many non-finite minibatches in a row are skipped
      before `fetch` raises.
    logit_bytes: of logits that a device may hold at once; None for
      `LOGIT_BYTES` on CPUs and `LOGIT_BYTES_OF_CHIPS` elsewhere.
    replayed: (L, k) of the recorded choices of experts that microbatches have;
      None if they have none.
    ahead: what compiles ahead of time, shared by the steps of one trainer; None
      for one of its own.

  Attributes:
    role: of the network that learns, in a state.
    ahead: as above.

  Raises:
    ConfigError: rows, or the tokens of a row, do not divide over the shards of
      the mesh.
  """

  def __init__(
      self,
      config: ModelConfig,
      objective: Objective,
      optimizer: OptimizerSettings,
      mesh: Mesh,
      rules: Rules,
      packing: PackingSettings,
      *,
      kind: NetworkKind = 'policy',
      reference: ModelConfig | None = None,
      scores_reference: bool = True,
      inputs: Mapping[str, tuple[str, ...]] | None = None,
      recompute_proximal: bool = False,
      max_consecutive_skips: int = 3,
      logit_bytes: int | None = None,
      replayed: tuple[int, int] | None = None,
      ahead: Programs | None = None,
  ):
    self.ahead = ahead or Programs()
    self._shards = rules.parts('batch', mesh)
    self._pieces = rules.parts('time', mesh)
    for largest, others, sizes, parts in (
        ('rows', 'fewer', packing.numbers, self._shards),
        ('row_tokens', 'shorter', packing.lengths, self._pieces),
    ):
      for size in sizes:
        field = largest if size == getattr(packing, largest) else others
        require(
            size % parts == 0,
            f'packing.{field}',
            size,
            f'a multiple of the {parts} shards of the train mesh',
        )
    self._config = config
    self._objective = objective
    self._settings = optimizer
    self._mesh = mesh
    self._rules = rules
    self._shapes = packing.shapes
    self._kind = kind
    self.role = 'critic' if kind == 'value' else 'policy'
    self._reference = reference
    self._scores_reference = reference is not None and scores_reference
    self._inputs = {'denominator': (), **(inputs or {})}
    self._recompute_proximal = recompute_proximal
    self._max_consecutive_skips = max_consecutive_skips
    if logit_bytes is None:
      on_cpu = mesh.devices.flat[0].platform == 'cpu'
      logit_bytes = LOGIT_BYTES if on_cpu else LOGIT_BYTES_OF_CHIPS
    self._logit_bytes = logit_bytes
    self._replayed = replayed
    self._balance = config.moe.balance if kind == 'policy' else 0.0
    self._rows = rules.sharding(
        ('batch', 'time'), (packing.rows, packing.row_tokens), mesh
    )
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    self._params = abstract_network(config, kind, mesh, rules)
    self._learns, _ = self._partition(self._params)
    self._optimizer = make_optimizer(
        optimizer, lora.part_of(_matrix_sides(config, kind), self._learns)
    )
    # jax remembers what it traced for a shape: `abstract_total` and the program
    # of the largest one want the same, and it takes as long as some compile.
    self._traced_once = jax.jit(self._gradient)
    self._batches: dict[Shape, dict[str, jax.ShapeDtypeStruct]] = {}
    self._compiled: dict[tuple[str, Shape | None], jax.stages.Compiled] = {}
    self._planned: set[tuple[str, Shape | None]] = set()
    self._names = [
        jax.tree_util.keystr(path, simple=True, separator='/')
        for path, _ in jax.tree.leaves_with_path(self._learns)
    ]

  def warm_up(self, *more: str) -> None:
    """Compiles every program; nothing compiles after it.

    Args:
      more: 'score' or 'score_reference', where those are asked for.

    Raises:
      Exception: what the compilation of one of them raised.
    """
    self.compile_ahead(*more)
    self.ahead.wait_for_all()

  def compile_ahead(self, *more: str) -> None:
    """Begins to compile every program that is not planned yet, and returns.

    It goes on in one thread, in the order of `programs`; nothing is computed. A
    call of a program waits for that one alone, and it comes next.

    Args:
      more: see `warm_up`.
    """
    work = []
    for name, shape in self.programs(*more):
      if (name, shape) not in self._planned:
        self._planned.add((name, shape))
        compile_ = functools.partial(self._compile, name, shape)
        work.append((self._name(name, shape), compile_))
    self.ahead.plan(work)

  def programs(self, *more: str) -> list[tuple[str, Shape | None]]:
    """Lists what `warm_up` compiles: names, and shapes of microbatches.

    In the order of need: what every step calls, with the largest microbatch,
    and then the same for smaller ones.
    """
    of_shapes = ['score'] if 'score' in more or self._recompute_proximal else []
    if 'score_reference' in more:
      of_shapes.append('score_reference')
    if self._balance:
      of_shapes.append('load')
    of_shapes.append('accumulate')
    if self._recompute_proximal:
      of_shapes.append('accumulate_around')
    largest, *others = self._shapes
    found: list[tuple[str, Shape | None]] = [('initialise', None)]
    found += [(name, largest) for name in of_shapes]
    found += [(name, None) for name in ('zeros', 'apply')]
    if self._balance:
      found.append(('no_load', None))
    return found + [(name, shape) for shape in others for name in of_shapes]

  def trace(self, name: str, shape: Shape | None) -> jax.stages.Traced:
    """Traces one of `programs` from shapes, without any device."""
    function, arguments, donated, placed = self._plan(name, shape)
    jitted = jax.jit(function, donate_argnums=donated, out_shardings=placed)
    return jitted.trace(*arguments)

  def initial_state(
      self, params: PyTree, reference: PyTree | None = None
  ) -> TrainState:
    """State at version 0; takes what it is given over, not to be used again.

    Args:
      params: of the network that learns.
      reference: of the frozen policy; None for a copy of `params`, where the
        step was built with one. With adapters it is a copy of those alone: the
        base is the policy's, which stays as it is.

    Raises:
      ValueError, TypeError: parameters of another shape or sharding.
    """
    roles = {self.role: self._program('initialise')(params)}
    if self._reference is not None:
      if reference is None:
        # Copied: the policy's buffers are donated at each update.
        reference = self._program('copy')(roles[self.role].trainable)
      roles['reference'] = Role({}, reference)
    return TrainState(roles, version=0)

  def state_shardings(self) -> TrainState:
    """Shardings of a state, to place one that was loaded from a checkpoint."""
    return TrainState(shardings_of(self.abstract_state.roles), self._everywhere)

  def place(
      self,
      microbatch: Microbatch,
      denominator: float,
      version: int,
      **more: Any,
  ) -> Batch:
    """Sends a microbatch to the train mesh.

    Args:
      microbatch: of one of the static shapes.
      denominator: loss tokens of its whole minibatch, or what else the loss is
        divided by.
      version: the version that the step started from.
      **more: the other `inputs` of the step.

    Raises:
      ValueError: inputs of other names than the step was built with, or a
        microbatch of another shape.
    """
    more = {'denominator': denominator, **more}
    if set(more) != set(self._inputs):
      raise ValueError(
          f'inputs {sorted(more)} were placed, wanted {sorted(self._inputs)}'
      )
    arrays = microbatch.arrays()
    arrays |= {name: np.float32(value) for name, value in more.items()}
    arrays['version'] = np.int32(version)
    shape = Shape(*microbatch.ids.shape)
    if shape not in self._shapes:
      raise ValueError(
          f'a microbatch is of {shape}, wanted one of {self._shapes}'
      )
    return jax.device_put(arrays, shardings_of(self._batch(shape)))

  def rows(self, values: np.ndarray) -> Array:
    """Sends [B, T] float32 to where the rows of a microbatch lie."""
    return jax.device_put(np.asarray(values, np.float32), self._rows)

  def score(self, state: TrainState, batch: Batch) -> Array:
    """[B, T] that the network says under the weights of `state`.

    Log-probs of a policy, which `accumulate` takes as proximal ones if the
    state is that at the start of a step; values of a critic.
    """
    program = self._program('score', _shape(batch))
    return program(state.roles[self.role].params, batch)

  def score_reference(self, state: TrainState, batch: Batch) -> Array:
    """[B, T] log-probs under the reference policy."""
    program = self._program('score_reference', _shape(batch))
    return program(self._reference_params(state), batch)

  def accumulate(
      self,
      state: TrainState,
      batches: Sequence[Batch],
      proximal: Sequence[Array] | None = None,
  ) -> PyTree:
    """Sums 'gradient', 'loss' and 'stats' of one minibatch, on the device.

    Args:
      state: is only read.
      batches: from `place`, any number.
      proximal: log-probs for each batch. None where the weights of `state` are
        those that the step started from, and so are the proximal policy.

    Raises:
      ValueError: the step was not built to be given proximal log-probs.
    """
    if proximal is not None and not self._recompute_proximal:
      raise ValueError(
          'proximal log-probs given, wanted a step with recompute_proximal=True'
      )
    total = self._program('zeros')()
    roles = self._scored_roles(state)
    if self._balance:
      load = self._program('no_load')()
      for batch in batches:
        program = self._program('load', _shape(batch))
        load = program(load, roles[self.role], batch)
      batches = [{**batch, 'load': load} for batch in batches]
    if proximal is None:
      for batch in batches:
        program = self._program('accumulate', _shape(batch))
        total = program(total, roles, batch)
      return total
    for batch, logps in zip(batches, proximal, strict=True):
      batch = {**batch, 'proximal_logps': logps}
      program = self._program('accumulate_around', _shape(batch))
      total = program(total, roles, batch)
    return total

  def apply(
      self, state: TrainState, total: PyTree, *, teaches: bool
  ) -> tuple[TrainState, PyTree]:
    """Applies one optimizer update.

    Args:
      state: the network that learns is donated, other roles are kept.
      total: from `accumulate`.
      teaches: False makes the minibatch idle: nothing moves.

    Returns:
      The next state, its version unchanged, and the outcome on the device for
      `fetch`.
    """
    teaches_ = jax.device_put(np.bool_(teaches), self._everywhere)
    learner, outcome = self._program('apply')(
        state.roles[self.role], total, teaches_
    )
    return TrainState({**state.roles, self.role: learner}, state.version), (
        outcome
    )

  def fetch(self, outcomes: Sequence[PyTree], step: int) -> list[UpdateOutcome]:
    """Brings outcomes to the host, in one transfer.

    Args:
      outcomes: from `apply`, of the minibatches since the last fetch.
      step: named in the error.

    Raises:
      NonFiniteError: more than `max_consecutive_skips` were skipped in a row.
    """
    return self.outcomes(jax.device_get(list(outcomes)), step)

  def outcomes(
      self, fetched: Sequence[PyTree], step: int
  ) -> list[UpdateOutcome]:
    """Outcomes that are on the host already; see `fetch`."""
    found = [self._outcome(raw) for raw in fetched]
    for outcome in found:
      if outcome.consecutive_skips > self._max_consecutive_skips:
        names = ', '.join(outcome.nonfinite)
        where = f'this time in {names}' if names else 'no further one is made'
        raise NonFiniteError(
            f'step {step}: {outcome.consecutive_skips} updates in a row had a'
            ' gradient that is not finite, wanted at most'
            f' max_consecutive_skips={self._max_consecutive_skips}; {where}'
        )
    return found

  def _outcome(self, raw: Mapping[str, Any]) -> UpdateOutcome:
    norm = float(raw['gradient_norm'])
    named = zip(self._names, raw['squared_norms'], strict=True)
    nonfinite = [name for name, square in named if not np.isfinite(square)]
    if not np.isfinite(raw['loss']):
      nonfinite.insert(0, 'loss')
    if not nonfinite and not np.isfinite(norm):
      nonfinite.append('the global norm, which overflows')
    return UpdateOutcome(
        applied=bool(raw['applied']),
        gradient_norm=norm,
        update_norm=float(raw['update_norm']),
        learning_rate=float(raw['learning_rate']),
        loss=float(raw['loss']),
        idle_updates=int(raw['idle_updates']),
        skipped_updates=int(raw['skipped_updates']),
        consecutive_skips=int(raw['consecutive_skips']),
        nonfinite=tuple(nonfinite),
        stats={
            name: float(value) if np.ndim(value) == 0 else value
            for name, value in raw['stats'].items()
        },
    )

  # What the compiled programs compute.

  def _initialise(self, params: PyTree) -> Role:
    counters = Counters(*(jnp.zeros((), jnp.int32) for _ in range(4)))
    learns, stays = self._partition(params)
    return Role(learns, stays, self._optimizer.init(learns), counters)

  def _partition(self, params: PyTree) -> tuple[PyTree, PyTree]:
    """Splits into trainable and frozen; heads train with their trunk."""
    if self._kind != 'policy':
      return params, {}
    return parameters.partition(self._config, params)

  def _logps(
      self,
      config: ModelConfig,
      params: PyTree,
      batch: Batch,
      *,
      replay: bool = True,
  ) -> tuple[Array, Array, Routing | None]:
    """Log-prob and entropy [B, T] of a policy's loss tokens, and the routing.

    The first two are 0 elsewhere. Recorded choices of experts are those of the
    policy; another one (`replay` False) makes its own.
    """
    place = dict(mesh=self._mesh, rules=self._rules)
    states, routing = transformer.hidden_routed(
        config,
        params,
        batch['ids'],
        batch['positions'],
        batch['segment_ids'],
        given=batch.get('routing') if replay else None,
        **place,
    )
    whole = parameters.with_whole_unembedding(
        config, params, states.dtype, **place
    )
    logps, entropy = logprobs.masked_logps(
        lambda x: transformer.unembed(config, whole, x, **place),
        states,
        batch['ids'],
        batch['segment_ids'],
        batch['temperatures'],
        batch['loss_mask'],
        chunk=self._chunk(config, len(batch['ids'])),
        pieces=self._pieces,
    )
    return logps, entropy, routing

  def _chunk(self, config: ModelConfig, rows: int) -> int:
    """Positions of each row whose logits a device may hold at once."""
    columns = config.padded_vocab_size // self._rules.parts('vocab', self._mesh)
    of_position = 4 * columns * (rows // self._shards)  # one a row, float32
    return max(1, self._logit_bytes // of_position)

  def _score(self, params: PyTree, batch: Batch) -> Array:
    """Computes what `score` returns, for any kind of network."""
    if self._kind == 'policy':
      return self._logps(self._config, params, batch)[0]
    said = (heads.values if self._kind == 'value' else heads.scores)(
        self._config,
        params,
        batch['ids'],
        batch['positions'],
        batch['segment_ids'],
        mesh=self._mesh,
        rules=self._rules,
    )
    if self._kind == 'reward':
      return said
    # The state in which a token was chosen ends with the token before it.
    return jnp.pad(said[:, :-1], ((0, 0), (1, 0)))

  def _score_reference(self, params: PyTree, batch: Batch) -> Array:
    return self._logps(self._reference, params, batch, replay=False)[0]

  def _load(self, load: PyTree, params: PyTree, batch: Batch) -> PyTree:
    """Adds the tokens of a microbatch to those of each expert."""
    _, _, routing = self._logps(self._config, params, batch)
    return jax.tree.map(jnp.add, load, _load(routing, batch))

  def _gradient(self, roles: Mapping[str, PyTree], batch: Batch):
    """((loss, (stats, routing)), gradient) of one microbatch."""
    reference_logps = None
    if 'reference' in roles:
      reference_logps = self._score_reference(roles['reference'], batch)

    learns, stays = self._partition(roles[self.role])

    def loss(learns):
      params = lora.overlaid(stays, learns)
      if self._kind != 'policy':
        value, stats = self._objective(self._score(params, batch), batch)
        return value, (stats, {})
      logps, entropy, routing = self._logps(self._config, params, batch)
      proximal = batch.get('proximal_logps', jax.lax.stop_gradient(logps))
      scores = Scores(logps, entropy, proximal, reference_logps)
      value, stats = self._objective(scores, batch)
      if routing is None:
        return value, (stats, {})
      sums = {'mass': routing.mass, 'entropy': routing.entropy}
      sums |= _load(routing, batch)
      if self._balance:
        # Over the minibatch, whatever the cut: see `moe.balance_loss`.
        value += self._balance * moe.balance_loss(
            mass=routing.mass, **batch['load']
        )
      return value, (stats, jax.lax.stop_gradient(sums))

    return jax.value_and_grad(loss, has_aux=True)(learns)

  def _accumulate(self, total, roles, batch):
    (loss, (stats, routing)), gradient = self._traced_once(roles, batch)
    return {
        'gradient': jax.tree.map(jnp.add, total['gradient'], gradient),
        'routing': jax.tree.map(jnp.add, total['routing'], routing),
        'loss': total['loss'] + loss,
        'stats': statistics.merge_stats([total['stats'], stats]),
    }

  def _apply(self, learner: Role, total, teaches):
    gradient, counters = total['gradient'], learner.counters
    squares = squared_norms(gradient)
    norm = jnp.sqrt(sum(squares))
    # A KL term teaches nothing while the policy is its reference.
    teaches &= norm != 0
    finite = jnp.isfinite(norm) & jnp.isfinite(total['loss'])
    goes_on = counters.consecutive_skips <= self._max_consecutive_skips
    skipped = goes_on & ~finite
    applied = goes_on & finite & teaches
    changes, optimizer = self._optimizer.update(
        gradient, learner.optimizer, learner.trainable
    )
    params = optax.apply_updates(learner.trainable, changes)

    def settle(new, old):  # what was skipped or idle moves nothing
      return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    after = Counters(
        applied_updates=counters.applied_updates + applied,
        idle_updates=counters.idle_updates + (goes_on & finite & ~teaches),
        skipped_updates=counters.skipped_updates + skipped,
        consecutive_skips=jnp.where(
            applied, 0, counters.consecutive_skips + skipped
        ),
    )
    outcome = {
        'applied': applied,
        'gradient_norm': norm,
        'update_norm': jnp.where(
            applied, jnp.sqrt(sum(squared_norms(changes))), 0.0
        ),
        'squared_norms': jnp.stack(squares),
        'learning_rate': learning_rate(
            self._settings, counters.applied_updates
        ),
        'loss': total['loss'],
        'idle_updates': after.idle_updates,
        'skipped_updates': after.skipped_updates,
        'consecutive_skips': after.consecutive_skips,
        'stats': total['stats'],
    }
    if total['routing']:
      routers = moe.statistics(**total['routing'])
      outcome['stats'] = {**total['stats'], **routers}
    learner = Role(
        settle(params, learner.trainable),
        learner.frozen,
        settle(optimizer, learner.optimizer),
        after,
    )
    return learner, outcome

  # How they are compiled.

  def _batch(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and sharding of everything that `place` sends."""
    if shape not in self._batches:
      fields = packing_lib.empty(shape, self._replayed).arrays()
      for name, axes in self._inputs.items():
        fields[name] = fields['advantages'] if axes else np.float32(0)
      fields['version'] = np.int32(0)
      self._batches[shape] = {
          name: jax.ShapeDtypeStruct(
              value.shape,
              value.dtype,
              sharding=self._rows if value.ndim else self._everywhere,
          )
          for name, value in fields.items()
      }
    return self._batches[shape]

  @functools.cached_property
  def abstract_state(self) -> TrainState:
    """Shape and sharding of a state, its own roles alone."""
    learner = jax.eval_shape(self._initialise, self._params)
    learns, stays = self._partition(shardings_of(self._params))
    moments = moment_shardings(
        learner.optimizer, self._learns, self._everywhere
    )
    counters = jax.tree.map(lambda _: self._everywhere, learner.counters)
    placed = Role(learns, stays, moments, counters)
    roles = {self.role: with_shardings(learner, placed)}
    if self._reference is not None:
      held = abstract_network(
          self._reference, 'policy', self._mesh, self._rules
      )
      held, _ = parameters.partition(self._reference, held)
      roles['reference'] = Role({}, held)
    return TrainState(roles)

  @functools.cached_property
  def abstract_total(self) -> PyTree:
    """Shape and sharding of what `accumulate` sums up."""
    roles = self._scored_roles(self.abstract_state)
    (loss, (stats, routing)), gradient = jax.eval_shape(
        self._traced_once, roles, self._summed_batch(self._shapes[0])
    )
    return {
        'gradient': with_shardings(gradient, shardings_of(self._learns)),
        'loss': self._replicated(loss),
        'stats': self._replicated(stats),
        'routing': self._replicated(routing),
    }

  @functools.cached_property
  def _abstract_load(self) -> PyTree:
    """Shape and sharding of what `load` sums up."""
    shape = (len(self._config.sparse_layers), self._config.moe.experts)
    return self._replicated(
        {
            'counts': jax.ShapeDtypeStruct(shape, jnp.float32),
            'tokens': jax.ShapeDtypeStruct((), jnp.float32),
        }
    )

  def _summed_batch(self, shape: Shape) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as `_accumulate` takes it, without proximal log-probs."""
    if not self._balance:
      return self._batch(shape)
    return {**self._batch(shape), 'load': self._abstract_load}

  def _scored_roles(self, state: TrainState) -> dict[str, PyTree]:
    """Parameters by role, as the loss takes them."""
    roles = {self.role: state.roles[self.role].params}
    if self._scores_reference:
      roles['reference'] = self._reference_params(state)
    return roles

  def _reference_params(self, state: TrainState) -> PyTree:
    """All of the reference; its base, if it has adapters, is the policy's."""
    held = state.roles['reference'].params
    if not self._reference.lora.projections:
      return held
    return lora.overlaid(state.roles[self.role].frozen, held)

  def _program(
      self, name: str, shape: Shape | None = None
  ) -> jax.stages.Compiled:
    """The compiled program of that name; waits if it is being compiled.

    Args:
      name: see `_plan`.
      shape: of its batch; None for those that take none.
    """
    if (name, shape) not in self._compiled:
      self.ahead.wait(self._name(name, shape))
    if (name, shape) not in self._compiled:  # nobody planned it, or gave it up
      self._compile(name, shape)
    return self._compiled[name, shape]

  def _compile(self, name: str, shape: Shape | None) -> None:
    self._compiled[name, shape] = self.trace(name, shape).lower().compile()

  def _name(self, name: str, shape: Shape | None) -> Name:
    sizes = () if shape is None else (shape.rows, shape.row_tokens)
    return (self.role, name, *sizes)

  def _plan(
      self, name: str, shape: Shape | None
  ) -> tuple[Callable, tuple, tuple[int, ...], PyTree]:
    """Function, shapes of arguments, which are donated, where results go."""
    state = self.abstract_state
    learner = state.roles[self.role]
    if name == 'initialise':
      return self._initialise, (self._params,), (0,), shardings_of(learner)
    if name == 'copy':
      copy = functools.partial(jax.tree.map, jnp.copy)
      return copy, (self._learns,), (), shardings_of(self._learns)
    if name == 'no_load':
      load = self._abstract_load
      return functools.partial(zeros, load), (), (), self._everywhere
    total = self.abstract_total
    if name == 'zeros':
      return functools.partial(zeros, total), (), (), shardings_of(total)
    if name == 'apply':
      teaches = self._replicated(jax.ShapeDtypeStruct((), jnp.bool_))
      placed = (shardings_of(learner), self._everywhere)
      return self._apply, (learner, total, teaches), (0,), placed
    batch = self._batch(shape)
    logps = batch['behavior_logps']
    if name == 'score':
      return self._score, (self._params, batch), (), logps.sharding
    if name == 'score_reference':
      arguments = (self._reference_params(state), batch)
      return self._score_reference, arguments, (), logps.sharding
    if name == 'load':
      arguments = (self._abstract_load, self._params, batch)
      return self._load, arguments, (0,), self._everywhere
    roles, batch = self._scored_roles(state), self._summed_batch(shape)
    if name == 'accumulate_around':
      batch = {**batch, 'proximal_logps': logps}
    return self._accumulate, (total, roles, batch), (0,), shardings_of(total)

  def _replicated(self, shapes: PyTree) -> PyTree:
    return with_shardings(
        shapes, jax.tree.map(lambda _: self._everywhere, shapes)
    )


def _matrix_sides(config: ModelConfig, kind: NetworkKind) -> PyTree:
  """`parameters.matrix_sides` of the trunk; heads are no matrices."""
  if kind == 'policy':
    return parameters.matrix_sides(config)
  trunk = parameters.matrix_sides(heads.trunk_config(config))
  return {**trunk, **dict.fromkeys(heads.HEADS[kind])}


def _shape(batch: Batch) -> Shape:
  return Shape(*batch['ids'].shape)


def _load(routing: Routing, batch: Batch) -> dict[str, Array]:
  """Choices of each expert, and the real tokens that made them."""
  real = batch['segment_ids'] != 0
  return {'counts': routing.counts, 'tokens': real.sum(dtype=jnp.float32)}
