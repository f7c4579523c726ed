"""The engine loop: one thread a rollout replica that never stops decoding.

Flows in: requests (from the client, any thread) and new weights (from the
publisher). Flows out: a `Completion` for each request, by callback. Between
two dispatches of up to k decode steps the loop takes new weights, admits
waiting requests into free slots and hands finished ones back; it waits only
when no slot is active and nothing is queued.

What new weights do to requests in mid-sentence is the swap mode:

* `recompute`: caches of running slots are rebuilt under the new weights and
  decoding goes on (the paper's way; https://arxiv.org/abs/2505.24298 §4.1),
* `keep`: decoding goes on over the old caches. The recorded log-probs are
  still those of the distribution sampled from, but that is a mixture of
  versions which no single set of weights reproduces,
* `drain`: no admission until the running requests have ended, then the swap,
* `restart`: running requests start over under the new weights.

A stop string ends an answer here and not on the device: at the token that
completes it, which may lie some steps before the end of the dispatch. What was
drawn behind it is discarded and counted, and the slot is released.

A request admitted after weights were handed over never starts on older ones:
while weights are pending nothing is admitted.

A thread that dies of an exception begins anew, if it may: with a fresh decode
state, the weights that it had (or was about to take), and all its requests from
their first token. Sampling is keyed by position, so under the same weights they
say what they would have said.

Two loops may run one engine, each with a decode state and weights of its own:
evaluation does so beside training, and nothing is compiled twice.
"""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import threading
import time
from typing import Any, Callable, Literal, Sequence

import jax
import numpy as np

from areal_jax.models.moe import UNKNOWN
from areal_jax.rollout.engine import Engine, Prefix
from areal_jax.rollout.stopping import Stop, StopStrings
from areal_jax.telemetry.events import EventLog
from areal_jax.tokenizer.base import Tokenizer
from areal_jax.types import Completion, Request, StopReason

SwapMode = Literal['recompute', 'keep', 'drain', 'restart']
Params = Any

_SHOWN = 8  # slots that an explanation lists


class EngineStopped(RuntimeError):
  """The loop no longer runs; the cause is chained."""


@dataclasses.dataclass(frozen=True)
class Weights:
  """A version and its parameters on this replica's mesh, never apart."""

  version: int
  params: Params

  def ready(self) -> bool:
    """Whether the transfer has arrived."""
    return all(leaf.is_ready() for leaf in jax.tree.leaves(self.params))


@dataclasses.dataclass
class _Running:
  """A request in a slot, with what it has said so far, dispatch by dispatch."""

  request: Request
  answer: Callable[[Completion | BaseException], None]
  stops: StopStrings | None  # None if it has no stop strings
  since: float  # monotonic second at which it was asked, or begun anew
  ids: list[np.ndarray] = dataclasses.field(default_factory=list)
  logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)  # a dispatch
  # Where the engine records it: of the prompt but its last token, then of each
  # token that was fed, which are one fewer than there are in the end.
  routing: list[np.ndarray] = dataclasses.field(default_factory=list)
  # What the engine was built to tell: [n], [n, top] and [n, top] a dispatch.
  raw_logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  top_ids: list[np.ndarray] = dataclasses.field(default_factory=list)
  top_logps: list[np.ndarray] = dataclasses.field(default_factory=list)
  prompt_logps: np.ndarray | None = None  # [P]
  prompt_version: int | None = None

  def __len__(self) -> int:
    return sum(map(len, self.ids))


