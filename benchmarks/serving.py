"""Requests of a benchmark, served by our engine loop or by another system.

In flows `Work`, which says what to ask for; out flow seconds, tokens and what
the loop's own counts and spans say. Other systems run in processes of their own
interpreters, by the scripts in `peers`, and take the same prompts, limits and
stop ids line by line as JSON. What is compared with what is left to
`generate.py`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import pathlib
import shutil
import subprocess
import tempfile
import threading
import time
from typing import Any, Callable, Iterator, Mapping, Sequence

from absl import app, flags
import jax
import numpy as np

from areal_jax.mesh import slices
from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.loop import EngineLoop
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.types import Completion, Request, SamplingParams
from benchmarks import report, runs

WAIT_S = 900.0

_SCRIPTS = pathlib.Path(__file__).parent / 'peers'
# What a loop does of which a program is under way meanwhile, or none wanted.
_NOT_HOST = ('generate', 'prefill', 'insert', 'rebuild', 'swap', 'idle')

Params = Any


@dataclasses.dataclass(frozen=True)
class Work:
  """Requests of one row of the table.

  Attributes:
    name: of the row.
    slots: decoded side by side; the batch of other systems.
    requests: how many in all.
    prompt: tokens of each prompt.
    limit: new tokens of each answer at most.
    stops: m stop ids; 0 for answers that all reach the limit.
    group: requests that have their prompt in common, one after another.
  """

  name: str
  slots: int
  requests: int
  prompt: int = 16
  limit: int = 64
  stops: int = 0
  group: int = 8

  def prompts(self, vocabulary: int) -> list[tuple[int, ...]]:
    """Prompt ids of every request: random ones, from 1 up."""
    rng = np.random.default_rng(self.prompt)
    groups = -(-self.requests // self.group)
    drawn = rng.integers(1, vocabulary, (groups, self.prompt)).tolist()
    return [tuple(drawn[i // self.group]) for i in range(self.requests)]

  def stop_ids(self) -> tuple[int, ...]:
    return tuple(range(1, 1 + self.stops))

  def batches(self, vocabulary: int) -> dict[str, Any]:
    """The same work as other systems take it."""
    prompts = self.prompts(vocabulary)
    starts = range(0, self.requests, self.slots)
    return {
        'batches': [prompts[i : i + self.slots] for i in starts],
        'limit': self.limit,
        'stop_ids': list(self.stop_ids()),
    }


# Our own system.


@dataclasses.dataclass(frozen=True)
class Served:
  """What serving some requests brought.

  Attributes:
    seconds: until the last answer.
    tokens: sampled.
    steps: decode steps.
    waiting: seconds, tokens and decode steps up to when no request waited.
    answers: in order of the requests.
    host: share of the time in which no program was under way.
    step: seconds of a decode step, mean, with its part of the dispatch.
    prefilled: prompt tokens that were computed.
    swaps: of each the seconds that it took and the tokens that it rebuilt.
  """

  seconds: float
  tokens: int
  steps: int
  waiting: tuple[float, int, int]
  answers: list[Completion]
  host: float
  step: float
  prefilled: int
  swaps: list[tuple[float, int]]

  @property
  def mean(self) -> float:
    """Tokens of an answer."""
    return self.tokens / len(self.answers)

  def busy(self, slots: int) -> float:
    """Share of slots that drew a token in a step, as long as requests wait."""
    _, tokens, steps = self.waiting
    return tokens / (slots * steps)


class Ours:
  """One engine, of the shapes that works need, warmed up.

  Args:
    config: of the policy.
    works: what it is for.
    counter: of compilations; what serving adds to it is kept.
  """

  def __init__(
      self,
      config: ModelConfig,
      works: Sequence[Work],
      counter: CompilationCounter,
  ):
    self.mesh = one_device()
    self.config = config
    self.engine = Engine(config, engine_settings(*works), self.mesh, Rules())
    self.params = init_params(config, self.mesh)
    self.flat = {**self.params, 'unembedding': 0 * self.params['unembedding']}
    self._counter = counter
    self.compiled = 0
    self.engine.warm_up(self.params)

  def serve(
      self,
      work: Work,
      params: Params,
      *,
      swap: str = 'recompute',
      swap_each: int = 0,
      versions: Sequence[Params] = (),
  ) -> Served:
    """Answers all requests of a work with a loop of its own.

    Args:
      work: the requests.
      params: version 0.
      swap: what new weights do to running requests.
      swap_each: answers between two versions; 0 for no new weights.
      versions: 1 and on; when they are used up, no more come.
    """
    before = self._counter.total + self._counter.cached
    with tempfile.TemporaryDirectory() as folder:
      path = pathlib.Path(folder) / 'events.jsonl'
      with EventLog(path) as events:
        loop = EngineLoop(self.engine, '0', swap=swap, events=events)
        collected = _Collected(loop, work, swap_each, versions)
        loop.set_weights(0, params, lambda version: None)
        loop.start()
        try:
          window = collected.run(requests(work, self.config.vocab_size))
        finally:
          loop.stop()
      spans = [e for e in read_jsonl(path) if e['duration'] is not None]
    self.compiled += self._counter.total + self._counter.cached - before
    counts = loop.counts
    answers = collected.in_order()
    return Served(
        seconds=window[1] - window[0],
        tokens=sum(len(answer.ids) for answer in answers),
        steps=counts.steps,
        waiting=collected.waiting,
        answers=answers,
        host=host_share(spans, window),
        step=sum(s['duration'] for s in spans if s['kind'] == 'generate')
        / max(1, counts.steps),
        prefilled=counts.prefill_tokens,
        swaps=[
            (s['duration'], s['fields']['rebuilt_tokens'])
            for s in spans
            if s['kind'] == 'swap' and s['fields']['alive_before']
        ],
    )


class _Collected:
  """Answers as they come; hands out new versions between them."""

  def __init__(
      self,
      loop: EngineLoop,
      work: Work,
      swap_each: int,
      versions: Sequence[Params],
  ):
    self._loop = loop
    self._work = work
    self._swap_each = swap_each
    self._versions = versions
    self._answers: dict[str, Completion] = {}
    self._came = threading.Condition()
    self._start = 0.0
    self.waiting = (0.0, 0, 0)

  def run(self, wanted: Sequence[Request]) -> runs.Interval:
    """Submits all, waits for all; first and last moment.

    Raises:
      TimeoutError: they did not come.
    """
    self._start = time.monotonic()
    for request in wanted:
      self._loop.submit(request, functools.partial(self._take, request))
    with self._came:
      whole = lambda: len(self._answers) == len(wanted)
      if not self._came.wait_for(whole, WAIT_S):
        raise TimeoutError(
            f'{self._work.name}: {len(self._answers)} of {len(wanted)} answers'
            f' after {WAIT_S} s'
        )
    return self._start, time.monotonic()

  def in_order(self) -> list[Completion]:
    return [self._answers[str(i)] for i in range(len(self._answers))]

  def _take(self, request: Request, outcome: Any) -> None:
    """Called from the loop's thread, where its counts stand still."""
    if isinstance(outcome, BaseException):
      raise outcome
    with self._came:
      self._answers[request.request_id] = outcome
      count = len(self._answers)
      self._came.notify_all()
    work, counts = self._work, self._loop.counts
    # From here on, or from the start, there are no more requests than slots.
    if count <= max(1, work.requests - work.slots):
      seconds = time.monotonic() - self._start
      self.waiting = (seconds, counts.tokens, counts.steps)
    if self._swap_each and count % self._swap_each == 0:
      version = count // self._swap_each
      if version <= len(self._versions):
        self._loop.set_weights(
            version, self._versions[version - 1], lambda version: None
        )


