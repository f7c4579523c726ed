"""The loop over the layers of the Transformer, unrolled or as a scan.

In go the parameters of all layers, stacked, and the function `step` of one
layer; out comes what the last layer gives, and what each layer collected.

Layers may differ in whether they slide, that is see the last tokens alone. What
a layer needs of it is taken by the layer's number: as the program is traced
where the loop is unrolled or all layers are alike, by a select in a scan over
layers that are not. Layers with experts and layers without are other programs,
so a scan goes over blocks of them that repeat; see `runs`.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, NamedTuple

from flax import nnx
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models import visibility
from areal_jax.models.config import ModelConfig
from areal_jax.models.layout import Layout
from areal_jax.models.moe import Routing

Array = jax.Array

# What a layer begins with, by the name that 'offload' knows it by.
STREAM = 'stream'
# Tokens that a query of a layer sees; None for all before it.
Window = visibility.Window | int | None


def rematerialised(
    config: ModelConfig, body: Callable[..., Any], **options: Any
) -> Callable[..., Any]:
  """A layer whose backward pass computes again what `config.remat` says."""
  if config.remat == 'none':
    return body
  policies = jax.checkpoint_policies
  policy = {
      # Projections take flat tokens and so have no batch dimension.
      'dots': policies.dots_with_no_batch_dims_saveable,
      'full': policies.nothing_saveable,
      'offload': policies.save_and_offload_only_these_names(
          names_which_can_be_saved=[],
          names_which_can_be_offloaded=[STREAM],
          offload_src='device',
          offload_dst='pinned_host',
      ),
  }[config.remat]
  return jax.checkpoint(body, policy=policy, **options)


class _Run(NamedTuple):
  """Layers that one scan walks: a block of `size` layers, `times` in a row."""

  first: int
  size: int
  times: int


@functools.cache
def runs(kinds: tuple[bool, ...]) -> tuple[_Run, ...]:
  """The layers as blocks that repeat, so that as few as can be are compiled.

  A scan compiles the layers of one block, however often it repeats. Example: of
  the kinds aabaabb, the blocks are aab twice and b once.

  Args:
    kinds: what tells the program of each layer apart.
  """
  count = len(kinds)
  # From each layer on: layers that are compiled, scans, and the first run.
  best: list[tuple[int, int, _Run | None]] = [(0, 0, None)] * (count + 1)
  for first in reversed(range(count)):
    options = []
    for size in range(1, count - first + 1):
      block, times = kinds[first : first + size], 1
      while True:
        stop = first + size * times
        layers, scans, _ = best[stop]
        options.append((size + layers, scans + 1, _Run(first, size, times)))
        if kinds[stop : stop + size] != block:
          break
        times += 1
    best[first] = min(options)
  found, first = [], 0
  while first < count:
    run = best[first][2]
    found.append(run)
    first += run.size * run.times
  return tuple(found)


def scanned(
    config: ModelConfig,
    step: Callable[..., Any],
    carry: Any,
    stacked: nnx.State,
    given: Array | None,
) -> tuple[Any, Any, Routing | None]:
  """Walks all layers by scans over `runs`.

  Args:
    config: of the policy.
    step: one layer, see `Transformer.walk`.
    carry: what the first layer takes.
    stacked: the parameters of all layers.
    given: [L, M, k] choices of the sparse layers; None lets routers choose.

  Returns:
    What the last layer gives, and along L what was collected and what the
    routers did, None without any.
  """
  c = config
  sparse = tuple(n in c.sparse_layers for n in range(c.layers))
  static = dict(static_argnums=(1, 2))
  # A loop keeps what is computed again apart from what was computed before.
  looped = rematerialised(c, step, prevent_cse=False, **static)
  alone = rematerialised(c, step, **static)
  leaves, structure = jax.tree.flatten_with_path(stacked)
  names = [path[0].key for path, _ in leaves]
  rows, routings = [], []
  for run in runs(sparse):
    numbers = jnp.arange(run.first, run.first + run.size * run.times)
    inputs = (
        numbers.reshape(run.times, run.size),
        [_of_run(c, name, x, run) for name, (_, x) in zip(names, leaves)],
        None if given is None else _of_run(c, 'router', given, run),
    )

    def block(carry, inputs, run=run):
      numbers, stacks, chosen = inputs
      body = looped if run.times > 1 else alone
      of_layers, of_routers = [], []
      for place in range(run.size):
        layer = run.first + place
        weights = structure.unflatten(
            # What no layer of the run has is not used; its first stands for it.
            whole[0] if x is None else x[_place_in_run(c, name, run, layer)]
            for name, (_, whole), x in zip(names, leaves, stacks)
        )
        mine = None
        if chosen is not None and sparse[layer]:
          mine = chosen[_place_in_run(c, 'router', run, layer)]
        carry, (collected, routing) = body(
            carry, None, sparse[layer], numbers[place], weights, mine
        )
        of_layers.append(collected)
        if routing is not None:
          of_routers.append(routing)
      routing = stacked_rows(of_routers) if of_routers else None
      return carry, (stacked_rows(of_layers), routing)

    carry, (collected, routing) = jax.lax.scan(block, carry, inputs)
    rows.append(collected)
    if routing is not None:
      routings.append(routing)
  return carry, _in_a_row(rows), _in_a_row(routings) if routings else None


def _of_run(
    config: ModelConfig, name: str, stack: Array, run: _Run
) -> Array | None:
  """The part of a stack that a run reads: [times, layers of a block, ...].

  None of a stack that no layer of the run has a part in.
  """
  places = [
      place_of(config, name, layer) for layer in _having(config, name, run)
  ]
  if not places:
    return None
  each = len(places)
  part = stack[places[0] : places[0] + each * run.times]
  return part.reshape(run.times, each, *stack.shape[1:])


def _place_in_run(config: ModelConfig, name: str, run: _Run, layer: int) -> int:
  """Where a layer of the first block lies in `_of_run`; 0 if it does not."""
  having = _having(config, name, run)
  return having.index(layer) if layer in having else 0


def _having(config: ModelConfig, name: str, run: _Run) -> list[int]:
  """Layers of a run's first block that have a parameter."""
  block = range(run.first, run.first + run.size)
  return [layer for layer in config.layers_with(name) if layer in block]


