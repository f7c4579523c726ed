"""Losses, KL estimators and log-probs against AReaL's and verl's own outputs.

Where a peer has what our loss gets by its arguments (a rejection mask, an
external weight, a way of aggregating), the test hands it in that way.
"""

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import kl, logprobs, policy
from areal_jax.losses.policy import PolicyLoss
from tests.golden import cases

_CLOSE = dict(rtol=1e-5, atol=1e-6)


def _value_and_grad(logps, proximal, behavior, advantages, mask, **more):
  """Loss, statistics and gradient; a packed [N] is a row of N tokens."""
  rows = [
      np.atleast_2d(x) for x in (logps, proximal, behavior, advantages, mask)
  ]

  def loss(logps):
    return policy.decoupled_ppo_loss(logps, *rows[1:], **more)

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (value, stats), gradient = step(rows[0])
  return value, stats, np.reshape(gradient, np.shape(logps))


def _has_areal_features(case) -> bool:
  """Token ratios; no dual clip; a bounded ratio of tokens, if anything."""
  known = {'eps_clip', 'eps_clip_higher', 'rejection_sampling'}
  rejection = case.args.get('rejection_sampling')
  if not set(case.args) <= known:
    return False
  if rejection is None:
    return True
  clamps_from_below = rejection['action'] == 'clamp' and 'lower' in rejection
  return (
      rejection['level'] == 'token'
      and rejection['metric'] == 'ratio'
      and not clamps_from_below
  )


@cases.matching(
    'areal/actor_loss.npz', 'ppo_actor_loss_fn', when=_has_areal_features
)
def test_decoupled_loss_is_that_of_areal(case):
  inputs, outputs = case.inputs, case.outputs
  proximal, behavior = inputs['proximal_logprobs'], inputs['old_logprobs']
  mask = inputs['loss_mask']
  # The denominator counts the tokens before any is rejected.
  denominator = float(mask.sum())
  settings = PolicyLoss(
      clip=case.args['eps_clip'],
      clip_high=case.args.get('eps_clip_higher'),
  )
  rejection = case.args.get('rejection_sampling')
  if rejection is None:
    # Without rejection AReaL applies no behavior weight at all: as if the
    # proximal weights had sampled the tokens.
    behavior = proximal
  elif rejection['action'] == 'clamp':
    settings.importance_cap = rejection['upper']
  else:
    ratio = np.exp(proximal - behavior)
    inside = ratio <= rejection['upper']
    if 'lower' in rejection:
      inside &= ratio >= rejection['lower']
    mask = mask & inside

  value, stats, gradient = _value_and_grad(
      inputs['logprobs'],
      proximal,
      behavior,
      inputs['advantages'],
      mask,
      denominator=denominator,
      settings=settings,
  )
  np.testing.assert_allclose(value, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(gradient, outputs['grad_logprobs'], **_CLOSE)
  clipped = outputs['stat_clip_mask'] & mask
  assert stats['clipped_sum'] == clipped.sum()
  np.testing.assert_allclose(
      stats['ratio_sum'],
      outputs['stat_importance_weight'][mask].sum(),
      **_CLOSE,
  )
  if rejection is not None:
    assert stats['tokens_sum'] == outputs['stat_behave_mask'].sum()
    np.testing.assert_allclose(
        stats['importance_weight_sum'],
        outputs['stat_behave_imp_weight'][mask].sum(),
        **_CLOSE,
    )


def _sequences_of(mask) -> int:
  """Rows with at least one token."""
  return int((mask.sum(axis=1) > 0).sum())


def _verl_denominator(case) -> float:
  """What verl's aggregation divides the sum over tokens by."""
  mask = case.inputs['response_mask']
  batch = case.args['config'].get('global_batch_info', {})
  shards = batch.get('dp_size', 1)
  mode = case.args['loss_agg_mode']
  if mode == 'token-mean':
    return (batch.get('batch_num_tokens') or mask.sum()) / shards
  if mode == 'token-sum':
    return 1 / shards
  sequences = batch.get('global_batch_size') or _sequences_of(mask)
  if mode == 'seq-mean-token-sum':
    return sequences / shards
  width = batch.get('loss_scale_factor') or mask.shape[1]
  return sequences * width / shards


@cases.matching(
    'verl/policy_losses.npz',
    'compute_policy_loss_vanilla',
    when=lambda case: case.args['loss_agg_mode'] != 'seq-mean-token-mean',
)
def test_clipped_loss_is_that_of_verl(case):
  """For every aggregation that divides a sum over tokens once.

  verl bounds a loss by -A c where A < 0 (dual clip). Such a token is a constant
  there: it is taken out of our mask, and its constant is added.
  """
  inputs, outputs, settings = case.inputs, case.outputs, case.args['config']
  clips = {}
  for name in ('clip_ratio_low', 'clip_ratio_high'):
    value = settings.get(name, 0.2)
    clips[name] = settings['clip_ratio'] if value is None else value
  old, mask = inputs['old_log_prob'], inputs['response_mask']
  advantages = inputs['advantages']
  # π_old / π_rollout, from outside
  weights = inputs.get('rollout_is_weights', np.ones_like(old))
  bound = settings.get('clip_ratio_c', 3.0)
  ratio = np.exp(inputs['log_prob'] - old)
  bounded = (mask > 0) & (advantages < 0) & (ratio > bound)
  denominator = _verl_denominator(case)
  value, stats, gradient = _value_and_grad(
      inputs['log_prob'],
      old,
      old - np.log(np.maximum(weights, 1e-9)),  # 0: rejected tokens
      advantages,
      mask * ~bounded,
      denominator=denominator,
      settings=PolicyLoss(clips['clip_ratio_low'], clips['clip_ratio_high']),
  )
  constant = -(weights * advantages * bound)[bounded].sum() / denominator
  np.testing.assert_allclose(value + constant, outputs['loss_value'], **_CLOSE)
  np.testing.assert_allclose(gradient, outputs['grad_log_prob'], **_CLOSE)
  np.testing.assert_allclose(
      stats['clipped_sum'] / mask.sum(),
      case.scalars['actor/pg_clipfrac'],
      **_CLOSE,
  )


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
  np.testing.assert_allclose(logps[0], case.outputs['logprobs'], **_CLOSE)
  np.testing.assert_allclose(entropy[0], case.outputs['entropy'], **_CLOSE)


@cases.matching('verl/misc.npz', 'logprobs_from_logits_naive')
def test_log_probs_are_those_of_verl(case):
  logps, entropy = _predicted(case.inputs['logits'], case.inputs['labels'], 1.0)
  np.testing.assert_allclose(logps, case.outputs['logprobs'], **_CLOSE)
  np.testing.assert_allclose(entropy, case.outputs['entropy'], **_CLOSE)
