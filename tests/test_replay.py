"""Runs that are trained again from their schedule, bit for bit.

The recorded run is asynchronous, with several minibatches, a critic, a
reference, a schedule of the learning rate and rewards that are shuffled; so
nothing but its record could bring it back. The file itself is tested in
tests/telemetry/test_schedule.py.
"""

import dataclasses
import re
import shutil

import numpy as np
import pytest

from areal_jax import replay, session
from areal_jax.config import ConfigError
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.telemetry.schedule import Schedule, ScheduleWriter
from areal_jax.train import checkpoint
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.outcome import NonFiniteError
from tests.test_resume import settings as demanding
from tests.test_resume import state_of
from tests.test_session import assert_same_bits, experiment, policy_of

HALF = 3


def settings(folder, **changes):
  return demanding(
      folder,
      **{
          'rollout__eta': 2.0,
          'train__minibatches': 2,
          'checkpoint': CheckpointSettings(every=HALF),
          **changes,
      },
  )


def again(folder, source, **changes):
  """The same settings, of a run called 'again', from the record of another."""
  return replay.run(
      settings(folder, name='again', replay=str(source), **changes)
  )


@pytest.fixture(scope='module')
def recorded(tmp_path_factory):
  return session.run(settings(tmp_path_factory.mktemp('recorded')))


@pytest.fixture(scope='module')
def replayed(recorded, tmp_path_factory):
  return again(tmp_path_factory.mktemp('replayed'), recorded.folder)


@pytest.fixture(scope='module')
def resumed(recorded, tmp_path_factory):
  """The recorded run gone on from its half, after a kill behind its end."""
  folder = tmp_path_factory.mktemp('resumed')
  shutil.copytree(recorded.folder, folder / 'run')
  shutil.rmtree(folder / 'run/checkpoints/00000006')
  (folder / 'run/summary.json').unlink()
  return session.run(settings(folder, resume='auto'))


def training_rows(folder):
  """The numbers of every step that training alone decides."""
  names = [r for r in read_jsonl(folder / 'metrics.jsonl') if 'loss' in r]
  return {row['step']: row for row in names}


def test_asynchronous_run_is_reached_again_bit_for_bit(recorded, replayed):
  assert recorded.summary['staleness_max'] > 0  # or a seed would do
  (step, ours), (last, theirs) = map(
      state_of, (replayed.folder, recorded.folder)
  )
  assert step == last == 6
  assert_same_bits(ours, theirs)
  roles = {name.split('/')[1] for name in ours}
  assert roles == {'policy', 'critic', 'reference'}
  assert_same_bits(policy_of(replayed), policy_of(recorded))
  summary = replayed.summary
  assert (summary['first_step'], summary['last_step']) == (1, 6)
  assert summary['differing_steps'] == 0, summary['first_difference']


def test_numbers_of_every_step_are_those_of_the_run(recorded, replayed):
  ours, theirs = map(training_rows, (replayed.folder, recorded.folder))
  assert list(ours) == list(theirs) == [1, 2, 3, 4, 5, 6]
  for step, row in ours.items():
    for name in set(row) - {'wall'}:
      assert row[name] == theirs[step][name], (step, name)


def test_record_says_what_was_trained(recorded):
  schedule = Schedule(recorded.folder / run_folder.SCHEDULE)
  assert schedule.runs[0]['seed'] == 1 and schedule.full_at is None
  samples = read_jsonl(recorded.folder / 'samples.jsonl')
  told = [
      (row['step'], row['draw_index'], row['sample'], row['reward'],
       row['versions'], np.float32(row['logps']).tolist())
      for row in samples
  ]  # fmt: skip
  held = [
      (step, t.draw_index, t.sample, t.reward.score,
       t.versions[t.loss_mask > 0].tolist(), t.logps[t.loss_mask > 0].tolist())
      for step in schedule.steps
      for group in schedule.batch(step)
      for t in group.trajectories
  ]  # fmt: skip
  assert told == held
  schedule.close()


def test_replay_stops_where_it_is_told(recorded, tmp_path):
  half = again(tmp_path, recorded.folder, replay_until=HALF)
  assert half.summary['last_step'] == HALF
  step, ours = state_of(half.folder)
  saved = checkpoint.verify(recorded.folder / f'checkpoints/{HALF:08d}')
  assert step == saved.step == HALF
  shutil.copytree(
      saved.path, tmp_path / 'at_half/checkpoints' / saved.path.name
  )
  assert_same_bits(ours, state_of(tmp_path / 'at_half')[1])


def test_replay_begins_at_a_checkpoint(recorded, tmp_path):
  rest = again(
      tmp_path,
      recorded.folder,
      resume=str(recorded.folder / f'checkpoints/{HALF:08d}'),
  )
  assert rest.summary['first_step'] == HALF + 1
  assert rest.summary['differing_steps'] == 0
  assert_same_bits(state_of(rest.folder)[1], state_of(recorded.folder)[1])


def test_record_of_a_resumed_run_goes_on_where_it_was_cut(
    recorded, resumed, tmp_path
):
  schedule = Schedule(resumed.folder / run_folder.SCHEDULE)
  assert schedule.steps == (1, 2, 3, 4, 5, 6)
  assert [run['attempt'] for run in schedule.runs] == [0, 1]
  schedule.close()
  whole = again(tmp_path, resumed.folder)
  assert whole.summary['differing_steps'] == 0
  assert_same_bits(state_of(whole.folder)[1], state_of(resumed.folder)[1])


