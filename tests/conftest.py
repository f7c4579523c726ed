"""Eight pretended CPU devices for every test, and where outside data lies."""

import os
import pathlib
import tempfile

# Before jax starts: XLA sizes its thread pool from NPROC, and two slices that
# dispatch collectives side by side deadlock in a smaller pool.
os.environ.setdefault('NPROC', '16')
os.environ['JAX_PLATFORMS'] = 'cpu'
# As `mesh/host.py` has it where a run begins.
os.environ['JAX_CPU_ENABLE_ASYNC_DISPATCH'] = 'false'
_FLAGS = (
    '--xla_force_host_platform_device_count=8',
    '--xla_backend_optimization_level=1',
)
_there = os.environ.get('XLA_FLAGS', '').split()
os.environ['XLA_FLAGS'] = ' '.join(
    [*_there, *(flag for flag in _FLAGS if flag not in _there)]
)

# Many tests build the same small programs; each is compiled once a test run.
_CACHE = tempfile.TemporaryDirectory(prefix='areal_jax_compiled_')
os.environ['JAX_COMPILATION_CACHE_DIR'] = _CACHE.name
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'

import pytest  # noqa: E402

ROOT = pathlib.Path(__file__).resolve().parent.parent


def _outside(variable: str, default: str) -> pathlib.Path:
  folder = pathlib.Path(os.environ.get(variable) or ROOT / default)
  if not folder.is_dir():
    pytest.skip(f'{variable}: no folder {folder}')
  return folder


@pytest.fixture(scope='session')
def golden_dir() -> pathlib.Path:
  """Outputs of other people's implementations (AREAL_GOLDEN)."""
  return _outside('AREAL_GOLDEN', '../shared/golden')


@pytest.fixture(scope='session')
def data_dir() -> pathlib.Path:
  """Real data sets, tokenizers and small models (AREAL_DATA)."""
  return _outside('AREAL_DATA', '../shared/data')
