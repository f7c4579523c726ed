"""A pool of processes in which work can hang, crash or leak and be killed.

Rewards run here, beside generation. A job that outlives the time limit has its
process killed and replaced; a job that takes its process down is an error; both
are results, never a wait without end. What this does not cover: memory limits,
the network, files, and processes that a job starts itself.

Workers share nothing: each has a pair of sockets and a thread here that waits
for it, so one that is killed from outside at any instant (the kernel does that
when memory runs out) costs the job that it had begun, and nobody else anything.
A pool whose workers read one pipe under a common lock, as pebble's and Python's
own do, stands still for all when the one that holds the lock is killed.

Processes come from a fork server: it is a fresh interpreter (forking this one
would copy the locks of jax's threads), and after a kill it has the next worker
ready in about 10 ms. Workers import the module that runs as `__main__`, so it
should import jax inside functions only, and start its work under
`if __name__ == '__main__'`. Measured on 2 cores: start 0.1 to 0.4 s, 0.11 ms a
call in bursts and 0.3 ms one after another, nothing while idle. That is little
enough to send every job by itself.
"""

from __future__ import annotations

import asyncio
import atexit
import collections
import concurrent.futures
import dataclasses
import fcntl
import multiprocessing
from multiprocessing import connection
import os
import pickle
import signal
import struct
import sys
import threading
import time
from typing import Any, Callable, Sequence

from areal_jax.config import require
from areal_jax.sandbox.call import Outcome, call

_TRIES = 3  # of a job whose process is gone before it had begun with it
_START_S = 60.0  # for a worker to come up: it imports what its jobs need
_OUTPUT_BYTES = 10_000_000  # of the file that jobs print into
_TAKE_S = 10.0  # for one that is up to take a job, or to be gone when killed
_SIZE = struct.Struct('<Q')  # in front of each message, its bytes
_READY = b'ready'
_CLOSED = 'the pool was closed during the call'

# Starting a process and reading how one ended look at all children of this
# process (`multiprocessing` does), and two threads that do so at once may take
# each other's exit codes.
_processes = threading.Lock()


class _Gone(Exception):
  """The process is not there any more."""


class _Late(Exception):
  """The process is there and has not done its part in time."""


@dataclasses.dataclass(eq=False)
class _Job:
  """A pickled call, and where its outcome goes."""

  packed: bytes
  future: concurrent.futures.Future
  worker: _Worker | None = None  # that has it

  def settle(self, outcome: Outcome | bytes) -> None:
    """Hands over the outcome, or its pickle, unless nobody waits any more."""
    try:
      self.future.set_result(outcome)
    except concurrent.futures.InvalidStateError:
      pass  # the call was cancelled


