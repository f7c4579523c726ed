"""Other people's functions: found by name, called without surprises.

`load_function` finds what a setting such as 'package.module:function' names;
`call` runs a function and puts whatever it raises into the result. These are
the only places where every exception is caught, because the code that runs in
them is the user's. Neither limits time or memory: see `pool.py` for that.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import time
import traceback
from typing import Any, Callable, Literal

from areal_jax.config import ConfigError, require

_LONGEST = 4000  # characters of a detail: a message may hold a whole answer


@dataclasses.dataclass(frozen=True)
class Outcome:
  """The outcome of one call.

  `value` is what the function returned (status ok). `detail` says what went
  wrong: a first line `Type: message`, then the traceback where there is one.
  `seconds` is the time the function ran.
  """

  status: Literal['ok', 'error', 'timeout']
  value: Any = None
  detail: str = ''
  seconds: float = 0.0


def call(
    function: Callable[..., Any],
    *args: Any,
    catch: type[BaseException] | tuple[type[BaseException], ...] = Exception,
) -> Outcome:
  """Runs `function(*args)` here and now; an exception becomes an error."""
  start = time.monotonic()
  try:
    value = function(*args)
  except catch as error:
    seconds = time.monotonic() - start
    return Outcome('error', detail=describe(error), seconds=seconds)
  return Outcome('ok', value, seconds=time.monotonic() - start)


def describe(error: BaseException) -> str:
  """`Type: message`, then the traceback, each shortened where it is long."""
  lines = traceback.format_exception_only(type(error), error)
  # The place comes first in a SyntaxError, on lines that are indented.
  head = ''.join(line for line in lines if not line.startswith(' ')).strip()
  trace = ''.join(traceback.format_tb(error.__traceback__))
  return f'{head[:_LONGEST]}\n{trace[-_LONGEST:]}'.rstrip()


def load_function(spec: str, at: str) -> Callable[..., Any]:
  """The function that `'package.module:function'` names.

  Args:
    spec: module and function, with a colon between them.
    at: the setting it comes from, for the message.

  Raises:
    ConfigError: another form, a module that cannot be imported, a name that it
      does not have, or something that cannot be called.
  """
  module_name, colon, name = str(spec).partition(':')
  require(
      bool(module_name and colon and name),
      at,
      spec,
      "the form 'package.module:function'",
  )
  found = call(
      importlib.import_module, module_name, catch=(Exception, SystemExit)
  )
  if found.status != 'ok':
    cause = found.detail.splitlines()[0]
    raise ConfigError(
        f'{at} is {spec!r}, but importing {module_name} failed: {cause}'
    )
  if not hasattr(found.value, name):
    near = difflib.get_close_matches(name, dir(found.value), n=1)
    hint = f'; did you mean {near[0]!r}?' if near else ''
    raise ConfigError(
        f'{at} is {spec!r}, but {module_name} has no {name!r}{hint}'
    )
  function = getattr(found.value, name)
  if not callable(function):
    raise ConfigError(
        f'{at} is {spec!r}, but that is a {type(function).__name__}, wanted a'
        ' function'
    )
  return function
