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


def always_raises(problem, text):
  raise LookupError('the verifier is not installed')