class KillablePool:
  """`workers` processes; each job has `timeout_s` seconds from when it starts.

  Args:
    workers: processes that work at the same time.
    timeout_s: seconds after which the process of a job is killed. Waiting for
      a free worker does not count.
    preload: names of modules that the fork server imports once, so that no
      worker has to. It takes effect in the first pool of a program.
    output: file that gets what jobs print, on standard output and error, up to
      10 MB. None leaves both as they are.
  """

  def __init__(
      self,
      workers: int,
      timeout_s: float,
      *,
      preload: Sequence[str] = (),
      output: str | os.PathLike | None = None,
  ):
    require(workers >= 1, 'workers', workers, 'at least 1')
    require(timeout_s > 0, 'timeout_s', timeout_s, 'more than 0 seconds')
    self.workers = workers
    self.timeout_s = timeout_s
    self._output = None if output is None else os.path.abspath(output)
    self._context = multiprocessing.get_context('forkserver')
    self._context.set_forkserver_preload([__name__, *preload])
    lock = threading.Lock()
    self._work = threading.Condition(lock)  # a job came
    self._changed = threading.Condition(lock)  # anything else did
    # Guarded by the lock.
    self._jobs: collections.deque[_Job] = collections.deque()
    self._held: list[_Worker | None] = [None] * workers
    self._up: set[int] = set()  # places whose worker has come up
    self._trouble = ''  # why the last one that did not come up did not
    self._closed = False
    self._threads: list[threading.Thread] = []

  def start(self) -> None:
    """Starts the workers and returns when each of them has answered.

    Raises:
      RuntimeError: they do not come up.
    """
    with self._changed:
      self._start_threads()
      self._changed.wait_for(
          lambda: len(self._up) == self.workers or self._trouble, _START_S
      )
      up, trouble = len(self._up), self._trouble
    if up < self.workers:
      self.close()
      raise RuntimeError(
          f'{up} of {self.workers} workers came up'
          f' ({trouble or f"nothing for {_START_S:g} s"}). They import the'
          ' module that runs as __main__: does its work stand under "if'
          " __name__ == '__main__'\"?"
      )

  async def run(self, function: Callable[..., Any], *args: Any) -> Outcome:
    """Runs `function(*args)` in a worker; awaitable from any event loop.

    The function is found by its module and name, arguments and value travel by
    pickle. Cancelling the call kills the work.

    Returns:
      ok with the value; error with type, message and traceback, also where the
      process died; timeout.

    Raises:
      RuntimeError: the pool was closed before.
    """
    job = _Job(pickle.dumps((function, args)), concurrent.futures.Future())
    job.future.add_done_callback(lambda _: self._give_up(job))
    with self._work:
      if self._closed:
        raise RuntimeError('the pool of workers is closed')
      self._start_threads()
      self._jobs.append(job)
      self._work.notify()
      self._changed.notify_all()
    outcome = await asyncio.wrap_future(job.future)
    return outcome if isinstance(outcome, Outcome) else pickle.loads(outcome)

  def close(self) -> None:
    """Kills the workers. Calls that still wait get an error."""
    atexit.unregister(self.close)
    self._end(_CLOSED)
    for thread in self._threads:
      thread.join()

  def _end(self, why: str) -> None:
    with self._work:
      self._closed = True
      waiting = list(self._jobs)
      self._jobs.clear()
      for worker in self._held:
        if worker is not None:
          worker.kill()
      self._work.notify_all()
      self._changed.notify_all()
    for job in waiting:
      job.settle(Outcome('error', detail=why))

  def _start_threads(self) -> None:
    """Starts a thread for each worker, once; the lock is held."""
    if self._threads or self._closed:
      return
    # Before the interpreter ends it waits for its children, and these do not
    # end by themselves.
    atexit.register(self.close)
    for place in range(self.workers):
      thread = threading.Thread(
          target=self._serve, args=(place,), name=f'pool-{place}', daemon=True
      )
      self._threads.append(thread)
      thread.start()

  def _give_up(self, job: _Job) -> None:
    """Kills the work of a call that was cancelled."""
    if not job.future.cancelled():
      return
    with self._work:
      if job.worker is not None:
        job.worker.kill()

  # In the thread of a worker.

  def _serve(self, place: int) -> None:
    """Takes one job after another to the worker of this place."""
    job = None
    try:
      while self._bring_up(place):
        job = self._next(place)
        if job is None:
          break
        outcome = self._outcome(place, job)
        with self._work:
          job.worker = None
        job.settle(outcome)
    finally:
      self._replace(place, None)
      if not self._closed:  # a fault of ours: nobody shall wait for this place
        failed = 'a thread of the pool of workers failed'
        self._end(failed)
        if job is not None:
          job.settle(Outcome('error', detail=failed))

  def _bring_up(self, place: int) -> bool:
    """Sees to it that there is a worker; false if the pool is closed.

    Where none comes up, and there is no other one, those who wait for one hear
    of it in turn.
    """
    failures = 0
    while self._held[place] is None and not self._closed:
      try:
        with _processes:
          worker = _Worker(self._context, self._output)
        self._replace(place, worker)
        worker.receive(_START_S)
      except (_Gone, _Late, OSError, EOFError, RuntimeError) as error:
        self._replace(place, None)
        failures += 1
        if failures % _TRIES == 0:
          self._tell_trouble(error)
      else:
        with self._changed:
          self._up.add(place)
          self._trouble = ''
          self._changed.notify_all()
    return not self._closed

  def _tell_trouble(self, error: Exception) -> None:
    """Takes note that no worker comes up; returns when it is wanted again."""
    job = None
    with self._changed:
      if self._closed:
        return
      self._trouble = f'{type(error).__name__.strip("_")}: {error}'
      self._changed.notify_all()
      if not self._up and self._jobs:
        job = self._jobs.popleft()
    if job is not None:
      job.settle(
          Outcome('error', detail=f'no worker comes up: {self._trouble}')
      )
    with self._changed:
      # Not again and again for nobody, nor while others do the work.
      self._changed.wait_for(
          lambda: self._closed or (self._jobs and not self._up), _START_S
      )

  def _next(self, place: int) -> _Job | None:
    """The next job that somebody waits for; None when the pool is closed."""
    with self._work:
      while True:
        self._work.wait_for(lambda: self._jobs or self._closed)
        if self._closed:
          return None
        job = self._jobs.popleft()
        if not job.future.cancelled():
          job.worker = self._held[place]
          return job

  def _outcome(self, place: int, job: _Job) -> Outcome | bytes:
    """Has a job done, by a fresh worker if the one that was there is not."""
    start = time.monotonic()
    for _ in range(_TRIES):
      begun, worker = False, job.worker
      try:
        worker.send(job.packed, _TAKE_S)
        worker.receive(_TAKE_S)
        begun = True
        return worker.receive(self.timeout_s)
      except _Late:
        self._replace(place, None)
        if begun:
          return Outcome(
              'timeout',
              detail=f'killed after {self.timeout_s:g} s',
              seconds=self.timeout_s,
          )
      except _Gone as gone:
        self._replace(place, None)
        if self._closed:
          return Outcome('error', detail=_CLOSED)
        if begun:
          return Outcome(
              'error',
              detail=f'the process of the job {gone}',
              seconds=time.monotonic() - start,
          )
      # It had not begun, so it may be done anew.
      if not self._bring_up(place):
        break
      with self._work:
        if job.future.cancelled():
          break
        job.worker = self._held[place]
    if self._closed or job.future.cancelled():
      return Outcome('error', detail=_CLOSED)
    return Outcome(
        'error', detail=f'{_TRIES} workers died before they began with the job'
    )

  def _replace(self, place: int, worker: _Worker | None) -> None:
    """Ends the worker of a place; puts another one there."""
    with self._work:
      old, self._held[place] = self._held[place], worker
      self._up.discard(place)
      if self._closed and worker is not None:
        worker.kill()
    if old is not None:
      old.end()


