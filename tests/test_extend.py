"""The examples of docs/extend.md, as they stand on the page."""

import csv
import importlib
import pathlib
import re
import sys

import pytest

from areal_jax import session
from areal_jax.prepare.prepared import prepare
from areal_jax.settings.algorithm import algorithm_changes
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from tests.small_experiment import experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _blocks(page: str) -> dict[str, str]:
  """Python blocks of a page, by the module that their first line names."""
  text = (ROOT / page).read_text()
  found = re.findall(r'```python\n(# (\w+)\.py.*?)```', text, re.S)
  return {name: block for block, name in found}


@pytest.fixture
def examples(tmp_path, monkeypatch):
  """The modules of the page, importable: a function from name to module."""
  blocks = _blocks('docs/extend.md')
  for name, block in blocks.items():
    (tmp_path / f'{name}.py').write_text(block)
  monkeypatch.syspath_prepend(tmp_path)
  yield importlib.import_module
  for name in blocks:
    sys.modules.pop(name, None)


def test_a_task_of_ones_own_is_a_whole_run(examples):
  task = examples('my_task')
  prepared = prepare(task.get_config())
  held_out = {p.prompt for p in prepared.evaluation}
  assert not held_out & {p.prompt for p in prepared.train}
  problem = prepared.train[0]
  assert task.reward(problem, problem.answer) == 1.0
  assert task.reward(problem, problem.answer + '0') < 1.0
  for prompt, answer in task.demonstrations(20, 0):
    assert sorted(prompt[:-1]) == sorted(answer)


def test_the_examples_work_together_in_a_run(tmp_path, examples):
  result = session.run(
      experiment(
          tmp_path,
          steps=2,
          task__problems='my_task:problems',
          task__texts='',
          task__demonstrations='my_task:demonstrations',
          warm_start__steps=1,
          reward__function='my_task:reward',
          rollout__workflow='my_workflow:retry_once',
          metrics_sink='my_sink:Csv',
      )
  )
  rows = read_jsonl(result.folder / run_folder.METRICS)
  rewards = [r['reward_mean'] for r in rows if 'reward_mean' in r]
  with open(result.folder / 'reward.csv', newline='') as file:
    written = [(int(step), float(value)) for step, value in csv.reader(file)]
  assert written == list(enumerate(rewards, start=1))
  assert len(written) == 2


def test_an_algorithm_of_ones_own_is_a_config(examples):
  settings = prepare(examples('my_algorithm').get_config())
  loss = settings.settings.train.loss
  assert (loss.clip, loss.clip_high) == (0.2, 0.28)
  assert not algorithm_changes(settings.settings)  # it names no preset


def test_every_example_of_the_page_is_tried():
  assert sorted(_blocks('docs/extend.md')) == [
      'my_algorithm',
      'my_sink',
      'my_task',
      'my_workflow',
  ]


def test_the_readme_shows_the_task_of_the_page():
  shown = _blocks('README.md')
  page = _blocks('docs/extend.md')
  assert {name: page[name] for name in shown} == shown
