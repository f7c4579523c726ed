"""Where a policy comes from: folders, runs, checkpoints; whole or in part."""

import shutil

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters
from areal_jax.models.hf import save_hf
from areal_jax.telemetry.events import EventLog
from areal_jax.train import pretrained
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.checkpoint_writer import Checkpointer
from areal_jax.train.state import Role, TrainState
from tests import tiny


@pytest.fixture(scope='module')
def places(tmp_path_factory):
  """One policy as a folder, as a checkpoint, and as a run with either."""
  folder = tmp_path_factory.mktemp('places')
  config, params = tiny.config(), tiny.params(5)
  save_hf(folder / 'hf', config, params)
  save_hf(folder / 'ended/policy', config, params)
  (folder / 'ended/config.json').write_text('{"steps": 3}')
  writer = Checkpointer(
      folder / 'running/checkpoints', CheckpointSettings(),
      events=EventLog(None),
  )  # fmt: skip
  for step in (1, 2):
    writer.save(
        step,
        TrainState({'policy': Role(params, {})}, step),
        {pretrained.SHAPE: pretrained.shape_part(config)},
    )
    writer.wait()
  writer.close()
  (folder / 'running/config.json').write_text('{"steps": 3}')
  return folder


def initial(config):
  """Parameters to take others into; drawn without compiling anything."""
  generator = np.random.default_rng(9)
  return jax.tree.map(
      lambda leaf: jax.device_put(
          generator.standard_normal(leaf.shape, np.float32)
      ),
      parameters.abstract_params(config),
  )


KINDS = [
    'hf',
    'ended',
    'running',
    'running/checkpoints',
    'running/checkpoints/00000002',
]


@pytest.mark.parametrize('kind', KINDS)
def test_policy_is_found_and_loaded_onto_any_mesh(kind, places):
  found = pretrained.find(str(places / kind), 'config.policy.path')
  shape = found.shape()
  assert (shape.width, shape.layers, shape.vocab_size) == (32, 2, 40)
  # A vocabulary of 40 is padded to 42 where it is cut in three.
  params = found.load(tiny.config(vocab_multiple=3), tiny.mesh(), Rules())
  wanted = tiny.params(5)
  assert params['embedding'].shape == (42, 32)
  assert not np.asarray(params['embedding'][40:]).any()
  np.testing.assert_array_equal(params['embedding'][:40], wanted['embedding'])
  jax.tree.map(
      np.testing.assert_array_equal, params['blocks'], wanted['blocks']
  )


def test_checkpoint_is_loaded_onto_several_devices(places):
  found = pretrained.find(str(places / 'running'), 'at')
  mesh = tiny.mesh(2, 2)
  params = found.load(tiny.config(), mesh, Rules())
  shardings = parameters.param_shardings(tiny.config(), mesh, Rules())
  wanted = tiny.params(5, on=mesh)
  jax.tree.map(np.testing.assert_array_equal, params, wanted)
  assert jax.tree.map(lambda leaf: leaf.sharding, params) == shardings


@pytest.mark.parametrize('kind', ['hf', 'running'])
def test_what_matches_is_taken_and_the_rest_is_named(kind, places):
  found = pretrained.find(str(places / kind), 'at')
  config = tiny.config(mlp_width=64, tied_embeddings=False)
  before = initial(config)
  taken, left = found.load_matching(config, before)
  assert sorted(left) == [
      'blocks/down', 'blocks/gate', 'blocks/up', 'unembedding',
  ]  # fmt: skip
  wanted = tiny.params(5)
  for name in ('query', 'key', 'attention_norm'):
    np.testing.assert_array_equal(taken['blocks'][name], wanted['blocks'][name])
  np.testing.assert_array_equal(taken['embedding'], wanted['embedding'])
  for name in ('down', 'gate', 'up'):
    np.testing.assert_array_equal(taken['blocks'][name], before['blocks'][name])
  np.testing.assert_array_equal(taken['unembedding'], before['unembedding'])


@pytest.mark.parametrize('kind', ['hf', 'running'])
@pytest.mark.parametrize('changes', [{'vocab_size': 41}, {'layers': 1}])
def test_other_vocabulary_and_other_depth_do_not_match(changes, kind, places):
  # Neither by cutting rows off nor by taking the first layers alone.
  found = pretrained.find(str(places / kind), 'at')
  config = tiny.config(**changes)
  before = initial(config)
  _, left = found.load_matching(config, before)
  if 'vocab_size' in changes:
    assert left == ('embedding',)
  else:
    assert set(left) == {f'blocks/{name}' for name in before['blocks']}


@pytest.mark.parametrize('kind', ['hf', 'running'])
def test_nothing_that_matches_is_an_error(kind, places):
  found = pretrained.find(str(places / kind), 'at')
  config = tiny.config(width=16, layers=1, vocab_size=7)
  before = initial(config)
  with pytest.raises(ConfigError, match='has no tensor of the name and shape'):
    found.load_matching(config, before)


@pytest.mark.parametrize('kind', ['running', 'running/checkpoints/00000002'])
def test_broken_checkpoint_is_not_loaded(kind, places, tmp_path):
  shutil.copytree(places / 'running', tmp_path / 'running')
  (tmp_path / 'running/checkpoints/00000002/policy.json').write_text('{}')
  if kind == 'running':  # the one before is whole
    found = pretrained.find(str(tmp_path / kind), 'config.policy.path')
    assert found.saved.step == 1
    (tmp_path / 'running/checkpoints/00000001/COMMITTED').unlink()
  with pytest.raises(
      ConfigError, match='config.policy.path.*policy.json has bytes 2, wanted'
  ):
    pretrained.find(str(tmp_path / kind), 'config.policy.path')


def test_place_with_nothing_in_it_is_refused(tmp_path):
  with pytest.raises(ConfigError, match='at is .*, wanted a Hugging Face fold'):
    pretrained.find(str(tmp_path), 'at')


def test_policy_of_another_shape_is_refused(places):
  found = pretrained.find(str(places / 'running'), 'at')
  with pytest.raises(ConfigError, match=r'blocks/down is float32 of shape'):
    found.load(tiny.config(mlp_width=64), tiny.mesh(), Rules())


def test_adapters_alone_are_no_policy(tmp_path):
  (tmp_path / 'adapter_config.json').write_text('{"peft_type": "LORA"}')
  with pytest.raises(
      ConfigError, match='holds adapters alone .*adapters go in policy.adapter'
  ):
    pretrained.find(str(tmp_path), 'policy.path')
