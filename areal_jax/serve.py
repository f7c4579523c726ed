"""Serving a trained policy over gRPC, by the stock JetStream orchestrator.

  python -m areal_jax.serve --config=experiments/quickstart.py \\
    --run=runs/quickstart --jetstream

The config says the shapes of the engine (`config.rollout.engine`, on the
devices of one replica of `config.mesh.rollout`); `--run` names the policy and
tokenizer of a finished run. `--config.policy.path` names a policy of anywhere
else, and `--config.tokenizer.path` a tokenizer that does not lie with it.
SIGTERM or Ctrl-C ends it.

Exit codes: 0 ended by a signal, 1 it failed, 2 mistakes in the settings (a line
each on standard error).
"""

from __future__ import annotations

import dataclasses
import errno
import signal
import socket
import threading
import typing
from typing import Any

from absl import app, flags

from areal_jax import command
from areal_jax.config import ConfigError, require
from areal_jax.types import SAMPLING_RULES

if typing.TYPE_CHECKING:
  from areal_jax.mesh.slices import MeshSettings
  from areal_jax.prepare.prepared import PreparedPolicy
  from areal_jax.settings.experiment import Experiment


@dataclasses.dataclass(frozen=True)
class Serving:
  """The parsed command line."""

  experiment: Experiment
  jetstream: bool
  run: str
  port: int
  temperature: float
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0

  @property
  def choice(self) -> dict[str, float]:
    """Returns how tokens are chosen, as settings of `SamplingParams`.

    Raises:
      ConfigError: a value that is none.
    """
    chosen = {}
    for name in ('temperature', 'top_k', 'top_p', 'min_p'):
      chosen[name] = value = getattr(self, name)
      right, wanted = SAMPLING_RULES[name]
      require(right(value), f'--{name}', value, wanted)
    return chosen


def read_flags(argv: list[str]) -> Serving:
  """Parses the flags of this program.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  flags.DEFINE_bool('jetstream', False, 'Serve by the JetStream orchestrator.')
  flags.DEFINE_string('run', '', 'Folder of the run whose policy to serve.')
  flags.DEFINE_integer('port', 9000, 'Port.', lower_bound=1, upper_bound=65535)
  flags.DEFINE_float(
      'temperature', 0.0, 'Of all answers; 0 is greedy.', lower_bound=0.0
  )
  flags.DEFINE_integer('top_k', 0, 'Draw from so many tokens; 0 is off.')
  flags.DEFINE_float('top_p', 1.0, 'Draw from so much mass; 1 is off.')
  flags.DEFINE_float('min_p', 0.0, 'Least share of the best; 0 is off.')
  experiment = command.read_flags(argv)
  given = flags.FLAGS
  return Serving(
      experiment, given.jetstream, given.run, given.port, given.temperature,
      given.top_k, given.top_p, given.min_p,
  )  # fmt: skip


def main(serving: Serving) -> int:
  """Serves until a signal; returns the exit code."""
  return command.exit_code(_serve, serving)


def _serve(serving: Serving) -> None:
  if not serving.jetstream:
    raise ConfigError(
        '--jetstream is missing, wanted it: the OpenAI-compatible endpoint'
        ' comes later'
    )
  choice = serving.choice
  # pylint: disable=g-import-not-at-top
  from areal_jax.mesh.slices import devices_first
  from areal_jax.prepare.prepared import prepare_policy

  if serving.run:
    command.point_to_run(serving.experiment, serving.run)
  with devices_first(serving.experiment.mesh, shape=_alone):
    policy = prepare_policy(serving.experiment, **choice)
  require(not policy.sampling.stop_strings, 'config.rollout.stop_strings',
          policy.sampling.stop_strings, 'none with --jetstream, whose answers'
          ' end at stop ids alone')  # fmt: skip
  _check_port(serving.port)
  asked = threading.Event()
  server = _start(policy, serving.port)
  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda *_: asked.set())
  print(
      f'{policy.settings.policy.path} answers JetStream requests (gRPC) on port'
      f' {serving.port}',
      flush=True,
  )
  asked.wait()
  server.stop()


def _check_port(port: int) -> None:
  """Refuses a port that is taken, which gRPC would share with its owner."""
  with socket.socket() as taken:
    try:
      taken.bind(('', port))
    except OSError as error:
      reason = errno.errorcode.get(error.errno, error.strerror)
      raise ConfigError(
          f'--port is {port}, wanted one that is free ({reason})'
      ) from error


def _alone(mesh: MeshSettings) -> MeshSettings:
  """One engine: the orchestrator would put prefixes of one into another."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.mesh.slices import generation_only

  return generation_only(dataclasses.replace(mesh.rollout, replicas=1))


def _start(policy: PreparedPolicy, port: int) -> Any:
  """The running server of a policy, everything compiled."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.build import served_policy
  from areal_jax.mesh.program_cache import keep_programs
  from areal_jax.mesh.rules import Rules
  from areal_jax.mesh.slices import cut, machine_devices
  from areal_jax.rollout import jetstream
  from areal_jax.rollout.engine import Engine

  settings, rules = policy.settings, Rules().for_rollout()
  shape = _alone(settings.mesh)
  keep_programs()
  (mesh,) = cut(machine_devices(shape), shape).rollout
  model, params = served_policy(policy, mesh, rules)
  engine = jetstream.JetStreamEngine(
      Engine(model, settings.rollout.engine, mesh, rules),
      params,
      tokenizer_path=policy.tokenizer.path,
      add_bos=settings.tokenizer.add_bos,
      sampling=policy.sampling,
  )
  engine.warm_up()
  return jetstream.start(engine, port)


if __name__ == '__main__':
  app.run(main, flags_parser=read_flags)
