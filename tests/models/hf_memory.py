"""A process of its own: how much host memory reading and writing take.

  python -m tests.models.hf_memory FOLDER

makes a policy of random numbers in the folder, cuts it over four devices, and
prints JSON: for each way of reading and writing, by how much the peak of host
memory exceeded what it was before. Two of the ways are planted: they hold all
tensors at once.

Pages of mapped files are not counted: the kernel takes them back when it likes.
"""

import json
import pathlib
import sys
import threading

import jax
import numpy as np
from safetensors import numpy as st

from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, parameters
from areal_jax.models.config import ModelConfig
from tests import tiny

CONFIG = ModelConfig(
    vocab_size=32768,
    width=128,
    layers=8,
    heads=4,
    kv_heads=2,
    head_size=16,
    mlp_width=8192,
)


class Peak:
  """The most that this process held in memory while inside, in bytes."""

  def __enter__(self):
    self._before = self._most = anonymous_bytes()
    self._stop = threading.Event()
    self._thread = threading.Thread(target=self._watch)
    self._thread.start()
    return self

  def __exit__(self, *_):
    self._stop.set()
    self._thread.join()
    self.more = self._most - self._before

  def _watch(self):
    while not self._stop.wait(2e-4):
      self._most = max(self._most, anonymous_bytes())


def anonymous_bytes() -> int:
  """Resident memory of this process that lies in no file."""
  for line in pathlib.Path('/proc/self/status').read_text().splitlines():
    if line.startswith('RssAnon:'):
      return int(line.split()[1]) * 1024
  raise RuntimeError('/proc/self/status has no RssAnon')


def make(folder: pathlib.Path) -> None:
  generator = np.random.default_rng(0)
  params = jax.tree.map(
      lambda leaf: generator.standard_normal(leaf.shape, np.float32),
      parameters.abstract_params(CONFIG),
  )
  hf.save_hf(folder, CONFIG, params, limit=2 * 10**7)


def kept(params) -> list[int]:
  """Bytes of every part on every device."""
  return [
      shard.data.nbytes
      for leaf in jax.tree.leaves(params)
      for shard in leaf.addressable_shards
  ]


def main(folder: pathlib.Path) -> None:
  make(folder / 'hf')
  mesh = tiny.mesh(2, 2)
  hf.load_hf(folder / 'hf', mesh, Rules())  # whatever the first time sets up
  found = {}
  for dtype in ('float32', 'bfloat16'):
    with Peak() as peak:
      _, params = hf.load_hf(folder / 'hf', mesh, Rules(), dtype=dtype)
    parts = kept(params)
    found[f'read {dtype}'] = {
        'peak': peak.more,
        'kept': sum(parts),
        'largest': max(parts),
    }
    del params
  with Peak() as peak:
    held = [
        st.load_file(file) for file in (folder / 'hf').glob('*.safetensors')
    ]
    _, params = hf.load_hf(folder / 'hf', mesh, Rules())
    del held
  found['read whole'] = {**found['read float32'], 'peak': peak.more}
  largest = max(leaf.nbytes for leaf in jax.tree.leaves(params))
  with Peak() as peak:
    hf.save_hf(folder / 'out', CONFIG, params)
  found['write'] = {'peak': peak.more, 'kept': 0, 'largest': largest}
  with Peak() as peak:
    hf.save_hf(folder / 'all', CONFIG, jax.tree.map(np.array, params))
  found['write whole'] = {**found['write'], 'peak': peak.more}
  print(json.dumps(found))


if __name__ == '__main__':
  main(pathlib.Path(sys.argv[1]))
