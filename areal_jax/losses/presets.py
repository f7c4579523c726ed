"""Published algorithms as rows of settings.

`preset('grpo', longest=512)` gives the settings of advantages and loss that
make that algorithm, to be put into `TrainSettings` and changed from there. Each
differs from the defaults (GRPO's advantages with decoupled PPO's loss) in what
its function sets and in nothing else.

The originals were written for tokens that the proximal policy itself sampled.
Where ours has the weight π_prox / π_behav on top, it is 1 at η = 0, so that the
row is the original there and stays right when generation runs ahead. Rows that
have no such weight say so.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

from areal_jax.config import require
from areal_jax.losses.advantages import (
    AdvantageSettings,
    LengthPenalty,
    Normalization,
)
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss


@dataclasses.dataclass
class Preset:
  """The settings of one published algorithm.

  Attributes:
    advantages, loss: its settings.
    dynamic_sampling: whether groups whose rewards are all equal are left out of
      a batch and others drawn in their place.
  """

  advantages: AdvantageSettings = dataclasses.field(
      default_factory=AdvantageSettings
  )
  loss: PolicyLoss = dataclasses.field(default_factory=PolicyLoss)
  dynamic_sampling: bool = False


def decoupled_ppo(longest: int) -> Preset:
  """The AReaL paper: no baseline but that of the batch, no critic.

  J = w min(ρ A, clip(ρ, 1 ± ε) A), A the reward normalised over all tokens.
  https://arxiv.org/abs/2505.24298 eq. (5), https://arxiv.org/abs/2110.00641.
  """
  del longest
  return Preset(
      AdvantageSettings(
          sequences=Normalization(), tokens=Normalization('batch', 'batch')
      )
  )


def ppo(longest: int) -> Preset:
  """Critic, GAE(1, 0.95), trust region around the behavior policy.

  J = min(ρ A, clip(ρ, 1 ± ε) A) with ρ = π_θ / π_behav: no weight.
  https://arxiv.org/abs/1707.06347.
  """
  del longest
  return Preset(
      AdvantageSettings(
          sequences=Normalization(),
          lam=0.95,
          critic=True,
          tokens=Normalization('batch', 'batch'),
      ),
      PolicyLoss(proximal='behavior'),
  )


def grpo(longest: int) -> Preset:
  """A = (r - mean) / std over the group, a mean of means over the sequences.

  https://arxiv.org/abs/2402.03300. Its KL to a reference (k3, 0.04) is left
  off: set `loss.kl_coefficient`.
  """
  del longest
  return Preset(loss=PolicyLoss(aggregation='sequence_mean_of_means'))


def dr_grpo(longest: int) -> Preset:
  """A = r - mean over the group; all tokens added, divided by a constant.

  https://arxiv.org/abs/2503.20783.
  """
  return Preset(
      AdvantageSettings(sequences=Normalization('group')),
      PolicyLoss(aggregation='constant', constant_length=longest),
  )


def dapo(longest: int) -> Preset:
  """Clip-higher, token mean, dynamic sampling, soft penalty on length.

  The penalty grows over the last fifth of the longest answer, as in
  https://arxiv.org/abs/2503.14476.
  """
  return Preset(
      AdvantageSettings(
          length_penalty=LengthPenalty(longest, max(1, longest // 5))
      ),
      PolicyLoss(clip=0.2, clip_high=0.28),
      dynamic_sampling=True,
  )


def rloo(longest: int) -> Preset:
  """A = r - mean of the others of the group; the sum over a sequence.

  https://arxiv.org/abs/2402.14740.
  """
  del longest
  return Preset(
      AdvantageSettings(sequences=Normalization('group', leave_one_out=True)),
      PolicyLoss(aggregation='sequence_mean_of_sums'),
  )


def reinforce_pp(longest: int) -> Preset:
  """REINFORCE++: KL (k1) in the reward, normalised over the batch's tokens.

  https://arxiv.org/abs/2501.03262. Needs a reference policy.
  """
  del longest
  return Preset(
      AdvantageSettings(
          sequences=Normalization(),
          kl_coefficient=0.01,
          kl_kind='k1',
          tokens=Normalization('batch', 'batch'),
      )
  )


def reinforce_pp_baseline(longest: int) -> Preset:
  """The group's mean off, then the batch's tokens; KL (k2) in the loss.

  https://arxiv.org/abs/2501.03262. Needs a reference policy.
  """
  del longest
  return Preset(
      AdvantageSettings(
          sequences=Normalization('group'),
          tokens=Normalization('batch', 'batch'),
      ),
      PolicyLoss(kl_coefficient=0.001, kl_kind='k2'),
  )


def lite_ppo(longest: int) -> Preset:
  """Mean of the group, standard deviation of the batch, token mean.

  https://arxiv.org/abs/2508.08221.
  """
  del longest
  return Preset(AdvantageSettings(sequences=Normalization('group', 'batch')))


def gspo(longest: int) -> Preset:
  """Ratio and weight of a sequence: geometric means over its tokens.

  ρ = (π_θ(y) / π_prox(y))^(1 / |y|), clipped at 3e-4 and 4e-4.
  https://arxiv.org/abs/2507.18071.
  """
  del longest
  return Preset(
      loss=PolicyLoss(
          ratio_level='sequence',
          clip=3e-4,
          clip_high=4e-4,
          weight_level='sequence_mean',
          aggregation='sequence_mean_of_means',
      )
  )


def cispo(longest: int) -> Preset:
  """A log π_θ weighted by the clipped ratio, a constant.

  J = sg[min(π_θ / π_behav, 1 + ε_high)] A log π_θ: every token keeps a
  gradient, and the cap is the weight. https://arxiv.org/abs/2506.13585.
  """
  del longest
  return Preset(
      loss=PolicyLoss(
          objective='cispo', clip=1.0, clip_high=0.2, proximal='behavior'
      )
  )


def sapo(longest: int) -> Preset:
  """A smooth gate in place of the clip, steeper where A < 0.

  J = (4 / τ) sigmoid(τ (ρ - 1)) A. https://arxiv.org/abs/2511.20347.
  """
  del longest
  return Preset(
      loss=PolicyLoss(objective='gate', aggregation='sequence_mean_of_means')
  )


def m2po(longest: int) -> Preset:
  """Tokens masked until the batch's second moment of log w is below 0.04.

  https://arxiv.org/abs/2510.01161.
  """
  del longest
  return Preset(loss=PolicyLoss(second_moment=0.04))


def dual_clip(longest: int) -> Preset:
  """J is at least 3 A where A < 0. https://arxiv.org/abs/1912.09729."""
  del longest
  return Preset(loss=PolicyLoss(dual_clip=3.0))


