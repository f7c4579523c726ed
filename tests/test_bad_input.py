"""Bad input at the door: one clear line, exit code 2, nothing written.

A case is a small experiment that is right but for one thing, and the words that
the line has to hold: the field or file, the value seen, the value wanted. Most
cases go through `run.main` in this process; those in which the door itself
matters start the real command.
"""

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax import run
from areal_jax.command import read_experiment
from areal_jax.config import ConfigError, resolve
from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf import save_hf
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from tests.limits import WAIT_S
from tests.small_experiment import change, experiment

ROOT = pathlib.Path(__file__).resolve().parent.parent
QUICKSTART = f'--config={ROOT}/experiments/quickstart.py'
WANTS_A_FILE = 'wanted a Python file with get_config()'


def case(name: str, changes: dict[str, Any], *words: str):
  """`@x` in a value and in the words stands for the file x of the inputs."""
  return pytest.param(changes, words, id=name)


def row(**fields: Any) -> str:
  return json.dumps({'id': 'a', 'prompt': '1+2=', 'answer': '3.', **fields})


@pytest.fixture(scope='module')
def inputs(tmp_path_factory) -> pathlib.Path:
  """A folder of files with something wrong in each."""
  folder = tmp_path_factory.mktemp('inputs')
  for name, text in {
      'file': 'plain',
      'few.jsonl': row(),
      'long.jsonl': '\n'.join(
          row(id=f'p{i}', prompt='1+' * i + '1=') for i in range(5, 9)
      ),
      'broken.jsonl': f'{row()}\n\n{{"id": "b", "prompt"',
      'lacking.jsonl': '{"id": "a", "prompt": "1+2="}',
      'typed.jsonl': row(answer=[3]),
      'twice.jsonl': f'{row()}\n{row()}',
      'empty.jsonl': '',
      'four.jsonl': '\n'.join(row(id=i) for i in 'abcd'),
      'chat.jsonl': '\n'.join(
          row(id=i, prompt=[{'role': 'user', 'content': 'hi'}]) for i in 'abcd'
      ),
      'latin.jsonl': '',
      'text.model': 'not a sentencepiece model',
  }.items():
    (folder / name).write_text(text)
  (folder / 'latin.jsonl').write_bytes(b'{"id": "caf\xe9"}')
  for name, config in {
      'nothing': None,
      'gpt2': '{"model_type": "gpt2"}',
      'halves': '{"model_type": "llama", "num_hidden_layers": 2}',
      'broken': '{"model_type": ',
      'list': '[]',
  }.items():
    (folder / name).mkdir()
    if config is not None:
      (folder / name / 'config.json').write_text(config)
  texts = ['0123456789+=;.']
  train_sentencepiece(texts, folder / 'digits.model')
  train_sentencepiece([*texts, 'abcdefghij'], folder / 'letters.model')
  return folder


@pytest.fixture
def refused(inputs, tmp_path, capsys):
  """Runs an experiment with changes that must be refused with these words."""

  def check(changes: dict[str, Any], words: tuple[str, ...]) -> None:
    settings = experiment(tmp_path / 'runs')
    for path, value in changes.items():
      change(settings, path, filled(value, inputs))
    assert run.main(settings) == 2
    out, err = capsys.readouterr()
    assert out == ''
    assert_one_line(err, [filled(word, inputs) for word in words])
    assert list(tmp_path.iterdir()) == []

  return check


@pytest.fixture
def refused_with(tmp_path, capsys):
  """Runs an experiment with changes that must be refused; returns the lines."""

  def lines(changes: dict[str, Any]) -> list[str]:
    settings = experiment(tmp_path / 'runs')
    for path, value in changes.items():
      change(settings, path, value)
    assert run.main(settings) == 2
    out, err = capsys.readouterr()
    assert out == '' and list(tmp_path.iterdir()) == []
    return err.splitlines()

  return lines


def filled(value: Any, inputs: pathlib.Path) -> Any:
  return value.replace('@', f'{inputs}/') if isinstance(value, str) else value


def assert_one_line(text: str, words) -> None:
  assert text.count('\n') == 1, text
  assert text.startswith('error: '), text
  for word in words:
    assert word in text, f'{word!r} is not in: {text}'


