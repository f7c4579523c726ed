"""Jobs that the workers of `test_pool.py` import, good and hostile ones."""

import os
import re
import sys
import time


class TwoArguments(Exception):
  """An exception that pickles and does not unpickle."""

  def __init__(self, first, second):
    super().__init__(f'{first} and {second}')


class Unloadable:
  """A value that pickles and does not unpickle."""

  def __reduce__(self):
    return _refuse, ()


def _refuse():
  raise ValueError('will not load')


def square(x):
  return x * x


def measure(x):
  return len(x)


def echo(x):
  return x


def loop():
  while True:
    pass


def power():
  return 9**9**9**9


def expression():
  return re.match('(a+)+$', 'a' * 64 + 'b')


def digits():
  """A number of many digits: what Python refuses by default, asked for."""
  sys.set_int_max_str_digits(0)
  return int('7' * 20_000_000)


def raise_key_error():
  raise KeyError('gold')


def raise_two_arguments():
  raise TwoArguments('this', 'that')


def raise_timeout_error():
  raise TimeoutError('my own')


def interrupt():
  raise KeyboardInterrupt


def leave():
  sys.exit(3)


def die(code):
  os._exit(code)


def make_lambda():
  return lambda: 1


def make_unloadable():
  return Unloadable()


def meet(folder, count):
  """The process id, once `count` processes are in this function together."""
  with open(os.path.join(folder, str(os.getpid())), 'w', encoding='utf-8'):
    pass
  while len(os.listdir(folder)) < count:
    time.sleep(0.005)
  return os.getpid()


def imported(names):
  return [name for name in names if name in sys.modules]


def start_hanging(path):
  """Says in a file who hangs, then does."""
  with open(path + '.draft', 'w', encoding='utf-8') as file:
    file.write(str(os.getpid()))
  os.rename(path + '.draft', path)
  loop()
