"""A long step ends no run, and whatever ends one leaves a checkpoint.

Whole runs of a tiny policy. The watchdog has a clock of its own, which is moved
forward while a step is held: nobody waits for the limits.
"""

import functools
import threading

import pytest

from areal_jax import session
from areal_jax.cluster.local import Stalled
from areal_jax.cluster.signals import Signals
from areal_jax.cluster.watchdog import Watchdog
from areal_jax.rollout.workflow import SingleTurn
from areal_jax.telemetry import run_folder
from areal_jax.train import checkpoint
from areal_jax.train.checkpoint import CheckpointSettings
from areal_jax.train.checkpoint_writer import Checkpointer
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.outcome import NonFiniteError
from areal_jax.train.trainer import Pending, Trainer
from areal_jax.types import Purpose
from tests.limits import WAIT_S, wait_until
from tests.test_session import experiment

STEPS = 3


class Lost(RuntimeError):
  """What the tests raise."""


class Clock:
  """The watchdog's time, and how often it has looked.

  It is so far ahead of any other that no compilation is within its limit, which
  a step would not be charged for.
  """

  def __init__(self, monkeypatch):
    self.now = 1e12
    self.looks = 0
    look = Watchdog.look

    def counted(watchdog):
      look(watchdog)
      self.looks += 1

    monkeypatch.setattr(Watchdog, 'look', counted)
    monkeypatch.setattr(
        session, 'Watchdog', functools.partial(Watchdog, clock=self)
    )
    # Time to leave in on any machine.
    signals = functools.partial(Signals, grace_s=WAIT_S)
    monkeypatch.setattr(session, 'Signals', signals)

  def __call__(self):
    return self.now

  def pass_time(self, seconds):
    """Passes it between two looks of the watchdog."""
    for more in (seconds, 0.0):
      wait_until(
          lambda seen=self.looks: self.looks >= seen + 2,
          'a look of the watchdog',
      )
      self.now += more


def run(folder, **changes):
  return session.run(
      experiment(
          folder,
          **{
              'steps': STEPS,
              'evaluation__before': False,
              'failures__quiet_s': 0.4,
              **changes,
          },
      )
  )


def saved_step(folder):
  saved, _ = checkpoint.latest(folder / 'run' / run_folder.CHECKPOINTS)
  return saved.step


def assert_goes_on(folder, at, **changes):
  """The run ends well from its checkpoint, and has lost no draw."""
  assert saved_step(folder) == at
  summary = run(folder, resume='auto', **changes).summary
  assert summary['attempt'] == 1
  flow = summary['trained'] + summary['dropped'] + summary['in_flight']
  assert summary['drawn'] == flow and summary['trained'] == 4 * STEPS


def test_a_step_longer_than_any_silence_may_be_ends_no_run(
    tmp_path, monkeypatch, capsys
):
  clock, hand_out = Clock(monkeypatch), Trainer.hand_out

  def long(self, groups):
    clock.pass_time(WAIT_S + 1000)  # a silence may last for WAIT_S + 30 s
    return hand_out(self, groups)

  monkeypatch.setattr(Trainer, 'hand_out', long)
  summary = run(tmp_path, failures__step_s=2000.0).summary
  assert summary['trained'] == 4 * STEPS
  said = capsys.readouterr().err
  assert said.count('nothing else moves: trains step') == 1


def test_a_step_that_never_begins_ends_at_its_limit_and_is_saved(
    tmp_path, monkeypatch
):
  clock, hand_out = Clock(monkeypatch), Trainer.hand_out

  def hangs(self, groups):
    if self.version == 2:
      clock.pass_time(2001.0)
      threading.Event().wait(WAIT_S)
    return hand_out(self, groups)

  with monkeypatch.context() as patch:
    patch.setattr(Trainer, 'hand_out', hangs)
    with pytest.raises(Stalled, match=r'^trains step 3 for .* of 2000 s'):
      run(tmp_path, failures__step_s=2000.0)
  assert_goes_on(tmp_path, 2)


