"""Evaluating a trained policy, without training.

  python -m areal_jax.evaluate --run=runs/quickstart \\
    --config.evaluation.samples=8 --config.evaluation.temperature=1.0

`--run` names the folder of a finished run: its policy, its tokenizer, and its
settings unless `--config` names others. Without it, `--config=FILE` says all,
with `--config.policy.path`, and `--config.tokenizer.path` where no tokenizer
lies with the policy. The evaluation problems are asked on
`config.mesh.rollout`; no device trains. Tables go to standard output;
`evaluation.json`, and every answer in `evaluation.jsonl`, into the folder of
the run, or into a new one under `config.output`.

Exit codes: 0 done, 1 it failed, 2 mistakes in the settings (a line each on
standard error, nothing written), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import pathlib
import re
import sys
import tempfile
import time
import typing

from absl import app, flags

from areal_jax import command
from areal_jax.config import ConfigError, require, to_dict
from areal_jax.telemetry import jsonl, run_folder

if typing.TYPE_CHECKING:
  from areal_jax.prepare.prepared import Prepared
  from areal_jax.rollout.evaluation import Evaluation
  from areal_jax.settings.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Asked:
  """The parsed command line; `run` is empty if none was given."""

  experiment: Experiment
  run: str


def read_flags(argv: list[str]) -> Asked:
  """Parses the flags of this program.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  flags.DEFINE_string('run', '', 'Folder of the run whose policy to evaluate.')
  experiment = command.read_flags(require_run(argv))
  return Asked(experiment, flags.FLAGS.run)


def require_run(argv: list[str]) -> list[str]:
  """`with_config`, where the run is there.

  Raises:
    SystemExit: with code 2, after one line that says that it is not.
  """
  line = with_config(argv)
  if line != argv:
    folder = pathlib.Path(line[1].removeprefix('--config=')).parent
    if not (folder / run_folder.CONFIG).is_file():
      wanted = f'the folder of a run, with {run_folder.CONFIG!r} in it'
      mistake = f'--run is {str(folder)!r}, wanted {wanted}'
      sys.exit(command.complain(ConfigError(mistake)))
  return line


def with_config(argv: list[str]) -> list[str]:
  """The command line, with the settings of its run where it names no others."""
  line = ' '.join(argv[1:])
  run = re.search(r'(?:^| )--?run[= ](\S+)', line)
  if run is None or re.search(r'(?:^| )--?config[= ]', line):
    return argv
  return [argv[0], f'--config={run[1]}/{run_folder.CONFIG}', *argv[1:]]


def main(asked: Asked) -> int:
  """Evaluates and prints; returns the exit code."""
  return command.exit_code(evaluate, asked)


def evaluate(asked: Asked) -> Evaluation:
  """Evaluates what the command line names, prints it and writes it down.

  Raises:
    ConfigError: a mistake in the settings; nothing was written.
  """
  # pylint: disable=g-import-not-at-top
  from areal_jax.mesh.slices import devices_first, generation_only
  from areal_jax.prepare.prepared import prepare
  from areal_jax.rollout.evaluation import table_text
  from areal_jax.telemetry.health import Health

  started = time.monotonic()
  experiment = asked.experiment
  if asked.run:
    command.point_to_run(experiment, asked.run)
  require(
      bool(experiment.policy.path), 'config.policy.path', '',
      'the folder of a trained policy, or --run=FOLDER of a finished run',
  )  # fmt: skip
  experiment.warm_start.steps = 0  # it asks for demonstrations
  with devices_first(
      experiment.mesh, shape=lambda mesh: generation_only(mesh.rollout)
  ):
    prepared = prepare(experiment)
  with tempfile.TemporaryDirectory() as place:
    printed = pathlib.Path(place) / run_folder.REWARD_OUTPUT
    result = _ask(prepared, _version(asked.run), printed)
    output = printed.read_bytes()
  settings = prepared.settings
  if asked.run:
    folder = pathlib.Path(asked.run)
  else:
    folder = run_folder.new_run_folder(settings.output, settings.name)
  path = _write(folder, prepared, result, time.monotonic() - started)
  if output:
    log = path.with_name(f'{path.stem}-{run_folder.REWARD_OUTPUT}')
    log.write_bytes(output)
    print(f'the reward prints; all of it is in {log}', file=sys.stderr)
  print(table_text(result))
  health = Health(lambda line: print(line, file=sys.stderr))
  health.look(result.version, result.metrics())
  print(f'version {result.version}; see {path}')
  return result


