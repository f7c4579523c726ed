"""One process: where each loop runs, and how they are joined and ended.

  main thread        the trainer; waits for groups
  'controller'       asyncio; waits for room in the ledger
  'engine-0', ...    a thread a rollout replica; waits for requests or weights
  'engine-evaluate/0', ...   a second one, for evaluation

The trainer speaks to the controller's event loop by `AsyncThread.run`, to the
engines by the publisher alone. Every wait of the main thread has a time limit
and a message that says who is missing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import functools
import sys
import threading
import time
from typing import Any, Callable, Coroutine, TypeVar

from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices
from areal_jax.models import lora, parameters
from areal_jax.models.config import ModelConfig
from areal_jax.rollout import memory
from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.evaluator import Evaluator
from areal_jax.rollout.loop import (
    EngineLoop,
    SwapMode,
    require_living,
    stop_all,
)
from areal_jax.telemetry.events import EventLog
from areal_jax.tokenizer.base import Tokenizer
from areal_jax.weights import Publisher, Target

T = TypeVar('T')
AsyncFuture = concurrent.futures.Future

_LOOK_SECONDS = 0.5  # how often a wait looks whether an engine has died
_CALL_SECONDS = 60.0  # for a plain function on an event loop
_STOP_SECONDS = 30.0  # for the tasks of an event loop to end in


class Stalled(TimeoutError):
  """Nothing arrived within a time limit; the text says who waits."""


class AsyncThread:
  """An asyncio event loop in a thread of its own.

  Args:
    name: of the thread.
    tell: called with what a reader of the run should know; None to print it to
      standard error.
  """

  def __init__(self, name: str, tell: Callable[[str], None] | None = None):
    self._loop = asyncio.new_event_loop()
    self._tell = tell or functools.partial(print, file=sys.stderr)
    self._ended_by: BaseException | None = None
    self._winding_up: AsyncFuture[list[str]] | None = None  # by `stop`
    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
    self._thread.start()

  def _run(self) -> None:
    try:
      self._loop.run_forever()
    except (SystemExit, KeyboardInterrupt) as error:
      # asyncio lets these two of a task through; all others stay in their task.
      self._ended_by = error
      self._loop.run_until_complete(_cancel_others(_STOP_SECONDS))

  def run(
      self,
      coroutine: Coroutine[Any, Any, T],
      *,
      timeout_s: float,
      explain: Callable[[], str] = lambda: '',
      check: Callable[[], None] = lambda: None,
      busy: Callable[[], bool] = lambda: False,
  ) -> T:
    """Runs a coroutine on the loop and waits for its result; see `wait`."""
    return self.wait(
        self.spawn(coroutine),
        timeout_s=timeout_s,
        explain=explain,
        check=check,
        busy=busy,
    )

  def wait(
      self,
      future: AsyncFuture[T],
      *,
      timeout_s: float,
      explain: Callable[[], str] = lambda: '',
      check: Callable[[], None] = lambda: None,
      busy: Callable[[], bool] = lambda: False,
  ) -> T:
    """Waits for what was started; it is cancelled if the wait fails.

    Args:
      future: what `spawn` returned.
      timeout_s: longest wait.
      explain: called in this thread when the time is over, for the message.
      check: called every half second in this thread; may raise.
      busy: asked as often; time for which it says yes does not count, as long
        as a program is compiled that the result waits for.

    Raises:
      Stalled: it took longer, or the event loop has ended.
    """
    looked = time.monotonic()
    end = looked + timeout_s
    try:
      while True:
        left = end - time.monotonic()
        done, _ = concurrent.futures.wait(
            [future], max(0.0, min(_LOOK_SECONDS, left))
        )
        if done and not future.cancelled():
          return future.result()
        self._require_alive()
        if done:
          return future.result()  # somebody else has cancelled it
        check()
        last, looked = looked, time.monotonic()
        if busy():
          end += looked - last
        if looked >= end:
          # Here and not on the loop: the loop may be what hangs.
          reason = explain()
          raise Stalled(f'no result after {timeout_s:g} s; {reason}')
    finally:
      future.cancel()

  def spawn(self, coroutine: Coroutine[Any, Any, T]) -> AsyncFuture[T]:
    """Starts a coroutine on the loop and returns at once.

    Raises:
      Stalled: the event loop has ended.
    """
    try:
      self._require_alive()
    except Stalled:
      coroutine.close()  # nobody will await it
      raise
    return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

  def call(self, function: Callable[..., T], *arguments: Any) -> T:
    """Runs a plain function on the loop and returns its result.

    Raises:
      Stalled: the loop does not come to it for a minute, or has ended.
    """

    async def once() -> T:
      return function(*arguments)

    answer = self.spawn(once())
    try:
      return answer.result(_CALL_SECONDS)
    except concurrent.futures.TimeoutError as error:
      raise Stalled(
          f'the event loop {self._thread.name!r} has not answered for'
          f' {_CALL_SECONDS:g} s: a call on it does not return'
          f' ({self.explain()})'
      ) from error

  def explain(self) -> str:
    """The task that the loop is at; any thread may ask."""
    task = asyncio.current_task(self._loop)
    return 'it is at no task' if task is None else f'it is at {_place(task)}'

  def _require_alive(self) -> None:
    name, why = self._thread.name, self._ended_by
    if why is not None or not self._thread.is_alive():
      reason = 'it was stopped' if why is None else f'{type(why).__name__}'
      raise Stalled(f'the event loop {name!r} has ended: {reason}') from why

  def stop(self, limit_s: float = _STOP_SECONDS) -> None:
    """Cancels what still runs on the loop, lets it wind up, ends the loop.

    A task that swallows its cancellation is left behind and told by name, and
    so is a loop that a task never gives back. Nobody waits for them: the thread
    is a daemon.

    Args:
      limit_s: seconds for the tasks to end in.
    """
    name = self._thread.name
    if self._ended_by is None and self._thread.is_alive():
      # On its own thread: a notebook's thread has a running loop of its own.
      winding_up = self._winding_up
      if winding_up is None or winding_up.done():
        winding_up = self._winding_up = self.spawn(_cancel_others(limit_s))
      done, _ = concurrent.futures.wait([winding_up], 2 * limit_s)
      if not done:
        self._tell(
            f'the event loop {name!r} is left behind, it has not answered for'
            f' {2 * limit_s:g} s: {self.explain()}'
        )
        return
      left = winding_up.result()
      for place in left:
        self._tell(
            f'left behind, it was cancelled {limit_s:g} s ago and has not'
            f' ended: {place}'
        )
      if left:
        return  # their loop goes on with them
      self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join(limit_s)
    if not self._thread.is_alive():
      self._loop.close()


async def _cancel_others(limit_s: float) -> list[str]:
  """Cancels all other tasks of the loop; those that do not end in time."""
  others = asyncio.all_tasks() - {asyncio.current_task()}
  if not others:
    return []
  for task in others:
    task.cancel()
  _, left = await asyncio.wait(others, timeout=limit_s)
  return sorted(map(_place, left))


def _place(task: asyncio.Task) -> str:
  """A task by name, with the line that it is at."""
  frames = task.get_stack()
  if not frames:
    return task.get_name()
  file, line = frames[-1].f_code.co_filename, frames[-1].f_lineno
  return f'{task.get_name()} ({file}:{line})'


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The engines of one process, their client and their weights.

  Attributes:
    loops: one for each replica.
    client: who sends requests to them.
    publisher: who sends weights to them.
    evicts: whether a replica that is dead for good is left out, and the others
      go on.
  """

  loops: tuple[EngineLoop, ...]
  client: EngineClient
  publisher: Publisher
  evicts: bool = True

  def check(self) -> None:
    """Raises what ended a replica, if too few of them live to go on.

    That is none, or one less than there were where nobody is evicted.
    """
    require_living(self.loops, self.evicts)

  def explain(self) -> str:
    """Describes what each engine does and who waits for it, a line each."""
    return '\n  '.join(loop.explain() for loop in self.loops)

  def compile_ahead(self, dtype: str = '') -> None:
    """Begins to compile what the engines will need, beside whatever goes on.

    Args:
      dtype: of their weights; empty for the policy's own.
    """
    for loop in self.loops:
      weights = loop.engine.abstract_weights(dtype)
      loop.engine.compile_ahead(weights, exact=loop.exact)

  @property
  def compiled(self) -> int:
    """Programs that the engines have compiled ahead so far."""
    return sum(loop.engine.programs.done for loop in self.loops)

  def stop(self) -> None:
    """Ends all loops; see `EngineLoop.stop`."""
    stop_all(self.loops)

  def close(self) -> None:
    """Gives up what is still to be compiled, when no loop runs any more."""
    for loop in self.loops:
      loop.engine.programs.close()

  @property
  def tokens(self) -> int:
    """Tokens drawn by all replicas so far."""
    return sum(loop.counts.tokens for loop in self.loops)

  @property
  def discarded_tokens(self) -> int:
    """Tokens drawn behind stop strings by all replicas so far."""
    return sum(loop.counts.discarded_tokens for loop in self.loops)

  @property
  def cache_releases(self) -> int:
    """Times that a replica let go of its cache for others so far."""
    return sum(loop.counts.cache_releases for loop in self.loops)

  @property
  def engine_counts(self) -> dict[str, float]:
    """Counts cache hits, shortages of pages, and slots used.

    By the names of the metrics, over all replicas; the pages are those of the
    replica that held most of them at once.
    """
    counts = [loop.counts for loop in self.loops]
    places = sum(
        loop.counts.steps * loop.engine.settings.slots for loop in self.loops
    )
    busy = sum(c.busy_slot_steps for c in counts)
    return {
        'rebuilt_tokens': sum(c.rebuilt_tokens for c in counts),
        'slots_busy_fraction': busy / max(1, places),
        'prefix_hits': sum(c.prefix_hits for c in counts),
        'prefix_tokens': sum(c.prefix_tokens for c in counts),
        'preemptions': sum(c.preemptions for c in counts),
        'peak_pages': max(c.peak_pages for c in counts),
    }

  @property
  def idle_seconds(self) -> float:
    """Seconds that the replicas had nothing to do so far, added up."""
    return sum(loop.counts.idle_seconds for loop in self.loops)