def _in_a_row(parts: list[Any]) -> Any:
  """[times, layers of a block, ...] of one run after another, as [L, ...]."""
  flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), parts)
  return jax.tree.map(lambda *x: jnp.concatenate(x), *flat)


def layers_of(
    config: ModelConfig, stacked: nnx.State, ids: Array, layout: Layout
) -> list[nnx.State]:
  """The parameters of each layer.

  Of a stack that a layer has no part in, its first is taken and not used.

  XLA for CPU compiles kernels that are alike once, but not those that differ in
  a constant, as cuts of one layer and the next do. So where the parameters lie
  on one processor whole, the numbers of layers come out of a branch that XLA
  cannot decide.
  """
  if layout.platform == 'cpu' and layout.whole:
    numbers = jax.lax.cond(
        ids[0] >= 0,  # always
        lambda: tuple(np.arange(config.layers, dtype=np.int32)),
        lambda: tuple(np.zeros(config.layers, np.int32)),
    )
    cut = lambda stack: _parts(stack, numbers[: len(stack)])
  else:
    cut = lambda stack: [stack[n] for n in range(len(stack))]
  leaves, structure = jax.tree.flatten_with_path(stacked)
  parts = [(path[0].key, cut(leaf)) for path, leaf in leaves]
  return [
      structure.unflatten(
          each[place_of(config, name, layer)] for name, each in parts
      )
      for layer in range(config.layers)
  ]


@jax.custom_vjp
def _parts(stack: Array, numbers: tuple[Array, ...]) -> tuple[Array, ...]:
  """The parts of a stack in order, 0 to its length, as these scalars name them.

  Its gradient is a stack too, and not a sum of some that are zero but for one.
  """
  return tuple(
      jax.lax.dynamic_index_in_dim(stack, n, keepdims=False) for n in numbers
  )


_parts.defvjp(
    lambda stack, numbers: (_parts(stack, numbers), len(numbers)),
    lambda count, parts: (
        jnp.stack(parts),
        count * (np.zeros((), jax.dtypes.float0),),
    ),
)


def given_to(
    config: ModelConfig, given: Array | None, layer: int
) -> Array | None:
  """The choices [M, k] that are given for a layer, of those of all."""
  if given is None or layer not in config.sparse_layers:
    return None
  return given[place_of(config, 'router', layer)]


def place_of(config: ModelConfig, name: str, layer: int) -> int:
  """Returns the layer's index along the L of a parameter, or 0."""
  layers = config.layers_with(name)
  return layers.index(layer) if layer in layers else 0


def stacked_rows(rows: list[Any]) -> Any:
  """Trees of arrays as one, along a new first axis."""
  return jax.tree.map(lambda *r: jnp.stack(r), *rows)


def of_layer(
    config: ModelConfig, layer: Array | int, full: Any, sliding: Any
) -> Any:
  """The one of two that a layer needs, by whether it slides."""
  slides = [n in config.sliding_layers for n in range(config.layers)]
  if full is sliding:
    return full
  if len(set(slides)) == 1:
    return sliding if slides[0] else full
  if isinstance(layer, int):
    return sliding if slides[layer] else full
  chosen = jnp.asarray(slides)[layer]
  return jax.tree.map(lambda f, s: jnp.where(chosen, s, f), full, sliding)


def first_alike(config: ModelConfig) -> list[int]:
  """Maps each layer to the first layer of its kind."""
  kinds = [
      (n in config.sliding_layers, n in config.sparse_layers)
      for n in range(config.layers)
  ]
  return [kinds.index(kind) for kind in kinds]


def window_of(config: ModelConfig, layer: Array | int) -> Window:
  """Tokens that a query of the layer sees; None for all before it."""
  slides = [n in config.sliding_layers for n in range(config.layers)]
  if isinstance(layer, int) or len(set(slides)) == 1:
    first = layer if isinstance(layer, int) else 0
    return config.sliding_window if slides[first] else None
  return visibility.Window(config.sliding_window, jnp.asarray(slides)[layer])
