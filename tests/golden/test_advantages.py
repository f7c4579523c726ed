"""Advantages against AReaL's and verl's own outputs.

AReaL and verl lay answers into padded rows; AReaL moreover rolls its rows left
by one, so that a value stands where the token is predicted. Ours are lists of
unshifted rows without padding, and are compared where the mask is 1.
"""

import numpy as np

from areal_jax.losses import advantages
from areal_jax.losses.advantages import (
    AdvantageSettings,
    LengthPenalty,
    Normalization,
)
from tests.closeness import assert_close
from tests.golden import cases

_NOTHING = Normalization()

# Functions of the peers that ours have not, and why.
NOT_HAD = {
    'compute_remax_outcome_advantage': (
        'a greedy answer of each problem as baseline: one more generation a'
        ' group, which the rollout does not make'
    ),
    'compute_opo_outcome_advantage': 'a mean weighted by length: not offered',
    'compute_gpg_outcome_advantage': (
        'scaled by the share of answers with a score that is not 0, a number'
        ' that learning rates take care of'
    ),
    'compute_grpo_passk_outcome_advantage': (
        'only the best answer of a group learns: not offered'
    ),
    'masked_normalization': (
        'masked elements come out as -mean / std there, and no caller of it is'
        ' left in the pipeline'
    ),
}

# Where ours differs on purpose, and why. The tests go by what a case asks for
# and not by its name; the right values are worked out beside them.
DIFFERS = {
    'norm_group1_loo': 'a group of one has no others: ours is 0, AReaL keeps x',
    'norm_ragged_groups': (
        'the last rows are a smaller group; AReaL divides them by epsilon alone'
    ),
    'reward_on_untrained_tail': (
        'AReaL loses the reward of an answer that ends in a tool output'
    ),
    'no_eos_masked': 'a row as wide as the padding is not an answer cut off',
    'no_eos_masked_values': 'the same',
    'gae_values': 'the same: such a row gets the value behind its end',
    'gae_values_lambda1': 'the same',
    'gae_values_lambda0': 'the same',
    'gae_values_kl_advnorm': 'the same',
    'zero_mask_row': 'the same',
    'single_turn_wide': 'the same',
    'overlong_penalty': (
        "DAPO's penalty is whole from the longest answer on; AReaL's grows"
    ),
    'grpo_std_single': 'a group of one teaches nothing: ours is 0, theirs is r',
    'grpo_std_vectorized_single': 'the same',
    'grpo_nostd_drgrpo_single': 'the same',
    'grpo_nostd_drgrpo_vectorized_single': 'the same',
    'rloo_single': 'the same',
    'reinforce_pp_baseline_single': 'the same, before the tokens are whitened',
}


def _by_hand(x, size, epsilon) -> np.ndarray:
  """Mean and unbiased std of blocks, the last one of what is left."""
  blocks = [x[i : i + size] for i in range(0, len(x), size)]
  return np.concatenate(
      [(b - b.mean()) / (b.std(ddof=1) + epsilon) for b in blocks]
  )


def _normalization(args) -> Normalization:
  if args is None:
    return _NOTHING
  return Normalization(
      mean=args['mean_level'] or 'none',
      std=args['std_level'] or 'none',
      leave_one_out=args['mean_leave1out'] and bool(args['mean_level']),
      unbiased=args['std_unbiased'],
      epsilon=args['eps'],
  )


def _groups(args, sequences: int) -> np.ndarray:
  """Group ids of AReaL's blocks of rows."""
  return np.arange(sequences) // args['group_size']


def _differs(case) -> bool:
  """Leave-one-out of one, or rows that fill no block: the kinds of DIFFERS."""
  args, x = case.args, case.inputs['x']
  if len(x) % args['group_size']:
    return 'group' in (args['mean_level'], args['std_level'])
  return args['mean_leave1out'] and (
      args['group_size'] == 1 and args['mean_level'] == 'group'
  )


@cases.matching(
    'areal/normalization.npz',
    'Normalization.__call__',
    when=lambda case: not _differs(case),
)
def test_normalisation_is_that_of_areal(case):
  x, args = case.inputs['x'], case.args
  group_ids = _groups(args, len(x))
  if x.ndim == 1:
    result = advantages.normalize(x, group_ids, _normalization(args))
  else:
    mask = case.inputs.get('loss_mask', np.ones(x.shape))
    result = np.stack(
        advantages.normalize_tokens(x, group_ids, mask, _normalization(args))
    )
  assert_close(result, case.outputs['y'], size=0.1)


