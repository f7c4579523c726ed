"""Serves Tunix's own train step to benchmarks/train.py; see there.

Runs in an environment that has google-tunix 0.1.7, and needs nothing of this
project. The step is that of its GRPO learner: `RLCluster.update_actor` on a
batch padded to the limits of prompt and answer, as its rollout hands it over.
"""

import json
import os
import sys
import time

# What libraries print must not mix with the answers.
ANSWERS = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)

from flax import nnx  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from tunix.rl import common, rl_cluster  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402
from tunix_parts import Characters, build  # noqa: E402


def cluster_of(shape, work):
  """Actor and trainer for batches of this size, all on one device."""
  device = np.array(jax.devices()[:1]).reshape(1, 1)
  mesh = jax.sharding.Mesh(device, ('fsdp', 'tp'))
  batch, prompt = len(work['prompts']), len(work['prompts'][0])
  roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE,
           rl_cluster.Role.ROLLOUT)  # fmt: skip
  groups = batch // work['group']
  cluster = rl_cluster.RLCluster(
      actor=build(shape, even=False),
      reference=None,
      tokenizer=Characters(),
      cluster_config=rl_cluster.ClusterConfig(
          role_to_mesh=dict.fromkeys(roles, mesh),
          rollout_engine='vanilla',
          training_config=rl_cluster.RLTrainingConfig(
              actor_optimizer=optax.chain(
                  optax.clip_by_global_norm(1.0), optax.adamw(1e-5)
              ),
              eval_every_n_steps=10**9,
              max_steps=10**9,
              mini_batch_size=groups,
              train_micro_batch_size=groups,
              rollout_micro_batch_size=groups,
              compute_logps_micro_batch_size=groups,
          ),
          rollout_config=base_rollout.RolloutConfig(
              max_tokens_to_generate=work['limit'],
              max_prompt_length=prompt,
              kv_cache_size=prompt + work['limit'],
          ),
      ),
  )
  # It gives the cluster its loss.
  grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      algo_config=grpo_learner.GRPOConfig(
          num_generations=work['group'],
          num_iterations=1,
          beta=0.0,
          epsilon=0.2,
      ),
      reward_fns=lambda prompts, completions, **_: [0.0] * len(prompts),
  )
  return cluster


def example(work):
  """The batch, answers padded to the limit."""
  answers, limit = work['answers'], work['limit']
  ids = np.zeros((len(answers), limit), np.int32)
  for row, answer in enumerate(answers):
    ids[row, : len(answer)] = answer
  lengths = np.array([len(answer) for answer in answers])
  prompts = np.asarray(work['prompts'], np.int32)
  return common.TrainExample(
      prompt_ids=jnp.asarray(prompts),
      prompt_mask=jnp.ones(prompts.shape, bool),
      completion_ids=jnp.asarray(ids),
      completion_mask=jnp.asarray(np.arange(limit) < lengths[:, None]),
      advantages=jnp.asarray(work['advantages'], jnp.float32),
      ref_per_token_logps=None,
      old_per_token_logps=None,
  )


def main():
  """One line of JSON in, one out, until there are no more."""
  shape, clusters = json.loads(sys.argv[1]), {}
  for line in sys.stdin:
    work = json.loads(line)
    size = (len(work['prompts']), len(work['prompts'][0]), work['limit'])
    if size not in clusters:
      clusters[size] = cluster_of(shape, work)
    cluster = clusters[size]
    start = time.perf_counter()
    cluster.update_actor([example(work)], None)
    jax.block_until_ready(
        jax.tree.leaves(nnx.state(cluster.actor_trainer.model))
    )
    seconds = time.perf_counter() - start
    tokens = sum(map(len, work['answers']))
    print(json.dumps({'seconds': seconds, 'tokens': tokens}), file=ANSWERS)
    ANSWERS.flush()


if __name__ == '__main__':
  main()
