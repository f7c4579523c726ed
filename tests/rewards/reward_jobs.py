"""Reward functions that the workers of the reward tests import."""

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


async def awaited(problem, text):
  del problem, text
  return 1.0


def of_one(text):
  return float(text)


def of_three(problem, text, extra):
  del problem, extra
  return float(text)
