"""Attention of grouped query heads over packed rows.

Queries, keys and values come in with rotary embeddings applied and the queries
scaled; the mixture of values goes out. N query heads share K key/value heads in
groups of N / K. Scores, softmax and sums are float32 whatever the inputs are. A
query that may see nothing gets a finite mixture. With a cap, scores are
cap · tanh(score / cap), as in Gemma 2 (https://arxiv.org/abs/2408.00118); a cap
of 0 is none.

`attend` is the door, and `forms.py` chooses what runs behind it.
`attend_grouped` is the plain form for any backend and any mesh; the others are
compared with it. `blockwise.py` has the form for long rows, `kernels.py` those
for one kind of device, `paged_attention.py` attention over a cache. No mask
[B, T, C] exists except in the plain forms, which are for short rows.
"""

from __future__ import annotations

import dataclasses
from typing import Callable

import jax
import jax.numpy as jnp

from areal_jax.mesh.rules import Cut, Rules
from areal_jax.models import blockwise, forms
from areal_jax.models.visibility import (
    MASKED,
    Visibility,
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


# Cached tokens that `attend_behind` reads at a time.
_BLOCK = 128


def attend(
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
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
    visible: of these queries and keys.
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
  layout = _RowCut.of(q, k, mesh, rules)
  name = forms.of_rows(
      form,
      forms.Rows(
          platform=platform,
          queries=q.shape[1] // layout.time_parts,
          keys=k.shape[1],
          heads=q.shape[2] // layout.head_parts,
          head_size=q.shape[3],
          dtype=q.dtype.name,
          whole=visible.whole and layout.time_parts == 1,
          ordered=visible.whole,
          segments=visible.query_segments is not None,
          window=window is not None,
          cap=bool(cap),
          head_parts=layout.head_parts,
      ),
  )
  if name in forms.PLAIN and layout.time_parts == 1:
    # XLA cuts these as the arrays around them are cut.
    return _run_rows(name, q, k, v, visible, window, cap, platform)
  if name == 'splash':
    run = lambda window: _attend_by_splash(
        q, k, v, visible, window, cap, platform, layout
    )
  else:
    run = lambda window: layout.shard(
        lambda q, k, v, visible, slides: _run_rows(
            name,
            q,
            k,
            v,
            visible,
            with_slides(window, slides),
            cap,
            platform,
        ),
        *(q, k, v, visible),
        window.slides if isinstance(window, Window) else None,
    )
  if name in forms.KNOWN_WINDOW:
    return with_known_window(run, window)
  return run(window)


def _run_rows(
    name: str,
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
    window: Window | int | None,
    cap: float,
    platform: str,
) -> Array:
  """Runs one form of attention on a device's part, or on everything."""
  if name == 'grouped':
    return attend_grouped(q, k, v, visible.mask(window), cap)
  if name == 'by_head':
    return attend_by_head(q, k, v, visible.mask(window), cap)
  if name == 'blockwise':
    return blockwise.attend(
        q,
        k,
        v,
        visible.query_places,
        visible.key_places,
        visible.query_segments,
        visible.key_segments,
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
        q, k, v, visible.query_segments, interpret=interpret
    )
  return kernels.attend_by_cudnn(q, k, v, window)


def _attend_by_splash(
    q: Array,
    k: Array,
    v: Array,
    visible: Visibility,
    window: int | None,
    cap: float,
    platform: str,
    layout: _RowCut,
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
      lambda q, k, v, visible, kernel: kernels.attend_by_splash(
          kernel, q, k, v, visible.query_segments, visible.key_segments
      ),
      *(q, k, v, visible, kernel, specs),
  )


@dataclasses.dataclass(frozen=True)
class _RowCut:
  """The cut of rows [B, T, N, H] and keys [B, C, K, H] over a mesh.

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
  ) -> _RowCut:
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
      visible: Visibility,
      more,
      more_specs=P(),
  ) -> Array:
    """`run(q, k, v, visible, more)` on each device's own part."""
    if self.mesh is None:
      return run(q, k, v, visible, more)
    queries = P(self.batch, self.time, self.heads)
    keys = P(self.batch, None, self.kv_heads)
    segmented = visible.query_segments is not None
    sights = Visibility(
        P(self.time),
        P(),
        P(self.batch, self.time) if segmented else None,
        P(self.batch) if segmented else None,
    )
    group = q.shape[2] // k.shape[2]

    def part(q, k, v, visible, more):
      if self.kv_heads != self.heads:  # whole, while query heads are cut
        k, v = (self._own_heads(x, q.shape[2], group) for x in (k, v))
      return run(q, k, v, visible, more)

    return jax.shard_map(
        part,
        mesh=self.mesh,
        in_specs=(queries, keys, keys, sights, more_specs),
        out_specs=queries,
        # Kernels do not say over which axes their results vary.
        check_vma=False,
    )(q, k, v, visible, more)

  def _own_heads(self, x: Array, count: int, group: int) -> Array:
    """Selects the key/value heads of this device's query heads."""
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
    return merge_softmax(carry, new)

  first = 0
  if isinstance(window, int):
    # Rows that nothing is cached of do not hold the others back.
    begin = jnp.where(lengths > 0, lengths - window + 1, lengths.max())
    first = jnp.maximum(begin.min(), 0) // block
  blocks = (lengths.max() + block - 1) // block
  _, total, mixed = jax.lax.fori_loop(first, blocks, add, part(k, v, mask))
  mixed = jnp.moveaxis(mixed / total, 3, 1)  # [B, T, K, R, H]
  return mixed.reshape(b, t, n, h)