@pytest.mark.parametrize(
    'changes, words',
    [
        case(
            'misspelt_setting',
            {'rollout.etta': 1.0},
            "config.rollout has no field 'etta', wanted 'eta'",
        ),
        case(
            'text_for_a_number',
            {'rollout.batch_size': '4'},
            "config.rollout.batch_size is '4', wanted a whole number",
        ),
        case(
            'truth_value_for_a_number',
            {'steps': True},
            'config.steps is True, wanted a whole number',
        ),
        case(
            'number_for_a_text',
            {'name': 7},
            'config.name is 7, wanted a str',
        ),
        case(
            'dict_for_a_section',
            {'mesh': {'train': 2}},
            "config.mesh is {'train': 2}, wanted a MeshSettings",
        ),
        case(
            'negative_eta',
            {'rollout.eta': -0.5},
            'config.rollout.eta is -0.5, wanted at least 0',
        ),
        case(
            'eta_that_is_no_number',
            {'rollout.eta': float('nan')},
            'config.rollout.eta is nan, wanted a number',
        ),
        case(
            'unknown_choice',
            {'rollout.swap': 'later'},
            "config.rollout.swap is 'later', wanted one of ['recompute'",
        ),
        case(
            'greedy_training',
            {'rollout.temperature': 0.0},
            'config.rollout.temperature is 0.0, wanted more than 0',
        ),
        case(
            'endless_temperature',
            {'rollout.temperature': float('inf')},
            'config.rollout.temperature is inf, wanted more than 0 and finite',
        ),
        case(
            'infinite_reward_timeout_s',
            {'reward.timeout_s': float('inf')},
            'config.reward.timeout_s is inf, wanted more than 0 seconds and',
            'finite',
        ),
        case(
            'infinite_evaluation_temperature',
            {'evaluation.temperature': float('inf')},
            'config.evaluation.temperature is inf, wanted at least 0 and',
            'finite',
        ),
        case(
            'evaluation_top_p_of_nothing',
            {'evaluation.top_p': 0.0},
            'config.evaluation.top_p is 0.0, wanted in (0, 1]',
        ),
        case(
            'evaluation_with_penalties_in_an_engine_without',
            {'evaluation.repetition_penalty': 1.2},
            'config.evaluation: sampling.repetition_penalty is 1.2, wanted 1:'
            ' rollout.engine.sampling.penalties is off',
        ),
        case(
            'evaluation_with_a_least_length_beyond_the_limit',
            {'evaluation.min_new_tokens': 1000},
            'config.evaluation.min_new_tokens is 1000, wanted at most'
            ' rollout.max_new_tokens=',
        ),
        case(
            'top_p_in_training',
            {'rollout.top_p': 0.9},
            "config.rollout has no field 'top_p'",
        ),
        case(
            'negative_logit_bias_room',
            {'rollout.engine.sampling.max_logit_bias': -1},
            'config.rollout.engine.sampling.max_logit_bias is -1, wanted at'
            ' least 0',
        ),
        case(
            'infinite_evaluation_threshold',
            {'evaluation.threshold': float('inf')},
            'config.evaluation.threshold is inf, wanted a finite number',
        ),
        case(
            'infinite_train_optimizer_weight_decay',
            {'train.optimizer.weight_decay': float('inf')},
            'config.train.optimizer.weight_decay is inf, wanted at least 0 and',
            'finite',
        ),
        case(
            'infinite_rollout_group_s',
            {'rollout.group_s': float('inf')},
            'config.rollout.group_s is inf, wanted at least 0 and finite',
        ),
        case(
            'negative_rollout_group_s',
            {'rollout.group_s': -1.0},
            'config.rollout.group_s is -1.0, wanted at least 0 and finite',
        ),
        case(
            'infinite_train_optimizer_epsilon',
            {'train.optimizer.epsilon': float('inf')},
            'config.train.optimizer.epsilon is inf, wanted above 0 and finite',
        ),
        case(
            'infinite_train_advantages_epsilon',
            {'train.advantages.sequences.epsilon': float('inf')},
            'config.train.advantages.sequences.epsilon is inf, wanted at least'
            ' 0 and finite',
        ),
        case(
            'infinite_policy_model_rope_theta',
            {'policy.model.rope_theta': float('inf')},
            'config.policy.model.rope_theta is inf, wanted above 0 and finite',
        ),
        case(
            'endless_wait',
            {'rollout.wait_s': float('inf')},
            'config.rollout.wait_s is inf, wanted more than 0 and finite',
        ),
        case(
            'page_size_that_is_no_power_of_two',
            {'rollout.engine.page_size': 12},
            'config.rollout.engine.page_size is 12, wanted a power of two',
        ),
        case(
            'answer_that_does_not_fit_the_engine',
            {'rollout.max_new_tokens': 17},
            'config.rollout.max_new_tokens is 17, wanted at most 16:',
            'engine.max_length=32 less engine.max_prompt_length=16',
        ),
        case(
            'engine_longer_than_the_policy',
            {'policy.model.max_length': 31},
            'config.rollout.engine.max_length is 32, wanted at most the 31',
        ),
        case(
            'more_minibatches_than_groups',
            {'train.minibatches': 5},
            'config.train.minibatches is 5, wanted at most'
            ' rollout.batch_size=4',
        ),
        case(
            'row_shorter_than_an_answer',
            {'train.packing.row_tokens': 31},
            'config.train.packing.row_tokens is 31, wanted at least 32',
        ),
        case(
            'row_shorter_than_a_demonstration',
            {'warm_start.steps': 1, 'warm_start.packing.row_tokens': 5},
            'config.warm_start.packing.row_tokens is 5, wanted at least',
        ),
        case(
            'negative_learning_rate',
            {'train.optimizer.learning_rate': -1e-3},
            'config.train.optimizer.learning_rate is -0.001, wanted at least 0',
        ),
        case(
            'advantages_that_contradict',
            {
                'train.advantages.sequences.mean': 'none',
                'train.advantages.sequences.leave_one_out': True,
            },
            'config.train.advantages.sequences.leave_one_out is True, wanted'
            " False with mean 'none'",
        ),
        case(
            'samples_that_are_all_the_same',
            {'evaluation.samples': 2},
            'config.evaluation.samples is 2, wanted 1 at temperature 0',
        ),
        case(
            'negative_seed',
            {'seed': -1},
            'config.seed is -1, wanted 0 to 2**32 - 1',
        ),
        case(
            'seed_of_more_than_32_bits',
            {'seed': 2**32},
            'config.seed is 4294967296, wanted 0 to 2**32 - 1',
        ),
        case(
            'negative_seed_of_the_task',
            {'task.seed': -2},
            'config.task.seed is -2, wanted 0 to 2**32 - 1',
        ),
    ],
)
def test_a_setting_is_refused(refused, changes, words):
  refused(changes, words)