def requests(work: Work, vocabulary: int) -> list[Request]:
  """All requests of a work, each with a random stream of its own."""
  return [
      Request(
          request_id=str(i),
          prompt_ids=prompt,
          sampling=SamplingParams(
              max_new_tokens=work.limit, stop_ids=work.stop_ids()
          ),
          draw_index=i // work.group,
          sample=i % work.group,
      )
      for i, prompt in enumerate(work.prompts(vocabulary))
  ]


def engine_settings(*works: Work) -> EngineSettings:
  """An engine that has what works need, and no more."""
  return EngineSettings(
      slots=max(work.slots for work in works),
      max_length=max(work.prompt + work.limit for work in works),
      max_prompt_length=max(work.prompt for work in works),
      max_stop_ids=max(4, *(work.stops for work in works)),
  )


def one_device() -> jax.sharding.Mesh:
  """The mesh that all of it runs on."""
  settings = slices.MeshSettings(colocated=True)
  return slices.cut(slices.machine_devices(settings), settings).train


def init_params(config: ModelConfig, mesh: jax.sharding.Mesh) -> Params:
  """Random weights on a mesh."""
  return parameters.init_params(config, 0, mesh, Rules())


def host_share(
    spans: Sequence[Mapping[str, Any]], window: runs.Interval
) -> float:
  """Share of a window in which no span of a program was open."""
  parts = [runs.overlap(s, window) for s in spans if s['kind'] in _NOT_HOST]
  under_way = runs.seconds(runs.union(p for p in parts if p is not None))
  return 1 - under_way / (window[1] - window[0])


