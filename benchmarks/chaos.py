"""Does a run survive what goes wrong: `python -m benchmarks.chaos [--short]`.

The quickstart's model trains under random `kill -9`, rewards that hang, crash
and raise, reward workers that are killed, engines that die and hang, a slow
disk and corrupted checkpoints, once under each staleness policy. Then the books
are audited from the files that are left, and the table of all benchmarks says
what was found:

  fault: KIND       faults injected, a row for each kind
  lost              problems drawn that are neither trained, dropped with a
                    reason nor in flight: 0
  repeated          draws that are in two of these, or trained twice: 0
  bound_violations  tokens trained that are older than η, under the hard
                    policies (all but 'soft'): 0
  unexplained_waits of `waits`, the times over 5 s in which nothing moved, those
                    in which no message named a fault that was at work: 0

`--seconds=N` is the time under each policy from its first step on. Exit code 1
if one of the four is not 0.
"""

import argparse
import collections
import json
import os
import pathlib
import random
import re
import subprocess
import sys
import tempfile
import time

from benchmarks import report

ROOT = pathlib.Path(__file__).resolve().parent.parent
POLICIES = ('soft', 'drop', 'fifo', 'mask')
WAIT_S = 5.0
# What a message has to say where such a fault is at work.
NAMES = {
    'reward_hang': r'training: [1-9]\d* reward jobs',
    'engine_hang': r'engine 0: decodes for [1-9]',
    'slow_disk': r'the checkpoint of step \d+ is being written',
}
# Kinds of events that are waits themselves, or talk of them.
_STILL = ('wait', 'idle', 'silence', 'stall')
_MOST_S = 30.0  # a fault is at work for no longer


class Chaos:
  """One run under one policy, killed and started again until time is over."""

  def __init__(self, folder, policy, seed, seconds, kill_every):
    self.folder, self.policy, self.seed = folder, policy, seed
    self.run = folder / policy
    self.log = folder / f'{policy}.faults'
    self.said = folder / f'{policy}.said'
    self.seconds, self.kill_every = seconds, kill_every
    self.random = random.Random(f'{seed} {policy}')
    self.attempts = 0
    self.end = None  # monotonic second, once it trains

  def survive(self):
    """Until the time is over; then it is asked to end, and has to."""
    over = False
    while not over:
      life = max(5.0, self.random.expovariate(1 / self.kill_every))
      child = self.start()
      try:
        over = not self.trained(child, life)
        if over:
          self.settle(child)
        else:
          self.fault('kill')
      finally:
        child.kill()
        child.wait()
      if not over and self.random.random() < 0.5:
        self.corrupt()

  def start(self):
    self.attempts += 1
    with open(self.said, 'ab') as said:
      return subprocess.Popen(
          [sys.executable, '-m', 'benchmarks.chaos_child',
           str(self.folder), self.policy, str(self.seed)],
          cwd=ROOT,
          stdout=said,
          stderr=said,
          env={**os.environ, 'AREAL_CHAOS_LOG': str(self.log),
               'PYTHONPATH': str(ROOT)},
      )  # fmt: skip

  def trained(self, child, seconds):
    """Lets it train for so long; false if the time is over before."""
    since = None
    while since is None or time.monotonic() < since + seconds:
      self.require_alive(child)
      if since is None and self.trains(child):
        since = time.monotonic()
        self.end = self.end or since + self.seconds
      if self.end is not None and time.monotonic() > self.end:
        return False
      time.sleep(0.05)
    return True

  def trains(self, child):
    """Whether this attempt has done a step: it writes down its own number."""
    told = self.log.with_suffix('.alive')
    return told.exists() and told.read_text() == str(child.pid)

  def require_alive(self, child):
    if child.poll() is not None:
      raise RuntimeError(
          f'it ended with code {child.returncode}:\n'
          + self.said.read_text()[-4000:]
      )

  def settle(self, child):
    """SIGTERM: it saves, and leaves with the code of the signal."""
    end = time.monotonic() + 120
    while not self.trains(child) and time.monotonic() < end:
      self.require_alive(child)
      time.sleep(0.1)
    child.terminate()
    code = child.wait(120)
    if code != 143:
      raise RuntimeError(
          f'after SIGTERM it left with code {code}, wanted 143:\n'
          + self.said.read_text()[-4000:]
      )

  def corrupt(self):
    """Changes a byte of the newest checkpoint, if it is not the only one."""
    whole = sorted(self.run.glob('checkpoints/*/COMMITTED'))
    if len(whole) < 2:
      return
    files = [p for p in whole[-1].parent.rglob('*') if p.is_file()]
    file = self.random.choice([p for p in files if p.stat().st_size])
    content = bytearray(file.read_bytes())
    content[self.random.randrange(len(content))] ^= 1
    file.write_bytes(content)
    self.fault('corrupted_checkpoint')

  def fault(self, kind):
    with open(self.log, 'a', encoding='utf-8') as log:
      log.write(json.dumps({'kind': kind, 'wall': time.time()}) + '\n')


