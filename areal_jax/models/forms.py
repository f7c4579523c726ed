"""Which form of attention runs: one static choice, made in one place.

A form is a name. `of_rows` chooses that of training and prefill, `of_pages`
that of decode. Each looks at the forms of the platform in order of preference
and takes the first that can do what is asked; why another cannot is a text,
which is the error when settings ask for it by name. Nothing here touches a
device, so a choice can be asked for and tested anywhere.

Rows, for queries [B, T, N, H] and keys [B, C, K, H]:

* `by_head`: scores of one head after another, with a mask; short rows on a CPU.
* `grouped`: scores [B, K, N / K, T, C], with a mask; short rows anywhere.
* `blockwise`: blocks of queries and keys in plain XLA; memory grows with T.
* `splash`: the TPU kernel of jax; segments, windows, caps.
* `triton`: the GPU kernel of jax; segments, no windows, no caps.
* `cudnn`: cuDNN's; windows, no segments, no caps.

Pages, for queries [S, N, H]:

* `gathered`: the pages of a slot side by side, in plain XLA.
* `mosaic`: a TPU kernel of ours; windows, caps. It wants the heads of a token
  side by side, [L, pages, page, K · H], which is how the cache is then laid
  out.
* `triton`: a GPU kernel of ours; windows, caps.
"""

from __future__ import annotations

import dataclasses

from areal_jax.config import ConfigError

# Forms that hold scores and a mask of all queries and keys.
PLAIN = ('grouped', 'by_head')
ROWS = (*PLAIN, 'blockwise', 'splash', 'triton', 'cudnn')
PAGES = ('gathered', 'mosaic', 'triton')

# Forms whose programs are built for one window.
KNOWN_WINDOW = ('splash', 'cudnn')

# Queries times keys of one row from which on blocks are better than all scores
# at once. On two busy CPU cores, gradients at (rows, tokens, N, K, H) =
# (24, 128, 4, 4, 24), (16, 256, 4, 2, 64), (8, 512, 4, 2, 64) took 7, 66, 198
# ms head by head and 11, 28, 37 by blocks. Elsewhere it is memory that counts.
LONG = 1024 * 1024
LONG_ON_CPU = 256 * 256

# Above this many heads the unrolled loop costs more to compile than it saves.
_MOST_HEADS_UNROLLED = 16

