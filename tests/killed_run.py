"""The config file of a run that kills itself before one of its operations.

`AREAL_KILL` is the operation, as 'write COMMITTED 2' for the second of them;
without it the run goes on to its end.
"""

import os
import pathlib

from areal_jax.train.checkpoint import CheckpointSettings
from tests import file_operations
from tests.test_session import experiment

STEPS = 32  # an epoch, in batches of 4 problems


def get_config():
  if os.environ.get('AREAL_KILL'):
    kind, ending, count = os.environ['AREAL_KILL'].split()
    file_operations.kill_before(kind, ending, int(count))
  return experiment(
      pathlib.Path(os.environ['AREAL_KILLED']),
      steps=STEPS,
      rollout__eta=2.0,
      rollout__staleness='fifo',
      task__train_problems=4 * STEPS,
      checkpoint=CheckpointSettings(every=2, keep_last=1),
      resume='auto',
  )