# Other systems.


def shape_of(config: ModelConfig) -> dict[str, int]:
  """What other systems have to know of the policy."""
  fields = ('vocab_size', 'width', 'layers', 'heads', 'kv_heads', 'head_size')
  fields = (*fields, 'mlp_width', 'max_length')
  return {name: getattr(config, name) for name in fields}


class Peer:
  """Another system in a process of its own, which waits for work.

  Args:
    python: interpreter of its environment.
    script: file of `benchmarks/peers`.
    config: of the policy.
  """

  def __init__(self, python: str, script: str, config: ModelConfig):
    shape = shape_of(config)
    self._name = script
    self._log = tempfile.TemporaryFile('w+')
    self._child = subprocess.Popen(
        [python, str(_SCRIPTS / script), json.dumps(shape)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=self._log,
        text=True,
        # Whatever device we have, all run on the processors.
        env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': ''},
    )

  def serve(self, work: Mapping[str, Any]) -> tuple[float, int]:
    """Seconds and sampled tokens of a work.

    Raises:
      RuntimeError: it ended; the end of what it printed is in the text.
    """
    try:
      self._child.stdin.write(json.dumps(work) + '\n')
      self._child.stdin.flush()
      line = self._child.stdout.readline()
    except BrokenPipeError:
      line = ''
    if not line:
      self._log.seek(0)
      raise RuntimeError(f'{self._name} ended: {self._log.read()[-2000:]}')
    answer = json.loads(line)
    return answer['seconds'], answer['tokens']

  def close(self) -> None:
    """Ends it and waits for its end."""
    self._child.communicate()  # which closes what it reads
    self._log.close()


def interpreter_of(name: str) -> str:
  """The interpreter that was given for a system; '' if there is none.

  Args:
    name: Tunix has its own, the others that of TRL.

  Raises:
    UsageError: it is none that can be run.
  """
  flag = 'tunix' if name == 'Tunix' else 'trl'
  python = flags.FLAGS[flag].value
  if python and shutil.which(python) is None:
    raise app.UsageError(f'--{flag} is {python!r}, wanted an interpreter')
  return python


@contextlib.contextmanager
def started(
    config: ModelConfig, scripts: Mapping[str, str]
) -> Iterator[dict[str, Peer]]:
  """The systems whose interpreters were given, by name.

  Args:
    config: of the policy.
    scripts: file of `peers` by name.

  Raises:
    UsageError: see `interpreter_of`.
  """
  with contextlib.ExitStack() as stack:
    peers = {}
    for name, script in scripts.items():
      python = interpreter_of(name)
      if python:
        peers[name] = Peer(python, script, config)
        stack.callback(peers[name].close)
    yield peers


def show_parts(
    name: str,
    parts: Mapping[str, Any],
    config: ModelConfig,
    scripts: Mapping[str, str],
    measure: Callable[..., list[report.Row]],
) -> None:
  """Runs the parts that the flags ask for; prints the table and the JSON line.

  Args:
    name: of the benchmark.
    parts: all of them, by name.
    config: of the policy.
    scripts: see `started`.
    measure: rows of (peers, rounds, names of parts).

  Raises:
    UsageError: there is no such part.
  """
  unknown = sorted(set(flags.FLAGS.only) - parts.keys())
  if unknown:
    raise app.UsageError(f'--only is {unknown}, wanted some of {[*parts]}')
  with started(config, scripts) as peers:
    rounds = 1 if flags.FLAGS.short else flags.FLAGS.rounds
    rows = measure(peers, rounds, flags.FLAGS.only or [*parts])
  report.show(name, rows)


def define_flags() -> None:
  """Those of a benchmark in parts; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'A small policy on little work.')
  flags.DEFINE_string('tunix', '', 'Interpreter that has google-tunix.')
  flags.DEFINE_string('trl', '', 'Interpreter that has torch, transformers.')
  flags.DEFINE_integer('rounds', 5, 'Turns of each system.')
  flags.DEFINE_list('only', [], 'Parts to run; all by default.')