@dataclasses.dataclass
class LoopCounts:
  """What a loop has done since it started. Read by others, written by it."""

  tokens: int = 0
  steps: int = 0
  swaps: int = 0
  rebuilt_tokens: int = 0
  restarted_tokens: int = 0
  discarded_tokens: int = 0  # drawn behind a stop string
  prefills: int = 0
  prefill_tokens: int = 0
  idle_seconds: float = 0.0
  busy_slot_steps: int = 0
  deaths: int = 0  # of the thread


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
  ):
    self.engine = engine
    self.tokenizer = tokenizer
    self.name = name
    self.lane = lane
    self.swap_mode = swap
    self.restarts = restarts
    self.events = events
    self.counts = LoopCounts()
    self.dispatch_lock = dispatch_lock or contextlib.nullcontext()
    self._wake = threading.Condition()
    # Guarded by _wake: what others hand in.
    self._queue: collections.deque[_Running] = collections.deque()
    self._pending: tuple[Weights, Callable[[int], None]] | None = None
    self._forget = False
    self._taking = None  # what was pending, until it has been swapped in
    self._newest = -1
    self._aborts: set[str] = set()
    self._stopping = False
    # Owned by the thread.
    self._weights: Weights | None = None
    self._state = None
    self._slots: list[_Running | None] = [None] * engine.settings.slots
    self._prefix: tuple[int, tuple[int, ...], Prefix] | None = None
    self._executor: concurrent.futures.ThreadPoolExecutor | None = None
    self._thread: concurrent.futures.Future | None = None
    self._failure: BaseException | None = None
    self.last_death = ''  # why the thread died last
    self._doing = ('nothing yet', time.monotonic())

  # Called from other threads.

  def start(self) -> None:
    self._executor = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix=f'engine-{self.name}'
    )
    self._thread = self._executor.submit(self._run)
    self._thread.add_done_callback(self._ended)

  def submit(
      self,
      request: Request,
      answer: Callable[[Completion | BaseException], None],
  ) -> None:
    """Queues a request; `answer` is called once, from the loop's thread.

    Raises:
      ValueError: the engine's shapes cannot serve it, or it has stop strings
        and the loop no tokenizer.
      EngineStopped: the loop has ended.
    """
    self.engine.check(request)
    running = self._started(request, answer)
    with self._wake:
      if self._stopping:
        raise EngineStopped(f'engine {self.name} no longer takes requests')
      self._queue.append(running)
      self._wake.notify()

  def abort(self, request_ids: Sequence[str]) -> None:
    """Ends requests now; each answers with what it has, reason `aborted`."""
    with self._wake:
      self._aborts.update(request_ids)
      self._wake.notify()

  def set_weights(
      self, version: int, params: Params, swapped: Callable[[int], None]
  ) -> None:
    """Hands over new weights; the newest wins. `swapped` acknowledges them."""
    with self._wake:
      if version < self._newest:
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

  def stop(self) -> None:
    """Ends the thread after the dispatch that is under way."""
    with self._wake:
      self._stopping = True
      self._wake.notify()
    if self._executor:
      self._executor.shutdown(wait=True)

  @property
  def load(self) -> int:
    """Requests queued or running."""
    return len(self._queue) + sum(s is not None for s in self._slots)

  def failure(self) -> BaseException | None:
    """What ended the thread, if it ended by itself and for good."""
    return self._failure

  def explain(self) -> str:
    """What it does and who waits for it; any thread may ask."""
    now = time.monotonic()
    doing, since = self._doing
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
    lines = [
        f'slot {slot}: {r.request.request_id}, {len(r)} tokens of at most'
        f' {r.request.sampling.max_new_tokens}, for {now - r.since:.1f} s'
        for slot, r in enumerate(list(self._slots))
        if r is not None
    ][:_SHOWN]
    return '\n    '.join([head, *lines])

  # The thread.

  def _run(self) -> None:
    with self.dispatch_lock:
      self._state = self.engine.init_decode_state()
    while self._wait_for_work():
      for doing, work in (
          ('gives up requests', self._give_up_aborted),
          ('takes new weights', self._take_weights),
          ('prefills', self._admit),
          ('decodes', self._decode),
      ):
        self._doing = (doing, time.monotonic())
        work()

  def _wait_for_work(self) -> bool:
    """Blocks while there is nothing to do; false when the loop shall end."""
    with self._wake:
      if self._idle():
        start = time.monotonic()
        self._doing = ('waits for requests or weights', start)
        # One wait, however often the condition is notified for nothing.
        self._wake.wait_for(lambda: not self._idle())
        idle = time.monotonic() - start
        self.counts.idle_seconds += idle
        self._record('idle', 'generate', start, idle)
      return not self._stopping

  def _idle(self) -> bool:
    work = self._pending or self._aborts or self._any_running()
    work = work or (self._forget and self._weights)
    startable = self._queue and self._weights
    return not (self._stopping or work or startable)

  def _any_running(self) -> bool:
    return any(s is not None for s in self._slots)

  def _give_up_aborted(self) -> None:
    with self._wake:
      aborts, self._aborts = self._aborts, set()
      if not aborts:
        return
      waiting = [r for r in self._queue if r.request.request_id in aborts]
      kept = [r for r in self._queue if r.request.request_id not in aborts]
      self._queue = collections.deque(kept)
    slots = [
        s
        for s, r in enumerate(self._slots)
        if r is not None and r.request.request_id in aborts
    ]
    if slots:
      with self.dispatch_lock:
        self._state = self.engine.release(self._state, slots)
    for slot in slots:
      waiting.append(self._slots[slot])
      self._slots[slot] = None
    for running in waiting:
      running.answer(self._completion(running, StopReason.ABORTED, None))

  def _take_weights(self) -> None:
    """Swaps, if weights wait and the swap mode lets them in now."""
    with self._wake:
      pending = self._pending
      if self._forget and not self._any_running():
        self._forget = False
        self._weights = self._prefix = None
    if pending is None:
      return
    weights, swapped = pending
    alive = [s for s, r in enumerate(self._slots) if r is not None]
    if alive and (self.swap_mode == 'drain' or not weights.ready()):
      return  # decode on; admission waits
    with self._wake:
      if self._pending is pending:
        self._pending = None
      self._taking = pending
    start = time.monotonic()
    jax.block_until_ready(weights.params)
    self._weights = weights
    # A9: no cache entry of the old weights may serve a new request.
    self._prefix = None
    tokens = 0
    if alive and self.swap_mode == 'recompute':
      tokens = self._rebuild(alive)
    elif alive and self.swap_mode == 'restart':
      self._restart(alive)
    self.counts.swaps += 1
    self._record(
        'swap',
        'swap',
        start,
        time.monotonic() - start,
        version=weights.version,
        alive_before=len(alive),
        alive_after=sum(s is not None for s in self._slots),
        rebuilt_tokens=tokens,
    )
    self._taking = None
    swapped(weights.version)

  def _rebuild(self, slots: list[int]) -> int:
    lengths = [
        len(self._slots[s].request.prompt_ids) + len(self._slots[s])
        for s in slots
    ]
    start = time.monotonic()
    with self.dispatch_lock:
      self._state, routing = self.engine.rebuild_routed(
          self._weights.params, self._state, slots, max(lengths)
      )
      jax.block_until_ready(self._state)
    if routing:
      # What is sampled from now on rests on these caches, so these are the
      # choices to replay. The last token is fed again, by the next step.
      rows = np.concatenate(jax.device_get(routing))
      for slot, length, row in zip(slots, lengths, rows):
        self._slots[slot].routing = [row[: length - 1]]
    self.counts.rebuilt_tokens += sum(lengths)
    self._record(
        'rebuild',
        'rebuild',
        start,
        time.monotonic() - start,
        version=self._weights.version,
        slots=len(slots),
        tokens=sum(lengths),
    )
    return sum(lengths)

  def _restart(self, slots: list[int]) -> None:
    with self.dispatch_lock:
      self._state = self.engine.release(self._state, slots)
    for slot in reversed(slots):
      running = self._slots[slot]
      self._slots[slot] = None
      self.counts.restarted_tokens += len(running)
      with self._wake:
        self._queue.appendleft(self._started(running.request, running.answer))

  def _started(
      self,
      request: Request,
      answer: Callable[[Completion | BaseException], None],
  ) -> _Running:
    """A request that has said nothing yet."""
    strings = request.sampling.stop_strings
    if strings and self.tokenizer is None:
      raise ValueError(
          f'request {request.request_id}: stop strings {strings}, but engine'
          f' {self.name} has no tokenizer to read its answers with'
      )
    stops = StopStrings(request.sampling, self.tokenizer) if strings else None
    return _Running(request, answer, stops, time.monotonic())

  def _admit(self) -> None:
    """Puts waiting requests into free slots; one prefill serves a group."""
    free = [s for s, r in enumerate(self._slots) if r is None]
    while free:
      with self._wake:
        if self._pending or not self._queue or self._weights is None:
          return
        prompt = self._queue[0].request.prompt_ids
        members = []
        while (
            self._queue
            and len(members) < len(free)
            and self._queue[0].request.prompt_ids == prompt
        ):
          members.append(self._queue.popleft())
      slots, free = free[: len(members)], free[len(members) :]
      for slot, running in zip(slots, members):
        self._slots[slot] = running
      with self.dispatch_lock:
        prefix = self._prefix_of(prompt)
        self._state = self.engine.insert_many(
            prefix, self._state, slots, [m.request for m in members]
        )
      self._tell_prompt_logps(members)
      if prefix.routing is not None:
        # The last token of the prompt is fed again, by the first step.
        of_prompt = jax.device_get(prefix.routing)[: len(prompt) - 1]
        for running in members:
          running.routing.append(of_prompt)

  def _prefix_of(self, prompt: tuple[int, ...]) -> Prefix:
    """The prompt's cache entries; siblings that came too late share them."""
    version = self._weights.version
    if self._prefix and self._prefix[:2] == (version, prompt):
      return self._prefix[2]
    padded = self.engine.pad_prompt(prompt)
    lane = self._lane_of('prefill')
    with self.events.span('prefill', lane, version=version):
      prefix = self.engine.prefill(
          params=self._weights.params,
          padded_tokens=padded,
          true_length=len(prompt),
      )
    self.counts.prefills += 1
    self.counts.prefill_tokens += len(prompt)
    self._prefix = (version, prompt, prefix)
    return prefix

  def _tell_prompt_logps(self, members: list[_Running]) -> None:
    """Log-probs of a prompt, for those of its requests that want them."""
    asking = [m for m in members if m.request.sampling.prompt_logps]
    asking = [m for m in asking if m.prompt_logps is None]
    if not asking:
      return
    prompt = asking[0].request.prompt_ids
    with self.dispatch_lock:
      logps = self.engine.prompt_logps(
          self._weights.params, self.engine.pad_prompt(prompt), len(prompt)
      )
      logps = np.array(logps)[: len(prompt)]
    logps[0] = np.nan  # nothing predicts it
    for running in asking:
      running.prompt_logps = logps
      running.prompt_version = self._weights.version

  def _decode(self) -> None:
    if not self._any_running():
      return
    version = self._weights.version
    start = time.monotonic()
    with self.dispatch_lock:
      self._state, result = self.engine.generate_steps(
          self._weights.params, self._state, self.engine.settings.steps
      )
      result = jax.device_get(result)
    tokens = int(result.valid.sum())
    self.counts.tokens += tokens
    self.counts.busy_slot_steps += tokens
    self.counts.steps += int(result.steps)
    self._record(
        'generate',
        'generate',
        start,
        time.monotonic() - start,
        version=version,
        tokens=tokens,
        steps=int(result.steps),
    )
    drawn, active = result.valid.sum(axis=1).tolist(), result.active.tolist()
    cut = []  # slots that a stop string has ended before the device did
    for slot, running in enumerate(self._slots):
      if running is None:
        continue
      n = drawn[slot]  # valid steps come first: a slot never wakes up
      tokens = result.tokens[slot, :n]
      running.ids.append(tokens)
      running.logps.append(result.logps[slot, :n])
      running.versions.append(version)
      for name in ('raw_logps', 'top_ids', 'top_logps'):
        told = getattr(result.drawn, name)
        if told is not None:
          getattr(running, name).append(told[slot, :n])
      if result.routing is not None:
        running.routing.append(result.routing[slot, :n])
      stopped = bool(result.stopped[slot])
      stop = self._stop_string(running, tokens, active[slot], stopped)
      if active[slot] and stop is None:
        continue
      self._slots[slot] = None
      if active[slot]:
        cut.append(slot)
      if stop is not None:
        self.counts.discarded_tokens += len(running) - stop.tokens
        completion = self._completion(
            running, StopReason.STOP_STRING, None, stop
        )
      elif stopped:
        completion = self._completion(running, StopReason.STOP, int(tokens[-1]))
      else:
        completion = self._completion(running, StopReason.LENGTH, None)
      running.answer(completion)
    if cut:
      with self.dispatch_lock:
        self._state = self.engine.release(self._state, cut)

  def _stop_string(
      self, running: _Running, tokens: np.ndarray, active: bool, stopped: bool
  ) -> Stop | None:
    """The stop string that ends an answer with the tokens just drawn."""
    if running.stops is None:
      return None
    stop = running.stops.push(tokens.tolist())
    if stop is None and not active:
      stop = running.stops.finish()
    # One token may be a stop id and complete a string: the id is the reason.
    by_id = stop is not None and stopped and stop.tokens == len(running)
    return None if by_id else stop

  def _completion(
      self,
      running: _Running,
      reason: StopReason,
      stop_id: int | None,
      stop: Stop | None = None,
  ) -> Completion:
    end = None if stop is None else stop.tokens

    def joined(parts, dtype, *more):
      nothing = np.zeros((0, *more), dtype)
      return np.concatenate([nothing, *parts]).astype(dtype)[:end]

    asked = running.request.sampling
    told = {}
    if asked.raw_logps:
      told['raw_logps'] = joined(running.raw_logps, np.float32)
    if asked.top_logps:
      most = self.engine.settings.sampling.max_top_logps
      for name, dtype in (('top_ids', np.int32), ('top_logps', np.float32)):
        every = joined(getattr(running, name), dtype, most)
        told[name] = every[:, : asked.top_logps]
    return Completion(
        request_id=running.request.request_id,
        ids=joined(running.ids, np.int32),
        logps=joined(running.logps, np.float32),
        versions=np.repeat(
            np.asarray(running.versions, np.int32), list(map(len, running.ids))
        )[:end],
        stop_reason=reason,
        stop_id=stop_id,
        stop_string=None if stop is None else stop.string,
        text_end=None if stop is None else stop.text_end,
        weight_source=f'engine/{self.name}',
        routing=_routing_of(running, end),
        prompt_logps=running.prompt_logps,
        prompt_version=running.prompt_version,
        **told,
    )

  def _lane_of(self, part: str) -> str:
    return self.lane or f'{part}/{self.name}'

  def _record(
      self, kind: str, part: str, start: float, duration: float, **about: Any
  ) -> None:
    self.events.record(kind, self._lane_of(part), start, duration, **about)

  def _ended(self, thread: concurrent.futures.Future) -> None:
    """Begins anew, or tells everyone who waits that nobody will answer."""
    cause = thread.exception()
    with self._wake:
      if cause is not None:
        self.counts.deaths += 1
        if not self._stopping and self.counts.deaths <= self.restarts:
          self._begin_anew(cause)
          return
      self._stopping = True
      self._failure = cause
      waiting = list(self._queue) + [r for r in self._slots if r is not None]
      self._queue.clear()
    error = EngineStopped(f'engine {self.name} ended')
    error.__cause__ = cause
    for running in waiting:
      running.answer(error)

  def _begin_anew(self, cause: BaseException) -> None:
    """Starts the thread again; `_wake` is held, so that nobody stops it."""
    self.last_death = f'{type(cause).__name__}: {cause}'
    self.events.instant(
        'restart',
        self._lane_of('generate'),
        reason=self.last_death,
        deaths=self.counts.deaths,
    )
    self._pending = self._pending or self._taking
    self._state = self._prefix = self._taking = None
    running = [r for r in self._slots if r is not None]
    self._slots = [None] * len(self._slots)
    self.counts.restarted_tokens += sum(map(len, running))
    self._queue.extendleft(
        self._started(r.request, r.answer) for r in reversed(running)
    )
    self._thread = self._executor.submit(self._run)
    self._thread.add_done_callback(self._ended)


def _routing_of(running: _Running, end: int | None) -> np.ndarray | None:
  """[P + T, L, k] recorded choices of the prompt and T = `end` tokens.

  None for all tokens. The last one drawn was never fed: its choices are -1.
  None where nothing is recorded, and for a request that never had a slot.
  """
  if not running.routing:
    return None
  fed = np.concatenate(running.routing)
  fed = np.concatenate([fed, np.full_like(fed[:1], UNKNOWN)])
  return fed if end is None else fed[: len(running.request.prompt_ids) + end]
