"""Running totals: a policy learns to finish its sums, on a laptop.

  ./quickstart.sh
  python -m areal_jax.run --config=experiments/quickstart.py

Two to six one-digit numbers in, every running total out ('3+5+7=' ->
'8;15.'). A policy of 0.2 M parameters is warm-started on demonstrations of
which more than half stop one total too early. It has learnt the arithmetic and
a bad habit; reinforcement learning, asynchronous on two slices, breaks the
habit. Nothing is downloaded. Figures: docs/results/.

The same file runs on a TPU or GPU machine: its first device trains, its second
generates.
"""

from areal_jax.settings import (
    CheckpointSettings,
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
    TaskSettings,
    TrainSettings,
    WarmStartSettings,
)


def get_config() -> Experiment:
  return Experiment(
      name='quickstart',
      steps=150,
      checkpoint=CheckpointSettings(every=50),
      task=TaskSettings(
          problems='areal_jax.data.running_totals:problems',
          texts='areal_jax.data.running_totals:texts',
          demonstrations='areal_jax.data.running_totals:habitual',
          train_problems=2048,
          eval_problems=256,
          demonstration_count=60_000,
      ),
      reward=RewardSettings('areal_jax.rewards.running_totals:exact'),
      policy=PolicySettings(
          model=ModelConfig(
              width=96,
              layers=2,
              heads=4,
              kv_heads=4,
              head_size=24,
              mlp_width=256,
              max_length=64,
          )
      ),
      warm_start=WarmStartSettings(
          steps=3000,
          batch=64,
          learning_rate=3e-3,
          packing=PackingSettings(row_tokens=96, rows=14),
      ),
      rollout=RolloutSettings(
          batch_size=16,
          group_size=8,
          eta=2.0,
          max_new_tokens=18,
          engine=EngineSettings(
              slots=48,
              max_length=32,
              max_prompt_length=14,
              page_size=8,
              steps=1,
          ),
      ),
      evaluation=EvaluationSettings(every=25),
      train=TrainSettings(
          packing=PackingSettings(row_tokens=96, rows=28),
          loss=PolicyLoss(clip=0.2),
          optimizer=OptimizerSettings(
              learning_rate=7e-5,
              schedule='linear',
              total_steps=150,
              weight_decay=0.0,
              epsilon=1e-8,
          ),
      ),
  )
