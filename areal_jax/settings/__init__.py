"""Settings of a run: everything that an experiment file needs, in one place.

  from areal_jax.settings import Experiment, RolloutSettings, TaskSettings

Each class lives beside the code that it sets up. This file only gathers them,
so that an experiment file has one import.
"""

from areal_jax.data.sources import SourceSettings
from areal_jax.losses.advantages import (
    AdvantageSettings,
    LengthPenalty,
    Normalization,
)
from areal_jax.losses.importance import WeightRule
from areal_jax.losses.policy import PolicyLoss
from areal_jax.losses.value import ValueLoss
from areal_jax.mesh.slices import MeshSettings, RolloutMesh, TrainMesh
from areal_jax.models.config import (
    AttentionSettings,
    LoraSettings,
    ModelConfig,
    MoeSettings,
    RopeScaling,
)
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.rollout.failures import FailureSettings
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.settings.algorithm import use_algorithm
from areal_jax.settings.experiment import Experiment
from areal_jax.settings.rollout import RolloutSettings
from areal_jax.settings.task import (
    PolicySettings,
    TaskSettings,
    TokenizerSettings,
)
from areal_jax.telemetry.profiling import ProfilingSettings
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.critic import CriticSettings
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from areal_jax.train.supervised import WarmStartSettings

__all__ = [
    'AdvantageSettings',
    'AttentionSettings',
    'CheckpointSettings',
    'CriticSettings',
    'EngineSettings',
    'EvaluationSettings',
    'Experiment',
    'FailureSettings',
    'LengthPenalty',
    'LoraSettings',
    'MeshSettings',
    'ModelConfig',
    'MoeSettings',
    'Normalization',
    'OptimizerSettings',
    'PackingSettings',
    'PolicyLoss',
    'PolicySettings',
    'ProfilingSettings',
    'RewardSettings',
    'RolloutMesh',
    'RolloutSettings',
    'RopeScaling',
    'SamplingFeatures',
    'SourceSettings',
    'TaskSettings',
    'TokenizerSettings',
    'TrainMesh',
    'TrainSettings',
    'ValueLoss',
    'WarmStartSettings',
    'WeightRule',
    'use_algorithm',
]
