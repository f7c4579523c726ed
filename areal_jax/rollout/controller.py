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
import collections
import dataclasses
import math
from typing import Any, Callable, Iterator, Mapping, Protocol

from areal_jax.ledger import Ledger
from areal_jax.rollout.failures import (
    Breaker,
    Failed,
    FailureSettings,
    Kind,
    Policy,
    Unfinished,
)
from areal_jax.rollout.workflow import MemberFailed, Workflow, call_workflow
from areal_jax.types import (
    Draw,
    DropReason,
    Group,
    RewardStatus,
    Trajectory,
)

_SHOWN = 8  # of what an explanation lists
_LOOKS = 8  # times in `group_s` that a running answer is looked at
_STOP_SECONDS = 20.0  # for workflows to wind up in


class Draws(Protocol):
  """An iterator of draws that knows where it stands."""

  def __next__(self) -> Draw:
    ...

  def state(self) -> dict[str, Any]:
    """JSON-able position, from which it can be restored exactly."""

  def restore(self, state: Mapping[str, Any]) -> None:
    """Goes on from such a position."""


class Buffer(Protocol):
  """The protocol of a buffer for finished groups."""

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


@dataclasses.dataclass
class Costs:
  """Answers and their sampled tokens whose groups have left the controller.

  Attributes:
    trained_answers: in groups that were trained.
    trained_tokens: sampled for them.
    dropped_answers: in groups that were dropped.
    dropped_tokens: sampled for them.
  """

  trained_answers: int = 0
  trained_tokens: int = 0
  dropped_answers: int = 0
  dropped_tokens: int = 0

  def add(self, group: Group, *, trained: bool) -> None:
    """Counts a group that leaves."""
    answers = len(group.trajectories)
    tokens = sum(int((t.versions >= 0).sum()) for t in group.trajectories)
    if trained:
      self.trained_answers += answers
      self.trained_tokens += tokens
    else:
      self.dropped_answers += answers
      self.dropped_tokens += tokens

  @property
  def length_bias(self) -> float:
    """Mean length of trained answers over that of all that left, less 1."""
    answers = self.trained_answers + self.dropped_answers
    tokens = self.trained_tokens + self.dropped_tokens
    if not (self.trained_answers and tokens):
      return 0.0
    return (self.trained_tokens / self.trained_answers) / (tokens / answers) - 1


@dataclasses.dataclass(frozen=True)
class Snapshot:
  """A consistent cut: every drawn problem is in exactly one place.

  Attributes:
    ledger: the counts at the cut; none in training.
    ready: finished groups, those in training first, then oldest first.
    running: draws under way; after a restart they are generated again.
    data: position of the data iterator behind the last draw.
    failed_members: answers without a score so far.
    failed_groups: groups with such an answer so far.
  """

  ledger: Ledger
  ready: tuple[Group, ...]
  running: tuple[Draw, ...]
  data: dict[str, Any]
  failed_members: int = 0
  failed_groups: int = 0


