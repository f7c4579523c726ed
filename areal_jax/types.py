"""What travels between the rooms of the house.

One noun for each thing on the walk of a prompt: `Problem` -> `Draw` ->
`Request` -> `Completion` -> `Trajectory` -> `Group` -> `Microbatch`. Records
are frozen, hold numpy arrays at most, and carry what a reader would otherwise
have to guess from shapes: stop reason, group, lengths and versions.

Everything per token has the length of `ids` and is *unshifted*: `logps[t]` is
the log-probability of `ids[t]` given `ids[:t]`. The shift that next-token
prediction needs happens in `losses.logprobs.token_logps` alone.
"""

from __future__ import annotations

import dataclasses
import enum
from typing import Any, Mapping, Sequence

import numpy as np


class Purpose(enum.IntEnum):
  """Why a problem was drawn; a part of every random key."""

  TRAIN = 0
  EVAL = 1


class StopReason(str, enum.Enum):
  """Why a completion ended. Never inferred from its length."""

  STOP = 'stop'  # a stop id was sampled
  STOP_STRING = 'stop_string'  # the text holds a stop string
  LENGTH = 'length'  # the limit of new tokens was reached
  ABORTED = 'aborted'  # the caller gave it up
  ERROR = 'error'  # the engine failed


class DropReason(str, enum.Enum):
  """Why a drawn problem left the run untrained."""

  STALE = 'stale'  # its oldest token is older than the bound
  FAILED = 'failed'  # no member of the group has a score
  UNINFORMATIVE = 'uninformative'  # all scores are equal: nothing to compare


class RewardStatus(str, enum.Enum):
  """Outcome of scoring. Only `OK` carries a score."""

  OK = 'ok'
  ERROR = 'error'
  TIMEOUT = 'timeout'
  UNPARSEABLE = 'unparseable'


@dataclasses.dataclass(frozen=True)
class Message:
  """One turn of a chat prompt."""

  role: str
  content: str


@dataclasses.dataclass(frozen=True)
class Problem:
  """A question with what is needed to score an answer to it.

  Example: `Problem('train/7', 'totals', '3+5+7=', '8;15.')`.
  """

  id: str
  source: str
  prompt: str | tuple[Message, ...]
  answer: str
  meta: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Draw:
  """One taking of a problem from the data; counted once by the ledger.

  `draw_index` is monotonic over the whole lineage of a run (restarts
  included). `attempt` counts retries and is in no random key, so that a retry
  continues the same random stream.
  """

  draw_index: int
  epoch: int
  problem: Problem
  purpose: Purpose = Purpose.TRAIN
  attempt: int = 0


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """How the tokens of one request are chosen.

  `temperature` 0 is greedy. `top_k` 0 and `top_p` 1 are off. A completion ends
  with the first of `stop_ids` (which is kept as its last token), with the token
  that completes one of `stop_strings`, or after `max_new_tokens`. Stop ids are
  impossible before `min_new_tokens`; a stop string that is complete before does
  not end the answer.
  """

  max_new_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_new_tokens: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  seed: int = 0

  def __post_init__(self):
    checks = (
        ('max_new_tokens', self.max_new_tokens >= 1, 'at least 1'),
        ('temperature', self.temperature >= 0, 'at least 0'),
        ('top_k', self.top_k >= 0, 'at least 0'),
        ('top_p', 0 < self.top_p <= 1, 'in (0, 1]'),
        (
            'min_new_tokens',
            0 <= self.min_new_tokens <= self.max_new_tokens,
            f'in 0..max_new_tokens={self.max_new_tokens}',
        ),
        (
            'stop_strings',
            # U+FFFD stands for half a character, which the next token ends.
            all(s and '\ufffd' not in s for s in self.stop_strings),
            'texts of at least one character, without U+FFFD',
        ),
    )
    for name, right, wanted in checks:
      if not right:
        seen = getattr(self, name)
        raise ValueError(f'sampling.{name} is {seen!r}, wanted {wanted}')


@dataclasses.dataclass(frozen=True)
class Request:
  """One completion asked of an engine.

  (`sampling.seed`, `purpose`, `draw_index`, `sample`, `turn`, `branch`) name
  its random stream; the position of a token completes the key.
  """

  request_id: str
  prompt_ids: tuple[int, ...]
  sampling: SamplingParams
  draw_index: int = 0
  sample: int = 0
  turn: int = 0
  branch: int = 0
  purpose: Purpose = Purpose.TRAIN


@dataclasses.dataclass(frozen=True)
class Completion:
  """What an engine answers: T sampled tokens with their true labels.

  An answer that a stop string has ended keeps the tokens of the stop string,
  which were sampled like all others; its text goes up to `text_end`.
  """

  request_id: str
  ids: np.ndarray  # [T] int32
  logps: np.ndarray  # [T] float32, nats, of the distribution sampled from
  versions: np.ndarray  # [T] int32, version of the weights that sampled it
  stop_reason: StopReason
  stop_id: int | None = None
  stop_string: str | None = None
  text_end: int | None = None  # characters before the stop string
  weight_source: str = ''  # which replica answered
  raw_logps: np.ndarray | None = None  # [T] float32 at temperature 1, unmasked
  # [P + T, L, k] int16, experts that each token of prompt and answer went to,
  # -1 where nothing was recorded (the last token is never fed to the policy).
  routing: np.ndarray | None = None


