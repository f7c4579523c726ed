"""How many decode steps a dispatch takes.

A long dispatch costs the host less; a short one lets a waiting request into a
slot soon after it has become free. What is chosen promises most tokens a
second, by what dispatches have cost so far and by when slots will be free:
those without stop ids at their limit, others likely before.
"""

from __future__ import annotations

import numpy as np

# Weight that what was seen loses with each dispatch: about a hundred count.
_DECAY = 0.99


class Pace:
  """Learns what dispatches cost and how long answers are.

  A dispatch of k steps is taken to cost a + b k seconds: a line by least
  squares through what was seen.

  Args:
    most: steps of a dispatch at most.
  """

  def __init__(self, most: int):
    self.most = most
    self._sums = np.zeros(5)  # of 1, k, k², seconds, k · seconds
    self._answers = np.zeros(2)  # number, tokens

  def took(self, steps: int, seconds: float) -> None:
    """A dispatch, with the admissions before it and all that the host did."""
    new = [1, steps, steps**2, seconds, steps * seconds]
    self._sums = _DECAY * self._sums + new

  def ended(self, tokens: int) -> None:
    """An answer that was not cut off by its limit."""
    self._answers = _DECAY * self._answers + [1, tokens]

  def steps(self, left: np.ndarray, may_stop: np.ndarray) -> int:
    """Steps of the next dispatch, where requests wait for slots.

    With r steps left a slot draws min(k, r) tokens in k steps; one that may
    stop before, with probability 1/m at each for answers of mean length m,
    draws (1 - (1 - 1/m)^min(k, r)) m. The sum over slots is divided by the
    seconds.

    Args:
      left: [A] tokens to the limit of each active slot.
      may_stop: [A] bool, whether it may stop before.
    """
    ks = np.arange(1, self.most + 1)
    seconds = self._seconds(ks)
    if seconds is None:
      return self.most
    drawn = np.minimum(ks, left[:, None]).astype(float)  # [A, k]
    count, tokens = self._answers
    if count and tokens > count:
      mean = tokens / count
      likely = (1 - (1 - 1 / mean) ** drawn) * mean
      drawn = np.where(may_stop[:, None], likely, drawn)
    rate = drawn.sum(0) / seconds
    return int(ks[rate >= rate.max() * (1 - 1e-9)].max())

  def _seconds(self, ks: np.ndarray) -> np.ndarray | None:
    """Returns the cost of a dispatch of `steps`; None if none was seen."""
    n, k, square, seconds, product = self._sums
    if not n:
      return None
    spread = square * n - k**2
    each = seconds / k
    if spread > 1e-3 * k**2:
      each = min(max((product * n - k * seconds) / spread, 0.5 * each), each)
    once = max(seconds - each * k, 0.0) / n
    return once + each * ks
