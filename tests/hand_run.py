"""A run folder whose numbers can be worked out by hand, by the real writers."""

import numpy as np

from areal_jax.telemetry import run_folder
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.metric_writer import MetricWriter
from areal_jax.telemetry.samples import SampleWriter
from areal_jax.types import StopReason


def write_run(folder):
  """Two steps over three draws, of which one is dropped."""
  run_folder.write_json(folder / run_folder.CONFIG, {'name': 'hand'})
  metrics = MetricWriter(folder, wall=lambda: 100.0)
  metrics.write(0, 0, {'eval_accuracy': 0.25})
  metrics.write(1, 1, {
      'reward_mean': 0.5, 'loss': float('nan'),
      'staleness_0_fraction': 1.0, 'logprob_gap_staleness_0': 1e-6,
      'staleness_1_fraction': 0.0, 'staleness_2_fraction': 0.0,
      'staleness_3_fraction': 0.0,
  })  # fmt: skip
  metrics.write(2, 2, {
      'reward_mean': 1.0, 'loss': 0.1,
      'staleness_0_fraction': 0.75, 'logprob_gap_staleness_0': 8e-6,
      'staleness_1_fraction': 0.25, 'logprob_gap_staleness_1': 0.02,
      'staleness_2_fraction': 0.0, 'staleness_3_fraction': 0.0,
  })  # fmt: skip
  metrics.write(2, 2, {'eval_accuracy': 0.75})  # a row of its own in the file
  metrics.close()
  samples = SampleWriter(folder / run_folder.SAMPLES, 10_000)
  for step, draw, sample, versions, reward in (
      (1, 0, 0, [0, 0], 1.0),
      (1, 0, 1, [0], 0.0),
      (2, 2, 0, [0, 1, 1], 1.0),
      (2, 2, 1, [1], None),
  ):
    samples.write(
        prompt_ids=[1, 4],
        prompt='1+1=', completion='2.', reward=reward, versions=versions,
        ids=np.arange(len(versions)), logps=np.full(len(versions), -0.1),
        step=step, draw_index=draw, sample=sample, stop_reason=StopReason.STOP,
    )  # fmt: skip
  samples.close()
  clock = [0.0]
  with EventLog(
      folder / run_folder.EVENTS,
      monotonic=lambda: clock[0],
      wall=lambda: 1000.0 + clock[0],
  ) as log:
    # From 10 to 20: the trainer waits 2 + 1 and trains 4 + 1 s; the engine
    # decodes 3 + 1, swaps 0.5 (its rebuild lies within) and waits 4 s.
    clock[0] = 9.0
    log.instant('admit', 'data', draw_index=0, version=0)
    log.instant('admit', 'data', draw_index=1, version=0)
    log.instant('admit', 'data', draw_index=2, version=0)
    log.record('generate', 'generate/0', 9.0, 4.0, version=0, tokens=7)
    log.record('wait', 'train', 10.0, 2.0, version=0)
    clock[0] = 12.0
    log.instant('group', 'data', draw_index=0, version=0, members=2, failed=0)
    log.instant('drop', 'data', draw_index=1, reason='failed')
    log.record('step', 'train', 12.0, 4.0, version=0)
    log.record('idle', 'generate/0', 13.0, 4.0)
    log.record('idle', 'evaluate/0', 10.0, 9.0)  # another machine's
    log.record('rebuild', 'rebuild/0', 17.1, 0.3, version=1)
    log.record('swap', 'swap/0', 17.0, 0.5, version=1, alive_before=1)
    log.record('generate', 'generate/0', 17.5, 1.0, version=1, tokens=3)
    log.record('wait', 'train', 18.0, 1.0, version=1)
    clock[0] = 19.0
    log.instant('group', 'data', draw_index=2, version=0, members=1, failed=1)
    log.record('step', 'train', 19.0, 1.0, version=1)
    log.record('idle', 'generate/0', 20.0, 5.0)  # after training
  run_folder.write_json(folder / run_folder.SUMMARY, {'steps': 2})
