"""What is exported is what transformers reads.

The fast test holds our files against the published ones; the slow one has
transformers itself load our folder, by an interpreter that has it and torch:

  AREAL_TRANSFORMERS_PYTHON=/path/to/python pytest -m slow tests/golden
"""

import json
import os
import subprocess

import jax
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.models import transformer
from areal_jax.models.hf import load_hf, save_hf
from tests.golden.test_models import RELATIVE, folders

# Run by the other interpreter: a folder and ids in, logits out.
_THEIRS = """
import json, sys
import numpy as np, torch, transformers
folder, ids, out = sys.argv[1:]
model, found = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, output_loading_info=True,
    attn_implementation='eager')
assert not any(found.values()), found
with torch.no_grad():
  logits = model(torch.tensor(json.loads(ids))).logits
np.save(out, logits.numpy())
"""


def tensors(folder):
  found = {}
  for file in sorted(folder.glob('model*.safetensors')):
    found.update(st.load_file(file))
  return found


@folders()
def test_export_equals_what_was_imported(folder, tmp_path):
  config, params = load_hf(folder, None, None)
  save_hf(tmp_path, config, params, limit=100_000)
  assert len(list(tmp_path.glob('*.safetensors'))) > 1
  got, wanted = tensors(tmp_path), tensors(folder)
  assert set(got) == set(wanted)
  for name, tensor in wanted.items():
    np.testing.assert_array_equal(got[name], tensor, err_msg=name)


@pytest.fixture(scope='module')
def python():
  given = os.environ.get('AREAL_TRANSFORMERS_PYTHON')
  if not given:
    pytest.skip(
        'AREAL_TRANSFORMERS_PYTHON is not set, wanted a Python that has torch'
        ' and transformers'
    )
  return given


@pytest.mark.slow
@pytest.mark.timeout(600)
@folders()
def test_transformers_reads_our_export(folder, tmp_path, python):
  config, params = load_hf(folder, None, None)
  # Other weights than those that transformers wrote.
  generator = np.random.default_rng(0)
  params = jax.tree.map(
      lambda p: p * generator.uniform(0.8, 1.2, p.shape).astype(np.float32),
      params,
  )
  save_hf(tmp_path, config, params, limit=100_000)
  ids = generator.integers(0, config.vocab_size, (2, 17))
  out = tmp_path / 'logits.npy'
  subprocess.run(
      [python, '-c', _THEIRS, tmp_path, json.dumps(ids.tolist()), out],
      check=True,
  )
  positions = np.broadcast_to(np.arange(17), ids.shape)
  ours = transformer.forward(config, params, ids, positions, np.ones_like(ids))
  theirs = np.load(out)
  np.testing.assert_allclose(
      np.asarray(ours), theirs, atol=RELATIVE * np.abs(theirs).max(), rtol=0
  )
