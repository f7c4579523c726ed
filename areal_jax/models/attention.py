"""Attention of grouped query heads, for packed rows and for a paged cache.

In flow queries, keys and values with RoPE applied and the queries scaled; out
flows the mixture of values. N query heads share K key/value heads in groups of
N / K. Scores, softmax and sums are float32 whatever the inputs are. A query
that may see nothing gets a finite mixture. With a cap, scores are
cap · tanh(score / cap), as in Gemma 2 (https://arxiv.org/abs/2408.00118); a cap
of 0 is none.

What a query may see is said by a `Sight`: where queries and keys stand in
their rows, and of which segments they are. Queries and keys are named apart,
so that a device which holds a part of a row can ask about the whole of it. No
mask [B, T, C] exists but in the plain forms, which are for short rows.

`attend` and `attend_paged` are the doors; `forms.py` chooses what runs behind
them. `attend_grouped` is the plain form for any backend and any mesh, and the
one that others are compared with; `blockwise.py` has the form for long rows,
`kernels.py` those that are written for one kind of device.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Callable

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.mesh.rules import Cut, Rules, free_axes
from areal_jax.models import blockwise, forms

Array = jax.Array
Mesh = jax.sharding.Mesh
P = jax.sharding.PartitionSpec

# Finite, so that a row that is masked whole has no NaN in value or gradient.
MASKED = blockwise.MASKED

# Logical axes of the cache [L, pages, page, K, H], or [..., K · H].
CACHE_AXES = ('layer', 'pages', 'page', 'kv_heads', 'head')

# Cached tokens that `attend_behind` reads at a time.
_BLOCK = 128
# Cached tokens of a slot that `attend_side_by_side` reads at a time.
_LIVE = 2048


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sight:
  """Which keys a query sees: those of its segment that are not ahead of it.

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
  def of_rows(cls, length: int, segments: Array | None = None) -> Sight:
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
    """Whether it is known that queries and keys are the same whole rows."""
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


def _with_known_window(
    run: Callable[[int | None], Array], window: Window | int | None
) -> Array:
  """Runs what has to know its window, one of two if the layer decides."""
  if not isinstance(window, Window):
    return run(window)
  return jax.lax.cond(
      window.slides, lambda: run(window.size), lambda: run(None)
  )


# Rows.