def tis(longest: int) -> Preset:
  """The weight of a token cut down to 2 (truncated importance sampling).

  https://fengyao.notion.site/off-policy-rl.
  """
  del longest
  rule = WeightRule(action='clamp', upper=2.0)
  return Preset(loss=PolicyLoss(weight_rules=(rule,)))


def icepop(longest: int) -> Preset:
  """Tokens whose weight lies outside [0.5, 5] are masked.

  https://arxiv.org/abs/2510.18855.
  """
  del longest
  rule = WeightRule(lower=0.5, upper=5.0)
  return Preset(loss=PolicyLoss(weight_rules=(rule,)))


def mis(longest: int) -> Preset:
  """Sequences whose whole ratio exceeds 2 are masked (masked importance).

  w = π_prox(y) / π_behav(y), 0 above the bound; the same source as TIS.
  """
  del longest
  rule = WeightRule('sequence', aggregation='sum', upper=2.0)
  return Preset(
      loss=PolicyLoss(weight_level='sequence_sum', weight_rules=(rule,))
  )


def sequence_rejection(longest: int) -> Preset:
  """Sequences of a geometric mean weight outside [0.9, 1.1] are masked.

  Weights of tokens; verl's and AReaL's sequence-level rejection.
  """
  del longest
  rule = WeightRule('sequence', lower=0.9, upper=1.1)
  return Preset(loss=PolicyLoss(weight_rules=(rule,)))


def loglinear(longest: int) -> Preset:
  """Proximal log-probs interpolated by age, without a forward pass.

  https://arxiv.org/abs/2512.06547.
  """
  del longest
  return Preset(loss=PolicyLoss(proximal='loglinear'))


def gmpo(longest: int) -> Preset:
  """Geometric mean of the clipped token ratios of a sequence.

  https://arxiv.org/abs/2507.20673.
  """
  del longest
  return Preset(
      loss=PolicyLoss(
          objective='geometric_mean',
          clip=0.33,
          clip_high=0.49,
          weight_level='sequence_mean',
          aggregation='sequence_mean_of_means',
      )
  )


def reinforce(longest: int) -> Preset:
  """J = w A log π_θ with the group's mean off: no clip.

  Williams 1992; the loss of GPG, https://arxiv.org/abs/2504.02546.
  """
  del longest
  return Preset(
      AdvantageSettings(sequences=Normalization('group')),
      PolicyLoss(objective='reinforce'),
  )


def distillation(longest: int) -> Preset:
  """A teacher's log-probs are the reward, token by token; no verifier's is.

  A_t = log teacher - log π_behav, the reverse KL of that token alone (γ = 0).
  The teacher is the reference policy. On-policy distillation,
  https://arxiv.org/abs/2306.13649.
  """
  del longest
  return Preset(
      AdvantageSettings(
          reward_scale=0.0,
          sequences=Normalization(),
          gamma=0.0,
          kl_coefficient=1.0,
      )
  )


PRESETS: dict[str, Callable[[int], Preset]] = {
    function.__name__: function
    for function in (
        decoupled_ppo,
        ppo,
        grpo,
        dr_grpo,
        dapo,
        rloo,
        reinforce_pp,
        reinforce_pp_baseline,
        lite_ppo,
        gspo,
        cispo,
        sapo,
        m2po,
        dual_clip,
        tis,
        icepop,
        mis,
        sequence_rejection,
        loglinear,
        gmpo,
        reinforce,
        distillation,
    )
}


def preset(name: str, *, longest: int) -> Preset:
  """The settings of an algorithm, fresh and open to changes.

  Args:
    name: a key of `PRESETS`.
    longest: tokens of the longest answer (`rollout.max_new_tokens`), which the
      length penalty and the constant denominator go by.

  Raises:
    ConfigError: no such algorithm, or no length.
  """
  require(name in PRESETS, 'preset', name, f'one of {sorted(PRESETS)}')
  require(longest >= 1, 'longest', longest, 'at least 1')
  return PRESETS[name](longest)
