"""How long a test waits before it calls something hung.

No test says how fast anything is: a machine may be slow and have other work. A
test waits for a condition, and these limits only end a wait that would never
end. They are long on purpose; what is fast enough is a benchmark's affair.
"""

import time
from typing import Callable

# Less than `timeout` in pyproject.toml, so that the wait itself says what did
# not come.
WAIT_S = 300.0


def wait_until(condition: Callable[[], object], what: str = 'it') -> None:
  """Returns as soon as `condition()` holds.

  Raises:
    AssertionError: it does not hold after WAIT_S.
  """
  end = time.monotonic() + WAIT_S
  while not condition():
    assert time.monotonic() < end, f'{what} did not come within {WAIT_S:g} s'
    time.sleep(0.005)
