"""Whole runs in which adapters alone learn: LoRA from settings to folders."""

import json
import shutil

import jax
import numpy as np
import pytest

from areal_jax import session
from areal_jax.build import served_policy
from areal_jax.config import ConfigError
from areal_jax.losses.policy import PolicyLoss
from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, lora, parameters, peft
from areal_jax.models.config import LoraSettings
from areal_jax.prepare.prepared import prepare
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.train import checkpoint, checkpoint_tensors, pretrained
from areal_jax.train.checkpoint import CheckpointSettings
from tests import tiny
from tests.test_resume import state_of
from tests.test_session import assert_same_bits, experiment, policy_of

ADAPTERS = LoraSettings(projections=('query', 'value', 'down'), rank=2)
ADAPTED = {'query', 'value', 'down'}
FROZEN, LEARNS = 'roles/policy/frozen/', 'roles/policy/trainable/'


def settings(folder, **changes):
  return experiment(
      folder,
      **{
          'policy__model__lora': ADAPTERS,
          'train__loss': PolicyLoss(kl_coefficient=0.1),
          'checkpoint': CheckpointSettings(every=2),
          **changes,
      },
  )


@pytest.fixture(scope='module')
def whole(tmp_path_factory):
  """A synchronous run of four steps, saved at 2 and 4."""
  return session.run(settings(tmp_path_factory.mktemp('whole')))


@pytest.fixture(scope='module')
def resumed(whole, tmp_path_factory):
  """The same run, gone on from step 2."""
  folder = tmp_path_factory.mktemp('resumed')
  shutil.copytree(whole.folder, folder / 'run')
  shutil.rmtree(folder / 'run/checkpoints/00000004')
  (folder / 'run/summary.json').unlink()
  return session.run(settings(folder, resume='auto'))


@pytest.fixture(scope='module')
def merging(tmp_path_factory):
  """An asynchronous run whose engine merges, on a frozen bfloat16 base."""
  return session.run(
      settings(
          tmp_path_factory.mktemp('merging'),
          rollout__eta=1.0,
          rollout__merge_adapters=True,
          policy__model__lora=LoraSettings(
              projections=('gate', 'up'), rank=2, base_dtype='bfloat16'
          ),
      )
  )


def base_of(result):
  """The policy that the run began with."""
  config = json.loads((result.folder / 'config.json').read_text())
  model = config['policy']['model']
  sizes = {n: model[n] for n in ('width', 'layers', 'heads', 'kv_heads',
                                 'head_size', 'mlp_width')}  # fmt: skip
  saved, _ = checkpoint.latest(result.folder / 'checkpoints')
  plain = tiny.config(
      vocab_size=saved.read_json(pretrained.SHAPE)['vocab_size'], **sizes
  )
  return plain, parameters.init_params(plain, config['seed'], None, None)


def test_only_adapters_move(whole):
  _, state = state_of(whole.folder)
  _, base = base_of(whole)
  leaves = jax.tree.leaves_with_path(base)
  frozen = {n.removeprefix(FROZEN) for n in state if n.startswith(FROZEN)}
  assert frozen == {checkpoint_tensors.name_of(path) for path, _ in leaves}
  for path, leaf in leaves:
    name = FROZEN + checkpoint_tensors.name_of(path)
    np.testing.assert_array_equal(state[name], leaf, err_msg=name)
  moved = [n for n in state if n.startswith(LEARNS)]
  assert len(moved) == 2 * len(ADAPTED)
  for name in moved:
    if name.endswith('/b'):
      assert np.abs(state[name]).max() > 0, name


def test_optimizer_and_reference_hold_adapters_alone(whole):
  _, state = state_of(whole.folder)
  moments = [n for n in state if '/optimizer/' in n and state[n].ndim]
  assert len(moments) == 2 * 2 * len(ADAPTED)
  assert all('/adapters/' in name for name in moments)
  reference = [n for n in state if n.startswith('roles/reference/')]
  assert all('/adapters/' in name for name in reference)


def test_run_that_goes_on_equals_one_that_never_stopped(whole, resumed):
  (step, ours), (last, theirs) = map(state_of, (resumed.folder, whole.folder))
  assert step == last == 4
  assert_same_bits(ours, theirs)
  assert_same_bits(policy_of(resumed), policy_of(whole))


def test_engine_and_trainer_agree_on_fresh_tokens(whole, merging):
  for result in (whole, merging):
    gap = result.summary['engine_trainer_logprob_gap_max']
    assert gap is not None and gap < 1e-4
    assert result.summary['recompiles_after_warmup'] == 0


