"""Reward functions that the workers of the reward tests import."""

import os
import sys

NOT_A_FUNCTION = 3


def by_text(problem, text):
  """Does what the text says."""
  del problem
  return {
      'zero': 0.0,
      'one': 1,
      'true': True,
      'none': None,
      'nan': float('nan'),
      'infinite': float('-inf'),
      'parts': (0.25, {'format': 1, 'value': 0.0}),
      'none with parts': (None, {'format': 0.0}),
      'text': '1.0',
      'text part': (1.0, {'format': 'good'}),
      'three': (1.0, {}, {}),
  }[text]


def fail(problem, text):
  raise ValueError(f'no gold for {problem.id} in {text}')


def hang(problem, text):
  del problem
  while text == 'hang':
    pass
  return 1.0


def exits(problem, text):
  """Ends its process in one of two ways, or prints."""
  del problem
  if text == 'exit':
    sys.exit(3)
  if text == 'vanish':
    os._exit(3)
  print(f'scores {text}')
  print('a warning', file=sys.stderr)
  return 1.0


def batch(prompts, completions, **others):
  """The form of TRL, which binds to (problem, text) by accident."""
  return [0.0 for _ in completions] if others else [float(len(prompts))]


def compute_score(solution_str, ground_truth, method='strict'):
  """The form of verl."""
  return float(solution_str == ground_truth and method == 'strict')


def yields(problem, text):
  del problem, text
  yield 1.0


async def awaited(problem, text):
  del problem, text
  return 1.0


def of_one(text):
  return float(text)


def of_three(problem, text, extra):
  del problem, extra
  return float(text)