def planted(source, folder, change):
  """A copy of a schedule in which `change` was made to step 2, checksums and
  all."""
  read = Schedule(source)
  path = folder / run_folder.SCHEDULE
  with ScheduleWriter(path, 10**7, read.runs[0]) as writer:
    for step in read.steps:
      groups = list(read.batch(step))
      writer.batch(step, change(groups) if step == 2 else groups)
      writer.outcome(step, read.outcome(step))
  read.close()
  return path


def one_log_prob(groups):
  first = groups[0].trajectories[0]
  logps = first.logps.copy()
  logps[np.flatnonzero(first.loss_mask)[0]] -= 0.01
  members = (dataclasses.replace(first, logps=logps),)
  members += groups[0].trajectories[1:]
  return [dataclasses.replace(groups[0], trajectories=members), *groups[1:]]


def test_planted_change_of_one_log_prob_is_seen_at_its_step(
    recorded, tmp_path, capsys
):
  source = recorded.folder / run_folder.SCHEDULE
  other = again(
      tmp_path, planted(source, tmp_path, one_log_prob), replay_until=2
  )
  assert other.summary['differing_steps'] == 1
  assert other.summary['first_difference'].startswith('step 2: ')
  assert 'in the record' in capsys.readouterr().err


# What cannot be replayed.


def refuse(tmp_path, source, words, **changes):
  before = sorted(tmp_path.iterdir())
  with pytest.raises(ConfigError, match=words):
    again(tmp_path, source, **changes)
  assert sorted(tmp_path.iterdir()) == before


def test_other_runs_and_other_steps_are_refused(recorded, tmp_path):
  folder = recorded.folder
  file = re.escape(str(folder / run_folder.SCHEDULE))
  refuse(tmp_path, folder, f'config.seed is 2, wanted that of {file}', seed=2)
  refuse(tmp_path, folder, 'config.policy is .*intermediate_size.: 48',
         policy__model__mlp_width=48)  # fmt: skip
  refuse(tmp_path, folder, 'config.tokenizer is',
         task__texts='tests.resume_texts:letters')  # fmt: skip
  refuse(tmp_path, folder, 'replay_until is 7, wanted steps that .*step 7 is n',
         replay_until=7)  # fmt: skip
  refuse(tmp_path, folder, 'config.resume is .*, wanted one checkpoint',
         resume=str(folder))  # fmt: skip
  refuse(tmp_path, folder, "config.resume is 'auto', wanted a checkpoint to",
         resume='auto')  # fmt: skip
  refuse(tmp_path, tmp_path, 'config.replay is .*, wanted the folder of a run')
  at_end = str(folder / 'checkpoints/00000006')
  refuse(tmp_path, folder, 'at least 7, the first step behind', resume=at_end)
  with pytest.raises(ConfigError, match='config.replay is'):
    session.run(settings(tmp_path, replay=str(folder)))


def test_changed_and_headless_schedules_are_refused(recorded, tmp_path):
  data = bytearray((recorded.folder / run_folder.SCHEDULE).read_bytes())
  data[3] ^= 1
  file = tmp_path / run_folder.SCHEDULE
  file.write_bytes(data)
  refuse(tmp_path, file, 'schedule.bin at byte 0 has')
  read = Schedule(recorded.folder / run_folder.SCHEDULE)
  file.unlink()
  with ScheduleWriter(file, 10**7, read.runs[0]) as writer:
    writer.batch(5, read.batch(5))
  refuse(tmp_path, file, 'begins with step 5, wanted config.resume with a che')


# A batch without a number.


def test_batch_without_a_number_is_kept_and_fails_again_alone(tmp_path):
  """The first update throws the policy so far out that nothing is a number."""
  broken = {
      'steps': 5,
      'rollout__eta': 1.0,
      'train__max_consecutive_skips': 0,
      'train__optimizer': OptimizerSettings(
          learning_rate=1e18, weight_decay=0.0
      ),
  }
  with pytest.raises(NonFiniteError) as first:
    session.run(experiment(tmp_path, **broken))
  crash = tmp_path / 'run' / run_folder.CRASH
  kept = Schedule(crash / run_folder.SCHEDULE)
  step = kept.steps[0]
  assert kept.steps == (step,) and step > 1
  saved, _ = checkpoint.latest(crash / 'checkpoints')
  assert saved.step == step - 1
  whole = Schedule(tmp_path / 'run' / run_folder.SCHEDULE)
  assert whole.outcome(step - 1) and whole.outcome(step) is None
  # The step behind it may have been handed out before it was known.
  assert whole.steps[-1] in (step, step + 1)
  assert [g.draw_index for g in kept.batch(step)] == [
      g.draw_index for g in whole.batch(step)
  ]
  tensors = str(first.value).partition('this time')[2]
  assert tensors
  for source in (crash, tmp_path / 'run'):  # alone, and from the beginning
    with pytest.raises(NonFiniteError) as second:
      replay.run(
          experiment(tmp_path, name='again', replay=str(source), **broken)
      )
    assert f'step {step - 1}' in str(second.value)
    assert str(second.value).partition('this time')[2] == tensors