def test_a_step_that_hangs_on_the_devices_leaves_the_checkpoint_before(
    tmp_path, monkeypatch, capsys
):
  clock, wait = Clock(monkeypatch), Pending.wait
  hand_out, handed = Trainer.hand_out, []
  settings = {
      'failures__step_s': 2000.0,
      'checkpoint': CheckpointSettings(every=1),
  }

  def counted(self, groups):
    handed.append(self.version)
    return hand_out(self, groups)

  def hangs(self):
    if len(handed) == 3:
      clock.pass_time(2001.0)
      threading.Event().wait(WAIT_S)
    return wait(self)

  with monkeypatch.context() as patch:
    patch.setattr(Trainer, 'hand_out', counted)
    patch.setattr(Pending, 'wait', hangs)
    patch.setattr(Pending, 'done', property(lambda self: len(handed) < 3))
    with pytest.raises(Stalled, match=r'^trains step 3 for'):
      run(tmp_path, **settings)
  said = capsys.readouterr().err
  assert 'is still on the devices, and so is what would be saved' in said
  before = saved_step(tmp_path)  # a disk that is slow may not have the second
  assert before in (1, 2) and f'the last checkpoint: {before}' in said
  assert_goes_on(tmp_path, before, **settings)


def trainer_raises(patch):
  hand_out = Trainer.hand_out

  def raises(self, groups):
    pending = hand_out(self, groups)  # it has trained, and nobody knows
    if self.version == 2:
      raise Lost
    return pending

  patch.setattr(Trainer, 'hand_out', raises)


def workflow_raises(patch):
  call = SingleTurn.__call__

  async def raises(self, draw, sample, version):
    if draw.purpose is Purpose.TRAIN and version == 2:
      raise Lost
    return await call(self, draw, sample, version)

  patch.setattr(SingleTurn, '__call__', raises)


def user_interrupts(patch):
  hand_out = Trainer.hand_out

  def raises(self, groups):
    if self.version == 2:
      raise KeyboardInterrupt
    return hand_out(self, groups)

  patch.setattr(Trainer, 'hand_out', raises)


@pytest.mark.parametrize(
    'breaks', [trainer_raises, workflow_raises, user_interrupts]
)
def test_what_ends_a_run_saves_the_last_version(tmp_path, monkeypatch, breaks):
  with monkeypatch.context() as patch:
    breaks(patch)
    with pytest.raises((Lost, KeyboardInterrupt)):
      run(tmp_path)
  assert_goes_on(tmp_path, 2)


def test_what_fails_behind_the_last_step_saves_it(tmp_path, monkeypatch):
  """Training is done; a run that saves nothing at its end does it now."""

  def full(*_):
    raise OSError('no space left')

  settings = {'checkpoint': CheckpointSettings(at_end=False)}
  with monkeypatch.context() as patch:
    patch.setattr(session, 'export_policy', full)
    with pytest.raises(OSError, match='no space left'):
      run(tmp_path, **settings)
  assert_goes_on(tmp_path, STEPS, **settings)


def test_saving_that_fails_replaces_no_error(tmp_path, monkeypatch, capsys):

  def breaks(*_, **__):
    raise RuntimeError('Array has been deleted')

  monkeypatch.setattr(Checkpointer, 'save', breaks)
  trainer_raises(monkeypatch)
  with pytest.raises(Lost):
    run(tmp_path)
  said = capsys.readouterr().err
  assert 'step 2 could not be saved: RuntimeError: Array has been' in said


def test_a_run_without_numbers_is_saved_and_tries_again(tmp_path):
  """The first update throws the policy so far out that nothing is a number."""
  broken = {
      'steps': 5,
      'train__max_consecutive_skips': 0,
      'train__optimizer': OptimizerSettings(
          learning_rate=1e18, weight_decay=0.0
      ),
  }
  with pytest.raises(NonFiniteError, match='this time in'):
    run(tmp_path, **broken)
  assert (tmp_path / 'run' / run_folder.CRASH).is_dir()
  step = saved_step(tmp_path)
  assert step >= 2
  # With the count of skips as it was the message would be 'no further one'.
  with pytest.raises(NonFiniteError, match='this time in'):
    run(tmp_path, resume='auto', **broken)