def test_independent_mistakes_are_told_together(refused_with):
  wrong = {
      'steps': 0,
      'rollout.batch_size': 0,
      'rollout.etta': 1.0,
      'rollout.engine.page_size': 12,
      'train.packing.row_tokens': 3,
      'name': 7,
  }
  assert sorted(line.split()[1] for line in refused_with(wrong)) == sorted(
      f'config.{path.removesuffix(".etta")}' for path in wrong
  )


def test_what_is_opened_is_refused_together(refused_with):
  lines = refused_with(
      {
          'reward.function': 'no_such_package:score',
          'rollout.workflow': 'no_such_package:ask',
          'tokenizer.path': 'absent.model',
          'policy.path': 'absent',
          'task.train_file': 'absent.jsonl',
          'output': __file__,
      }
  )
  named = ('output', 'reward', 'rollout', 'task', 'tokenizer', 'policy')
  assert len(lines) == len(named)
  for line, name in zip(lines, named):
    assert line.startswith(f'error: config.{name}')


def test_too_few_devices_come_before_what_does_not_divide(refused_with):
  lines = refused_with({'mesh.train.data': 1000})
  assert lines[0].startswith(
      'error: config.mesh needs 1001 devices (sum of train 1000 and rollout 1)'
  )
  assert 'config.train.packing.rows is 4' in lines[1]


def numbers(settings: Any, at: str = ''):
  """Every field of a tree that is a number: its path and its value."""
  for field in dataclasses.fields(settings):
    value, path = getattr(settings, field.name), f'{at}{field.name}'
    if dataclasses.is_dataclass(value):
      yield from numbers(value, f'{path}.')
    elif type(value) in (int, float):
      yield path, value


NUMBERS = dict(numbers(experiment('runs')))


@pytest.mark.parametrize('path', NUMBERS)
def test_no_number_may_be_without_sense(path):
  """No count or seed is negative, and nothing is NaN; told once each."""
  settings = experiment('runs', warm_start__steps=1)
  wrong = -1 if isinstance(NUMBERS[path], int) else float('nan')
  change(settings, path, wrong)
  with pytest.raises(ConfigError) as error:
    resolve(settings)
  (mistake,) = error.value.mistakes  # nothing that only follows from it
  assert mistake.startswith(f'config.{path} is {wrong}, wanted ')


