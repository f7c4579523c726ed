"""Checks of a setup that is right, and of one that is wrong in one thing."""

import dataclasses
import io
import json

import pytest
import sentencepiece

from areal_jax.doctor import setup
from areal_jax.doctor.verdict import Verdict, judge
from areal_jax.prepare.prepared import prepare
from areal_jax.rollout.memory import Estimate as RolloutEstimate
from areal_jax.train.memory import Estimate as TrainEstimate
from tests.small_experiment import experiment


def by_name(verdicts):
  return {verdict.name: verdict for verdict in verdicts}


def test_verdict_is_a_line_and_advice_where_it_failed():
  assert str(judge('a', True, 'said', 'do')) == 'ok    a: said'
  assert str(judge('a', False, 'said', 'do')) == (
      'fail  a: said\n      advice: do'
  )
  assert str(Verdict('a', 'skip', 'why')) == 'skip  a: why'


def test_sound_setup_has_no_failure(tmp_path):
  prepared = prepare(experiment(tmp_path))
  verdicts = [
      *setup.environment(prepared),
      *setup.devices(prepared),
      *setup.data(prepared),
      *setup.tokenizer(prepared),
      setup.reward(prepared),
      *setup.arithmetic(prepared),
      *setup.memory(prepared),
  ]
  failed = [str(v) for v in verdicts if v.status == 'fail']
  assert not failed
  assert not list(tmp_path.iterdir())  # nothing was written
  assert 'of 8 gold answers score above' in by_name(verdicts)['reward'].said


@pytest.mark.parametrize(
    'changes, check, name, advice',
    [
        (
            {'reward__function': 'tests.rewards.test_self_test:always_1'},
            'reward',
            'reward',
            'always_1: totals/train/0',
        ),
        (
            {'reward__function': 'tests.session_rewards:always_raises'},
            'reward',
            'reward',
            'the verifier is not installed',
        ),
        (
            {'rollout__stop_at_eos': False},
            'tokenizer',
            'end of answers',
            'stop_at_eos',
        ),
        (
            {'rollout__max_new_tokens': 2},
            'tokenizer',
            'length of answers',
            'max_new_tokens above',
        ),
        (
            {'rollout__eta': 0.0, 'rollout__engine__slots': 64},
            'arithmetic',
            'slots',
            'at most 8 slots',
        ),
    ],
)
def test_what_is_wrong_fails_with_advice(
    changes, check, name, advice, tmp_path
):
  prepared = prepare(experiment(tmp_path, **changes))
  found = getattr(setup, check)(prepared)
  verdicts = [found] if isinstance(found, Verdict) else list(found)
  verdict = by_name(verdicts)[name]
  assert verdict.status == 'fail' and advice in verdict.advice


def composing(path):
  """A tokenizer of sums that composes characters (NFKC)."""
  model = io.BytesIO()
  sentencepiece.SentencePieceTrainer.Train(
      sentence_iterator=iter(['0123456789+=;.']),
      model_writer=model,
      model_type='char',
      vocab_size=18,
      character_coverage=1.0,
      normalization_rule_name='nmt_nfkc',
      add_dummy_prefix=False,
      minloglevel=2,
  )
  path.write_bytes(model.getvalue())
  return str(path)


def test_prompts_are_tried_as_well_as_answers(tmp_path):
  rows = [
      {'id': f'{i}', 'prompt': f'{i}+1=', 'answer': f'{i + 1}.'}
      for i in range(4)
  ]
  rows[1]['prompt'] = '1\uff0b1='  # a plus of full width
  rows[2]['answer'] = 'three.'
  path = tmp_path / 'sums.jsonl'
  path.write_text('\n'.join(json.dumps(row) for row in rows))
  prepared = prepare(
      experiment(
          tmp_path,
          task__train_file=str(path),
          tokenizer__path=composing(tmp_path / 'nfkc.model'),
      )
  )
  found = by_name(setup.tokenizer(prepared))
  assert found['tokenizer'].status == 'fail'
  assert (
      '7 of 8 prompts and 3 of 4 gold answers come back from their token ids,'
      " not that of '2': 'three.' comes back as"
  ) in found['tokenizer'].said
  assert found['changed prompts'].status == 'look'
  assert found['changed prompts'].said == (
      'the tokenizer changes 1 of 8 prompts, such as that of'
      " '1': '1\uff0b1=' comes back as '1+1='"
  )


def test_phases_that_take_turns_are_counted_apart():
  trains = TrainEstimate({'policy': 300}, gradients=100, offloaded=200)
  generates = RolloutEstimate(50, 2, 1_000, 1)
  assert setup.at_once(trains, generates, colocated=False) == {
      'training': 400, 'generation': 1_100,
  }  # fmt: skip
  assert setup.at_once(trains, generates, colocated=True) == {
      'training and generation': 1_500,
  }  # fmt: skip
  generates = dataclasses.replace(generates, turns=True)
  assert setup.at_once(trains, generates, colocated=True) == {
      'training': 400 + 50,  # the weights that generate next are there
      'generation': 100 + 1_050,  # moments are not
  }


def test_whether_phases_take_turns_is_said_by_mesh_and_eta(tmp_path):
  shared = dict(mesh__colocated=True)
  apart = prepare(experiment(tmp_path, rollout__eta=0.0, **shared))
  assert [v.name for v in setup.memory(apart)] == [
      'memory of training', 'memory of generation', 'memory of the host',
  ]  # fmt: skip
  together = prepare(experiment(tmp_path, rollout__eta=2.0, **shared))
  assert next(setup.memory(together)).name == (
      'memory of training and generation'
  )


def test_too_few_devices_fail(tmp_path):
  prepared = prepare(experiment(tmp_path, mesh__rollout__replicas=99))
  (verdict,) = setup.devices(prepared)
  assert verdict.status == 'fail' and '100 wanted' in verdict.said


def test_prompts_that_a_template_gets_wrong_are_looked_at(tmp_path):
  prepared = prepare(experiment(tmp_path))
  assert by_name(setup.tokenizer(prepared))['prompts'].status == 'ok'
  rows = [
      {'id': str(i), 'prompt': [{'role': 'user', 'content': f'{i}='}],
       'answer': f'{i}.'}
      for i in range(12)
  ]  # fmt: skip
  for name, part in (('train', rows[:8]), ('eval', rows[8:])):
    lines = '\n'.join(map(json.dumps, part))
    (tmp_path / f'{name}.jsonl').write_text(lines)
  prepared = prepare(
      experiment(
          tmp_path,
          task__train_file=str(tmp_path / 'train.jsonl'),
          task__eval_file=str(tmp_path / 'eval.jsonl'),
          tokenizer__chat_template='{% for m in messages %}{{ m.content }};'
          '{% endfor %}',
      )
  )
  verdict = by_name(setup.tokenizer(prepared))['prompts']
  assert verdict.status == 'look'
  assert "ends an answer with ';', which is no stop" in verdict.said
  assert any('which is no stop' in caution for caution in prepared.cautions)