@cases.matching(
    'areal/normalization.npz', 'Normalization.__call__', when=_differs
)
def test_where_normalisation_differs_it_is_right(case):
  x, args = case.inputs['x'], case.args
  result = advantages.normalize(x, _groups(args, len(x)), _normalization(args))
  right = np.zeros(len(x))
  if args['group_size'] > 1:
    assert (args['mean_level'], args['std_level']) == ('group', 'group')
    right = _by_hand(x, args['group_size'], args['eps'])
  assert_close(result, right, size=0.1)


# AReaL's whole way from rewards to advantages.


def _lengths(case) -> np.ndarray:
  return case.inputs['attention_mask'].sum(axis=1)


def _padded(case, rows) -> np.ndarray:
  """Rows of ours in AReaL's layout, rolled left by one."""
  padded = np.zeros(case.inputs['loss_mask'].shape, np.float32)
  for row, values in zip(padded, rows):
    row[: len(values)] = values
  return np.roll(padded, -1, axis=1)


def _unrolled(case, x) -> list[np.ndarray]:
  """What AReaL has aligned to predictions, as our unshifted rows."""
  return [row[:n] for row, n in zip(np.roll(x, 1, axis=1), _lengths(case))]


def _comparable_rows(case) -> np.ndarray:
  """Rows of which AReaL computes what it says.

  It puts the reward at the last position of a row. Where that was not sampled
  (the answer ends in a tool's output) its recursion passes over the reward, and
  the row learns nothing; ours stands at the last sampled token. A row as long
  as the padded width counts as cut off there: it takes the value behind its end
  as what follows, and loses its reward with mask_no_eos_with_zero. Its penalty
  on length goes on growing where DAPO's is whole, from the longest answer on.
  """
  inputs, args = case.inputs, case.args
  lengths, masks = _lengths(case), inputs['loss_mask'] > 0
  rows = np.arange(len(lengths))
  comparable = masks[rows, lengths - 1] | ~masks.any(axis=1)
  if 'values' in inputs or args['mask_no_eos_with_zero']:
    comparable &= lengths < masks.shape[1]
  if args['overlong_reward_penalty']:
    comparable &= masks.sum(axis=1) <= args['max_new_tokens']
  return comparable


def _settings(case) -> AdvantageSettings:
  args = case.args
  penalty = LengthPenalty()
  if args['overlong_reward_penalty']:
    penalty = LengthPenalty(
        args['max_new_tokens'],
        args['overlong_tokens'],
        args['overlong_penalty_factor'],
    )
  return AdvantageSettings(
      reward_scale=args['reward_scaling'],
      reward_bias=args['reward_bias'],
      reward_clip=args['reward_clip'],
      length_penalty=penalty,
      sequences=_normalization(args['reward_norm']),
      gamma=args['discount'],
      lam=args['gae_lambda'],
      critic='values' in case.inputs,
      kl_coefficient=args['kl_ctl'],
      kl_kind=args['kl_estimator'],
      tokens=_normalization(args['adv_norm']),
  )


def _group_ids(case) -> np.ndarray:
  """Of the one normalisation that looks at groups."""
  sequences = len(case.inputs['rewards'])
  for name in ('reward_norm', 'adv_norm'):
    args = case.args[name]
    if args and 'group' in (args['mean_level'], args['std_level']):
      return _groups(args, sequences)
  return np.arange(sequences)


def _kl_rewards(case, settings):
  """Those of each token, which equal AReaL's where it has a prediction."""
  inputs, outputs = case.inputs, case.outputs
  reference = inputs.get('ref_logp', np.zeros(inputs['loss_mask'].shape))
  rewards = advantages.kl_rewards(
      settings,
      _unrolled(case, outputs['logprobs']),
      _unrolled(case, reference),
      [m[:n] for m, n in zip(inputs['loss_mask'], _lengths(case))],
  )
  sampled = outputs['loss_mask'] > 0
  assert_close(
      _padded(case, rewards)[sampled], outputs['kl_rewards'][sampled], size=0.1
  )
  return rewards


