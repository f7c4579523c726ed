"""Whole runs that stop and go on: invariant 3, CASES A17 and A18.

At η = 0 a run that goes on equals one that never stopped, bit for bit. The
checkpoints themselves are tested in tests/train/test_checkpoint.py, the
controller's part in tests/rollout/test_controller.py.
"""

import dataclasses
import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest

from areal_jax import resume, session
from areal_jax.config import ConfigError
from areal_jax.data import running_totals
from areal_jax.data.stream import ProblemStream
from areal_jax.losses.advantages import AdvantageSettings, Normalization
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.slices import MeshSettings, RolloutMesh, TrainMesh
from areal_jax.models import hf
from areal_jax.prepare.prepared import prepare
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.train import checkpoint, checkpoint_tensors, pretrained
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.optimizer import OptimizerSettings
from tests import records
from tests.limits import WAIT_S, wait_until
from tests.test_session import assert_same_bits, experiment, policy_of

ROOT = pathlib.Path(__file__).resolve().parent.parent


def settings(folder, **changes):
  """A run that needs all its state: reference, critic, schedule, shuffling."""
  return experiment(
      folder,
      **{
          'steps': 6,
          'shuffle_rewards': True,
          'train__loss': PolicyLoss(kl_coefficient=0.1),
          'train__advantages': AdvantageSettings(
              sequences=Normalization(),
              critic=True,
              tokens=Normalization('batch', 'batch'),
          ),
          'train__optimizer': OptimizerSettings(
              learning_rate=1e-2,
              schedule='cosine',
              warmup_steps=2,
              total_steps=8,
          ),
          **changes,
      },
  )


@pytest.fixture(scope='module')
def uninterrupted(tmp_path_factory):
  return session.run(settings(tmp_path_factory.mktemp('uninterrupted')))


@pytest.fixture(scope='module')
def stopped(tmp_path_factory):
  """The folder of a run that stopped at steps 2 and 3 and was saved there."""
  folder = tmp_path_factory.mktemp('stopped')
  session.run(settings(folder, steps=2))
  return session.run(settings(folder, steps=3, resume='auto')).folder


@pytest.fixture(scope='module')
def resumed(stopped, tmp_path_factory):
  """It goes on to step 6 from its first checkpoint: the last is broken."""
  folder = tmp_path_factory.mktemp('resumed')
  shutil.copytree(stopped, folder / 'run')
  broken = folder / 'run/checkpoints/00000003/records.npz'
  data = bytearray(broken.read_bytes())
  data[100] ^= 1
  broken.write_bytes(data)
  return session.run(
      settings(
          folder,
          resume='auto',
          checkpoint=CheckpointSettings(
              every=2, keep_last=1, keep_best='reward_mean'
          ),
      )
  )


def state_of(folder):
  """All arrays of the last checkpoint of a run, by name."""
  saved, _ = checkpoint.latest(folder / 'checkpoints')
  where = jax.sharding.SingleDeviceSharding(jax.devices()[0])
  wanted = {
      name: jax.ShapeDtypeStruct(shape, dtype, sharding=where)
      for name, (dtype, shape) in saved.tensors.items()
  }
  return saved.step, checkpoint_tensors.read_tensors(saved, wanted)


def steps_of(folder):
  """Rows of the steps, without what a clock or this machine decides."""
  measured = ('_s', '_fraction', 'wall', '_bytes', 'swap_stall_ms', 'running',
              'in_flight', 'drawn', 'ready', 'prefix_hits', 'prefix_tokens',
              'preemptions', 'peak_pages', 'rebuilt_tokens')  # fmt: skip
  kept = ('zero_variance_fraction', 'clip_fraction', 'truncated_fraction')
  return [
      {
          name: value
          for name, value in row.items()
          if name in kept or not name.endswith(measured)
      }
      for row in read_jsonl(folder / 'metrics.jsonl')
      if 'loss' in row
  ]


