"""The jitted train step: microbatches in, one optimizer update out.

A minibatch is cut into microbatches of one static shape [B, T]; `accumulate`
adds the gradient of each to a running sum, and `apply` makes one update of it.
The host calls them in a loop, so any number of microbatches runs the same
compiled programs. Losses are divided by the token count of the whole
minibatch, which is handed in, so the sum does not depend on the cut.

What is minimised comes in as an `Objective`; policy and supervised training
are two of them over the same programs. Everything is compiled in `warm_up`,
ahead of time: a compiled program refuses any other shape or sharding instead of
building itself anew in the middle of a run.

Three things may come of a minibatch (`Counters`): it is applied; it is idle,
because no token had anything to teach, and then neither parameters nor moments
move, not even by weight decay or momentum; or it is skipped, because its
gradient was not finite, and then again nothing moves.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Callable, Mapping, Sequence

import jax
from jax import Array
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
import numpy as np
import optax

from areal_jax.config import require
from areal_jax.losses import logprobs, masking, policy, supervised
from areal_jax.mesh.rules import Rules
from areal_jax.models import moe, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.models.moe import Routing
from areal_jax.train import packing
from areal_jax.train.optimizer import (
    OptimizerSettings,
    learning_rate,
    make_optimizer,
)
from areal_jax.train.packing import PackingSettings
from areal_jax.train.state import Counters, Role, TrainState
from areal_jax.types import Microbatch

PyTree = Any
Batch = Mapping[str, Array]

# The loss holds a few arrays of this size at once, instead of some of the size
# of a whole microbatch's logits.
LOGIT_BYTES = 1 << 27


class NonFiniteError(FloatingPointError):
  """Too many updates in a row were skipped for a gradient without a value."""


@dataclasses.dataclass(frozen=True)
class Scores:
  """Log-probs of a microbatch, [B, T] float32 nats, unshifted.

  Attributes:
    logps: of the policy that learns; carries the gradient.
    entropy: of its distribution at each token; carries gradient too.
    proximal_logps: under the weights that the step started from; constant.
    reference_logps: under the reference policy; constant; None without one.
  """

  logps: Array
  entropy: Array
  proximal_logps: Array
  reference_logps: Array | None


# (scores, batch) -> loss and statistics with names in _sum and _max.
Objective = Callable[[Scores, Batch], tuple[Array, dict[str, Array]]]


@dataclasses.dataclass(frozen=True)
class Outcome:
  """What came of one minibatch, numpy values.

  Attributes:
    applied: whether parameters moved.
    gradient_norm: before clipping; not finite if the update was skipped.
    learning_rate: of this update, applied or not.
    loss: of the minibatch, divided by its token count.
    idle_updates: without anything to learn, since the start of the run.
    skipped_updates: skipped since the start of the run.
    consecutive_skips: skipped in a row up to and with this one.
    nonfinite: names of the tensors whose gradient was not finite.
    stats: see the objective.
  """

  applied: bool
  gradient_norm: float
  learning_rate: float
  loss: float
  idle_updates: int
  skipped_updates: int
  consecutive_skips: int
  nonfinite: tuple[str, ...]
  stats: Mapping[str, float]


def policy_objective(settings: policy.PolicyLoss) -> Objective:
  """The loss of `policy.py`; the gap between engine and trainer is measured."""

  def objective(scores: Scores, batch: Batch):
    mask = batch['loss_mask']
    entropy = scores.entropy
    if not settings.entropy_coefficient:  # measured only: no backward pass
      entropy = jax.lax.stop_gradient(entropy)
    loss, stats = policy.policy_loss(
        scores.logps,
        scores.proximal_logps,
        batch['behavior_logps'],
        batch['advantages'],
        mask,
        denominator=batch['denominator'],
        settings=settings,
        segment_ids=batch['segment_ids'],
        ages=batch['version'] - batch['versions'],
        reference_logps=scores.reference_logps,
        entropy=entropy,
        fresh=mask * (batch['versions'] == batch['version']),
    )
    gap = jnp.abs(scores.proximal_logps - batch['behavior_logps'])
    return loss, {**stats, 'gap_sum': masking.masked_sum(gap, mask)}

  return objective


def supervised_objective(scores: Scores, batch: Batch):
  """Negative log-likelihood of the tokens in the loss mask."""
  mask = batch['loss_mask']
  loss = supervised.sft_loss(
      scores.logps, mask, denominator=batch['denominator']
  )
  return loss, {'tokens_sum': masking.masked_count(mask)}


class TrainStep:
  """The compiled programs of training for one model, mesh and static shape.

  Holds no training state: states go in and come out, and those that went in
  are donated (their buffers are gone).

  Args:
    config: the model.
    objective: what is minimised.
    optimizer: schedule, AdamW, clipping.
    mesh: the train mesh.
    rules: from logical axes to mesh axes; rows are cut as 'batch'.
    shape: [B, T] of a microbatch.
    reference: whether the state has a frozen reference policy.
    recompute_proximal: whether `accumulate` is given proximal log-probs. If
      not, the proximal policy is the one that learns: right for one update a
      step.
    max_consecutive_skips: how many non-finite minibatches in a row are skipped
      before `fetch` raises.
    logit_bytes: of logits that a device may hold at once.
    replayed: (L, k) of the recorded choices of experts that microbatches have;
      None if they have none.

  Raises:
    ConfigError: rows do not divide over the shards of the mesh.
  """

  def __init__(
      self,
      config: ModelConfig,
      objective: Objective,
      optimizer: OptimizerSettings,
      mesh: Mesh,
      rules: Rules,
      shape: PackingSettings,
      *,
      reference: bool = False,
      recompute_proximal: bool = False,
      max_consecutive_skips: int = 3,
      logit_bytes: int = LOGIT_BYTES,
      replayed: tuple[int, int] | None = None,
  ):
    shards = rules.parts('batch', mesh)
    require(
        shape.rows % shards == 0,
        'packing.rows',
        shape.rows,
        f'a multiple of the {shards} shards of the train mesh',
    )
    self._config = config
    self._objective = objective
    self._settings = optimizer
    self._optimizer = make_optimizer(optimizer)
    self._mesh = mesh
    self._rules = rules
    self._shape = shape
    self._reference = reference
    self._recompute_proximal = recompute_proximal
    self._max_consecutive_skips = max_consecutive_skips
    columns = config.padded_vocab_size // rules.parts('vocab', mesh)
    of_position = 4 * columns * (shape.rows // shards)  # one a row, float32
    self._chunk = max(1, logit_bytes // of_position)
    self._replayed = replayed
    self._rows = rules.sharding(
        ('batch', 'time'), (shape.rows, shape.row_tokens), mesh
    )
    self._everywhere = NamedSharding(mesh, PartitionSpec())
    self._params = _with_shardings(
        transformer.abstract_params(config),
        transformer.param_shardings(config, mesh, rules),
    )
    self._compiled: dict[str, jax.stages.Compiled] = {}
    self._names = [
        jax.tree_util.keystr(path, simple=True, separator='/')
        for path, _ in jax.tree.leaves_with_path(self._params)
    ]

  def warm_up(self) -> None:
    """Compiles every program; nothing compiles after it."""
    for name in ('initialise', 'zeros', 'accumulate', 'apply'):
      self._program(name)
    if self._recompute_proximal:
      self._program('proximal')
    if self._config.moe.balance:
      self._program('no_load')
      self._program('load')

  def initial_state(self, params: PyTree) -> TrainState:
    """State at version 0; takes `params` over, which must not be used again.

    Raises:
      ValueError, TypeError: parameters of another shape or sharding.
    """
    state = self._program('initialise')(params)
    return dataclasses.replace(state, version=0)

  def state_shardings(self) -> TrainState:
    """Shardings of a state, to place one that was loaded from a checkpoint."""
    return _shardings(self._abstract_state)

  def place(
      self, microbatch: Microbatch, denominator: float, version: int
  ) -> Batch:
    """Sends a microbatch to the train mesh.

    Args:
      microbatch: of the static shape.
      denominator: loss tokens of its whole minibatch.
      version: the version that the step started from.
    """
    arrays = microbatch.arrays()
    arrays['denominator'] = np.float32(denominator)
    arrays['version'] = np.int32(version)
    return jax.device_put(arrays, _shardings(self._batch))

  def proximal(self, state: TrainState, batch: Batch) -> Array:
    """[B, T] log-probs under the weights of `state`, for `accumulate`."""
    return self._program('proximal')(state.policy.params, batch)

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
      proximal: log-probs for each batch, where the step was built for them.

    Raises:
      ValueError: proximal log-probs are missing or were not expected.
    """
    if (proximal is not None) != self._recompute_proximal:
      raise ValueError(
          f'proximal log-probs given: {proximal is not None}, wanted'
          f' recompute_proximal={self._recompute_proximal}'
      )
    total = self._program('zeros')()
    roles = _params_of(state)
    if self._config.moe.balance:
      load = self._program('no_load')()
      for batch in batches:
        load = self._program('load')(load, roles['policy'], batch)
      batches = [{**batch, 'load': load} for batch in batches]
    for index, batch in enumerate(batches):
      if proximal is not None:
        batch = {**batch, 'proximal_logps': proximal[index]}
      total = self._program('accumulate')(total, roles, batch)
    return total

  def apply(
      self, state: TrainState, total: PyTree, *, teaches: bool
  ) -> tuple[TrainState, PyTree]:
    """One optimizer update.

    Args:
      state: is donated, but for the reference.
      total: from `accumulate`.
      teaches: False makes the minibatch idle: nothing moves.

    Returns:
      The next state, its version unchanged, and the outcome on the device for
      `fetch`.
    """
    teaches_ = jax.device_put(np.bool_(teaches), self._everywhere)
    learner, counters, outcome = self._program('apply')(
        state.policy, state.counters, total, teaches_
    )
    roles = {**state.roles, 'policy': learner}
    return TrainState(roles, counters, state.version), outcome

  def fetch(self, outcomes: Sequence[PyTree], step: int) -> list[Outcome]:
    """Brings outcomes to the host, in one transfer.

    Args:
      outcomes: from `apply`, of the minibatches since the last fetch.
      step: named in the error.

    Raises:
      NonFiniteError: more than `max_consecutive_skips` were skipped in a row.
    """
    fetched = [self._outcome(o) for o in jax.device_get(list(outcomes))]
    for outcome in fetched:
      if outcome.consecutive_skips > self._max_consecutive_skips:
        raise NonFiniteError(
            f'step {step}: {outcome.consecutive_skips} updates in a row had a'
            ' gradient that is not finite, wanted at most'
            f' max_consecutive_skips={self._max_consecutive_skips}; this time'
            f' in {", ".join(outcome.nonfinite)}'
        )
    return fetched

  def _outcome(self, raw: Mapping[str, Any]) -> Outcome:
    norm = float(raw['gradient_norm'])
    named = zip(self._names, raw['squared_norms'], strict=True)
    nonfinite = [name for name, square in named if not np.isfinite(square)]
    if not np.isfinite(raw['loss']):
      nonfinite.insert(0, 'loss')
    if not nonfinite and not np.isfinite(norm):
      nonfinite.append('the global norm, which overflows')
    return Outcome(
        applied=bool(raw['applied']),
        gradient_norm=norm,
        learning_rate=float(raw['learning_rate']),
        loss=float(raw['loss']),
        idle_updates=int(raw['idle_updates']),
        skipped_updates=int(raw['skipped_updates']),
        consecutive_skips=int(raw['consecutive_skips']),
        nonfinite=tuple(nonfinite),
        stats={name: float(value) for name, value in raw['stats'].items()},
    )

  # What the compiled programs compute.

  def _initialise(self, params: PyTree) -> TrainState:
    # The reference is a copy: the policy's buffers are donated at each update.
    roles = {'policy': Role(params, {}, self._optimizer.init(params))}
    if self._reference:
      roles['reference'] = Role({}, jax.tree.map(jnp.copy, params))
    counters = Counters(*(jnp.zeros((), jnp.int32) for _ in range(4)))
    return TrainState(roles, counters)

  def _score(
      self, params: PyTree, batch: Batch, *, replay: bool = True
  ) -> tuple[Array, Array, Routing | None]:
    """Log-prob and entropy [B, T] of the loss tokens, and the routing.

    The first two are 0 elsewhere. Recorded choices of experts are those of the
    policy; another one (`replay` False) makes its own.
    """
    place = dict(mesh=self._mesh, rules=self._rules)
    states, routing = transformer.hidden_routed(
        self._config,
        params,
        batch['ids'],
        batch['positions'],
        batch['segment_ids'],
        given=batch.get('routing') if replay else None,
        **place,
    )
    logps, entropy = logprobs.masked_logps(
        lambda x: transformer.unembed(self._config, params, x, **place),
        states,
        batch['ids'],
        batch['segment_ids'],
        batch['temperatures'],
        batch['loss_mask'],
        chunk=self._chunk,
    )
    return logps, entropy, routing

  def _proximal(self, params: PyTree, batch: Batch) -> Array:
    return self._score(params, batch)[0]

  def _load(self, load: PyTree, params: PyTree, batch: Batch) -> PyTree:
    """Adds the tokens of a microbatch to those of each expert."""
    _, _, routing = self._score(params, batch)
    return jax.tree.map(jnp.add, load, _load(routing, batch))

  def _gradient(self, roles: Mapping[str, PyTree], batch: Batch):
    """((loss, (stats, routing)), gradient) of one microbatch."""
    reference_logps = None
    if 'reference' in roles:
      reference_logps = self._score(roles['reference'], batch, replay=False)[0]

    def loss(params):
      logps, entropy, routing = self._score(params, batch)
      proximal = batch.get('proximal_logps', jax.lax.stop_gradient(logps))
      scores = Scores(logps, entropy, proximal, reference_logps)
      value, stats = self._objective(scores, batch)
      if routing is None:
        return value, (stats, {})
      sums = {'mass': routing.mass, 'entropy': routing.entropy}
      sums |= _load(routing, batch)
      if self._config.moe.balance:
        # Over the minibatch, whatever the cut: see `moe.balance_loss`.
        value += self._config.moe.balance * moe.balance_loss(
            mass=routing.mass, **batch['load']
        )
      return value, (stats, jax.lax.stop_gradient(sums))

    return jax.value_and_grad(loss, has_aux=True)(roles['policy'])

  def _accumulate(self, total, roles, batch):
    (loss, (stats, routing)), gradient = self._gradient(roles, batch)
    return {
        'gradient': jax.tree.map(jnp.add, total['gradient'], gradient),
        'routing': jax.tree.map(jnp.add, total['routing'], routing),
        'loss': total['loss'] + loss,
        'stats': policy.merge_stats([total['stats'], stats]),
    }

  def _apply(self, learner: Role, counters: Counters, total, teaches):
    gradient = total['gradient']
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)))
        for leaf in jax.tree.leaves(gradient)
    ]
    norm = jnp.sqrt(sum(squares))
    finite = jnp.isfinite(norm) & jnp.isfinite(total['loss'])
    applied = finite & teaches
    changes, optimizer = self._optimizer.update(
        gradient, learner.optimizer, learner.trainable
    )
    params = optax.apply_updates(learner.trainable, changes)

    def settle(new, old):  # what was skipped or idle moves nothing
      return jax.tree.map(lambda n, o: jnp.where(applied, n, o), new, old)

    after = Counters(
        applied_updates=counters.applied_updates + applied,
        idle_updates=counters.idle_updates + (finite & ~teaches),
        skipped_updates=counters.skipped_updates + ~finite,
        consecutive_skips=jnp.where(
            applied, 0, counters.consecutive_skips + ~finite
        ),
    )
    outcome = {
        'applied': applied,
        'gradient_norm': norm,
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
    )
    return learner, after, outcome

  # How they are compiled.

  @functools.cached_property
  def _batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """Shape and sharding of everything that `place` sends."""
    fields = packing.empty(self._shape, self._replayed).arrays()
    fields |= {'denominator': np.float32(0), 'version': np.int32(0)}
    return {
        name: jax.ShapeDtypeStruct(
            value.shape,
            value.dtype,
            sharding=self._rows if value.ndim else self._everywhere,
        )
        for name, value in fields.items()
    }

  @functools.cached_property
  def _abstract_state(self) -> TrainState:
    """Shape and sharding of a state."""
    state = jax.eval_shape(self._initialise, self._params)
    shardings = _shardings(self._params)
    moments = optax.tree.map_params(
        self._optimizer,
        lambda _, sharding: sharding,
        state.policy.optimizer,
        shardings,
        transform_non_params=lambda _: self._everywhere,
    )
    roles = {'policy': Role(shardings, {}, moments)}
    if self._reference:
      roles['reference'] = Role({}, shardings)
    counters = jax.tree.map(lambda _: self._everywhere, state.counters)
    placed = TrainState(roles, counters, self._everywhere)
    return _with_shardings(state, placed)

  @functools.cached_property
  def _abstract_total(self) -> PyTree:
    """Shape and sharding of what `accumulate` sums up."""
    params = _params_of(self._abstract_state)
    (loss, (stats, routing)), gradient = jax.eval_shape(
        self._gradient, params, self._scored_batch
    )
    return {
        'gradient': _with_shardings(gradient, _shardings(self._params)),
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

  @functools.cached_property
  def _scored_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
    """A batch as `_accumulate` takes it."""
    batch = dict(self._batch)
    if self._recompute_proximal:
      batch['proximal_logps'] = batch['behavior_logps']
    if self._config.moe.balance:
      batch['load'] = self._abstract_load
    return batch

  def _program(self, name: str) -> jax.stages.Compiled:
    """The compiled program of that name; `warm_up` asks for all of them."""
    if name not in self._compiled:
      function, arguments, donated, results = self._plan(name)
      jitted = jax.jit(
          function, donate_argnums=donated, out_shardings=_shardings(results)
      )
      self._compiled[name] = jitted.lower(*arguments).compile()
    return self._compiled[name]

  def _plan(self, name: str) -> tuple[Callable, tuple, tuple[int, ...], PyTree]:
    """Function, shapes of arguments, which are donated, shapes of results."""
    state = self._abstract_state
    learner, counters = state.policy, state.counters
    if name == 'initialise':
      return self._initialise, (self._params,), (0,), state
    if name == 'proximal':
      arguments = (self._params, self._batch)
      return self._proximal, arguments, (), self._batch['behavior_logps']
    if name == 'no_load':
      load = self._abstract_load
      return functools.partial(_zeros, load), (), (), load
    if name == 'load':
      load = self._abstract_load
      return self._load, (load, self._params, self._batch), (0,), load
    total = self._abstract_total
    if name == 'zeros':
      return functools.partial(_zeros, total), (), (), total
    if name == 'accumulate':
      arguments = (total, _params_of(state), self._scored_batch)
      return self._accumulate, arguments, (0,), total
    teaches = self._replicated(jax.ShapeDtypeStruct((), jnp.bool_))
    arguments = (learner, counters, total, teaches)
    _, _, outcome = jax.eval_shape(self._apply, *arguments)
    results = (learner, counters, self._replicated(outcome))
    return self._apply, arguments, (0, 1), results

  def _replicated(self, shapes: PyTree) -> PyTree:
    return _with_shardings(
        shapes, jax.tree.map(lambda _: self._everywhere, shapes)
    )


def _load(routing: Routing, batch: Batch) -> dict[str, Array]:
  """Choices of each expert, and the real tokens that made them."""
  real = batch['segment_ids'] != 0
  return {'counts': routing.counts, 'tokens': real.sum(dtype=jnp.float32)}


def _params_of(state: TrainState) -> dict[str, PyTree]:
  """Parameters by role, as the loss takes them."""
  return {name: role.params for name, role in state.roles.items()}


def _zeros(shapes: PyTree) -> PyTree:
  return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


def _shardings(shapes: PyTree) -> PyTree:
  return jax.tree.map(lambda leaf: leaf.sharding, shapes)


def _with_shardings(shapes: PyTree, shardings: PyTree) -> PyTree:
  """Shapes that also say where they live."""
  return jax.tree.map(
      lambda leaf, sharding: jax.ShapeDtypeStruct(
          leaf.shape, leaf.dtype, sharding=sharding
      ),
      shapes,
      shardings,
  )
