"""A published data set with a published tokenizer, from file to run folder."""

import json

from absl import flags
import jax
import numpy as np
import pytest
import tokenizers

from areal_jax import command, session
from areal_jax.data.sources import SourceSettings
from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf import save_hf
from areal_jax.prepare.prepared import prepare
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.tokenizer.files import open_tokenizer
from areal_jax.types import Message
from tests.conftest import ROOT
from tests.small_experiment import experiment

ALPHABET = '0123456789+=;.'  # 18 ids with the special ones, as `small` has
CHAT = '{{ bos_token }}{{ messages[0].content }}{{ end }}'


def write_policy(folder):
  """A small policy with as many token ids as SmolLM2 has; all zeros."""
  policy = ModelConfig(
      vocab_size=49152,
      width=16,
      layers=1,
      heads=4,
      kv_heads=2,
      head_size=4,
      mlp_width=24,
      max_length=8192,
  )
  params = jax.tree.map(
      lambda p: np.zeros(p.shape, np.float32),
      parameters.abstract_params(policy),
  )
  save_hf(folder, policy, params)


def test_the_experiment_prepares_from_published_files(data_dir, tmp_path):
  tokenizer = data_dir / 'tokenizers/smollm2'
  data = data_dir / 'datasets'
  for needed in (tokenizer, data / 'gsm8k_train.jsonl'):
    if not needed.exists():
      pytest.skip(f'no {needed}')
  write_policy(tmp_path / 'policy')
  got = prepare(
      command.read_experiment(
          [
              'run',
              f'--config={ROOT}/experiments/gsm8k.py',
              f'--config.output={tmp_path}',
              f'--config.policy.path={tmp_path}/policy',
              f'--config.tokenizer.path={tokenizer}',
              f'--config.task.train_sources[0].path={data}/gsm8k_train.jsonl',
              '--config.task.train_sources[0].limit=200',
              f'--config.task.eval_sources[0].path={data}/gsm8k_test.jsonl',
              '--config.task.eval_sources[0].limit=50',
              '--config.rollout.engine.max_prompt_length=160',
          ],
          flags.FlagValues(),
      )
  )
  assert (got.model.vocab_size, got.model.layer_loop) == (49152, 'scan')
  assert got.sampling.stop_ids == got.tokenizer.eos_ids == (2,)
  # Questions of a few hundred are longer, and each is counted.
  assert 0 < got.left_out['train_too_long'] < 50
  assert len(got.train) + got.left_out['train_too_long'] == 200
  assert len(got.evaluation) + got.left_out['eval_too_long'] == 50
  assert [part.size for part in got.parts] == [len(got.train)]
  assert max(map(len, got.prompts.values())) <= 160
  first = got.train[0]
  assert (first.id, first.answer) == ('gsm8k_train/0', '72')
  ids = got.prompts[first.id]
  assert ids[0] == 1 and list(ids).count(1) == 3  # system, user, assistant
  assert got.tokenizer.decode(ids) == (
      'system\nYou are a helpful AI assistant named SmolLM, trained by Hugging'
      f' Face\nuser\n{first.prompt[0].content}\nassistant\n'
  )


@pytest.mark.parametrize(
    'override, message',
    [
        ('task.train_sources[1].path=x', 'train_sources has 1 items'),
        ('task.train_sources[0].pat=x', "has no field 'pat', wanted 'path'"),
        ('task.train_sources[0].limit=x', 'wanted a whole number'),
        ('task.train_sources[0]=x', 'wanted one of the fields of'),
    ],
)
def test_override_of_no_source_is_named(override, message):
  argv = ['run', f'--config={ROOT}/experiments/gsm8k.py']
  with pytest.raises(flags.Error, match=message):
    command.read_experiment([*argv, f'--config.{override}'], flags.FlagValues())


def write_inputs(folder):
  """A tokenizer of single characters and sums in the form of GSM8K."""
  words = ['<pad>', '<s>', '</s>', '<unk>', *ALPHABET]
  tokenizer = tokenizers.Tokenizer(
      tokenizers.models.WordLevel({w: i for i, w in enumerate(words)}, '<unk>')
  )
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(
      tokenizers.Regex('.'), 'isolated'
  )
  tokenizer.decoder = tokenizers.decoders.Fuse()
  tokenizer.add_special_tokens(words[:4])
  (folder / 'published').mkdir()
  tokenizer.save(str(folder / 'published' / 'tokenizer.json'))
  (folder / 'published' / 'tokenizer_config.json').write_text(
      json.dumps(
          {
              'bos_token': '<s>',
              'eos_token': '</s>',
              'chat_template': CHAT,
          }
      )
  )
  for name, first in (('train', 1), ('long', 10**20), ('eval', 5)):
    rows = [
        {'question': f'{first + i}+1', 'answer': f'#### {first + i + 1}'}
        for i in range(4)
    ]
    (folder / f'{name}.jsonl').write_text('\n'.join(map(json.dumps, rows)))


def test_a_run_keeps_the_tokenizer_and_says_what_was_left_out(tmp_path):
  write_inputs(tmp_path)
  sources = {
      name: SourceSettings(
          str(tmp_path / f'{name}.jsonl'), form='gsm8k', chat=True
      )
      for name in ('train', 'long', 'eval')
  }
  settings = experiment(
      tmp_path / 'runs',
      task__train_sources=(sources['train'], sources['long']),
      task__eval_sources=(sources['eval'],),
      task__too_long='drop',
      tokenizer__path=str(tmp_path / 'published'),
      tokenizer__chat_variables={'end': '='},
      reward__function='areal_jax.rewards.math:correct',
      reward__timeout_s=60.0,
  )
  prepared = prepare(settings)
  assert prepared.left_out == {
      'train_bad_rows': 0,
      'train_too_long': 4,
      'eval_bad_rows': 0,
      'eval_too_long': 0,
  }
  assert [(part.name, part.size) for part in prepared.parts] == [('train', 4)]
  assert prepared.train[0].prompt == (Message('user', '1+1'),)
  assert prepared.prompts['train/0'] == (1, 5, 14, 5, 15)  # <s> 1 + 1 =

  result = session.run(settings)
  assert result.summary['left_out'] == prepared.left_out
  assert sum(result.summary['rewards'].values()) > 0
  assert result.summary['rewards']['error'] == 0
  # Samples show the prompt as the policy saw it, rendered.
  samples = [
      row
      for row in read_jsonl(result.folder / 'samples.jsonl')
      if 'completion' in row
  ]
  prompts = {row['prompt'] for row in samples}
  assert prompts <= {
      prepared.chat.render(problem.prompt) for problem in prepared.train
  }
  again = open_tokenizer(result.folder)
  assert again.files == prepared.tokenizer_files
  assert sorted(again.files) == [
      'tokenizer/tokenizer.json',
      'tokenizer/tokenizer_config.json',
  ]
  command.point_to_run(settings, str(result.folder))
  assert settings.tokenizer.path == str(result.folder / 'tokenizer')
  assert prepare(settings).prompts == prepared.prompts