def rows(path):
  """Whole lines of a JSON lines file."""
  if not path.exists():
    return []
  found = []
  for line in path.read_text(encoding='utf-8').splitlines():
    try:
      found.append(json.loads(line))
    except json.JSONDecodeError:
      break  # cut off by a kill
  return found


def audit(run, log, policy, eta):
  """What the files of a run say; see the head of this file."""
  # pylint: disable=g-import-not-at-top
  from areal_jax import resume
  from areal_jax.train import checkpoint

  saved, _ = checkpoint.latest(run / 'checkpoints')
  snapshot = resume.read(saved).snapshot
  samples, events = rows(run / 'samples.jsonl'), rows(run / 'events.jsonl')
  pairs = [(s['draw_index'], s['sample']) for s in samples]
  places = collections.Counter({draw for draw, _ in pairs})
  places.update(e['draw_index'] for e in events if e['kind'] == 'drop')
  places.update(g.draw_index for g in snapshot.ready)
  places.update(d.draw_index for d in snapshot.running)
  drawn = snapshot.ledger.drawn
  steps = [r for r in rows(run / 'metrics.jsonl') if 'loss' in r]
  violations = 0
  if policy != 'soft':
    violations += sum(r.get('staleness_max', 0) > eta for r in steps)
  if policy in ('drop', 'fifo'):
    violations += sum(
        s['step'] - 1 - min(s['versions'], default=0) > eta
        for s in samples
        if s['versions']
    )
  waits, unexplained = explained(events, rows(log))
  return {
      'steps': len(steps),
      'drawn': drawn,
      'trained': len({draw for draw, _ in pairs}),
      'dropped': snapshot.ledger.dropped.total(),
      'in_flight': snapshot.ledger.outstanding,
      'lost': len(set(range(drawn)) - places.keys()),
      'repeated': sum(n - 1 for n in places.values())
      + len(pairs)
      - len(set(pairs)),
      'bound_violations': violations,
      'waits': waits,
      'unexplained_waits': unexplained,
  }


def explained(events, faults):
  """How often nothing moved for long, and how often nobody knew why."""
  waits = unexplained = 0
  attempts = collections.defaultdict(list)
  for event in events:
    attempts[event['attempt']].append(event)
  for own in attempts.values():
    shift = own[0]['wall'] - own[0]['mono']
    begun = min((e['mono'] for e in own if e['kind'] == 'admit'), default=None)
    if begun is None:
      continue
    moments = sorted(
        moment
        for e in own
        if e['kind'] not in _STILL
        for moment in (e['mono'], e['mono'] + (e['duration'] or 0.0))
        if moment >= begun
    )
    told = [(e['mono'], e['reason']) for e in own if e['kind'] == 'silence']
    for start, end in zip(moments, moments[1:]):
      if end - start <= WAIT_S:
        continue
      waits += 1
      active = {
          f['kind'] for f in faults if start - _MOST_S < f['wall'] - shift < end
      }
      named = any(
          re.search(NAMES[kind], reason)
          for at, reason in told
          if start <= at <= end
          for kind in active & NAMES.keys()
      )
      unexplained += not named
  return waits, unexplained


# What has to be 0.
BARS = ('lost', 'repeated', 'bound_violations', 'unexplained_waits')


def figures(found, faults, attempts, seconds):
  """The rows of the report.

  Args:
    found: what `audit` counted, summed over the policies.
    faults: number of injected faults by kind.
    attempts: processes started.
    seconds: that it all took.
  """
  counts = [
      report.bounded(name, value, '<= 0')
      if name in BARS
      else report.Row(name, value)
      for name, value in found.items()
  ]
  kinds = [report.Row(f'fault: {k}', n) for k, n in sorted(faults.items())]
  spent = [report.Row('seconds', seconds), report.Row('attempts', attempts)]
  return [*counts, *kinds, *spent]


def main():
  """Prints the table and the JSON line; returns 1 if a bar is not met."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n', 1)[0])
  parser.add_argument('--short', action='store_true', help='two minutes')
  parser.add_argument('--seconds', type=float, default=100.0)
  parser.add_argument('--seed', type=int, default=0)
  parser.add_argument('--folder', default='')
  asked = parser.parse_args()
  policies, seconds, kill_every = POLICIES, asked.seconds, 20.0
  if asked.short:
    policies, seconds, kill_every = ('fifo',), 30.0, 8.0
  start = time.monotonic()
  with tempfile.TemporaryDirectory(prefix='areal_jax_chaos_') as temporary:
    folder = pathlib.Path(asked.folder or temporary)
    folder.mkdir(parents=True, exist_ok=True)
    total = collections.Counter()
    faults = collections.Counter()
    attempts = 0
    for policy in policies:
      chaos = Chaos(folder, policy, asked.seed, seconds, kill_every)
      chaos.survive()
      attempts += chaos.attempts
      faults.update(row['kind'] for row in rows(chaos.log))
      found = audit(chaos.run, chaos.log, policy, 2.0)
      print(policy, found, file=sys.stderr)
      total.update(found)
  seconds = round(time.monotonic() - start, 1)
  found = figures(total, faults, attempts, seconds)
  report.show('chaos', found)
  return int(not all(row.met for row in found))


if __name__ == '__main__':
  sys.exit(main())
