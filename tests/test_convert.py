"""The door of conversions: what comes out of it, and what it refuses."""

import dataclasses
import json
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax import convert, resume
from areal_jax.config import ConfigError
from areal_jax.convert import Conversion
from areal_jax.mesh.rules import Rules
from areal_jax.models.hf import load_hf, save_hf
from areal_jax.telemetry import run_folder
from areal_jax.tokenizer.files import open_tokenizer
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from areal_jax.train import pretrained
from tests import tiny
from tests.limits import WAIT_S
from tests.models import test_gguf

ROOT = pathlib.Path(__file__).resolve().parent.parent


@pytest.fixture(scope='module')
def run(tmp_path_factory):
  """The folder of a finished run."""
  folder = tmp_path_factory.mktemp('runs') / 'run'
  save_hf(folder / run_folder.POLICY, tiny.config(), tiny.params())
  train_sentencepiece(['0123456789'], folder / run_folder.TOKENIZER)
  (folder / 'config.json').write_text('{"steps": 3}')
  return folder


def converted(source, target, **settings):
  asked = Conversion(str(source), str(target), **settings)
  assert convert.main(asked) == 0
  assert not list(target.parent.glob('.*'))  # nothing of the way there
  return target


def test_a_run_becomes_a_checkpoint_and_a_folder_again(run, tmp_path):
  saved = converted(run, tmp_path / 'saved', form='checkpoint')
  # `config.policy.path` takes it.
  found = pretrained.find(str(saved), 'policy.path')
  params = found.load(tiny.config(), tiny.mesh(), Rules())
  jax.tree.map(np.testing.assert_array_equal, params, tiny.params())
  # `config.resume` does not, and says so.
  with pytest.raises(ConfigError, match='no run.json, wanted that of a run'):
    resume.read(found.saved)
  again = converted(saved, tmp_path / 'again')
  weights = 'model.safetensors'
  before = (run / run_folder.POLICY / weights).read_bytes()
  assert (again / weights).read_bytes() == before
  tokenizer = (again / 'tokenizer.model').read_bytes()
  assert tokenizer == (run / run_folder.TOKENIZER).read_bytes()
  described = json.loads((again / 'config.json').read_text())
  special = open_tokenizer(again).tokenizer
  assert described['bos_token_id'] == special.bos_id
  assert described['eos_token_id'] == special.eos_ids[0]


def test_a_folder_is_cut_into_files_and_cast(run, tmp_path):
  target = converted(
      run / 'policy', tmp_path / 'out', dtype='bfloat16', shard_bytes=9000
  )
  files = sorted(target.glob('model-*.safetensors'))
  assert len(files) > 2 and not (target / 'tokenizer.model').exists()
  for file in files:
    found = st.load_file(file)
    assert {t.dtype.name for t in found.values()} == {'bfloat16'}
  _, params = load_hf(target, None, None)
  jax.tree.map(
      lambda got, p: np.testing.assert_array_equal(
          got, np.asarray(p).astype('bfloat16').astype(np.float32)
      ),
      params,
      tiny.params(),
  )


def test_gguf_becomes_a_folder_with_the_tokenizer_that_is_named(run, tmp_path):
  config, tensors = test_gguf.make(tmp_path / 'before')
  test_gguf.write(tmp_path / 'a.gguf', 'llama', config, tensors)
  tokenizer = str(run / run_folder.TOKENIZER)
  target = converted(tmp_path / 'a.gguf', tmp_path / 'out', tokenizer=tokenizer)
  got = st.load_file(target / 'model.safetensors')
  for name, tensor in tensors.items():
    np.testing.assert_array_equal(got[name], tensor, err_msg=name)
  assert open_tokenizer(target).tokenizer.vocab_size == 14


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_stories_become_the_published_folder(data_dir, tmp_path, dtype):
  stories = data_dir / 'models/stories260K'
  target = tmp_path / 'out'
  # The command itself, in a process of its own.
  done = subprocess.run(
      [sys.executable, '-m', 'areal_jax.convert',
       f'--from={stories}/stories260K.bin', f'--to={target}',
       f'--tokenizer={stories}/tok512.model', f'--dtype={dtype}'],
      cwd=ROOT, capture_output=True, text=True, check=True, timeout=WAIT_S,
  )  # fmt: skip
  assert done.stdout == f'{target}: 5 layers of width 64, 512 ids\n'
  assert done.stderr == ''
  assert open_tokenizer(target).tokenizer.vocab_size == 512
  weights = 'model.safetensors'
  if dtype == 'float32':  # bit for bit
    got = (target / weights).read_bytes()
    assert got == (stories / 'hf' / weights).read_bytes()
    return
  got = st.load_file(target / weights)
  for name, tensor in st.load_file(stories / 'hf' / weights).items():
    wanted = tensor.astype(dtype)
    np.testing.assert_array_equal(got[name], wanted, strict=True)


