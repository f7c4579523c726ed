"""Which keys a query sees, and how partial softmax results are merged.

A `Visibility` holds the places and segments of queries and keys. They are kept
apart, so that a device which holds a part of a row can ask about the whole row.
A `Window` narrows what a query sees to the last tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.models import blockwise

Array = jax.Array

# Finite, so that a row that is masked whole has no NaN in value or gradient.
MASKED = blockwise.MASKED


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Visibility:
  """Positions and segments that decide which keys a query sees.

  Two packed sequences and padding, [1, 6]: places 0 1 2 3 4 5, segments
  1 1 2 2 2 0. The query at place 4 sees keys 2, 3 and 4, that at 5 none.

  Attributes:
    query_places: [T] int32 where queries stand in their rows.
    key_places: [C] int32 where keys stand there.
    query_segments: [B, T] int32 sequence of its row that a query is of, from 1;
      None where each row is one sequence.
    key_segments: [B, C] int32 the same of keys; 0 is padding, which nobody
      sees. None if and only if `query_segments` is.
  """

  query_places: Array | np.ndarray
  key_places: Array | np.ndarray
  query_segments: Array | None = None
  key_segments: Array | None = None

  @classmethod
  def of_rows(cls, length: int, segments: Array | None = None) -> Visibility:
    """Whole rows that look at themselves; segments [B, length] or None."""
    places = np.arange(length, dtype=np.int32)
    return cls(places, places, segments, segments)

  def mask(self, window: Window | Array | int | None = None) -> Array:
    """[B or 1, T, C] bool, True where a query may look."""
    queries, keys = self.query_places[:, None], self.key_places[None]
    seen = jnp.asarray(keys <= queries)[None]
    if window is not None:
      seen &= keys > queries - window_tokens(window)
    if self.query_segments is not None:
      seen &= self.query_segments[:, :, None] == self.key_segments[:, None]
      seen &= (self.key_segments != 0)[:, None]
    return seen

  @property
  def whole(self) -> bool:
    """Returns whether queries and keys are known to be the same whole rows."""
    known = isinstance(self.query_places, np.ndarray)
    return known and self.query_places is self.key_places


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Window:
  """A window of a layer that is known when it runs: in a scan over layers.

  Attributes:
    size: tokens that a query of a sliding layer sees, its own included.
    slides: bool scalar, whether this layer does.
  """

  size: int = dataclasses.field(metadata=dict(static=True))
  slides: Array


def window_tokens(window: Window | Array | int) -> Array | int:
  """Tokens that a query sees, its own included; all of them is a large one."""
  if not isinstance(window, Window):
    return window
  return jnp.where(window.slides, window.size, blockwise.NO_WINDOW)


def with_known_window(
    run: Callable[[int | None], Array], window: Window | int | None
) -> Array:
  """Runs what has to know its window, one of two if the layer decides."""
  if not isinstance(window, Window):
    return run(window)
  return jax.lax.cond(
      window.slides, lambda: run(window.size), lambda: run(None)
  )


def merge_softmax(one, other):
  """Merges two partial softmax results (maximum, sum of exp, mixture)."""
  best = jnp.maximum(one[0], other[0])
  scales = jnp.exp(one[0] - best), jnp.exp(other[0] - best)
  return best, *(
      x * scales[0] + y * scales[1] for x, y in zip(one[1:], other[1:])
  )


def capped(x: Array, cap: float) -> Array:
  """cap · tanh(x / cap), within (-cap, cap); x itself for a cap of 0."""
  return cap * jnp.tanh(x / cap) if cap else x


def with_slides(window: Window | int | None, slides: Array | None):
  """Returns the window with `slides` in place of its own; None leaves it."""
  return window if slides is None else Window(window.size, slides)
