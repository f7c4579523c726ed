"""Advantages against AReaL's and verl's own outputs.

AReaL and verl lay answers into padded rows; AReaL moreover rolls its rows left
by one, so that a value stands where the token is predicted. Ours are lists of
unshifted rows without padding, and are compared where the mask is 1.
"""

import numpy as np

from areal_jax.losses import advantages
from areal_jax.losses.advantages import AdvantageSettings
from tests.golden import cases

_CLOSE = dict(rtol=1e-5, atol=1e-6)


def _kind(normalization) -> str | None:
  """Our kind that has these levels of mean and std; None without one."""
  levels = (normalization['mean_level'], normalization['std_level'])
  if normalization['mean_leave1out']:
    leaves_out = levels in [('group', None), ('batch', None)]
    return 'leave_one_out' if leaves_out else None
  if levels in [('group', 'group'), ('group', None)]:
    return 'group'
  return 'batch' if levels in [('batch', 'batch'), ('batch', None)] else None


def _scale(normalization):
  return dict(
      std=normalization['std_level'] is not None,
      unbiased=normalization['std_unbiased'],
      epsilon=normalization['eps'],
  )


def _groups(normalization, sequences: int) -> np.ndarray:
  """Group ids of AReaL's blocks of rows; a batch is one group."""
  if normalization['mean_level'] == 'batch':
    return np.zeros(sequences, int)
  return np.arange(sequences) // normalization['group_size']


def _has_whole_groups(case) -> bool:
  """A block of rows that is cut short has no group there: a quirk."""
  args, x = case.args, case.inputs['x']
  return args['mean_level'] == 'batch' or not len(x) % args['group_size']


@cases.matching(
    'areal/normalization.npz',
    'Normalization.__call__',
    when=lambda case: (
        case.inputs['x'].ndim == 1
        and _kind(case.args) is not None
        and _has_whole_groups(case)
    ),
)
def test_normalisation_of_sequences_is_that_of_areal(case):
  x, scale = case.inputs['x'], _scale(case.args)
  group_ids = _groups(case.args, len(x))
  if case.args['mean_leave1out']:
    result = advantages.leave_one_out(x, group_ids)
  else:
    result = advantages.group_normalized(x, group_ids, **scale)
  np.testing.assert_allclose(result, case.outputs['y'], **_CLOSE)


@cases.matching(
    'areal/normalization.npz',
    'Normalization.__call__',
    when=lambda case: (
        case.inputs['x'].ndim == 2 and _kind(case.args) == 'batch'
    ),
)
def test_normalisation_of_tokens_is_that_of_areal(case):
  x = case.inputs['x']
  mask = case.inputs.get('loss_mask', np.ones(x.shape))
  result = advantages.token_normalized(x, mask, **_scale(case.args))
  np.testing.assert_allclose(np.stack(result), case.outputs['y'], **_CLOSE)


# AReaL's whole way from rewards to advantages.


def _without_critic(case) -> bool:
  """No critic, KL reward, penalty on length or rule for a missing end."""
  return (
      'values' not in case.inputs
      and case.args['kl_ctl'] == 0
      and not case.args['overlong_reward_penalty']
      and not case.args['mask_no_eos_with_zero']
  )


def _settings(case, kind, normalization, **more) -> AdvantageSettings:
  return AdvantageSettings(
      kind=kind,
      reward_bias=case.args['reward_bias'],
      reward_scale=case.args['reward_scaling'],
      reward_clip=case.args['reward_clip'],
      **_scale(normalization),
      **more,
  )


def _is_sequence_level(case) -> bool:
  normalization, args = case.args['reward_norm'], case.args
  return (
      _without_critic(case)
      and args['adv_norm'] is None
      and normalization is not None
      and _kind(normalization) is not None
      and args['discount'] == args['gae_lambda'] == 1
  )


