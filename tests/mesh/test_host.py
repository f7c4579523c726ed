"""Settings of the host, each in a process of its own."""

import os
import socket
import subprocess
import sys

import pytest

from areal_jax.mesh import host
from tests.limits import WAIT_S

CODE = """
import resource
import numpy as np
from areal_jax.mesh.host import keep_freed_memory

if {keep}:
  assert keep_freed_memory()

def touch():
  np.ones(2**23)  # 64 MB, freed at once

touch()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
  touch()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


PROGRAM = """
import resource
import jax, jax.numpy as jnp
from areal_jax.mesh.host import keep_freed_memory
from areal_jax.mesh.slices import MeshSettings, machine_devices

if {keep}:
  machine_devices(MeshSettings(colocated=True))
else:  # planted fault: a thread of XLA's runs the program, from its own heap
  assert keep_freed_memory()

x, w = jnp.ones((2**18, 64)), jnp.ones((64, 64))
program = jax.jit(lambda x: jnp.sin(jnp.tanh(x @ w) @ w).sum(0))  # twice 64 MB
for _ in range(3):
  program(x).block_until_ready()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
  program(x).block_until_ready()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool, code: str = CODE) -> int:
  child = subprocess.run(
      [sys.executable, '-c', code.format(keep=keep)],
      env={**os.environ, 'JAX_PLATFORMS': 'cpu'},
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert child.returncode == 0, child.stderr
  return int(child.stdout)


@pytest.mark.skipif(sys.platform != 'linux', reason='settings of glibc')
def test_freed_memory_is_used_again_without_page_faults():
  kept, returned = faults(True), faults(False)
  # 16,384 pages of 4 kB each time, or a few huge ones.
  assert kept < returned / 10


@pytest.mark.skipif(sys.platform != 'linux', reason='settings of glibc')
def test_programs_of_the_main_thread_use_its_memory_again():
  # 32,768 pages at a time, if programs map and unmap their memory.
  assert faults(True, PROGRAM) < faults(False, PROGRAM) / 10


@pytest.mark.parametrize(
    'asked, expected', [('cpu', True), ('tpu', False), ('cuda,cpu', False)]
)
def test_what_jax_is_asked_for_says_whether_the_host_computes(
    monkeypatch, asked, expected
):
  monkeypatch.setenv('JAX_PLATFORMS', asked)
  assert host.computes() == expected


@pytest.mark.parametrize('there', [True, False])
def test_device_files_say_it_where_jax_is_asked_for_nothing(
    monkeypatch, tmp_path, there
):
  monkeypatch.delenv('JAX_PLATFORMS', raising=False)
  monkeypatch.setattr(host, '_DEVICE_FILES', (f'{tmp_path}/accel*',))
  if there:
    (tmp_path / 'accel0').touch()
  assert host.computes() != there


EFFORT = """
import os
import jax, jax.numpy as jnp
from areal_jax.mesh.slices import MeshSettings, machine_devices

machine_devices(MeshSettings(colocated=True))
jax.jit(lambda x: jnp.exp(x).sum())(jnp.ones(1000)).block_until_ready()
print(os.environ['XLA_FLAGS'])
"""


@pytest.mark.parametrize(
    'asked, expected',
    [
        ('', '--xla_backend_optimization_level=1'),
        (
            '--xla_force_host_platform_device_count=2',
            '--xla_force_host_platform_device_count=2'
            ' --xla_backend_optimization_level=1',
        ),
        (
            '--xla_backend_optimization_level=3',
            '--xla_backend_optimization_level=3',
        ),
    ],
)
def test_programs_of_a_run_are_compiled_with_less_effort_unless_asked(
    asked, expected
):
  child = subprocess.run(
      [sys.executable, '-c', EFFORT],
      env={**os.environ, 'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': asked},
      capture_output=True,
      text=True,
      timeout=WAIT_S,
  )
  assert (child.returncode, child.stdout.strip()) == (0, expected), child.stderr


def test_several_processes_are_refused_by_all_who_use_devices(tmp_path):
  """Two real ones on the CPU, joined by gloo; each is told in one line."""
  with socket.socket() as free:
    free.bind(('127.0.0.1', 0))
    address = f'127.0.0.1:{free.getsockname()[1]}'
  command = [sys.executable, '-m', 'tests.mesh.two_processes', address]
  pair = [
      subprocess.Popen(
          [*command, str(number), str(tmp_path / str(number))],
          stdout=subprocess.PIPE,
          stderr=subprocess.PIPE,
          text=True,
      )
      for number in range(2)
  ]
  try:
    outputs = [process.communicate(timeout=WAIT_S) for process in pair]
  finally:
    for process in pair:
      process.kill()
  for out, err in outputs:
    said = dict(line.split(': ', 1) for line in out.splitlines())
    for name in ('run', 'replay', 'evaluate', 'serve', 'doctor', 'convert',
                 'devices'):  # fmt: skip
      assert 'ConfigError: jax.process_count() is 2, wanted 1' in said.get(
          name, err
      )
    for name in ('save_hf', 'crossing'):
      assert 'this process has the parts of 1 of 2 devices' in said.get(
          name, err
      )
