"""The quickstart's reward, which hangs, crashes or raises for some answers.

Which ones is decided by their text. Each fault is written into a log, a line
with kind and time, before it strikes; see `chaos.py`.
"""

import json
import os
import time
import zlib

from areal_jax.rewards import running_totals

TIMEOUT_S = 6.5  # above what counts as a wait

# A fault in so many answers, by what is left of the checksum of their text.
_FAULTS = {0: 'reward_hang', 1: 'reward_crash', 2: 'reward_error'}
_ONE_IN = 400


def log_fault(kind: str) -> None:
  """Appends a line; whole, whoever else appends."""
  line = json.dumps({'kind': kind, 'wall': time.time()}) + '\n'
  file = os.open(
      os.environ['AREAL_CHAOS_LOG'], os.O_WRONLY | os.O_APPEND | os.O_CREAT
  )
  try:
    os.write(file, line.encode())
  finally:
    os.close(file)


def reward(problem, text):
  """The quickstart's, faulty for some answers; runs in the workers."""
  number = zlib.crc32(f'{problem.id} {text}'.encode()) % _ONE_IN
  kind = _FAULTS.get(number)
  if kind and '/train/' in problem.id:
    log_fault(kind)
    if kind == 'reward_hang':
      while True:
        pass
    if kind == 'reward_crash':
      os._exit(3)
    raise ArithmeticError('injected')
  return running_totals.exact(problem, text)
