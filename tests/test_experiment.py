"""What `prepare` makes of right settings. Wrong ones: `test_bad_input.py`."""

import gzip
import json
import math
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
import tokenizers

from areal_jax import convert
from areal_jax.config import ConfigError, from_dict, resolve, to_dict
from areal_jax.convert import Conversion
from areal_jax.data.running_totals import texts
from areal_jax.losses.advantages import AdvantageSettings, Normalization
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from areal_jax.losses.presets import PRESETS
from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.models.hf import save_hf
from areal_jax.prepare.prepared import prepare, prepare_policy, prepare_shapes
from areal_jax.settings.algorithm import algorithm_changes, use_algorithm
from areal_jax.settings.cautions import cautions
from areal_jax.settings.experiment import Experiment
from areal_jax.telemetry import run_folder
from areal_jax.tokenizer.sentencepiece_tokenizer import (
    SentencePieceTokenizer,
    train_sentencepiece,
)
from tests.limits import WAIT_S
from tests.small_experiment import experiment

TOTALS = 'areal_jax.data.running_totals:texts'
ROOT = pathlib.Path(__file__).resolve().parent.parent
ALPHABET = 14 + 4  # digits and '+=;.', and the special pieces


def write_rows(path: pathlib.Path, *rows: tuple[str, str, str]) -> str:
  path.write_text(
      '\n'.join(
          json.dumps({'id': i, 'prompt': prompt, 'answer': answer})
          for i, prompt, answer in rows
      )
  )
  return str(path)


def test_preparing_writes_nothing_and_leaves_the_settings_open(tmp_path):
  settings = experiment(tmp_path / 'runs')
  before = to_dict(settings)
  got = prepare(settings)
  assert list(tmp_path.iterdir()) == []
  assert to_dict(settings) == before == to_dict(got.settings)
  settings.seed = 2
  with pytest.raises(AttributeError, match='the settings are resolved'):
    got.settings.seed = 2