def test_run_that_goes_on_equals_one_that_never_stopped(uninterrupted, resumed):
  assert_same_bits(policy_of(uninterrupted), policy_of(resumed))
  (step, ours), (last, theirs) = map(
      state_of, (resumed.folder, uninterrupted.folder)
  )
  assert step == last == 6
  assert_same_bits(ours, theirs)  # moments, counters and the reference too
  assert any(name.startswith('roles/reference') for name in ours)
  assert any(name.startswith('roles/policy/optimizer') for name in ours)
  assert any(name.startswith('roles/policy/counters') for name in ours)
  assert any(name.startswith('roles/critic/optimizer') for name in ours)


def test_every_step_is_told_once_and_as_it_would_have_been(
    uninterrupted, resumed
):
  ours, theirs = steps_of(resumed.folder), steps_of(uninterrupted.folder)
  assert [row['step'] for row in ours] == [1, 2, 3, 4, 5, 6]
  assert ours == theirs
  rates = [row['learning_rate'] for row in ours]
  assert len(set(rates)) == 6  # CASES A18: the schedule goes on
  samples = [
      (resumed.folder / 'samples.jsonl').read_text(),
      (uninterrupted.folder / 'samples.jsonl').read_text(),
  ]
  assert samples[0] == samples[1]


def test_version_zero_is_evaluated_once(uninterrupted, resumed):
  for folder in (uninterrupted.folder, resumed.folder):
    rows = read_jsonl(folder / 'metrics.jsonl')
    evaluated = [r['version'] for r in rows if 'eval_accuracy' in r]
    assert evaluated == [0, 6]
    answers = read_jsonl(folder / 'evaluations.jsonl')
    assert len(answers) == 2 * 8
  ours, theirs = resumed.summary, uninterrupted.summary
  for name in ('eval_before', 'eval_score_before', 'eval_after',
               'eval_score_after', 'trained', 'staleness_max',
               'mixed_version_fraction'):  # fmt: skip
    assert ours[name] == theirs[name], name


def test_events_are_cut_at_the_checkpoint_and_counted_as_a_new_attempt(
    resumed,
):
  events = read_jsonl(resumed.folder / 'events.jsonl')
  steps = [(e['attempt'], e['version']) for e in events if e['kind'] == 'step']
  assert steps == [(0, 0), (0, 1), (1, 2), (1, 3), (1, 4), (1, 5)]
  admitted = [e['draw_index'] for e in events if e['kind'] == 'admit']
  assert len(admitted) == len(set(admitted))
  assert sum(e['kind'] == 'restore' for e in events) == 1
  assert resumed.summary['attempt'] == 1
  assert resumed.summary['recompiles_after_warmup'] == 0


def test_ledger_balances_over_the_restart(resumed):
  summary = resumed.summary
  assert summary['trained'] == 4 * 6
  assert summary['drawn'] == (
      summary['trained'] + summary['dropped'] + summary['in_flight']
  )
  for row in read_jsonl(resumed.folder / 'metrics.jsonl'):
    if 'drawn' in row:
      assert row['drawn'] == row['trained'] + row['dropped'] + row['in_flight']


def test_last_and_best_are_kept_and_the_best_is_exported(resumed):
  # At η = 0 a step trains on answers of the version that it starts from. Step 2
  # is what the run went on from, and step 6 gave no answers to train on.
  rewards = {
      row['step'] - 1: row['reward_mean']
      for row in read_jsonl(resumed.folder / 'metrics.jsonl')
      if 'loss' in row and row['step'] in (3, 5)
  }
  best = max(rewards, key=lambda step: (rewards[step], step))
  folder = resumed.folder / 'checkpoints'
  assert checkpoint.steps(folder) == sorted({best, 6})
  exported = resumed.folder / run_folder.BEST
  assert (exported / 'model.safetensors').is_file()
  _, params = hf.load_hf(exported, None, None)
  same = np.array_equal(params['embedding'], policy_of(resumed)['embedding'])
  assert not same
  for step in {best, *checkpoint.steps(folder)} - {6}:
    told = json.loads((folder / f'{step:08d}' / 'metric.json').read_text())
    assert told == {'name': 'reward_mean', 'value': rewards[step]}