class _Worker:
  """A worker process, seen from its parent; every wait for it has a limit.

  Args:
    context: of the fork server.
    output: file that gets what its jobs print; None for no file.

  Raises:
    OSError, EOFError, RuntimeError: no process can be had.
  """

  def __init__(
      self,
      context: multiprocessing.context.ForkServerContext,
      output: str | None,
  ):
    self._socket, theirs = context.Pipe()
    self._process = context.Process(target=_work, args=(theirs, output))
    self._read = bytearray()
    started = False
    try:
      self._process.start()
      started = True
    finally:
      theirs.close()
      if not started:
        self._socket.close()
    os.set_blocking(self._socket.fileno(), False)

  def send(self, message: bytes, seconds: float) -> None:
    """Hands over a message.

    Raises:
      _Gone: the process has ended.
      _Late: it takes nothing for so long.
    """
    left = memoryview(_SIZE.pack(len(message)) + message)
    deadline = time.monotonic() + seconds
    while left:
      try:
        left = left[os.write(self._socket.fileno(), left) :]
      except BlockingIOError:
        # Jobs that do not fit the socket are rare enough for a look now and
        # then; `connection.wait` does not tell when there is room again.
        if self._ended(0.001):
          raise self._gone() from None
        if time.monotonic() > deadline:
          raise _Late(f'it takes no job for {seconds:g} s') from None
      except (BrokenPipeError, ConnectionResetError):
        raise self._gone() from None

  def receive(self, seconds: float) -> bytes:
    """The next message.

    Raises:
      _Gone: the process has ended.
      _Late: it did not come in time.
    """
    deadline = time.monotonic() + seconds
    while (message := self._message()) is None:
      left = max(0.0, deadline - time.monotonic())
      ready = connection.wait([self._socket, self._process.sentinel], left)
      if not ready:
        raise _Late(f'no answer for {seconds:g} s')
      if self._socket not in ready:
        raise self._gone()
      try:
        content = os.read(self._socket.fileno(), 1 << 20)
      except ConnectionResetError:
        content = b''
      if not content:
        raise self._gone()
      self._read += content
    return message

  def kill(self) -> None:
    """Kills the worker, from any thread; whoever waits for it sees it gone."""
    # The id of a process that has ended may be another one's by now.
    if self._ended(0):
      return
    try:
      os.kill(self._process.pid, signal.SIGKILL)
    except ProcessLookupError:
      pass  # meanwhile

  def end(self) -> None:
    """Kills it and waits until it is gone."""
    self.kill()
    self._exit_code()
    self._socket.close()

  def _gone(self) -> _Gone:
    self.kill()  # it may have closed its socket and live on
    code = self._exit_code()
    return _Gone(
        'does not end' if code is None else f'died with exit code {code}'
    )

  def _exit_code(self) -> int | None:
    """Returns the exit code of the killed process; None if it has not ended."""
    if not self._ended(_TAKE_S):
      return None
    with _processes:
      self._process.join()
      return self._process.exitcode

  def _ended(self, seconds: float) -> bool:
    return bool(connection.wait([self._process.sentinel], seconds))

  def _message(self) -> bytes | None:
    """Returns the message that was read; None while it is incomplete."""
    if len(self._read) < _SIZE.size:
      return None
    (size,) = _SIZE.unpack_from(self._read)
    end = _SIZE.size + size
    if len(self._read) < end:
      return None
    message = bytes(self._read[_SIZE.size : end])
    del self._read[:end]
    return message


