"""The trainer: finished groups come in, the next policy goes out.

The trainer owns the train state. A step makes minibatches (`batch.py`),
computes proximal log-probs where they are needed, makes one update a minibatch
(`step.py`) and raises the version by one. A critic is updated before the
policy. `summary.py` computes the metrics of the step. The trainer publishes
nothing: whoever calls `step` brings the groups and takes `params` to the
engines.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from typing import Any, Callable, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from areal_jax.losses import importance
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads
from areal_jax.models.config import ModelConfig
from areal_jax.telemetry.programs import Programs
from areal_jax.train import offload, packing
from areal_jax.train.batch import (
    BatchScores,
    Minibatch,
    deal,
    in_order,
    mask_stale,
    minibatches_of,
    replayed_routing,
)
from areal_jax.train.critic import value_objective
from areal_jax.train.objectives import Batch, policy_objective
from areal_jax.train.settings import TrainSettings
from areal_jax.train.state import TrainState
from areal_jax.train.step import TrainStep
from areal_jax.train.summary import (
    masked_fraction,
    mean_kl,
    record_metrics,
    summarize,
    summarize_critic,
)
from areal_jax.types import (
    Group,
    Microbatch,
)

# The programs of the policy, and those of the critic if there is one.
Steps = tuple[TrainStep, TrainStep | None]


class Pending:
  """A step that was handed out; its numbers are still to come.

  Args:
    numbers: what a thread reads from the devices, and the monotonic second at
      which it had it.
    finish: makes metrics of what was read; may raise.
  """

  def __init__(
      self,
      numbers: concurrent.futures.Future[tuple[Any, float]],
      finish: Callable[[Any], dict[str, float]],
  ):
    self._numbers = numbers
    self._finish = finish

  @property
  def done(self) -> bool:
    """Whether the devices have done with the step, or failed."""
    return self._numbers.done()

  def wait(self) -> float:
    """Waits for the devices; returns the monotonic second of their end."""
    return self._numbers.result()[1]

  def read(self) -> dict[str, float]:
    """Waits for the devices; the metrics, see `Trainer.step`.

    Raises:
      NonFiniteError: too many updates in a row were skipped.
    """
    return self._finish(self._numbers.result()[0])


def build_steps(
    config: ModelConfig,
    settings: TrainSettings,
    mesh: Mesh,
    rules: Rules,
    reference: ModelConfig | None = None,
) -> Steps:
  """The programs of the policy and of the critic; nothing is compiled yet.

  Both have one `ahead`, which compiles them one after the other.

  Args:
    config: the policy.
    settings: of the trainer.
    mesh: the train mesh.
    rules: from logical axes to mesh axes.
    reference: shape of the reference policy; None for that of the policy.
  """
  build = functools.partial(
      TrainStep, mesh=mesh, rules=rules, packing=settings.packing,
      max_consecutive_skips=settings.max_consecutive_skips,
      replayed=replayed_routing(config), ahead=Programs(),
  )  # fmt: skip
  rows = ('batch', 'time')
  policy_step = build(
      config,
      policy_objective(settings.loss),
      settings.optimizer,
      reference=(reference or config) if settings.needs_reference else None,
      scores_reference=settings.loss.kl_coefficient > 0,
      inputs={} if settings.loss.second_moment is None else {'kept': rows},
      recompute_proximal=settings.recomputes_proximal,
  )
  if not settings.advantages.critic:
    return policy_step, None
  critic_step = build(
      config,
      value_objective(settings.critic.loss),
      settings.critic.optimizer,
      kind='value',
      inputs={'values': rows, 'returns': rows},
  )
  return policy_step, critic_step


def compile_ahead(steps: Steps, settings: TrainSettings) -> None:
  """Begins to compile whatever a trainer of these settings runs; returns.

  Args:
    steps: from `build_steps`.
    settings: those that they were built with.
  """
  policy_step, critic_step = steps
  if critic_step is not None:  # its values are asked for first
    critic_step.compile_ahead('score')
  policy_step.compile_ahead(*settings.scores)


class Trainer:
  """Owns the policy that learns, and its critic.

  Args:
    config: the model.
    settings: see `TrainSettings`.
    mesh: the train mesh.
    rules: from logical axes to mesh axes.
    params: the policy to start from, on the train mesh. They are taken over:
      the arrays must not be used again by the caller. A critic starts from a
      copy of its trunk.
    reference: shape and parameters of the reference policy, taken over; None
      for a copy of `params`, where the settings need one.
    seed: of the critic's head.
    max_age: versions above which a token has no part in the loss or in its
      denominator (the staleness policy `mask`); inf for none.
    steps: from `build_steps` of the same, which may be compiling already; None
      to build them here.

  Attributes:
    state: the train state; `restore` takes a saved one over. Between steps its
      optimizers lie where `offload_optimizer` says.
    offloaded: what was moved there in the last step.
  """

  def __init__(
      self,
      config: ModelConfig,
      settings: TrainSettings,
      mesh: Mesh,
      rules: Rules,
      params: Any,
      *,
      reference: tuple[ModelConfig, Any] | None = None,
      seed: int = 0,
      max_age: float = math.inf,
      steps: Steps | None = None,
  ):
    self._settings = settings
    self._max_age = max_age
    self._replayed = replayed_routing(config)
    self._balances = bool(config.sparse_layers) and config.moe.balance > 0
    reference_config, reference_params = reference or (None, None)
    self._step, self._critic = steps or build_steps(
        config, settings, mesh, rules, reference_config
    )
    roles = {}
    if self._critic is not None:
      trunk = jax.tree.map(jnp.copy, params)
      head = heads.with_head(config, 'value', trunk, seed, mesh, rules)
      roles = self._critic.initial_state(head).roles
    state = self._step.initial_state(params, reference_params)
    self._reads = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix='numbers'
    )
    self.offloaded = offload.Offloaded()
    self.state = self._rested(TrainState({**state.roles, **roles}, version=0))

  @property
  def version(self) -> int:
    """The version of `params`: steps taken over the run's lineage."""
    return int(self.state.version)

  @property
  def params(self) -> Any:
    """The policy to publish.

    Valid until the next `step`, whose updates take the buffers over: copy them
    (across meshes `jax.device_put` does; on one mesh it may alias).
    """
    return self.state.policy.params

  @property
  def trainable(self) -> Any:
    """The part of `params` that learns, valid as long as they are."""
    return self.state.policy.trainable

  def state_shardings(self) -> TrainState:
    """Returns the shardings of the state, to place a loaded one."""
    state = self._step.state_shardings()
    if self._critic is None:
      return state
    critic = self._critic.state_shardings().roles
    return TrainState({**state.roles, **critic}, state.version)

  def restore(self, load: Callable[[TrainState], TrainState]) -> None:
    """Takes over a saved state.

    Args:
      load: returns it, given what it has to be: a state of
        `jax.ShapeDtypeStruct` with shardings, and the version of this one. By
        then the arrays of this one are gone, so that memory holds one state.
    """
    roles = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(
            leaf.shape, leaf.dtype, sharding=sharding
        ),
        self.state.roles,
        self.state_shardings().roles,
    )
    version = self.version
    for leaf in jax.tree.leaves(self.state.roles):
      leaf.delete()
    self.state = self._rested(load(TrainState(roles, version=version)))

  def warm_up(self) -> None:
    """Compiles whatever a step will run."""
    compile_ahead((self._step, self._critic), self._settings)
    self._step.ahead.wait_for_all()

  @property
  def reads_first(self) -> bool:
    """Returns whether a step must always wait for the one before.

    Most steps hand out their work and wait for nothing: their numbers come in
    one transfer, by a thread. Four settings have to read before they can go on,
    once a step: a critic (its values make the advantages), a KL in the reward
    (so does the reference), the second-moment mask (the log-probs of the whole
    batch decide what stays), and optimizers that lie on the host in between.
    """
    settings = self._settings
    return bool(
        settings.advantages.critic
        or settings.advantages.kl_coefficient > 0
        or settings.loss.second_moment is not None
        or settings.offload_optimizer
    )

  def step(self, groups: Sequence[Group]) -> dict[str, float]:
    """Trains one batch, raises the version and waits for the numbers.

    Args:
      groups: see `hand_out`.

    Returns:
      Values of the metrics of `telemetry.metrics` that training can know, and
      `trained_tokens`. What was not measured is absent.

    Raises:
      ValueError: see `hand_out`.
      NonFiniteError: too many updates in a row were skipped.
    """
    return self.hand_out(groups).read()

  def hand_out(self, groups: Sequence[Group]) -> Pending:
    """Hands all work of one batch to the devices and raises the version.

    Steps may follow before the numbers of this one are read. If too many of its
    updates were skipped, they move nothing: `state` is then that of the end of
    this one, but for its version.

    Args:
      groups: in any order; they are sorted by draw, and members by sample, so
        that the same groups give the same bits.

    Raises:
      ValueError: fewer groups than minibatches, a group twice, one without any
        trajectory, a trajectory without a score or longer than a row.
    """
    # Whatever crosses between host and devices says so.
    with jax.transfer_guard('disallow'):
      return self._step_on(in_order(groups, self._settings.minibatches))

  def _step_on(self, groups: Sequence[Group]) -> Pending:
    """`hand_out` of groups that are in order."""
    version = self.version
    trained = [mask_stale(group, version, self._max_age) for group in groups]
    scores = self._score_batch(trained)
    minibatches = minibatches_of(
        trained,
        self._settings,
        self._replayed,
        scores=scores,
        balances=self._balances,
    )
    state, criticised = self._train_critic(self._roused(), minibatches)
    state, outcomes = self._train_policy(state, minibatches)
    # Before anything can fail: the buffers of the state before are gone.
    self.state = dataclasses.replace(state, version=version + 1)
    numbers = self._reads.submit(_fetched, (outcomes, criticised))
    self.state = self._rested(self.state)

    def finish(numbers: Any) -> dict[str, float]:
      return self._metrics(
          groups, trained, scores, minibatches, *numbers, version
      )

    return Pending(numbers, finish)

  def _metrics(
      self,
      groups: Sequence[Group],
      trained: Sequence[Group],
      scores: BatchScores,
      minibatches: Sequence[Minibatch],
      outcomes: Sequence[Any],
      criticised: Sequence[Any],
      version: int,
  ) -> dict[str, float]:
    """Computes the metrics of a step from outcomes on the host."""
    tokens = [part.tokens for part in minibatches]
    values = {
        **record_metrics(groups, version, deal(trained, self._settings)),
        **summarize(
            self._step.outcomes(outcomes, version),
            [part.denominator for part in minibatches],
            exact=self._settings.loss.proximal == 'exact',
        ),
        'padding_fraction': packing.padding_fraction(
            [m for part in minibatches for m in part.microbatches]
        ),
        'masked_fraction': masked_fraction(groups, sum(tokens)),
    }
    if self._settings.advantages.kl_coefficient:
      values['kl_reference'] = mean_kl(trained, scores, self._settings)
    if self._critic is not None:
      values |= summarize_critic(
          self._critic.outcomes(criticised, version),
          [part.critic_denominator for part in minibatches],
      )
    return values

  def _rested(self, state: TrainState) -> TrainState:
    """The state as it is kept between steps."""
    if not self._settings.offload_optimizer:
      return state
    return offload.put_away(state, self.offloaded)

  def _roused(self) -> TrainState:
    """The state as a step needs it."""
    if not self._settings.offload_optimizer:
      return self.state
    return offload.bring_back(
        self.state, self.state_shardings(), self.offloaded
    )

  def _score_batch(self, groups: Sequence[Group]) -> BatchScores:
    """Asks critic and reference what the advantages need; reads it back."""
    wants_kl = self._settings.advantages.kl_coefficient > 0
    if self._critic is None and not wants_kl:
      return BatchScores()
    values, reference = [], []
    places, lengths, shift = [], [], 0
    for members in deal(groups, self._settings):
      # Whatever the loss leaves out, rewards are of all that was sampled.
      members = [
          dataclasses.replace(t, loss_mask=t.sampled.astype(np.float32))
          for t in members
      ]
      nothing = [np.zeros(len(t.ids), np.float32) for t in members]
      packed = packing.pack(
          members, nothing, self._settings.packing, self._replayed
      )
      for microbatch in packed:
        if self._critic is not None:
          rows = np.zeros_like(microbatch.loss_mask)
          batch = self._critic.place(
              microbatch, 1.0, self.version, values=rows, returns=rows
          )
          values.append(self._critic.score(self.state, batch))
        if wants_kl:
          batch = self._placed(microbatch, 1.0)
          reference.append(self._step.score_reference(self.state, batch))
      sizes = [len(t.ids) for t in members]
      places += [
          dataclasses.replace(place, microbatch=place.microbatch + shift)
          for place in packing.lay(sizes, self._settings.packing).places
      ]
      lengths += sizes
      shift += len(packed)
    values, reference = jax.device_get((values, reference))
    return BatchScores(
        packing.gather(values, places, lengths) if values else None,
        packing.gather(reference, places, lengths) if reference else None,
    )

  def _train_critic(
      self, state: TrainState, minibatches: Sequence[Minibatch]
  ) -> tuple[TrainState, list[Any]]:
    """Updates the critic once a minibatch; without one, changes nothing."""
    outcomes = []
    if self._critic is None:
      return state, outcomes
    for part in minibatches:
      batches = [
          self._critic.place(
              microbatch,
              part.critic_denominator,
              self.version,
              values=v,
              returns=r,
          )
          for microbatch, v, r in zip(
              part.microbatches, part.values, part.returns, strict=True
          )
      ]
      total = self._critic.accumulate(state, batches)
      teaches = part.tokens > 0
      state, outcome = self._critic.apply(state, total, teaches=teaches)
      outcomes.append(outcome)
    return state, outcomes

  def _train_policy(
      self, state: TrainState, minibatches: Sequence[Minibatch]
  ) -> tuple[TrainState, list[Any]]:
    """Updates the policy once a minibatch."""
    settings = self._settings
    placed = [
        [self._placed(m, part.denominator) for m in part.microbatches]
        for part in minibatches
    ]
    # Under the weights before the first update: all minibatches share one
    # centre of the trust region. The first one finds it by itself.
    proximal: list[Any] = [None] * len(placed)
    if settings.recomputes_proximal:
      for index, batches in enumerate(placed[1:], start=1):
        proximal[index] = [self._step.score(state, b) for b in batches]
    if settings.loss.second_moment is not None:
      first = [self._step.score(state, batch) for batch in placed[0]]
      self._mask_second_moment(minibatches, placed, [first, *proximal[1:]])
    waits = self.version < settings.critic.warmup_steps
    waits = waits and settings.advantages.critic
    outcomes = []
    for part, batches, logps in zip(minibatches, placed, proximal):
      total = self._step.accumulate(state, batches, logps)
      teaches = part.teaches and not waits
      state, outcome = self._step.apply(state, total, teaches=teaches)
      outcomes.append(outcome)
    return state, outcomes

  def _placed(self, microbatch: Microbatch, denominator: float) -> Batch:
    more = {}
    if self._settings.loss.second_moment is not None:
      more['kept'] = np.ones_like(microbatch.loss_mask)  # until it is known
    return self._step.place(microbatch, denominator, self.version, **more)

  def _mask_second_moment(
      self,
      minibatches: Sequence[Minibatch],
      placed: Sequence[list[Batch]],
      logps: Sequence[Sequence[jax.Array]],
  ) -> None:
    """Puts into each batch which of its tokens stay in the loss.

    Judged over a whole minibatch: what shares a denominator is judged together,
    whatever the cut into microbatches.
    """
    for part, batches, own in zip(minibatches, placed, jax.device_get(logps)):
      kept = importance.second_moment_keep(
          _flat(own),
          _flat([m.behavior_logps for m in part.microbatches]),
          _flat([m.loss_mask for m in part.microbatches]),
          threshold=self._settings.loss.second_moment,
      )
      ends = np.cumsum([rows.size for rows in own])
      for batch, rows, of in zip(
          batches, np.split(kept, ends[:-1]), own, strict=True
      ):
        batch['kept'] = self._step.rows(rows.reshape(of.shape))


def _fetched(outcomes: Any) -> tuple[Any, float]:
  """Copies outcomes to the host; the monotonic second comes after them."""
  return jax.device_get(outcomes), time.monotonic()


def _flat(microbatches: Sequence[np.ndarray]) -> np.ndarray:
  """Every token of a minibatch; its microbatches may differ in shape."""
  return np.concatenate([rows.ravel() for rows in microbatches])