def test_batch_rates_the_version_of_most_of_its_tokens():
  def batch(*versions):
    return [
        dataclasses.replace(
            records.group(draw, size=1),
            trajectories=(
                records.trajectory(
                    draw, answer=[9] * len(of_tokens), versions=of_tokens
                ),
            ),
        )
        for draw, of_tokens in enumerate(versions)
    ]

  assert resume.version_of(batch([3, 3], [3, 4])) == 3
  assert resume.version_of(batch([3], [4, 4, 4], [3])) == 4
  assert resume.version_of(batch([3, 4])) == 4


def test_broken_checkpoint_is_named(stopped, tmp_path):
  shutil.copytree(stopped, tmp_path / 'run')
  (tmp_path / 'run/checkpoints/00000003/policy.json').unlink()
  found = resume.find('auto', str(tmp_path), 'run', '')
  assert found.saved.step == 2 and len(found.refused) == 1
  assert '00000003: policy.json is missing, wanted' in found.refused[0]


def test_run_that_has_ended_is_left_alone(resumed, capsys):
  before = {p: p.stat().st_mtime_ns for p in resumed.folder.rglob('*')}
  again = session.run(settings(resumed.folder.parent, resume='auto'))
  assert again.summary == json.loads(
      (resumed.folder / 'summary.json').read_text()
  )
  assert {p: p.stat().st_mtime_ns for p in resumed.folder.rglob('*')} == before
  assert 'has ended at step 6' in capsys.readouterr().err


def test_run_killed_while_it_ended_ends(resumed, tmp_path):
  shutil.copytree(resumed.folder, tmp_path / 'run')
  (tmp_path / 'run/summary.json').unlink()
  shutil.rmtree(tmp_path / 'run/policy')
  again = session.run(settings(tmp_path, resume='auto'))
  assert_same_bits(policy_of(again), policy_of(resumed))
  for name in ('eval_before', 'eval_after', 'trained', 'staleness_mean'):
    assert again.summary[name] == resumed.summary[name], name
  assert again.summary['attempt'] == 2


def test_checkpoint_starts_a_run_of_its_own(uninterrupted, stopped, tmp_path):
  before = {p: p.stat().st_mtime_ns for p in stopped.rglob('*')}
  result = session.run(
      settings(
          tmp_path,
          name='branch',
          steps=4,
          resume=str(stopped / 'checkpoints/00000002'),
          checkpoint=CheckpointSettings(at_end=False),
      )
  )
  assert result.folder == tmp_path / 'branch'
  ours, theirs = steps_of(result.folder), steps_of(uninterrupted.folder)
  assert ours == theirs[:4]
  assert {p: p.stat().st_mtime_ns for p in stopped.rglob('*')} == before


def test_policy_of_a_run_starts_another_one(resumed, tmp_path):
  shutil.rmtree(shutil.copytree(resumed.folder, tmp_path / 'old') / 'policy')
  result = session.run(
      settings(
          tmp_path,
          name='new',
          steps=1,
          policy__path=str(tmp_path / 'old'),  # its last checkpoint
          tokenizer__path=str(tmp_path / 'old/tokenizer.model'),
      )
  )
  ours, theirs = result.summary, resumed.summary
  assert ours['eval_score_before'] == theirs['eval_score_after']
  assert [row['step'] for row in steps_of(result.folder)] == [1]


