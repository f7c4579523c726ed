"""The trainer: finished groups in, the next version of the policy out.

It owns the train state. A step takes whole groups, gives every token its
advantage, packs minibatches, computes proximal log-probs where they are
needed, makes one update a minibatch and raises the version by one. Where the
settings have a critic, its values come into the advantages, and it is updated
before the policy. The trainer waits for nothing and publishes nothing: whoever
calls `step` brings the groups and takes `params` to the engines.

A step hands out its work and waits for nothing: its numbers come in one
transfer, by a thread, and whoever called asks for them when the next step is
handed out. Three settings have to read before they can go on, once a step: a
critic (its values make the advantages), a KL in the reward (so does the
reference), and the second-moment mask (the log-probs of the whole batch decide
what stays). Optimizers that lie on the host between steps are waited for too.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import time
from typing import Any, Callable, Mapping, Sequence

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
import numpy as np

from areal_jax.config import require
from areal_jax.losses import advantages as advantages_lib
from areal_jax.losses import aggregation, policy
from areal_jax.losses.advantages import AdvantageSettings
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.models import heads
from areal_jax.models.config import ModelConfig
from areal_jax.telemetry.programs import Programs
from areal_jax.train import offload, packing
from areal_jax.train.critic import CriticSettings, value_objective
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.state import TrainState
from areal_jax.train.step import Batch, Outcome, TrainStep, policy_objective
from areal_jax.types import (
    Group,
    Microbatch,
    RewardStatus,
    StopReason,
    Trajectory,
)


@dataclasses.dataclass
class TrainSettings:
  """How a batch of groups becomes updates.

  Attributes:
    minibatches: updates a step; groups are dealt out to them in order. The
      first gives its own proximal log-probs; those of each further one cost a
      forward pass, which a `loss.proximal` other than 'exact' saves.
    max_consecutive_skips: minibatches in a row whose gradient may be without a
      value before the run ends with an error.
    mask_truncated: whether answers that met the limit of new tokens leave the
      loss and its denominator. Their rewards still count in their group.
    reference_path: a folder with the frozen policy of the KL terms, of any
      shape with the same tokenizer: the teacher, where a student learns from
      its own answers. Empty for the policy that training starts from.
    offload_optimizer: whether optimizers lie in the host's memory between
      steps; for devices that generate meanwhile.
    critic: see there; used where `advantages.critic` is set.
  """

  minibatches: int = 1
  max_consecutive_skips: int = 3
  mask_truncated: bool = False
  reference_path: str = ''
  offload_optimizer: bool = False
  packing: PackingSettings = dataclasses.field(default_factory=PackingSettings)
  advantages: AdvantageSettings = dataclasses.field(
      default_factory=AdvantageSettings
  )
  loss: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)
  optimizer: OptimizerSettings = dataclasses.field(
      default_factory=OptimizerSettings
  )
  critic: CriticSettings = dataclasses.field(default_factory=CriticSettings)

  @property
  def needs_reference(self) -> bool:
    """Whether there is a KL term, in the loss or in the reward."""
    return max(self.loss.kl_coefficient, self.advantages.kl_coefficient) > 0

  @property
  def recomputes_proximal(self) -> bool:
    """Whether minibatches after the first need a forward pass more."""
    return self.minibatches > 1 and self.loss.proximal == 'exact'

  @property
  def scores(self) -> tuple[str, ...]:
    """Programs of the policy's `TrainStep` that a step asks for besides."""
    names = []
    if self.loss.second_moment is not None:
      names.append('score')
    if self.advantages.kl_coefficient:
      names.append('score_reference')
    return tuple(names)

  def validate(self, at: str) -> None:
    for name, least in (('minibatches', 1), ('max_consecutive_skips', 0)):
      value = getattr(self, name)
      require(value >= least, f'{at}.{name}', value, f'at least {least}')
    require(
        self.needs_reference or not self.reference_path,
        f'{at}.reference_path',
        self.reference_path,
        "'' without a KL term: loss.kl_coefficient and"
        ' advantages.kl_coefficient are 0, so nothing would look at it',
    )
    require(
        self.loss.second_moment is None or self.loss.proximal == 'exact',
        f'{at}.loss.second_moment',
        self.loss.second_moment,
        "None unless loss.proximal is 'exact': it is judged before the update,"
        ' on the log-probs of the whole batch',
    )


