"""How much of a text is words: the control for a reward met by gibberish.

It is a measure to report beside a reward, not a reward itself.
"""

from __future__ import annotations

import collections
import re
from typing import Collection, Iterable

_WORD = re.compile(r"[a-z]+(?:'[a-z]+)*")


def words(text: str) -> list[str]:
  """Words in lower case; an apostrophe inside one belongs to it."""
  return _WORD.findall(text.lower())


def vocabulary_of(texts: Iterable[str], at_least: int = 2) -> frozenset[str]:
  """Words that the texts hold `at_least` times, all texts taken together.

  Twice, because a small model misspells: what it writes once in thousands of
  samples is as likely a slip as a word.
  """
  counts = collections.Counter(w for text in texts for w in words(text))
  return frozenset(w for w, count in counts.items() if count >= at_least)


def word_share(texts: Iterable[str], vocabulary: Collection[str]) -> float:
  """Share of the words of all texts that are in the vocabulary.

  Texts without any word have a share of 0.0.
  """
  found = [word in vocabulary for text in texts for word in words(text)]
  return sum(found) / len(found) if found else 0.0
