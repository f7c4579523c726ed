"""The shapes of one decode engine, and the checks of them.

What lives here: `EngineSettings`. Every number of it is static: programs are
compiled for it. What follows from the numbers (how many pages, which padded
lengths, how many rows a program has) is a property or a method beside them, so
that the engine, its loop and its cache reckon alike.
"""

from __future__ import annotations

import dataclasses
import math

from areal_jax.config import require
from areal_jax.rollout.sampling import SamplingFeatures

_SMALLEST_PREFILL = 16
# Decode programs for fewer live tokens would not be faster, and be compiled.
_SMALLEST_LIVE = 64
# A decode step of fewer slots does not take less time.
_FEWEST_ROWS = 8
# Tokens of history that one `occupy` program takes to the devices.
_MOST_OCCUPIED = 2**18


@dataclasses.dataclass
class EngineSettings:
  """Shapes of one engine; every one of them is static.

  Attributes:
    slots: S, requests decoded side by side.
    max_length: longest prompt plus answer, in tokens.
    max_prompt_length: longest prompt, in tokens.
    page_size: tokens a cache page.
    pages: of the cache; 0 for so many that all slots can be of `max_length`.
      With fewer, memory follows the tokens that are live, and the youngest
      request gives way, to be continued later, when pages run out.
    steps: k, most decode steps a dispatch.
    halvings: times that the slots of a decode step may be halved where few of
      them are active, as when the last answers of a batch are awaited; each is
      one program more for each width of the page tables, compiled when it would
      have been of use some times.
    chunk: most tokens that one prefill program computes, rows and all, on each
      data shard; longer prompts come in pieces, with decode steps in between.
    prefill_rows: most sequences that one prefill program computes pieces of, on
      each data shard.
    max_stop_ids: room for stop ids in each slot.
    sampling: what requests may ask of the sampler that costs something.
  """

  slots: int = 64
  max_length: int = 128
  max_prompt_length: int = 64
  page_size: int = 16
  pages: int = 0
  steps: int = 8
  halvings: int = 2
  chunk: int = 1024
  prefill_rows: int = 16
  max_stop_ids: int = 4
  sampling: SamplingFeatures = dataclasses.field(
      default_factory=SamplingFeatures
  )

  def validate(self, at: str) -> None:
    for name in ('slots', 'max_length', 'max_prompt_length', 'page_size',
                 'steps', 'chunk', 'prefill_rows',
                 'max_stop_ids'):  # fmt: skip
      value = getattr(self, name)
      require(value >= 1, f'{at}.{name}', value, 'at least 1')
    require(self.halvings >= 0, f'{at}.halvings', self.halvings, 'at least 0')
    require(
        self.max_prompt_length < self.max_length,
        f'{at}.max_prompt_length',
        self.max_prompt_length,
        f'less than max_length={self.max_length}',
    )
    for name in ('page_size', 'chunk'):
      value = getattr(self, name)
      power = value & (value - 1) == 0
      require(power, f'{at}.{name}', value, 'a power of two')
    least = max(_SMALLEST_PREFILL, self.page_size)
    require(
        self.chunk >= least,
        f'{at}.chunk',
        self.chunk,
        f'at least {least}, with page_size={self.page_size}',
    )
    # A sequence of any length, and the page that its last one is copied from.
    least = self.pages_per_slot + 1
    require(
        self.pages == 0 or self.pages >= least,
        f'{at}.pages',
        self.pages,
        f'0 or at least {least}: one more than max_length takes',
    )

  def check_shards(self, shards: int, at: str) -> None:
    """Refuses what cannot be cut into so many data shards.

    Raises:
      ConfigError: slots or pages that do not divide, or too few of them.
    """
    for name in ('slots', 'pages'):
      value = getattr(self, name)
      wanted = f'a multiple of the {shards} data shards of a replica'
      require(value % shards == 0, f'{at}.{name}', value, wanted)
    least = shards * (self.pages_per_slot + 1)
    require(
        self.pages == 0 or self.pages >= least,
        f'{at}.pages',
        self.pages,
        f'0 or at least {least}: on each of {shards} data shards one more than'
        ' max_length takes',
    )

  def of_shard(self, shards: int) -> EngineSettings:
    """The shapes of one of so many data shards."""
    return dataclasses.replace(
        self, slots=self.slots // shards, pages=self.pages // shards
    )

  @property
  def pages_per_slot(self) -> int:
    return math.ceil(self.max_length / self.page_size)

  @property
  def total_pages(self) -> int:
    """Pages of the cache. What slots copy from needs some beside theirs."""
    return self.pages or (self.slots + 1) * self.pages_per_slot

  @property
  def prefill_buckets(self) -> tuple[int, ...]:
    """Padded prompt lengths: powers of two, the last one holds any prompt."""
    return self._buckets(self.max_prompt_length)

  @property
  def piece_buckets(self) -> tuple[int, ...]:
    """Padded lengths of the pieces that sequences are cached in."""
    return self._buckets(min(self.chunk, self.max_length))

  @property
  def longest_piece(self) -> int:
    return self.piece_buckets[-1]

  @property
  def live_buckets(self) -> tuple[int, ...]:
    """Columns of page tables that decode programs exist for.

    Each at most half of the next: tables a little narrower are not worth what
    a program takes to compile.
    """
    columns = max(1, _SMALLEST_LIVE // self.page_size)
    buckets = []
    while 2 * columns <= self.pages_per_slot:
      buckets.append(columns)
      columns *= 2
    return (*buckets, self.pages_per_slot)

  @property
  def decode_rows(self) -> tuple[int, ...]:
    """Slots of a decode step that programs exist for, all of them first."""
    rows = [self.slots]
    while len(rows) <= self.halvings and rows[-1] > _FEWEST_ROWS:
      rows.append(-(-rows[-1] // 2))
    return tuple(rows)

  @property
  def occupy_rows(self) -> int:
    """Slots that one `occupy` program fills."""
    capacity = self.pages_per_slot * self.page_size
    return min(self.slots, max(1, _MOST_OCCUPIED // capacity))

  def piece_bucket(self, length: int) -> int:
    """The smallest bucket that holds a piece."""
    return next(b for b in self.piece_buckets if b >= length)

  def piece_rows(self, bucket: int) -> int:
    """Rows of the program that computes pieces of this bucket together."""
    return max(1, min(self.prefill_rows, self.chunk // bucket))

  def rows_for(self, count: int, bucket: int) -> int:
    """Rows of the program to take for so many pieces: 1 or `piece_rows`.

    Rows that nobody needs are computed too, so a few prompts come one by one.
    """
    most = self.piece_rows(bucket)
    alone = bucket <= self.prefill_buckets[-1] and 4 * count <= most
    return 1 if alone else most

  def live_columns(self, tokens: int) -> int:
    """The fewest columns that hold a sequence of so many tokens."""
    needed = -(-tokens // self.page_size)
    return next(c for c in self.live_buckets if c >= needed)

  def _buckets(self, longest: int) -> tuple[int, ...]:
    capacity = self.pages_per_slot * self.page_size
    bucket = max(_SMALLEST_PREFILL, self.page_size)
    buckets = []
    while bucket < longest:
      buckets.append(min(bucket, capacity))
      bucket *= 2
    return tuple(sorted({*buckets, min(bucket, capacity)}))