@pytest.fixture
def refused(run, tmp_path, capsys):
  """Converts the run with changes, which must be refused with these words."""

  def check(*words: str, **changes) -> None:
    asked = Conversion(str(run), str(tmp_path / 'out'))
    asked = dataclasses.replace(asked, **changes)
    before = sorted(tmp_path.rglob('*'))
    assert convert.main(asked) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert err.startswith('error: ') and err.count('\n') == 1, err
    for word in words:
      assert word in err, err
    assert sorted(tmp_path.rglob('*')) == before

  return check


def test_arguments_that_are_wrong_are_refused(refused):
  refused("--from is '', wanted the path of a policy", source='')
  refused("--to is '', wanted a folder to be made", target='')
  refused("--as is 'orbax', wanted one of ('hf',", form='orbax')
  refused("--dtype is 'int8', wanted one of", dtype='int8')
  refused('--shard_bytes is 0, wanted more than 0', shard_bytes=0)
  refused(
      "--dtype is 'bfloat16', wanted 'float32', as all checkpoints",
      form='checkpoint',
      dtype='bfloat16',
  )


def test_a_target_that_is_there_is_not_overwritten(refused, run):
  refused(f"--to is '{run}'", 'not there yet', target=str(run))


def test_sources_that_are_wrong_are_refused(refused, tmp_path):
  refused("--from is '/nowhere'", 'a Hugging Face folder', source='/nowhere')
  refused('llama2.c file is', 'wanted a file', source='/nowhere.bin')
  path = tmp_path / 'a.gguf'
  path.write_bytes(b'something else')
  refused('a.gguf is no GGUF file', source=str(path))
  refused(
      "--as is 'checkpoint', wanted 'hf', from a .gguf file",
      source=str(path),
      form='checkpoint',
  )
  path = tmp_path / 'a.bin'
  path.write_bytes(b'something else')
  refused('a.bin has 14 bytes', source=str(path))


def test_a_gguf_tokenizer_that_is_not_known_is_refused(refused, tmp_path):
  config, tensors = test_gguf.make(tmp_path / 'before')
  test_gguf.write(
      tmp_path / 'a.gguf', 'llama', config, tensors,
      change=lambda w: w.add_tokenizer_model('bert'),
  )  # fmt: skip
  refused(
      "a.gguf: tokenizer.ggml.model is 'bert', wanted one of ['gpt2', 'llama']",
      source=str(tmp_path / 'a.gguf'),
  )


def test_weights_that_are_wrong_leave_nothing(refused, run, tmp_path):
  folder = tmp_path / 'policy'
  save_hf(folder, tiny.config(), tiny.params())
  name = 'model.layers.1.mlp.up_proj.weight'
  tensors = st.load_file(folder / 'model.safetensors')
  del tensors[name]
  st.save_file(tensors, folder / 'model.safetensors')
  refused(f'lacks 1 tensors: {name}', source=str(folder))


@pytest.mark.parametrize(
    'arguments, words',
    [
        (['--form=hf'], "Unknown command line flag 'form'"),
        (['out'], "'out' is left over, wanted only --flag=value"),
        (['--shard_bytes=many'], 'flag --shard_bytes=many'),
    ],
)
def test_a_command_line_that_is_wrong_is_one_line(arguments, words):
  done = subprocess.run(
      [sys.executable, '-m', 'areal_jax.convert', *arguments],
      cwd=ROOT, capture_output=True, text=True, timeout=WAIT_S,
  )  # fmt: skip
  assert done.returncode == 2
  assert done.stdout == '' and done.stderr.count('\n') == 1, done.stderr
  assert words in done.stderr
