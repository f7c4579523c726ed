"""One process: where each loop runs, and how they are joined and ended.

  main thread        the trainer; waits for groups
  'controller'       asyncio; waits for room in the ledger
  'engine-0', ...    a thread a rollout replica; waits for requests or weights

The trainer speaks to the controller's event loop by `AsyncThread.run`, to the
engines by the publisher alone. Every wait of the main thread has a time limit
and a message that says who is missing.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from typing import Any, Callable, Coroutine, TypeVar

from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import Slices
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.client import EngineClient
from areal_jax.rollout.engine import Engine, EngineSettings
from areal_jax.rollout.loop import EngineLoop, SwapMode
from areal_jax.telemetry.events import EventLog
from areal_jax.weights import Publisher, Target

T = TypeVar('T')

_LOOK_SECONDS = 0.5  # how often a wait looks whether an engine has died


class Stalled(TimeoutError):
  """Nothing came within the time limit; the text says who waits for whom."""


class AsyncThread:
  """An asyncio event loop in a thread of its own."""

  def __init__(self, name: str):
    self._loop = asyncio.new_event_loop()
    self._thread = threading.Thread(
        target=self._loop.run_forever, name=name, daemon=True
    )
    self._thread.start()

  def run(
      self,
      coroutine: Coroutine[Any, Any, T],
      *,
      timeout_s: float,
      explain: Callable[[], str] = lambda: '',
      check: Callable[[], None] = lambda: None,
  ) -> T:
    """Runs a coroutine on the loop and waits for its result.

    Args:
      coroutine: what to run.
      timeout_s: longest wait.
      explain: called on the loop when the time is over, for the message.
      check: called every half second in this thread; may raise.

    Raises:
      Stalled: it took longer.
    """
    future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
    end = time.monotonic() + timeout_s
    try:
      while True:
        left = end - time.monotonic()
        done, _ = concurrent.futures.wait(
            [future], max(0.0, min(_LOOK_SECONDS, left))
        )
        if done:
          return future.result()
        check()
        if time.monotonic() >= end:
          reason = self.call(explain)
          raise Stalled(f'no result after {timeout_s:g} s; {reason}')
    finally:
      future.cancel()

  def call(self, function: Callable[..., T], *arguments: Any) -> T:
    """Runs a plain function on the loop and returns its result."""

    async def once() -> T:
      return function(*arguments)

    return asyncio.run_coroutine_threadsafe(once(), self._loop).result()

  def stop(self) -> None:
    """Ends the loop once its callbacks have run."""
    self._loop.call_soon_threadsafe(self._loop.stop)
    self._thread.join()
    self._loop.close()


@dataclasses.dataclass(frozen=True)
class Rollout:
  """The engines of one process, their client and their weights."""

  loops: tuple[EngineLoop, ...]
  client: EngineClient
  publisher: Publisher

  def check(self) -> None:
    """Raises what ended an engine loop, if one has ended."""
    for loop in self.loops:
      failure = loop.failure()
      if failure is not None:
        raise failure

  def stop(self) -> None:
    for loop in self.loops:
      loop.stop()

  @property
  def tokens(self) -> int:
    """Tokens drawn by all replicas so far."""
    return sum(loop.counts.tokens for loop in self.loops)

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
    dtype: str | None = None,
) -> Rollout:
  """One engine and loop for each rollout mesh, and what joins them."""
  loops = []
  for i, mesh in enumerate(slices.rollout):
    engine = Engine(config, settings, mesh, rules)
    loops.append(
        EngineLoop(
            engine,
            str(i),
            swap=swap,
            events=events,
            dispatch_lock=dispatch_lock,
        )
    )
  targets = [
      Target(f'engine/{loop.name}', loop.engine.param_shardings,
             loop.set_weights)
      for loop in loops
  ]  # fmt: skip
  return Rollout(
      tuple(loops),
      EngineClient(loops),
      Publisher(targets, events=events, dtype=dtype),
  )
