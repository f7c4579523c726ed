"""Programs are compiled in order, waited for one by one, and given up."""

import re
import subprocess
import sys
import threading

import pytest

from areal_jax.telemetry import programs as programs_lib
from areal_jax.telemetry.programs import Programs, text_of
from tests.limits import WAIT_S, wait_until


class Work:
  """Compilations that go on until they are let go, and what has begun."""

  def __init__(self):
    self.begun = []
    self.gates = {}

  def __call__(self, *names):
    return [(name, self._compile(name)) for name in names]

  def let(self, *names):
    for name in names:
      self.gates[name].set()

  def _compile(self, name):
    gate = self.gates[name] = threading.Event()

    def compile_():
      self.begun.append(name)
      assert gate.wait(WAIT_S)

    return compile_


A, B, C = ('a', 1), ('b', 2), ('c', 3)


@pytest.fixture
def made():
  programs, work = Programs(), Work()
  programs.plan(work(A, B, C))
  wait_until(lambda: work.begun == [A])  # its thread is at work
  yield programs, work
  work.let(A, B, C)
  programs.close()


def test_programs_come_in_the_order_of_the_plan(made):
  programs, work = made
  assert [programs.ready(name) for name in (A, B, C)] == [False] * 3
  work.let(A, B, C)
  programs.wait_for_all()
  assert work.begun == [A, B, C]
  assert all(programs.ready(name) for name in (A, B, C))
  assert programs.done == 3


def test_what_is_waited_for_comes_next_and_alone(made):
  programs, work = made
  waits = threading.Thread(target=programs.wait, args=(C,))
  waits.start()
  while next(iter(programs._queue)) != C:
    assert waits.is_alive()
  work.let(A, C)
  waits.join(WAIT_S)
  assert not waits.is_alive()
  assert work.begun[:2] == [A, C]
  assert not programs.ready(B)


def test_what_is_planned_for_later_is_compiled_when_it_is_wanted(made):
  programs, work = made
  d, e = ('d', 4), ('e', 5)
  programs.plan([], later=work(d, e))
  work.let(A, B, C, d, e)
  for name in (A, B, C):
    programs.wait(name)
  assert work.begun == [A, B, C]
  assert not programs.ready(d) and not programs.ready(e)
  programs.want(e)
  assert programs.wait(e) and work.begun[3:] == [e]
  # Whoever waits for it wants it; what is wanted again comes once.
  programs.want(e)
  programs.wait_for_all()
  assert work.begun[3:] == [e, d]


def test_what_can_wait_is_compiled_when_nobody_has_other_work(made):
  """The trainer's programs come before what engines need after a step."""
  trainer, work = made
  engine, d, e, f, g = Programs(), ('d', 4), ('e', 5), ('f', 6), ('g', 7)
  try:
    engine.plan(work(d), soon=work(e, f), later=work(g))
    work.let(d, e, f, g)
    engine.wait(d)
    engine.want(g)
    # Whoever waits for one has it at once, and the others stay.
    assert not any(engine.ready(name) for name in (e, f, g))
    assert engine.wait(f)
    assert not any(engine.ready(name) for name in (e, g))
    work.let(A, B, C)
    trainer.wait_for_all()
    with programs_lib._changed:
      assert programs_lib._changed.wait_for(lambda: engine.ready(g), WAIT_S)
    assert sorted(work.begun[:3]) == [A, d, f]
    assert work.begun[3:] == [B, C, e, g]
  finally:
    work.let(A, B, C)
    engine.close()
  assert not programs_lib._busy and not programs_lib._patient


@pytest.mark.parametrize('ends', [Programs.let_go, Programs.close])
def test_what_can_wait_is_held_back_until_there_is_a_step(made, ends):
  trainer, work = made
  engine, d, e = Programs(), ('d', 4), ('e', 5)
  trainer.hold_back()
  engine.plan(work(d), soon=work(e))
  work.let(A, B, C, d, e)
  trainer.wait_for_all()
  engine.wait(d)
  with programs_lib._changed:
    assert not programs_lib._changed.wait_for(lambda: engine.ready(e), 0.2)
  ends(trainer)
  with programs_lib._changed:
    assert programs_lib._changed.wait_for(lambda: engine.ready(e), WAIT_S)
  engine.close()
  assert not programs_lib._busy and not programs_lib._patient


