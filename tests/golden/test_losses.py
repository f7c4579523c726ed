"""Losses, KL estimators and log-probs against AReaL's and verl's own outputs.

Every case, padded [B, T] or packed [N], is laid into one row with segment ids
and with NaN wherever its mask is 0: our rows are packed, and what is masked
must not matter. Where a peer hands in what ours computes (a weight, a mask), or
the other way round, the test translates.
"""

import dataclasses
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import (
    aggregation,
    importance,
    kl,
    logprobs,
    policy,
    value,
)
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from areal_jax.losses.value import ValueLoss
from tests.closeness import assert_close
from tests.golden import cases

_CLOSE = dict(rtol=1e-5, atol=1e-6)

# Functions of the peers that ours have not, and why.
NOT_HAD = {
    'compute_policy_loss_clip_cov': (
        'draws tokens at random by a covariance over whatever part of the batch'
        ' is at hand, so its loss depends on the cut'
    ),
    'compute_policy_loss_kl_cov': (
        'picks tokens by a covariance over whatever part of the batch is at'
        ' hand, so its loss depends on the cut'
    ),
    'compute_policy_loss_dppo_tv': 'not offered; a mask by a divergence',
    'compute_policy_loss_dppo_kl': 'the same',
    'compute_policy_loss_dro': 'not offered; squares of log-ratios',
    'kl_penalty': (
        '|d|, and estimates whose value and gradient are of two kinds: not'
        ' offered; k1 to k3 are compared'
    ),
    'AdaptiveKLController.update': (
        'a coefficient that changes over a run is a state, and here settings'
        ' are frozen'
    ),
}

# Where ours differs on purpose, and why; the tests say what is right.
DIFFERS = {
    'token_tis_bn': (
        'weights divided by their mean over the part of the batch at hand:'
        ' equal up to that factor'
    ),
    'seq_tis_bn': 'the same',
    'kl_penalty_low_var_kl': 'theirs is cut off at ±10, gradient included',
    'kl_penalty_k3': 'the same',
    'geo_mean': 'theirs counts answers without a token; D is handed in',
    'geo_mean_tis': 'the same',
}


@dataclasses.dataclass
class _Row:
  """A case in one row: [1, W] arrays, and how to bring results back."""

  mask: np.ndarray
  segment_ids: np.ndarray
  place: np.ndarray  # of each position of the case in the row
  shape: tuple[int, ...]

  def lay(self, x: np.ndarray) -> np.ndarray:
    """An array of the case as a row, NaN where masked."""
    row = np.full(self.mask.shape, np.nan, np.float32)
    row[0, self.place] = np.ravel(x)
    return np.where(self.mask > 0, row, np.nan)

  def back(self, row) -> np.ndarray:
    return np.asarray(row)[0, self.place].reshape(self.shape)


def _row(mask: np.ndarray, ends=None) -> _Row:
  """The row of a case: padded rows one behind another, or packed already.

  A power of two wide, so that few shapes are compiled.
  """
  mask = np.asarray(mask)
  width = max(256, 1 << math.ceil(math.log2(mask.size)))
  place = np.arange(mask.size)
  row = np.zeros((1, width), np.float32)
  row[0, place] = np.ravel(mask)
  segment_ids = np.zeros((1, width), np.int32)
  if mask.ndim == 2:
    segment_ids[0, place] = 1 + place // mask.shape[1]
  elif ends is not None:
    segment_ids[0, place] = np.searchsorted(ends[1:], place, side='right') + 1
  else:  # levels of tokens only: all one sequence
    segment_ids[0, place] = 1
  return _Row(row, segment_ids, place, mask.shape)


def _value_and_grad(row, settings, logps, proximal, behavior, advantages,
                    denominator, **more):  # fmt: skip
  """Loss, statistics and gradient; arrays of the case in, one gradient out."""

  def loss(logps):
    return policy.policy_loss(
        logps,
        row.lay(proximal),
        row.lay(behavior),
        row.lay(advantages),
        row.mask,
        denominator=denominator,
        settings=settings,
        segment_ids=row.segment_ids,
        **more,
    )

  # Eagerly: with settings of its own each case would be compiled by itself.
  (total, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(row.lay(logps))
  )
  return total, stats, row.back(gradient)


# AReaL

_METRICS = dict(ratio='ratio', kl_k1='k1', kl_k2='k2', kl_k3='k3_reversed')