def _returns_by_hand(case, settings, masks, index) -> list[float]:
  """Of the sampled tokens of a row: the reward stands at the last of them."""
  lengths = np.array([mask.sum() for mask in masks])
  shaped = advantages.shape_rewards(settings, case.inputs['rewards'], lengths)
  reward = advantages.normalize(shaped, _group_ids(case), settings.sequences)
  places = np.flatnonzero(masks[index])
  penalty = _kl_rewards(case, settings)[index][places]
  values = np.zeros(len(places))
  if settings.critic:
    values = _unrolled(case, case.inputs['values'])[index][places]
  advantage, following, returns = 0.0, 0.0, []
  for at in reversed(range(len(places))):
    earned = penalty[at] + (reward[index] if at == len(places) - 1 else 0)
    delta = earned + settings.gamma * following - values[at]
    advantage = delta + settings.gamma * settings.lam * advantage
    following = values[at]
    returns.insert(0, advantage + following)
  return returns


@cases.matching('areal/advantages.npz', 'PPOActor._compute_advantages')
def test_advantages_are_those_of_areal(case):
  inputs, outputs = case.inputs, case.outputs
  settings, args = _settings(case), case.args
  masks = [m[:n] for m, n in zip(inputs['loss_mask'], _lengths(case))]
  values = None
  if settings.critic:
    values = _unrolled(case, inputs['values'])
  rows = _comparable_rows(case)
  assert rows.any()
  result = advantages.token_advantages(
      settings,
      inputs['rewards'],
      _group_ids(case),
      masks,
      values=values,
      token_rewards=_kl_rewards(case, settings),
  )
  compared = (outputs['loss_mask'] > 0) & rows[:, None]
  assert_close(
      _padded(case, result.returns)[compared],
      outputs['returns'][compared],
      size=0.1,
  )
  for index in np.flatnonzero(~rows):
    right = _returns_by_hand(case, settings, masks, index)
    ours = result.returns[index][masks[index] > 0]
    assert_close(ours, np.asarray(right), size=0.1)
  if args['adv_norm'] is not None and not rows.all():
    # A row that differs moves every other one: from AReaL's own returns on.
    raw = outputs['returns'] - inputs.get('values', 0)
    advantage = advantages.normalize_tokens(
        raw, _group_ids(case), outputs['loss_mask'], settings.tokens
    )
    compared = outputs['loss_mask'] > 0
    ours = np.stack(advantage)
  else:
    ours = _padded(case, result.advantages)
  assert_close(ours[compared], outputs['advantages'][compared], size=0.1)


# verl


def _singletons(index) -> np.ndarray:
  """Rows that are alone in their group."""
  _, group, sizes = np.unique(index, return_inverse=True, return_counts=True)
  return sizes[group] == 1


def _token_advantages(case, settings, **more):
  inputs = case.inputs
  return advantages.token_advantages(
      settings,
      inputs['token_level_rewards'].sum(axis=1),
      inputs.get('index', np.arange(len(inputs['response_mask']))),
      inputs['response_mask'],
      **more,
  )


def _compare_groups(case, sequences):
  """All rows but those of groups of one, which are 0 with us."""
  settings = AdvantageSettings(sequences=sequences)
  result = np.stack(_token_advantages(case, settings).advantages)
  alone, expected = (
      _singletons(case.inputs['index']),
      case.outputs['advantages'],
  )
  assert_close(result[~alone], expected[~alone], size=0.1)
  np.testing.assert_array_equal(result[alone], 0)


@cases.matching(
    'verl/advantages.npz',
    'compute_grpo_outcome_advantage',
    'compute_grpo_vectorized_outcome_advantage',
)
def test_group_normalised_advantages_are_those_of_verl(case):
  std = 'group' if case.args['norm_adv_by_std_in_grpo'] else 'none'
  epsilon = case.args.get('epsilon', 1e-6)
  _compare_groups(case, Normalization('group', std, epsilon=epsilon))


@cases.matching(
    'verl/advantages.npz',
    'compute_rloo_outcome_advantage',
    'compute_rloo_vectorized_outcome_advantage',
)
def test_leave_one_out_advantages_are_those_of_verl(case):
  _compare_groups(case, Normalization('group', leave_one_out=True))


