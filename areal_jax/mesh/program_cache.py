"""Where compiled programs stay between runs: a folder of the user's own.

A second run with the same shapes loads its programs and compiles none. jax does
the keeping; here it is switched on, for jax leaves it off. Programs are kept by
the processor they were made for: one that was compiled for another, in a home
folder that machines share, may not run here, and jax's names do not tell.
"""

from __future__ import annotations

import hashlib
import os
import pathlib
import platform

import jax

LIMIT_BYTES = 2**31  # beyond it what was used least recently goes

# A program that compiles faster is hardly found faster.
_LEAST_SECONDS = 0.1


def keep_programs() -> pathlib.Path | None:
  """Keeps programs in $XDG_CACHE_HOME/areal_jax, by default ~/.cache/areal_jax.

  jax's own settings come first: JAX_COMPILATION_CACHE_DIR names another folder,
  and with JAX_ENABLE_COMPILATION_CACHE=false nothing is kept.

  Returns:
    The folder; None where jax's settings say something else.
  """
  chosen = default_folder()
  named = jax.config.jax_compilation_cache_dir
  if not jax.config.jax_enable_compilation_cache or named:
    return chosen if named == str(chosen) else None
  jax.config.update('jax_compilation_cache_dir', str(chosen))
  jax.config.update('jax_compilation_cache_max_size', LIMIT_BYTES)
  jax.config.update('jax_persistent_cache_min_compile_time_secs',
                    _LEAST_SECONDS)  # fmt: skip
  return chosen


def default_folder() -> pathlib.Path:
  """The folder for programs of this machine's processor."""
  home = os.environ.get('XDG_CACHE_HOME') or pathlib.Path.home() / '.cache'
  return pathlib.Path(home) / 'areal_jax' / 'programs' / _processor()


def _processor() -> str:
  """A name that differs where instructions do."""
  told = pathlib.Path('/proc/cpuinfo')
  lines = told.read_text().splitlines() if told.is_file() else []
  flags = [x for x in lines if x.startswith(('flags', 'Features'))][:1]
  known = ' '.join([platform.machine(), platform.processor(), *flags])
  digest = hashlib.sha256(known.encode()).hexdigest()
  return f'{platform.machine()}-{digest[:12]}'