def _areal_settings(args) -> PolicyLoss:
  settings = PolicyLoss(
      clip=args['eps_clip'],
      clip_high=args.get('eps_clip_higher'),
      dual_clip=args.get('c_clip'),
      ratio_level=args.get('importance_sampling_level', 'token'),
      # Without rejection AReaL applies no behavior weight at all.
      weight_level='none',
  )
  rejection = args.get('rejection_sampling')
  if rejection is None:
    return settings
  of_sequence = rejection['level'] == 'sequence'
  of_sequence = of_sequence and rejection['metric'] == 'ratio'
  settings.weight_level = 'sequence_mean' if of_sequence else 'token'
  settings.weight_rules = (
      WeightRule(
          level=rejection['level'],
          action=rejection['action'],
          metric=_METRICS[rejection['metric']],
          aggregation=rejection.get('agg') or 'mean',
          lower=rejection.get('lower'),
          upper=rejection['upper'],
      ),
  )
  return settings


@cases.matching('areal/actor_loss.npz', 'ppo_actor_loss_fn')
def test_decoupled_loss_is_that_of_areal(case):
  inputs, outputs = case.inputs, case.outputs
  mask = inputs['loss_mask']
  row = _row(mask, inputs.get('cu_seqlens'))
  total, stats, gradient = _value_and_grad(
      row,
      _areal_settings(case.args),
      inputs['logprobs'],
      inputs['proximal_logprobs'],
      inputs['old_logprobs'],
      inputs['advantages'],
      # The denominator counts the tokens before any is rejected.
      float(mask.sum()),
  )
  np.testing.assert_allclose(total, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(gradient, outputs['grad_logprobs'], **_CLOSE)
  kept = outputs.get('stat_behave_mask', mask)
  assert stats['tokens_sum'] - stats['rejected_sum'] == kept.sum()
  assert stats['clipped_sum'] == (outputs['stat_clip_mask'] & kept).sum()
  assert (
      stats['dual_clipped_sum'] == (outputs['stat_dual_clip_mask'] & kept).sum()
  )
  if kept.sum() == mask.sum():  # theirs is 0 where rejected
    np.testing.assert_allclose(
        stats['ratio_sum'],
        outputs['stat_importance_weight'][mask].sum(),
        **_CLOSE,
    )
  if 'stat_behave_imp_weight' in outputs:
    np.testing.assert_allclose(
        stats['used_weight_sum'],
        outputs['stat_behave_imp_weight'][kept].sum(),
        **_CLOSE,
    )


@cases.matching('areal/actor_extras.npz', 'sapo_loss_fn')
def test_gated_loss_is_that_of_areal(case):
  inputs, outputs = case.inputs, case.outputs
  mask, old = inputs['loss_mask'], inputs['old_logprobs']
  total, _, gradient = _value_and_grad(
      _row(mask, inputs.get('cu_seqlens')),
      PolicyLoss(
          objective='gate',
          gate_positive=case.args['tau_pos'],
          gate_negative=case.args['tau_neg'],
          ratio_level=case.args.get('importance_sampling_level', 'token'),
          weight_level='none',
      ),
      inputs['logprobs'],
      old,
      old,
      inputs['advantages'],
      float(mask.sum()),
  )
  np.testing.assert_allclose(total, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(gradient, outputs['grad_logprobs'], **_CLOSE)


@cases.matching('areal/actor_extras.npz', '_apply_m2po_masking')
def test_second_moment_mask_is_that_of_areal(case):
  inputs = case.inputs
  kept = importance.second_moment_keep(
      inputs['proximal_logprobs'],
      inputs['old_logprobs'],
      inputs['loss_mask'],
      threshold=case.args['m2_threshold'],
  )
  np.testing.assert_array_equal(kept > 0, case.outputs['loss_mask'] > 0)


@cases.matching('areal/actor_extras.npz', 'compute_prox_logp_approximations')
def test_proximal_approximations_are_those_of_areal(case):
  inputs = case.inputs
  versions = inputs['versions']
  # A token without a version has no age to go by.
  ages = np.where(versions >= 0, case.args['current_version'] - versions, 0)
  names = dict(loglinear='loglinear', linear='linear', rollout='behavior')
  for name, expected in case.outputs.items():
    result = importance.approximate_proximal(
        names[name], inputs['logprobs'], inputs['old_logp'], ages
    )
    np.testing.assert_allclose(result, expected, **_CLOSE)


@cases.matching('areal/critic_loss.npz', 'ppo_critic_loss_fn')
def test_value_loss_is_that_of_areal(case):
  inputs, outputs = case.inputs, case.outputs
  mask = inputs.get('loss_mask', np.ones(inputs['value'].shape, bool))
  row = _row(mask)

  def loss(values):
    return value.value_loss(
        values,
        row.lay(inputs['old_value']),
        row.lay(inputs['target_value']),
        row.mask,
        denominator=float(mask.sum()),
        settings=ValueLoss(
            clip=case.args['value_eps_clip'],
            kind=dict(mse='squared', huber='huber')[case.args['loss_fn_type']],
        ),
    )

  (total, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(row.lay(inputs['value']))
  )
  np.testing.assert_allclose(total, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(
      row.back(gradient), outputs['grad_value'], **_CLOSE
  )
  assert stats['value_clipped_sum'] == outputs['stat_clip_mask'].sum()


# verl

_KINDS = {
    'token-mean': 'token_mean',
    'token-sum': 'token_mean',  # over a denominator of 1
    'seq-mean-token-sum': 'sequence_mean_of_sums',
    'seq-mean-token-mean': 'sequence_mean_of_means',
    'seq-mean-token-sum-norm': 'constant',
}


def _denominator(mode: str, mask, info=None) -> float:
  """What verl's aggregation divides by; `info` is about its global batch."""
  info = info or {}
  shards = info.get('dp_size', 1)
  if mode == 'token-sum':
    return 1 / shards
  length = info.get('loss_scale_factor') or mask.shape[1]
  whole = aggregation.denominator(_KINDS[mode], list(mask), length)
  if mode == 'token-mean':
    whole = info.get('batch_num_tokens') or whole
  elif info.get('global_batch_size'):
    whole = info['global_batch_size']
    whole *= length if mode == 'seq-mean-token-sum-norm' else 1
  return whole / shards


def _verl_clips(config) -> dict[str, float]:
  clips = {}
  for ours, theirs in (('clip', 'low'), ('clip_high', 'high')):
    bound = config.get(f'clip_ratio_{theirs}', 0.2)
    clips[ours] = config['clip_ratio'] if bound is None else bound
  return clips


def _compare(case, settings, mode, *, proximal=None, behavior=None, kept=None,
             mask=None, denominator=None):  # fmt: skip
  """A case of verl: value and gradient; returns our statistics."""
  inputs, outputs = case.inputs, case.outputs
  old = inputs['old_log_prob']
  mask = inputs['response_mask'] if mask is None else mask
  if denominator is None:
    info = case.args['config'].get('global_batch_info')
    denominator = _denominator(mode, mask, info)
  settings.aggregation = _KINDS[mode]
  row = _row(mask)
  more = {} if kept is None else {'kept': np.nan_to_num(row.lay(kept))}
  total, stats, gradient = _value_and_grad(
      row,
      settings,
      inputs['log_prob'],
      old if proximal is None else proximal,
      old if behavior is None else behavior,
      inputs['advantages'],
      denominator,
      **more,
  )
  np.testing.assert_allclose(total, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(gradient, outputs['grad_log_prob'], **_CLOSE)
  return stats, mask.sum()


def _given_weights(case) -> dict[str, np.ndarray]:
  """verl hands weights in: the behavior policy and the tokens that have them.

  A weight of 0 stands for a rejected token.
  """
  weights = case.inputs.get('rollout_is_weights')
  if weights is None:
    return {}
  safe = np.where(weights > 0, weights, 1)
  behavior = case.inputs['old_log_prob'] - np.log(safe)
  return dict(behavior=behavior, kept=(weights > 0).astype(np.float32))


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_vanilla')
def test_clipped_loss_is_that_of_verl(case):
  config = case.args['config']
  stats, tokens = _compare(
      case,
      PolicyLoss(
          dual_clip=config.get('clip_ratio_c', 3.0), **_verl_clips(config)
      ),
      case.args['loss_agg_mode'],
      **_given_weights(case),
  )
  if 'rollout_is_weights' not in case.inputs:
    for ours, theirs in (
        ('clipped_sum', 'actor/pg_clipfrac'),
        ('dual_clipped_sum', 'actor/pg_clipfrac_lower'),
    ):
      np.testing.assert_allclose(
          stats[ours] / tokens, case.scalars[theirs], **_CLOSE
      )


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_gspo')
def test_loss_of_sequence_ratios_is_that_of_verl(case):
  """verl's is always a mean of means, and has each token's own advantage."""
  settings = PolicyLoss(
      ratio_level='sequence_token', **_verl_clips(case.args['config'])
  )
  _compare(case, settings, 'seq-mean-token-mean', **_given_weights(case))


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_sapo')
def test_gated_loss_is_that_of_verl(case):
  config = case.args['config']
  settings = PolicyLoss(
      objective='gate',
      gate_positive=config.get('tau_pos', 1.0),
      gate_negative=config.get('tau_neg', 1.05),
  )
  _compare(case, settings, 'seq-mean-token-mean', **_given_weights(case))


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_gpg')
def test_loss_without_a_ratio_is_that_of_verl(case):
  settings = PolicyLoss(objective='reinforce')
  mode = case.args['loss_agg_mode']
  _compare(case, settings, mode, **_given_weights(case))


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_cispo')
def test_loss_of_clipped_weights_is_that_of_verl(case):
  settings = PolicyLoss(objective='cispo', **_verl_clips(case.args['config']))
  mode = case.args['loss_agg_mode']
  stats, tokens = _compare(case, settings, mode, **_given_weights(case))
  if 'rollout_is_weights' not in case.inputs:
    np.testing.assert_allclose(
        stats['clipped_sum'] / tokens,
        case.scalars['actor/pg_clipfrac'],
        **_CLOSE,
    )


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_geo_mean')
def test_loss_of_geometric_means_is_that_of_verl(case):
  """verl counts rows without a token too."""
  inputs = case.inputs
  settings = PolicyLoss(
      objective='geometric_mean',
      weight_level='sequence_mean',
      **_verl_clips(case.args['config']),
  )
  weights = inputs.get('rollout_is_weights', np.ones(1))
  _compare(
      case,
      settings,
      'seq-mean-token-mean',
      behavior=inputs['old_log_prob'] - np.log(weights + 1e-10),
      denominator=float(len(inputs['response_mask'])),
  )


# The importance weights of verl: one setting for the weight, any number of
# rules to reject by.


def _bounds(text) -> tuple[float | None, float]:
  """'lo_hi' or one number."""
  low, _, high = str(text).rpartition('_')
  return (float(low) if low else None), float(high)


def _verl_weights(args) -> tuple[str, tuple[WeightRule, ...]]:
  """Weight level and rules that make verl's rollout correction."""
  rules, level = [], 'none'
  weigh = args.get('rollout_is')
  if weigh is not None:
    level = 'token' if weigh == 'token' else 'sequence_sum'
    low, high = _bounds(args.get('rollout_is_threshold', 2.0))
    rules.append(
        WeightRule(weigh, 'clamp' if low is None else 'mask', 'ratio', 'sum',
                   low, high)
    )  # fmt: skip
  return level, tuple(rules)


def _verl_rejections(args) -> tuple[WeightRule, ...]:
  rules = []
  options = args.get('rollout_rs')
  thresholds = str(args.get('rollout_rs_threshold')).split(',')
  for option, text in zip((options or '').split(','), thresholds):
    if not options:
      break
    *scope, metric = option.strip().split('_')
    low, high = _bounds(text)
    if metric == 'k1':
      # Their k1 is minus ours, and their bounds are those of exp(k1).
      low = 1 / high if low is None else low
      low, high = -math.log(high), -math.log(low)
    level = 'token' if scope == ['token'] else 'sequence'
    reduce = scope[1] if level == 'sequence' else 'mean'
    rules.append(WeightRule(level, 'mask', metric, reduce, low, high))
  return tuple(rules)


@cases.matching(
    'verl/rollout_correction.npz',
    'compute_rollout_correction_and_rejection_mask',
)
def test_weights_and_rejections_are_those_of_verl(case):
  inputs, outputs, args = case.inputs, case.outputs, case.args
  level, rules = _verl_weights(args)
  row = _row(inputs['response_mask'])

  def weights(level, rules):
    return importance.importance_weights(
        row.lay(inputs['old_log_prob']),
        row.lay(inputs['rollout_log_prob']),
        row.mask,
        row.segment_ids,
        level=level,
        rules=rules,
    )

  kept = weights('none', _verl_rejections(args)).kept
  np.testing.assert_array_equal(
      row.back(kept), outputs['modified_response_mask'] > 0
  )
  if level != 'none':
    result = weights(level, rules)
    expected = outputs['rollout_is_weights']
    weight = np.where(row.back(result.kept), row.back(result.weight), 0)
    if args.get('rollout_is_batch_normalize'):
      # Their weights divided by their mean, over the whole batch or what is at
      # hand of it: ours are not, and are compared up to that factor.
      weight *= expected.max() / weight.max()
    np.testing.assert_allclose(weight, expected, **_CLOSE)


@cases.matching('verl/policy_losses.npz', 'compute_policy_loss_bypass_mode')
def test_losses_without_a_proximal_pass_are_those_of_verl(case):
  """The ratio to the rollout's policy, weights and mask by that of π_θ."""
  config, inputs = case.args['config'], case.inputs
  args = config['policy_loss']['rollout_correction']
  current, rollout = inputs['log_prob'], inputs['old_log_prob']
  row = _row(inputs['response_mask'])
  kept = importance.importance_weights(
      row.lay(current),
      row.lay(rollout),
      row.mask,
      row.segment_ids,
      level='none',
      rules=_verl_rejections(args),
  ).kept
  mask = row.back(kept).astype(np.float32)  # of which verl's means are
  mode = case.args['loss_agg_mode']
  if args['loss_type'] == 'ppo_clip':
    settings = PolicyLoss(
        dual_clip=config.get('clip_ratio_c', 3.0), **_verl_clips(config)
    )
    _compare(case, settings, mode, mask=mask)
    return
  level, rules = _verl_weights(args)
  settings = PolicyLoss(
      objective='reinforce', weight_level=level, weight_rules=rules
  )
  # The weight of a sequence is that of all its tokens, rejected or not.
  _compare(
      case,
      settings,
      mode,
      proximal=current,
      kept=mask,
      denominator=_denominator(mode, mask),
  )


@cases.matching('verl/misc.npz', 'agg_loss')
def test_aggregation_is_that_of_verl(case):
  losses, mask = case.inputs['loss_mat'], case.inputs['loss_mask']
  mode, row = case.args['loss_agg_mode'], _row(mask)

  def total(losses):
    shares = aggregation.shares(_KINDS[mode], row.mask, row.segment_ids)
    return jnp.nansum(shares * losses) / _denominator(mode, mask, case.args)

  result, gradient = jax.value_and_grad(total)(jnp.asarray(row.lay(losses)))
  np.testing.assert_allclose(result, case.outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(
      row.back(gradient), case.outputs['grad_loss_mat'], **_CLOSE
  )


@cases.matching('verl/misc.npz', 'compute_value_loss')
def test_value_loss_is_that_of_verl(case):
  inputs, outputs = case.inputs, case.outputs
  mask, mode = inputs['response_mask'], case.args['loss_agg_mode']
  row = _row(mask)

  def loss(values):
    return value.value_loss(
        values,
        row.lay(inputs['values']),
        row.lay(inputs['returns']),
        row.mask,
        denominator=_denominator(mode, mask),
        settings=ValueLoss(
            clip=case.args['cliprange_value'], aggregation=_KINDS[mode]
        ),
        segment_ids=row.segment_ids,
    )

  (total, stats), gradient = jax.value_and_grad(loss, has_aux=True)(
      jnp.asarray(row.lay(inputs['vpreds']))
  )
  np.testing.assert_allclose(total, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(
      row.back(gradient), outputs['grad_vpreds'], **_CLOSE
  )
  np.testing.assert_allclose(
      stats['value_clipped_sum'] / mask.sum(), outputs['vf_clipfrac'], **_CLOSE
  )


@cases.matching('verl/misc.npz', 'compute_entropy_loss')
def test_entropy_term_is_that_of_verl(case):
  """The coefficient's term of the loss, with nothing else in it."""
  logits, mask = case.inputs['logits'], case.inputs['response_mask']
  mode = case.args['loss_agg_mode']
  _, entropy = _predicted(logits, np.zeros(mask.shape, np.int32), 1.0)
  row, zero = _row(mask), np.zeros(mask.shape)
  total, _, _ = _value_and_grad(
      row,
      PolicyLoss(entropy_coefficient=1.0, aggregation=_KINDS[mode]),
      zero,
      zero,
      zero,
      zero,
      _denominator(mode, mask),
      entropy=row.lay(entropy),
  )
  np.testing.assert_allclose(-total, case.outputs['entropy_loss'], **_CLOSE)


# KL estimators

_VERL_KINDS = dict(
    kl='k1', k1='k1', mse='k2', k2='k2', low_var_kl='k3', k3='k3'
)


@cases.matching(
    'verl/misc.npz',
    'kl_penalty',
    when=lambda case: case.args['kl_penalty'] in _VERL_KINDS,
)
def test_kl_estimators_are_those_of_verl(case):
  """Where theirs is not cut off: k3 stays within ±10 there."""
  inputs, outputs = case.inputs, case.outputs
  kind = _VERL_KINDS[case.args['kl_penalty']]
  within = np.ones(outputs['kl'].shape)
  if kind == 'k3':
    within = np.abs(outputs['kl']) < 10
    assert within.mean() > 0.5

  def total(logps):
    estimates = kl.estimate(kind, logps, inputs['ref_logprob'], within)
    return jnp.sum(estimates), estimates

  (_, estimates), gradient = jax.value_and_grad(total, has_aux=True)(
      inputs['logprob']
  )
  np.testing.assert_allclose(estimates, outputs['kl'] * within, **_CLOSE)
  np.testing.assert_allclose(
      gradient, outputs['grad_of_sum'] * within, **_CLOSE
  )


@cases.matching('areal/normalization.npz', 'KLEstimator.__call__')
def test_kl_estimators_are_those_of_areal(case):
  """With the clamp to ±10 that is a setting there and not ours."""
  estimates = kl.estimate(
      case.args['kl_estimator'],
      case.inputs['log_probs'],
      case.inputs['log_probs_base'],
      np.ones(case.inputs['log_probs'].shape),
  )
  if case.args['apply_clamp']:
    estimates = jnp.clip(estimates, -10, 10)
  np.testing.assert_allclose(estimates, case.outputs['kl'], **_CLOSE)


# Log-probs


def _predicted(logits, labels, temperature):
  """Log-probs and entropy where logits stand beside what they predict."""
  rows = labels.shape[0]
  ids = np.concatenate([np.zeros((rows, 1), labels.dtype), labels], axis=1)
  logits = np.concatenate([logits, np.zeros_like(logits[:, :1])], axis=1)
  logps, entropy = jax.jit(logprobs.token_logps)(
      logits, ids, np.ones(ids.shape, np.int32), np.full(ids.shape, temperature)
  )
  return logps[:, 1:], entropy[:, 1:]


@cases.matching('areal/actor_extras.npz', 'gather_logprobs_entropy')
def test_log_probs_with_temperature_are_those_of_areal(case):
  logps, entropy = _predicted(
      case.inputs['logits'][None],
      case.inputs['labels'][None],
      case.args['temperature'],
  )
  assert_close(logps[0], case.outputs['logprobs'])
  assert_close(entropy[0], case.outputs['entropy'])


@cases.matching('verl/misc.npz', 'logprobs_from_logits_naive')
def test_log_probs_are_those_of_verl(case):
  logps, entropy = _predicted(case.inputs['logits'], case.inputs['labels'], 1.0)
  assert_close(logps, case.outputs['logprobs'])
  assert_close(entropy, case.outputs['entropy'])


def _is_of_the_optimizer(case) -> bool:
  """Those of test_optimizer.py."""
  function = case.record['function']
  return 'AdamW' in function or function.endswith('_schedule_with_warmup')


def test_every_case_is_compared_or_listed(golden_dir):
  """Over all files of AReaL and verl; prints how long the lists are."""
  modules = [
      importlib.import_module(f'tests.golden.{name}')
      for name in (
          'test_losses',
          'test_advantages',
          'test_packing',
          'test_staleness',
      )
  ]
  lists = [getattr(module, 'NOT_HAD', {}) for module in modules]
  not_had = {name for names in lists for name in names}
  differs = {name for m in modules for name in getattr(m, 'DIFFERS', {})}
  left = {
      case.record['function']
      for case in cases.every(golden_dir, 'areal', 'verl')
      if (case.record['file'], case.record['case']) not in cases.COMPARED
      and not _is_of_the_optimizer(case)
  }
  print(f'{len(differs)} cases differ, {len(not_had)} functions not had')
  assert left <= not_had
