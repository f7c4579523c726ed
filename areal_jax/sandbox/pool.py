"""A pool of processes in which work can hang, crash or leak and be killed.

Rewards run here, beside generation. A job that outlives the time limit has its
process killed and replaced; a job that takes its process down is an error; both
are results, never a wait without end. What this does not cover: memory limits,
the network, files, and processes that a job starts itself.

Processes come from a fork server: it is a fresh interpreter (forking this one
would copy the locks of jax's threads), and after a kill it has the next worker
ready in about 10 ms. Workers import the module that runs as `__main__`, so it
should import jax inside functions only, and start its work under
`if __name__ == '__main__'`. Measured on 2 cores: start 0.2 to 0.4 s, 0.12 ms a
call in bursts and 0.24 ms one after another, a quarter of a percent of one core
while idle. That is little enough to send every job by itself.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import concurrent.futures.process
import fcntl
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from typing import Any, Callable, Sequence

import pebble

from areal_jax.config import require
from areal_jax.sandbox.call import Outcome, call

_CHECK_S = 1.0  # how often a waiting call looks whether the pool still lives
_TRIES = 3  # of a job that is lost with the pool through no fault of its own
_START_S = 60.0


class KillablePool:
  """`workers` processes; each job has `timeout_s` seconds from when it starts.

  Args:
    workers: processes that work at the same time.
    timeout_s: seconds after which the process of a job is killed. Waiting for
      a free worker does not count.
    preload: names of modules that the fork server imports once, so that no
      worker has to. It takes effect in the first pool of a program.
  """

  def __init__(
      self, workers: int, timeout_s: float, *, preload: Sequence[str] = ()
  ):
    require(workers >= 1, 'workers', workers, 'at least 1')
    require(timeout_s > 0, 'timeout_s', timeout_s, 'more than 0 seconds')
    self.workers = workers
    self.timeout_s = timeout_s
    self._context = multiprocessing.get_context('forkserver')
    self._context.set_forkserver_preload([__name__, *preload])
    self._lock = threading.Lock()
    self._pool: pebble.ProcessPool | None = None
    self._pending: set[concurrent.futures.Future] = set()
    self._closed = False

  def start(self) -> None:
    """Starts the workers and returns when each of them has answered.

    Raises:
      RuntimeError: they do not come up.
    """
    deadline = time.monotonic() + _START_S
    job = pickle.dumps((os.getpid, ()))
    answered = set()
    while len(answered) < self.workers:
      _, futures = zip(*(self._schedule(job) for _ in range(self.workers)))
      for future in futures:
        try:
          packed = future.result(max(0.0, deadline - time.monotonic()))
        except (
            concurrent.futures.process.BrokenProcessPool,
            pebble.ProcessExpired,
            TimeoutError,
        ) as error:
          self.close()
          raise RuntimeError(
              f'{len(answered)} of {self.workers} workers came up'
              f' ({type(error).__name__}: {error}). They import the module that'
              ' runs as __main__: does its work stand under "if __name__ =='
              " '__main__'\"?"
          ) from error
        answered.add(pickle.loads(packed).value)

  async def run(self, function: Callable[..., Any], *args: Any) -> Outcome:
    """Runs `function(*args)` in a worker; awaitable from any event loop.

    The function is found by its module and name, arguments and value travel by
    pickle. Cancelling the call kills the work. A process that leaves with exit
    code 0 in the middle of a job is seen as late as `timeout_s`.

    Returns:
      ok with the value; error with type, message and traceback, also where the
      process died; timeout.

    Raises:
      RuntimeError: the pool was closed before.
    """
    job = pickle.dumps((function, args))
    for _ in range(_TRIES):
      outcome = await self._attempt(job)
      if outcome is not None:
        return outcome
    return Outcome(
        'error', detail=f'the pool of workers broke {_TRIES} times in this call'
    )

  def close(self) -> None:
    """Kills the workers. Calls that still wait get an error."""
    with self._lock:
      self._closed = True
      pool, self._pool = self._pool, None
      pending = tuple(self._pending)
    self._stop(pool, pending)

  async def _attempt(self, job: bytes) -> Outcome | None:
    """One try of a job; None if the pool broke under it."""
    start = time.monotonic()
    pool, future = self._schedule(job)
    waiting = asyncio.wrap_future(future)
    try:
      while not waiting.done():
        await asyncio.wait((waiting,), timeout=_CHECK_S)
        if not waiting.done() and not self._holds(pool):
          break
    finally:
      # Reached with work left if our caller was cancelled or the pool is gone.
      waiting.cancel()
    if waiting.cancelled():
      if self._closed:
        return Outcome(
            'error',
            detail='the pool was closed during the call',
            seconds=time.monotonic() - start,
        )
      return None
    error = waiting.exception()
    if error is None:
      return pickle.loads(waiting.result())
    if isinstance(error, concurrent.futures.process.BrokenProcessPool):
      return None
    if isinstance(error, TimeoutError):
      return Outcome(
          'timeout',
          detail=f'killed after {self.timeout_s:g} s',
          seconds=self.timeout_s,
      )
    if isinstance(error, pebble.ProcessExpired):
      return Outcome(
          'error',
          detail=f'the process of the job died with exit code {error.exitcode}',
          seconds=time.monotonic() - start,
      )
    raise error

  def _schedule(
      self, job: bytes
  ) -> tuple[pebble.ProcessPool, concurrent.futures.Future]:
    """Hands a job to the pool, to a new one if the last broke."""
    with self._lock:
      if self._closed:
        raise RuntimeError('the pool of workers is closed')
      broken, lost = None, ()
      if self._pool is not None and not self._pool.active:
        broken, lost = self._pool, tuple(self._pending)
        self._pool = None
      if self._pool is None:
        self._pool = pebble.ProcessPool(
            max_workers=self.workers,
            initializer=_prepare_worker,
            context=self._context,
        )
      pool = self._pool
      future = pool.schedule(_execute, args=(job,), timeout=self.timeout_s)
      self._pending.add(future)
    future.add_done_callback(self._forget)
    self._stop(broken, lost)
    return pool, future

  def _holds(self, pool: pebble.ProcessPool) -> bool:
    """Whether this is still the pool, and alive."""
    return self._pool is pool and pool.active

  def _forget(self, future: concurrent.futures.Future) -> None:
    with self._lock:
      self._pending.discard(future)

  @staticmethod
  def _stop(
      pool: pebble.ProcessPool | None,
      pending: Sequence[concurrent.futures.Future],
  ) -> None:
    """Ends a pool; pebble itself would leave its futures open."""
    for future in pending:
      future.cancel()
    if pool is not None:
      pool.stop()
      pool.join()


def _prepare_worker() -> None:
  """Runs first in every worker."""
  # Pebble's own handler runs between two bytecodes, so a job inside one long C
  # call (a regular expression, a power) would hold out for three more seconds
  # in which no other worker gets a job.
  signal.signal(signal.SIGTERM, signal.SIG_DFL)
  # A terminal sends Ctrl-C to us as well, and the program may want to finish
  # what is under way; it ends us when it does.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  if sys.platform == 'linux':
    # After kill -9 of the program an idle worker sees its pipe closed, but one
    # in the middle of hung work would go on for ever. The sentinel is a pipe
    # that closes with the program, and its closing becomes a SIGKILL to us.
    # (PR_SET_PDEATHSIG does not serve: our parent is the fork server, which
    # lives as long as any worker.)
    sentinel = multiprocessing.parent_process().sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _execute(job: bytes) -> bytes:
  """In the worker: runs one pickled job and pickles its outcome.

  Both are packed here and not by pebble, whose whole pool breaks on an
  exception or an argument that cannot be unpickled at the other end. Nothing
  gets past: SystemExit of a job, say, would end the event loop.
  """
  loaded = call(pickle.loads, job, catch=BaseException)
  if loaded.status != 'ok':
    return pickle.dumps(loaded)
  function, args = loaded.value
  outcome = call(function, *args, catch=BaseException)
  packed = call(pickle.dumps, outcome)
  if packed.status != 'ok':
    return pickle.dumps(packed)
  return packed.value