def test_failing_checkpoints_do_not_harm_the_run(tmp_path, capsys):
  (tmp_path / 'file').write_text('in the way')
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          checkpoint=CheckpointSettings(
              every=1, folder=str(tmp_path / 'file/below')
          ),
      )
  )
  assert result.summary['checkpoints_failed'] == 2
  assert result.summary['checkpoints_saved'] == 0
  said = capsys.readouterr().err
  assert 'file/below/run/00000002 could not be written: NotADirectory' in said


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'seed': 2}, 'config.seed is 2, wanted 1 as in checkpoint'),
        (
            {'policy__model__mlp_width': 48},
            'config.policy: intermediate_size is 48, wanted 32 as in checkp',
        ),
        (
            {'train__loss': PolicyLoss()},
            'kl_coefficient is 0, wanted above 0: .* has a reference',
        ),
        (
            {'train__advantages': AdvantageSettings()},
            'advantages.critic is False, wanted True: .* has a critic',
        ),
        (
            {'task__train_problems': 33},
            'problems of the saved data state is 32, wanted 33',
        ),
        (
            {'task__texts': 'tests.resume_texts:letters'},
            'config.tokenizer is .* the same files as in checkpoint',
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_settings_of_another_run_are_refused_and_nothing_is_cut(
    changes, words, stopped
):
  before = {p: p.stat().st_mtime_ns for p in stopped.rglob('*')}
  with pytest.raises(ConfigError, match=words):
    session.run(settings(stopped.parent, steps=9, resume='auto', **changes))
  assert {p: p.stat().st_mtime_ns for p in stopped.rglob('*')} == before


def as_saved_before(saved, part, change):
  """Makes a part of a checkpoint what an older version would have written."""
  path = pathlib.Path(saved)
  value = json.loads((path / part).read_text())
  change(value)
  (path / part).write_text(json.dumps(value))
  manifest = json.loads((path / 'manifest.json').read_text())
  content = (path / part).read_bytes()
  manifest['files'][part] = {
      'bytes': len(content),
      'sha256': hashlib.sha256(content).hexdigest(),
  }
  text = json.dumps(manifest)
  (path / 'manifest.json').write_text(text)
  marker = hashlib.sha256(text.encode()).hexdigest()
  (path / 'COMMITTED').write_text(marker)


def test_run_that_began_before_the_setting_goes_on_exact(
    uninterrupted, run_of, tmp_path, capsys
):
  folder = run_of / 'checkpoints/00000003'
  as_saved_before(folder, 'config.json', lambda c: c['rollout'].pop('exact'))
  for name in ('began_exact', 'digests'):
    as_saved_before(folder, 'run.json', lambda run, name=name: run.pop(name))
  for steps in (4, 6):
    result = session.run(
        settings(tmp_path, steps=steps, resume='auto', rollout__exact=False)
    )
    told = capsys.readouterr().err
    assert 'rollout.exact=True: the run began' in told
    # There is one again in what the run saves next.
    assert ('only the ids of the problems were compared' in told) == (
        steps == 4
    )
  assert_same_bits(policy_of(uninterrupted), policy_of(result))


def test_lengths_and_ends_of_older_checkpoints_are_no_other_policy(stopped):
  saved, _ = checkpoint.latest(stopped / 'checkpoints')
  policy = {**saved.read_json(pretrained.SHAPE)}
  # As older checkpoints have it: nothing but another length.
  policy['max_position_embeddings'] *= 4
  files = {'generation_config.json': b'{"eos_token_id": 2}'}
  for name in saved.files:
    if name.startswith(resume.TOKENIZER):
      inner = name.removeprefix(resume.TOKENIZER)
      files[f'tokenizer/{inner}'] = saved.read(name)
  roles = {'reference': True, 'critic': True}
  same = dict(seed=1, policy=policy, tokenizer=files, roles=roles)
  resume.require_same(saved, None, **same)
  other = {**files, 'tokenizer_config.json': b'{}'}
  for changed, words in (
      (dict(policy={**policy, 'hidden_size': 3}), 'hidden_size'),
      (dict(tokenizer=other), 'config.tokenizer'),
  ):
    with pytest.raises(ConfigError, match=words):
      resume.require_same(saved, None, **{**same, **changed})


def other_problems(split, count, seed):
  """Those of the task under the same ids, from the last to the first."""
  problems = running_totals.problems(split=split, count=count, seed=seed)
  return [
      dataclasses.replace(one, prompt=other.prompt, answer=other.answer)
      for one, other in zip(problems, reversed(problems), strict=True)
  ]


def other_held_out(split, count, seed):
  """Those of the task, the held-out ones from the last to the first."""
  made = other_problems if split == 'eval' else running_totals.problems
  return made(split=split, count=count, seed=seed)


def test_other_problems_under_the_same_ids_are_refused(run_of, tmp_path):
  changes = dict(task__problems='tests.test_resume:other_problems')
  before = (run_of / 'metrics.jsonl').read_bytes()
  with pytest.raises(ConfigError, match='prompts or answers to train on; .*'
                     'prompts or answers to evaluate on'):  # fmt: skip
    session.run(settings(tmp_path, resume='auto', **changes))
  assert (run_of / 'metrics.jsonl').read_bytes() == before


def test_other_problems_to_evaluate_on_are_refused(run_of, tmp_path):
  changes = dict(task__problems='tests.test_resume:other_held_out')
  with pytest.raises(ConfigError) as error:
    session.run(settings(tmp_path, resume='auto', **changes))
  assert 'prompts or answers to evaluate on' in str(error.value)
  assert 'to train on' not in str(error.value)


def test_other_problems_begin_anew_if_so_set(run_of, tmp_path, capsys):
  result = session.run(
      settings(
          tmp_path,
          resume='auto',
          changed_data='restart',
          task__problems='tests.test_resume:other_problems',
      )
  )
  assert 'warning: the data begin anew at problem 0' in capsys.readouterr().err
  rows = read_jsonl(result.folder / 'samples.jsonl')
  shown = {r['draw_index']: r['prompt'] for r in rows if r['step'] > 3}
  assert sorted(shown) == [*range(3 * 4, 6 * 4)]
  seed = settings('').task.seed
  new = other_problems(split='train', count=32, seed=seed)
  stream = ProblemStream(new, seed=1)
  for i in sorted(shown):
    assert shown[i].removeprefix('<s>') == next(stream).problem.prompt
  saved, _ = checkpoint.latest(result.folder / 'checkpoints')
  assert resume.read(saved).snapshot.data['first_draw_index'] == 3 * 4


def test_prompt_is_that_of_the_problem_that_was_drawn(tmp_path):
  prepared = prepare(settings(tmp_path))
  first, second = prepared.train[:2]
  drawn = dataclasses.replace(first, prompt=second.prompt)  # under its id
  assert prepared.prompt_ids(first) == prepared.prompts[first.id]
  assert prepared.prompt_ids(drawn) == prepared.prompts[second.id]
  assert prepared.prompts[first.id] != prepared.prompts[second.id]


def test_what_renders_prompts_is_compared(tmp_path):
  one = prepare(settings(tmp_path)).data_digests()
  changes = dict(tokenizer__add_bos=False)
  other = prepare(settings(tmp_path, **changes)).data_digests()
  differing = {name for name in one if one[name] != other[name]}
  assert differing == {'train_prompts', 'evaluation_prompts'}


def test_samples_show_the_ids_that_were_fed(stopped, tmp_path):
  prepared = prepare(settings(tmp_path))
  known = set(prepared.prompts.values())
  rows = read_jsonl(stopped / 'samples.jsonl')
  assert rows
  for row in rows:
    assert tuple(row['prompt_ids']) in known
    assert row['prompt'] == prepared.tokenizer.spell(row['prompt_ids'])


def test_settings_that_changed_are_told(stopped):
  saved, _ = checkpoint.latest(stopped / 'checkpoints')
  config = json.loads((stopped / 'config.json').read_text())
  config['rollout']['eta'] = float('inf')
  config['resume'] = 'auto'
  assert resume.changed_settings(saved, config) == ['rollout.eta: 0.0 -> inf']


# What `resume` names.


@pytest.fixture
def run_of(stopped, tmp_path):
  """A copy of the stopped run, to do things to."""
  shutil.copytree(stopped, tmp_path / 'run')
  return tmp_path / 'run'


def test_nothing_to_go_on_from_is_a_new_run(tmp_path):
  assert resume.find('', str(tmp_path), 'run', '') == resume.Start()
  start = resume.find('auto', str(tmp_path), 'run', '')
  assert start == resume.Start(folder=tmp_path / 'run')


def test_run_killed_before_its_first_checkpoint_starts_anew(run_of, tmp_path):
  (run_of / 'summary.json').unlink()
  for path in (run_of / 'checkpoints').iterdir():
    (path / 'COMMITTED').unlink()
  start = resume.find('auto', str(tmp_path), 'run', '')
  assert start.folder == run_of and start.saved is None
  assert len(start.refused) == 2
  resume.open_folder(run_of, start, None)
  assert all(
      (run_of / name).read_bytes() == b''
      for name in ('metrics.jsonl', 'events.jsonl', 'samples.jsonl')
  )
  assert not (run_of / 'tensorboard').exists()


def test_run_with_broken_checkpoints_alone_is_not_started_anew(
    run_of, tmp_path
):
  for path in (run_of / 'checkpoints').iterdir():
    (path / 'run.json').unlink()
  with pytest.raises(ConfigError, match='no whole checkpoint: .*run.json is m'):
    resume.find('auto', str(tmp_path), 'run', '')


def test_ended_run_without_checkpoints_is_not_started_anew(run_of, tmp_path):
  shutil.rmtree(run_of / 'checkpoints')
  with pytest.raises(ConfigError, match='has ended, and saved no checkpoint'):
    resume.find('auto', str(tmp_path), 'run', '')


def test_paths_that_resume_takes(run_of, tmp_path):
  def found(path, folder=''):
    return resume.find(str(path), str(tmp_path / 'other'), 'new', folder)

  in_place = found(run_of)
  assert in_place.folder == run_of and in_place.saved.step == 3
  one = found(run_of / 'checkpoints/00000002')
  assert one.folder is None and one.saved.step == 2 and one.logs == run_of
  many = found(run_of / 'checkpoints')
  assert many.folder is None and many.saved.step == 3 and many.logs is None


def test_checkpoints_elsewhere_are_found_by_the_name_of_the_run(
    run_of, tmp_path
):
  store = tmp_path / 'store'
  store.mkdir()
  shutil.move(run_of / 'checkpoints', store / 'run')
  shutil.rmtree(run_of)  # another machine than before
  start = resume.find('auto', str(tmp_path), 'run', str(store))
  assert start.folder == run_of and start.saved.step == 3
  short = resume.open_folder(run_of, start, resume.read(start.saved))
  assert 'metrics.jsonl' in short
  with pytest.raises(ConfigError, match='checkpoint.folder is .* resume=auto'):
    resume.find('', str(tmp_path), 'run', str(store))


@pytest.mark.parametrize(
    'path, words',
    [
        ('nowhere', "config.resume is '.*nowhere', wanted empty, 'auto', the"),
        ('run/checkpoints/00000002', 'config.resume: .* it has no COMMITTED'),
        ('empty', 'config.resume: .*empty has no whole checkpoint'),
    ],
)
def test_paths_that_resume_refuses(path, words, run_of, tmp_path):
  (run_of / 'checkpoints/00000002/COMMITTED').unlink()
  (tmp_path / 'empty').mkdir()
  (tmp_path / 'empty/config.json').write_text('{}')
  with pytest.raises(ConfigError, match=words):
    resume.find(str(tmp_path / path), str(tmp_path), 'new', '')


# A process that is killed.

CONFIG = """
import pathlib
from areal_jax.train.checkpoint import CheckpointSettings
from tests.test_session import experiment

def get_config():
  return experiment(
      pathlib.Path(__file__).parent,
      steps=100_000,
      rollout__eta=2.0,
      rollout__staleness='fifo',
      task__train_problems=64,
      checkpoint=CheckpointSettings(every=2),
  )
"""


def test_signal_saves_and_the_run_goes_on_without_loss(tmp_path):
  """SIGTERM between two checkpoints: saved, exit code 143, nothing repeated."""
  config = CONFIG.replace('every=2', 'every=0')
  (tmp_path / 'config.py').write_text(config)
  with open(tmp_path / 'said', 'wb') as said:
    child = subprocess.Popen(
        [sys.executable, '-m', 'areal_jax.run',
         f'--config={tmp_path}/config.py'],
        cwd=ROOT,
        stdout=said,
        stderr=said,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )  # fmt: skip
    try:
      log = tmp_path / 'run/metrics.jsonl'

      def four_rows():
        assert child.poll() is None, (tmp_path / 'said').read_text()
        return log.exists() and len(log.read_text().splitlines()) >= 4

      wait_until(four_rows, 'four rows of metrics')
      child.terminate()
      code = child.wait(WAIT_S)
    finally:
      child.kill()
      child.wait()
  text = (tmp_path / 'said').read_text()
  assert code == 143, text
  assert 'SIGTERM: the run saves and ends' in text
  start = resume.find('auto', str(tmp_path), 'run', '')
  assert f'ended by SIGTERM at step {start.saved.step}' in text
  told = read_jsonl(tmp_path / 'run/metrics.jsonl')
  assert told[-1]['step'] == start.saved.step  # no step is lost
  result = session.run(
      experiment(
          tmp_path,
          steps=start.saved.step + 3,
          rollout__eta=2.0,
          rollout__staleness='fifo',
          task__train_problems=64,
          resume='auto',
      )
  )
  trained = [
      (s['draw_index'], s['sample'])
      for s in read_jsonl(result.folder / 'samples.jsonl')
  ]
  assert len(trained) == len(set(trained)) == 4 * 4 * (start.saved.step + 3)


def test_killed_run_goes_on_and_trains_every_problem_once(tmp_path):
  """CASES A17 with a real process: kill -9 while it saves every other step."""
  (tmp_path / 'config.py').write_text(CONFIG)
  with open(tmp_path / 'said', 'wb') as said:
    child = subprocess.Popen(
        [sys.executable, '-m', 'areal_jax.run',
         f'--config={tmp_path}/config.py'],
        cwd=ROOT,
        stdout=said,
        stderr=said,
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
    )  # fmt: skip
    folder = tmp_path / 'run/checkpoints'
    try:

      def eighth():
        assert child.poll() is None, (tmp_path / 'said').read_text()
        return max(checkpoint.steps(folder), default=0) >= 8

      wait_until(eighth, 'the checkpoint of step 8')
    finally:
      child.kill()
      child.wait()
  start = resume.find('auto', str(tmp_path), 'run', '')
  carried = resume.read(start.saved)
  assert carried.snapshot.ledger.balanced()
  assert carried.snapshot.ledger.outstanding > 0  # or this shows little
  told = read_jsonl(tmp_path / 'run/metrics.jsonl')[-1]['step']
  last = max(told, start.saved.step) + 4
  result = session.run(
      experiment(
          tmp_path,
          steps=last,
          rollout__eta=2.0,
          rollout__staleness='fifo',
          task__train_problems=64,
          resume='auto',
          # Another number of devices than before.
          mesh=MeshSettings(TrainMesh(2, 2), RolloutMesh(2, 2)),
      )
  )
  trained = [
      (s['draw_index'], s['sample'])
      for s in read_jsonl(result.folder / 'samples.jsonl')
  ]
  assert len(trained) == len(set(trained)) == 4 * 4 * last
  # `fifo` trains in the order of the data: every problem, once an epoch.
  assert sorted({index for index, _ in trained}) == list(range(4 * last))
  rows = [r for r in read_jsonl(result.folder / 'metrics.jsonl') if 'loss' in r]
  assert [r['step'] for r in rows] == list(range(1, last + 1))
  assert max(r['head_staleness_max'] for r in rows) <= 2  # CASES A10
  again = {
      e['draw_index']
      for e in read_jsonl(result.folder / 'events.jsonl')
      if e['kind'] == 'admit' and e['fields']['attempt'] == 1
  }
  assert again == {d.draw_index for d in carried.snapshot.running}
  summary = result.summary
  assert summary['drawn'] == (
      summary['trained'] + summary['dropped'] + summary['in_flight']
  )
  assert np.isfinite(summary['staleness_mean'])
