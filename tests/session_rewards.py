"""Rewards that a policy of random weights can earn, for runs in tests."""

import zlib


def ones(problem, text):
  """Share of the characters that are '1'."""
  del problem
  return text.count('1') / max(1, len(text))


def fails_for_even_sums(problem, text):
  """Raises for some problems, scores the others."""
  if int(problem.answer.rstrip('.').split(';')[-1]) % 2 == 0:
    raise ZeroDivisionError('even')
  return ones(problem, text)


def hangs_in_training(problem, text):
  """Never returns for one answer in some sixteen of the training problems."""
  if '/train/' in problem.id and zlib.crc32(text.encode()) % 16 == 0:
    while True:
      pass
  return ones(problem, text)


def seldom_parses(problem, text):
  """Finds nothing to score in most answers."""
  if zlib.crc32(text.encode()) % 4:
    return None
  return ones(problem, text)


def always_raises(problem, text):
  raise LookupError('the verifier is not installed')


def always_none(problem, text):
  return None


def always_hangs(problem, text):
  while True:
    pass


def fails_in_training(problem, text):
  """Scores held-out problems alone."""
  if '/train/' in problem.id:
    raise KeyError('ground_truth')
  return float(text == problem.answer)


def prints(problem, text):
  print('scores', problem.id)
  print('and more')
  return float(text == problem.answer)


def unparseable_in_training(problem, text):
  """Finds no answer in half of what is trained."""
  if '/train/' in problem.id and zlib.crc32(text.encode()) % 2:
    return None
  return float(text == problem.answer)