def test_preparing_starts_no_device():
  code = (
      'from areal_jax.prepare.prepared import prepare\n'
      'from tests.small_experiment import experiment\n'
      'prepare(experiment("runs", warm_start__steps=1))\n'
      'import jax._src.xla_bridge as bridge\n'
      'assert not bridge.backends_are_initialized()\n'
      'import jax\n'
      'jax.devices()\n'
      'assert bridge.backends_are_initialized()\n'
  )
  child = subprocess.run(
      [sys.executable, '-c', code],
      cwd=ROOT,
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert child.returncode == 0, child.stderr


def test_problems_are_those_of_the_task(tmp_path):
  got = prepare(experiment(tmp_path))
  assert len(got.train) == 8
  assert len(got.evaluation) == 4
  ids = {problem.id for problem in (*got.train, *got.evaluation)}
  assert len(ids) == 12
  assert set(got.prompts) == ids
  again = prepare(experiment(tmp_path, seed=9))
  assert again.train == got.train  # the run's seed is not the task's


def test_problems_come_from_files_where_they_are_named(tmp_path):
  train = write_rows(
      tmp_path / 'train.jsonl', *((f't{i}', f'{i}+1=', '?') for i in range(4))
  )
  evaluation = write_rows(tmp_path / 'eval.jsonl', ('e', '9+9=', '18.'))
  got = prepare(
      experiment(tmp_path, task__train_file=train, task__eval_file=evaluation)
  )
  assert [problem.id for problem in got.train] == ['t0', 't1', 't2', 't3']
  assert [problem.answer for problem in got.evaluation] == ['18.']


@pytest.mark.parametrize('add_bos', [True, False])
def test_prompts_are_rendered_once(tmp_path, add_bos):
  got = prepare(experiment(tmp_path, tokenizer__add_bos=add_bos))
  problem = got.train[0]
  plain = tuple(got.tokenizer.encode(problem.prompt))
  front = (got.tokenizer.bos_id,) if add_bos else ()
  assert got.prompts[problem.id] == front + plain
  assert got.tokenizer.decode(plain) == problem.prompt


def test_the_tokenizer_can_be_saved_and_opened_again(tmp_path):
  got = prepare(experiment(tmp_path))
  path = tmp_path / 'tokenizer.model'
  assert list(got.tokenizer_files) == [path.name]
  path.write_bytes(got.tokenizer_files[path.name])
  assert SentencePieceTokenizer(path).vocab_size == ALPHABET
  again = prepare(experiment(tmp_path, tokenizer__path=str(path)))
  assert again.tokenizer_files == got.tokenizer_files
  assert again.prompts == got.prompts


def sorting(folder: pathlib.Path) -> dict[str, str]:
  """A task of somebody's own: 'sort: 964 ->' is answered by '4 6 9'."""
  rows = [
      (f's{n}', f'sort: {n} ->', ' '.join(sorted(str(n))))
      for n in (964, 750, 318, 242, 111)
  ]
  return dict(
      task__train_file=write_rows(folder / 'sort.jsonl', *rows[:4]),
      task__eval_file=write_rows(folder / 'held_out.jsonl', *rows[4:]),
      task__texts='',
  )


def test_a_tokenizer_is_trained_on_the_tasks_own_prompts_and_answers(tmp_path):
  assert Experiment().task.texts == ''
  got = prepare(experiment(tmp_path, **sorting(tmp_path)))
  # 9 of the 10 digits (8 and 9 among them), 'sort: ->' and special pieces.
  assert got.tokenizer.vocab_size == 10 + len(set('sort: ->')) + 4
  for problem in (*got.train, *got.evaluation):
    ids = got.prompts[problem.id][1:]
    assert got.tokenizer.unk_id not in ids
    assert got.tokenizer.decode(ids) == problem.prompt
  assert got.cautions == []
  # The shapes of a run are known from the same texts.
  shapes = prepare_shapes(experiment(tmp_path, **sorting(tmp_path)))
  assert shapes.model == got.model


def test_demonstrations_and_chats_are_own_texts_too(tmp_path):
  template = '{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}'
  rows = [
      {
          'id': i,
          'prompt': [{'role': 'user', 'content': f'sort {i}'}],
          'answer': f'{i}',
      }
      for i in range(4)
  ]
  (tmp_path / 'chat.jsonl').write_text('\n'.join(map(json.dumps, rows)))
  chat = dict(
      task__train_file=str(tmp_path / 'chat.jsonl'),
      task__texts='',
      tokenizer__chat_template=template,
  )
  got = prepare(experiment(tmp_path, **chat))
  assert got.tokenizer.decode(got.prompts['3']) == '<user>sort 3'
  short = got.tokenizer.vocab_size
  # Those of the warm start are sums.
  got = prepare(experiment(tmp_path, **chat, warm_start__steps=1))
  assert got.tokenizer.vocab_size >= short
  assert got.tokenizer.unk_id not in got.tokenizer.encode('+=;.')


def test_a_prompt_that_the_tokenizer_loses_is_refused_with_its_id(tmp_path):
  own = {**sorting(tmp_path), 'task__texts': TOTALS}
  with pytest.raises(
      ConfigError,
      match="the prompt of problem 's964': 'sort: 964 ->' comes back as .*"
      'unknown one: it has none for',
  ):
    prepare(experiment(tmp_path, **own))


def test_a_demonstration_that_the_tokenizer_loses_is_refused(tmp_path):
  path = train_sentencepiece(['0123456789+='], tmp_path / 'few.model')
  wrong = dict(warm_start__steps=1, tokenizer__path=str(path))
  with pytest.raises(
      ConfigError,
      match=r"item \d+ of config.task.demonstrations: .* it has none for '",
  ):
    prepare(experiment(tmp_path, **wrong))


def test_a_group_is_given_up_before_training_gives_up(tmp_path):
  """By default in half the time; the caution names what hardly helps."""
  made = experiment(tmp_path, rollout__wait_s=100.0)
  assert made.rollout.group_limit_s == 50.0
  made.rollout.eta = 0.0
  assert not [c for c in cautions(resolve(made)) if 'group_s' in c]
  made.failures.unfinished = 'retry'  # three times 50 s
  (told,) = [c for c in cautions(resolve(made)) if 'group_s' in c]
  assert 'given up after 3 times 50 s' in told and 'wait_s=100 s' in told
  made.rollout.eta = 2.0  # training goes on with other groups
  assert not [c for c in cautions(resolve(made)) if 'group_s' in c]


def test_an_answer_that_the_tokenizer_cannot_write_is_a_caution(tmp_path):
  rows = [(f'{n}', f'{n}+1=', 'two' if n == 1 else '2.') for n in range(4)]
  path = write_rows(tmp_path / 'words.jsonl', *rows)
  (told,) = prepare(experiment(tmp_path, task__train_file=path)).cautions
  assert told.startswith(
      "the policy cannot write 1 right answers, such as that of '1': 'two'"
  )
  assert "it has none for 't', 'w', 'o'" in told


def test_a_prompt_that_a_published_tokenizer_composes_is_a_caution(
    data_dir, tmp_path
):
  folder = data_dir / 'tokenizers/qwen3'
  (tmp_path / 'tokenizer.json').write_bytes(
      gzip.decompress((folder / 'tokenizer.json.gz').read_bytes())
  )
  rows = [(f'{n}', f'cafe\u0301 {n}?', '2') for n in range(4)]
  path = write_rows(tmp_path / 'cafe.jsonl', *rows)
  (told,) = prepare(
      experiment(
          tmp_path,
          task__train_file=path,
          tokenizer__path=str(tmp_path / 'tokenizer.json'),
          tokenizer__add_bos=False,
          rollout__stop_at_eos=False,
      )
  ).cautions
  assert told == (
      "the tokenizer changes 4 prompts, such as that of '0': 'cafe\u0301 0?'"
      " comes back as 'caf\xe9 0?'"
  )


def saved_policy(folder: pathlib.Path, vocab_size: int) -> None:
  config = ModelConfig(
      vocab_size=vocab_size, width=16, layers=1, heads=2, kv_heads=1,
      head_size=8, mlp_width=24, max_length=64,
  )  # fmt: skip
  params = jax.tree.map(
      lambda p: np.zeros(p.shape, np.float32),
      parameters.abstract_params(config),
  )
  save_hf(folder, config, params)


@pytest.mark.parametrize(
    'policy, path, tokenizer',
    [
        ('folder', 'folder', 'folder/tokenizer.model'),
        ('run/policy', 'run', 'run/tokenizer.model'),
        ('run/policy', 'run', 'run/policy/tokenizer.model'),
        ('folder', 'folder', 'folder/tokenizer.json'),
        ('run/policy', 'run', 'run/tokenizer/tokenizer.json'),
    ],
)
def test_a_policy_brings_its_own_tokenizer(tmp_path, policy, path, tokenizer):
  saved_policy(tmp_path / policy, 300)
  file = tmp_path / tokenizer
  if file.suffix == '.model':
    train_sentencepiece(['0123456789+=;.ab'], file)
  else:
    file.parent.mkdir(exist_ok=True)
    words = {text: i for i, text in enumerate('?0123456789+=;.ab')}
    made = tokenizers.Tokenizer(tokenizers.models.BPE(words, [], unk_token='?'))
    made.decoder = tokenizers.decoders.Fuse()
    made.save(str(file))
  settings = experiment(
      tmp_path,
      policy__path=str(tmp_path / path),
      tokenizer__add_bos=False,
      rollout__stop_at_eos=False,
  )
  got = prepare(settings)
  assert got.tokenizer.decode(got.tokenizer.encode('ab')) == 'ab'
  assert got.model.absent_ids == ((got.tokenizer.vocab_size, 300),)
  alone = prepare_policy(settings)
  assert alone.tokenizer.path == str(file)
  assert alone.model == got.model


def test_a_checkpoint_brings_its_own_tokenizer(tmp_path):
  saved_policy(tmp_path / 'run' / run_folder.POLICY, 40)
  train_sentencepiece(
      ['0123456789+=;.ab'], tmp_path / 'run' / run_folder.TOKENIZER
  )
  asked = Conversion(
      str(tmp_path / 'run'), str(tmp_path / 'saved'), form='checkpoint'
  )
  assert convert.main(asked) == 0
  got = prepare(experiment(tmp_path, policy__path=str(tmp_path / 'saved')))
  assert got.tokenizer.decode(got.tokenizer.encode('ab')) == 'ab'
  assert got.model.absent_ids == ((20, 40),)


@pytest.mark.parametrize('prepared', [prepare, prepare_policy])
def test_a_policy_without_a_tokenizer_is_refused(tmp_path, prepared):
  saved_policy(tmp_path / 'policy', 300)
  settings = experiment(tmp_path, policy__path=str(tmp_path / 'policy'))
  with pytest.raises(ConfigError) as error:
    prepared(settings)
  assert str(error.value) == (
      "config.tokenizer.path is '', and no tokenizer.json or tokenizer.model"
      f" lies with config.policy.path='{tmp_path}/policy', wanted the path of"
      ' the tokenizer that this policy was trained with'
  )
  if prepared is prepare:
    # What fits of it may go into a policy with a new tokenizer.
    settings.policy.load = 'matching'
    assert prepare(settings).tokenizer.vocab_size == ALPHABET


def test_the_vocabulary_is_the_tokenizers_padded_for_both_meshes(tmp_path):
  got = prepare(experiment(tmp_path))
  assert got.model.vocab_size == got.model.padded_vocab_size == ALPHABET
  got = prepare(
      experiment(
          tmp_path,
          policy__model=ModelConfig(width=48, heads=12, mlp_width=48),
          mesh__train__tensor=4,
          mesh__rollout__tensor=6,
      )
  )
  assert got.model.vocab_size == ALPHABET
  assert got.model.vocab_multiple == 12  # least common multiple of 4 and 6
  assert got.model.padded_vocab_size == 24


def test_a_published_policy_brings_its_shape_but_not_its_arithmetic(tmp_path):
  published = ModelConfig(
      vocab_size=ALPHABET + 2,
      width=16,
      layers=3,
      heads=2,
      kv_heads=1,
      head_size=8,
      mlp_width=24,
      max_length=64,
  )
  params = jax.tree.map(
      lambda p: np.zeros(p.shape, np.float32),
      parameters.abstract_params(published),
  )
  save_hf(tmp_path / 'policy', published, params)
  train_sentencepiece(texts(), tmp_path / 'policy/tokenizer.model')
  got = prepare(
      experiment(
          tmp_path,
          policy__path=str(tmp_path / 'policy'),
          policy__model=ModelConfig(
              layer_loop='scan', remat='full', compute_dtype='bfloat16'
          ),
      )
  ).model
  assert (got.width, got.layers, got.heads, got.kv_heads) == (16, 3, 2, 1)
  # Ids beyond the tokenizer's are kept, and never sampled.
  assert got.vocab_size == ALPHABET + 2
  assert got.absent_ids == ((ALPHABET, ALPHABET + 2),)
  assert (got.layer_loop, got.remat) == ('scan', 'full')
  assert got.compute_dtype == 'bfloat16'


def test_sampling_ends_at_the_stop_ids(tmp_path):
  got = prepare(
      experiment(tmp_path, rollout__stop_ids=(7,), rollout__temperature=0.7)
  )
  assert got.sampling.stop_ids == (*got.tokenizer.eos_ids, 7)
  assert got.sampling.temperature == 0.7
  assert got.sampling.max_new_tokens == 16
  assert got.evaluation_sampling.temperature == 0.0
  assert got.evaluation_sampling.stop_ids == got.sampling.stop_ids
  got = prepare(experiment(tmp_path, rollout__stop_at_eos=False))
  assert got.sampling.stop_ids == ()


def test_answers_that_nothing_can_end_have_to_be_meant(tmp_path):
  folder = tmp_path / 'tokenizer'
  folder.mkdir()
  model = tokenizers.models.WordLevel(
      {text: i for i, text in enumerate('0123456789+=;.')}, '0'
  )
  tokenizer = tokenizers.Tokenizer(model)
  tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split('', 'isolated')
  tokenizer.decoder = tokenizers.decoders.Fuse()  # no space between tokens
  tokenizer.save(str(folder / 'tokenizer.json'))
  opened = dict(tokenizer__path=str(folder), tokenizer__add_bos=False)
  with pytest.raises(
      ConfigError,
      match='rollout.stop_at_eos is True, wanted an id or a text .*special_tok',
  ):
    prepare(experiment(tmp_path, **opened))
  for ends in (
      dict(rollout__stop_at_eos=False),
      dict(rollout__stop_ids=(3,)),
      dict(rollout__stop_strings=('.',)),
  ):
    prepare(experiment(tmp_path, **opened, **ends))
  (folder / 'config.json').write_text('{"eos_token_id": 13}')
  assert prepare(experiment(tmp_path, **opened)).sampling.stop_ids == (13,)


@pytest.mark.parametrize('stop', [True, False])
def test_demonstrations_end_as_samples_do(tmp_path, stop):
  got = prepare(
      experiment(tmp_path, warm_start__steps=1, rollout__stop_at_eos=stop)
  )
  assert len(got.demonstrations) == 8
  for prompt, answer in got.demonstrations:
    assert got.tokenizer.decode(prompt)[-1] == '='
    assert got.tokenizer.decode(answer)[-1] == '.'
    assert (answer[-1] in got.tokenizer.eos_ids) == stop


def test_a_warm_start_that_is_off_asks_for_nothing(tmp_path):
  got = prepare(
      experiment(
          tmp_path,
          task__demonstrations='no_such_package:demonstrations',
          warm_start__packing__rows=3,
          mesh__train__fsdp=2,
      )
  )
  assert got.demonstrations == ()


@pytest.mark.parametrize(
    'slots, group, replicas, wanted',
    [
        (4, 2, 1, 3),  # 2 groups fill the slots, 1 waits at the door
        (4, 2, 2, 6),
        (4, 3, 1, 3),  # the second group has slots for one member
        (4, 8, 1, 2),
        (8, 2, 1, 6),  # half the slots wait at the door
    ],
)
def test_groups_under_way_fill_the_slots_and_some_wait(
    tmp_path, slots, group, replicas, wanted
):
  changes = dict(
      rollout__engine__slots=slots,
      rollout__group_size=group,
      mesh__rollout__replicas=replicas,
  )
  got = prepare(experiment(tmp_path, **changes))
  assert got.max_running == wanted
  got = prepare(experiment(tmp_path, rollout__max_running=5, **changes))
  assert got.max_running == 5


def test_the_folder_of_runs_may_not_exist_yet(tmp_path):
  folder = tmp_path / 'a' / 'b' / 'runs'
  assert prepare(experiment(folder)).settings.output == str(folder)


def test_eta_may_be_without_bound(tmp_path):
  got = prepare(experiment(tmp_path, rollout__eta=math.inf))
  assert got.settings.rollout.eta == math.inf


# Algorithms.


@pytest.mark.parametrize('name', sorted(PRESETS))
def test_an_algorithm_is_one_setting(tmp_path, name):
  settings = experiment(tmp_path)
  settings.rollout.eta = 1.0
  use_algorithm(settings, name)
  if name == 'distillation':
    with pytest.raises(ConfigError, match="reference_path is '', wanted a tea"):
      resolve(settings)
    settings.train.reference_path = 'teacher'
  got = resolve(settings)
  assert got.algorithm == name
  assert algorithm_changes(got) == []
  # A run writes what it means, so its file goes on without the preset.
  again = from_dict(Experiment, to_dict(got))
  assert to_dict(resolve(again)) == to_dict(got)


def test_changes_to_an_algorithm_are_told(tmp_path):
  settings = use_algorithm(experiment(tmp_path), 'dapo')
  assert settings.rollout.dynamic_sampling
  settings.train.loss.clip_high = 0.3
  settings.rollout.dynamic_sampling = False
  assert algorithm_changes(resolve(settings)) == [
      'train.loss.clip_high: 0.28 -> 0.3',
      'rollout.dynamic_sampling: True -> False',
  ]
  with pytest.raises(ConfigError, match="config.algorithm is 'x', wanted one"):
    use_algorithm(settings, 'x')
  settings.algorithm = 'dapoo'
  with pytest.raises(ConfigError, match="algorithm is 'dapoo', wanted one of"):
    resolve(settings)


GROUPED = AdvantageSettings()
ALONE = AdvantageSettings(
    sequences=Normalization(), tokens=Normalization('batch', 'batch')
)


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            dict(rollout__group_size=1, train__advantages=GROUPED),
            "advantages.sequences.mean is 'group'.*nothing to be compared",
        ),
        (
            dict(
                rollout__group_size=1,
                train__advantages=ALONE,
                rollout__dynamic_sampling=True,
            ),
            'dynamic_sampling is True, wanted False with group_size=1',
        ),
        (
            dict(rollout__eta=1.0, train__loss=PolicyLoss(weight_level='none')),
            "weight_level is 'none'.*rollout.eta=1: without a ratio",
        ),
        (
            dict(
                rollout__eta=2.0,
                train__loss=PolicyLoss(
                    objective='reinforce', proximal='behavior'
                ),
            ),
            "weight_level is 'token'.*other than 'behavior'",
        ),
        (
            dict(train__critic__warmup_steps=3),
            'warmup_steps is 3, wanted 0 without train.advantages.critic',
        ),
        (
            dict(rollout__dynamic_sampling_tries=0),
            'dynamic_sampling_tries is 0, wanted at least 1',
        ),
    ],
)
def test_parts_that_cannot_work_together_are_refused(tmp_path, changes, words):
  with pytest.raises(ConfigError, match=words):
    resolve(experiment(tmp_path, **changes))


