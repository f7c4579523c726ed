"""A whole step of reinforcement learning beside other systems' loops.

  python -m benchmarks.loop --tunix=PYTHON --trl=PYTHON
  python -m benchmarks.loop --short

PYTHON are interpreters of environments of their own: one that has google-tunix
0.1.7, one that has trl and what it needs. Their part of the work is in
`benchmarks/peers`; without an interpreter the rows that compare with it are
left out. `--short` runs a small policy for a few steps, in about a minute: it
shows that all of it runs, and its figures mean nothing.

The policy is a Qwen2 of 4.2 M parameters (4 layers, width 256, 512 tokens), in
float32, with random weights but for its unembedding, which is 0 in all systems:
every token is as likely as any other. A step samples 8 answers to each of 8
prompts of 16 tokens, scores them and makes one update of AdamW by a
group-relative advantage, without a reference policy. The reward is a coin, and
the learning rate so low that answers keep their lengths. Either all answers
reach the limit of 64 tokens, or 19 of the 512 tokens end one, so that lengths
are geometric with mean 25 up to the limit.

Our side is `areal_jax.session.run` of an experiment with everything that a run
writes down, on one device that trains and generates in turn (eta 0), and on two
that do it side by side (eta 1); two pretended devices of a CPU share its cores.
The bars are those of eta 1, which is the default. Runs compile all their
programs, as the first ones on a machine do; one more run of eta 1 finds those
of the run before it.

*Tokens* are those of answers that a step has trained on, end included; a second
is one of wall time, over the steps behind the first ones. Each run is a process
of its own. Systems take turns, round by round, and a ratio is the median of the
rounds' ratios. *The end of step 1* is counted from the end of imports: weights,
programs, engines and all.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, Mapping, Sequence

from absl import app, flags
import numpy as np

from areal_jax import command, session
from areal_jax.mesh.slices import MeshSettings
from areal_jax.models import hf
from areal_jax.models.config import ModelConfig
from areal_jax.rewards.scorer import RewardSettings
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.evaluation import EvaluationSettings
from areal_jax.settings.experiment import Experiment
from areal_jax.settings.rollout import RolloutSettings
from areal_jax.settings.task import (
    PolicySettings,
    TaskSettings,
    TokenizerSettings,
)
from areal_jax.telemetry import run_folder
from areal_jax.telemetry.jsonl import read_jsonl
from areal_jax.tokenizer.sentencepiece_tokenizer import train_sentencepiece
from areal_jax.train.optimizer import OptimizerSettings
from areal_jax.train.packing import PackingSettings
from areal_jax.train.settings import TrainSettings
from benchmarks import generate, loop_task, report, serving

SYNC, ASYNC, KEPT = 'eta 0', 'eta 1', 'eta 1, programs kept'
_ETA = {SYNC: 0.0, ASYNC: 1.0, KEPT: 1.0}
_PEERS = {'Tunix': 'tunix_loop.py', 'TRL': 'trl_loop.py'}
_SCRIPTS = pathlib.Path(__file__).parent / 'peers'
_WAIT_S = 1800.0

# Steps: of ours and of others, and those of each that are not counted. The
# second step of others may compile again; our second one may find answers
# ready that were sampled while the first was waited for.
_OURS, _OTHERS = (20, 4), (8, 2)
_SHORT_OURS, _SHORT_OTHERS = (6, 2), (3, 1)


@dataclasses.dataclass(frozen=True)
class Work:
  """Steps of one part of the table.

  Attributes:
    name: of the part.
    limit: tokens that an answer may have.
    stops: m of the V tokens end an answer; 0 for answers that all reach the
      limit.
    packing: shapes of our train step.
    bars: of our tokens a second over another system's, by its name.
    prompts: of a step.
    group: answers to each.
  """

  name: str
  limit: int
  stops: int
  packing: PackingSettings
  bars: Mapping[str, str]
  prompts: int = 8
  group: int = 8

  @property
  def answers(self) -> int:
    """Of a step."""
    return self.prompts * self.group

  def stop_ids(self) -> tuple[int, ...]:
    return tuple(range(1, 1 + self.stops))

  def as_json(self, vocabulary: int, steps: int) -> dict[str, Any]:
    """The same work as other systems take it: prompts [steps, prompts, T]."""
    shape = (steps, self.prompts, loop_task.PROMPT)
    drawn = np.random.default_rng(0).integers(1, vocabulary, shape)
    return {
        'prompts': drawn.tolist(),
        'group': self.group,
        'limit': self.limit,
        'stop_ids': list(self.stop_ids()),
    }


@dataclasses.dataclass(frozen=True)
class Plan:
  """All that is measured.

  Attributes:
    model: the policy.
    works: in their order.
    ours: steps of our runs, and how many of them are not counted.
    others: the same of other systems.
  """

  model: ModelConfig
  works: tuple[Work, ...]
  ours: tuple[int, int]
  others: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Looped:
  """What one run of a system brought.

  Attributes:
    first: seconds from the end of imports to that of the first step.
    seconds: of each step that counts.
    tokens: of answers that each of them trained on.
  """

  first: float
  seconds: tuple[float, ...]
  tokens: tuple[int, ...]

  @property
  def throughput(self) -> float:
    """Tokens a second."""
    return sum(self.tokens) / sum(self.seconds)


def plan(short: bool) -> Plan:
  """The table of the top, or a small one."""
  model = generate.plan(short).model
  if short:
    few = dict(bars={}, prompts=2, group=4)
    return Plan(
        model,
        (
            Work('full 32', 32, 0, PackingSettings(48, 8), **few),
            Work('mean 13 of 32', 32, 4, PackingSettings(48, 8), **few),
        ),
        _SHORT_OURS,
        _SHORT_OTHERS,
    )
  return Plan(
      model,
      (
          Work(
              'full 64',
              64,
              0,
              PackingSettings(80, 64),
              {'Tunix': '>= 1.4'},
          ),
          Work(
              'mean 25 of 64',
              64,
              19,
              # 64 answers and their prompts fill 15 to 18 rows. Microbatches
              # of 16 and of 2 take less time, and one program more.
              PackingSettings(160, 6),
              {'Tunix': '>= 3', 'TRL': '>= 1.7'},
          ),
      ),
      _OURS,
      _OTHERS,
  )


def read(line: str, warm: int) -> Looped:
  """What a run says of itself.

  Args:
    line: {'first': seconds, 'steps': [[seconds, tokens] of each step but the
      first]} as JSON.
    warm: steps that are not counted, the first one included.

  Raises:
    ValueError: there are no others.
  """
  said = json.loads(line)
  steps = said['steps'][warm - 1 :]
  if not steps:
    count = 1 + len(said['steps'])
    raise ValueError(f'{count} steps, wanted more than warm={warm}')
  seconds, tokens = zip(*steps)
  return Looped(said['first'], seconds, tokens)


# Our own system.


def save_policy(folder: pathlib.Path, config: ModelConfig) -> None:
  """Writes the policy that all systems start from, with its tokenizer."""
  mesh = serving.one_device()
  params = serving.init_params(config, mesh)
  params = {**params, 'unembedding': 0 * params['unembedding']}
  with tempfile.TemporaryDirectory() as made:
    text = loop_task.text(config.vocab_size)
    path = pathlib.Path(made) / run_folder.TOKENIZER
    train_sentencepiece([text], path)
    files = {run_folder.TOKENIZER: path.read_bytes()}
  hf.save_hf(folder, config, params, files=files)


def experiment(
    policy: str, work: Work, eta: float, steps: int, output: str
) -> Experiment:
  """A run of a work.

  Args:
    policy: folder of `save_policy`.
    work: what to do.
    eta: 0 on one device, more on two.
    steps: training steps.
    output: folder of the runs.
  """
  return Experiment(
      name='loop',
      output=output,
      steps=steps,
      task=TaskSettings(
          problems='benchmarks.loop_task:problems', eval_problems=1
      ),
      tokenizer=TokenizerSettings(path=policy, add_bos=False),
      policy=PolicySettings(path=policy),
      mesh=MeshSettings(colocated=eta == 0),
      rollout=RolloutSettings(
          batch_size=work.prompts,
          group_size=work.group,
          eta=eta,
          max_new_tokens=work.limit,
          stop_at_eos=False,
          stop_ids=work.stop_ids(),
          engine=EngineSettings(
              slots=work.answers,
              max_length=loop_task.PROMPT + work.limit,
              max_prompt_length=loop_task.PROMPT,
              # Fewer lengths to compile for than with smaller pages.
              page_size=32,
              max_stop_ids=max(4, work.stops),
          ),
      ),
      train=TrainSettings(
          packing=work.packing,
          optimizer=OptimizerSettings(learning_rate=1e-5),
      ),
      reward=RewardSettings('benchmarks.loop_task:reward'),
      evaluation=EvaluationSettings(before=False, show=0),
  )


def run_ours(text: str) -> None:
  """Runs an experiment in this process and prints what came of it.

  Args:
    text: the arguments of `experiment`, those of its work inside, as JSON.
  """
  start = time.monotonic()
  given = json.loads(text)
  work = given.pop('work')
  shapes = PackingSettings(**_tupled(work.pop('packing')))
  work = Work(**work, packing=shapes)
  result = session.run(experiment(work=work, **given))
  events = read_jsonl(result.folder / run_folder.EVENTS)
  said = told(events, start)
  said['recompiles'] = result.summary['recompiles_after_warmup']
  print(json.dumps(said))


def told(events: Sequence[Mapping[str, Any]], start: float) -> dict[str, Any]:
  """What `read` takes, of the events of a run that began at a moment."""
  spans = [e for e in events if e['kind'] == 'step']
  spans.sort(key=lambda span: span['mono'])
  ends = [span['mono'] + span['duration'] for span in spans]
  tokens = [int(span['fields']['tokens']) for span in spans]
  return {
      'first': ends[0] - start,
      'steps': [[b - a, n] for a, b, n in zip(ends, ends[1:], tokens[1:])],
  }


def _tupled(fields: Mapping[str, Any]) -> dict[str, Any]:
  return {n: tuple(v) if isinstance(v, list) else v for n, v in fields.items()}


# Processes.


class Bench:
  """Starts the runs, each in a process of its own.

  Args:
    chosen: what to measure.
    output: folder of the runs.
    pythons: interpreters of other systems, by name.
  """

  def __init__(
      self, chosen: Plan, output: pathlib.Path, pythons: Mapping[str, str]
  ):
    self._plan = chosen
    self._output = output
    self._pythons = pythons
    self._policy = output / 'policy'
    self._programs = output / 'programs'
    self.recompiles = 0
    save_policy(self._policy, chosen.model)

  @property
  def systems(self) -> list[str]:
    return [*_ETA, *self._pythons]

  def run(self, system: str, work: Work) -> Looped:
    """One run of a system.

    Raises:
      RuntimeError: it failed; the end of what it printed is in the text.
    """
    if system in _ETA:
      return self._run_ours(system, work)
    steps, warm = self._plan.others
    fields = serving.shape_of(self._plan.model)
    command = [
        self._pythons[system],
        str(_SCRIPTS / _PEERS[system]),
        json.dumps(fields),
    ]
    asked = work.as_json(self._plan.model.vocab_size, steps)
    return read(_last_line(command, json.dumps(asked)), warm)

  def _run_ours(self, system: str, work: Work) -> Looped:
    steps, warm = self._plan.ours
    given = {
        'policy': str(self._policy),
        'work': dataclasses.asdict(work),
        'eta': _ETA[system],
        'steps': steps,
        'output': str(self._output),
    }
    command = [
        sys.executable,
        '-c',
        'import sys; from benchmarks import loop; loop.run_ours(sys.argv[1])',
        json.dumps(given),
    ]
    if system != KEPT:
      shutil.rmtree(self._programs, ignore_errors=True)
    line = _last_line(command, '', {'XDG_CACHE_HOME': str(self._programs)})
    self.recompiles += json.loads(line)['recompiles']
    return read(line, warm)


def _last_line(
    command: Sequence[str], given: str, more: Mapping[str, str] = {}
) -> str:
  """The last line that a process prints on standard output.

  Args:
    command: its arguments.
    given: what it reads.
    more: of its environment.

  Raises:
    RuntimeError: it ended otherwise than well, or printed nothing.
  """
  # Whatever device we have, all run on the processors.
  environment = {'JAX_PLATFORMS': 'cpu', 'CUDA_VISIBLE_DEVICES': '', **more}
  inherited = dict(os.environ)
  inherited.pop('JAX_COMPILATION_CACHE_DIR', None)  # another place for programs
  done = subprocess.run(
      command,
      input=given,
      env={**inherited, **environment},
      capture_output=True,
      text=True,
      timeout=_WAIT_S,
  )
  lines = done.stdout.splitlines()
  if done.returncode or not lines:
    raise RuntimeError(
        f'{command[0]} {command[1]} ended with {done.returncode}:'
        f' {done.stderr[-2000:]}'
    )
  return lines[-1]


# The whole.


def rows(work: Work, found: Mapping[str, Sequence[Looped]]) -> list[report.Row]:
  """The figures of one work.

  Args:
    work: what was done.
    found: the runs of every system, round by round, ours under `SYNC`, `ASYNC`
      and, where there are some, `KEPT`.
  """
  at = f'{work.name}: '
  speeds = {name: [r.throughput for r in runs] for name, runs in found.items()}
  firsts = {name: [r.first for r in runs] for name, runs in found.items()}
  others = [name for name in found if name not in _ETA]
  lines = []
  for name, runs in found.items():
    trained = sum(sum(r.tokens) for r in runs)
    steps = sum(len(r.tokens) for r in runs)
    lines += [
        report.Row(f'{at}tokens/s, {name}', statistics.median(speeds[name])),
        report.Row(
            f'{at}tokens an answer, {name}', trained / steps / work.answers
        ),
        report.Row(
            f'{at}end of step 1, s, {name}', statistics.median(firsts[name])
        ),
    ]
  for name in others:
    for arm in (arm for arm in _ETA if arm in found):
      ratio = generate.ratio_of(speeds[arm], speeds[name])
      bar = work.bars.get(name, '') if arm == ASYNC else ''
      row = f'{at}times {name}, {arm}'
      lines.append(
          report.bounded(row, ratio, bar) if bar else report.Row(row, ratio)
      )
  if 'Tunix' in found:
    share = generate.ratio_of(firsts[ASYNC], firsts['Tunix'])
    row = f'{at}end of step 1 / that of Tunix'
    lines.append(report.bounded(row, share, '<= 0.5'))
  return lines


def measure(bench: Bench, works: Sequence[Work], rounds: int):
  """All rows; systems take turns."""
  lines: list[report.Row] = []
  for work in works:
    found: dict[str, list[Looped]] = {name: [] for name in bench.systems}
    for _ in range(rounds):
      for name, runs in found.items():
        runs.append(bench.run(name, work))
        print(f'{work.name}, {name}: {runs[-1].throughput:.0f} tokens/s')
    lines += rows(work, found)
  lines.append(
      report.bounded('compilations after warm-up', bench.recompiles, '<= 0')
  )
  return lines


def main(argv: Sequence[str]) -> None:
  """Prints the runs, the table and the JSON line."""
  del argv
  short = flags.FLAGS.short
  chosen = plan(short)
  given = {name: serving.interpreter_of(name) for name in _PEERS}
  pythons = {name: python for name, python in given.items() if python}
  with tempfile.TemporaryDirectory() as scratch:
    bench = Bench(chosen, pathlib.Path(scratch), pythons)
    lines = measure(bench, chosen.works, 1 if short else flags.FLAGS.rounds)
  report.show('loop', lines)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'A small policy for a few steps.')
  flags.DEFINE_string('tunix', '', 'Interpreter that has google-tunix.')
  flags.DEFINE_string('trl', '', 'Interpreter that has trl and torch.')
  flags.DEFINE_integer('rounds', 3, 'Runs of each system.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
