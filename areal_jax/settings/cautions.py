"""Warnings about valid but suspicious settings."""

from __future__ import annotations

from areal_jax.losses.advantages import AdvantageSettings
from areal_jax.settings.experiment import Experiment


def cautions(settings: Experiment) -> list[str]:
  """Lists warnings about valid but suspicious settings, a line each."""
  rollout, loss = settings.rollout, settings.train.loss
  advantages = settings.train.advantages
  penalty = advantages.length_penalty
  found = _unrated(settings)
  if rollout.exact:
    found.append(
        'config.rollout.exact is True, for equal bits: prompts are prefilled'
        ' one by one and every decode step takes all slots and the widest page'
        ' tables, so the rollout of distinct prompts took 2.0 to 3.3 times as'
        ' long where it was measured'
    )
  by_sequence = loss.ratio_level == 'sequence'
  token_rules = [r for r in loss.weight_rules if r.level == 'token']
  if by_sequence and (loss.weight_level == 'token' or token_rules):
    found.append(
        'config.train.loss: the ratio is that of a sequence and weights or'
        ' rules are those of tokens; all tokens of a sequence are worth the'
        ' same, so what is cut from one token is made up by the others'
    )
  failures = settings.failures
  tries = 1 + failures.retries * (failures.unfinished == 'retry')
  waits = rollout.eta == 0 or rollout.staleness == 'fifo'
  if waits and tries * rollout.group_limit_s >= rollout.wait_s:
    found.append(
        'config.rollout.group_s: an answer that hangs is given up after'
        f' {tries} times {rollout.group_limit_s:g} s, and training, which waits'
        f' for its group, gives up after wait_s={rollout.wait_s:g} s'
    )
  if rollout.dynamic_sampling and not _compares_in_group(advantages):
    found.append(
        'config.rollout.dynamic_sampling is True and advantages compare with'
        ' the batch: groups of equal scores would have taught something there,'
        ' and without them the batch is another'
    )
  if loss.kl_coefficient and advantages.kl_coefficient:
    found.append(
        'config.train: both kl_coefficients are above 0, so the distance from'
        ' the reference is charged for twice'
    )
  if penalty.longest > rollout.max_new_tokens:
    found.append(
        f'config.train.advantages.length_penalty.longest is {penalty.longest}'
        f' and rollout.max_new_tokens {rollout.max_new_tokens}: no answer is'
        ' ever long enough for all of it'
    )
  if penalty.longest and settings.train.mask_truncated:
    found.append(
        'config.train.mask_truncated is True and there is a length_penalty: the'
        ' answers that it is highest for are not trained'
    )
  return found


def _unrated(settings: Experiment) -> list[str]:
  """A caution where evaluation rates only some of the checkpoints."""
  saves, every = settings.checkpoint, settings.evaluation.every
  if not saves.best_by_evaluation:
    return []
  last = settings.steps
  saved = [s for s in range(1, last + 1) if saves.due(s, last)]
  rated = [s for s in saved if s == last or every and s % every == 0]
  if rated == saved:
    return []
  return [
      f'config.checkpoint.keep_best={saves.keep_best!r} can choose among'
      f' {len(rated)} of {len(saved)} checkpoints, those of versions that are'
      f' evaluated: checkpoint.every is {saves.every} and evaluation.every'
      f' {every}'
  ]


def _compares_in_group(advantages: AdvantageSettings) -> bool:
  return 'group' in (advantages.sequences.mean, advantages.tokens.mean)
