"""The controller: draws problems, keeps generation ahead of training, no more.

Pure asyncio. Clock, workflow (and through it client and reward) and data come
in as arguments; there are no threads and no `time.time()` in here, so the same
code runs under a virtual clock. It owns the ledger, the buffer and the data
iterator, and all its methods are called on its event loop.

Flows in: draws, and "version v is published". Flows out: batches of B groups.

  admission task --draw--> group task (G workflows) --Group--> buffer
        ^                                                        |
        '---- ledger has room (finish, drop, publish) <----- next_batch
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, Callable, Iterator, Protocol

from areal_jax.ledger import Ledger
from areal_jax.rollout.workflow import MemberFailed, Workflow
from areal_jax.types import Draw, DropReason, Group, Trajectory


class Draws(Protocol):
  """An iterator of draws that knows where it stands."""

  def __next__(self) -> Draw:
    ...

  def state(self) -> dict[str, Any]:
    """JSON-able position, from which it can be restored exactly."""


class Buffer(Protocol):
  """What the controller needs of a place for finished groups."""

  groups: tuple[Group, ...]

  def __len__(self) -> int:
    ...

  def expect(self, draw_index: int) -> None:
    ...

  def forget(self, draw_index: int) -> None:
    ...

  def put(self, group: Group) -> None:
    ...

  def stale(self, version: int) -> list[Group]:
    ...

  def take(self, groups: int) -> list[Group] | None:
    ...


class TooManyFailures(RuntimeError):
  """Group after group has no scored member; the last reason is in the text."""


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A consistent cut: every drawn problem is in exactly one place.

  Attributes:
    ledger: the counts at the cut.
    ready: finished groups, oldest first.
    running: draws under way; after a restart they are generated again.
    data: position of the data iterator behind the last draw.
  """

  ledger: Ledger
  ready: tuple[Group, ...]
  running: tuple[Draw, ...]
  data: dict[str, Any]