def test_on_policy_runs_may_leave_the_weight_out(tmp_path):
  resolve(
      experiment(
          tmp_path,
          rollout__eta=0.0,
          train__loss=PolicyLoss(weight_level='none'),
      )
  )


@pytest.mark.parametrize(
    ('changes', 'words'),
    [
        (
            dict(
                train__loss=PolicyLoss(
                    ratio_level='sequence',
                    weight_rules=(WeightRule(action='clamp', upper=2.0),),
                )
            ),
            'what is cut from one token is made up by the others',
        ),
        (
            dict(rollout__dynamic_sampling=True, train__advantages=ALONE),
            'advantages compare with the batch',
        ),
        (
            dict(rollout__eta=0.0, rollout__exact=True),
            'prompts took 2.0 to 3.3 times as long',
        ),
    ],
)
def test_what_is_hardly_meant_is_told_with_its_reason(tmp_path, changes, words):
  settings = resolve(experiment(tmp_path, **changes))
  (caution,) = cautions(settings)
  assert words in caution
  assert cautions(resolve(experiment(tmp_path))) == []


def test_exact_bits_need_eta_zero(tmp_path):
  exact = resolve(experiment(tmp_path, rollout__eta=0.0, rollout__exact=True))
  assert exact.rollout.exact and exact.rollout.synchronous
  words = r'rollout.exact is True, wanted False with config.rollout.eta=1, or'
  with pytest.raises(ConfigError, match=words):
    resolve(experiment(tmp_path, rollout__eta=1.0, rollout__exact=True))


