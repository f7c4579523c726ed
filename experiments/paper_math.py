"""The recipe of the AReaL paper: mathematics, long answers, η = 8.

  python -m areal_jax.run --config=experiments/paper_math.py:1.5B \
    --config.policy.path=DeepSeek-R1-Distill-Qwen-1.5B \
    --config.tokenizer.path=DeepSeek-R1-Distill-Qwen-1.5B \
    --config.task.train_sources[0].path=deepscaler.jsonl \
    --config.task.eval_sources[0].path=aime24.jsonl

Variants 1.5B (the default) and 7B. Numbers are those of the paper's section 7.1
and its Table 3 (https://arxiv.org/abs/2505.24298): 512 problems a step with 16
answers each, prompts up to 1,024 tokens and answers up to 27,648, 4 minibatches
a step, Adam at 2e-5 (β 0.9 and 0.95, ε 1e-5, decay 0.05), gradients clipped at
1, ε = 0.2, +5 and -5 for right and wrong answers, advantages normalised over
the batch, no critic and no reference, a quarter of the devices training. The
data are DeepScaleR (https://huggingface.co/datasets/agentica-org/DeepScaleR-Preview-Dataset,
MIT) and AIME 2024 as JSON lines with columns `problem` and `answer`.

What is ours: bfloat16 where the paper has float16, with float32 parameters;
and the machine, a v5p slice of 64 chips (1.5B) or 128 (7B), where it has 128
and 192 H800. It has been compiled for these, and not been run: no such machine
was at hand. docs/scale.md has what they and others would need.

  python -m areal_jax.compile_check --config=experiments/paper_math.py:7B \
    --topology=v5p:4x4x8
"""

from areal_jax.config import require
from areal_jax.settings import (
    CheckpointSettings,
    EngineSettings,
    EvaluationSettings,
    Experiment,
    MeshSettings,
    ModelConfig,
    OptimizerSettings,
    PackingSettings,
    PolicySettings,
    RewardSettings,
    RolloutMesh,
    RolloutSettings,
    SourceSettings,
    TaskSettings,
    TokenizerSettings,
    TrainMesh,
    TrainSettings,
    use_algorithm,
)

_QUESTION = (
    '{prompt}\nPlease reason step by step, and put your final answer within'
    ' \\boxed{}.'
)
_PROMPT, _ANSWER = 1024, 27_648
# Chips that train, chips that generate, and pages of 64 tokens on each of the
# latter: as many as fit beside two versions of the weights, twice over, since
# an evaluation beside training (evaluation.every) has a cache of its own.
_MACHINES = {'1.5B': (16, 48, 12_288), '7B': (32, 96, 4096)}


def _source(path: str) -> SourceSettings:
  return SourceSettings(
      path=path,
      form='columns',
      prompt='problem',
      answer='answer',
      chat=True,
      template=_QUESTION,
  )


def get_config(size: str = '1.5B') -> Experiment:
  require(size in _MACHINES, 'the variant of paper_math.py', size,
          f'one of {[*_MACHINES]}')  # fmt: skip
  model = f'DeepSeek-R1-Distill-Qwen-{size}'
  train, rollout, pages = _MACHINES[size]
  experiment = Experiment(
      name=f'paper-math-{size}',
      steps=250,
      task=TaskSettings(
          train_sources=(_source('deepscaler.jsonl'),),
          eval_sources=(_source('aime24.jsonl'),),
          too_long='drop',
      ),
      tokenizer=TokenizerSettings(path=model),
      policy=PolicySettings(
          path=model,
          model=ModelConfig(
              layer_loop='scan', compute_dtype='bfloat16', remat='full'
          ),
      ),
      mesh=MeshSettings(
          train=TrainMesh(fsdp=train), rollout=RolloutMesh(replicas=rollout)
      ),
      reward=RewardSettings('areal_jax.rewards.math:correct', workers=32),
      rollout=RolloutSettings(
          batch_size=512,
          group_size=16,
          eta=8.0,
          temperature=1.0,
          max_new_tokens=_ANSWER,
          dtype='bfloat16',
          wait_s=7200.0,
          engine=EngineSettings(
              slots=64,
              max_length=_PROMPT + _ANSWER,
              max_prompt_length=_PROMPT,
              page_size=64,
              pages=pages,
              steps=32,
              chunk=2048,
          ),
      ),
      train=TrainSettings(
          # The paper's budget of a microbatch, 32,768 tokens a device: one row
          # each, so there are no fewer to declare.
          packing=PackingSettings(row_tokens=32_768, rows=train),
          minibatches=4,
          optimizer=OptimizerSettings(
              learning_rate=2e-5,
              warmup_steps=1,  # 0.001 of 250 · 4 updates
              beta1=0.9,
              beta2=0.95,
              epsilon=1e-5,
              weight_decay=0.05,
              gradient_clip=1.0,
          ),
      ),
      evaluation=EvaluationSettings(
          samples=32,
          temperature=1.0,
          vote='areal_jax.rewards.math:final_answer',
      ),
      checkpoint=CheckpointSettings(every=10),
  )
  use_algorithm(experiment, 'decoupled_ppo')
  # 1 and 0 of the verifier become 5 and -5.
  experiment.train.advantages.reward_bias = -0.5
  experiment.train.advantages.reward_scale = 10.0
  return experiment
