"""A run of the quickstart's model in which things go wrong; see `chaos.py`.

Engines die and hang, the disk is slow, rewards hang, crash and raise, and their
workers are killed, as the kernel does when memory runs out. Each
fault is written into a log, a line each with kind and time, before it strikes.
`chaos.py` starts this, kills it and starts it again.
"""

import dataclasses
import os
import pathlib
import sys
import threading
import time

from benchmarks.chaos_reward import TIMEOUT_S, log_fault

HANG_S = 7.0  # of an engine, and of the disk
# The first decode step of a process at which an engine is struck, and then
# every so many of them.
_DEATHS = (60, 1500)
_HANGS = (140, 6000)
_SLOW_SAVES = (2, 6)  # the same for checkpoints
_KILL_S = 4.0  # between kills of workers


def strikes(count: int, schedule: tuple[int, int]) -> bool:
  first, every = schedule
  return count >= first and (count - first) % every == 0


def kill_workers(pool) -> None:
  """Kills one after another for as long as the process lives."""
  while not pool._closed:
    time.sleep(_KILL_S)
    workers = [worker for worker in pool._held if worker is not None]
    if workers:
      log_fault('worker_kill')
      workers[0].kill()


def install_faults() -> None:
  """Has engines and disk misbehave in this process."""
  from areal_jax import session
  from areal_jax.rollout.engine import Engine
  from areal_jax.sandbox.pool import KillablePool
  from areal_jax.train.checkpoint_writer import Checkpointer

  step, write = Engine.generate_steps, Checkpointer._write
  start = KillablePool.start
  steps, saves = iter(range(1, 2**62)), iter(range(1, 2**62))

  def faulty_step(self, *rest):
    if threading.current_thread().name.startswith('engine-0'):
      number = next(steps)
      if strikes(number, _DEATHS):
        log_fault('engine_death')
        raise ConnectionError('injected')
      if strikes(number, _HANGS):
        log_fault('engine_hang')
        time.sleep(HANG_S)
    return step(self, *rest)

  def slow_write(self, *rest):
    if strikes(next(saves), _SLOW_SAVES):
      log_fault('slow_disk')
      time.sleep(HANG_S)
    return write(self, *rest)

  def start_and_kill(self):
    start(self)
    threading.Thread(target=kill_workers, args=(self,), daemon=True).start()

  KillablePool.start = start_and_kill
  record = session.Session._record
  alive = pathlib.Path(os.environ['AREAL_CHAOS_LOG']).with_suffix('.alive')

  def telling_record(self, *rest):
    record(self, *rest)
    alive.write_text(str(os.getpid()))

  session.Session._record = telling_record
  Engine.generate_steps = faulty_step
  Checkpointer._write = slow_write


def settings(folder: str, policy: str, seed: int):
  """The quickstart's model, small batches and a checkpoint every two steps."""
  from areal_jax.rollout.failures import FailureSettings
  from areal_jax.train.checkpoint import CheckpointSettings
  from experiments import quickstart

  made = quickstart.get_config()
  made.name, made.output, made.seed = policy, folder, seed
  made.steps, made.resume = 10**6, 'auto'
  made.warm_start.steps = 0
  made.task.eval_problems = 8
  made.evaluation.every = 0
  made.evaluation.show = 0
  made.checkpoint = CheckpointSettings(every=2, keep_last=3)
  made.rollout.staleness = policy
  made.rollout.batch_size, made.rollout.group_size = 8, 4
  made.rollout.wait_s = 120.0
  made.train.optimizer = dataclasses.replace(
      made.train.optimizer, schedule='constant'
  )
  made.reward.function = 'benchmarks.chaos_reward:reward'
  made.reward.timeout_s = TIMEOUT_S
  made.failures = FailureSettings(engine_restarts=10**6, quiet_s=2.5)
  return made


def main(folder: str, policy: str, seed: str) -> int:
  from areal_jax import command, session

  pathlib.Path(folder).mkdir(parents=True, exist_ok=True)
  install_faults()
  return command.exit_code(session.run, settings(folder, policy, int(seed)))


if __name__ == '__main__':
  sys.exit(main(*sys.argv[1:]))