def _is_critic_free_gae(case) -> bool:
  """As in the paper: the advantages are normalised, over all tokens."""
  normalization = case.args['adv_norm']
  return (
      _without_critic(case)
      and case.args['reward_norm'] is None
      and normalization is not None
      and _kind(normalization) == 'batch'
  )


def _ours(case, settings, group_ids):
  """Our advantages and mask in AReaL's layout, rolled left by one."""
  inputs = case.inputs
  lengths = inputs['attention_mask'].sum(axis=1)
  masks = [m[:n] for m, n in zip(inputs['loss_mask'], lengths)]
  rows = advantages.token_advantages(
      settings, inputs['rewards'], group_ids, masks
  )
  padded = np.zeros(inputs['loss_mask'].shape, np.float32)
  for row, values in zip(padded, rows):
    row[: len(values)] = values
  return np.roll(padded, -1, axis=1)


def _ends_sampled(case) -> np.ndarray:
  """Rows whose last token was sampled; elsewhere AReaL loses the reward."""
  lengths = case.inputs['attention_mask'].sum(axis=1)
  return case.inputs['loss_mask'][np.arange(len(lengths)), lengths - 1] > 0


@cases.matching(
    'areal/advantages.npz',
    'PPOActor._compute_advantages',
    when=_is_sequence_level,
)
def test_advantages_of_sequences_are_those_of_areal(case):
  normalization = case.args['reward_norm']
  kind = _kind(normalization)
  result = _ours(
      case,
      _settings(case, kind, normalization),
      _groups(normalization, len(case.inputs['rewards'])),
  )
  compared = (case.outputs['loss_mask'] > 0) & _ends_sampled(case)[:, None]
  assert compared.any()
  np.testing.assert_allclose(
      result[compared], case.outputs['advantages'][compared], **_CLOSE
  )


@cases.matching(
    'areal/advantages.npz',
    'PPOActor._compute_advantages',
    when=lambda case: _is_critic_free_gae(case) and _ends_sampled(case).all(),
)
def test_the_papers_advantages_are_those_of_areal(case):
  settings = _settings(
      case,
      'gae',
      case.args['adv_norm'],
      gamma=case.args['discount'],
      lam=case.args['gae_lambda'],
  )
  result = _ours(case, settings, np.arange(len(case.inputs['rewards'])))
  mask = case.outputs['loss_mask'] > 0
  np.testing.assert_allclose(
      result[mask], case.outputs['advantages'][mask], **_CLOSE
  )


@cases.matching(
    'areal/advantages.npz',
    'PPOActor._compute_advantages',
    when=lambda case: case.args['adv_norm'] is None,
)
def test_gae_is_that_of_areal(case):
  """From its token rewards, with a critic or without.

  A row as long as the padded width counts as cut off there and takes the value
  at its end as what follows; ours has no such bootstrap.
  """
  inputs, outputs = case.inputs, case.outputs
  mask, rewards = outputs['loss_mask'], outputs['tot_rewards']
  values = inputs.get('values', np.zeros_like(rewards))
  result, returns = advantages.gae(
      rewards,
      values,
      mask,
      inputs['attention_mask'],
      gamma=case.args['discount'],
      lam=case.args['gae_lambda'],
  )
  compared = mask > 0
  if 'values' in inputs:
    whole = inputs['attention_mask'].sum(axis=1) < mask.shape[1]
    compared &= whole[:, None]
  assert compared.any()
  np.testing.assert_allclose(
      np.asarray(result)[compared], outputs['advantages'][compared], **_CLOSE
  )
  np.testing.assert_allclose(
      np.asarray(returns)[compared], outputs['returns'][compared], **_CLOSE
  )


# verl


def _singletons(index) -> np.ndarray:
  """Rows that are alone in their group."""
  _, group, sizes = np.unique(index, return_inverse=True, return_counts=True)
  return sizes[group] == 1


