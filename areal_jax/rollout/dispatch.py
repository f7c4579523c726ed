"""What a decode dispatch is made of: how many steps, of which slots.

What lives here: `DispatchChoice`. It looks at the running requests, at what
dispatches have cost so far (`pace`) and at which programs are compiled. It says
what the loop's next dispatch is to be, and has programs compiled that would
have been of use. Nothing waits here.
"""

from __future__ import annotations

import collections

import numpy as np

from areal_jax.rollout import engine_programs
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.pace import Pace
from areal_jax.rollout.slots import Slots
from areal_jax.telemetry.programs import Name

# Dispatches that a program for few slots would have served before it is worth
# its compilation.
_WORTH_COMPILING = 128


class DispatchChoice:
  """Chooses the dispatches of one engine loop.

  Args:
    engine: the programs and shapes.
    slots: the running requests.
    all_slots: whether every decode step takes all slots.

  Attributes:
    pace: what steps and dispatches take.
  """

  def __init__(self, engine: Engine, slots: Slots, all_slots: bool):
    self._engine = engine
    self._slots = slots
    self._all_slots = all_slots
    self.pace = Pace(engine.settings.steps)
    # Dispatches that a program for few slots would have served.
    self._missed: collections.Counter[Name] = collections.Counter()

  def few(self, columns: int) -> np.ndarray | None:
    """[R] int32 slots, the active among them, if not all need to decode.

    Of each data shard there are as many, enough for the one with the most.

    A program for few is worth its compilation only if it would be used often.
    All slots can do the same until it is there; fewer rows round otherwise in
    the last bits.
    """
    if self._all_slots:
      return None
    shards, share = self._engine.shards, self._engine.share
    active = self._slots.active().reshape(shards, share.slots)
    most = active.sum(axis=1).max()
    for rows in reversed(share.decode_rows[1:]):
      if most > rows:
        continue
      name = engine_programs.generate_name(shards * rows, columns)
      self._missed[name] += 1
      if self._missed[name] == _WORTH_COMPILING:
        self._engine.programs.want(name)
      if self._engine.programs.ready(name):
        # The active ones first, otherwise in order.
        chosen = np.argsort(~active, axis=1, kind='stable')[:, :rows]
        first = np.arange(shards)[:, None] * share.slots
        return (first + chosen).reshape(-1).astype(np.int32)
    return None

  def steps(self, awaited: bool) -> int:
    """Chooses the number of decode steps of the next dispatch.

    Args:
      awaited: whether requests wait for slots.
    """
    if not awaited:
      return self._engine.settings.steps
    active = [r for r in self._slots.occupied().values() if r.active]
    asked = [r.request.sampling for r in active]
    return self.pace.steps(
        np.array([r.limit - r.length for r in active]),
        np.array([bool(a.stop_ids or a.stop_strings) for a in asked]),
    )
