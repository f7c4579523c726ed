"""Serves Tunix's own sampler to benchmarks/generate.py; see there.

Runs in an environment that has google-tunix 0.1.7, and needs nothing of this
project. The policy is Qwen2 of random weights but for its unembedding, which is
0: every token is as likely as any other.
"""

import json
import os
import sys
import time

# What libraries print must not mix with the answers.
ANSWERS = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)

from tunix.generate import sampler  # noqa: E402
from tunix_parts import Characters, build  # noqa: E402


def build_sampler(shape, model, length):
  """A sampler whose cache holds so many tokens a row."""
  return sampler.Sampler(
      model,
      Characters(),
      sampler.CacheConfig(
          cache_size=length,
          num_layers=shape['layers'],
          num_kv_heads=shape['kv_heads'],
          head_dim=shape['head_size'],
      ),
  )


def generate(sample, shape, work, seed):
  """Answers prompts of one length in batches; sampled tokens."""
  tokens = 0
  # A stop id that does not exist ends nothing.
  stop_ids = work['stop_ids'] or [shape['vocab_size']]
  for i, batch in enumerate(work['batches']):
    out = sample(
        [Characters().decode(prompt) for prompt in batch],
        max_generation_steps=work['limit'],
        max_prompt_length=len(batch[0]),
        temperature=1.0,
        top_p=1.0,
        eos_tokens=stop_ids,
        seed=seed + i,
    )
    # A stop id ends an answer and belongs to it; they are left out here.
    tokens += sum(min(len(ids) + 1, work['limit']) for ids in out.tokens)
  return tokens


def main():
  """One line of JSON in, one out, until there are no more."""
  shape = json.loads(sys.argv[1])
  model, samplers = build(shape, even=True), {}
  for call, line in enumerate(sys.stdin):
    work = json.loads(line)
    length = len(work['batches'][0][0]) + work['limit']
    if length not in samplers:
      samplers[length] = build_sampler(shape, model, length)
    start = time.perf_counter()
    tokens = generate(samplers[length], shape, work, 1000 * call)
    seconds = time.perf_counter() - start
    print(json.dumps({'seconds': seconds, 'tokens': tokens}), file=ANSWERS)
    ANSWERS.flush()


if __name__ == '__main__':
  main()
