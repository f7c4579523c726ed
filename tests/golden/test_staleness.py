"""The ledger against AReaL's staleness manager, operation by operation.

AReaL counts all answers it ever accepted and lets each version account for B of
them, whatever a step really took; ours counts what is outstanding. Where every
step takes B the two are one. Where a step of the script takes fewer, ours has
that many fewer places, because nothing has left.
"""

from areal_jax import types
from areal_jax.ledger import Ledger
from tests.golden import cases

_ENQUEUE, _SUBMIT, _ACCEPT, _REJECT, _BUMP, _RECOVER = range(6)


def _submit(ledger: Ledger) -> None:
  """A group starts, even if the script starts one that we would not admit."""
  if ledger.admits():
    ledger.admit()
  else:
    ledger.running += 1
    ledger.drawn += 1


@cases.matching('areal/staleness.npz', 'StalenessManager.get_capacity')
def test_admission_is_that_of_areal_and_of_the_paper(case):
  args, inputs, outputs = case.args, case.inputs, case.outputs
  batch = max(1, args['consumer_batch_size'])
  ledger = Ledger(batch, args['max_staleness'])
  base = 0  # version from which on this ledger has counted
  whole_steps = 0
  for at, (op, arg) in enumerate(zip(inputs['op'], inputs['arg'])):
    if op == _SUBMIT:
      _submit(ledger)
    elif op == _ACCEPT:
      ledger.finish()
    elif op == _REJECT:
      ledger.drop(next(iter(types.DropReason)), was='running')
    elif op == _BUMP:
      ledger.take(min(batch, ledger.ready))
      ledger.publish(ledger.version + 1)
    elif op == _RECOVER:
      # What runs goes on running; what was finished is not counted again.
      base = int(arg)
      ledger = Ledger(
          batch,
          args['max_staleness'],
          version=base,
          running=ledger.running,
          drawn=ledger.running,
      )
    else:
      assert op == _ENQUEUE
    assert ledger.version == outputs['version'][at]
    assert ledger.running == outputs['running'][at]
    assert ledger.balanced()
    # Places that AReaL frees for groups that no step has taken.
    unearned = (ledger.version - base) * batch - ledger.trained
    room = ledger.limit - ledger.outstanding
    assert room == outputs['staleness_capacity'][at] - unearned, at
    assert room == outputs['paper_room_live'][at] - unearned, at
    if not unearned:
      whole_steps += 1
      assert ledger.admits() == outputs['paper_allows_live'][at], at
  assert whole_steps, 'no step of the script takes whole batches'
