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
import math
from typing import Any, Callable, Mapping, Sequence

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
  UNFINISHED = 'unfinished'  # the same, and a member was given up
  UNINFORMATIVE = 'uninformative'  # all scores are equal: nothing to compare


class RewardStatus(str, enum.Enum):
  """Outcome of scoring. Only `OK` carries a score."""

  OK = 'ok'
  ERROR = 'error'
  TIMEOUT = 'timeout'
  UNPARSEABLE = 'unparseable'


@dataclasses.dataclass(frozen=True)
class Message:
  """A turn of a chat prompt."""

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
  """A problem taken from the data; the ledger counts it once.

  `draw_index` is monotonic over the whole lineage of a run (restarts
  included). `attempt` counts retries and is in no random key, so that a retry
  continues the same random stream.
  """

  draw_index: int
  epoch: int
  problem: Problem
  purpose: Purpose = Purpose.TRAIN
  attempt: int = 0


def _finite(value: float) -> bool:
  return -math.inf < value < math.inf


# What one setting of `SamplingParams` must be, alone: a test, and in words.
SAMPLING_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    'max_new_tokens': (lambda n: n >= 1, 'at least 1'),
    'temperature': (
        lambda t: 0 <= t < math.inf, 'at least 0 and finite',
    ),
    'top_k': (lambda k: k >= 0, 'at least 0'),
    'top_p': (lambda p: 0 < p <= 1, 'in (0, 1]'),
    'min_p': (lambda p: 0 <= p <= 1, 'in [0, 1]'),
    'repetition_penalty': (
        lambda r: 0 < r < math.inf, 'more than 0 and finite',
    ),
    'frequency_penalty': (_finite, 'a finite number'),
    'presence_penalty': (_finite, 'a finite number'),
    'logit_bias': (
        lambda pairs: len({i for i, _ in pairs}) == len(pairs)
        and all(i >= 0 and _finite(bias) for i, bias in pairs),
        'pairs of a different token id each and a finite number',
    ),
    'min_new_tokens': (lambda n: n >= 0, 'at least 0'),
    'stop_strings': (
        # U+FFFD stands for half a character, which the next token ends.
        lambda strings: all(s and '\ufffd' not in s for s in strings),
        'texts of at least one character, without U+FFFD',
    ),
    'top_logps': (lambda n: n >= 0, 'at least 0'),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SamplingParams:
  """Sampling parameters of one request, and what is reported about tokens.

  What each setting does to the logits, and in which order, is told in
  `rollout.sampling`. A completion ends with the first of `stop_ids` (which is
  kept as its last token), with the token that completes one of `stop_strings`,
  or after `max_new_tokens`. Stop ids are impossible before `min_new_tokens`; a
  stop string that is complete before does not end the answer.

  Several samples of one prompt are several requests, told apart by
  `Request.sample`.

  Attributes:
    max_new_tokens: longest answer.
    temperature: divides the logits; 0 takes the largest.
    top_k: draws from so many of the likeliest tokens; 0 is off.
    top_p: draws from the fewest tokens that have this mass; 1 is off.
    min_p: draws from tokens with this share of the likeliest one's
      probability; 0 is off.
    repetition_penalty: weakens tokens of prompt and answer; 1 is off.
    frequency_penalty: nats for each time that the answer holds the token.
    presence_penalty: nats for a token that the answer holds.
    logit_bias: (id, nats) that are added to logits.
    min_new_tokens: no stop before.
    stop_ids: tokens that end the answer.
    stop_strings: texts that end it.
    seed: of the random stream.
    raw_logps: whether the answer's log-probs at temperature 1, without any of
      the above, are wanted too.
    top_logps: so many of the likeliest tokens are wanted, at each position.
    prompt_logps: whether log-probs of the prompt's tokens are wanted.
  """

  max_new_tokens: int
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  frequency_penalty: float = 0.0
  presence_penalty: float = 0.0
  logit_bias: tuple[tuple[int, float], ...] = ()
  min_new_tokens: int = 0
  stop_ids: tuple[int, ...] = ()
  stop_strings: tuple[str, ...] = ()
  seed: int = 0
  raw_logps: bool = False
  top_logps: int = 0
  prompt_logps: bool = False

  def __post_init__(self):
    for name, (right, wanted) in SAMPLING_RULES.items():
      seen = getattr(self, name)
      if not right(seen):
        raise ValueError(f'sampling.{name} is {seen!r}, wanted {wanted}')
    if self.min_new_tokens > self.max_new_tokens:
      raise ValueError(
          f'sampling.min_new_tokens is {self.min_new_tokens}, wanted in'
          f' 0..max_new_tokens={self.max_new_tokens}'
      )

  @property
  def penalised(self) -> bool:
    """Returns whether earlier tokens change the distribution of later ones."""
    penalties = self.frequency_penalty or self.presence_penalty
    return self.repetition_penalty != 1 or bool(penalties)

  @property
  def untrainable(self) -> tuple[str, ...]:
    """Settings in use that training knows nothing of.

    It computes the log-probs of the sampled tokens anew, from logits and
    temperature alone. Under any of these settings the tokens came from another
    distribution, and the ratios in the loss would be wrong.
    """
    used = {
        'top_k': self.top_k > 0,
        'top_p': self.top_p < 1,
        'min_p': self.min_p > 0,
        'repetition_penalty': self.repetition_penalty != 1,
        'frequency_penalty': self.frequency_penalty != 0,
        'presence_penalty': self.presence_penalty != 0,
        'logit_bias': bool(self.logit_bias),
        'min_new_tokens': self.min_new_tokens > 0 and bool(self.stop_ids),
    }
    return tuple(name for name, is_used in used.items() if is_used)


@dataclasses.dataclass(frozen=True)
class Request:
  """A request for one completion.

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
  """The answer of an engine: T sampled tokens with their true labels.

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
  # What only requests that ask for it get. Log-probs in nats; raw ones are of
  # softmax(logits): temperature 1, nothing penalised, biased or impossible.
  raw_logps: np.ndarray | None = None  # [T] float32
  # The n likeliest tokens of each distribution sampled from, best first; -inf
  # for a token that was impossible.
  top_ids: np.ndarray | None = None  # [T, n] int32
  top_logps: np.ndarray | None = None  # [T, n] float32
  # [P] float32, raw, of the prompt's tokens; NaN for the first one, which
  # nothing predicts. All are of one version, that of `prompt_version`.
  prompt_logps: np.ndarray | None = None
  prompt_version: int | None = None
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
  """A scored answer of one or several turns, flat over T tokens.

  Example, prompt `[5, 6]` answered with `[9, 2]` by version 3:
  ids `[5, 6, 9, 2]`, loss_mask `[0, 0, 1, 1]`, logps `[0, 0, -0.7, -0.1]`,
  versions `[-1, -1, 3, 3]`.
  """

  draw_index: int
  sample: int
  segments: tuple[Segment, ...]
  ids: np.ndarray  # [T] int32
  loss_mask: np.ndarray  # [T] float32, 1 on tokens that are trained
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
  def sampled(self) -> np.ndarray:
    """[T] bool, the tokens that the policy sampled.

    The loss mask may leave some of them out (stale or truncated ones), and then
    says nothing about lengths, rewards or what the policy wrote.
    """
    return self.versions >= 0

  @property
  def head_version(self) -> int:
    """Version of the oldest sampled token."""
    sampled = self.versions[self.sampled]
    return int(sampled.min()) if sampled.size else self.admitted_version

  @property
  def stop_reason(self) -> StopReason | None:
    """Returns the stop reason of the last sampled segment."""
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