@pytest.mark.parametrize(
    'changes, words',
    [
        case(
            'batch_larger_than_the_data_set',
            {'task.train_problems': 3},
            'the number of problems in config.task is 3, wanted at least the'
            ' batch size 4',
        ),
        case(
            'batch_larger_than_the_file',
            {'task.train_file': '@few.jsonl'},
            'the number of problems in config.task is 1, wanted at least the'
            ' batch size 4',
        ),
        case(
            'no_problem_held_out',
            {'task.eval_problems': 0},
            'config.task.eval_problems is 0, wanted at least 1',
        ),
        case(
            'prompt_longer_than_the_limit',
            {'task.train_file': '@long.jsonl'},
            "the prompt of problem 'p7' is '17 tokens', wanted at most"
            ' config.rollout.engine.max_prompt_length=16',
        ),
        case(
            'chat_for_a_tokenizer_without_a_template',
            {'task.train_file': '@chat.jsonl'},
            "the prompt of problem 'a'",
            '1 chat messages, wanted a text',
            'tokenizer.chat_template sets one',
            'chat=False of a source',
        ),
        case(
            'missing_data_file',
            {'task.train_file': '@absent.jsonl'},
            'config.task.train_file',
            "'@absent.jsonl', wanted a JSON lines file",
        ),
        case(
            'empty_data_file',
            {'task.eval_file': '@empty.jsonl'},
            'config.task.eval_file',
            '@empty.jsonl holds no row, wanted at least one problem',
        ),
        case(
            'row_that_is_not_json',
            {'task.train_file': '@broken.jsonl'},
            'config.task.train_file: @broken.jsonl line 3 is not JSON',
        ),
        case(
            'row_that_is_not_utf8',
            {'task.train_file': '@latin.jsonl'},
            '@latin.jsonl line 1 is not UTF-8',
        ),
        case(
            'row_without_an_answer',
            {'task.train_file': '@lacking.jsonl'},
            "@lacking.jsonl line 1 has fields ['id', 'prompt'], and misses"
            " ['answer']",
        ),
        case(
            'row_of_another_type',
            {'task.train_file': '@typed.jsonl'},
            '@typed.jsonl line 1: answer is [3], wanted a text or a number',
        ),
        case(
            'id_that_two_rows_have',
            {'task.train_file': '@twice.jsonl'},
            "@twice.jsonl line 2: id is 'a', which line 1 has too",
        ),
        case(
            'held_out_problems_that_are_trained_on',
            {
                'task.train_file': '@four.jsonl',
                'task.eval_file': '@few.jsonl',
            },
            "config.task.eval_file is ['a'], wanted no problem id that is"
            ' trained on',
        ),
        case(
            'problems_that_cannot_be_imported',
            {'task.problems': 'no_such_package.tasks:problems'},
            'config.task.problems: data.problems is'
            " 'no_such_package.tasks:problems'",
            "No module named 'no_such_package'",
        ),
        case(
            'problems_that_take_other_arguments',
            {'task.problems': 'json:loads'},
            "config.task.problems: data.problems 'json:loads' cannot be called",
            "missing a required argument: 's'",
        ),
        case(
            'texts_that_take_arguments',
            {'task.texts': 'json:loads'},
            "config.task.texts is 'json:loads', which cannot be called with ()",
        ),
        case(
            'demonstrations_that_do_not_exist',
            {
                'warm_start.steps': 1,
                'task.demonstrations': 'areal_jax.data.running_totals:habits',
            },
            'config.task.demonstrations is',
            "areal_jax.data.running_totals has no 'habits'",
        ),
        case(
            'fewer_demonstrations_than_a_batch',
            {'warm_start.steps': 1, 'task.demonstration_count': 3},
            'the number of config.task.demonstrations is 3, wanted at least'
            ' warm_start.batch=4',
        ),
        case(
            'demonstrations_that_are_no_pairs',
            {
                'warm_start.steps': 1,
                'task.demonstrations': 'areal_jax.data.running_totals:texts',
            },
            "item 0 of config.task.demonstrations is '",
            ".', wanted a prompt and an answer",
        ),
        case(
            'reward_whose_module_is_missing',
            {'reward.function': 'no_such_package:score'},
            "config.reward.function is 'no_such_package:score'",
            "No module named 'no_such_package'",
        ),
        case(
            'reward_whose_name_is_missing',
            {'reward.function': 'areal_jax.rewards.running_totals:exactly'},
            'config.reward.function is'
            " 'areal_jax.rewards.running_totals:exactly'",
            "has no 'exactly'",
        ),
        case(
            'reward_that_cannot_be_called',
            {'reward.function': 'math:pi'},
            "config.reward.function is 'math:pi'",
            'a float, wanted a function',
        ),
        case(
            'reward_that_is_awaited',
            {'reward.function': 'asyncio:sleep'},
            "config.reward.function is 'asyncio:sleep', wanted a plain"
            ' function',
        ),
        case(
            'reward_without_a_colon',
            {'reward.function': 'exact'},
            "config.reward.function is 'exact', wanted the form"
            " 'package.module:function'",
        ),
        case(
            'workflow_whose_module_is_missing',
            {'rollout.workflow': 'no_such_package:ask'},
            "config.rollout.workflow is 'no_such_package:ask'",
            "No module named 'no_such_package'",
        ),
        case(
            'workflow_whose_name_is_missing',
            {'rollout.workflow': 'areal_jax.rollout.workflow:SingleTurns'},
            "has no 'SingleTurns'; did you mean 'SingleTurn'?",
        ),
        case(
            'workflow_in_place_of_what_builds_it',
            {'rollout.workflow': 'tests.session_workflows:is_the_workflow'},
            "config.rollout.workflow is 'tests.session_workflows:is_the_w",
            'which cannot be called with (context): missing a required',
        ),
        case(
            'workflow_whose_builder_is_awaited',
            {'rollout.workflow': 'tests.session_workflows:answers_itself'},
            "'tests.session_workflows:answers_itself', wanted a plain function"
            ' of (context)',
        ),
        case(
            'turn_discount_of_answers_that_have_one_turn',
            {'train.advantages.turn_discount': 0.9},
            'config.train.advantages.turn_discount is 0.9, wanted 1 with'
            " rollout.workflow='areal_jax.rollout.workflow:SingleTurn'",
        ),
    ],
)
def test_a_task_is_refused(refused, changes, words):
  refused(changes, words)


