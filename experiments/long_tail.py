"""Counting: answers of 6 to 123 tokens, most of them short.

  python -m areal_jax.run --config=experiments/long_tail.py

A policy of 0.2 M parameters counts from one number to another ('37-40=' ->
'37;38;39;40.'). How far is drawn from a law with a long tail, so that a few
answers are ten times as long as the median: what a synchronous step waits for.
The warm start teaches most of it; reinforcement learning, at a rate so low that
lengths stay as they are, then goes on. The experiment is there to be timed, by
`python -m benchmarks.async_vs_sync`. Figures: docs/results/.
"""

from areal_jax.settings import (
    EngineSettings,
    EvaluationSettings,
    Experiment,
    ModelConfig,
    OptimizerSettings,
    PackingSettings,
    PolicySettings,
    RewardSettings,
    RolloutSettings,
    TaskSettings,
    TrainSettings,
    WarmStartSettings,
)


def get_config() -> Experiment:
  return Experiment(
      name='long_tail',
      steps=60,
      task=TaskSettings(
          problems='areal_jax.data.counting:problems',
          texts='areal_jax.data.counting:texts',
          demonstrations='areal_jax.data.counting:demonstrations',
          train_problems=2048,
          eval_problems=64,
          demonstration_count=20_000,
      ),
      # Of any task whose answer is one text.
      reward=RewardSettings('areal_jax.rewards.running_totals:exact'),
      policy=PolicySettings(
          model=ModelConfig(
              width=96,
              layers=2,
              heads=4,
              kv_heads=4,
              head_size=24,
              mlp_width=256,
              max_length=144,
          )
      ),
      warm_start=WarmStartSettings(
          steps=500,
          batch=64,
          learning_rate=4e-3,
          packing=PackingSettings(row_tokens=144, rows=14),
      ),
      rollout=RolloutSettings(
          batch_size=16,
          group_size=8,
          eta=1.0,
          max_new_tokens=128,
          engine=EngineSettings(
              slots=64,
              max_length=144,
              max_prompt_length=12,
              page_size=16,
              steps=4,
          ),
      ),
      train=TrainSettings(
          packing=PackingSettings(row_tokens=144, rows=8),
          optimizer=OptimizerSettings(
              learning_rate=1e-5, weight_decay=0.0, epsilon=1e-8
          ),
      ),
      evaluation=EvaluationSettings(samples=1),
  )
