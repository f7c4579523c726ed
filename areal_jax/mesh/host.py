"""How programs should run where they run on the host's processors.

XLA takes the temporary memory of a program from malloc at every call and gives
it back at its end. Glibc by default hands large blocks back to the kernel at
once, so every call pays for its pages anew. It can be told to keep them, but
only in its first heap, which is the main thread's: in the heaps of others a
block of more than 64 MB is mapped and unmapped at every use. One heap for all
threads, which it can be told too, has those of a compiler wait for each other.
So programs run in the thread that calls them, and a step is called by the main
thread.

Before the end of a first step nothing takes as long as compiling. LLVM's first
level takes less time than its third, which is XLA's choice, and its programs
are as fast (docs/results/log/2026-11.md).
"""

from __future__ import annotations

import ctypes
import glob
import os
import sys
from typing import Any

import jax

from areal_jax.config import ConfigError

# Parameters of mallopt, from malloc.h.
_TRIM_THRESHOLD, _MMAP_MAX = -1, -4

# What drivers of GPUs and TPUs put there.
_DEVICE_FILES = ('/dev/nvidia[0-9]*', '/dev/kfd', '/dev/accel*', '/dev/vfio/*')

_EFFORT = 'xla_backend_optimization_level'  # of LLVM


def computes() -> bool:
  """Returns whether programs will run on a CPU, before jax has devices."""
  asked = os.environ.get('JAX_PLATFORMS', '')
  if asked:
    return asked == 'cpu'
  return not any(glob.glob(files) for files in _DEVICE_FILES)


def prepare() -> None:
  """Sets up this process for programs on the host; `machine_devices` calls it.

  Besides `keep_freed_memory`, a program runs in the thread that calls it, which
  waits for its end, and not in one of XLA's. Programs of other threads run
  meanwhile, on the same processors; what is lost is that a thread could go on
  beside its own program. LLVM compiles at its first level, unless `XLA_FLAGS`
  says otherwise. To be called before jax has its devices; later it has no
  effect on programs.
  """
  jax.config.update('jax_cpu_enable_async_dispatch', False)
  flags = os.environ.get('XLA_FLAGS', '')
  if _EFFORT not in flags:
    os.environ['XLA_FLAGS'] = f'{flags} --{_EFFORT}=1'.strip()
  keep_freed_memory()


def require_one_process() -> None:
  """Refuses a program of several jax processes; it starts jax.

  Raises:
    ConfigError: `jax.process_count()` is above 1.
  """
  count = jax.process_count()
  if count > 1:
    raise ConfigError(
        f'jax.process_count() is {count}, wanted 1: runs over several hosts are'
        ' not supported yet; start one process without'
        ' jax.distributed.initialize'
    )


def require_whole(tree: Any, what: str) -> Any:
  """Passes arrays on whose values this process can read in full.

  Host values that are made of the parts of this process alone would be wrong
  everywhere else.

  Args:
    tree: of arrays.
    what: they are, for the error.

  Raises:
    ValueError: an array with parts on devices of other processes.
  """
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
      own = len(leaf.sharding.addressable_devices)
      raise ValueError(
          f'{what}{jax.tree_util.keystr(path)}: this process has the parts of'
          f' {own} of {len(leaf.sharding.device_set)} devices, wanted those of'
          ' all: values over several processes are not supported'
      )
  return tree


def keep_freed_memory(limit: int = 2**30) -> bool:
  """Lets the main thread keep what it frees, to be used again.

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
  )
  return all(mallopt(name, value) for name, value in settings)