@pytest.mark.parametrize(
    'changes, words',
    [
        case(
            'missing_tokenizer',
            {'tokenizer.path': '@absent.model'},
            'config.tokenizer.path',
            "'@absent.model', wanted a sentencepiece model file",
        ),
        case(
            'tokenizer_that_is_no_sentencepiece_model',
            {'tokenizer.path': '@text.model'},
            'config.tokenizer.path',
            "'@text.model', wanted a sentencepiece model file",
        ),
        case(
            'vocabulary_too_small_for_the_alphabet',
            {'tokenizer.vocab_size': 9},
            'config.tokenizer',
            'vocab_size is 9, wanted at least 18: 14 characters and 4 special',
        ),
        case(
            'stop_id_outside_the_vocabulary',
            {'rollout.stop_ids': (18,)},
            "config.rollout.stop_ids is 18, wanted one of the tokenizer's 18",
        ),
        case(
            'more_stop_ids_than_room',
            {'rollout.stop_ids': (3, 4), 'rollout.engine.max_stop_ids': 2},
            'config.rollout.engine.max_stop_ids is 2, wanted at least 3',
        ),
        case(
            'missing_policy',
            {'policy.path': '@absent'},
            "config.policy.path is '@absent', wanted a Hugging Face folder with"
            ' a config.json',
        ),
        case(
            'repository_for_a_policy',
            {'policy.path': 'Qwen/Qwen2.5-0.5B'},
            "config.policy.path is 'Qwen/Qwen2.5-0.5B', wanted a Hugging Face",
            'hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B',
        ),
        case(
            'repository_for_a_tokenizer',
            {'tokenizer.path': 'Qwen/Qwen2.5-0.5B'},
            'config.tokenizer.path',
            'hf download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B',
        ),
        case(
            'repository_for_a_data_file',
            {'task.train_file': 'openai/gsm8k'},
            'config.task.train_file',
            'hf download openai/gsm8k --repo-type dataset --local-dir gsm8k',
        ),
        case(
            'policy_without_a_config',
            {'policy.path': '@nothing'},
            "config.policy.path is '@nothing', wanted a Hugging Face folder"
            ' with a config.json',
        ),
        case(
            'policy_whose_config_is_not_json',
            {'policy.path': '@broken'},
            '@broken/config.json is not JSON',
        ),
        case(
            'policy_whose_config_is_no_object',
            {'policy.path': '@list'},
            '@list/config.json is [], wanted a JSON object',
        ),
        case(
            'unknown_model_family',
            {'policy.path': '@gpt2'},
            "@gpt2/config.json: model_type is 'gpt2', wanted one of ['llama'",
        ),
        case(
            'policy_whose_config_lacks_a_size',
            {'policy.path': '@halves'},
            '@halves/config.json: num_attention_heads is missing',
        ),
        case(
            'policy_that_its_family_has_not',
            {'policy.model.qkv_bias': True},
            'config.policy.model: qkv_bias is True, wanted False in family'
            " 'llama'",
        ),
        case(
            'heads_that_share_unevenly',
            {'policy.model.kv_heads': 3},
            'config.policy.model.kv_heads is 3, wanted a divisor of heads=4',
        ),
        case(
            'heads_that_do_not_divide_over_training',
            {'mesh.train.tensor': 3},
            'config.mesh.train.tensor is 3, wanted a divisor of the'
            " policy's heads=4",
        ),
        case(
            'heads_that_do_not_divide_over_generation',
            {'mesh.rollout.tensor': 3},
            'config.mesh.rollout.tensor is 3, wanted a divisor of the'
            " policy's heads=4",
        ),
        case(
            'slots_that_do_not_divide_over_a_replica',
            {'mesh.rollout.data': 3, 'rollout.engine.slots': 8},
            'config.rollout.engine.slots is 8, wanted a multiple of the 3 data'
            ' shards of a replica',
        ),
        case(
            'width_that_does_not_divide',
            {'mesh.train.fsdp': 3, 'train.packing.rows': 3},
            'config.mesh.train.fsdp is 3, wanted a divisor of the policy'
            "'s width=32",
        ),
        case(
            'rows_that_do_not_divide',
            {'mesh.train.fsdp': 2, 'train.packing.rows': 3},
            'config.train.packing.rows is 3, wanted a multiple of'
            ' mesh.train.fsdp=2',
        ),
        case(
            'rows_that_do_not_divide_over_two_axes',
            {
                'mesh.train.data': 2,
                'mesh.train.fsdp': 2,
                'train.packing.rows': 6,
            },
            'config.train.packing.rows is 6, wanted a multiple of'
            ' mesh.train.data=2 · fsdp=2',
        ),
        case(
            'tokens_that_do_not_divide',
            {'mesh.train.context': 3, 'train.packing.row_tokens': 128},
            'config.train.packing.row_tokens is 128, wanted a multiple of'
            ' mesh.train.context=3',
        ),
        case(
            'experts_that_do_not_divide',
            {
                'policy.model.family': 'mixtral',
                'policy.model.moe.experts': 3,
                'policy.model.moe.width': 8,
                'mesh.train.expert': 2,
            },
            'config.mesh.train.expert is 2, wanted a divisor of the policy'
            "'s moe.experts=3",
        ),
        case(
            'expert_axis_without_experts',
            {'mesh.train.expert': 2},
            'config.mesh.train.expert is 2, wanted 1 for a policy without'
            ' experts',
        ),
        case(
            'colocated_meshes_of_unequal_size',
            {'mesh.colocated': True, 'mesh.train.fsdp': 2},
            'config.mesh.colocated: config.mesh.train covers fsdp 2',
            '= 2 devices',
            'wanted the same number',
        ),
        case(
            'offloading_where_nobody_else_needs_the_room',
            {'train.offload_optimizer': True},
            'config.train.offload_optimizer is True, wanted False unless'
            ' mesh.colocated',
        ),
        case(
            'mesh_without_an_engine',
            {'mesh.rollout.replicas': 0},
            'config.mesh.rollout.replicas is 0, wanted at least 1',
        ),
        case(
            'mesh_larger_than_the_machine',
            {'mesh.rollout.replicas': 64},
            'mesh needs 65 devices (sum of train 1 and rollout 64), there are',
        ),
        case(
            'output_below_a_file',
            {'output': '@file/runs'},
            "config.output is '@file/runs', wanted a folder that can be"
            " written, which '@file' is not",
        ),
        case(
            'name_of_two_folders',
            {'name': 'a/b'},
            "config.name is 'a/b', wanted one folder name",
        ),
        case(
            'name_of_no_folder',
            {'name': '..'},
            "config.name is '..', wanted one folder name",
        ),
    ],
)
def test_a_tokenizer_policy_mesh_or_folder_is_refused(refused, changes, words):
  refused(changes, words)


