"""The programs of an engine as jax compiles them: names, shapes, shardings.

What lives here: `EnginePrograms`, with one jitted function a program, what it
gives away (donates) and how what goes in and comes out lies on the mesh; and
the same programs from shapes alone, to be traced and compiled before the first
call. `engine_plan` says in which order, `Engine` calls them.
"""

from __future__ import annotations

import functools
from typing import Any, Callable

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.mesh.rules import Rules
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.rollout.decode_programs import DecodePrograms
from areal_jax.rollout.decode_state import DecodeState, Pieces, SlotRows
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.telemetry.programs import Name
from areal_jax.types import Request, SamplingParams

Params = Any
P = jax.sharding.PartitionSpec

# Names of the programs that have one shape each.
INIT: Name = ('init',)
LAY_OUT: Name = ('lay_out',)
OCCUPY: Name = ('occupy',)
RELEASE: Name = ('release',)


def extend_name(pieces: Pieces) -> Name:
  """The program that caches pieces of this shape."""
  return ('extend', *pieces.ids.shape)


def generate_name(rows: int, columns: int) -> Name:
  """The program that decodes so many slots over page tables of this width."""
  return ('generate', rows, columns)


def prompt_logps_name(padded_tokens: np.ndarray) -> Name:
  """The program for prompts that are padded to this length."""
  return ('prompt_logps', len(padded_tokens))