_LANES = 128  # of a TPU's registers, and the smallest block of both kernels
_LONGEST_PAGE = 512  # two pages or more are in fast memory at once
_HALF = ('bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Rows:
  """Everything that the form of rows depends on; counts are of one device.

  Attributes:
    platform: 'cpu', 'gpu' or 'tpu'.
    queries: T.
    keys: C.
    heads: N.
    head_size: H.
    dtype: of queries, keys and values.
    whole: whether queries and keys are known to be the same whole rows.
    ordered: whether they are so before they are cut along T.
    segments: whether rows hold several sequences.
    window: whether there is one.
    cap: whether there is one.
    head_parts: devices that the heads are cut over.
  """

  platform: str
  queries: int
  keys: int
  heads: int
  head_size: int
  dtype: str = 'float32'
  whole: bool = True
  ordered: bool = True
  segments: bool = True
  window: bool = False
  cap: bool = False
  head_parts: int = 1


@dataclasses.dataclass(frozen=True)
class Pages:
  """Everything that the form of pages depends on.

  Attributes:
    platform: 'cpu', 'gpu' or 'tpu'.
    page: tokens a page.
    heads: N of the model.
    kv_heads: K of the model.
    head_size: H.
    dtype: of the cache.
    parts: devices that the heads are cut over.
    flat: whether a token's heads lie side by side in the cache, [..., K · H];
      None if that is still to be chosen.
  """

  platform: str
  page: int
  heads: int
  kv_heads: int
  head_size: int
  dtype: str = 'float32'
  parts: int = 1
  flat: bool | None = None


def of_rows(setting: str, rows: Rows) -> str:
  """The form that rows are attended in.

  Args:
    setting: a form to insist on, or 'auto'.
    rows: what is asked.

  Raises:
    ConfigError: a form that cannot do it, with the reason.
  """
  least = LONG_ON_CPU if rows.platform == 'cpu' else LONG
  long = rows.queries * rows.keys >= least
  plain = ['blockwise', 'grouped'] if long else ['grouped']
  if rows.platform == 'cpu' and not long and _few_whole_heads(rows):
    plain = ['by_head']
  preferred = {'tpu': ['splash'], 'gpu': ['cudnn', 'triton']}
  names = [*preferred.get(rows.platform, []), *plain]
  return _first(setting, names, ROWS, _ROWS_REFUSE, rows, 'rows')


def of_pages(setting: str, pages: Pages) -> str:
  """The form that a paged cache is read in; errors as in `of_rows`."""
  preferred = {'tpu': ['mosaic'], 'gpu': ['triton']}
  names = [*preferred.get(pages.platform, []), 'gathered']
  return _first(setting, names, PAGES, _PAGES_REFUSE, pages, 'pages')


def flattens(form: str) -> bool:
  """Returns whether a form of pages wants heads side by side; see `Pages`."""
  return form == 'mosaic'


def _first(setting, names, known, refusals, asked, field) -> str:
  if setting != 'auto':
    if setting not in known:
      raise ConfigError(
          f'attention.{field} is {setting!r}, wanted one of {known} or auto'
      )
    names = [setting]
  for name in names:
    reason = refusals[name](asked) if name in refusals else ''
    if not reason:
      return name
  raise ConfigError(
      f'attention.{field} is {setting!r}, which cannot serve'
      f' {asked}: it wants {reason}'
  )


def _few_whole_heads(rows: Rows) -> bool:
  return rows.head_parts == 1 and rows.heads <= _MOST_HEADS_UNROLLED


def _splash_wants(rows: Rows) -> str:
  """Returns what the kernel lacks for these rows; '' if nothing."""
  if rows.queries % _LANES or rows.keys % _LANES:
    return f'queries and keys in multiples of {_LANES}'
  if rows.head_size % (_LANES // 2) and rows.platform != 'cpu':
    return f'heads of a multiple of {_LANES // 2}'
  return '' if rows.ordered else 'places known in advance'


def _triton_wants(rows: Rows) -> str:
  if not rows.whole:
    return 'queries and keys of the same whole rows'
  if rows.queries % _LANES:
    return f'queries and keys in multiples of {_LANES}'
  if rows.window or rows.cap:
    return 'no window and no cap'
  if rows.head_size not in (16, 32, 64, 128) and rows.platform != 'cpu':
    return 'heads of 16, 32, 64 or 128'
  return '' if _half(rows) else f'one of {_HALF}'


def _cudnn_wants(rows: Rows) -> str:
  if rows.segments:
    return 'one sequence a row'
  if not rows.whole:
    return 'queries and keys of the same whole rows'
  if rows.cap:
    return 'no cap'
  if rows.platform == 'cpu':
    return 'a GPU, for it cannot be interpreted'
  if rows.head_size % 8 or rows.head_size > 128:
    return 'heads of a multiple of 8, at most 128'
  return '' if _half(rows) else f'one of {_HALF}'


def _half(rows: Rows) -> bool:
  # An interpreted kernel takes what it gets.
  return rows.platform == 'cpu' or rows.dtype in _HALF


_ROWS_REFUSE = dict(
    splash=_splash_wants, triton=_triton_wants, cudnn=_cudnn_wants
)


def _mosaic_wants(pages: Pages) -> str:
  """Whole registers of a page are taken as they lie."""
  if reason := _whole_heads(pages):
    return reason
  if pages.flat is False:
    return 'a cache with the heads of a token side by side'
  rows = 8 if pages.dtype == 'float32' else 16
  rows = 1 if pages.platform == 'cpu' else rows  # interpreted
  if pages.page % rows or pages.page > _LONGEST_PAGE:
    return f'pages of a multiple of {rows} tokens, at most {_LONGEST_PAGE}'
  if pages.kv_heads // pages.parts * pages.head_size % _LANES:
    return f'key/value heads of {_LANES} numbers together on a device'
  return ''


def _paged_triton_wants(pages: Pages) -> str:
  if reason := _whole_heads(pages):
    return reason
  if pages.page & (pages.page - 1) or pages.page > _LONGEST_PAGE:
    return f'pages of a power of two tokens, at most {_LONGEST_PAGE}'
  if pages.head_size not in (16, 32, 64, 128) and pages.platform != 'cpu':
    return 'heads of 16, 32, 64 or 128'
  return ''


def _whole_heads(pages: Pages) -> str:
  if pages.kv_heads % pages.parts:
    return f'key/value heads that divide over {pages.parts} devices'
  return ''


_PAGES_REFUSE = dict(mosaic=_mosaic_wants, triton=_paged_triton_wants)
