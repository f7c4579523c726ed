"""The client: `await generate(request)` over the replicas' engine loops.

Requests of one draw go to one replica, so that its group shares a prefill;
the replica is the one with the least to do when the first of them comes.
`generate_samples` asks for several answers to one prompt.
"""

from __future__ import annotations

import asyncio
import dataclasses
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


class EngineClient:
  """Routes requests to engine loops of the same process."""

  def __init__(self, replicas: Sequence[Replica]):
    self._replicas = tuple(replicas)
    self._chosen: dict[tuple[Purpose, int], tuple[Replica, int]] = {}

  async def generate(self, request: Request) -> Completion:
    """Raises `ValueError` for a request that does not fit, `EngineStopped`
    when the replica ends before it answered."""
    here = asyncio.get_running_loop()
    future = here.create_future()

    def answer(outcome: Completion | BaseException) -> None:
      if not here.is_closed():
        here.call_soon_threadsafe(settle, outcome)

    def settle(outcome: Completion | BaseException) -> None:
      if future.done():
        return  # the caller gave up
      if isinstance(outcome, BaseException):
        future.set_exception(outcome)
      else:
        future.set_result(outcome)

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
