"""One of two jax processes on the CPU: what each part of the package refuses.

Arguments: address of the coordinator, own number, a folder. It prints one line
for each refusal, 'name: text'.
"""

import pathlib
import sys

import jax
from jax.sharding import NamedSharding, PartitionSpec
import numpy as np

from areal_jax import convert, evaluate, replay, serve, session
from areal_jax.config import ConfigError
from areal_jax.doctor import __main__ as doctor
from areal_jax.mesh.crossing import Crossing
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import MeshSettings, machine_devices, mesh_of
from areal_jax.models import hf, parameters
from tests import small_experiment, tiny


def refused(name, work):
  try:
    work()
  except (ConfigError, ValueError) as error:
    print(f'{name}: {type(error).__name__}: {error}', flush=True)


def doors(folder):
  """The commands that use devices."""

  def made():
    return small_experiment.experiment(folder, policy__path=str(folder))

  asked = evaluate.Asked(made(), '')
  serving = serve.Serving(made(), True, '', 9000, 0.0, 0, 1.0, 0.0)
  diagnosis = doctor.Asked(made(), False, 1)
  refused('run', lambda: session.run(made()))
  refused('replay', lambda: replay.run(made()))
  refused('evaluate', lambda: evaluate.evaluate(asked))
  refused('serve', lambda: serve._serve(serving))
  refused('doctor', lambda: doctor.diagnose(diagnosis, []))
  asks = convert.Conversion(str(folder), str(folder))
  refused('convert', lambda: convert._from_ours(asks, folder))
  refused('devices', lambda: machine_devices(MeshSettings()))


def values(folder):
  """Parameters that lie over the devices of both processes."""
  own, mesh = mesh_of(jax.local_devices()), mesh_of(jax.devices(), data=2)
  spread = NamedSharding(mesh, PartitionSpec('data'))

  def over(leaf):
    leaf = np.asarray(leaf)
    fits = leaf.ndim and leaf.shape[0] % 2 == 0
    sharding = spread if fits else NamedSharding(mesh, PartitionSpec())
    return jax.make_array_from_callback(
        leaf.shape, sharding, lambda index: leaf[index]
    )

  params = jax.tree.map(
      over, parameters.init_params(tiny.config(), 0, own, Rules())
  )
  refused('save_hf', lambda: hf.save_hf(folder, tiny.config(), params))
  crossing = Crossing(
      params, [jax.tree.map(lambda leaf: leaf.sharding, params)]
  )
  refused('crossing', lambda: crossing(params))


if __name__ == '__main__':
  address, number, place = sys.argv[1:]
  jax.config.update('jax_platforms', 'cpu')
  jax.config.update('jax_num_cpu_devices', 1)
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  jax.distributed.initialize(address, 2, int(number))
  doors(pathlib.Path(place))
  values(pathlib.Path(place) / 'policy')
