"""The door of the server: what it refuses, in one line and with exit code 2.

What it serves is in `rollout/test_jetstream.py`.
"""

import dataclasses
import math
import socket

import pytest

from areal_jax import serve
from areal_jax.models.hf import save_hf
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import run_folder
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from tests import tiny
from tests.small_experiment import change


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  folder = tmp_path_factory.mktemp('run')
  save_hf(folder / run_folder.POLICY, tiny.config(), tiny.params())
  train_sentencepiece(['0123456789'], folder / run_folder.TOKENIZER)
  return folder


@pytest.fixture
def refused(run, capsys):
  """Serves the run with changes, which must be refused with these words."""

  def check(*words: str, settings=(), **changes) -> None:
    experiment = Experiment()
    for name, value in settings:
      change(experiment, name, value)
    asked = serve.Serving(experiment, True, str(run), 9000, 0.0)
    assert serve.main(dataclasses.replace(asked, **changes)) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith('error: ') and err.count('\n') == 1, err
    for word in words:
      assert word in err, err

  return check


def test_without_jetstream_it_says_that_the_other_endpoint_comes_later(refused):
  refused('--jetstream is missing', 'comes later', jetstream=False)


def test_folder_that_is_no_run_is_refused(refused, tmp_path):
  refused(f"--run is '{tmp_path}'", "with 'policy' in it", run=str(tmp_path))


def test_a_policy_has_to_be_named(refused):
  refused("config.policy.path is ''", 'a trained policy', run='')


def test_port_that_is_taken_is_refused(refused):
  with socket.socket() as other:
    other.bind(('', 0))
    port = other.getsockname()[1]
    refused(f'--port is {port}', 'wanted one that is free', port=port)


@pytest.mark.parametrize(
    'name, value', [('top_k', -1), ('top_p', 0.0), ('min_p', 1.5)]
)
def test_sampling_that_means_nothing_is_refused(refused, name, value):
  refused(f'--{name} is {value}, wanted', **{name: value})


def test_temperature_that_is_no_number_is_refused(refused):
  refused('--temperature is nan', temperature=math.nan)


def test_settings_are_resolved(refused):
  changes = [('tokenizer.kind', 'word')]
  refused("config.tokenizer.kind is 'word'", settings=changes)


def test_stop_strings_are_refused_where_answers_end_at_ids_alone(refused):
  changes = [
      ('rollout.stop_strings', ('.',)),
      # What fits the small policy of the run.
      ('rollout.engine.max_length', 64),
      ('rollout.engine.max_prompt_length', 32),
  ]
  refused("config.rollout.stop_strings is ('.',), wanted none",
          settings=changes)  # fmt: skip
