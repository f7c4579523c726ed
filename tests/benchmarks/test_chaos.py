"""The audit of a run in which things went wrong, on planted books."""

from benchmarks import chaos


def event(kind, mono, duration=None, reason=None):
  return {'kind': kind, 'mono': mono, 'wall': mono + 1000.0, 'attempt': 0,
          'duration': duration, 'reason': reason}  # fmt: skip


def waits(reason, faults=('engine_hang',)):
  events = [
      event('admit', 0.0),
      event('generate', 1.0, 0.5),
      event('silence', 5.0, reason=reason),
      event('generate', 9.0, 0.5),
      event('wait', 0.0, 20.0),  # a wait is no progress
      event('step', 10.0, 1.0),
  ]
  return chaos.explained(
      events, [{'kind': kind, 'wall': 1002.0} for kind in faults]
  )


def test_wait_is_explained_by_a_message_that_names_the_fault_at_work():
  assert waits('engine 0: decodes for 3.5 s; version 2') == (1, 0)


def test_message_that_names_another_fault_explains_nothing():
  said = 'the checkpoint of step 4 is being written'
  assert waits(said) == (1, 1)
  assert waits(said, faults=()) == (1, 1)
  assert waits(said, faults=('slow_disk',)) == (1, 0)


def test_silence_without_a_wait_counts_as_none():
  events = [event('admit', 0.0), *(event('step', float(t)) for t in range(9))]
  assert chaos.explained(events, []) == (0, 0)


def test_what_was_found_has_a_bar_where_it_has_to_be_0():
  found = {'steps': 7, 'lost': 0, 'repeated': 2, 'bound_violations': 0}
  rows = chaos.figures(found, {'kill': 3}, attempts=4, seconds=60.5)
  assert {row.row: row.value for row in rows} == {
      **found, 'fault: kill': 3, 'seconds': 60.5, 'attempts': 4,
  }  # fmt: skip
  bars = {row.row: row.met for row in rows if row.bar}
  assert bars == {'lost': True, 'repeated': False, 'bound_violations': True}