def _compare_groups(case, settings):
  """All rows but those of groups of one, which are 0 with us."""
  inputs = case.inputs
  rewards = inputs['token_level_rewards'].sum(axis=1)
  rows = advantages.token_advantages(
      settings, rewards, inputs['index'], inputs['response_mask']
  )
  alone = _singletons(inputs['index'])
  result, expected = np.stack(rows), case.outputs['advantages']
  np.testing.assert_allclose(result[~alone], expected[~alone], **_CLOSE)
  np.testing.assert_array_equal(result[alone], 0)


@cases.matching(
    'verl/advantages.npz',
    'compute_grpo_outcome_advantage',
    'compute_grpo_vectorized_outcome_advantage',
)
def test_group_normalised_advantages_are_those_of_verl(case):
  std = case.args['norm_adv_by_std_in_grpo']
  epsilon = case.args.get('epsilon', 1e-6)
  _compare_groups(case, AdvantageSettings('group', std=std, epsilon=epsilon))


@cases.matching(
    'verl/advantages.npz',
    'compute_rloo_outcome_advantage',
    'compute_rloo_vectorized_outcome_advantage',
)
def test_leave_one_out_advantages_are_those_of_verl(case):
  _compare_groups(case, AdvantageSettings('leave_one_out', std=False))


def _whitened(case, rows):
  """verl adds 1e-8 to the variance, which is far below the tolerance."""
  return np.stack(
      advantages.token_normalized(
          rows, case.inputs['response_mask'], epsilon=0.0
      )
  )


def _gae(case, values, gamma, lam):
  """verl's rows are answers alone, padding included in the segment."""
  mask = case.inputs['response_mask']
  return [
      np.asarray(x)
      for x in advantages.gae(
          case.inputs['token_level_rewards'],
          values,
          mask,
          np.ones(mask.shape, np.int32),
          gamma=gamma,
          lam=lam,
      )
  ]


@cases.matching('verl/advantages.npz', 'compute_gae_advantage_return')
def test_gae_is_that_of_verl(case):
  result, returns = _gae(
      case, case.inputs['values'], case.args['gamma'], case.args['lam']
  )
  mask, outputs = case.inputs['response_mask'] > 0, case.outputs
  np.testing.assert_allclose(returns[mask], outputs['returns'][mask], **_CLOSE)
  np.testing.assert_allclose(
      _whitened(case, result)[mask], outputs['advantages'][mask], **_CLOSE
  )


@cases.matching(
    'verl/advantages.npz', 'compute_reinforce_plus_plus_outcome_advantage'
)
def test_reinforce_plus_plus_is_gae_without_values(case):
  result, _ = _gae(case, 0.0, case.args['config']['gamma'], 1.0)
  np.testing.assert_allclose(
      _whitened(case, result), case.outputs['advantages'], **_CLOSE
  )


@cases.matching(
    'verl/advantages.npz',
    'compute_reinforce_plus_plus_baseline_outcome_advantage',
    # A group of one keeps its score there, which moves every other value.
    when=lambda case: not _singletons(case.inputs['index']).any(),
)
def test_reinforce_plus_plus_baseline_is_group_mean_then_tokens(case):
  inputs = case.inputs
  rows = advantages.token_advantages(
      AdvantageSettings('group', std=False),
      inputs['token_level_rewards'].sum(axis=1),
      inputs['index'],
      inputs['response_mask'],
  )
  np.testing.assert_allclose(
      _whitened(case, rows), case.outputs['advantages'], **_CLOSE
  )


@cases.matching('verl/misc.npz', 'masked_whiten')
def test_normalisation_of_tokens_is_whitening_in_verl(case):
  values, mask = case.inputs['values'], case.inputs['mask']
  result = np.stack(advantages.token_normalized(values, mask, epsilon=0.0))
  if not case.args['shift_mean']:
    result = result + values[mask > 0].mean()
  counts = mask > 0
  np.testing.assert_allclose(
      result[counts], case.outputs['y'][counts], **_CLOSE
  )
