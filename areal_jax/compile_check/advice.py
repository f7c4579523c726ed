"""Changes of settings that would make a run fit, or fit better."""

from __future__ import annotations

import math

from areal_jax.compile_check.findings import Report
from areal_jax.prepare.prepared import PreparedShapes


def advise(prepared: PreparedShapes, report: Report) -> list[str]:
  """Suggests changes of settings, the most effective first."""
  settings, model = prepared.settings, prepared.model
  found = []
  if report.train.fits is False:
    found += _advise_training(prepared, report)
  if report.rollout.fits is False:
    found += _advise_rollout(prepared, report)
  if report.fits and (report.largest_rows or 0) > report.rows:
    found.append(
        f'train.packing.rows={report.largest_rows} fits too: fewer, larger'
        ' microbatches'
    )
  if model.layer_loop == 'unroll' and model.layers > 16:
    found.append(
        "policy.model.layer_loop='scan' compiles one layer instead of"
        f' {model.layers}'
    )
  idle = report.topology.count - report.used
  if idle > 0:
    found.append(
        f'{idle} of {report.topology.count} chips are in no mesh: more'
        ' mesh.train.fsdp or mesh.rollout.replicas'
    )
  step = report.step
  if step is not None and not settings.mesh.colocated:
    slow, fast = sorted((step.train_s, step.rollout_s), reverse=True)
    if slow > 2 * fast:
      side, other = 'train', 'rollout'
      if step.rollout_s > step.train_s:
        side, other = other, side
      found.append(
          f'the {side} mesh takes {slow / fast:.1f} times as long as the'
          f' {other} mesh: give it chips of the other'
      )
  return found


def _advise_training(prepared: PreparedShapes, report: Report) -> list[str]:
  settings, model = prepared.settings, prepared.model
  kinds, hbm = report.train.kinds, report.topology.chip.hbm
  mesh = settings.mesh.train
  found = []
  state = sum(
      kinds.get(name, 0)
      for name in ('parameters', 'optimizer', 'gradients', 'reference',
                   'critic')
  )  # fmt: skip
  if state > 0.6 * hbm:
    least = 2 ** math.ceil(math.log2(mesh.fsdp * state / (0.6 * hbm)))
    found.append(
        f'mesh.train.fsdp={least}: parameters, optimizer and gradients take'
        f' {state / 2**30:.1f} GiB of {hbm / 2**30:.1f}, and a share of that'
        ' over more chips'
    )
    if settings.train.optimizer.kind == 'adamw':
      found.append(
          "train.optimizer.kind='adafactor': a row and a column for each"
          ' matrix in place of two moments'
      )
    if not model.lora.projections:
      found.append(
          'policy.model.lora.projections: adapters need neither moments nor'
          ' gradients of the base'
      )
  if model.remat in ('none', 'dots'):
    found.append("policy.model.remat='full': activations are computed again")
  if model.compute_dtype != 'bfloat16':
    found.append(
        "policy.model.compute_dtype='bfloat16': activations of half the size"
    )
  packing = settings.train.packing
  if report.largest_rows:
    found.append(
        f'train.packing.rows={report.largest_rows} fits, {packing.rows} do not'
    )
  elif packing.rows > mesh.row_shards and report.largest_rows is None:
    found.append(f'train.packing.rows={mesh.row_shards}: one row a chip')
  elif not found or state <= 0.6 * hbm:
    found.append(
        f'mesh.train.context={2 * mesh.context} or'
        f' mesh.train.tensor={2 * mesh.tensor}: a row of {packing.row_tokens}'
        ' tokens is too long for one chip'
    )
  return found


def _advise_rollout(prepared: PreparedShapes, report: Report) -> list[str]:
  settings = prepared.settings
  kinds, hbm = report.rollout.kinds, report.topology.chip.hbm
  engine, found = settings.rollout.engine, []
  if settings.memory_by_phases and not settings.train.offload_optimizer:
    found.append(
        'train.offload_optimizer=True: moments lie in the memory of the host'
        ' while nobody trains'
    )
  if not settings.rollout.dtype:
    found.append("rollout.dtype='bfloat16': weights of half the size")
  if kinds['parameters'] > 0.6 * hbm:
    found.append(
        f'mesh.rollout.tensor={2 * settings.mesh.rollout.tensor}: weights take'
        f' {kinds["parameters"] / 2**30:.1f} GiB of {hbm / 2**30:.1f}'
    )
  if kinds['cache']:
    room = hbm - report.rollout.peak + kinds['cache']
    shards = settings.mesh.rollout.data
    held = engine.of_shard(shards).total_pages
    pages = int(held * room / kinds['cache'])
    if pages > engine.pages_per_slot:
      found.append(
          f'rollout.engine.pages={shards * pages}: the cache takes'
          f' {kinds["cache"] / 2**30:.1f} GiB, and slots rarely are all of'
          ' max_length at once'
      )
    elif fewer := engine.slots // 2 // shards * shards:
      found.append(f'rollout.engine.slots={fewer}, or more chips')
  return found
