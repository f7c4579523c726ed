"""The client: `await generate(request)` over the replicas' engine loops.

Requests of one draw go to one replica, so that its group shares a prefill;
the replica is the one with the least to do when the first of them comes.
`generate_samples` asks for several answers to one prompt.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from typing import Callable, Protocol, Sequence

import numpy as np

from areal_jax.types import Completion, Purpose, Request


class Client(Protocol):
  """What a workflow needs of an engine."""

  async def generate(self, request: Request) -> Completion:
    """The completion of one request; weights may change meanwhile."""


class Replica(Protocol):
  """What the client needs of an engine loop; `loop.EngineLoop` is one."""

  load: int  # requests queued or running

  def submit(
      self,
      request: Request,
      answer: Callable[[Completion | BaseException], None],
  ) -> None:
    ...

  def abort(self, request_ids: Sequence[str]) -> None:
    ...


class _Mailbox:
  """Answers on their way to the callers of one event loop.

  Many end in one dispatch. The loop is woken for the first of them and finds
  the others beside it: to wake it costs a system call, and often the
  interpreter as well, which the engine's thread then waits for.
  """

  def __init__(self, loop: asyncio.AbstractEventLoop):
    self._loop = loop
    self._waiting: collections.deque[
        tuple[asyncio.Future, Completion | BaseException]
    ] = collections.deque()
    self._woken = False

  def put(
      self, future: asyncio.Future, outcome: Completion | BaseException
  ) -> None:
    """Answers a future of the loop; from any thread."""
    self._waiting.append((future, outcome))
    # `_open` lowers the flag before it looks, so that what is put in after a
    # flag that was seen up is seen too.
    if not self._woken and not self._loop.is_closed():
      self._woken = True
      self._loop.call_soon_threadsafe(self._open)

  def _open(self) -> None:
    self._woken = False
    while self._waiting:
      future, outcome = self._waiting.popleft()
      if future.done():
        continue  # the caller gave up
      if isinstance(outcome, BaseException):
        future.set_exception(outcome)
      else:
        future.set_result(outcome)


class EngineClient:
  """Routes requests to engine loops of the same process."""

  def __init__(self, replicas: Sequence[Replica]):
    self._replicas = tuple(replicas)
    self._chosen: dict[tuple[Purpose, int], tuple[Replica, int]] = {}
    self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}

  async def generate(self, request: Request) -> Completion:
    """Raises `ValueError` for a request that does not fit, `EngineStopped`
    when the replica ends before it answered."""
    here = asyncio.get_running_loop()
    future = here.create_future()
    if here not in self._mailboxes:
      self._mailboxes[here] = _Mailbox(here)
    answer = functools.partial(self._mailboxes[here].put, future)
    draw = (request.purpose, request.draw_index)
    replica, waiting = self._chosen.get(draw, (None, 0))
    replica = replica or min(self._replicas, key=lambda r: r.load)
    self._chosen[draw] = (replica, waiting + 1)
    try:
      replica.submit(request, answer)
      return await future
    except asyncio.CancelledError:
      replica.abort([request.request_id])
      raise
    finally:
      replica, waiting = self._chosen.pop(draw)
      if waiting > 1:
        self._chosen[draw] = (replica, waiting - 1)


async def generate_samples(
    client: Client, request: Request, n: int
) -> tuple[Completion, ...]:
  """n answers to one prompt, in the order of their samples.

  Sample i has the random stream of `request.sample + i`, so what it says does
  not depend on n. All n share a prefill, as all requests of one draw do.

  Raises:
    ValueError: n is below 1.
    Exception: what the first to fail raised; the others are given up.
  """
  if n < 1:
    raise ValueError(f'n is {n}, wanted at least 1')
  samples = [
      dataclasses.replace(
          request,
          request_id=f'{request.request_id}/{i}',
          sample=request.sample + i,
      )
      for i in range(n)
  ]
  tasks = [asyncio.ensure_future(client.generate(s)) for s in samples]
  try:
    return tuple(await asyncio.gather(*tasks))
  finally:
    for task in tasks:
      task.cancel()


def echoed(
    request: Request, completion: Completion
) -> tuple[np.ndarray, np.ndarray]:
  """Prompt and answer as one: ids [P + T] int32, log-probs [P + T] float32.

  The prompt's log-probs are raw, the answer's those of the distribution sampled
  from; NaN where they were not asked for, and for the first token.
  """
  prompt = np.asarray(request.prompt_ids, np.int32)
  logps = completion.prompt_logps
  if logps is None:
    logps = np.full(len(prompt), np.nan, np.float32)
  return (
      np.concatenate([prompt, completion.ids]),
      np.concatenate([logps, completion.logps]),
  )
