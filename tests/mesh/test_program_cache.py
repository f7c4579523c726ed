"""Programs stay between processes, where the user has said nothing else."""

import os
import subprocess
import sys

import jax

from areal_jax.mesh import program_cache
from tests.limits import WAIT_S

CODE = """
import sys, time
import jax, jax.numpy as jnp
from areal_jax.mesh.program_cache import keep_programs
from areal_jax.telemetry.compilations import CompilationCounter

print(keep_programs())
counter = CompilationCounter().install()

@jax.jit
def program(x):  # long enough to be kept
  for i in range(60):
    x = jnp.sort(jnp.sin(x + i) @ x)
  return x

jax.block_until_ready(program(jnp.ones((8, 8))))
print(counter.cached)
"""


def run(home) -> list[str]:
  """The folder that a process of its own keeps programs in, and its hits."""
  mine = {k: v for k, v in os.environ.items() if not k.startswith('JAX_')}
  child = subprocess.run(
      [sys.executable, '-c', CODE],
      env=mine | {'JAX_PLATFORMS': 'cpu', 'XDG_CACHE_HOME': str(home)},
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert child.returncode == 0, child.stderr
  return child.stdout.splitlines()


def test_second_process_loads_what_the_first_has_compiled(tmp_path):
  folder, hits = run(tmp_path)
  assert folder.startswith(str(tmp_path / 'areal_jax' / 'programs'))
  assert hits == '0'
  again, hits = run(tmp_path)
  assert again == folder
  assert int(hits) >= 1


def test_what_the_user_says_to_jax_comes_first():
  named = jax.config.jax_compilation_cache_dir  # by an environment variable
  assert named
  assert program_cache.keep_programs() is None
  assert jax.config.jax_compilation_cache_dir == named


def test_nothing_is_kept_where_jax_is_told_so():
  named = jax.config.jax_compilation_cache_dir
  jax.config.update('jax_enable_compilation_cache', False)
  jax.config.update('jax_compilation_cache_dir', None)
  try:
    assert program_cache.keep_programs() is None
    assert jax.config.jax_compilation_cache_dir is None
  finally:
    jax.config.update('jax_enable_compilation_cache', True)
    jax.config.update('jax_compilation_cache_dir', named)