class Controller:
  """Runs groups of workflows as far ahead as the ledger admits.

  Args:
    draws: where problems come from.
    workflow: turns (draw, sample, admitted version) into a trajectory.
    ledger: admission arithmetic.
    buffer: finished groups.
    group_size: G, samples a problem.
    max_running: how much is under way at once, whatever the ledger would admit:
      no group starts while more answers are missing than all but one of so
      many groups have. Whole groups would not do as a measure: one long answer
      would hold the room of its finished siblings, and slots would be idle.
    clock: seconds; monotonic.
    max_ready: no group starts while so many wait for training, so never more
      wait than it and those that were under way. At least the size of a batch,
      or none is ever complete.
    group_s: seconds that the answers of a group may take, those left out in
      which the group is `served`. Then the missing ones are given up.
    served: whether somebody works for a draw who has a limit of his own, such
      as an engine that samples for it or a verifier: a long answer is not
      a workflow that hangs.
    observe: called with (kind, draw_index, fields) for the event log.
    failures: what becomes of answers that fail, and how many may; None for
      the settings as they come.
    informative: whether a finished group may be trained. One that may not is
      dropped and counted, and its room goes to a further draw, so admission
      keeps its bound and every draw its one place. None to train all.
    uninformative_limit: after so many drops of this kind since the last
      version, groups are admitted that are trained whatever they turn out to
      be, so a step is never without end. What was admitted before may still be
      dropped. It is settled at admission, and so that at η = 0 the order of the
      data alone decides, not which group finished first.

  Attributes:
    ledger: the counts.
    costs: tokens by what became of them.
    failed_members: samples without a score so far.
    failed_groups: groups with such a sample so far, those included that have
      no other and are dropped.
    retried_members: times that a sample was tried again.
    unfinished_members: times that a sample was given up because it took too
      long or its workflow was cancelled by somebody else.
    answers: samples that came to an end, scored or not.
    ready_pauses: how often admission stopped for `max_ready` alone.
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
      max_ready: float = math.inf,
      group_s: float = math.inf,
      served: Callable[[Draw], bool] = lambda draw: False,
      observe: Callable[..., None] = lambda kind, draw_index, **fields: None,
      failures: FailureSettings | None = None,
      informative: Callable[[Group], bool] | None = None,
      uninformative_limit: int = 0,
  ):
    self.ledger = ledger
    self.costs = Costs()
    self.failed_members = 0
    self.failed_groups = 0
    self.retried_members = 0
    self.unfinished_members = 0
    self.answers = 0
    self.ready_pauses = 0
    self._draws = draws
    self._workflow = workflow
    self._buffer = buffer
    self._group_size = group_size
    self._max_running = max_running
    self._max_ready = max_ready
    self._group_s = group_s
    self._served = served
    self._clock = clock
    self._observe = observe
    self._failures = failures or FailureSettings()
    self._breaker = Breaker(self._failures)
    self._informative = informative
    self._uninformative_limit = uninformative_limit
    self._uninformative = 0  # dropped since the last version
    self._admitted = 0  # since the last version
    self._running: dict[int, tuple[Draw, asyncio.Task]] = {}
    # Calls of the workflow; also those that were given up and have not ended.
    self._calls: set[asyncio.Task] = set()
    self._stopping = False
    # Answers that each running group waits for; one while it is put together.
    self._missing: dict[int, int] = {}
    # The same by sample, and when the group was started.
    self._members: dict[int, tuple[float, set[int]]] = {}
    # Draws of an earlier attempt, in flight in the ledger, still to be started.
    self._again: collections.deque[Draw] = collections.deque()
    self._training: list[Group] = []
    self._changed = asyncio.Event()
    self._failure: BaseException | None = None
    self._admission: asyncio.Task | None = None

  def restore(self, snapshot: Snapshot) -> None:
    """Goes on from a cut. Call it once, before `start`.

    Draws that were running are generated again before any new one, counted as
    one attempt more; the ledger has them in flight already. Batch size and η
    stay those of this run: with a smaller bound than before, nothing is drawn
    until what is in flight has come below it.

    Raises:
      ValueError: the counts of the ledger are not those of the groups.
      ConfigError: the position is of other data.
    """
    saved = snapshot.ledger
    counts = (saved.running, saved.ready, saved.training)
    held = (len(snapshot.running), len(snapshot.ready), 0)
    if counts != held or not saved.balanced():
      raise ValueError(
          f'the saved ledger has (running, ready, training) {counts}, drawn'
          f' {saved.drawn}, trained {saved.trained} and dropped'
          f' {saved.dropped.total()}; its groups are {held}'
      )
    self._draws.restore(snapshot.data)
    self.ledger = dataclasses.replace(
        saved,
        batch_size=self.ledger.batch_size,
        eta=self.ledger.eta,
        dropped=saved.dropped.copy(),
    )
    self.failed_members = snapshot.failed_members
    self.failed_groups = snapshot.failed_groups
    again = sorted(snapshot.running, key=lambda draw: draw.draw_index)
    self._again.extend(
        dataclasses.replace(draw, attempt=draw.attempt + 1) for draw in again
    )
    # Draws were admitted in the order of their indices.
    indices = [record.draw_index for record in (*again, *snapshot.ready)]
    for draw_index in sorted(indices):
      self._buffer.expect(draw_index)
    for group in snapshot.ready:
      self._buffer.put(group)

  def start(self) -> None:
    """Starts to draw problems. Call it on the event loop."""
    self._admission = asyncio.create_task(self._admit(), name='admission')
    self._admission.add_done_callback(self._task_done)

  async def stop(self, limit_s: float = _STOP_SECONDS) -> list[str]:
    """Gives up what is running. Its draws stay in flight in the ledger.

    Args:
      limit_s: seconds after which tasks that were cancelled and have not ended
        are left behind.

    Returns:
      What those were at, in words; empty if there are none.
    """
    self._stopping = True
    tasks = {task for _, task in self._running.values()}
    if self._admission:
      tasks.add(self._admission)
    for task in tasks:
      task.cancel()  # a group cancels the calls of its workflow
    tasks |= self._calls
    if not tasks:
      return []
    _, left = await asyncio.wait(tasks, timeout=limit_s)
    return sorted(task.get_name() for task in left)

  async def next_batch(self, groups: int) -> list[Group]:
    """Waits for `groups` groups and takes them into training.

    Under the policy `drop`, groups that became too old leave here, and their
    room goes to new draws.

    Raises:
      TooManyFailures: most of the last answers have no score.
      BaseException: what ended a workflow or the admission, as it was raised.
    """
    while True:
      if self._failure is not None:
        raise self._failure
      for group in self._buffer.stale(self.ledger.version):
        self._drop(group, DropReason.STALE, was='ready')
      batch = self._buffer.take(groups)
      if batch is not None:
        self.ledger.take(len(batch))
        self._training += batch
        self._wake()  # fewer are ready
        return batch
      await self._change()

  def published(self, version: int) -> None:
    """The version trained from the groups in training is with the engines."""
    self.ledger.publish(version)
    for group in self._training:
      self.costs.add(group, trained=True)
    self._training = []
    self._uninformative = self._admitted = 0
    self._wake()

  def snapshot(self) -> Snapshot:
    """The consistent cut; one call, no await.

    Groups in training count as ready in it: their version is not out yet.
    """
    ledger = self.ledger
    return Snapshot(
        ledger=dataclasses.replace(
            ledger,
            ready=ledger.ready + ledger.training,
            training=0,
            dropped=ledger.dropped.copy(),
        ),
        ready=(*self._training, *self._buffer.groups),
        running=(*(draw for draw, _ in self._running.values()), *self._again),
        data=self._draws.state(),
        failed_members=self.failed_members,
        failed_groups=self.failed_groups,
    )

  def explain(self) -> str:
    """Describes who waits for whom: the ledger's terms, then groups by age.

    Any thread may ask: what moves meanwhile may be told half.
    """
    ledger = self.ledger
    running = sorted(self._running)
    shown = ', '.join(map(str, running[:_SHOWN]))
    shown += ' ...' if running[_SHOWN:] else ''
    head = (
        f'version {ledger.version}: {ledger.running} groups running (draws'
        f' {shown or "none"}), {ledger.ready} ready, {ledger.training} in'
        f' training, limit {ledger.limit:g}; last failure:'
        f' {self._breaker.last or "none"}'
    )
    now = self._clock()
    oldest = sorted(self._members.items(), key=lambda item: item[1][0])
    lines = [
        f'draw {draw} waits for samples {sorted(samples)} of'
        f' {self._group_size}, for {now - since:.1f} s'
        for draw, (since, samples) in oldest[:_SHOWN]
        if samples
    ]
    return '\n    '.join([head, *lines])

  async def _admit(self) -> None:
    paused = False
    while True:
      # First what was under way before a restart: it is admitted already, and
      # `fifo` may wait for it.
      while self._again and self._has_room():
        self._start(self._again.popleft())
      while self.ledger.admits() and self._has_room():
        if self.ledger.ready >= self._max_ready:
          self.ready_pauses += not paused
          paused = True
          break
        paused = False
        draw = next(self._draws)
        self.ledger.admit()
        self._buffer.expect(draw.draw_index)
        self._start(draw)
      await self._change()

  def _start(self, draw: Draw) -> None:
    limit = self._uninformative_limit
    # At η = 0 the second follows from the first, whenever drops are heard of.
    spent = self._admitted >= self.ledger.batch_size + limit
    spent = spent and self._uninformative >= limit
    keep = self._informative is None or spent
    self._admitted += 1
    task = asyncio.create_task(
        self._group(draw, self.ledger.version, keep),
        name=f'group of draw {draw.draw_index}',
    )
    task.add_done_callback(self._task_done)
    self._running[draw.draw_index] = (draw, task)
    self._missing[draw.draw_index] = self._group_size
    members = set(range(self._group_size))
    self._members[draw.draw_index] = (self._clock(), members)
    self._observe(
        'admit',
        draw.draw_index,
        version=self.ledger.version,
        attempt=draw.attempt,
    )

  async def _group(self, draw: Draw, version: int, keep: bool) -> None:
    async with asyncio.TaskGroup() as members:
      tasks = [
          members.create_task(self._member(draw, sample, version))
          for sample in range(self._group_size)
      ]
    outcomes = [task.result() for task in tasks]
    failures = [o for o in outcomes if isinstance(o, Failed)]
    group = Group(
        draw=draw,
        size=self._group_size,
        trajectories=tuple(o for o in outcomes if isinstance(o, Trajectory)),
        failed=tuple((o.sample, o.reason) for o in failures),
        admitted_version=version,
    )
    unfinished = any(failed.kind == 'unfinished' for failed in failures)
    for held in (self._running, self._missing, self._members):
      del held[draw.draw_index]
    self._finish(group, keep, unfinished)

  async def _member(
      self, draw: Draw, sample: int, version: int
  ) -> Trajectory | Failed:
    try:
      outcome = await self._tried(draw, sample, version)
    finally:
      self.answers += 1
      self._members[draw.draw_index][1].discard(sample)
      missing = self._missing[draw.draw_index]
      self._missing[draw.draw_index] = max(1, missing - 1)
      if self._has_room():
        self._wake()
    if isinstance(outcome, Failed):
      place = f'draw {draw.draw_index} sample {sample}'
      self._breaker.record(outcome.kind, f'{place}: {outcome.reason}')
    else:
      self._breaker.record(None)
    return outcome

  async def _tried(
      self, draw: Draw, sample: int, version: int
  ) -> Trajectory | Failed:
    """Runs the workflow, again if the policy says so; what came of it."""
    for retry in range(self._failures.retries + 1):
      again = dataclasses.replace(draw, attempt=draw.attempt + retry)
      call = await self._called(again, sample, version)
      failure = self._failure_of(call)
      if failure is None:
        return call.result()
      kind, policy = self._policy(failure)
      reason = str(failure)
      if kind == 'workflow':
        reason = f'{type(failure).__name__}: {reason}'
      if kind == 'unfinished':
        self.unfinished_members += 1
        self._observe('unfinished', draw.draw_index, sample=sample,
                      reason=reason)  # fmt: skip
      if policy == 'stop':
        failure.add_note(f'in draw {draw.draw_index} sample {sample}')
        raise failure
      if policy == 'drop' or retry == self._failures.retries:
        break
      self.retried_members += 1
      self._observe('retry', draw.draw_index, sample=sample, reason=reason)
    return Failed(sample, kind, reason)

  async def _called(
      self, draw: Draw, sample: int, version: int
  ) -> asyncio.Task[Trajectory]:
    """A call of the workflow: done, or cancelled at its time limit.

    The call is a task of its own. So its CancelledError is not ours, and nobody
    waits for one that swallows a cancellation.
    """
    call = call_workflow(self._workflow, draw, sample, version)
    self._calls.add(call)
    call.add_done_callback(self._call_done)
    look = self._group_s / _LOOKS if self._group_s < math.inf else None
    alone = 0  # looks in a row at which nobody served the draw
    try:
      while alone < _LOOKS and not call.done():
        await asyncio.wait([call], timeout=look)
        alone = 0 if self._served(draw) else alone + 1
    finally:  # also where we are cancelled ourselves
      if not call.done():
        call.cancel()
    return call

  def _call_done(self, call: asyncio.Task) -> None:
    self._calls.discard(call)
    if not call.cancelled():
      call.exception()  # has been looked at: nobody may wait any more

  def _failure_of(self, call: asyncio.Task) -> BaseException | None:
    """What a call failed with; None if there is a trajectory."""
    if not call.done():
      return Unfinished(
          f'given up: no answer for {self._group_s:g} s (rollout.group_s) in'
          ' which neither an engine nor a verifier worked for its group'
      )
    if call.cancelled():
      return Unfinished('the workflow was cancelled from within')
    return call.exception()

  def _policy(self, failure: BaseException) -> tuple[Kind, Policy]:
    """The kind of a failure, and what becomes of the answer."""
    if isinstance(failure, Unfinished):
      return 'unfinished', self._failures.unfinished
    if isinstance(failure, MemberFailed):
      said = failure.trajectory
      if said and said.reward.status is RewardStatus.UNPARSEABLE:
        # What the verifier cannot read it will not read the next time either.
        return 'unparseable', 'drop'
      return 'scoring', self._failures.scoring
    if isinstance(failure, Exception):
      return 'workflow', self._failures.workflow
    return 'workflow', 'stop'

  def _has_room(self) -> bool:
    """Returns whether one more group may run."""
    missing = sum(self._missing.values())
    return missing <= (self._max_running - 1) * self._group_size

  def _finish(self, group: Group, keep: bool, unfinished: bool) -> None:
    self.failed_members += len(group.failed)
    self.failed_groups += bool(group.failed)
    if not group.trajectories:
      self._buffer.forget(group.draw_index)
      reason = DropReason.UNFINISHED if unfinished else DropReason.FAILED
      self._drop(group, reason, was='running')
    elif not (keep or self._informative(group)):
      self._uninformative += 1
      self._buffer.forget(group.draw_index)
      self._drop(group, DropReason.UNINFORMATIVE, was='running')
    else:
      self.ledger.finish()
      self._buffer.put(group)
      self._observe(
          'group',
          group.draw_index,
          version=group.head_version,
          members=len(group.trajectories),
          failed=len(group.failed),
      )
    broken = self._breaker.tripped()
    if broken is not None:
      self._fail(broken)
    self._wake()

  def _drop(self, group: Group, reason: DropReason, *, was: str) -> None:
    self.ledger.drop(reason, was=was)
    self.costs.add(group, trained=False)
    self._observe('drop', group.draw_index, reason=reason.value)
    self._wake()

  def _task_done(self, task: asyncio.Task) -> None:
    if task.cancelled():
      if not self._stopping:
        self._fail(
            RuntimeError(
                f'the task {task.get_name()!r} was cancelled, not by the'
                ' controller; wanted: a workflow cancels its own tasks alone'
            )
        )
    elif task.exception() is not None:
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
