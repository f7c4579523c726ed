"""Attention of decode steps, over the pages of a cache."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from areal_jax.mesh.rules import Rules, free_axes
from areal_jax.models import forms
from areal_jax.models.visibility import (
    MASKED,
    Window,
    capped,
    merge_softmax,
    window_tokens,
    with_known_window,
    with_slides,
)

Array = jax.Array
Mesh = jax.sharding.Mesh
P = jax.sharding.PartitionSpec

# Logical axes of the cache [L, pages, page, K, H], or [..., K · H].
CACHE_AXES = ('layer', 'pages', 'page', 'kv_heads', 'head')
# Cached tokens of a slot that `attend_side_by_side` reads at a time.
_LIVE = 2048


def attend_paged(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    platform: str,
    form: str = 'auto',
    window: Window | Array | int | None = None,
    cap: float = 0.0,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Attends with one query a slot over the slot's pages, up to its position.

  Args:
    q: [S, N, H] scaled queries.
    keys: [L, pages, page, K, H] the cache, or [L, pages, page, K · H]; see
      `transformer.cache_shapes`.
    values: the cache, of the same shape.
    layer: which L.
    page_table: [S, P] int32 pages that hold a slot's first P · page positions.
    positions: [S] int32 last logical position that a slot sees.
    platform: 'cpu', 'gpu' or 'tpu'.
    form: a name of `forms.PAGES`, or 'auto'. On a CPU the kernels of other
      platforms are interpreted, for tests.
    window: positions that it sees, that one included; None for all. No page
      outside of it is read if it is a plain number.
    cap: of the scores.
    mesh: where the cache lies; None for one device.
    rules: how it lies there.

  Returns:
    [S, N, H] float32, or in the kernels q's dtype.

  Raises:
    ConfigError: a form that does not do what is asked of it.
  """
  h = q.shape[2]
  name = forms.of_pages(
      form,
      forms.Pages(
          platform=platform,
          page=keys.shape[2],
          heads=q.shape[1],
          kv_heads=math.prod(keys.shape[3:]) // h,
          head_size=h,
          dtype=keys.dtype.name,
          parts=1 if mesh is None else rules.parts('heads', mesh),
          flat=keys.ndim == 4,
      ),
  )
  whole = mesh is None or rules.parts('heads', mesh) == 1
  if name == 'gathered':
    run = (
        attend_side_by_side if platform == 'cpu' and whole else attend_gathered
    )
    more = dict(window=window, cap=cap)
    return run(q, keys, values, layer, page_table, positions, **more)
  from areal_jax.models import kernels  # Pallas takes a second to import

  kernel = kernels.PAGES[name]

  def run(window):
    moving = isinstance(window, Window)

    def part(q, keys, values, layer, page_table, positions, slides):
      size = window_tokens(with_slides(window, slides)) if moving else window
      more = dict(window=size, cap=cap, interpret=platform == 'cpu')
      return kernel(q, keys, values, layer, page_table, positions, **more)

    slides = window.slides if moving else None
    inputs = (q, keys, values, layer, page_table, positions, slides)
    if mesh is None or mesh.size == 1:
      return part(*inputs)
    slots = rules.spec(('tokens', 'heads', 'head'), q.shape, mesh)
    cache = rules.spec(CACHE_AXES[: keys.ndim], keys.shape, mesh)
    cut = P(slots[0])
    return jax.shard_map(
        part,
        mesh=mesh,
        axis_names=free_axes(mesh),
        in_specs=(slots, cache, cache, P(), cut, cut, P()),
        out_specs=slots,
        # Kernels do not say over which axes their results vary.
        check_vma=False,
    )(*inputs)

  if name in forms.KNOWN_WINDOW:
    return with_known_window(run, window)
  return run(window)


def attend_gathered(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    window: Window | Array | int | None = None,
    cap: float = 0.0,
) -> Array:
  """The plain form; arguments as in `attend_paged`."""
  s, n, h = q.shape
  page_table, first = _columns(page_table, positions, keys.shape[2], window)
  read = keys, values, layer, page_table, first, positions, window
  k, v, seen = _gathered(*read)
  k, v = (x.reshape(*x.shape[:2], -1, h) for x in (k, v))
  scores = jnp.einsum(
      'skrh,sckh->skrc',
      q.reshape(s, k.shape[2], -1, h),
      k,
      preferred_element_type=jnp.float32,
  )
  scores = capped(scores, cap)
  weights = jax.nn.softmax(jnp.where(seen[:, None, None], scores, MASKED))
  mixed = jnp.einsum(
      'skrc,sckh->skrh',
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
  )
  return mixed.reshape(s, n, h)