def test_closing_forgets_what_can_wait(made):
  trainer, work = made
  engine = Programs()
  engine.plan([], soon=work(('d', 4)))
  assert not engine.ready(('d', 4))
  engine.close()
  assert engine.ready(('d', 4))
  work.let(A, B, C)
  trainer.wait_for_all()
  trainer.close()
  assert work.begun == [A, B, C]
  assert not programs_lib._busy and not programs_lib._patient


def test_what_nobody_planned_is_not_waited_for(made):
  programs, _ = made
  assert programs.ready(('d', 4))
  assert programs.wait(('d', 4))


def test_what_is_under_way_is_known_with_its_beginning(made):
  programs, work = made
  name, since = programs.under_way
  assert name == 'a 1' and since > 0
  work.let(A, B, C)
  programs.wait_for_all()
  wait_until(lambda: programs.under_way is None, 'the end of the last one')


def test_explanation_says_what_is_compiled(made):
  programs, work = made
  assert re.search(r'compiles a 1 for \d', programs.explain())
  assert '2 programs to follow' in programs.explain()
  work.let(A, B, C)
  programs.wait_for_all()
  programs.close()
  assert programs.explain() == ''
  assert text_of(('extend', 1, 16)) == 'extend 1 16'


def test_error_reaches_all_who_wait_and_the_next_program_comes():
  programs, gate = Programs(), threading.Event()

  def fails():
    assert gate.wait(WAIT_S)
    raise NotImplementedError('no such instruction')

  programs.plan([(A, fails), (B, lambda: None)])
  errors = []

  def waits():
    with pytest.raises(NotImplementedError, match='no such inst') as error:
      programs.wait(A)
    errors.append(error)

  threads = [threading.Thread(target=waits) for _ in range(2)]
  for thread in threads:
    thread.start()
  gate.set()
  for thread in threads:
    thread.join(WAIT_S)
  assert len(errors) == 2
  assert programs.wait(B)
  with pytest.raises(NotImplementedError):
    programs.wait_for_all()
  programs.plan([(A, lambda: None)])  # for other arguments
  assert programs.wait(A)
  programs.close()


def test_wait_that_is_given_up_ends_before_the_program(made):
  programs, _ = made
  gone = threading.Event()
  said = []
  waits = threading.Thread(
      target=lambda: said.append(programs.wait(A, gone.is_set))
  )
  waits.start()
  programs.nudge()
  assert said == []
  gone.set()
  programs.nudge()
  waits.join(WAIT_S)
  assert said == [False]


def test_closing_waits_for_what_has_begun_and_gives_up_the_rest(made):
  programs, work = made
  waits = threading.Thread(target=programs.wait, args=(C,))
  waits.start()
  closes = threading.Thread(target=programs.close)
  closes.start()
  waits.join(WAIT_S)  # and would compile it itself
  assert closes.is_alive()
  work.let(A)
  closes.join(WAIT_S)
  assert not closes.is_alive()
  assert work.begun == [A]
  assert programs.ready(B)


def test_process_ends_though_much_is_left_to_compile():
  code = """
import threading
from areal_jax.telemetry.programs import Programs

begun = threading.Event()

def compile_():
  begun.set()
  threading.Event().wait(1)

programs = Programs()
programs.plan([((i,), compile_) for i in range(3000)])
assert begun.wait(LIMIT)
""".replace('LIMIT', str(WAIT_S))
  child = subprocess.run(
      [sys.executable, '-c', code],
      capture_output=True,
      text=True,
      timeout=WAIT_S,  # a tenth of what all of them would take
  )
  assert (child.returncode, child.stderr) == (0, '')