# verl adds 1e-8 to the variance, which is far below the tolerance.
_WHITENED = Normalization('batch', 'batch', epsilon=0.0)


def _rewards_of_tokens(case, settings, **more):
  """verl's rewards stand at tokens, and those of sequences are 0."""
  inputs = case.inputs
  return advantages.token_advantages(
      settings,
      np.zeros(len(inputs['response_mask'])),
      np.arange(len(inputs['response_mask'])),
      inputs['response_mask'],
      token_rewards=inputs['token_level_rewards'],
      **more,
  )


@cases.matching('verl/advantages.npz', 'compute_gae_advantage_return')
def test_gae_is_that_of_verl(case):
  """On the host as a whole, and on the device before whitening."""
  inputs, outputs, args = case.inputs, case.outputs, case.args
  mask = inputs['response_mask'] > 0
  settings = AdvantageSettings(
      sequences=_NOTHING,
      gamma=args['gamma'],
      lam=args['lam'],
      critic=True,
      tokens=_WHITENED,
  )
  result = _rewards_of_tokens(case, settings, values=inputs['values'])
  for ours, name in (
      (result.returns, 'returns'),
      (result.advantages, 'advantages'),
  ):
    assert_close(np.stack(ours)[mask], outputs[name][mask], size=0.1)
  _, returns = advantages.gae(
      inputs['token_level_rewards'],
      inputs['values'],
      mask,
      np.ones(mask.shape, np.int32),
      gamma=args['gamma'],
      lam=args['lam'],
  )
  assert_close(np.asarray(returns)[mask], outputs['returns'][mask], size=0.1)


@cases.matching(
    'verl/advantages.npz', 'compute_reinforce_plus_plus_outcome_advantage'
)
def test_reinforce_plus_plus_is_gae_without_values(case):
  settings = AdvantageSettings(
      sequences=_NOTHING, gamma=case.args['config']['gamma'], tokens=_WHITENED
  )
  result = _rewards_of_tokens(case, settings)
  assert_close(
      np.stack(result.advantages), case.outputs['advantages'], size=0.1
  )


@cases.matching(
    'verl/advantages.npz',
    'compute_reinforce_plus_plus_baseline_outcome_advantage',
)
def test_reinforce_plus_plus_baseline_is_group_mean_then_tokens(case):
  """A group of one keeps its score there, which moves every other value.

  Such a case is compared from its centred scores on.
  """
  inputs, index = case.inputs, case.inputs['index']
  alone = _singletons(index)
  settings = AdvantageSettings(
      sequences=Normalization('group'), tokens=_WHITENED
  )
  result = _token_advantages(case, settings).advantages
  if alone.any():
    scores = inputs['token_level_rewards'].sum(axis=1)
    centred = advantages.normalize(scores, index, settings.sequences)
    np.testing.assert_array_equal(centred[alone], 0)
    centred[alone] = scores[alone]
    mask = inputs['response_mask']
    result = advantages.normalize_tokens(
        centred[:, None] * mask, index, mask, _WHITENED
    )
  assert_close(np.stack(result), case.outputs['advantages'], size=0.1)


@cases.matching('verl/misc.npz', 'masked_whiten')
def test_normalisation_of_tokens_is_whitening_in_verl(case):
  values, mask = case.inputs['values'], case.inputs['mask']
  result = np.stack(
      advantages.normalize_tokens(
          values, np.arange(len(values)), mask, _WHITENED
      )
  )
  if not case.args['shift_mean']:
    result = result + values[mask > 0].mean()
  counts = mask > 0
  assert_close(result[counts], case.outputs['y'][counts], size=0.1)


@cases.matching('verl/misc.npz', 'compute_rewards')
def test_kl_in_the_reward_is_that_of_verl(case):
  inputs = case.inputs
  scores = inputs['token_level_scores']
  settings = AdvantageSettings(kl_coefficient=case.args['kl_ratio'])
  penalty = advantages.kl_rewards(
      settings,
      inputs['old_log_prob'],
      inputs['ref_log_prob'],
      np.ones(scores.shape),
  )
  assert_close(scores + np.stack(penalty), case.outputs['rewards'], size=0.1)
