"""Demonstrations of the warm start, as text and as token ids."""

from __future__ import annotations

from typing import Sequence

from areal_jax.config import named, require
from areal_jax.data.problems import check_text
from areal_jax.prepare.tokenizers import call_named
from areal_jax.settings.experiment import Experiment
from areal_jax.tokenizer.base import Tokenizer, render_prompt
from areal_jax.tokenizer.round_trip import round_trip


def load_demonstrations(settings: Experiment) -> tuple[tuple[str, str], ...]:
  """The warm start's pairs of prompt and answer; none without a warm start."""
  if not settings.warm_start.steps:
    return ()
  task = settings.task
  at = 'config.task.demonstrations'
  found = list(
      call_named(task.demonstrations, at, task.demonstration_count, task.seed)
  )
  require(
      len(found) >= settings.warm_start.batch,
      f'the number of {at}',
      len(found),
      f'at least warm_start.batch={settings.warm_start.batch}',
  )
  for i, pair in enumerate(found):
    right = (
        isinstance(pair, (tuple, list))
        and len(pair) == 2
        and all(isinstance(text, str) for text in pair)
    )
    require(right, f'item {i} of {at}', pair, 'a prompt and an answer')
    for text in pair:
      check_text(text, f'item {i} of {at}')
  return tuple(map(tuple, found))


def encode_demonstrations(
    settings: Experiment,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
) -> tuple[tuple[list[int], list[int]], ...]:
  """Token ids of the warm start's pairs, each answer ended like a sample."""
  if not pairs:
    return ()
  end = list(tokenizer.eos_ids[:1]) if settings.rollout.stop_at_eos else []
  add_bos = settings.tokenizer.add_bos
  found = []
  for i, (prompt, answer) in enumerate(pairs):
    at = f'item {i} of config.task.demonstrations'
    with named(at):
      ids = render_prompt(tokenizer, prompt, add_bos=add_bos)
      ending = tokenizer.encode(answer)
      round_trip(tokenizer, prompt, ids[1:] if add_bos else ids)
      round_trip(tokenizer, answer, ending)
    ending += end
    require(bool(ending), at, (prompt, answer), 'an answer of some token')
    found.append((ids, ending))
  longest = max(len(p) + len(a) for p, a in found)
  row = settings.warm_start.packing.row_tokens
  require(
      longest <= row,
      'config.warm_start.packing.row_tokens',
      row,
      f'at least {longest}, the longest demonstration',
  )
  return tuple(found)
