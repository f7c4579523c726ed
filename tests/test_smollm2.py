"""The experiment with SmolLM2: what is asked, what is refused, what is held."""

from absl import flags
import pytest

from areal_jax import command
from areal_jax.config import ConfigError
from areal_jax.prepare.prepared import prepare
from tests.conftest import ROOT
from tests.test_gsm8k import write_policy


def prepared(folder, *overrides, variant=''):
  argv = [
      'run',
      f'--config={ROOT}/experiments/smollm2.py{variant}',
      f'--config.output={folder}/runs',
      *(f'--config.{override}' for override in overrides),
  ]
  return prepare(command.read_experiment(argv, flags.FlagValues()))


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('smollm2')
  write_policy(folder / 'policy')
  return folder


@pytest.fixture(scope='module')
def paths(folder, data_dir):
  return [
      f'policy.path={folder}/policy',
      f'tokenizer.path={data_dir}/tokenizers/smollm2',
  ]


def test_questions_are_chats_without_a_system_message(folder, paths):
  got = prepared(folder, *paths)
  assert (len(got.train), len(got.evaluation)) == (75, 25)
  assert set(map(len, got.prompts.values())) == {23}
  # '<|im_start|>user\nWhat is 8 plus 3? Answer with only the number.<|im_end|>'
  # and then, behind a line break, '<|im_start|>assistant\n'.
  assert got.prompts['addition/8+3'] == (
      1, 4093, 198, 1780, 314, 216, 40, 8055, 216, 35, 47, 19842, 351, 805,
      260, 1230, 30, 2, 198, 1, 520, 9531, 198,
  )  # fmt: skip
  assert got.sampling.stop_ids == (2,)
  assert got.sampling.max_new_tokens == 8
  packing = got.settings.train.packing
  answers = got.settings.rollout.batch_size * got.settings.rollout.group_size
  # The longest answers fill four microbatches.
  assert answers * 31 == 4 * packing.rows * (packing.row_tokens // 31) * 31


def test_word_problems_by_a_variant(folder, paths, data_dir):
  got = prepared(
      folder,
      *paths,
      f'task.train_sources[0].path={data_dir}/datasets/gsm8k_train.jsonl',
      'task.train_sources[0].limit=40',
      f'task.eval_sources[0].path={data_dir}/datasets/gsm8k_test.jsonl',
      variant=':gsm8k',
  )
  assert got.settings.name == 'smollm2-gsm8k'
  assert len(got.train) + got.left_out['train_too_long'] == 40
  first = got.train[0]
  assert first.answer == '72'
  assert list(got.prompts[first.id]).count(1) == 2  # user, assistant


@pytest.mark.parametrize(
    'override, message',
    [
        ('task.train_problems=76', 'count is 76, wanted 1 to 75'),
        ('task.eval_problems=26', 'count is 26, wanted 1 to 25'),
        (
            'rollout.engine.max_prompt_length=20',
            "'addition/.*23 tokens",
        ),
        ('rollout.max_new_tokens=9', 'max_new_tokens is 9, wanted at most 8'),
        ('train.packing.row_tokens=30', 'row_tokens is 30, wanted at least 32'),
        ('reward.function=areal_jax.rewards.last_number:x', 'last_number:x'),
        ('policy.path=/nowhere', "policy.path is '/nowhere', wanted a Hugging"),
        ('tokenizer.path=/nowhere', "'/nowhere', wanted"),
        ('tokenizer.chat_template={{', 'chat template line 1 is no Jinja'),
        ("rollout.stop_strings=('a','')", "stop_strings is '', wanted texts"),
    ],
)
def test_wrong_inputs_are_named(folder, paths, override, message):
  with pytest.raises(ConfigError, match=message):
    prepared(folder, *paths, override)


def test_tokenizer_of_a_larger_vocabulary_is_named(folder, paths, data_dir):
  other = f'tokenizer.path={data_dir}/tokenizers/gpt2'
  with pytest.raises(ConfigError, match="50257 ids', wanted at most the 49152"):
    prepared(folder, paths[0], other)


def test_missing_files_of_word_problems_are_named(folder, paths):
  with pytest.raises(ConfigError, match='gsm8k_train.jsonl'):
    prepared(folder, *paths, variant=':gsm8k')


def test_unknown_variant_is_named(folder):
  with pytest.raises(flags.Error, match="is 'math', wanted 'addition' or"):
    prepared(folder, variant=':math')
