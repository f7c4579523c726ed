"""One live line on a terminal, few lines in a log, always the last."""

import contextlib
import fcntl
import io
import os
import pty
import select
import signal
import struct
import termios

import pytest

from areal_jax.cluster.signals import Interrupted, Signals
from areal_jax.telemetry.progress import Progress


class Clock:

  def __init__(self):
    self.now = 0.0

  def __call__(self):
    return self.now


@pytest.fixture
def terminal():
  """A real pseudo-terminal of 50 columns: (stream, function to read it)."""
  reader, writer = pty.openpty()
  size = struct.pack('HHHH', 24, 50, 0, 0)
  fcntl.ioctl(writer, termios.TIOCSWINSZ, size)

  def read():
    # One read may end in the middle of what was written.
    parts = []
    while select.select([reader], [], [], 0.1)[0]:
      parts.append(os.read(reader, 65536))
    return b''.join(parts).decode()

  with os.fdopen(writer, 'w') as stream:
    yield stream, read
  os.close(reader)


def screen(written):
  """The lines that a terminal shows after what was written to it."""
  lines = []
  for text in written.replace('\r\n', '\n').split('\n'):
    cells = []
    for piece in text.split('\r'):
      cells[: len(piece)] = piece
    lines.append(''.join(cells).rstrip())
  return lines


def test_log_gets_few_lines_and_always_the_last():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(10, stream, clock=clock, every=5.0)
  for step in range(1, 11):
    clock.now += 1.0
    progress.update(step=step, version=step, reward=step / 10)
  progress.close()
  lines = stream.getvalue().splitlines()
  assert [line.split(' | ')[0] for line in lines] == [
      'step 1/10', 'step 6/10', 'step 10/10',
  ]  # fmt: skip
  assert '4s left' in lines[1]


def test_closing_early_prints_the_last_line():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(10, stream, clock=clock)
  for step in (1, 2, 3):
    progress.update(step=step, version=0)
  progress.close()
  progress.close()
  lines = stream.getvalue().splitlines()
  assert [line.split(' |')[0] for line in lines] == ['step 1/10', 'step 3/10']


def test_line_says_all_that_was_given():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(100, stream, clock=clock, every=0.0)
  progress.update(step=20, version=19)  # resumed: these 20 took no time here
  clock.now = 60.0
  progress.update(
      step=40, version=39, reward=0.5, staleness=0.75,
      rollout_tokens_per_s=5234.0, trained_tokens_per_s=812.0, accuracy=0.25,
  )  # fmt: skip
  assert stream.getvalue().splitlines()[-1] == (
      'step 40/100 | 3:00 left | reward 0.500 | version 39 | staleness 0.75'
      ' | rollout 5.2k tok/s | train 812 tok/s | accuracy 0.25'
  )


def test_time_left_follows_the_recent_pace():
  stream, clock = io.StringIO(), Clock()
  progress = Progress(1000, stream, clock=clock, every=0.0)
  progress.update(step=0, version=0)
  clock.now = 500.0  # the first step compiles
  for step in range(1, 101):
    progress.update(step=step, version=step)
    clock.now += 1.0
  assert '15:00 left' in stream.getvalue().splitlines()[-1]


def test_terminal_shows_one_line_that_fits(terminal):
  stream, read = terminal
  clock = Clock()
  progress = Progress(100, stream, clock=clock)
  for step in (1, 2, 3):
    clock.now += 1.0
    progress.update(
        step=step, version=step, reward=0.5, staleness=1.0,
        rollout_tokens_per_s=1e6 / step, trained_tokens_per_s=1e3,
    )  # fmt: skip
  progress.note('evaluated: 0.25')
  progress.close()
  progress.close()
  assert screen(read()) == [
      'evaluated: 0.25',
      'step 3/100 | 1:37 left | reward 0.500 | version 3',
      '',
  ]


def test_shorter_line_leaves_nothing_of_the_longer(terminal):
  stream, read = terminal
  progress = Progress(100, stream, clock=Clock())
  progress.update(step=1, version=1, reward=0.5)
  progress.update(step=1, version=2)
  progress.close()
  assert screen(read()) == ['step 1/100 | version 2', '']


def test_a_line_is_not_printed_twice_after_a_signal(terminal):
  """The handler's line stands below the live line, which stays as it is."""
  stream, read = terminal
  progress = Progress(10, stream)
  progress.update(step=3, version=3, reward=0.5)
  with Signals() as signals, contextlib.suppress(Interrupted), signals.held():
    signals.told = lambda: (stream.write('\nSIGINT\n'), progress.leave_line())
    os.kill(os.getpid(), signal.SIGINT)
    progress.note('the checkpoint is written')
    progress.close()
  lines = screen(read())
  assert sum(line.startswith('step 3/10') for line in lines) == 1
  assert lines[1:3] == ['SIGINT', 'the checkpoint is written']
