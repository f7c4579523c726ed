"""The engine loop: one thread a rollout replica that never stops decoding.

Flows in: requests (from the client, any thread) and new weights (from the
publisher). Flows out: a `Completion` for each request, by callback. Between two
dispatches of up to k decode steps the loop takes new weights, admits waiting
requests into free slots, caches what they begin with and hands finished ones
back; it waits only when no slot is active and nothing is queued.

Who is in which slot is kept in `slots`, which pages are whose in `cache`, what
a dispatch is made of in `dispatch`. Two loops may run one engine, each with a
decode state and weights of its own: evaluation does so beside training, and
nothing is compiled twice.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import time
import types
from typing import Any, Callable, Iterator, Literal, Sequence

import jax
import numpy as np

from areal_jax.rollout import engine_programs
from areal_jax.rollout.decode_state import Pieces, StepResult
from areal_jax.rollout.dispatch import DispatchChoice
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.slots import Running, Slots, Ticket, completion_of
from areal_jax.rollout.stopping import Stop, StopStrings
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.programs import Name, text_of
from areal_jax.telemetry.stopwatch import Stopwatch
from areal_jax.tokenizer.base import Tokenizer
from areal_jax.types import Completion, Request, StopReason

# What new weights do to running requests:
# * `recompute`: their caches are rebuilt under the new weights and decoding
#   goes on (the paper's way; https://arxiv.org/abs/2505.24298 section 4.1),
# * `keep`: decoding goes on over the old caches. The recorded log-probs are
#   still those of the distribution sampled from, but that is a mixture of
#   versions which no single set of weights reproduces,
# * `drain`: no admission until the running requests have ended, then the swap,
# * `restart`: running requests start over under the new weights.
SwapMode = Literal['recompute', 'keep', 'drain', 'restart']
Health = Literal['waiting', 'busy', 'dead']
Params = Any

_STOP_SECONDS = 600.0  # for a dispatch that is under way, or a compilation
_SHOWN = 8  # slots that an explanation lists
_NOTHING = 'nothing yet'
_WAITS = 'waits for requests or weights'


class EngineStopped(RuntimeError):
  """The loop no longer runs; the cause is chained."""


class _Stops(Exception):
  """The loop shall end in the middle of a wait."""


@dataclasses.dataclass(frozen=True)
class Weights:
  """A version and its parameters on this replica's mesh, never apart."""

  version: int
  params: Params

  def ready(self) -> bool:
    """Returns whether the transfer has arrived."""
    return all(leaf.is_ready() for leaf in jax.tree.leaves(self.params))


@dataclasses.dataclass
class LoopCounts:
  """Counters of a loop since it started; only the loop writes them."""

  tokens: int = 0
  steps: int = 0
  swaps: int = 0
  rebuilt_tokens: int = 0
  restarted_tokens: int = 0
  discarded_tokens: int = 0  # drawn behind a stop string
  prefills: int = 0  # pieces of sequences
  prefill_tokens: int = 0
  prefix_hits: int = 0  # requests that began with what was cached already
  prefix_tokens: int = 0  # which were not computed for that reason
  preemptions: int = 0
  peak_pages: int = 0  # held at once
  idle: Stopwatch = dataclasses.field(default_factory=Stopwatch)
  busy_slot_steps: int = 0
  cache_releases: int = 0  # the cache let go of, for others to use the room
  deaths: int = 0  # of the thread

  @property
  def idle_seconds(self) -> float:
    """Seconds without anything to do, a pause that goes on included."""
    return self.idle.seconds


