"""Runs Tunix's GRPO loop for benchmarks/loop.py; see there.

Runs in an environment that has google-tunix 0.1.7, and needs nothing of this
project. The policy is Qwen2 of random weights but for its unembedding, which is
0: every token is as likely as any other. Loop, sampler and step are those of
its GRPO learner, all on one device.
"""

import json
import os
import sys
import time
import zlib

# What libraries print must not mix with the answer.
ANSWERS = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)

from flax import nnx  # noqa: E402
import jax  # noqa: E402
import numpy as np  # noqa: E402
import optax  # noqa: E402
from tunix.rl import rl_cluster  # noqa: E402
from tunix.rl.grpo import grpo_learner  # noqa: E402
from tunix.rl.rollout import base_rollout  # noqa: E402
from tunix_parts import Characters, build  # noqa: E402


def reward(prompts, completions, **_):
  """A coin for each answer, of its text."""
  del prompts
  return [float(zlib.crc32(text.encode()) % 2) for text in completions]


def cluster_of(shape, work):
  """Actor, sampler and trainer on one device."""
  device = np.array(jax.devices()[:1]).reshape(1, 1)
  mesh = jax.sharding.Mesh(device, ('fsdp', 'tp'))
  roles = (rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE,
           rl_cluster.Role.ROLLOUT)  # fmt: skip
  steps, groups, prompt = np.shape(work['prompts'])
  return rl_cluster.RLCluster(
      actor=build(shape, even=True),
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
              max_steps=steps,
              mini_batch_size=groups,
              train_micro_batch_size=groups,
              rollout_micro_batch_size=groups,
              compute_logps_micro_batch_size=groups,
          ),
          rollout_config=base_rollout.RolloutConfig(
              max_tokens_to_generate=work['limit'],
              max_prompt_length=prompt,
              kv_cache_size=prompt + work['limit'],
              temperature=1.0,
              top_p=1.0,
              # A stop id that does not exist ends nothing.
              eos_tokens=work['stop_ids'] or [shape['vocab_size']],
          ),
      ),
  )


def main():
  """One line of JSON in, one out."""
  start = time.perf_counter()
  shape, work = json.loads(sys.argv[1]), json.loads(sys.stdin.readline())
  cluster = cluster_of(shape, work)
  learner = grpo_learner.GRPOLearner(
      rl_cluster=cluster,
      algo_config=grpo_learner.GRPOConfig(
          num_generations=work['group'],
          num_iterations=1,
          beta=0.0,
          epsilon=0.2,
      ),
      reward_fns=reward,
  )
  begun, tokens = [], []
  generate, settings = cluster.generate, cluster.cluster_config.rollout_config

  def noted(*args, **kwargs):
    settings.seed = len(begun)  # it would draw the same answers every time
    out = generate(*args, **kwargs)
    # A stop id ends an answer and belongs to it; they are left out here.
    tokens.append(sum(min(len(i) + 1, work['limit']) for i in out.tokens))
    return out

  def batches():
    for prompts in work['prompts']:
      begun.append(time.perf_counter())
      texts = [Characters().decode(prompt) for prompt in prompts]
      yield {'prompts': np.array(texts)}

  cluster.generate = noted
  learner.train(batches())
  jax.block_until_ready(jax.tree.leaves(nnx.state(cluster.actor_trainer.model)))
  ends = [*begun[1 : len(tokens)], time.perf_counter()]
  steps = [[b - a, n] for a, b, n in zip(ends, ends[1:], tokens[1:])]
  print(json.dumps({'first': ends[0] - start, 'steps': steps}), file=ANSWERS)
  ANSWERS.flush()


if __name__ == '__main__':
  main()