def test_each_meaning_of_eta_zero_has_a_name(tmp_path):
  apart = resolve(experiment(tmp_path, rollout__eta=0.0))
  assert apart.rollout.synchronous and apart.rollout.takes_turns
  assert not apart.rollout.exact and not apart.memory_by_phases
  shared = dict(mesh__colocated=True)
  assert resolve(
      experiment(tmp_path, rollout__eta=0.0, **shared)
  ).memory_by_phases
  ahead = resolve(experiment(tmp_path, rollout__eta=0.5, **shared))
  assert not ahead.rollout.synchronous and not ahead.rollout.takes_turns
  assert not ahead.memory_by_phases


def test_checkpoints_that_nobody_rates_are_told(tmp_path):
  def told(metric, saves, evaluates):
    return cautions(
        resolve(
            experiment(
                tmp_path,
                steps=30,
                checkpoint__keep_best=metric,
                checkpoint__every=saves,
                evaluation__every=evaluates,
            )
        )
    )

  (line,) = told('eval_accuracy', 4, 10)  # 4, 8, .., 28 and 30: 20 and 30
  assert 'can choose among 2 of 8 checkpoints' in line
  assert 'checkpoint.every is 4 and evaluation.every 10' in line
  (line,) = told('eval_accuracy', 10, 0)
  assert 'among 1 of 3' in line
  assert told('eval_accuracy', 10, 5) == []
  assert told('eval_accuracy', 0, 0) == []  # the last one alone, evaluated
  assert told('reward_mean', 4, 10) == []