@dataclasses.dataclass(frozen=True)
class RewardResult:
  """The four-way result of scoring one answer.

  A score exists exactly if the status is `OK`; a score of 0.0 is a score.

  Raises:
    ValueError: a score without `OK`, `OK` without one, or one not finite.
  """

  status: RewardStatus
  score: float | None = None
  parts: Mapping[str, float] = dataclasses.field(default_factory=dict)
  detail: str = ''
  seconds: float = 0.0

  def __post_init__(self):
    ok = self.status is RewardStatus.OK
    if ok != (self.score is not None):
      raise ValueError(
          f'reward status {self.status.value!r} with score {self.score!r}:'
          ' a score goes with status ok and with no other'
      )
    if ok and not np.isfinite(self.score):
      raise ValueError(f'reward score is {self.score}, wanted a finite number')


@dataclasses.dataclass(frozen=True)
class Segment:
  """A run of tokens of one origin inside a trajectory."""

  kind: str  # 'prompt', 'sampled' or 'tool'
  start: int
  length: int
  stop_reason: StopReason | None = None  # of sampled segments
  text_end: int | None = None  # characters of its text before a stop string


@dataclasses.dataclass(frozen=True)
class Trajectory:
  """One scored answer (of one or several turns), flat over T tokens.

  Example, prompt `[5, 6]` answered with `[9, 2]` by version 3:
  ids `[5, 6, 9, 2]`, loss_mask `[0, 0, 1, 1]`, logps `[0, 0, -0.7, -0.1]`,
  versions `[-1, -1, 3, 3]`.
  """

  draw_index: int
  sample: int
  segments: tuple[Segment, ...]
  ids: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] float32, 1 on sampled tokens
  logps: np.ndarray  # [T] float32 nats, 0 where nothing was sampled
  versions: np.ndarray  # [T] int32, -1 where nothing was sampled
  turn_ids: np.ndarray  # [T] int32
  reward: RewardResult
  temperature: float
  admitted_version: int
  parent: int | None = None  # sample that this one branched from
  token_rewards: np.ndarray | None = None  # [T] float32
  routing: np.ndarray | None = None  # [T, L, k] int16 experts, -1 unknown
  timestamps: Mapping[str, float] = dataclasses.field(default_factory=dict)

  @property
  def head_version(self) -> int:
    """Version of the oldest sampled token."""
    sampled = self.versions[self.loss_mask > 0]
    return int(sampled.min()) if sampled.size else self.admitted_version

  @property
  def stop_reason(self) -> StopReason | None:
    """How the last sampled segment ended."""
    reasons = [s.stop_reason for s in self.segments if s.kind == 'sampled']
    return reasons[-1] if reasons else None


@dataclasses.dataclass(frozen=True)
class Group:
  """The trajectories of one draw; members that failed are named."""

  draw: Draw
  size: int  # members asked for
  trajectories: tuple[Trajectory, ...]
  failed: tuple[tuple[int, str], ...]  # (sample, reason)
  admitted_version: int

  @property
  def draw_index(self) -> int:
    return self.draw.draw_index

  @property
  def head_version(self) -> int:
    """Version of the oldest sampled token of any member."""
    heads = [t.head_version for t in self.trajectories]
    return min(heads, default=self.admitted_version)


@dataclasses.dataclass(frozen=True)
class Microbatch:
  """Rows of static shape into which trajectories were packed.

  B rows of T tokens. A row holds several trajectories one behind another;
  `segment_ids` tells them apart (1, 2, ... and 0 for padding).
  """

  ids: np.ndarray  # [B, T] int32
  positions: np.ndarray  # [B, T] int32, from 0 in each trajectory
  segment_ids: np.ndarray  # [B, T] int32
  loss_mask: np.ndarray  # [B, T] float32
  behavior_logps: np.ndarray  # [B, T] float32 nats
  advantages: np.ndarray  # [B, T] float32 units of reward
  versions: np.ndarray  # [B, T] int32
  temperatures: np.ndarray  # [B, T] float32
  # [B, T, L, k] int16, experts to replay, -1 where the router chooses.
  routing: np.ndarray | None = None

  def arrays(self) -> dict[str, np.ndarray]:
    """The fields that it has, the form in which jitted steps take them."""
    fields = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
    return {name: value for name, value in fields.items() if value is not None}


def segments_of(
    prompt_length: int, completion: Completion
) -> Sequence[Segment]:
  """Segments of a single-turn trajectory."""
  return (
      Segment('prompt', 0, prompt_length),
      Segment(
          'sampled',
          prompt_length,
          len(completion.ids),
          completion.stop_reason,
          completion.text_end,
      ),
  )
