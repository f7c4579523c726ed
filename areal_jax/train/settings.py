"""The settings of training; the classes of its parts lie beside their code."""

from __future__ import annotations

import dataclasses

from areal_jax.config import require
from areal_jax.losses.advantages import AdvantageSettings
from areal_jax.losses.policy import PolicyLoss
from areal_jax.train.critic import CriticSettings
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings


@dataclasses.dataclass
class TrainSettings:
  """Settings of the way from a batch of groups to updates.

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
    """Returns whether there is a KL term, in the loss or in the reward."""
    return max(self.loss.kl_coefficient, self.advantages.kl_coefficient) > 0

  @property
  def recomputes_proximal(self) -> bool:
    """Returns whether later minibatches need one more forward pass."""
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
