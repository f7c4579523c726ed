"""The allocator's settings, each in a process of its own."""

import subprocess
import sys

import pytest

CODE = """
import resource
import numpy as np
from areal_jax.mesh.host import keep_freed_memory

if {keep}:
  assert keep_freed_memory()

def touch():
  np.ones(2**23)  # 64 MB, freed at once

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
  touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool) -> int:
  child = subprocess.run(
      [sys.executable, '-c', CODE.format(keep=keep)],
      capture_output=True,
      text=True,
      timeout=60,
  )
  assert child.returncode == 0, child.stderr
  return int(child.stdout)


@pytest.mark.skipif(sys.platform != 'linux', reason='settings of glibc')
def test_freed_memory_is_used_again_without_page_faults():
  kept, returned = faults(True), faults(False)
  # 16,384 pages of 4 kB each time, or a few huge ones.
  assert kept < returned / 10