# In a worker.


def _work(socket: connection.Connection, output: str | None) -> None:
  """Takes jobs until the other end is closed."""
  _prepare_worker()
  if output is not None:
    _print_into(output)
  _write(socket, _READY)
  while (job := _read(socket)) is not None:
    _write(socket, _READY)  # from here on it is the job's own affair
    outcome = _execute(job)
    if output is not None:
      _bound_output()
    _write(socket, outcome)


def _print_into(path: str) -> None:
  """Sends what is printed in this process, by whomever, into a file."""
  file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
  for standard in (1, 2):
    os.dup2(file, standard)
  os.close(file)
  for stream in (sys.stdout, sys.stderr):  # a killed job keeps its last line
    stream.reconfigure(line_buffering=True)


def _bound_output() -> None:
  """Hands on what a job has printed; throws away the rest of a long log."""
  # A job may have closed or replaced its streams.
  call(sys.stdout.flush)
  call(sys.stderr.flush)
  size = call(lambda: os.fstat(1).st_size)
  if size.status == 'ok' and size.value > _OUTPUT_BYTES:
    call(os.write, 1, b'(later output is thrown away)\n')
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for standard in (1, 2):
      os.dup2(nowhere, standard)
    os.close(nowhere)


def _prepare_worker() -> None:
  """Runs first in every worker."""
  # A terminal sends Ctrl-C to us as well, and the program may want to finish
  # what is under way; it ends us when it does.
  signal.signal(signal.SIGINT, signal.SIG_IGN)
  if sys.platform == 'linux':
    # After kill -9 of the program an idle worker sees its socket closed, but
    # one in the middle of hung work would go on for ever. The sentinel is a
    # pipe that closes with the program, and its closing becomes a SIGKILL to
    # us. (PR_SET_PDEATHSIG does not serve: our parent is the fork server, which
    # lives as long as any worker.)
    sentinel = multiprocessing.parent_process().sentinel
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGKILL)
    flags = fcntl.fcntl(sentinel, fcntl.F_GETFL)
    fcntl.fcntl(sentinel, fcntl.F_SETFL, flags | os.O_ASYNC)


def _read(socket: connection.Connection) -> bytes | None:
  """A message; None if the other end is closed."""
  content, wanted = bytearray(), _SIZE.size
  while len(content) < wanted:
    try:
      part = os.read(socket.fileno(), min(wanted - len(content), 1 << 20))
    except ConnectionResetError:
      part = b''
    if not part:
      return None
    content += part
    if len(content) == wanted == _SIZE.size:
      wanted += _SIZE.unpack(content)[0]
  return bytes(content[_SIZE.size :])


def _write(socket: connection.Connection, message: bytes) -> None:
  left = memoryview(_SIZE.pack(len(message)) + message)
  while left:
    left = left[os.write(socket.fileno(), left) :]


def _execute(job: bytes) -> bytes:
  """Runs one pickled job and pickles its outcome.

  What a job raises, and what of it cannot be pickled, is an outcome too. And
  nothing gets past: SystemExit of a job, say, would end the worker.
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
