"""The pool of killable processes."""

import asyncio
import importlib
import multiprocessing
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading

import pytest

from areal_jax.config import ConfigError
from areal_jax.sandbox import pool as pool_lib
from areal_jax.sandbox.pool import KillablePool
from tests.limits import WAIT_S, wait_until

HERE = pathlib.Path(__file__).parent
ROOT = HERE.parent.parent
sys.path.insert(0, str(HERE))  # workers are told this path

import pool_jobs  # noqa: E402


@pytest.fixture(scope='module')
def pool():
  """Two workers, whose jobs may take longer than any of these takes."""
  pool = KillablePool(2, WAIT_S)
  yield pool
  pool.close()


def run(pool, *calls):
  """The outcomes of several calls made at once."""

  async def gather():
    return await asyncio.gather(*(pool.run(*c) for c in calls))

  return asyncio.run(gather())


def is_alive(pid: int) -> bool:
  try:
    with open(f'/proc/{pid}/stat', encoding='utf-8') as file:
      return file.read().rpartition(')')[2].split()[0] != 'Z'
  except (FileNotFoundError, ProcessLookupError):  # gone before, or meanwhile
    return False


def pids_of_both(pool):
  """The processes of a pool of two, each of which takes one of two jobs."""
  with tempfile.TemporaryDirectory() as folder:
    outcomes = run(pool, *[(pool_jobs.meet, folder, 2)] * 2)
  assert {o.status for o in outcomes} == {'ok'}, outcomes
  return {o.value for o in outcomes}


def test_results_belong_to_their_calls(pool):
  outcomes = run(pool, *((pool_jobs.square, x) for x in range(200)))
  assert [o.value for o in outcomes] == [x * x for x in range(200)]
  assert {o.status for o in outcomes} == {'ok'}


def test_start_brings_up_every_worker():
  pool = KillablePool(2, WAIT_S)
  pool.start()
  up = {worker._process.pid for worker in pool._held}
  assert pids_of_both(pool) == up and len(up) == 2
  pool.close()


def test_hung_jobs_are_killed_and_the_others_answered():
  # CASES A21.
  pool = KillablePool(2, 4.0)  # far more than the good ones need
  pool.start()
  jobs = [pool_jobs.loop, pool_jobs.power, pool_jobs.expression]
  calls = [(job,) for job in (*jobs, pool_jobs.digits)]
  calls += [(pool_jobs.square, x) for x in range(20)]
  outcomes = run(pool, *calls)
  assert [o.status for o in outcomes] == ['timeout'] * 4 + ['ok'] * 20
  assert [o.value for o in outcomes[4:]] == [x * x for x in range(20)]
  assert outcomes[0].seconds == 4.0
  wait_until(lambda: len(pool._up) == 2)
  pids = pids_of_both(pool)
  assert len(pids) == 2
  pool.close()
  wait_until(lambda: not any(is_alive(pid) for pid in pids))
  assert not {p.pid for p in multiprocessing.active_children()} & pids


def test_job_inside_one_c_call_holds_up_nobody():
  pool = KillablePool(1, 4.0)
  pool.start()
  hung, good = run(pool, (pool_jobs.power,), (pool_jobs.square, 3))
  assert (hung.status, good.value) == ('timeout', 9)
  pool.close()


def test_job_that_takes_its_process_down_is_an_error(pool):
  outcomes = run(pool, (pool_jobs.die, 7), (pool_jobs.square, 3))
  assert outcomes[0].status == 'error'
  assert 'exit code 7' in outcomes[0].detail
  assert outcomes[1].value == 9
  assert run(pool, (pool_jobs.square, 4))[0].value == 16


def test_process_that_leaves_without_an_error_code_is_an_error(pool):
  outcomes = run(pool, (pool_jobs.die, 0), (pool_jobs.square, 3))
  assert outcomes[0].status == 'error'  # and not the timeout of a job
  assert 'exit code 0' in outcomes[0].detail
  assert outcomes[1].value == 9