class EngineLoop:
  """Runs one engine in a thread of its own.

  Args:
    engine: the programs and shapes.
    name: lane name of this replica, e.g. '0'.
    swap: what new weights do to running requests.
    events: where spans go.
    dispatch_lock: held around device work where others work on the same
      devices.
    tokenizer: reads answers that stop strings may end; without it a request
      with stop strings is refused.
    lane: the one lane that all spans go to; empty for one a kind, 'generate/0',
      'prefill/0' and so on.
    restarts: times that the thread may begin anew after an exception.
    exact: whether nothing that happens to be in the cache or in other slots may
      change an answer in its last bits: prompts are computed one by one and
      what is found was computed as it would have been (see `cache.py`), page
      tables have one width (`one_width`) and a step takes all slots
      (`all_slots`).
    release_idle: whether the decode state is let go of while nothing is to do,
      for others to use the devices' memory.
  """

  def __init__(
      self,
      engine: Engine,
      name: str,
      *,
      swap: SwapMode,
      events: EventLog,
      dispatch_lock: contextlib.AbstractContextManager | None = None,
      tokenizer: Tokenizer | None = None,
      lane: str = '',
      restarts: int = 0,
      exact: bool = False,
      release_idle: bool = False,
  ):
    self.engine = engine
    self.tokenizer = tokenizer
    self.name = name
    self.lane = lane
    self.swap_mode = swap
    self.restarts = restarts
    self.exact = exact
    self.events = events
    self.counts = LoopCounts()
    self.dispatch_lock = dispatch_lock or contextlib.nullcontext()
    self._wake = threading.Condition()
    # Guarded by _wake: what others hand in.
    self._queue: collections.deque[Running] = collections.deque()
    self._pending: tuple[Weights, Callable[[int], None]] | None = None
    self._forget = False
    self._taking = None  # what was pending, until it has been swapped in
    self._newest = -1
    self._aborts: set[Ticket] = set()
    self._stopping = False
    # Owned by the thread.
    self._weights: Weights | None = None
    self._state = None
    self._slots = Slots(engine, exact)
    self._release_idle = release_idle
    self._choice = DispatchChoice(engine, self._slots, self.all_slots)
    self._paced_from: float | None = None  # when the last dispatch was read
    # Ended, their slots free again, and not answered yet.
    self._finished: list[tuple[Any, ...]] = []
    self._thread: threading.Thread | None = None
    self._failure: BaseException | None = None
    self.last_death = ''  # why the thread died last
    self._doing = (_NOTHING, time.monotonic())

  @property
  def one_width(self) -> bool:
    """Whether page tables always have their widest width.

    Sums over more columns may round otherwise.
    """
    return self.exact

  @property
  def all_slots(self) -> bool:
    """Whether every decode step takes all slots, however few are active.

    Fewer rows of a matrix product may round otherwise.
    """
    return self.exact

  # Called from other threads.

  def start(self) -> None:
    # A daemon: one that a device never comes back from keeps no process alive.
    self._thread = threading.Thread(
        target=self._main, name=f'engine-{self.name}', daemon=True
    )
    self._thread.start()

  def submit(
      self,
      request: Request,
      answer: Callable[[Completion | BaseException], None],
  ) -> Ticket:
    """Queues a request; `answer` is called once, from the loop's thread.

    Returns:
      What `abort` needs to end this request.

    Raises:
      ValueError: the engine's shapes cannot serve it, or it has stop strings
        and the loop no tokenizer.
      EngineStopped: the loop has ended.
    """
    self.engine.check(request)
    running = self._started(request, Ticket(), answer)
    with self._wake:
      if self._stopping:
        raise EngineStopped(
            f'engine {self.name} no longer takes requests'
        ) from self._failure
      self._queue.append(running)
      self._wake.notify()
    return running.ticket

  def abort(self, tickets: Sequence[Ticket]) -> None:
    """Ends requests now; each answers with what it has, reason `aborted`.

    A request that has ended already is left alone, and so is another one of the
    same id.
    """
    with self._wake:
      self._aborts.update(tickets)
      self._wake.notify()

  def set_weights(
      self, version: int, params: Params, swapped: Callable[[int], None]
  ) -> None:
    """Hands over new weights; the newest wins. `swapped` acknowledges them.

    A loop that is dead takes none, so it holds no version for nobody.
    """
    with self._wake:
      if version < self._newest or self._stopping:
        return
      self._newest = version
      self._pending = (Weights(version, params), swapped)
      self._wake.notify()

  def forget_weights(self) -> None:
    """Lets go of the weights as soon as nothing runs; requests then wait for
    new ones, which may be of the same version."""
    with self._wake:
      self._forget = True
      self._wake.notify()

  def stop(self, limit_s: float = _STOP_SECONDS) -> None:
    """Ends the thread after the dispatch that is under way.

    Args:
      limit_s: seconds for that dispatch.

    Raises:
      TimeoutError: it takes longer; says what the thread is at.
    """
    with self._wake:
      self._stopping = True
      self._wake.notify()
      thread = self._thread
    self.engine.programs.nudge()
    if thread is None:
      return
    thread.join(limit_s)
    if thread.is_alive():
      raise TimeoutError(
          f'engine {self.name} has not ended after {limit_s:g} s:'
          f' {self.explain()}'
      )

  @property
  def load(self) -> int:
    """Requests queued or running."""
    return len(self._queue) + len(self._slots.occupied())

  def failure(self) -> BaseException | None:
    """Returns the exception that ended the thread, or None."""
    return self._failure

  def health(self) -> Health:
    """Returns the loop's state; any thread may call it, and it never waits.

    'waiting' for requests or weights; 'busy' with whatever `explain` names,
    however long it takes, weights on their way included; 'dead' once nobody
    will answer any more, which no length of silence amounts to.
    """
    if self._stopping:
      return 'dead'
    return 'waiting' if self._doing[0] in (_NOTHING, _WAITS) else 'busy'

  def explain(self) -> str:
    """Describes what the loop does and who waits; any thread may call it."""
    now = time.monotonic()
    doing, since = self._doing
    if self.health() == 'dead':
      doing = f'dead ({self._failure or "stopped"}), it last {doing}'
    held, pending = self._weights, self._pending
    waiting = list(self._queue)
    runs = 'no weights' if held is None else f'version {held.version}'
    awaited = f', version {pending[0].version} awaited' if pending else ''
    head = (
        f'engine {self.name}: {doing} for {now - since:.1f} s; {runs}{awaited};'
        f' {len(waiting)} requests queued'
    )
    if waiting:
      head += f', the oldest for {now - waiting[0].since:.1f} s'
    compiling = self.engine.programs.explain()
    if compiling:
      head += f'; {compiling}'
    lines = [
        f'slot {slot}: {r.request.request_id}, {len(r)} tokens of at most'
        f' {r.request.sampling.max_new_tokens}, for {now - r.since:.1f} s'
        for slot, r in enumerate(list(self._slots.members))
        if r is not None
    ][:_SHOWN]
    return '\n    '.join([head, *lines])

  # The thread.

  def _main(self) -> None:
    with contextlib.ExitStack() as stack:
      stack.push(self._ended)  # hears of whatever `_run` raises
      self._run()

  def _run(self) -> None:
    # What crosses between host and devices does so by a call that says it: a
    # forgotten conversion would hold up every dispatch and show nowhere.
    with contextlib.suppress(_Stops), jax.transfer_guard('disallow'):
      while self._wait_for_work():
        self._turn()

  def _turn(self) -> None:
    """All that is to be done now, once."""
    if self._state is None:
      self._doing = ('makes room for a cache', time.monotonic())
      with self._devices(engine_programs.INIT):
        self._state = self.engine.init_decode_state()
    for doing, work in (
        ('gives up requests', self._give_up_aborted),
        ('takes new weights', self._take_weights),
        ('admits requests', self._admit),
        ('prefills', self._prefill),
        ('decodes', self._decode),
    ):
      self._doing = (doing, time.monotonic())
      work()

  @contextlib.contextmanager
  def _devices(self, program: Name) -> Iterator[None]:
    """The devices, as soon as this program for them is compiled.

    Nobody is kept from the devices meanwhile.

    Raises:
      _Stops: the loop shall end, and the program is not ready.
    """
    programs = self.engine.programs
    if not programs.ready(program):
      doing, _ = self._doing
      awaits = f'{doing}, for which it waits for a program, {text_of(program)}'
      self._doing = (awaits, time.monotonic())
      if not programs.wait(program, lambda: self._stopping):
        raise _Stops
      self._doing = (doing, time.monotonic())
      self._paced_from = None
    with self.dispatch_lock:
      yield

  def _wait_for_work(self) -> bool:
    """Blocks while there is nothing to do; false when the loop shall end."""
    if not self._slots.any_active():
      self._hand_out()  # no dispatch to do it in
      self._paced_from = None
    with self._wake:
      if self._idle():
        if self._release_idle and self._state is not None:
          self._slots.cache.new_weights(None)
          self._state = None
          self.counts.cache_releases += 1
        start = time.monotonic()
        # One wait, however often the condition is notified for nothing.
        with self.counts.idle.pause():
          self._doing = (_WAITS, start)
          self._wake.wait_for(lambda: not self._idle())
        self._record('idle', 'generate', start, time.monotonic() - start)
      return not self._stopping

  def _idle(self) -> bool:
    work = self._pending or self._aborts or self._slots.any_occupied()
    work = work or (self._forget and self._weights)
    startable = self._queue and self._weights
    return not (self._stopping or work or startable)

  def _give_up_aborted(self) -> None:
    with self._wake:
      aborts, self._aborts = self._aborts, set()
      if not aborts:
        return
      waiting = [r for r in self._queue if r.ticket in aborts]
      kept = [r for r in self._queue if r.ticket not in aborts]
      self._queue = collections.deque(kept)
    slots = [s for s, r in self._slots.occupied().items() if r.ticket in aborts]
    if slots:
      with self._devices(engine_programs.RELEASE):
        self._state = self.engine.release(self._state, slots)
    for slot in slots:
      waiting.append(self._slots.leave(slot, known=True))
    with _others():
      for running in waiting:
        running.answer(self._completion(running, StopReason.ABORTED, None))

  def _take_weights(self) -> None:
    """Swaps, if weights wait and the swap mode lets them in now."""
    with self._wake:
      pending = self._pending
      if self._forget and not self._slots.any_occupied():
        self._forget = False
        self._weights = None
        self._slots.cache.new_weights(None)
      if pending is None:
        return
      preempted = any(r.said for r in self._queue)
    weights, swapped = pending
    alive = list(self._slots.occupied())
    begun = alive or preempted
    if begun and (self.swap_mode == 'drain' or not weights.ready()):
      return  # decode on; admission waits
    with self._wake:
      if self._pending is pending:
        self._pending = None
      self._taking = pending
    self._paced_from, start = None, time.monotonic()
    with self._devices(engine_programs.LAY_OUT):
      params = self.engine.lay_out(weights.params)
      jax.block_until_ready(params)
    self._weights = Weights(weights.version, params)
    tokens = 0
    if self.swap_mode == 'recompute':
      tokens = self._rebuild()
    else:
      if self.swap_mode == 'restart':
        self._restart(alive)
      # A9: no cache entry of the old weights may serve a new request.
      self._slots.cache.new_weights(None)
    self.counts.swaps += 1
    self._record(
        'swap',
        'swap',
        start,
        time.monotonic() - start,
        version=weights.version,
        alive_before=len(alive),
        alive_after=len(self._slots.occupied()),
        rebuilt_tokens=tokens,
    )
    self._taking = None
    with _others():
      swapped(weights.version)

  def _rebuild(self) -> int:
    """Caches all running sequences anew; tokens computed for it."""
    running = {s: r.tokens() for s, r in self._slots.occupied().items()}
    self._slots.cache.new_weights(running)
    if not running:
      return 0
    start, tokens = time.monotonic(), 0
    while self._slots.any_waits():
      pieces = self._slots.cache.next_piece(long=False)
      pieces = pieces or self._slots.cache.next_piece(long=True)
      if pieces is not None:
        self._send(pieces)
        tokens += int(pieces.lengths.sum())
      self._occupy()
    with self.dispatch_lock:
      jax.block_until_ready(self._state)
    self.counts.rebuilt_tokens += tokens
    self._record(
        'rebuild',
        'rebuild',
        start,
        time.monotonic() - start,
        version=self._weights.version,
        slots=len(running),
        tokens=tokens,
    )
    return tokens

  def _restart(self, slots: list[int]) -> None:
    """Everybody who has begun begins again."""
    active = [s for s in slots if self._slots[s].active]
    if active:
      with self._devices(engine_programs.RELEASE):
        self._state = self.engine.release(self._state, active)
    stopped = [self._slots.leave(slot, known=False) for slot in slots]
    with self._wake:
      waiting = stopped + list(self._queue)
      self.counts.restarted_tokens += sum(map(len, waiting))
      self._queue = collections.deque(
          self._anew(r) if r.said else r for r in waiting
      )

  def _anew(self, running: Running) -> Running:
    """The same request, which has said nothing yet."""
    return self._started(running.request, running.ticket, running.answer)

  def _started(
      self,
      request: Request,
      ticket: Ticket,
      answer: Callable[[Completion | BaseException], None],
  ) -> Running:
    """A request that has said nothing yet."""
    strings = request.sampling.stop_strings
    if strings and self.tokenizer is None:
      raise ValueError(
          f'request {request.request_id}: stop strings {strings}, but engine'
          f' {self.name} has no tokenizer to read its answers with'
      )
    stops = StopStrings(request.sampling, self.tokenizer) if strings else None
    return Running(request, ticket, answer, stops, time.monotonic())

  def _admit(self) -> None:
    """Puts waiting requests into free slots, as far as there are pages.

    While weights are pending nothing is admitted: a request that comes after
    they were handed over never starts on older ones.
    """
    free = {s: None for s, r in enumerate(self._slots.members) if r is None}
    while free:
      with self._wake:
        if not self._queue or self._weights is None:
          return
        running = self._queue[0]
        # What has begun before may have to end before new weights come.
        drained = self.swap_mode == 'drain' and running.said
        if self._pending and not drained:
          return
      sequence = self._slots.cache.place(
          free, running.tokens(), running.limit, shared=not running.said
      )
      if sequence is None:
        return
      del free[sequence.slot]
      with self._wake:
        self._queue.popleft()
        self._slots.members[sequence.slot] = running
      if sequence.found_tokens:
        self.counts.prefix_hits += 1
        self.counts.prefix_tokens += sequence.found_tokens

  def _prefill(self) -> None:
    """Caches what sequences that were placed begin with; occupies their slots.

    All of it that is a piece or less, and one piece of what is longer: then it
    is the turn of those who decode, if somebody does.
    """
    while True:
      while (pieces := self._slots.cache.next_piece(long=False)) is not None:
        self._extend(pieces)
      self._occupy()
      pieces = self._slots.cache.next_piece(long=True)
      if pieces is None:
        return
      self._paced_from = None  # it does not come with every dispatch
      self._extend(pieces)
      if self._slots.any_active():
        return

  def _extend(self, pieces: Pieces) -> None:
    tokens, count = int(pieces.lengths.sum()), int((pieces.lengths > 0).sum())
    lane = self._lane_of('prefill')
    version = self._weights.version
    with self.events.span('prefill', lane, version=version, tokens=tokens):
      self._send(pieces)
    self.counts.prefills += count
    self.counts.prefill_tokens += tokens

  def _send(self, pieces: Pieces) -> None:
    """Has pieces computed; keeps what experts their tokens went to, by page."""
    with self._devices(engine_programs.extend_name(pieces)):
      self._state, routing = self.engine.extend(
          self._weights.params, self._state, pieces
      )
      if routing is None:
        return
      routing = jax.device_get(routing)
    self._slots.keep_routing(pieces, routing)

  def _occupy(self) -> None:
    """Lets the slots decode whose sequences are cached by now."""
    placed = self._slots.cached()
    if not placed:
      return
    slots = [p.sequence.slot for p in placed]
    with self._devices(engine_programs.OCCUPY):
      self._state = self.engine.occupy(
          self._state,
          slots,
          [self._slots[s].request for s in slots],
          [p.sequence.tokens for p in placed],
          [p.copy for p in placed],
      )
    members = [self._slots[slot] for slot in slots]
    for running in members:
      running.active = True
    self._tell_prompt_logps(members)

  def _make_room(self, k: int) -> int:
    """Gives all who decode the pages for k steps more.

    Returns:
      Columns of the page tables that the dispatch needs.
    """
    longest, preempted = self._slots.make_room(k, self._give_way)
    if preempted:
      with self._devices(engine_programs.RELEASE):
        self._state = self.engine.release(self._state, preempted)
    self.counts.peak_pages = max(self.counts.peak_pages, self._slots.cache.used)
    settings = self.engine.settings
    if self.one_width:
      return settings.pages_per_slot
    return settings.live_columns(longest)

  def _give_way(self, running: Running) -> None:
    """Queues one who has lost its pages, before all others."""
    self.counts.preemptions += 1
    with self._wake:
      self._queue.appendleft(running)

  def _tell_prompt_logps(self, members: list[Running]) -> None:
    """Log-probs of their prompts, for those requests that want them."""
    asking = collections.defaultdict(list)
    for running in members:
      wanted = running.request.sampling.prompt_logps
      if wanted and running.prompt_logps is None:
        asking[running.request.prompt_ids].append(running)
    for prompt, siblings in asking.items():
      self._tell_prompt_logps_of(prompt, siblings)

  def _tell_prompt_logps_of(
      self, prompt: tuple[int, ...], asking: list[Running]
  ) -> None:
    padded = self.engine.pad_prompt(prompt)
    with self._devices(engine_programs.prompt_logps_name(padded)):
      logps = self.engine.prompt_logps(
          self._weights.params, padded, len(prompt)
      )
      logps = np.array(jax.device_get(logps)[: len(prompt)])
    logps[0] = np.nan  # nothing predicts it
    for running in asking:
      running.prompt_logps = logps
      running.prompt_version = self._weights.version

  def _decode(self) -> None:
    if not self._slots.any_active():
      return
    version = self._weights.version
    # New weights come before any who waits for a slot.
    k = self._choice.steps(bool(self._queue) and not self._pending)
    columns = self._make_room(k)
    slots = self._choice.few(columns)
    tables = self._slots.cache.tables
    tables = tables if slots is None else tables[slots]
    tables = tables[:, :columns].copy()  # they go on changing
    start = time.monotonic()
    with self._devices(engine_programs.generate_name(*tables.shape)):
      self._state, result = self.engine.generate_steps(
          self._weights.params,
          self._state,
          k,
          tables,
          slots,
      )
      # While the devices decode, and not before they do: whoever gets an answer
      # sets to work on it at once, and this thread would wait for its turn.
      self._hand_out()
      result = jax.device_get(result)
    read, steps = time.monotonic(), int(result.steps.max())
    if self._paced_from is not None:  # decoding and admissions since then
      self._choice.pace.took(steps, read - self._paced_from)
    self._paced_from = read
    tokens = int(result.valid.sum())
    self.counts.tokens += tokens
    self.counts.busy_slot_steps += tokens
    self.counts.steps += steps
    self._record(
        'generate',
        'generate',
        start,
        time.monotonic() - start,
        version=version,
        tokens=tokens,
        steps=steps,
    )
    cut = self._take_result(result, slots, version)
    if cut:
      with self._devices(engine_programs.RELEASE):
        self._state = self.engine.release(self._state, cut)

  def _take_result(
      self, result: StepResult, slots: np.ndarray | None, version: int
  ) -> list[int]:
    """Gives running requests what a dispatch brought them.

    A stop string ends an answer here and not on the device: at the token that
    completes it, which may lie some steps before the end of the dispatch. What
    was drawn behind it is discarded and counted.

    Args:
      result: on the host.
      slots: [R] the slots of its rows; None for all.
      version: of the weights.

    Returns:
      Slots that a stop string has ended before the device did.
    """
    drawn, active = result.valid.sum(axis=1).tolist(), result.active.tolist()
    cut = []
    for row, slot in enumerate(range(len(drawn)) if slots is None else slots):
      running = self._slots[slot]
      if running is None or not running.active:
        continue
      n = drawn[row]  # valid steps come first: a slot never wakes up
      tokens = result.tokens[row, :n]
      running.add(tokens, result.logps[row, :n], version)
      for name in ('raw_logps', 'top_ids', 'top_logps'):
        told = getattr(result.drawn, name)
        if told is not None:
          getattr(running, name).append(told[row, :n])
      if result.routing is not None:
        running.routing.append(result.routing[row, :n])
      stopped = bool(result.stopped[row])
      stop = running.stop_string(tokens, active[row], stopped)
      if active[row] and stop is None:
        continue
      self._slots.leave(slot, known=True)
      if active[row]:
        cut.append(slot)
      if stop is not None:
        self.counts.discarded_tokens += len(running) - stop.tokens
        ending = (StopReason.STOP_STRING, None, stop)
      elif stopped:
        ending = (StopReason.STOP, int(tokens[-1]))
      else:
        ending = (StopReason.LENGTH, None)
      if ending[0] is not StopReason.LENGTH:
        self._choice.pace.ended(len(running))
      self._finished.append((running, *ending))
    return cut

  def _hand_out(self) -> None:
    """Answers the requests that have ended."""
    finished, self._finished = self._finished, []
    answers = [(r.answer, self._completion(r, *e)) for r, *e in finished]
    with _others():
      for answer, completion in answers:  # at once, see `client._Mailbox`
        answer(completion)

  def _completion(
      self,
      running: Running,
      reason: StopReason,
      stop_id: int | None,
      stop: Stop | None = None,
  ) -> Completion:
    most = self.engine.settings.sampling.max_top_logps
    source = f'engine/{self.name}'
    return completion_of(running, source, most, reason, stop_id, stop)

  def _lane_of(self, part: str) -> str:
    return self.lane or f'{part}/{self.name}'

  def _record(
      self, kind: str, part: str, start: float, duration: float, **about: Any
  ) -> None:
    self.events.record(kind, self._lane_of(part), start, duration, **about)

  def _ended(
      self,
      kind: type[BaseException] | None,
      cause: BaseException | None,
      trace: types.TracebackType | None,
  ) -> bool:
    """Begins anew, or tells everyone who waits that nobody will answer.

    Called as the `__exit__` of a context; the cause goes no further.
    """
    del kind, trace
    with self._wake:
      if cause is not None:
        self.counts.deaths += 1
        self.last_death = f'{type(cause).__name__}: {cause}'
        if not self._stopping and self.counts.deaths <= self.restarts:
          self._begin_anew()
          return True
      self._stopping = True
      self._failure = cause
      # The last evaluation has the room of its cache, and of its weights.
      self._state = self._weights = self._pending = self._taking = None
      waiting = [*self._queue, *self._slots.occupied().values()]
      self._queue.clear()
    if cause is not None:
      self._tell_death('evict')
    self._hand_out()
    error = EngineStopped(f'engine {self.name} ended')
    error.__cause__ = cause
    for running in waiting:
      running.answer(error)
    return True

  def _tell_death(self, kind: str) -> None:
    self.events.instant(
        kind,
        self._lane_of('generate'),
        reason=self.last_death,
        deaths=self.counts.deaths,
    )

  def _begin_anew(self) -> None:
    """Starts the thread again; `_wake` is held, so that nobody stops it.

    The new thread has the weights of the old one, or those that it was about to
    take, and all its requests from their first token. Sampling is keyed by
    position, so under the same weights they say what they would have said.
    """
    self._tell_death('restart')
    self._pending = self._pending or self._taking
    self._state = self._taking = None
    running = self._slots.clear()
    self.counts.restarted_tokens += sum(map(len, running))
    self._queue.extendleft(self._anew(r) for r in reversed(running))
    self.start()


def stop_all(loops: Sequence[EngineLoop]) -> None:
  """Ends every loop, whatever another one raises; see `EngineLoop.stop`."""
  with contextlib.ExitStack() as stack:
    for loop in loops:
      stack.callback(loop.stop)


def require_living(loops: Sequence[EngineLoop], evicts: bool) -> None:
  """Raises what ended an engine loop, if the others may not go on without it.

  Args:
    loops: the replicas.
    evicts: whether the others go on as long as one of them lives.
  """
  failures = [f for f in (loop.failure() for loop in loops) if f is not None]
  if failures and (not evicts or len(failures) == len(loops)):
    raise failures[0]


def _others() -> contextlib.AbstractContextManager:
  """Allows implicit transfers while user callbacks run."""
  return jax.transfer_guard('allow')