class EnginePrograms:
  """The jitted programs of one model on one rollout mesh.

  Args:
    config: the model.
    settings: static shapes, which divide over the data shards.
    mesh: rollout mesh with the axes that `rules` names.
    rules: logical to mesh axes.

  Attributes:
    bodies: what they compute.
    rows: which row of a call each slot has.
    param_shardings: of the policy's weights.
    state_shapes: of a decode state.
    state_shardings: of a decode state.
    by_slot: the sharding of arrays that go by slots or rows.
    apart: whether dispatches read weights faster once they are laid out.
    init: makes a state in which no slot is active.
    cut: takes one layer of the weights apart.
    generate: takes decode steps.
    extend: caches pieces of sequences.
    occupy: lets slots go on with what is cached.
    release: ends slots.
    prompt_logps: tells log-probs of a prompt.
  """

  def __init__(
      self,
      config: ModelConfig,
      settings: EngineSettings,
      mesh: jax.sharding.Mesh,
      rules: Rules,
  ):
    self.config = config
    self.settings = settings
    self.mesh = mesh
    self.rules = rules
    bodies = self.bodies = DecodePrograms(config, settings, mesh, rules)
    self.shards, self.share = bodies.shards, bodies.share
    self.rows = SlotRows(settings, self.shards)
    self.param_shardings = parameters.param_shardings(config, mesh, rules)
    self.state_shapes = jax.eval_shape(bodies.initial_state)
    slots = rules.sharding(('slots',), (settings.slots,), mesh)
    self.by_slot = slots
    self.state_shardings = jax.tree.map(lambda _: slots, self.state_shapes)
    cache = rules.sharding(
        transformer.CACHE_AXES[: self.state_shapes.keys.ndim],
        self.state_shapes.keys.shape,
        mesh,
    )
    self.state_shardings.keys = cache
    self.state_shardings.values = cache
    state, by_shard = self.state_shardings, bodies.by_shard
    cut, parts = slots.spec, self.state_parts
    compiled = functools.partial(jax.jit, donate_argnames='state')
    self.init = jax.jit(bodies.initial_state, out_shardings=state)
    self.apart = parameters.reads_apart(config, mesh, rules)
    self.cut = jax.jit(parameters.layer_apart, static_argnums=2)
    self.generate = compiled(
        by_shard(bodies.generate, (P(), parts, cut, P(), cut), (parts, cut)),
        out_shardings=(state, slots),
    )
    self.extend = compiled(
        by_shard(bodies.extend, (P(), parts, cut), (parts, cut)),
        out_shardings=(state, slots),
    )
    self.occupy = compiled(
        by_shard(bodies.occupy, (parts, *[cut] * 5), parts),
        out_shardings=state,
    )
    self.release = compiled(bodies.release, out_shardings=state)
    self.prompt_logps = jax.jit(bodies.prompt_logps)

  @property
  def state_parts(self) -> DecodeState:
    """How a shard's part is cut out of a state."""
    parts = jax.tree.map(lambda sharding: sharding.spec, self.state_shardings)
    parts.keys = parts.values = P(None, *self.by_slot.spec)
    return parts

  def abstract_weights(self, dtype: str = '') -> Params:
    """Weights as shapes with shardings, to compile ahead for.

    Args:
      dtype: of the floating ones; empty for the policy's own.
    """
    shapes = cast_shapes(parameters.abstract_params(self.config), dtype)
    return placed_shapes(shapes, self.param_shardings)

  @property
  def abstract_state(self) -> DecodeState:
    """Shapes and shardings of a decode state."""
    return placed_shapes(self.state_shapes, self.state_shardings)

  def abstract_settings(self, rows: int) -> dict[str, Any]:
    """Settings of so many slots, as shapes."""
    request = Request('warm-up', (0,), SamplingParams(1))
    filled = self.rows.settings_of([0], [request], rows)
    return jax.tree.map(abstract, vars(filled))

  def laid_out(self, params: Params, cut: Callable[..., Params]) -> Params:
    return parameters.layers_apart(
        self.config, params, self.mesh, self.rules, cut
    )

  # From shapes alone: nothing is computed and no device used. Weights are
  # `jax.ShapeDtypeStruct`s with shardings, rows those of each data shard.

  def trace_extend(
      self, params: Params, rows: int, bucket: int
  ) -> jax.stages.Traced:
    """`extend` of so many rows of a bucket.

    Args:
      params: `jax.ShapeDtypeStruct`s with shardings.
      rows: of each data shard.
      bucket: T, one of `piece_buckets`.
    """
    rows *= self.shards
    pieces = Pieces(
        ids=integers(rows, bucket),
        starts=integers(rows),
        lengths=integers(rows),
        tables=integers(rows, self.settings.pages_per_slot),
    )
    return self.extend.trace(params, self.abstract_state, vars(pieces))

  def trace_generate(
      self, params: Params, columns: int, rows: int | None = None
  ) -> jax.stages.Traced:
    """`generate_steps` with tables of so many columns.

    Args:
      params: `jax.ShapeDtypeStruct`s with shardings.
      columns: one of `live_buckets`.
      rows: of each data shard, one of its `decode_rows`; None for all slots.
    """
    every = self.settings.slots
    rows = every if rows is None else self.shards * rows
    return self.generate.trace(
        params,
        self.abstract_state,
        integers(rows, columns),
        integers(),
        None if rows == every else integers(rows),
    )

  def compile_init(self) -> None:
    """Compiles `init`."""
    self.init.lower().compile()

  def compile_lay_out(self, weights: Params) -> Params:
    """Compiles what `Engine.lay_out` calls; gives its result as shapes."""
    layers = {}  # those of one kind have one program

    def cut(blocks: Params, places: np.ndarray, join: bool) -> Params:
      if join not in layers:
        compiled = self.cut.lower(blocks, abstract(places), join).compile()
        layers[join] = placed_shapes(
            compiled.out_info, compiled.output_shardings
        )
      return layers[join]

    return self.laid_out(weights, cut)

  def compile_occupy(self) -> None:
    """Compiles `occupy`."""
    s, rows = self.settings, self.shards * self.share.occupy_rows
    self.occupy.lower(
        self.abstract_state,
        self.abstract_settings(self.share.occupy_rows),
        integers(rows, s.pages_per_slot * s.page_size),
        integers(rows),
        integers(rows),
        integers(rows, 2),
    ).compile()

  def compile_release(self) -> None:
    """Compiles `release`."""
    ended = np.zeros(self.settings.slots, bool)
    self.release.lower(self.abstract_state, abstract(ended)).compile()

  def compile_prompt_logps(self, weights: Params, bucket: int) -> None:
    """Compiles `prompt_logps` for prompts padded to this length."""
    self.prompt_logps.lower(weights, integers(bucket), integers()).compile()


def integers(*shape: int) -> jax.ShapeDtypeStruct:
  """The shape of int32 numbers."""
  return jax.ShapeDtypeStruct(shape, jnp.int32)


def cast_shapes(shapes: Any, dtype: str) -> Any:
  """Shapes, the floating ones in another dtype, if there is one."""
  return jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, dtype)
      if dtype and jnp.issubdtype(x.dtype, jnp.floating)
      else x,
      shapes,
  )


def placed_shapes(shapes: Any, shardings: Any) -> Any:
  """Shapes with shardings."""
  return jax.tree.map(
      lambda x, sharding: jax.ShapeDtypeStruct(
          x.shape, x.dtype, sharding=sharding
      ),
      shapes,
      shardings,
  )


def abstract(x: Any) -> jax.ShapeDtypeStruct:
  """An argument as its program is compiled for it.

  One that is on the host, or committed to no device, comes without a sharding:
  it goes where the others are.
  """
  placed = getattr(x, 'committed', hasattr(x, 'sharding'))
  sharding = x.sharding if placed else None
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