class Controller:
  """Runs groups of workflows as far ahead as the ledger admits.

  Args:
    draws: where problems come from.
    workflow: turns (draw, sample, admitted version) into a trajectory.
    ledger: admission arithmetic.
    buffer: finished groups.
    group_size: G, samples a problem.
    max_running: groups under way at once, whatever the ledger would admit.
    clock: seconds; monotonic.
    observe: called with (kind, draw_index, fields) for the event log.
    failure_limit: groups in a row without a scored member that end the run.
  """

  def __init__(
      self,
      *,
      draws: Iterator[Draw] | Draws,
      workflow: Workflow,
      ledger: Ledger,
      buffer: Buffer,
      group_size: int,
      max_running: int,
      clock: Callable[[], float],
      observe: Callable[..., None] = lambda kind, draw_index, **fields: None,
      failure_limit: int = 16,
  ):
    self.ledger = ledger
    self.failed_members = 0
    self._draws = draws
    self._workflow = workflow
    self._buffer = buffer
    self._group_size = group_size
    self._max_running = max_running
    self._clock = clock
    self._observe = observe
    self._failure_limit = failure_limit
    self._failures_in_a_row = 0
    self._last_failure = ''
    self._running: dict[int, tuple[Draw, asyncio.Task]] = {}
    self._changed = asyncio.Event()
    self._failure: BaseException | None = None
    self._admission: asyncio.Task | None = None

  def start(self) -> None:
    """Starts to draw problems. Call it on the event loop."""
    self._admission = asyncio.create_task(self._admit())
    self._admission.add_done_callback(self._task_done)

  async def stop(self) -> None:
    """Gives up what is running. Its draws stay in flight in the ledger."""
    tasks = [task for _, task in self._running.values()]
    if self._admission:
      tasks.append(self._admission)
    for task in tasks:
      task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

  async def next_batch(self, groups: int) -> list[Group]:
    """Waits for `groups` groups and takes them into training.

    Under the policy `drop`, groups that became too old leave here, and their
    room goes to new draws.

    Raises:
      TooManyFailures: rewards or answers fail one after another.
      BaseException: what ended a workflow or the admission, as it was raised.
    """
    while True:
      if self._failure is not None:
        raise self._failure
      for group in self._buffer.stale(self.ledger.version):
        self._drop(group.draw_index, DropReason.STALE, was='ready')
      batch = self._buffer.take(groups)
      if batch is not None:
        self.ledger.take(len(batch))
        return batch
      await self._change()

  def published(self, version: int) -> None:
    """The version trained from the groups in training is with the engines."""
    self.ledger.publish(version)
    self._wake()

  def snapshot(self) -> Snapshot:
    """The consistent cut; one call, no await."""
    return Snapshot(
        ledger=dataclasses.replace(
            self.ledger, dropped=self.ledger.dropped.copy()
        ),
        ready=self._buffer.groups,
        running=tuple(draw for draw, _ in self._running.values()),
        data=self._draws.state(),
    )

  def explain(self) -> str:
    """Who waits for whom, in one line."""
    ledger = self.ledger
    running = sorted(self._running)
    shown = ', '.join(map(str, running[:8])) + (' ...' if running[8:] else '')
    return (
        f'version {ledger.version}: {ledger.running} groups running (draws'
        f' {shown or "none"}), {ledger.ready} ready, {ledger.training} in'
        f' training, limit {ledger.limit:g}; last failure:'
        f' {self._last_failure or "none"}'
    )

  async def _admit(self) -> None:
    while True:
      while self.ledger.admits() and self.ledger.running < self._max_running:
        draw = next(self._draws)
        self.ledger.admit()
        self._buffer.expect(draw.draw_index)
        task = asyncio.create_task(self._group(draw, self.ledger.version))
        task.add_done_callback(self._task_done)
        self._running[draw.draw_index] = (draw, task)
        self._observe('admit', draw.draw_index, version=self.ledger.version)
      await self._change()

  async def _group(self, draw: Draw, version: int) -> None:
    async with asyncio.TaskGroup() as members:
      tasks = [
          members.create_task(self._member(draw, sample, version))
          for sample in range(self._group_size)
      ]
    outcomes = [task.result() for task in tasks]
    group = Group(
        draw=draw,
        size=self._group_size,
        trajectories=tuple(o for o in outcomes if isinstance(o, Trajectory)),
        failed=tuple(o for o in outcomes if not isinstance(o, Trajectory)),
        admitted_version=version,
    )
    del self._running[draw.draw_index]
    self._finish(group)

  async def _member(
      self, draw: Draw, sample: int, version: int
  ) -> Trajectory | tuple[int, str]:
    try:
      return await self._workflow(draw, sample, version)
    except MemberFailed as failure:
      return sample, str(failure)

  def _finish(self, group: Group) -> None:
    self.failed_members += len(group.failed)
    for sample, reason in group.failed:
      self._last_failure = f'draw {group.draw_index} sample {sample}: {reason}'
    if group.trajectories:
      self._failures_in_a_row = 0
      self.ledger.finish()
      self._buffer.put(group)
      self._observe(
          'group',
          group.draw_index,
          version=group.head_version,
          members=len(group.trajectories),
          failed=len(group.failed),
      )
    else:
      self._failures_in_a_row += 1
      self._buffer.forget(group.draw_index)
      self._drop(group.draw_index, DropReason.FAILED, was='running')
      if self._failures_in_a_row >= self._failure_limit:
        self._fail(
            TooManyFailures(
                f'{self._failures_in_a_row} groups in a row have no scored'
                f' member; {self._last_failure}'
            )
        )
    self._wake()

  def _drop(self, draw_index: int, reason: DropReason, *, was: str) -> None:
    self.ledger.drop(reason, was=was)
    self._observe('drop', draw_index, reason=reason.value)
    self._wake()

  def _task_done(self, task: asyncio.Task) -> None:
    if not task.cancelled() and task.exception() is not None:
      self._fail(task.exception())

  def _fail(self, failure: BaseException) -> None:
    if isinstance(failure, BaseExceptionGroup):
      failure = failure.exceptions[0]  # its siblings were cancelled for it
    self._failure = self._failure or failure
    self._wake()

  def _wake(self) -> None:
    """Wakes all who wait for a change; each then looks for itself."""
    self._changed.set()
    self._changed = asyncio.Event()

  async def _change(self) -> None:
    await self._changed.wait()
