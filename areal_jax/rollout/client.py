"""The client: `await generate(request)` over the replicas' engine loops.

Requests of one draw go to one replica, so that its group shares a prefill. It
is the living replica with the least to do when the first of them comes. If it
dies before it has answered, they go to another one and begin again there.
"""

from __future__ import annotations

import asyncio
import collections
import functools
from typing import Callable, Protocol, Sequence

from areal_jax.rollout.loop import EngineStopped, Health
from areal_jax.rollout.slots import Ticket
from areal_jax.types import Completion, Purpose, Request


class Client(Protocol):
  """The protocol that a workflow needs of an engine."""

  async def generate(self, request: Request) -> Completion:
    """The completion of one request; weights may change meanwhile."""


class Replica(Protocol):
  """The protocol that the client needs of an engine loop."""

  load: int  # requests queued or running

  def submit(
      self,
      request: Request,
      answer: Callable[[Completion | BaseException], None],
  ) -> Ticket:
    ...

  def abort(self, tickets: Sequence[Ticket]) -> None:
    ...

  def health(self) -> Health:
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
  """Routes requests to the living among the engine loops of this process."""

  def __init__(self, replicas: Sequence[Replica]):
    self._replicas = tuple(replicas)
    # By draw: the replica of its requests, and how many of them wait.
    self._chosen: dict[tuple[Purpose, int], tuple[Replica | None, int]] = {}
    self._mailboxes: dict[asyncio.AbstractEventLoop, _Mailbox] = {}

  async def generate(self, request: Request) -> Completion:
    """The completion of one request.

    A request whose replica died is asked again on a living one. Tokens are
    keyed by draw, sample and position, so it goes on as it would have gone on.

    Raises:
      ValueError: the request does not fit the engine's shapes.
      EngineStopped: no replica lives any more.
    """
    here = asyncio.get_running_loop()
    if here not in self._mailboxes:
      self._mailboxes[here] = _Mailbox(here)
    draw = (request.purpose, request.draw_index)
    replica, waiting = self._chosen.get(draw, (None, 0))
    self._chosen[draw] = (replica, waiting + 1)
    try:
      while True:
        replica = self._replica_of(draw)
        try:
          return await self._ask(replica, request, here)
        except EngineStopped:
          if all(r.health() == 'dead' for r in self._replicas):
            raise
          # Its choice is no longer alive, so the next round takes another one.
    finally:
      replica, waiting = self._chosen.pop(draw)
      if waiting > 1:
        self._chosen[draw] = (replica, waiting - 1)

  def serves(self, purpose: Purpose, draw_index: int) -> bool:
    """Whether a request of this draw is with an engine at the moment."""
    return (purpose, draw_index) in self._chosen

  def _replica_of(self, draw: tuple[Purpose, int]) -> Replica:
    """The replica of a draw, chosen anew if there is none or it is dead."""
    replica, waiting = self._chosen[draw]
    if replica is None or replica.health() == 'dead':
      living = [r for r in self._replicas if r.health() != 'dead']
      # A dead one says best why it takes no requests.
      replica = min(living or self._replicas, key=lambda r: r.load)
      self._chosen[draw] = (replica, waiting)
    return replica

  async def _ask(
      self,
      replica: Replica,
      request: Request,
      here: asyncio.AbstractEventLoop,
  ) -> Completion:
    """The completion by one replica; given up there if the caller gives up."""
    future = here.create_future()
    answer = functools.partial(self._mailboxes[here].put, future)
    ticket = replica.submit(request, answer)
    try:
      return await future
    except asyncio.CancelledError:
      replica.abort([ticket])
      raise