def test_a_tokenizer_larger_than_the_policy_is_refused(
    refused, inputs, tmp_path_factory
):
  folder = checkpoint(tmp_path_factory.mktemp('policy'))
  refused(
      {'policy.path': str(folder), 'tokenizer.path': '@letters.model'},
      (
          'config.tokenizer.path',
          '@letters.model with 28 ids',
          'wanted at most the 18 of config.policy.path',
      ),
  )


# Weights.


def checkpoint(folder: pathlib.Path) -> pathlib.Path:
  """A policy for `digits.model` that nothing is wrong with."""
  config = ModelConfig(
      vocab_size=18,
      width=32,
      layers=1,
      heads=4,
      kv_heads=2,
      head_size=8,
      mlp_width=48,
      max_length=64,
  )
  shapes = parameters.abstract_params(config)
  params = {
      name: {n: np.ones(p.shape, np.float32) for n, p in part.items()}
      if isinstance(part, dict)
      else np.ones(part.shape, np.float32)
      for name, part in shapes.items()
  }
  save_hf(folder, config, params)
  return folder


def edited(folder: pathlib.Path, name: str, tensor: Any) -> None:
  """Puts a tensor in place of another, or takes one away."""
  path = folder / 'model.safetensors'
  tensors = st.load_file(path)
  tensors.pop(name, None)
  if tensor is not None:
    tensors[name] = tensor
  st.save_file(tensors, path)


QUERY = 'model.layers.0.self_attn.q_proj.weight'


@pytest.mark.parametrize(
    'name, tensor, words',
    [
        pytest.param(
            QUERY,
            np.ones((32, 16), np.float32),
            (f'tensor {QUERY} has shape (32, 16), wanted (32, 32)',),
            id='of_another_shape',
        ),
        pytest.param(QUERY, None, (f'lacks 1 tensors: {QUERY}',), id='missing'),
        pytest.param(
            'lm_head.weight',
            np.zeros((18, 32), np.float32),
            (
                'has 1 tensors with no place',
                'tied_embeddings True',
                'lm_head.weight',
            ),
            id='left_over',
        ),
        pytest.param(
            QUERY,
            np.ones((32, 32), np.int32),
            (f'tensor {QUERY} is I32, wanted float32 (F32)',),
            id='of_another_type',
        ),
    ],
)
def test_a_tensor_is_refused(refused, tmp_path_factory, name, tensor, words):
  folder = checkpoint(tmp_path_factory.mktemp('policy'))
  edited(folder, name, tensor)
  refused(
      {'policy.path': str(folder), 'tokenizer.path': '@digits.model'},
      (str(folder), *words),
  )


def test_a_policy_without_weights_is_refused(refused, tmp_path_factory):
  folder = checkpoint(tmp_path_factory.mktemp('policy'))
  path = folder / 'model.safetensors'
  path.unlink()
  changes = {'policy.path': str(folder), 'tokenizer.path': '@digits.model'}
  refused(changes, (f'there is no file {path}',))
  path.write_bytes(b'cut off')
  refused(changes, (f'{path} is not safetensors',))


# The command line.


def parse(*arguments: str):
  return read_experiment(['run', *arguments], flags.FlagValues())


def test_overrides_reach_the_experiment():
  got = parse(
      QUICKSTART,
      '--config.rollout.eta=inf',
      '--config.rollout.stop_ids=5,7',
      '--config.mesh.colocated',
      '--config.name',
      'other',
      '--config.train.advantages.reward_clip=2',
  )
  assert got.rollout.eta == float('inf')
  assert got.rollout.stop_ids == (5, 7)
  assert got.mesh.colocated is True
  assert got.name == 'other'
  assert got.train.advantages.reward_clip == 2.0


def test_algorithm_lies_under_all_other_overrides():
  """Wherever it stands on the line, and by the length that the line gives."""
  got = parse(
      QUICKSTART,
      '--config.train.loss.clip_high=0.3',
      '--config.algorithm=dapo',
      '--config.rollout.max_new_tokens=16',
  )
  assert got.algorithm == 'dapo' and got.rollout.dynamic_sampling
  assert got.train.loss.clip_high == 0.3
  assert got.train.advantages.length_penalty.longest == 16
  assert parse(QUICKSTART).algorithm == ''
  with pytest.raises(flags.Error, match="algorithm is 'x', wanted one of"):
    parse(QUICKSTART, '--config.algorithm=x')
  with pytest.raises(flags.Error, match='wanted --config.algorithm=NAME'):
    parse(QUICKSTART, '--config.algorithm', 'dapo')