@pytest.mark.parametrize(
    'job, detail',
    [
        (pool_jobs.raise_key_error, "KeyError: 'gold'\n"),
        (pool_jobs.raise_two_arguments, 'pool_jobs.TwoArguments: this and tha'),
        (pool_jobs.raise_timeout_error, 'TimeoutError: my own\n'),
        (pool_jobs.leave, 'SystemExit: 3\n'),
        (pool_jobs.interrupt, 'KeyboardInterrupt'),
        (pool_jobs.make_lambda, "AttributeError: Can't pickle local object"),
    ],
)
def test_exception_is_an_error_with_its_text(pool, job, detail):
  (outcome,) = run(pool, (job,))
  assert (outcome.status, outcome.value) == ('error', None)
  assert outcome.detail.startswith(detail)
  if job is not pool_jobs.make_lambda:
    assert job.__name__ in outcome.detail  # the traceback


def test_argument_that_does_not_load_is_an_error(pool):
  outcomes = run(
      pool,
      (pool_jobs.square, pool_jobs.Unloadable()),
      (pool_jobs.square, 2),
  )
  assert outcomes[0].detail.startswith('ValueError: will not load')
  assert outcomes[1].value == 4


def test_value_that_does_not_load_fails_its_own_call_only(pool):
  async def both():
    bad = pool.run(pool_jobs.make_unloadable)
    good = pool.run(pool_jobs.square, 2)
    return await asyncio.gather(bad, good, return_exceptions=True)

  bad, good = asyncio.run(both())
  assert isinstance(bad, ValueError)
  assert good.value == 4


def test_idle_worker_killed_from_outside_is_replaced(pool):
  first = pids_of_both(pool)
  for pid in first:
    os.kill(pid, signal.SIGKILL)
  wait_until(lambda: not any(map(is_alive, first)))
  second = pids_of_both(pool)
  assert len(second) == 2 and not first & second


@pytest.mark.parametrize('size', [1, 1 << 22], ids=['whole', 'half'])
def test_worker_killed_before_it_begins_costs_no_verdict(
    pool, size, monkeypatch
):
  """It is stopped when the job is sent, so that it has the job, or as much of
  it as a socket holds, and has said nothing yet; then it is killed. A pool
  whose workers share a lock would have it held for ever."""
  # Its death is what ends the wait for it, and not the limit to take a job.
  monkeypatch.setattr(pool_lib, '_TAKE_S', 10 * WAIT_S)
  stopped, other = pids_of_both(pool)
  os.kill(stopped, signal.SIGSTOP)
  calls = [(pool_jobs.measure, 'x' * size) for _ in range(12)]

  async def lose():
    jobs = [asyncio.create_task(pool.run(*c)) for c in calls]
    while sum(job.done() for job in jobs) < 11:  # the other worker does those
      await asyncio.sleep(0.01)
    os.kill(stopped, signal.SIGKILL)
    return await asyncio.gather(*jobs)

  outcomes = asyncio.run(asyncio.wait_for(lose(), WAIT_S))
  assert [(o.status, o.value) for o in outcomes] == [('ok', size)] * 12
  after = pids_of_both(pool)
  assert len(after) == 2 and stopped not in after and other in after


def test_workers_killed_at_random_cost_the_jobs_that_they_had_begun():
  """Kills come after so many jobs: a slow machine loses no more of them."""
  pool = KillablePool(2, WAIT_S)
  pool.start()
  chosen, over, done = random.Random(0), threading.Event(), []
  size = 1 << 19  # more than a socket holds, both ways

  async def echo(x):
    outcome = await pool.run(pool_jobs.echo, bytes([x]) * size)
    done.append(x)
    return outcome

  async def echo_all():
    return await asyncio.gather(*map(echo, range(100)))

  def kill():
    while True:
      wanted = len(done) + chosen.randint(2, 8)
      while len(done) < wanted:
        if over.wait(0.001):
          return
      for worker in list(pool._held):
        if worker is not None and chosen.random() < 0.5:
          worker.kill()

  thread = threading.Thread(target=kill)
  thread.start()
  try:
    outcomes = asyncio.run(echo_all())
  finally:
    over.set()
    thread.join()
  died = ('the process of the job died', '3 workers died before they began')
  for x, outcome in enumerate(outcomes):
    if outcome.status == 'ok':
      assert outcome.value == bytes([x]) * size
    else:
      assert outcome.detail.startswith(died), outcome
  assert sum(o.status == 'ok' for o in outcomes) > 30
  assert run(pool, (pool_jobs.square, 7))[0].value == 49
  pool.close()


