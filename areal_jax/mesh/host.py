"""What the host's allocator should know where programs run on its processors.

XLA takes the temporary memory of a program from malloc at every call and gives
it back at its end. Glibc by default hands large blocks back to the kernel at
once, so every call pays for its pages anew.
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8


# What drivers of GPUs and TPUs put there.
_DEVICE_FILES = ('/dev/nvidia[0-9]*', '/dev/kfd', '/dev/accel*', '/dev/vfio/*')


def computes() -> bool:
  """Whether programs will run on the processors, before jax has any device."""
  asked = os.environ.get('JAX_PLATFORMS', '')
  if asked:
    return asked == 'cpu'
  return not any(glob.glob(files) for files in _DEVICE_FILES)


def keep_freed_memory(limit: int = 2**30) -> bool:
  """Lets this process keep what it frees, to be used again.

  To be called before jax has its devices. Threads stay with the heap that they
  began with, and on another than the first one a block of more than 64 MB is
  mapped and unmapped at every use, whatever is set by then.

  On two CPU cores a supervised step of 0.2 M parameters and 2,000 tokens went
  from 65 to 42 ms of processor time and from 13,000 page faults to none, for
  0.13 GB more of resident memory.

  Args:
    limit: free bytes at the end of the heap beyond which it shrinks all the
      same, below 2**31.

  Returns:
    Whether the allocator took the settings; only glibc has them.
  """
  if sys.platform != 'linux':
    return False
  mallopt = getattr(ctypes.CDLL(None), 'mallopt', None)
  if mallopt is None:
    return False
  settings = (
      (_TRIM_THRESHOLD, limit),
      (_MMAP_MAX, 0),  # blocks of their own are unmapped when they are freed
      (_ARENA_MAX, 1),  # further heaps hold no block of more than 64 MB
  )
  return all(mallopt(name, value) for name, value in settings)