def attend(
    q: Array,
    k: Array,
    v: Array,
    sight: Sight,
    *,
    platform: str,
    form: str = 'auto',
    window: Window | int | None = None,
    cap: float = 0.0,
    mesh: Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Attention over rows, in the form that `forms.of_rows` chooses.

  On a mesh each device attends for its own rows, places and heads. Where places
  are cut ('time' of the rules), keys and values are gathered along them first,
  and their gradients summed back: a device has T / c queries and all T keys.

  Args:
    q: [B, T, N, H] scaled queries.
    k: [B, C, K, H] keys.
    v: [B, C, K, H] values.
    sight: of these queries and keys.
    platform: 'cpu', 'gpu' or 'tpu'.
    form: a name of `forms.ROWS`, or 'auto'. On a CPU the kernels of other
      platforms are interpreted, for tests.
    window: positions that a query sees, its own included; None for all.
    cap: of the scores.
    mesh: where the rows lie; None for one device.
    rules: how they lie there.

  Returns:
    [B, T, N, H] float32, or in the kernels q's dtype.

  Raises:
    ConfigError: a form that does not do what is asked of it.
  """
  layout = _Cut.of(q, k, mesh, rules)
  name = forms.of_rows(
      form,
      forms.Rows(
          platform=platform,
          queries=q.shape[1] // layout.time_parts,
          keys=k.shape[1],
          heads=q.shape[2] // layout.head_parts,
          head_size=q.shape[3],
          dtype=q.dtype.name,
          whole=sight.whole and layout.time_parts == 1,
          ordered=sight.whole,
          segments=sight.query_segments is not None,
          window=window is not None,
          cap=bool(cap),
          head_parts=layout.head_parts,
      ),
  )
  if name in forms.PLAIN and layout.time_parts == 1:
    # XLA cuts these as the arrays around them are cut.
    return _run_rows(name, q, k, v, sight, window, cap, platform)
  if name == 'splash':
    run = lambda window: _attend_by_splash(
        q, k, v, sight, window, cap, platform, layout
    )
  else:
    run = lambda window: layout.shard(
        lambda q, k, v, sight, slides: _run_rows(
            name, q, k, v, sight, _again(window, slides), cap, platform
        ),
        *(q, k, v, sight),
        window.slides if isinstance(window, Window) else None,
    )
  if name in forms.KNOWN_WINDOW:
    return _with_known_window(run, window)
  return run(window)


def _again(window: Window | int | None, slides: Array | None):
  """The window, with what came through the cut for what decides it."""
  return window if slides is None else Window(window.size, slides)


def _run_rows(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    sight: Sight,
    window: Window | int | None,
    cap: float,
    platform: str,
) -> Array:
  """One form on what one device has, or on the whole of it."""
  if name == 'grouped':
    return attend_grouped(q, k, v, sight.mask(window), cap)
  if name == 'by_head':
    return attend_by_head(q, k, v, sight.mask(window), cap)
  if name == 'blockwise':
    return blockwise.attend(
        q,
        k,
        v,
        sight.query_places,
        sight.key_places,
        sight.query_segments,
        sight.key_segments,
        window=None if window is None else window_tokens(window),
        cap=cap,
        one_head_at_a_time=platform == 'cpu',
        # Small ones stay in the cache of a core, and more of them are skipped.
        blocks=(128, 128) if platform == 'cpu' else (512, 512),
    )
  from areal_jax.models import kernels  # Pallas takes a second to import

  interpret = platform == 'cpu'
  if name == 'triton':
    return kernels.attend_by_triton(
        q, k, v, sight.query_segments, interpret=interpret
    )
  return kernels.attend_by_cudnn(q, k, v, window)


def _attend_by_splash(
    q: Array,
    k: Array,
    v: Array,
    sight: Sight,
    window: int | None,
    cap: float,
    platform: str,
    layout: _Cut,
) -> Array:
  """The kernel knows which blocks to skip before it is cut over devices."""
  from areal_jax.models import kernels  # Pallas takes a second to import

  kernel, specs = kernels.splash(
      heads=q.shape[2] // layout.head_parts,
      queries=q.shape[1],
      keys=k.shape[1],
      window=window,
      cap=cap,
      mesh=layout.mesh,
      time=layout.time,
      time_parts=layout.time_parts,
      interpret=platform == 'cpu',
  )
  return layout.shard(
      lambda q, k, v, sight, kernel: kernels.attend_by_splash(
          kernel, q, k, v, sight.query_segments, sight.key_segments
      ),
      *(q, k, v, sight, kernel, specs),
  )


@dataclasses.dataclass(frozen=True)
class _Cut:
  """How rows [B, T, N, H] and keys [B, C, K, H] are cut over a mesh.

  Attributes:
    mesh: None for one device.
    batch: mesh axes of B; None for whole, and so for the others.
    time: that of T; keys and values are whole along theirs.
    heads: that of N.
    kv_heads: that of K.
    time_parts: devices that T is cut over.
    head_parts: devices that N is cut over.
  """

  mesh: Mesh | None = None
  batch: Cut = None
  time: Cut = None
  heads: Cut = None
  kv_heads: Cut = None
  time_parts: int = 1
  head_parts: int = 1

  @classmethod
  def of(
      cls, q: Array, k: Array, mesh: Mesh | None, rules: Rules | None
  ) -> _Cut:
    if mesh is None or mesh.size == 1:
      return cls()
    batch, time, heads, _ = rules.spec(
        ('batch', 'time', 'heads', 'head'), q.shape, mesh
    )
    kv_heads = rules.spec(('kv_heads',), k.shape[2:3], mesh)[0]
    return cls(
        mesh,
        batch,
        time,
        heads,
        kv_heads,
        1 if time is None else rules.parts('time', mesh),
        1 if heads is None else rules.parts('heads', mesh),
    )

  def shard(
      self,
      run: Callable[..., Array],
      q: Array,
      k: Array,
      v: Array,
      sight: Sight,
      more,
      more_specs=P(),
  ) -> Array:
    """`run(q, k, v, sight, more)` on each device's own part."""
    if self.mesh is None:
      return run(q, k, v, sight, more)
    queries = P(self.batch, self.time, self.heads)
    keys = P(self.batch, None, self.kv_heads)
    segmented = sight.query_segments is not None
    sights = Sight(
        P(self.time),
        P(),
        P(self.batch, self.time) if segmented else None,
        P(self.batch) if segmented else None,
    )
    group = q.shape[2] // k.shape[2]

    def part(q, k, v, sight, more):
      if self.kv_heads != self.heads:  # whole, while query heads are cut
        k, v = (self._own_heads(x, q.shape[2], group) for x in (k, v))
      return run(q, k, v, sight, more)

    return jax.shard_map(
        part,
        mesh=self.mesh,
        in_specs=(queries, keys, keys, sights, more_specs),
        out_specs=queries,
        # Kernels do not say over which axes their results vary.
        check_vma=False,
    )(q, k, v, sight, more)

  def _own_heads(self, x: Array, count: int, group: int) -> Array:
    """Of all key/value heads those that this device's query heads look at."""
    first = jax.lax.axis_index(self.heads) * count
    if group % count == 0:
      return jax.lax.dynamic_slice_in_dim(x, first // group, 1, 2)
    return jnp.take(x, (first + jnp.arange(count)) // group, axis=2)


def attend_grouped(
    q: Array, k: Array, v: Array, mask: Array, cap: float = 0.0
) -> Array:
  """softmax(q kᵀ) v with the heads as batch axes; shapes as in `attend`."""
  b, t, n, h = q.shape
  q = q.reshape(b, t, k.shape[2], -1, h)
  scores = jnp.einsum(
      'btkrh,bckh->bkrtc', q, k, preferred_element_type=jnp.float32
  )
  scores = capped(scores, cap)
  weights = jax.nn.softmax(jnp.where(mask[:, None, None], scores, MASKED))
  mixed = jnp.einsum(
      'bkrtc,bckh->btkrh',
      weights.astype(v.dtype),
      v,
      preferred_element_type=jnp.float32,
  )
  return mixed.reshape(b, t, n, h)


def attend_by_head(
    q: Array, k: Array, v: Array, mask: Array, cap: float = 0.0
) -> Array:
  """The same one head after another, normalised after the last product."""
  group = q.shape[2] // k.shape[2]
  # Not indexed: the gradient would be padded to all heads once for each.
  queries, keys, values = (
      jax.lax.split(x, (1,) * x.shape[2], axis=2) for x in (q, k, v)
  )
  heads = []
  for head, own in enumerate(queries):
    scores = jnp.einsum(
        'bth,bch->btc',
        own[:, :, 0],
        keys[head // group][:, :, 0],
        preferred_element_type=jnp.float32,
    )
    scores = jnp.where(mask, capped(scores, cap), MASKED)
    # A constant shift: the result does not depend on it.
    best = jax.lax.stop_gradient(scores.max(-1, keepdims=True))
    weights = jnp.exp(scores - best)
    mixed = jnp.einsum(
        'btc,bch->bth',
        weights.astype(v.dtype),
        values[head // group][:, :, 0],
        preferred_element_type=jnp.float32,
    )
    heads.append(mixed / weights.sum(-1, keepdims=True))
  return jnp.stack(heads, 2)


def attend_behind(
    q: Array,
    k: Array,
    v: Array,
    mask: Array,
    keys: Array,
    values: Array,
    layer: Array | int,
    page_table: Array,
    lengths: Array,
    *,
    window: Window | Array | int | None = None,
    cap: float = 0.0,
) -> Array:
  """Attention of rows to themselves and to what is cached before them.

  The cache is read in blocks up to the longest row's length, so that one
  program serves any length at the cost of that length. The softmax over both
  parts is put together block by block: with m the largest score so far, sums of
  exp(score - m) and exp(score - m) v are kept and rescaled as m grows
  (https://arxiv.org/abs/1805.02867).

  Args:
    q: [B, T, N, H] scaled queries.
    k: [B, T, K, H] keys of the rows' own tokens.
    v: [B, T, K, H] values.
    mask: [B or 1, T, T] True where a query may look in its own row.
    keys: the cache, as in `attend_paged`.
    values: the cache.
    layer: which L.
    page_table: [B, P] pages that hold a row's first P · page positions.
    lengths: [B] positions cached; the row's own begin behind them.
    window: positions that a query sees, its own included; None for all.
    cap: of the scores.

  Returns:
    [B, T, N, H] float32.
  """
  b, t, n, h = q.shape
  page, kv_heads = keys.shape[2], k.shape[2]
  q = q.reshape(b, t, kv_heads, -1, h)

  def part(k, v, mask):
    """Largest score [B, K, R, T, 1], sum of exp and mixture [B, K, R, T, H]."""
    scores = jnp.einsum(
        'btkrh,bckh->bkrtc', q, k, preferred_element_type=jnp.float32
    )
    scores = jnp.where(mask[:, None, None], capped(scores, cap), MASKED)
    best = scores.max(-1, keepdims=True)
    weights = jnp.exp(scores - best)
    mixed = jnp.einsum(
        'bkrtc,bckh->bkrth',
        weights.astype(v.dtype),
        v,
        preferred_element_type=jnp.float32,
    )
    return best, weights.sum(-1, keepdims=True), mixed

  columns = max(1, _BLOCK // page)
  block = columns * page
  spare = -page_table.shape[1] % columns
  page_table = jnp.pad(page_table, ((0, 0), (0, spare)))
  positions = lengths[:, None] + jnp.arange(t)

  def add(i, carry):
    at = jax.lax.dynamic_slice_in_dim(page_table, i * columns, columns, 1)
    places = i * block + jnp.arange(block)
    seen = (places < lengths[:, None])[:, None]
    if window is not None:
      seen &= places > positions[:, :, None] - window_tokens(window)
    seen = jnp.broadcast_to(seen, (b, t, block))
    new = part(
        keys[layer, at].reshape(b, block, kv_heads, h),
        values[layer, at].reshape(b, block, kv_heads, h),
        seen,
    )
    return _together(carry, new)

  first = 0
  if isinstance(window, int):
    # Rows that nothing is cached of do not hold the others back.
    begin = jnp.where(lengths > 0, lengths - window + 1, lengths.max())
    first = jnp.maximum(begin.min(), 0) // block
  blocks = (lengths.max() + block - 1) // block
  _, total, mixed = jax.lax.fori_loop(first, blocks, add, part(k, v, mask))
  mixed = jnp.moveaxis(mixed / total, 3, 1)  # [B, T, K, R, H]
  return mixed.reshape(b, t, n, h)


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
  """One query a slot over the slot's own pages, up to its position.

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
      size = window_tokens(_again(window, slides)) if moving else window
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
    return _with_known_window(run, window)
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
      return _together(carry, part(at, first + i * block))

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


def _together(one, other):
  """Of (largest score, sum of exp, mixture) of two parts, those of both."""
  best = jnp.maximum(one[0], other[0])
  scales = jnp.exp(one[0] - best), jnp.exp(other[0] - best)
  return best, *(
      x * scales[0] + y * scales[1] for x, y in zip(one[1:], other[1:])
  )


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


# The cache.


def as_cached(x: Array, cache: Array) -> Array:
  """Keys or values [..., K, H] with the last axes of the cache."""
  return x.reshape(*x.shape[:-2], *cache.shape[3:])


def capped(x: Array, cap: float) -> Array:
  """cap · tanh(x / cap), within (-cap, cap); x itself for a cap of 0."""
  return cap * jnp.tanh(x / cap) if cap else x
