"""Publishing weights: from the train mesh to every rollout mesh.

Flows in: (version, params) from the trainer. Flows out: the same values cast
and resharded on each replica's mesh, handed over by a function of the replica.
Decoding goes on meanwhile: the copy is dispatched here, and the replica takes
it between two of its own dispatches. The newest version wins.

Where adapters alone learn, the base crosses once, with the first version; later
ones of kind 'adapter' carry the adapters and are put together with it on the
replica's mesh.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from typing import Any, Callable, Literal, Sequence

import jax
import jax.numpy as jnp

from areal_jax.mesh.crossing import Crossing
from areal_jax.models.lora import overlaid, part_of
from areal_jax.telemetry.events import EventLog

Params = Any
Kind = Literal['full', 'adapter']

_LOOK_SECONDS = 0.5  # how often a wait looks whether a replica has died


@dataclasses.dataclass(frozen=True)
class Target:
  """A replica as the publisher sees it.

  Attributes:
    name: for messages and events.
    shardings: pytree of `NamedSharding`, where each parameter goes.
    deliver: called with (version, params, swapped); it must call
      `swapped(version)` once the replica runs these weights, or newer ones.
    finish: what is done on the replica's mesh to parameters that have arrived,
      such as merging adapters; None for nothing.
    alive: whether the replica will take weights at all. Nobody waits for one
      that is dead; its mesh still gets the weights, for evaluation goes on
      there.
  """

  name: str
  shardings: Any
  deliver: Callable[[int, Params, Callable[[int], None]], None]
  finish: Callable[[Params], Params] | None = None
  alive: Callable[[], bool] = lambda: True


class Handle:
  """The progress of one published version, replica by replica.

  Attributes:
    version: of the policy.
    kind: whether all of it was sent, or its adapters.
    bytes: that were sent, of one copy for each replica.
  """

  def __init__(
      self, version: int, kind: Kind, size: int, targets: Sequence[Target]
  ):
    self.version = version
    self.kind = kind
    self.bytes = size
    self._missing = {target.name: target for target in targets}
    self._changed = threading.Condition()

  def acknowledge(self, name: str) -> None:
    with self._changed:
      self._missing.pop(name, None)
      self._changed.notify_all()

  def wait(self, timeout_s: float) -> None:
    """Waits until every living replica runs this version or a newer one.

    Raises:
      TimeoutError: names the replicas that do not answer.
    """
    end = time.monotonic() + timeout_s
    with self._changed:
      while missing := self._awaited():
        left = end - time.monotonic()
        if left <= 0:
          raise TimeoutError(
              f'version {self.version} not taken after {timeout_s:g} s by'
              f' replicas {sorted(missing)}'
          )
        # A replica that dies meanwhile notifies nobody.
        self._changed.wait(min(left, _LOOK_SECONDS))

  @property
  def missing(self) -> frozenset[str]:
    """Living replicas that still run older weights."""
    with self._changed:
      return self._awaited()

  def _awaited(self) -> frozenset[str]:
    return frozenset(n for n, target in self._missing.items() if target.alive())


class Publisher:
  """Sends weights to all replicas and remembers the last version sent.

  Args:
    targets: the replicas.
    dtype: floating dtype on the rollout side, or None to leave it.
    events: where spans go.
  """

  def __init__(
      self,
      targets: Sequence[Target],
      *,
      events: EventLog,
      dtype: str | None = None,
  ):
    self._targets = tuple(targets)
    self._events = events
    self._cast = jax.jit(
        lambda params: jax.tree.map(
            lambda x: x.astype(dtype)
            if jnp.issubdtype(x.dtype, jnp.floating)
            else x,
            params,
        )
    )
    self._dtype = dtype
    # By what is sent from where.
    self._crossings: dict[tuple[Any, ...], Crossing] = {}
    self._arrived: dict[str, Params] = {}  # by replica, what it holds
    self._latest: tuple[int, dict[str, Params]] | None = None
    self._handles: list[Handle] = []

  def publish(
      self, version: int, params: Params, kind: Kind = 'full'
  ) -> Handle:
    """Sends `params`, which may live on any mesh and may be donated afterwards.

    Args:
      version: of the policy.
      params: all of it, or of kind 'adapter' those that changed since the first
        version, which was 'full'.
      kind: which of them.

    Raises:
      ValueError: a version that is not newer than the last one, or adapters
        before any base.
    """
    if self._latest and version <= self._latest[0]:
      raise ValueError(
          f'version {version} published after {self._latest[0]}, wanted a'
          ' newer one'
      )
    if kind == 'adapter' and not self._arrived:
      raise ValueError(
          f"version {version} published as 'adapter' without a base, wanted"
          " one published as 'full' before"
      )
    start = time.monotonic()
    if self._dtype:
      params = self._cast(params)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    size *= len(self._targets)
    handle = Handle(version, kind, size, self._targets)
    self._handles = [h for h in self._handles if h.missing] + [handle]
    held = {}
    # New arrays: the train step donates its own to the step that follows.
    crossed = self._crossing(params)(params)
    for target, arrived in zip(self._targets, crossed):
      if kind == 'adapter':
        arrived = overlaid(self._arrived[target.name], arrived)
      self._arrived[target.name] = arrived
      held[target.name] = target.finish(arrived) if target.finish else arrived
    self._latest = (version, held)
    for target in self._targets:
      target.deliver(version, held[target.name], self._swapped(target.name))
    self._events.record(
        'publish',
        'publish',
        start,
        time.monotonic() - start,
        version=version,
        replicas=len(self._targets),
        bytes=size,
    )
    return handle

  def warm_up(self, params: Params) -> None:
    """Compiles what `publish` does to parameters like these."""
    if self._dtype:
      params = self._cast(params)
    jax.block_until_ready(self._crossing(params)(params))

  def latest(self) -> tuple[int, dict[str, Params]]:
    """The version published last and its parameters, by replica name."""
    if self._latest is None:
      raise LookupError('no version has been published')
    return self._latest

  def get(self, version: int) -> dict[str, Params]:
    """Parameters of a version that is still held.

    Raises:
      LookupError: only the newest version is held.
    """
    held, params = self.latest()
    if held != version:
      raise LookupError(f'version {version} is not held, only {held} is')
    return params

  def _crossing(self, params: Params) -> Crossing:
    leaves, structure = jax.tree.flatten(params)
    sent = tuple((leaf.shape, leaf.sharding) for leaf in leaves)
    key = (structure, sent)
    if key not in self._crossings:
      device, *_ = leaves[0].devices()
      self._crossings[key] = Crossing(
          params,
          [part_of(target.shardings, params) for target in self._targets],
          over_host=device.platform == 'cpu',
      )
    return self._crossings[key]

  def _swapped(self, name: str) -> Callable[[int], None]:
    def swapped(version: int) -> None:
      # A replica that skipped a version acknowledges it with a newer one.
      for handle in list(self._handles):
        if handle.version <= version:
          handle.acknowledge(name)

    return swapped