def test_get_config_is_called_with_the_variant(tmp_path):
  file = tmp_path / 'variants.py'
  file.write_text(
      'from tests.small_experiment import experiment\n'
      'def get_config(kind):\n'
      '  return experiment("runs", name=kind)\n'
  )
  assert parse(f'--config={file}:long').name == 'long'
  assert list(tmp_path.iterdir()) == [file]  # nor is it compiled into a file


def line(name: str, arguments: list[str], *words: str):
  return pytest.param(arguments, words, id=name)


@pytest.mark.parametrize(
    'arguments, words',
    [
        line(
            'no_file_but_overrides',
            ['--config.seed=1'],
            f'--config is missing, {WANTS_A_FILE}',
        ),
        line(
            'folder_for_a_file',
            ['--config=/'],
            "--config is '/', which cannot be read",
            WANTS_A_FILE,
        ),
        line(
            'two_files', [QUICKSTART, QUICKSTART], QUICKSTART, 'wanted one of'
        ),
        line(
            'override_before_the_file',
            ['--config.seed=1', QUICKSTART],
            'Found --config.seed=1 in argv before a value for --config',
        ),
        line(
            'word_without_dashes',
            [QUICKSTART, 'eta=1'],
            "'eta=1' is left over, wanted only --flag=value",
            'did you mean --config.rollout.eta=1?',
        ),
        line(
            'unknown_flag',
            [QUICKSTART, '--eta=1'],
            "Unknown command line flag 'eta'; did you mean"
            ' --config.rollout.eta=1?',
        ),
        line(
            'file_without_a_flag',
            ['experiments/quickstart.py'],
            '--config is missing',
            'did you mean --config=experiments/quickstart.py?',
        ),
        line(
            'field_of_another_section',
            [QUICKSTART, '--config.eta=2'],
            "config has no field 'eta', wanted one of",
            'did you mean --config.rollout.eta=2?',
        ),
        line(
            'four_mistakes_at_once',
            [
                QUICKSTART,
                '--config.steps=x',
                '--config.rollout.etta=1',
                '--config.seed=1.5',
                '--config.mesh.colocated=maybe',
            ],
            '--config.steps=x',
            "config.rollout has no field 'etta', wanted 'eta'",
            '--config.seed=1.5',
            '--config.mesh.colocated=maybe',
        ),
        line(
            'flag_without_a_value',
            [QUICKSTART, '--config.seed'],
            'Missing value for flag --config.seed',
        ),
        line(
            'fraction_for_a_whole_number',
            [QUICKSTART, '--config.steps=2.5'],
            'flag --config.steps=2.5: ',
            "'2.5', wanted a whole number",
        ),
        line(
            'word_for_a_truth_value',
            [QUICKSTART, '--config.mesh.colocated=maybe'],
            'flag --config.mesh.colocated=maybe: ',
            'wanted true or false',
        ),
        line(
            'misspelt_section',
            [QUICKSTART, '--config.roll.eta=1'],
            "--config.roll.eta=1: config has no field 'roll', wanted 'rollout'",
        ),
        line(
            'field_like_no_other',
            [QUICKSTART, '--config.zzz', '1'],
            "--config.zzz: config has no field 'zzz', wanted one of",
            "'rollout', 'sample_bytes', 'schedule_bytes', 'seed'",
        ),
        line(
            'field_of_a_number',
            [QUICKSTART, '--config.rollout.eta.x=1'],
            'config.rollout.eta is 2.0 and has no fields',
        ),
        line(
            'field_of_nothing',
            [QUICKSTART, '--config.train.advantages.reward_clip.x=1'],
            'Override train.advantages.reward_clip.x can not be applied',
        ),
        line(
            'section_for_a_field',
            [QUICKSTART, '--config.rollout=build'],
            '--config.rollout=build: wanted one of the fields of'
            " config.rollout: ['batch_size'",
        ),
        line(
            'method_for_a_field',
            [QUICKSTART, '--config.train.validate=1'],
            "config.train has no field 'validate'",
        ),
    ],
)
def test_a_flag_is_refused(arguments, words):
  with pytest.raises(flags.Error) as error:
    parse(*arguments)
  for word in words:
    assert word in str(error.value)


@pytest.mark.parametrize(
    'text, words',
    [
        ('x = 1', f'@ has no get_config(), {WANTS_A_FILE}'),
        ('get_config = 1', f'@ has no get_config(), {WANTS_A_FILE}'),
        ('def get_config(): return {}', 'get_config() of @ returned a dict'),
        ('def get_config(): return', 'get_config() of @ returned a NoneType'),
        ('\nimport no_such_package', '@ line 2 failed: ModuleNotFoundError: '),
        (
            'def get_config():\n  return missing',
            "@ line 2 failed: NameError: name 'missing' is not defined",
        ),
        (
            'from areal_jax.settings import RolloutSettings\n'
            'def get_config():\n  return RolloutSettings(bach_size=3)',
            "@ line 3 failed: RolloutSettings has no field 'bach_size', wanted"
            " 'batch_size'",
        ),
        ('def get_config(kind): pass', '@ failed: TypeError: get_config() '),
        ('x = (\n', "@ is not Python: '(' was never closed (config.py, line 1"),
        ('x = "\0"', '@ is not Python: source code string cannot contain null'),
    ],
)
def test_a_config_file_is_refused(tmp_path, text, words):
  file = tmp_path / 'config.py'
  file.write_text(text)
  with pytest.raises(flags.Error) as error:
    parse(f'--config={file}')
  assert words.replace('@', str(file)) in str(error.value)