def attend_side_by_side(
    q: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    positions: Array,
    *,
    window: Window | Array | int | None = None,
    cap: float = 0.0,
) -> Array:
  """The same for a CPU, which reads the cache as it lies, [S, C, K · H].

  Queries get zeros for the heads that they do not look at, which multiplies the
  products by K and saves the transpositions of keys and values. On two busy
  cores 225 us instead of 873 at (S, C, N, K, H) = (64, 80, 4, 2, 64); the
  gather is 40 of them.

  Long sequences are read in blocks and put together as in `attend_behind`, so
  that what is gathered stays in a cache until it is used.
  """
  s, n, h = q.shape
  page = keys.shape[2]
  kv_heads = math.prod(keys.shape[3:]) // h
  group = n // kv_heads
  own = jnp.repeat(jnp.eye(kv_heads, dtype=q.dtype), group, axis=0)  # [N, K]
  q = (q[:, :, None] * own[:, :, None]).reshape(s, n, kv_heads * h)
  page_table, first = _columns(page_table, positions, page, window)

  def part(page_table, first):
    """Largest score [S, N, 1], sum of exp, and mixture [S, N, K · H]."""
    read = keys, values, layer, page_table, first, positions, window
    k, v, seen = _gathered(*read)
    # Many rows times few; the other way round takes 1.6 times as long. The
    # barrier keeps the small transposition out of the product.
    scores = jax.lax.optimization_barrier(
        jnp.einsum('scd,snd->scn', k, q, preferred_element_type=jnp.float32)
    )
    scores = capped(jnp.swapaxes(scores, 1, 2), cap)
    scores = jnp.where(seen[:, None], scores, MASKED)
    best = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - best)
    mixed = jnp.einsum(
        'snc,scd->snd',
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return best, weights.sum(-1, keepdims=True), mixed

  columns = max(1, _LIVE // page)
  block = columns * page
  if page_table.shape[1] <= columns:
    _, total, mixed = part(page_table, first)
  else:
    spare = -page_table.shape[1] % columns
    page_table = jnp.pad(page_table, ((0, 0), (0, spare)))

    def add(i, carry):
      at = jax.lax.dynamic_slice_in_dim(page_table, i * columns, columns, 1)
      return merge_softmax(carry, part(at, first + i * block))

    # A slot that is done may stand anywhere.
    blocks = jnp.minimum(
        (positions - first).max() // block + 1, page_table.shape[1] // columns
    )
    _, total, mixed = jax.lax.fori_loop(
        1, blocks, add, part(page_table[:, :columns], first)
    )
  mixed = (mixed / total).reshape(s, kv_heads, group, kv_heads, h)
  return jnp.stack(
      [mixed[:, head, :, head] for head in range(kv_heads)], 1
  ).reshape(s, n, h)


def _columns(page_table, positions, page, window):
  """Pages that slots see by their window, and [S] the first one's position."""
  first = jnp.zeros_like(positions)
  if isinstance(window, int):
    # So many pages hold a window, wherever it begins.
    columns = (window - 2) // page + 2
    if columns < page_table.shape[1]:
      first = jnp.maximum(positions - window + 1, 0) // page
      read = first[:, None] + jnp.arange(columns)
      # Columns beyond the last are read again, and lie ahead of the query.
      page_table = jnp.take_along_axis(page_table, read, axis=1, mode='clip')
  return page_table, first * page


def _gathered(keys, values, layer, page_table, first, positions, window):
  """Keys and values [S, C, K · H] of pages, and [S, C] bool seen."""
  context = page_table.shape[1] * keys.shape[2]
  places = first[:, None] + jnp.arange(context)
  seen = places <= positions[:, None]
  if window is not None:
    seen &= places > positions[:, None] - window_tokens(window)
  # One gather of layer and page: a slice of the layer first would copy it.
  k, v = keys[layer, page_table], values[layer, page_table]
  k, v = (x.reshape(len(positions), context, -1) for x in (k, v))
  return k, v, seen


def as_cached(x: Array, cache: Array) -> Array:
  """Keys or values [..., K, H] with the last axes of the cache."""
  return x.reshape(*x.shape[:-2], *cache.shape[3:])
