"""What a check says: one line, and advice where it failed."""

from __future__ import annotations

import dataclasses
from typing import Literal


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The outcome of one check.

  Attributes:
    name: of the check.
    status: 'ok'; 'look', which works and is hardly meant; 'fail'; 'skip', not
      checked, for the reason that is said.
    said: what was seen, with its numbers.
    advice: what to change; for 'fail' and 'look'.
  """

  name: str
  status: Literal['ok', 'look', 'fail', 'skip']
  said: str
  advice: str = ''

  def __str__(self) -> str:
    line = f'{self.status:<4}  {self.name}: {self.said}'
    return f'{line}\n      advice: {self.advice}' if self.advice else line


def judge(name: str, right: bool, said: str, advice: str) -> Verdict:
  """'ok', or 'fail' with the advice."""
  return (
      Verdict(name, 'ok', said)
      if right
      else Verdict(name, 'fail', said, advice)
  )