def test_cancelled_call_kills_its_work(tmp_path):
  pool = KillablePool(1, WAIT_S)
  path = tmp_path / 'pid'

  async def cancel():
    task = asyncio.create_task(pool.run(pool_jobs.start_hanging, str(path)))
    while not path.exists():
      await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
      await task
    return await pool.run(pool_jobs.square, 5)

  assert asyncio.run(cancel()).value == 25
  assert not is_alive(int(path.read_text()))
  pool.close()


def test_close_ends_the_calls_that_wait(tmp_path):
  pool = KillablePool(1, WAIT_S)
  path = tmp_path / 'pid'
  outcomes = []

  def call():
    waiting = [(pool_jobs.square, 'x' * 100_000)] * 5  # more than a pipe holds
    outcomes.extend(run(pool, (pool_jobs.start_hanging, str(path)), *waiting))

  thread = threading.Thread(target=call)
  thread.start()
  wait_until(path.exists)
  pool.close()
  thread.join(WAIT_S)
  assert [o.status for o in outcomes] == ['error'] * 6
  assert {o.detail for o in outcomes} == {'the pool was closed during the call'}
  assert not is_alive(int(path.read_text()))
  with pytest.raises(RuntimeError, match='closed'):
    run(pool, (pool_jobs.square, 1))


def test_several_event_loops_share_a_pool(pool):
  values = {}

  def call(x):
    values[x] = run(pool, *[(pool_jobs.square, x)] * 20)[0].value

  threads = [threading.Thread(target=call, args=(x,)) for x in range(4)]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(WAIT_S)
  assert values == {0: 0, 1: 1, 2: 4, 3: 9}


def test_workers_do_not_import_jax(pool):
  importlib.import_module('jax')  # here; it must not reach them

  heavy = ['jax', 'jaxlib', 'flax', 'grain', 'tensorflow']
  outcomes = run(pool, (pool_jobs.imported, ['areal_jax.config', *heavy]))
  assert outcomes[0].value == ['areal_jax.config']


DOOR = '''
"""A command line like those of the package: jax inside functions only."""
import asyncio
import sys
import pool_jobs
from areal_jax.sandbox.pool import KillablePool


def main():
  import jax
  pool = KillablePool(1, 60.0)
  pool.start()
  outcome = asyncio.run(pool.run(pool_jobs.imported, ['jax', 'pool_jobs']))
  print(jax.__name__, outcome.value, flush=True)
  if len(sys.argv) > 1:
    asyncio.run(pool.run(pool_jobs.start_hanging, sys.argv[1]))
  pool.close()


if __name__ == '__main__':
  main()
'''


def door(tmp_path, text=DOOR) -> dict:
  """Arguments to run a module, as `python -m`, that starts a pool."""
  (tmp_path / 'door.py').write_text(text)
  path = os.pathsep.join([str(tmp_path), str(HERE), str(ROOT)])
  return {
      'args': [sys.executable, '-m', 'door'],
      'env': {**os.environ, 'PYTHONPATH': path},
      'cwd': tmp_path,
      'text': True,
  }


def test_workers_of_a_module_run_as_main_do_not_import_jax(tmp_path):
  done = subprocess.run(
      **door(tmp_path), capture_output=True, timeout=WAIT_S, check=False
  )
  assert done.stdout == "jax ['pool_jobs']\n", done.stderr
  assert (done.returncode, done.stderr) == (0, '')


def test_hung_worker_does_not_outlive_a_killed_program(tmp_path):
  path = tmp_path / 'pid'
  call = door(tmp_path)
  call['args'].append(str(path))
  with subprocess.Popen(**call, stdout=subprocess.DEVNULL) as program:
    wait_until(path.exists)
    worker = int(path.read_text())
    assert is_alive(worker)
    program.kill()
  wait_until(lambda: not is_alive(worker))


def test_script_without_a_main_guard_is_told_so(tmp_path):
  text = DOOR.replace("if __name__ == '__main__':\n  main()", 'main()')
  assert text != DOOR
  done = subprocess.run(
      **door(tmp_path, text.replace('  import jax\n', '')),
      capture_output=True,
      timeout=WAIT_S,
      check=False,
  )
  assert done.returncode == 1
  assert 'work stand under "if __name__ ==' in done.stderr


@pytest.mark.parametrize(
    'workers, timeout_s, message',
    [(0, 1.0, 'workers is 0'), (1, 0.0, 'timeout_s is 0.0')],
)
def test_impossible_pool_is_refused(workers, timeout_s, message):
  with pytest.raises(ConfigError, match=message):
    KillablePool(workers, timeout_s)