def build_rollout(
    config: ModelConfig,
    settings: EngineSettings,
    slices: Slices,
    rules: Rules,
    *,
    swap: SwapMode,
    events: EventLog,
    dispatch_lock: contextlib.AbstractContextManager | None,
    tokenizer: Tokenizer,
    dtype: str | None = None,
    merge: bool = False,
    restarts: int = 0,
    evicts: bool = True,
    exact: bool = False,
    release_idle: bool = False,
) -> Rollout:
  """Builds an engine and a loop for each rollout mesh, and connects them.

  Args:
    config: the policy's shape.
    settings: shapes of one engine.
    slices: where they will be.
    rules: logical to mesh axes.
    swap: what new weights do to running requests.
    events: where spans go.
    dispatch_lock: held around device work that must take turns.
    tokenizer: reads answers that stop strings may end.
    dtype: of the weights on the rollout side; None to leave it.
    merge: whether adapters are merged where they arrive, so that engines run a
      policy without any.
    restarts: times that the thread of each may begin anew after an exception.
    evicts: whether the others go on without one that is dead for good.
    exact: whether caches may not change an answer in its last bits.
    release_idle: whether caches are let go of while nothing is to do, so that
      training on the same devices has their room.
  """
  served = lora.without(config) if merge else config
  rules = rules.for_rollout()
  loops, targets = [], []
  for i, mesh in enumerate(slices.rollout):
    engine = Engine(served, settings, mesh, rules)
    # A second loop on this engine (`build_evaluator`) takes turns with it: two
    # programs with collectives that reach the devices of a mesh in different
    # orders would wait for each other for ever.
    pair = threading.Lock() if mesh.size > 1 else None
    loops.append(
        EngineLoop(
            engine,
            str(i),
            swap=swap,
            events=events,
            dispatch_lock=dispatch_lock or pair,
            tokenizer=tokenizer,
            restarts=restarts,
            exact=exact,
            release_idle=release_idle,
        )
    )
    shardings, finish = engine.param_shardings, None
    if merge:
      finish = lora.merging(config, dtype or '', shardings)
      shardings = parameters.param_shardings(config, mesh, rules)
    targets.append(
        Target(
            f'engine/{i}',
            shardings,
            loops[i].set_weights,
            finish,
            alive=lambda loop=loops[i]: loop.health() != 'dead',
        )
    )
  return Rollout(
      tuple(loops),
      EngineClient(loops),
      Publisher(targets, events=events, dtype=dtype),
      evicts,
  )


