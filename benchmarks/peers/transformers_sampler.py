"""Serves `transformers`' generate to benchmarks/generate.py; see there.

Runs in an environment that has torch and transformers, and needs nothing of
this project. The policy is Qwen2 of random weights but for its unembedding,
which is 0: every token is as likely as any other.
"""

import json
import os
import sys
import time

os.environ.setdefault('HF_HUB_OFFLINE', '1')
# What libraries print must not mix with the answers.
ANSWERS = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)

import torch  # noqa: E402
from torch_parts import build  # noqa: E402


def generate(model, work):
  """Answers prompts of one length in batches; sampled tokens."""
  tokens = 0
  stop_ids = work['stop_ids'] or None
  for batch in work['batches']:
    prompts = torch.tensor(batch)
    with torch.no_grad():
      out = model.generate(
          input_ids=prompts,
          attention_mask=torch.ones_like(prompts),
          max_new_tokens=work['limit'],
          do_sample=True,
          temperature=1.0,
          top_k=0,
          top_p=1.0,
          eos_token_id=stop_ids,
          pad_token_id=0,
      )
    new = out[:, prompts.shape[1] :]
    stops = torch.isin(new, torch.tensor(stop_ids or [-1]))
    # A stop id ends an answer and belongs to it.
    tokens += int((stops.int().cumsum(1) - stops.int() == 0).sum())
  return tokens


def main():
  """One line of JSON in, one out, until there are no more."""
  shape = json.loads(sys.argv[1])
  model = build(shape, even=True).eval()
  for line in sys.stdin:
    work = json.loads(line)
    start = time.perf_counter()
    tokens = generate(model, work)
    seconds = time.perf_counter() - start
    print(json.dumps({'seconds': seconds, 'tokens': tokens}), file=ANSWERS)
    ANSWERS.flush()


if __name__ == '__main__':
  main()
