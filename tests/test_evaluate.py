"""The door of evaluation: a run's policy is evaluated as the run did itself."""

import json
import subprocess
import sys

import pytest

from areal_jax import command, config, evaluate, session
from areal_jax.config import ConfigError
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from tests.conftest import ROOT
from tests.limits import WAIT_S
from tests.test_session import experiment

SAMPLED = dict(
    evaluation=EvaluationSettings(
        samples=2, ks=(1, 2), temperature=1.0, threshold=0.05, show=0
    ),
    rollout__eta=float('inf'),
)


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('evaluated')
  return session.run(experiment(folder, steps=2, **SAMPLED))


def written(path):
  return json.loads(path.read_text())


def test_run_is_evaluated_from_its_folder_alone(run):
  """Fresh process, other devices; the policy and its settings are read."""
  done = subprocess.run(
      [sys.executable, '-m', 'areal_jax.evaluate', f'--run={run.folder}'],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert done.returncode == 0, done.stderr
  header, row, last = done.stdout.splitlines()
  assert header.split()[:6] == [
      'source', 'problems', 'answers', 'failed', 'pass@1', '±',
  ]  # fmt: skip
  assert row.split()[1:4] == ['8', '16', '0']
  assert last == f'version 2; see {run.folder}/evaluation.json'
  report = written(run.folder / 'evaluation.json')
  # Same weights, same streams: what the run itself found at its end.
  assert report['accuracy'] == run.summary['eval_after']
  assert report['score_mean'] == run.summary['eval_score_after']
  assert report['pass_at'] == written(run.folder / 'summary.json')[
      'evaluation'
  ]['pass_at']  # fmt: skip
  assert read_jsonl(run.folder / 'evaluation.jsonl') == [
      row
      for row in read_jsonl(run.folder / 'evaluations.jsonl')
      if row['version'] == 2
  ]


def test_config_names_another_policy_and_gets_a_new_folder(
    run, tmp_path, capsys
):
  settings = experiment(
      tmp_path,
      policy__path=str(run.folder / run_folder.POLICY),
      tokenizer__path=str(run.folder / run_folder.TOKENIZER),
      **SAMPLED,
  )
  assert evaluate.main(evaluate.Asked(settings, '')) == 0
  report = written(tmp_path / 'run' / 'evaluation.json')
  assert report['version'] == 0
  assert report['accuracy'] == run.summary['eval_after']
  assert 'pass@2' in capsys.readouterr().out


def test_second_evaluation_keeps_the_first(run, capsys):
  paths = []
  for samples in (1, 1):
    settings = config.from_dict(
        Experiment, written(run.folder / run_folder.CONFIG)
    )
    settings.evaluation = EvaluationSettings(samples=samples)
    assert evaluate.main(evaluate.Asked(settings, str(run.folder))) == 0
    paths.append(capsys.readouterr().out.split()[-1])
  first, second = (written(run.folder / path) for path in paths)
  assert paths[0] != paths[1]
  assert {**first, 'wall_s': 0} == {**second, 'wall_s': 0}


@pytest.mark.parametrize(
    ('run_given', 'words'),
    [
        (False, "config.policy.path is '', wanted the folder of a trained"),
        (True, "with 'policy' in it"),
    ],
)
def test_without_a_policy_it_is_one_line(run_given, words, tmp_path, capsys):
  asked = evaluate.Asked(
      experiment(tmp_path), str(tmp_path) if run_given else ''
  )
  assert evaluate.main(asked) == 2
  out, err = capsys.readouterr()
  assert (out, err.count('\n')) == ('', 1)
  assert words in err
  assert list(tmp_path.iterdir()) == []


def test_run_that_is_not_there_is_blamed_itself(capsys):
  with pytest.raises(SystemExit) as ended:
    evaluate.require_run(['program', '--run=nowhere'])
  assert ended.value.code == 2
  assert capsys.readouterr().err == (
      "error: --run is 'nowhere', wanted the folder of a run, with"
      " 'config.json' in it\n"
  )


@pytest.mark.parametrize(
    ('given', 'expected'),
    [
        ('--run=runs/x', '--config=runs/x/config.json --run=runs/x'),
        ('--run runs/x -v=1', '--config=runs/x/config.json --run runs/x -v=1'),
        ('--run=a --config=b.py', '--run=a --config=b.py'),
        ('--config=b.py', '--config=b.py'),
        (
            '--config.seed=3 --run=a',
            '--config=a/config.json --config.seed=3 --run=a',
        ),
    ],
)
def test_run_brings_its_settings_where_no_others_are_named(given, expected):
  argv = evaluate.with_config(['program', *given.split()])
  assert argv == ['program', *expected.split()]


def test_settings_that_a_run_wrote_are_read_back(run):
  path = run.folder / run_folder.CONFIG
  again = config.from_dict(Experiment, written(path))
  assert again.rollout.eta == float('inf')
  assert again.evaluation.ks == (1, 2)
  expected = experiment(run.folder.parent, steps=2, **SAMPLED)
  assert config.resolve(again) == config.resolve(expected)


@pytest.mark.parametrize(
    ('content', 'words'),
    [
        ('{"sead": 3}', "config has no field 'sead', wanted 'seed'"),
        ('{"rollout": 3}', 'config.rollout is 3, wanted fields of'),
        ('{"reward": {}}', r"config.reward: .* 'function'"),
        ('{', 'is not JSON'),
        (None, 'wanted the config.json of a run'),
    ],
)
def test_settings_file_that_cannot_be_read_is_named(content, words, tmp_path):
  path = tmp_path / 'config.json'
  if content is not None:
    path.write_text(content)
  values = command.flags.FlagValues()
  with pytest.raises(command.flags.Error, match=words) as caught:
    command.read_experiment(['program', f'--config={path}'], values)
  assert str(path) in str(caught.value)


def test_settings_file_takes_overrides(run):
  values = command.flags.FlagValues()
  settings = command.read_experiment(
      [
          'program',
          f'--config={run.folder}/config.json',
          '--config.evaluation.ks=(2,)',
          '--config.evaluation.samples=4',
      ],
      values,
  )
  assert settings.evaluation.ks == (2,)
  assert settings.evaluation.samples == 4
  assert settings.steps == 2


def test_tree_of_another_form_is_refused():
  with pytest.raises(ConfigError, match=r'config.task has no field'):
    config.from_dict(Experiment, {'task': {'nothing': 1}})