# The whole door, as a user comes to it.


def command(folder: pathlib.Path, *arguments: str, **environment: str):
  """Runs the program in a folder, on whatever devices jax finds."""
  inherited = {
      name: value
      for name, value in os.environ.items()
      if name not in ('JAX_PLATFORMS', 'XLA_FLAGS')
  }
  return subprocess.run(
      [sys.executable, '-m', 'areal_jax.run', *arguments],
      cwd=folder,
      env={**inherited, 'PYTHONPATH': str(ROOT), **environment},
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )


def test_help_names_the_config_and_exits_with_0(tmp_path):
  done = command(tmp_path, '--help')
  assert done.returncode == 0
  assert '--config: A file with get_config()' in done.stdout
  assert done.stderr == ''


@pytest.mark.parametrize(
    'arguments, words',
    [
        line('no_file', [], f'--config is missing, {WANTS_A_FILE}'),
        line(
            'missing_file',
            ['--config=absent.py'],
            "--config is 'absent.py', which cannot be read (No such file",
            WANTS_A_FILE,
        ),
        line(
            'syntax_error',
            ['--config=@syntax.py'],
            '@syntax.py is not Python: invalid syntax (syntax.py, line 2)',
        ),
        line(
            'misspelt_field',
            [QUICKSTART, '--config.rollout.etta=1'],
            '--config.rollout.etta=1: config.rollout has no field',
            "'etta', wanted 'eta'",
        ),
        line(
            'word_for_a_number',
            [QUICKSTART, '--config.rollout.eta=soon'],
            '--config.rollout.eta=soon',
            'wanted a number',
        ),
        line(
            'batch_larger_than_the_data_set',
            ['--config=@small.py', '--config.rollout.batch_size=9'],
            'the number of problems in config.task is 8, wanted at least the'
            ' batch size 9',
        ),
        line(
            'output_below_a_file',
            ['--config=@small.py', '--config.output=@small.py/runs'],
            "config.output is '@small.py/runs', wanted a folder that can be",
        ),
    ],
)
def test_the_command_refuses(door, tmp_path, arguments, words):
  done = command(tmp_path, *(filled(a, door) for a in arguments))
  assert_refused(done, tmp_path, [filled(word, door) for word in words])


def assert_refused(done, folder: pathlib.Path, words) -> None:
  assert_one_line(done.stderr, words)
  assert done.stdout == ''
  assert done.returncode == 2
  assert list(folder.iterdir()) == []


@pytest.fixture(scope='module')
def door(inputs) -> pathlib.Path:
  """A folder of config files, and of a policy with a tensor too few."""
  (inputs / 'syntax.py').write_text('def get_config():\n  return return\n')
  (inputs / 'small.py').write_text(
      'from tests.small_experiment import experiment\n'
      'def get_config():\n'
      '  return experiment("runs")\n'
  )
  return inputs


def test_the_command_refuses_weights_without_a_word_from_jax(door, tmp_path):
  """jax starts here, and tells at level INFO that there is no TPU."""
  folder = checkpoint(door / 'policy')
  edited(folder, QUERY, np.ones((32, 16), np.float32))
  done = command(
      tmp_path,
      f'--config={door}/small.py',
      f'--config.policy.path={folder}',
      f'--config.tokenizer.path={door}/digits.model',
  )
  assert_refused(
      done, tmp_path, [str(folder), f'tensor {QUERY} has shape (32, 16)']
  )


def test_the_command_refuses_a_mesh_for_which_devices_are_missing(
    door, tmp_path
):
  done = command(
      tmp_path,
      f'--config={door}/small.py',
      '--config.mesh.train.fsdp=2',
      JAX_PLATFORMS='cpu',
      XLA_FLAGS='--xla_force_host_platform_device_count=2',
  )
  words = 'mesh needs 3 devices (sum of train 2 and rollout 1), there are 2'
  assert_refused(done, tmp_path, [words])


@pytest.mark.parametrize('module', ['areal_jax.convert', 'benchmarks.loop'])
@pytest.mark.parametrize(
    'argument, code, words',
    [
        ('eta=1', 2, "error: 'eta=1' is left over, wanted only --flag=value\n"),
        ('--eta=1', 2, "error: Unknown command line flag 'eta'"),
        ('--help', 0, ''),
    ],
)
def test_a_program_without_settings_refuses_words_and_helps(
    module, argument, code, words
):
  done = subprocess.run(
      [sys.executable, '-m', module, argument],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=600,
  )
  assert (done.returncode, done.stderr.startswith(words)) == (code, True)
  assert ('\nflags:\n  --' in done.stdout) == (code == 0)


def test_every_benchmark_with_flags_reads_them_so():
  for file in ROOT.glob('benchmarks/*.py'):
    assert 'app.run(main)' not in file.read_text(), file
