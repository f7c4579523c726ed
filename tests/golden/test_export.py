"""What is exported is what transformers reads.

The fast test holds our files against the published ones; the slow one has
transformers itself load our folder, by an interpreter that has it and torch:

  AREAL_TRANSFORMERS_PYTHON=/path/to/python pytest -m slow tests/golden

Where that interpreter has peft too, adapters go there and back.
"""

import dataclasses
import json
import os
import subprocess

import jax
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.models import lora, parameters, peft, transformer
from areal_jax.models.config import PROJECTIONS, LoraSettings
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


# The same with the adapters of a second folder, which it writes, changed, to a
# third.
_THEIR_ADAPTERS = """
import json, sys
import numpy as np, torch, transformers, peft
folder, adapter, again, ids, out = sys.argv[1:]
model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation='eager')
model = peft.PeftModel.from_pretrained(model, adapter, is_trainable=True)
ids, found = torch.tensor(json.loads(ids)), []
for factor in (1, -0.5):
  with torch.no_grad():
    for name, tensor in model.named_parameters():
      if 'lora_B' in name:
        tensor *= factor
    found.append(model(ids).logits.numpy())
model.save_pretrained(again)
np.save(out, np.stack(found))
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


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_peft_reads_our_adapters_and_we_its(golden_dir, tmp_path, python):
  has = subprocess.run([python, '-c', 'import peft'], capture_output=True)
  if has.returncode:
    pytest.skip(f'{python} has no peft')
  base = golden_dir / 'models/qwen2'
  settings = LoraSettings(PROJECTIONS, rank=3, alpha=12.0)
  config, params = load_hf(base, None, None)
  config = dataclasses.replace(config, lora=settings)
  generator = np.random.default_rng(0)
  adapters = jax.tree.map(
      lambda p: 0.1 * generator.standard_normal(p.shape, np.float32),
      parameters.partition(config, parameters.abstract_params(config))[0],
  )
  peft.save_peft(tmp_path / 'ours', config, adapters)
  ids = generator.integers(0, config.vocab_size, (2, 17))
  out = tmp_path / 'logits.npy'
  subprocess.run(
      [python, '-c', _THEIR_ADAPTERS, base, tmp_path / 'ours',
       tmp_path / 'theirs', json.dumps(ids.tolist()), out],
      check=True,
  )  # fmt: skip
  positions = np.broadcast_to(np.arange(17), ids.shape)
  for name, theirs in zip(('ours', 'theirs'), np.load(out)):
    found = peft.load_peft(tmp_path / name, config)
    ours = transformer.forward(
        config, lora.overlaid(params, found), ids, positions, np.ones_like(ids)
    )
    np.testing.assert_allclose(
        np.asarray(ours), theirs, atol=RELATIVE * np.abs(theirs).max(), rtol=0
    )
