"""Runs TRL's GRPO loop for benchmarks/loop.py; see there.

Runs in an environment that has trl, transformers and torch, and needs nothing
of this project. The policy is Qwen2 of random weights but for its unembedding,
which is 0: every token is as likely as any other.
"""

import json
import os
import sys
import tempfile
import time
import zlib

os.environ.setdefault('HF_HUB_OFFLINE', '1')
os.environ.setdefault('TOKENIZERS_PARALLELISM', 'false')
# What libraries print must not mix with the answer.
ANSWERS = os.fdopen(os.dup(1), 'w')
os.dup2(2, 1)

import datasets  # noqa: E402
import tokenizers  # noqa: E402
from torch_parts import build  # noqa: E402
import transformers  # noqa: E402
import trl  # noqa: E402

_FIRST = 0x4E00  # token i is written as the character of this number + i


def build_stopping(shape, stop_ids):
  """A policy whose answers end with these ids."""
  model = build(shape, even=True)
  model.generation_config.eos_token_id = stop_ids or None
  return model


def characters(vocabulary):
  """Token ids as characters.

  TRL wants an end of sequence and always stops at it, so that is an id that the
  policy does not have.
  """
  ids = {'<pad>': 0, '<end>': vocabulary}
  ids |= {chr(_FIRST + i): i for i in range(1, vocabulary)}
  model = tokenizers.models.WordLevel(ids, unk_token='<pad>')
  inner = tokenizers.Tokenizer(model)
  inner.pre_tokenizer = tokenizers.pre_tokenizers.Split(
      tokenizers.Regex('.'), 'isolated'
  )
  inner.decoder = tokenizers.decoders.Fuse()
  return transformers.PreTrainedTokenizerFast(
      tokenizer_object=inner,
      pad_token='<pad>',
      eos_token='<end>',
      padding_side='left',
  )


def reward(prompts, completions, **_):
  """A coin for each answer, of its text."""
  del prompts
  return [float(zlib.crc32(text.encode()) % 2) for text in completions]


class Moments(transformers.TrainerCallback):
  """When each step began, and the last one ended."""

  def __init__(self):
    self.begun, self.ended = [], 0.0

  def on_step_begin(self, *_, **__):
    self.begun.append(time.perf_counter())

  def on_step_end(self, *_, **__):
    self.ended = time.perf_counter()


def settings(work, folder):
  """One update a batch of fresh answers, nothing saved."""
  return trl.GRPOConfig(
      output_dir=folder,
      max_steps=len(work['prompts']),
      per_device_train_batch_size=len(work['prompts'][0]) * work['group'],
      steps_per_generation=1,
      num_generations=work['group'],
      num_iterations=1,
      max_completion_length=work['limit'],
      temperature=1.0,
      top_p=1.0,
      top_k=0,
      beta=0.0,
      epsilon=0.2,
      loss_type='grpo',
      learning_rate=1e-5,
      lr_scheduler_type='constant',
      logging_steps=10**6,
      save_strategy='no',
      report_to=[],
      bf16=False,
      fp16=False,
      use_cpu=True,
      gradient_checkpointing=False,
      disable_tqdm=True,
      seed=0,
  )


def main():
  """One line of JSON in, one out."""
  start = time.perf_counter()
  shape, work = json.loads(sys.argv[1]), json.loads(sys.stdin.readline())
  prompts = [
      ''.join(chr(_FIRST + i) for i in prompt)
      for batch in work['prompts']
      for prompt in batch
  ]
  moments, tokens = Moments(), []
  with tempfile.TemporaryDirectory() as folder:
    trainer = trl.GRPOTrainer(
        model=build_stopping(shape, work['stop_ids']),
        reward_funcs=reward,
        args=settings(work, folder),
        train_dataset=datasets.Dataset.from_dict({'prompt': prompts}),
        processing_class=characters(shape['vocab_size']),
        callbacks=[moments],
    )
    generate = trainer._generate_single_turn

    def noted(*args, **kwargs):
      out = generate(*args, **kwargs)
      tokens.append(sum(map(len, out[0])))  # up to the stop id, that included
      return out

    trainer._generate_single_turn = noted
    trainer.train()
  ends = [*moments.begun[1:], moments.ended]
  steps = [[b - a, n] for a, b, n in zip(ends, ends[1:], tokens[1:])]
  print(json.dumps({'first': ends[0] - start, 'steps': steps}), file=ANSWERS)
  ANSWERS.flush()


if __name__ == '__main__':
  main()
