"""The order in which an engine's programs are compiled.

What lives here: `plan`, which names every program that a run can need, in the
order of need, each with the function that compiles it. `telemetry.programs`
works it off.
"""

from __future__ import annotations

from typing import Any

from areal_jax.rollout.engine_programs import (
    INIT,
    LAY_OUT,
    OCCUPY,
    RELEASE,
    EnginePrograms,
    generate_name,
)
from areal_jax.telemetry.programs import Compile, Name

Params = Any
Planned = tuple[Name, Compile]


class LaidOut:
  """Weights in the form that dispatches read, as shapes, once that is known.

  Programs are compiled in the order of the plan, so what lays the weights out
  is compiled before all that takes them.

  Args:
    programs: the engine's.
    weights: as shapes with shardings.
  """

  def __init__(self, programs: EnginePrograms, weights: Params):
    self._programs = programs
    self.weights = weights

  def first(self) -> list[Planned]:
    """What comes before every other program."""
    plan = [(INIT, self._programs.compile_init)]
    if self._programs.apart:
      plan.append((LAY_OUT, self._lay_out))
    return plan

  def extend(self, rows: int, bucket: int) -> Planned:
    """The program that caches so many pieces of a bucket on each shard."""
    name = ('extend', self._programs.shards * rows, bucket)
    trace = lambda: self._programs.trace_extend(self.weights, rows, bucket)
    return name, lambda: trace().lower().compile()

  def generate(self, rows: int, columns: int) -> Planned:
    """The program that decodes so many slots of each shard."""
    name = generate_name(self._programs.shards * rows, columns)
    trace = lambda: self._programs.trace_generate(self.weights, columns, rows)
    return name, lambda: trace().lower().compile()

  def prompt_logps(self, bucket: int) -> Planned:
    """The program for prompts that are padded to this length."""
    compile_ = self._programs.compile_prompt_logps
    return ('prompt_logps', bucket), lambda: compile_(self.weights, bucket)

  def _lay_out(self) -> None:
    self.weights = self._programs.compile_lay_out(self.weights)


def plan(
    programs: EnginePrograms, weights: Params, exact: bool = False
) -> dict[str, list[Planned]]:
  """Lists what to compile for weights of these shapes, for `Programs.plan`.

  What the first answers need comes first. Prompts that come one by one can be
  computed by the programs for several. Pieces longer than a prompt are for
  sequences whose weights are replaced, not before a first step, or whose
  pages were taken; in a loop that is exact the weights wait. What else a run
  can do without are decode steps of few slots.
  """
  s, laid_out = programs.settings, LaidOut(programs, weights)
  columns = s.live_buckets[-1:] if exact else s.live_buckets
  pieces = [
      (rows, bucket)
      for bucket in s.piece_buckets
      for rows in sorted(  # many first: a run begins with many prompts
          {1} if exact else {s.rows_for(0, bucket), s.piece_rows(bucket)},
          reverse=True,
      )
  ]
  work = laid_out.first()
  work += [
      laid_out.extend(*pieces[0]),
      (OCCUPY, programs.compile_occupy),
      laid_out.generate(programs.share.slots, columns[0]),
      (RELEASE, programs.compile_release),
  ]
  longest = s.piece_bucket(min(s.max_prompt_length, s.longest_piece))
  first = [
      (rows, bucket)
      for rows, bucket in pieces[1:]
      if bucket <= longest and (exact or rows == s.piece_rows(bucket))
  ]
  work += [laid_out.extend(*shape) for shape in first]
  if s.sampling.prompt_logps:
    work += [laid_out.prompt_logps(bucket) for bucket in s.prefill_buckets]
  every, *fewer = programs.share.decode_rows
  work += [laid_out.generate(every, width) for width in columns[1:]]
  others = [
      laid_out.extend(*shape) for shape in pieces[1:] if shape not in first
  ]
  if exact:
    kept = not s.pages  # nobody's pages are taken
    return {'work': work, 'later' if kept else 'soon': others}
  few = [laid_out.generate(rows, width) for width in columns for rows in fewer]
  return {'work': work, 'soon': others, 'later': few}
