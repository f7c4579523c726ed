"""Every compilation is counted, and nothing else."""

import threading

import jax
from jax.experimental.compilation_cache import compilation_cache
import numpy as np
import pytest

from areal_jax.telemetry.compilations import (
    CompilationCounter,
    ahead_of_time,
)
from tests.limits import WAIT_S


@pytest.fixture
def counter():
  counter = CompilationCounter().install()
  yield counter
  counter.uninstall()


def test_new_function_after_warm_is_seen_and_cached_call_is_not(counter):
  x = np.ones(3, np.float32)

  @jax.jit
  def warm(x):
    return x + 1

  @jax.jit
  def late(x):
    return x * 2

  warm(x)
  assert counter.total == 1
  assert counter.seconds > 0
  assert counter.since_warm == 0  # not marked yet
  counter.mark_warm()
  warm(x)
  assert counter.since_warm == 0
  assert counter.names_since_warm == []
  late(x)
  assert counter.since_warm == 1
  warm(np.ones(4, np.float32))  # a new shape
  assert counter.since_warm == 2
  assert counter.names_since_warm == ['jit(late)', 'jit(warm)']
  counter.mark_warm()
  assert counter.since_warm == 0
  assert counter.names_since_warm == []


def test_installing_twice_counts_once_and_uninstalling_stops(counter):
  counter.install()
  jax.jit(lambda x: x - 3)(np.ones(3))
  assert counter.total == 1
  counter.uninstall()
  counter.uninstall()
  jax.jit(lambda x: x - 4)(np.ones(3))
  assert counter.total == 1


def test_compilations_of_other_threads_are_counted(counter):
  thread = threading.Thread(target=lambda: jax.jit(lambda x: x / 5)(np.ones(3)))
  thread.start()
  thread.join()
  assert counter.total == 1


def test_what_is_built_ahead_of_time_is_warm_up_and_the_rest_is_not(counter):
  counter.mark_warm()
  begun, seen = threading.Event(), threading.Event()

  def ahead():
    with ahead_of_time():
      jax.jit(lambda x: x / 6).lower(np.ones(3)).compile()
      begun.set()
      assert seen.wait(WAIT_S)

  thread = threading.Thread(target=ahead)
  thread.start()
  assert begun.wait(WAIT_S)
  assert (counter.total, counter.since_warm) == (1, 0)

  @jax.jit
  def planted(x):
    return x / 7

  planted(np.ones(3))  # in another thread, though one works ahead just now
  seen.set()
  thread.join()
  assert (counter.total, counter.since_warm) == (2, 1)
  assert counter.names_since_warm == ['jit(planted)']
  with ahead_of_time():
    pass
  planted(np.ones(4))
  assert counter.since_warm == 2


def test_persistent_cache_hit_is_told_apart(counter, tmp_path):
  def fresh():
    def program(x):  # a new function each time: jit has not seen it
      return x * 7 + 1

    return jax.jit(program)

  x = np.ones(5, np.float32)
  kept = {
      name: getattr(jax.config, name)
      for name in (
          'jax_compilation_cache_dir',
          'jax_persistent_cache_min_compile_time_secs',
          'jax_persistent_cache_min_entry_size_bytes',
      )
  }
  # The cache binds to its folder at first use, so it is reset around the test.
  compilation_cache.reset_cache()
  jax.config.update('jax_compilation_cache_dir', str(tmp_path))
  jax.config.update('jax_persistent_cache_min_compile_time_secs', 0)
  jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
  try:
    fresh()(x)
    assert (counter.total, counter.cached) == (1, 0)
    counter.mark_warm()
    fresh()(x)
    assert (counter.total, counter.cached) == (1, 1)
    assert counter.since_warm == 1  # still a shape that warm-up missed
    jax.jit(lambda x: x * 11)(x)  # the flag of the hit does not stick
    assert (counter.total, counter.cached) == (2, 1)
  finally:
    for name, value in kept.items():
      jax.config.update(name, value)
    compilation_cache.reset_cache()