@dataclasses.dataclass(frozen=True)
class Minibatch:
  """The groups of one update, packed.

  Attributes:
    microbatches: of the static shapes.
    tokens: loss tokens.
    denominator: what the loss of the policy is divided by.
    critic_denominator: what that of the critic is divided by.
    teaches: whether some term of the loss has a gradient: a loss token has an
      advantage, or there are loss tokens and a term that needs none (KL,
      entropy, balance of experts). If not, nothing is to be learned and the
      update is idle: weight decay and momentum would go on moving the policy.
    values: [B, T] of each microbatch, what the critic said; () without one.
    returns: [B, T] of each microbatch, what it should have said.
  """

  microbatches: tuple[Microbatch, ...]
  tokens: float
  denominator: float
  critic_denominator: float
  teaches: bool
  values: tuple[np.ndarray, ...] = ()
  returns: tuple[np.ndarray, ...] = ()


# The programs of the policy, and those of the critic if there is one.
Steps = tuple[TrainStep, TrainStep | None]


@dataclasses.dataclass(frozen=True)
class Looked:
  """What networks say of a batch before it is trained on.

  Attributes:
    values: [T_i] of the critic for each trajectory; None without one.
    reference_logps: [T_i] nats, of the reference; None without a KL in the
      reward.
  """

  values: list[np.ndarray] | None = None
  reference_logps: list[np.ndarray] | None = None


