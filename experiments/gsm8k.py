"""Grade-school mathematics with an instruct model of 1.5 billion parameters.

  python -m areal_jax.run --config=experiments/gsm8k.py \
    --config.policy.path=Qwen2.5-1.5B-Instruct \
    --config.tokenizer.path=Qwen2.5-1.5B-Instruct \
    --config.task.train_sources[0].path=gsm8k_train.jsonl \
    --config.task.eval_sources[0].path=gsm8k_test.jsonl

The policy is a Hugging Face folder of the Qwen2, Qwen3 or Llama family with its
tokenizer in it (smaller ones: Qwen2.5-0.5B-Instruct, SmolLM2-360M-Instruct);
the data are the two files of https://github.com/openai/grade-school-math (MIT).
Questions go through the tokenizer's chat template; the reward is 1 for a right
number in the last box, by `math-verify`, and 0 otherwise.

Meant for one host with 8 accelerators of 16 GB or more, a TPU v5e-8 or 8 GPUs:
4 train, 4 generate. It has been compiled for both, and not been run to an end:
docs/results/ holds no figure of it.

  python -m areal_jax.compile_check --config=experiments/gsm8k.py \
    --topology=v5e:2x4
"""

from areal_jax.settings import (
    EngineSettings,
    EvaluationSettings,
    Experiment,
    MeshSettings,
    ModelConfig,
    OptimizerSettings,
    PackingSettings,
    PolicyLoss,
    PolicySettings,
    RewardSettings,
    RolloutMesh,
    RolloutSettings,
    SourceSettings,
    TaskSettings,
    TokenizerSettings,
    TrainMesh,
    TrainSettings,
)

_QUESTION = (
    '{prompt}\nReason step by step, and put your final answer within \\boxed{}.'
)


def _source(path: str, limit: int = 0) -> SourceSettings:
  return SourceSettings(
      path=path, form='gsm8k', chat=True, template=_QUESTION, limit=limit
  )


def get_config() -> Experiment:
  return Experiment(
      name='gsm8k',
      steps=200,
      task=TaskSettings(
          train_sources=(_source('gsm8k_train.jsonl'),),
          eval_sources=(_source('gsm8k_test.jsonl', limit=256),),
          too_long='drop',
      ),
      tokenizer=TokenizerSettings(
          path='Qwen2.5-1.5B-Instruct',
          chat_variables={
              'enable_thinking': False
          },  # Qwen3's; others ignore it
      ),
      policy=PolicySettings(
          path='Qwen2.5-1.5B-Instruct',
          model=ModelConfig(
              layer_loop='scan', compute_dtype='bfloat16', remat='full'
          ),
      ),
      mesh=MeshSettings(
          train=TrainMesh(fsdp=4), rollout=RolloutMesh(replicas=4)
      ),
      reward=RewardSettings('areal_jax.rewards.math:correct', workers=4),
      rollout=RolloutSettings(
          batch_size=64,
          group_size=8,
          eta=2.0,
          temperature=1.0,
          max_new_tokens=512,
          dtype='bfloat16',
          engine=EngineSettings(
              slots=64,
              max_length=768,
              max_prompt_length=256,
              page_size=64,
              steps=16,
          ),
      ),
      train=TrainSettings(
          # An update's 128 answers fill some 23 rows, which two microbatches of
          # 16 would hold with a quarter of padding.
          packing=PackingSettings(row_tokens=2048, rows=16, fewer=(4,)),
          minibatches=4,
          loss=PolicyLoss(clip=0.2),
          optimizer=OptimizerSettings(
              learning_rate=1e-6, warmup_steps=20, weight_decay=0.01
          ),
      ),
      evaluation=EvaluationSettings(
          samples=1, vote='areal_jax.rewards.math:final_answer'
      ),
  )