def build_evaluator(rollout: Rollout, events: EventLog) -> Evaluator:
  """A second loop on each engine of the rollout, for evaluation.

  It takes turns with the first one on the devices where that one takes turns,
  and has a cache as long as it evaluates.
  """
  return Evaluator(
      [
          EngineLoop(
              loop.engine,
              f'evaluate/{loop.name}',
              swap='drain',
              events=events,
              dispatch_lock=loop.dispatch_lock,
              tokenizer=loop.tokenizer,
              lane=f'evaluate/{loop.name}',
              restarts=loop.restarts,
              exact=loop.exact,
              release_idle=True,
          )
          for loop in rollout.loops
      ],
      evicts=rollout.evicts,
  )


def pinned_weights(rollout: Rollout, version: int) -> list[Any]:
  """A version's parameters on each replica, as published: no copy.

  Raises:
    LookupError: the version is not held any more.
  """
  held = rollout.publisher.get(version)
  return [held[f'engine/{loop.name}'] for loop in rollout.loops]


def require_memory(
    config: ModelConfig,
    settings: EngineSettings,
    slices: Slices,
    rules: Rules,
    *,
    dtype: str = '',
    trains: bool = True,
    pins: bool = False,
    merge: bool = False,
    turns: bool = False,
) -> None:
  """Refuses engines that the memory of their devices cannot hold.

  Args:
    config: the policy's shape.
    settings: shapes of one engine.
    slices: where they will be.
    rules: logical to mesh axes.
    dtype: of the weights on the rollout side; empty to leave it.
    trains: whether they generate for training, and not for evaluation alone.
    pins: whether evaluation goes on beside training.
    merge: whether adapters are merged where they arrive.
    turns: whether they and training take turns on the same devices.

  Raises:
    ConfigError: with the numbers.
  """
  served = lora.without(config) if merge else config
  for mesh in slices.rollout:
    if all(device.memory_stats() is None for device in mesh.devices.flat):
      continue
    engine = Engine(served, settings, mesh, rules.for_rollout())
    memory.require_room_on_all(
        engine,
        memory.estimate(
            engine,
            dtype,
            trains=trains,
            pins=pins,
            merges=config if merge else None,
            turns=turns,
        ),
    )