class Pending:
  """A step that was handed out; its numbers are still to come.

  Args:
    numbers: what a thread brings of the devices, and the monotonic second at
      which it had it.
    finish: makes metrics of it; may raise.
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
    """Waits for the devices; the monotonic second at which they had done."""
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
      replayed=_replayed(config), ahead=Programs(),
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
    self._replayed = _replayed(config)
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
    """Of `params`: steps taken over the run's lineage."""
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
    """Where the parts of the state live, to place a loaded one."""
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
    """Whether a step has to wait for the one before in any case."""
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
      return self._step_on(_in_order(groups, self._settings.minibatches))

  def _step_on(self, groups: Sequence[Group]) -> Pending:
    """`hand_out` of groups that are in order."""
    version = self.version
    trained = [mask_stale(group, version, self._max_age) for group in groups]
    looked = self._look(trained)
    minibatches = prepare(
        trained,
        self._settings,
        self._replayed,
        looked=looked,
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
          groups, trained, looked, minibatches, *numbers, version
      )

    return Pending(numbers, finish)

  def _metrics(
      self,
      groups: Sequence[Group],
      trained: Sequence[Group],
      looked: Looked,
      minibatches: Sequence[Minibatch],
      outcomes: Sequence[Any],
      criticised: Sequence[Any],
      version: int,
  ) -> dict[str, float]:
    """Of a step; outcomes are on the host."""
    tokens = [part.tokens for part in minibatches]
    values = {
        **describe(groups, version, _deal(trained, self._settings)),
        **summarize(
            self._step.outcomes(outcomes, version),
            [part.denominator for part in minibatches],
            exact=self._settings.loss.proximal == 'exact',
        ),
        'padding_fraction': packing.padding_fraction(
            [m for part in minibatches for m in part.microbatches]
        ),
        'masked_fraction': _masked_fraction(groups, sum(tokens)),
    }
    if self._settings.advantages.kl_coefficient:
      values['kl_reference'] = _mean_kl(trained, looked, self._settings)
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

  def _look(self, groups: Sequence[Group]) -> Looked:
    """Asks critic and reference what the advantages need; reads it back."""
    wants_kl = self._settings.advantages.kl_coefficient > 0
    if self._critic is None and not wants_kl:
      return Looked()
    values, reference = [], []
    places, lengths, shift = [], [], 0
    for members in _deal(groups, self._settings):
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
    return Looked(
        packing.gather(values, places, lengths) if values else None,
        packing.gather(reference, places, lengths) if reference else None,
    )

  def _train_critic(
      self, state: TrainState, minibatches: Sequence[Minibatch]
  ) -> tuple[TrainState, list[Any]]:
    """One update of the critic a minibatch; the state as it is without one."""
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
    """One update of the policy a minibatch."""
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
      kept = policy.second_moment_keep(
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
  """Them on the host, and the monotonic second at which they were."""
  return jax.device_get(outcomes), time.monotonic()


def _flat(microbatches: Sequence[np.ndarray]) -> np.ndarray:
  """Every token of a minibatch; its microbatches may differ in shape."""
  return np.concatenate([rows.ravel() for rows in microbatches])


def mask_stale(group: Group, version: int, max_age: float) -> Group:
  """The group with tokens older than `max_age` versions out of the loss mask.

  Age is the version that the step starts from, less that of the weights that
  sampled the token. Rewards, and so the group's comparison, stay whole.
  """
  if version - group.head_version <= max_age:
    return group
  return dataclasses.replace(
      group,
      trajectories=tuple(
          dataclasses.replace(
              t, loss_mask=t.loss_mask * (version - t.versions <= max_age)
          )
          for t in group.trajectories
      ),
  )


def prepare(
    groups: Sequence[Group],
    settings: TrainSettings,
    replayed: tuple[int, int] | None = None,
    *,
    looked: Looked = Looked(),
    balances: bool = False,
) -> list[Minibatch]:
  """Advantages over the whole batch, then packed minibatches of groups.

  Args:
    groups: sorted by draw, members by sample.
    settings: of the trainer.
    replayed: see `packing.pack`.
    looked: what networks say of these groups.
    balances: whether the loss has a term that balances experts.

  Raises:
    ValueError: a trajectory without a score, or longer than a row.
  """
  dealt = _deal(groups, settings)
  trajectories = [t for members in dealt for t in members]
  masks = [t.loss_mask for t in trajectories]
  loss = settings.loss
  always = balances or loss.kl_coefficient > 0 or loss.entropy_coefficient > 0
  token_rewards = _token_rewards(trajectories, looked, settings)
  found = advantages_lib.token_advantages(
      settings.advantages,
      np.array([_score(t) for t in trajectories]),
      np.array([t.draw_index for t in trajectories]),
      [t.sampled for t in trajectories],
      values=looked.values,
      token_rewards=token_rewards,
      turn_ids=[t.turn_ids for t in trajectories],
  )
  minibatches, start = [], 0
  for members in dealt:
    own = slice(start, start + len(members))
    start = own.stop
    # What is left out of the loss has no part in it, whatever it is worth.
    given = [
        advantage * (t.loss_mask > 0)
        for t, advantage in zip(members, found.advantages[own])
    ]
    rows = {}
    if looked.values is not None:
      layout = packing.lay([len(t.ids) for t in members], settings.packing)
      for name, per_token in (
          ('values', looked.values[own]),
          ('returns', found.returns[own]),
      ):
        rows[name] = tuple(packing.scatter(per_token, layout))
    minibatches.append(
        Minibatch(
            tuple(packing.pack(members, given, settings.packing, replayed)),
            float(sum(np.count_nonzero(t.loss_mask) for t in members)),
            *(
                aggregation.denominator(
                    loss.aggregation, masks[own], loss.constant_length
                )
                for loss in (settings.loss, settings.critic.loss)
            ),
            any(
                np.any(t.loss_mask if always else t.loss_mask * advantage)
                for t, advantage in zip(members, given)
            ),
            **rows,
        )
    )
  return minibatches


def _replayed(config: ModelConfig) -> tuple[int, int] | None:
  """(L, k) of recorded choices of experts, where they are replayed."""
  return config.routing_shape if config.moe.replay else None


def _deal(
    groups: Sequence[Group], settings: TrainSettings
) -> list[list[Trajectory]]:
  """The trajectories of each minibatch, whole groups in order.

  Sizes differ by one group at most, the larger ones first.
  """
  dealt = []
  for part in np.array_split(np.arange(len(groups)), settings.minibatches):
    members = [t for index in part for t in groups[index].trajectories]
    if settings.mask_truncated:
      members = [
          dataclasses.replace(t, loss_mask=np.zeros_like(t.loss_mask))
          if t.stop_reason is StopReason.LENGTH
          else t
          for t in members
      ]
    dealt.append(members)
  return dealt


def _token_rewards(
    trajectories: Sequence[Trajectory], looked: Looked, settings: TrainSettings
) -> list[np.ndarray] | None:
  """Rewards of single tokens: those of the record, and the KL's."""
  found = None
  if any(t.token_rewards is not None for t in trajectories):
    found = [
        np.zeros(len(t.ids), np.float32)
        if t.token_rewards is None
        else t.token_rewards
        for t in trajectories
    ]
  if looked.reference_logps is None:
    return found
  kl = _kl_only(trajectories, looked, settings)
  return kl if found is None else [a + b for a, b in zip(found, kl)]


def _kl_only(
    trajectories: Sequence[Trajectory], looked: Looked, settings: TrainSettings
) -> list[np.ndarray]:
  return advantages_lib.kl_rewards(
      settings.advantages,
      [t.logps for t in trajectories],  # of the policies that sampled
      looked.reference_logps,
      [t.sampled for t in trajectories],
  )


def describe(
    groups: Sequence[Group],
    version: int,
    dealt: Sequence[Sequence[Trajectory]],
) -> dict[str, float]:
  """Computes the metrics that the records alone tell.

  Args:
    groups: of one step.
    version: V, the version that the step started from. A token is V - (its
      version) old, and an answer is mixed if its tokens have two versions.
    dealt: the trajectories of each minibatch, with the masks that they are
      trained with.
  """
  trajectories = [t for group in groups for t in group.trajectories]
  sampled = [t.versions[t.sampled] for t in trajectories]
  ages = version - np.concatenate(
      [t.versions[t.loss_mask > 0] for members in dealt for t in members]
  )
  scores = np.array([_score(t) for t in trajectories])
  draws = np.array([t.draw_index for t in trajectories])
  values = {
      'reward_mean': scores.mean(),
      'reward_std': scores.std(),
      'zero_variance_fraction': advantages_lib.fraction_zero_variance(
          scores, draws
      ),
      'response_length_mean': np.mean([len(v) for v in sampled]),
      'truncated_fraction': np.mean(
          [t.stop_reason is StopReason.LENGTH for t in trajectories]
      ),
      'mixed_version_fraction': np.mean(
          [len(set(v.tolist())) > 1 for v in sampled]
      ),
      'head_staleness_max': max(version - g.head_version for g in groups),
  }
  if ages.size:
    values |= {'staleness_mean': ages.mean(), 'staleness_max': ages.max()}
  return {name: float(value) for name, value in values.items()}


def summarize(
    outcomes: Sequence[Outcome],
    denominators: Sequence[float],
    *,
    exact: bool = True,
) -> dict[str, float]:
  """Metrics of a step from the sums of its updates.

  Args:
    outcomes: one an update.
    denominators: what the loss of each was divided by.
    exact: whether all updates have seen the log-probs under the weights at the
      start of the step. If not, only the first one has, and engine and trainer
      are compared on its tokens.
  """
  stats = merged(outcomes)
  compared = stats if exact else merged(outcomes[:1])
  # A step whose answers are all masked has sums of 0 over 0 tokens.
  count = max(1.0, stats['tokens_sum'])
  losses = [o.loss * part for o, part in zip(outcomes, denominators)]
  values = {
      'loss': sum(losses) / max(1.0, sum(denominators)),
      **_norms(outcomes),
      'learning_rate': outcomes[-1].learning_rate,
      'skipped_steps': outcomes[-1].idle_updates + outcomes[-1].skipped_updates,
      'logprob_gap_mean': compared['gap_sum']
      / max(1.0, compared['tokens_sum']),
      'trained_tokens': stats['tokens_sum'],
      'importance_weight_max': stats['importance_weight_max'],
      'used_weight_max': stats['used_weight_max'],
      'ratio_max': stats['ratio_max'],
  }
  for name, of in (
      ('entropy', 'entropy'),
      ('clip_fraction', 'clipped'),
      ('dual_clip_fraction', 'dual_clipped'),
      ('rejected_fraction', 'rejected'),
      ('clamped_fraction', 'clamped'),
      ('ratio_mean', 'ratio'),
      ('importance_weight_mean', 'importance_weight'),
      ('used_weight_mean', 'used_weight'),
      ('importance_capped_fraction', 'importance_capped'),
      ('kl_update', 'update_kl'),
      ('kl_behavior', 'behavior_kl'),
      ('kl_reference', 'reference_kl'),
      ('kl_saturated_fraction', 'reference_saturated'),
  ):
    if f'{of}_sum' in stats:
      values[name] = stats[f'{of}_sum'] / count
  for side, sign in (('high', 'positive'), ('low', 'negative')):
    if stats[f'{sign}_sum']:
      clipped = stats[f'clipped_{side}_sum'] / stats[f'{sign}_sum']
      values[f'clip_{side}_fraction'] = clipped
  for age in policy.AGES:
    tokens = stats['age_tokens_sum'][age]
    values[f'staleness_{age}_fraction'] = tokens / count
    if tokens:
      for name, of in (
          ('importance_weight', 'weight'),
          ('clip_fraction', 'clipped'),
          ('rejected_fraction', 'rejected'),
      ):
        value = stats[f'age_{of}_sum'][age] / tokens
        values[f'{name}_staleness_{age}'] = value
      values |= _sample_size(stats, age)
    values |= _gaps(compared, age)
  for name, of in (
      ('effective_sample_size', 'importance_weight'),
      ('used_sample_size', 'used_weight'),
  ):
    squares = stats[f'{of}_squared_sum']
    if squares:
      values[name] = stats[f'{of}_sum'] ** 2 / (count * squares)
  if compared['fresh_tokens_sum']:
    values['logprob_gap_fresh_max'] = compared['fresh_gap_max']
  routers = [name for name in outcomes[0].stats if name.startswith('router_')]
  for name in routers:  # of a minibatch each, and means already
    values[name] = np.mean([outcome.stats[name] for outcome in outcomes])
  return {name: float(value) for name, value in values.items()}


def summarize_critic(
    outcomes: Sequence[Outcome], denominators: Sequence[float]
) -> dict[str, float]:
  """Metrics of the critic from the sums of its updates.

  Args:
    outcomes: one an update.
    denominators: what the loss of each was divided by.
  """
  stats = merged(outcomes)
  count = max(1.0, stats['tokens_sum'])
  losses = [o.loss * part for o, part in zip(outcomes, denominators)]

  def variance(of: str) -> float:
    mean = stats[f'{of}_sum'] / count
    return stats[f'{of}_squared_sum'] / count - mean**2

  values = {
      'critic_loss': sum(losses) / max(1.0, sum(denominators)),
      'critic_gradient_norm': _norms(outcomes)['gradient_norm'],
      'critic_clip_fraction': stats['value_clipped_sum'] / count,
      'critic_skipped_updates': outcomes[-1].skipped_updates,
      'value_mean': stats['value_sum'] / count,
      'return_mean': stats['return_sum'] / count,
  }
  if variance('return') > 1e-8:  # equal returns leave nothing to explain
    unexplained = variance('value_error') / variance('return')
    values['explained_variance'] = 1 - unexplained
  return {name: float(value) for name, value in values.items()}


def _sample_size(
    stats: Mapping[str, float | np.ndarray], age: int
) -> dict[str, float]:
  """Effective sample size of the tokens of an age, as a share of them."""
  squares = stats['age_weight_squared_sum'][age]
  if not squares:
    return {}
  size = stats['age_weight_sum'][age] ** 2 / squares
  share = size / stats['age_tokens_sum'][age]
  return {f'effective_sample_size_staleness_{age}': share}


def _gaps(
    stats: Mapping[str, float | np.ndarray], age: int
) -> dict[str, float]:
  """How far engine and trainer are apart on the tokens of an age."""
  tokens = stats['age_tokens_sum'][age]
  if not tokens:
    return {}
  largest = stats['age_gap_max'][age]
  enough = stats['age_gap_below_sum'][age] >= 0.99 * tokens
  edge = policy.GAP_EDGES[np.argmax(enough)] if enough.any() else largest
  return {
      f'logprob_gap_staleness_{age}': stats['age_gap_sum'][age] / tokens,
      f'logprob_gap_p99_staleness_{age}': min(edge, largest),
      f'logprob_gap_max_staleness_{age}': largest,
      f'kl_k1_staleness_{age}': stats['age_k1_sum'][age] / tokens,
      f'kl_k3_staleness_{age}': stats['age_k3_sum'][age] / tokens,
  }


def merged(outcomes: Sequence[Outcome]) -> dict[str, float | np.ndarray]:
  """The statistics of several updates together.

  On the host: an eager jax operation here would compile in a step.
  """

  def together(name):
    values = [outcome.stats[name] for outcome in outcomes]
    return np.max(values, 0) if name.endswith('_max') else sum(values)

  return {name: together(name) for name in outcomes[0].stats}


def _norms(outcomes: Sequence[Outcome]) -> dict[str, float]:
  finite = [o.gradient_norm for o in outcomes if math.isfinite(o.gradient_norm)]
  return {
      'gradient_norm': float(np.mean(finite)) if finite else math.nan,
      'update_norm': float(np.mean([o.update_norm for o in outcomes])),
  }


def _masked_fraction(groups: Sequence[Group], tokens: float) -> float:
  """Share of the sampled tokens that were taken from the loss and its count."""
  sampled = sum(
      np.count_nonzero(t.sampled) for g in groups for t in g.trajectories
  )
  return float(1 - tokens / sampled) if sampled else 0.0


def _mean_kl(
    groups: Sequence[Group], looked: Looked, settings: TrainSettings
) -> float:
  """Mean of the KL that the rewards were charged for, nats a token."""
  trajectories = [t for group in groups for t in group.trajectories]
  charged = _kl_only(trajectories, looked, settings)
  tokens = sum(np.count_nonzero(t.sampled) for t in trajectories)
  total = sum(float(np.sum(c)) for c in charged)
  return -total / (settings.advantages.kl_coefficient * max(1, tokens))


def _in_order(groups: Sequence[Group], minibatches: int) -> list[Group]:
  """Groups by draw and members by sample, checked."""
  if len(groups) < minibatches:
    raise ValueError(
        f'{len(groups)} groups for train.minibatches={minibatches}, wanted at'
        ' least as many'
    )
  ordered = sorted(groups, key=lambda group: group.draw_index)
  for one, other in zip(ordered, ordered[1:]):
    if one.draw_index == other.draw_index:
      raise ValueError(f'draw {one.draw_index} comes twice, wanted once')
  for group in ordered:
    if not group.trajectories:
      raise ValueError(f'group of draw {group.draw_index} has no trajectories')
  return [
      dataclasses.replace(
          group,
          trajectories=tuple(
              sorted(group.trajectories, key=lambda t: t.sample)
          ),
      )
      for group in ordered
  ]


def _score(trajectory: Trajectory) -> float:
  if trajectory.reward.status is not RewardStatus.OK:
    raise ValueError(
        f'draw {trajectory.draw_index} sample {trajectory.sample} has reward'
        f" status {trajectory.reward.status.value!r}, wanted 'ok'"
    )
  return trajectory.reward.score
