"""Checks that need no training: environment, data, tokenizer, reward, sums.

Each takes what `prepare` has opened and returns verdicts. Nothing
here writes a file, and only `devices` and `memory` start jax.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import math
import os
import pathlib
import platform
import shutil
import tempfile
from typing import Iterator

import jax
import numpy as np

from areal_jax.config import ConfigError
from areal_jax.doctor.verdict import Verdict, judge
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import cut, devices_needed, machine_devices
from areal_jax.models import lora, parameters
from areal_jax.prepare.prepared import Prepared
from areal_jax.rewards.scorer import Scorer
from areal_jax.rewards.self_test import self_test
from areal_jax.rollout import memory as rollout_memory
from areal_jax.rollout.engine import Engine
from areal_jax.settings.cautions import cautions
from areal_jax.telemetry.run_folder import peak_rss_bytes
from areal_jax.train import memory as train_memory

_PACKAGES = ('jax', 'flax', 'optax', 'orbax-checkpoint', 'numpy')
_TRIED = 32  # problems whose gold answers, prompts and texts are tried
_REWARD_TIMEOUTS = 16  # times reward.timeout_s that its check may take
_GIB = 2**30


def environment(prepared: Prepared) -> Iterator[Verdict]:
  """Versions, and room on the disk for checkpoints."""
  versions = ', '.join(
      f'{n} {importlib.metadata.version(n)}' for n in _PACKAGES
  )
  yield Verdict(
      'environment', 'ok', f'Python {platform.python_version()}, {versions}'
  )
  settings = prepared.settings
  place = settings.checkpoint.folder or settings.output
  if '://' in place:
    yield Verdict('disk', 'skip', f'{place} is no local folder')
    return
  folder = pathlib.Path(place).absolute()
  while not folder.exists():
    folder = folder.parent
  free = shutil.disk_usage(folder).free
  size = _parameters(prepared) * 4
  # Parameters and two moments; one more than are kept exists while it is saved.
  needed = 3 * size * (settings.checkpoint.keep_last + 1)
  yield judge(
      'disk',
      free > needed and os.access(folder, os.W_OK),
      f'{free / _GIB:.1f} GiB free at {folder}, checkpoints need about'
      f' {needed / _GIB:.2f}',
      'another config.output or checkpoint.folder, or a smaller keep_last',
  )


def devices(prepared: Prepared) -> Iterator[Verdict]:
  """Checks that the meshes fit the devices of this machine."""
  mesh = prepared.settings.mesh
  found = machine_devices(mesh)
  kinds = sorted({f'{d.platform} {d.device_kind}' for d in found})
  said = f'{len(found)} of {", ".join(kinds)}, {devices_needed(mesh)} wanted'
  try:
    cut(found, mesh)
  except ConfigError as error:
    yield Verdict('devices', 'fail', said, f'config.mesh: {error}')
    return
  yield Verdict('devices', 'ok', said)
  precise = jax.config.jax_default_matmul_precision in ('highest', 'float32')
  if found[0].platform != 'cpu' and not precise:
    yield Verdict(
        'precision',
        'look',
        'float32 products run in bf16 or TF32 passes on this platform',
        'JAX_DEFAULT_MATMUL_PRECISION=highest to compare engine and trainer in'
        ' full float32',
    )


def data(prepared: Prepared) -> Iterator[Verdict]:
  """Checks the amount of data and how often it is seen."""
  settings, rollout = prepared.settings, prepared.settings.rollout
  problems = len(prepared.train)
  epochs = settings.steps * rollout.batch_size / problems
  left = sum(prepared.left_out.values())
  yield Verdict(
      'data',
      'ok' if left <= 0.05 * (left + problems) else 'look',
      f'{problems} problems to train on, {len(prepared.evaluation)} held out,'
      f' {left} left out; {settings.steps} steps see each {epochs:.2f} times',
      ''
      if left <= 0.05 * (left + problems)
      else f'why: {dict(prepared.left_out)}; a larger'
      ' rollout.engine.max_prompt_length takes longer prompts',
  )
  texts = [str(p.prompt) for p in prepared.train]
  twice = len(texts) - len(set(texts))
  shared = len({str(p.prompt) for p in prepared.evaluation} & set(texts))
  if twice or shared:
    yield Verdict(
        'repeated problems',
        'look',
        f'{twice} prompts to train on come more than once, {shared} held-out'
        ' prompts are trained on as well',
        'take them out of the files: evaluation would measure memory',
    )


def tokenizer(prepared: Prepared) -> Iterator[Verdict]:
  """Checks that prompts and answers survive, and that an answer can end.

  A prompt of which something is lost has been refused when the run was
  prepared; what is left are changes by the tokenizer's own rules.
  """
  reader = prepared.tokenizer
  settings = prepared.settings
  lost, answers = prepared.lost_answers, len(prepared.train)
  changed, prompts = prepared.changed_prompts, len(prepared.prompts)
  yield judge(
      'tokenizer',
      not lost,
      f'{reader.vocab_size} ids for a policy of {prepared.model.vocab_size};'
      f' {prompts - len(changed)} of {prompts} prompts and'
      f' {answers - len(lost)} of {answers} gold answers come back from their'
      f' token ids{f", not that of {lost[0]}" if lost else ""}',
      'a tokenizer that knows every character of the answers: the policy could'
      ' never write them',
  )
  if changed:
    yield Verdict(
        'changed prompts',
        'look',
        f'the tokenizer changes {len(changed)} of {prompts} prompts, such as'
        f' that of {changed[0]}',
        'prompts written as the tokenizer has them, if the difference matters'
        ' to the answer',
    )
  faults = prepared.prompt_faults
  yield Verdict(
      'prompts',
      'look' if faults else 'ok',
      '; '.join(faults)
      or 'one prompt and one full turn: header, end and special tokens are'
      ' where they belong',
      'another tokenizer.chat_template, or what is said of each' * bool(faults),
  )
  stops = prepared.sampling.stop_ids or settings.rollout.stop_strings
  yield judge(
      'end of answers',
      bool(stops),
      f'stop ids {list(prepared.sampling.stop_ids)}, stop strings'
      f' {list(settings.rollout.stop_strings)}',
      'rollout.stop_at_eos, stop_ids or stop_strings: every answer would run to'
      ' max_new_tokens',
  )
  longest = max(
      (len(reader.encode(p.answer)) for p in prepared.train), default=0
  )
  limit = settings.rollout.max_new_tokens
  yield judge(
      'length of answers',
      longest < limit,
      f'the longest gold answer has {longest} tokens, answers may have {limit}',
      f'rollout.max_new_tokens above {longest}, or no such answer can be right',
  )


def reward(prepared: Prepared) -> Verdict:
  """Gold answers score above corrupted ones."""
  settings = prepared.settings.reward
  problems = [p for p in prepared.train if p.answer][:_TRIED]
  if not problems:
    return Verdict('reward', 'skip', 'the problems have no gold answers')
  limit = _REWARD_TIMEOUTS * settings.timeout_s
  with tempfile.TemporaryDirectory() as place:
    printed = pathlib.Path(place) / 'printed'
    scorer = Scorer(
        settings.function, settings.workers, settings.timeout_s, printed
    )
    try:
      scorer.start()
      found = asyncio.run(self_test(scorer, problems, limit_s=limit))
    finally:
      scorer.close()
    lines = printed.read_text(errors='replace').splitlines()
  said = (
      f'{found.right} of {found.problems} gold answers score above corrupted'
      f' ones; {found.gold:.3g} against {found.corrupted:.3g} on average,'
      f' {found.failed} results failed'
      + (f'; it prints: {lines[0][:80]!r}' if lines else '')
  )
  return judge(
      'reward', found.passed, said,
      f'config.reward.function {settings.function}: {found.why}',
  )  # fmt: skip


def memory(prepared: Prepared) -> Iterator[Verdict]:
  """Estimates the memory of training and generation from shapes."""
  settings, rules = prepared.settings, Rules()
  slices = cut(machine_devices(settings.mesh), settings.mesh)
  reference = prepared.reference and prepared.reference[0]
  trains = train_memory.estimate(
      prepared.model, settings.train, slices.train, rules, reference
  )
  rollout = settings.rollout
  merges = prepared.model if rollout.merge_adapters else None
  served = lora.without(prepared.model) if merges else prepared.model
  engine = Engine(
      served, rollout.engine, slices.rollout[0], rules.for_rollout()
  )
  generates = rollout_memory.estimate(
      engine,
      rollout.dtype,
      trains=True,
      pins=settings.evaluation.every > 0,
      merges=merges,
      turns=settings.memory_by_phases,
  )
  needed = at_once(trains, generates, settings.mesh.colocated)
  for (name, size), mesh in zip(needed.items(), (slices.train, engine.mesh)):
    stats = mesh.devices.flat[0].memory_stats() or {}
    limit = stats.get('bytes_limit')
    said = f'{size / _GIB:.3f} GiB a device from shapes, activations not in it'
    if limit is None:
      yield Verdict(f'memory of {name}', 'ok', f'{said}; no limit is told')
      continue
    room = limit - stats.get('bytes_in_use', 0)
    yield judge(
        f'memory of {name}',
        size < 0.9 * room,
        f'{said}; {room / _GIB:.3f} are free',
        'more fsdp or tensor devices, fewer slots, a smaller'
        ' engine.max_length, or bfloat16 weights in rollout.dtype',
    )
  yield Verdict(
      'memory of the host', 'ok', f'{peak_rss_bytes() / _GIB:.2f} GiB'
  )


def at_once(
    trains: train_memory.Estimate,
    generates: rollout_memory.Estimate,
    colocated: bool,
) -> dict[str, int]:
  """Bytes of a device by what goes on there, the most of each."""
  if not colocated:
    return {'training': trains.total, 'generation': generates.total}
  if not generates.turns:
    return {'training and generation': trains.total + generates.total}
  return {
      'training': trains.total + generates.resting,
      'generation': trains.resting + generates.total,
  }


def arithmetic(prepared: Prepared) -> Iterator[Verdict]:
  """Checks that batch, slots, η and rows fit each other."""
  settings, rollout = prepared.settings, prepared.settings.rollout
  train, engine = settings.train, rollout.engine
  answers = rollout.batch_size * rollout.group_size
  lengths = [len(ids) for ids in prepared.prompts.values()]
  tokens = answers * (np.mean(lengths) + rollout.max_new_tokens)
  part = train.packing.rows * train.packing.row_tokens
  yield Verdict(
      'batch',
      'ok',
      f'{rollout.batch_size} groups · {rollout.group_size} samples = {answers}'
      f' answers, at most {tokens:.0f} tokens in'
      f' {math.ceil(tokens / part)} microbatches of {part}, for'
      f' {train.minibatches} updates',
  )
  slots = engine.slots * settings.mesh.rollout.replicas
  admitted = (rollout.eta + 1) * answers
  yield judge(
      'slots',
      admitted >= slots,
      f'{slots} slots; η={rollout.eta:g} admits {admitted:g} answers at once',
      f'a larger rollout.eta or batch_size, or at most {admitted:g} slots: the'
      ' others would never hold an answer',
  )
  longest = max(lengths, default=0)
  wasted = engine.max_length - (longest + rollout.max_new_tokens)
  if wasted > 0.5 * engine.max_length:
    yield Verdict(
        'cache',
        'look',
        f'the longest prompt and answer take'
        f' {longest + rollout.max_new_tokens} of {engine.max_length} places of'
        ' a slot',
        'a smaller rollout.engine.max_length makes room for more slots',
    )
  optimizer = train.optimizer
  updates = settings.steps * train.minibatches
  total = optimizer.total_steps
  if optimizer.schedule != 'constant' and total != updates:
    yield Verdict(
        'schedule',
        'look',
        f'the learning rate is laid out over {total} updates, the run has'
        f' {updates}',
        f'train.optimizer.total_steps={updates}',
    )
  for caution in cautions(settings):
    name, _, why = caution.partition(':')
    yield Verdict('settings', 'look', caution, f'see {name}')


def _parameters(prepared: Prepared) -> int:
  shapes = parameters.abstract_params(prepared.model)
  return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(shapes))