def _version(run: str) -> int:
  """Returns the version of a run's policy; 0 where it is not recorded."""
  file = pathlib.Path(run) / run_folder.SUMMARY
  if not run or not file.is_file():
    return 0
  return json.loads(file.read_text())['steps']


def _ask(prepared: Prepared, version: int, printed: pathlib.Path) -> Evaluation:
  """Loads the policy onto the rollout meshes and evaluates it there.

  Args:
    prepared: the policy and the problems.
    version: of the policy.
    printed: file that gets what the reward prints.
  """
  # pylint: disable=g-import-not-at-top
  import jax

  from areal_jax.build import served_policy
  from areal_jax.cluster.evaluations import Evaluations
  from areal_jax.cluster.local import (
      AsyncThread,
      build_evaluator,
      build_rollout,
      require_memory,
  )
  from areal_jax.mesh.program_cache import keep_programs
  from areal_jax.mesh.rules import Rules
  from areal_jax.mesh.slices import cut, generation_only, machine_devices
  from areal_jax.rewards.scorer import Scorer
  from areal_jax.rollout.workflow import WorkflowContext, build_workflow
  from areal_jax.telemetry.events import EventLog

  settings, model, rules = prepared.settings, prepared.model, Rules()
  shape = generation_only(settings.mesh.rollout)
  keep_programs()
  slices = cut(machine_devices(shape), shape)
  dtype = settings.rollout.dtype
  engine = settings.rollout.engine
  require_memory(model, engine, slices, rules, dtype=dtype, trains=False)
  reward = settings.reward
  with contextlib.ExitStack() as stack:
    events = stack.enter_context(EventLog(None))
    scorer = Scorer(reward.function, reward.workers, reward.timeout_s, printed)
    stack.callback(scorer.close)
    scorer.start()
    model, params = served_policy(
        prepared, slices.rollout[0], rules.for_rollout()
    )
    # Its loops for training are never started.
    engines = build_rollout(
        model, engine, slices, rules,
        swap='drain', events=events, dispatch_lock=None,
        tokenizer=prepared.tokenizer,
    )  # fmt: skip
    weights = [
        jax.device_put(params, loop.engine.param_shardings)
        for loop in engines.loops
    ]
    stack.callback(engines.close)
    for loop, placed in zip(engines.loops, weights, strict=True):
      loop.engine.compile_ahead(placed)
    thread = AsyncThread('evaluation')
    stack.callback(thread.stop)
    evaluator = build_evaluator(engines, events)
    stack.callback(evaluator.stop)
    evaluator.start()
    decode = lambda ids: prepared.tokenizer.decode(ids.tolist())
    workflow = build_workflow(
        settings.rollout.workflow,
        WorkflowContext(
            client=evaluator.client,
            render=prepared.prompt_ids,
            decode=decode,
            score=lambda draw, text: scorer(draw.problem, text),
            sampling=prepared.evaluation_sampling,
            clock=time.monotonic,
        ),
    )
    evaluations = Evaluations(
        evaluator,
        thread,
        settings=settings.evaluation,
        problems=prepared.evaluation,
        workflow=workflow,
        decode=decode,
        vote=settings.evaluation.load_vote('config.evaluation'),
        events=events,
        done=lambda result: None,
        wait_s=settings.rollout.wait_s,
    )
    evaluations.start(version, weights)
    return evaluations.wait()


def _write(
    folder: pathlib.Path,
    prepared: Prepared,
    result: Evaluation,
    seconds: float,
) -> pathlib.Path:
  """Writes statistics and answers, overwriting none; returns the former."""
  for number in itertools.count(1):
    name = 'evaluation' if number == 1 else f'evaluation-{number}'
    path = folder / f'{name}.json'
    if not path.exists():
      break
  with open(path.with_suffix('.jsonl'), 'w', encoding='utf-8') as file:
    file.writelines(jsonl.line(row) for row in result.rows())
  report = {'wall_s': seconds, 'config': to_dict(prepared.settings)}
  run_folder.write_json(path, result.to_dict() | report)
  return path


if __name__ == '__main__':
  sys.exit(app.run(main, flags_parser=read_flags))
