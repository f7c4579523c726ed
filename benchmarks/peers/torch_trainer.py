"""Serves a torch train step to benchmarks/train.py; see there.

Runs in an environment that has torch and transformers, and needs nothing of
this project. What TRL's trainer computes for a batch, without its bookkeeping:
a padded forward pass, the clipped objective with its centre at the policy
itself, gradient, clipping and AdamW.
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


def padded(sequences, longest):
  """[B, T] ids and a mask of what is real."""
  ids = torch.zeros(len(sequences), longest, dtype=torch.long)
  real = torch.zeros(len(sequences), longest, dtype=torch.long)
  for row, sequence in enumerate(sequences):
    ids[row, : len(sequence)] = torch.tensor(sequence)
    real[row, : len(sequence)] = 1
  return ids, real


def update(model, optimizer, work):
  """One update; answer tokens trained."""
  prompt = len(work['prompts'][0])  # all prompts are equally long
  longest = max(map(len, work['answers']))
  ids, real = padded(
      [p + a for p, a in zip(work['prompts'], work['answers'])],
      prompt + longest,
  )
  advantages = torch.tensor(work['advantages'])[:, None]
  logits = model(input_ids=ids, attention_mask=real, use_cache=False).logits
  logps = torch.log_softmax(logits[:, prompt - 1 : -1].float(), dim=-1)
  logps = logps.gather(-1, ids[:, prompt:, None])[..., 0]
  ratio = torch.exp(logps - logps.detach())
  gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
  mask = real[:, prompt:]
  loss = -(gain * mask).sum() / mask.sum()
  optimizer.zero_grad(set_to_none=True)
  loss.backward()
  torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
  optimizer.step()
  return int(mask.sum())


def main():
  """One line of JSON in, one out, until there are no more."""
  model = build(json.loads(sys.argv[1]), even=False).train()
  optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
  for line in sys.stdin:
    work = json.loads(line)
    start = time.perf_counter()
    tokens = update(model, optimizer, work)
    seconds = time.perf_counter() - start
    print(json.dumps({'seconds': seconds, 'tokens': tokens}), file=ANSWERS)
    ANSWERS.flush()


if __name__ == '__main__':
  main()