def test_versions_after_the_first_send_adapters_alone(whole, merging):
  for result in (whole, merging):
    sent = [
        e['fields']['bytes']
        for e in read_jsonl(result.folder / 'events.jsonl')
        if e['kind'] == 'publish'
    ]
    _, state = state_of(result.folder)
    adapters = sum(x.nbytes for n, x in state.items() if n.startswith(LEARNS))
    base = sum(x.nbytes for n, x in state.items() if n.startswith(FROZEN))
    assert sent == [base + adapters] + [adapters] * 4
    assert adapters < base / 5
    rows = read_jsonl(result.folder / 'metrics.jsonl')
    told = [r['published_bytes'] for r in rows if 'published_bytes' in r]
    assert told == [adapters] * 4


def test_the_run_leaves_the_merged_policy_and_its_adapters(whole):
  plain, base = base_of(whole)
  config = lora.without(plain)
  config.lora = ADAPTERS
  adapters = peft.load_peft(whole.folder / run_folder.ADAPTER, config)
  _, merged = lora.merged(config, lora.overlaid(jax.device_get(base), adapters))
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      policy_of(whole),
      merged,
  )
  change = np.abs(merged['blocks']['query'] - base['blocks']['query'])
  assert change.max() > 1e-4


@pytest.mark.parametrize('again', ['checkpoint', 'folder', 'peft', 'merged'])
def test_another_run_begins_where_this_one_ended(whole, again):
  """Adapters go on, are merged, or come from a folder: one policy."""
  plain, base = base_of(whole)
  mesh, rules = tiny.mesh(), Rules()
  config = lora.without(plain)
  config.lora = ADAPTERS
  wanted = policy_of(whole)
  if again == 'peft':
    hf_params = jax.device_get(base)
    adapters = peft.load_peft(whole.folder / run_folder.ADAPTER, config)
    _, got = lora.merged(config, lora.overlaid(hf_params, adapters))
  elif again == 'folder':
    found = pretrained.find(str(whole.folder), 'path')
    params = found.load(config, mesh, rules, 3)
    assert not np.any(params['blocks']['adapters']['down']['b'])
    _, got = lora.merged(config, params)
  else:
    folder = whole.folder / 'checkpoints/00000004'
    found = pretrained.find(str(folder), 'path')
    if again == 'merged':
      got = found.load(plain, mesh, rules)
    else:
      params = found.load(config, mesh, rules)
      assert np.any(params['blocks']['adapters']['down']['b'])
      _, got = lora.merged(config, params)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), got, wanted
  )


@pytest.mark.parametrize('merge', [False, True])
def test_a_base_and_a_peft_folder_are_served_as_the_trained_policy(
    whole, tmp_path, merge
):
  plain, base = base_of(whole)
  hf.save_hf(tmp_path / 'base', plain, base)
  prepared = prepare(
      settings(
          tmp_path,
          policy__path=str(tmp_path / 'base'),
          policy__adapter=str(whole.folder / run_folder.ADAPTER),
          tokenizer__path=str(whole.folder),
          rollout__merge_adapters=merge,
      )
  )
  shape, params = served_policy(prepared, tiny.mesh(), Rules())
  assert bool(shape.lora.projections) != merge
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6),
      lora.merged(shape, params)[1],
      policy_of(whole),
  )


def test_adapters_of_another_kind_do_not_go_on(whole, tmp_path):
  shutil.copytree(whole.folder, tmp_path / 'run')
  (tmp_path / 'run/summary.json').unlink()
  other = LoraSettings(projections=('query', 'value', 'down'), rank=4)
  with pytest.raises(ConfigError, match='config.policy: lora is .* wanted'):
    session.run(settings(tmp_path, resume='auto', policy__model__lora=other))


@pytest.mark.parametrize(
    'changes, words',
    [
        (
            {'warm_start__steps': 3, 'warm_start__warmup_steps': 0},
            'config.warm_start.steps is 3, wanted 0 with policy.model.lora',
        ),
        (
            {'policy__model__lora': LoraSettings(), 'policy__adapter': 'x'},
            "config.policy.adapter is 'x', wanted '', or policy.model.lora",
        ),
        (
            {
                'policy__model__lora': LoraSettings(),
                'rollout__merge_adapters': True,
            },
            'config.rollout.merge_adapters is True, wanted False, or policy',
        ),
        (
            {'policy__adapter': '/nowhere'},
            'config.policy.adapter: there is no file /nowhere/adapter_config',
        ),
    ],
)
def test_settings_that_do_not_go_together_are_one_line(
    tmp_path, changes, words
):
  with pytest.raises(ConfigError, match=words) as caught:
    session.run(settings(tmp_path, **changes))
  assert '\n' not in str(caught.value)
  assert not list(tmp_path.iterdir())
