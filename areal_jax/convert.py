"""Policies from one form into another.

  python -m areal_jax.convert --from=SmolLM2.gguf --to=smollm2
  python -m areal_jax.convert --from=stories260K.bin --to=stories
  python -m areal_jax.convert --from=runs/quickstart --to=exported
  python -m areal_jax.convert --from=exported --to=checkpoints --as=checkpoint

`--from` is a GGUF file (.gguf), a llama2.c checkpoint (.bin, legacy format), a
Hugging Face folder, the folder of a run, or a checkpoint of one. `--to` is a
folder that is not there yet: in the Hugging Face layout, or with
`--as=checkpoint` one with a checkpoint that `config.policy.path` takes. The
tokenizer goes along; `--tokenizer` names it where the source has none.

Exit codes: 0 done, 1 it failed, 2 mistakes in the arguments (a line each on
standard error). In the last two cases there is no folder `--to`.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import tempfile
import typing
from typing import Any, Mapping

from absl import app, flags

from areal_jax import command
from areal_jax.config import require
from areal_jax.tokenizer import files as tokenizer_files
from areal_jax.tokenizer import gguf as gguf_tokenizer
from areal_jax.tokenizer import huggingface_tokenizer

if typing.TYPE_CHECKING:
  from areal_jax.models.config import ModelConfig
  from areal_jax.train.pretrained import Pretrained

_TOKENIZERS = tuple(
    front + name
    for front in ('', f'{tokenizer_files.FOLDER}/')
    for name in (tokenizer_files.MODEL, huggingface_tokenizer.FILE)
)
FORMS = ('hf', 'checkpoint')
DTYPES = ('float32', 'bfloat16', 'float16')


@dataclasses.dataclass(frozen=True)
class Conversion:
  """The parsed command line.

  Attributes:
    source: path of the policy.
    target: path of the folder to be made.
    form: one of `FORMS`.
    tokenizer: path of one; empty for that of the source.
    dtype: of the tensors in a Hugging Face folder, one of `DTYPES`.
    shard_bytes: of one safetensors file, if there is more than one tensor in
      it.
  """

  source: str
  target: str
  form: str = 'hf'
  tokenizer: str = ''
  dtype: str = 'float32'
  shard_bytes: int = 5 * 10**9


def read_flags(argv: list[str]) -> Conversion:
  """Parses the flags of this program.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  flags.DEFINE_string('from', '', 'The policy.')
  flags.DEFINE_string('to', '', 'The folder to be made.')
  flags.DEFINE_string('as', 'hf', f'What it is to be: one of {FORMS}.')
  flags.DEFINE_string('tokenizer', '', 'A tokenizer to go along.')
  flags.DEFINE_string('dtype', 'float32', f'Of a folder: one of {DTYPES}.')
  flags.DEFINE_integer('shard_bytes', 5 * 10**9, 'Of one safetensors file.')
  command.read_own_flags(argv)
  names = ('from', 'to', 'as', 'tokenizer', 'dtype', 'shard_bytes')
  return Conversion(*(flags.FLAGS[name].value for name in names))


def main(conversion: Conversion) -> int:
  """Converts; returns the exit code."""
  return command.exit_code(_convert, conversion)


def _convert(asked: Conversion) -> None:
  # pylint: disable=g-import-not-at-top
  from areal_jax.models import published

  require(bool(asked.source), '--from', asked.source, 'the path of a policy')
  require(bool(asked.target), '--to', asked.target, 'a folder to be made')
  require(asked.form in FORMS, '--as', asked.form, f'one of {FORMS}')
  require(asked.dtype in DTYPES, '--dtype', asked.dtype, f'one of {DTYPES}')
  size = asked.shard_bytes
  require(size > 0, '--shard_bytes', size, 'more than 0')
  if asked.form == 'checkpoint':
    require(asked.dtype == 'float32', '--dtype', asked.dtype,
            "'float32', as all checkpoints have")  # fmt: skip
  source = pathlib.Path(asked.source)
  with published.whole_folder(asked.target, '--to') as folder:
    if source.suffix in ('.gguf', '.bin'):
      require(asked.form == 'hf', '--as', asked.form,
              f"'hf', from a {source.suffix} file")  # fmt: skip
    if source.suffix == '.gguf':
      config, names = _from_gguf(asked, folder)
    elif source.suffix == '.bin':
      config, names = _from_llama2c(asked, folder)
    else:
      config, names = _from_ours(asked, folder)
  if not names:
    print('no tokenizer went along: --tokenizer names one', file=sys.stderr)
  print(
      f'{asked.target}: {config.layers} layers of width {config.width},'
      f' {config.vocab_size} ids'
  )


# One function a source. Each returns the policy's settings and the names of the
# tokenizer's files.


def _from_gguf(
    asked: Conversion, folder: pathlib.Path
) -> tuple[ModelConfig, list[str]]:
  # pylint: disable=g-import-not-at-top
  from areal_jax.models import gguf

  file = gguf.open_gguf(asked.source)
  if asked.tokenizer:
    files = _tokenizer(asked.tokenizer)
  else:
    files = gguf_tokenizer.tokenizer_files(file.fields, asked.source)
  config = gguf.write_hf(
      file, folder, dtype=asked.dtype, files=files, limit=asked.shard_bytes
  )
  return config, [*files]


def _from_llama2c(
    asked: Conversion, folder: pathlib.Path
) -> tuple[ModelConfig, list[str]]:
  # pylint: disable=g-import-not-at-top
  from areal_jax.models import llama2c

  files = _tokenizer(asked.tokenizer) if asked.tokenizer else {}
  config = llama2c.write_hf(
      asked.source,
      folder,
      dtype=asked.dtype,
      files=files,
      limit=asked.shard_bytes,
  )
  return config, [*files]


def _from_ours(
    asked: Conversion, folder: pathlib.Path
) -> tuple[ModelConfig, list[str]]:
  """Converts a Hugging Face folder, a run or a checkpoint."""
  # pylint: disable=g-import-not-at-top
  import jax

  from areal_jax.config import resolve
  from areal_jax.mesh import host
  from areal_jax.mesh.rules import Rules
  from areal_jax.mesh.slices import mesh_of
  from areal_jax.models import hf
  from areal_jax.train import pretrained

  host.require_one_process()
  found = pretrained.find(asked.source, '--from')
  config = resolve(found.shape(), '--from')
  files = _files_of(asked, found)
  # The host's memory holds it all; no accelerator is needed.
  mesh = mesh_of(jax.devices('cpu')[:1])
  params = found.load(config, mesh, Rules())
  if asked.form == 'checkpoint':
    _save_checkpoint(folder, config, params, files)
  else:
    hf.save_hf(
        folder,
        config,
        params,
        dtype=asked.dtype,
        limit=asked.shard_bytes,
        files=files,
        more=_special_ids(files),
    )
  return config, [*files]


def _save_checkpoint(
    folder: pathlib.Path,
    config: ModelConfig,
    params: Mapping[str, Any],
    files: Mapping[str, bytes],
) -> None:
  """Writes a checkpoint of version 0 that holds the policy alone."""
  # pylint: disable=g-import-not-at-top
  from areal_jax import resume
  from areal_jax.telemetry.events import EventLog
  from areal_jax.train import checkpoint, checkpoint_writer, pretrained
  from areal_jax.train.state import Role, TrainState

  state = TrainState({'policy': Role(dict(params), {})})
  writer = checkpoint_writer.Checkpointer(
      folder, checkpoint.CheckpointSettings(), events=EventLog(None)
  )
  one = list(files) == [tokenizer_files.MODEL]
  prefix = resume.TOKENIZER + ('' if one else f'{tokenizer_files.FOLDER}/')
  named = {prefix + name: content for name, content in files.items()}
  parts = {pretrained.SHAPE: pretrained.shape_part(config), **named}
  try:
    writer.save(0, state, parts)
    writer.wait()
  finally:
    writer.close()


# Tokenizers.


def _tokenizer(path: str) -> dict[str, bytes]:
  """The files of a tokenizer, as they lie beside weights."""
  return tokenizer_files.beside_weights(
      tokenizer_files.open_tokenizer(path).files
  )


def _files_of(asked: Conversion, found: Pretrained) -> dict[str, bytes]:
  """The tokenizer's files of a policy of ours; none if it has none."""
  # pylint: disable=g-import-not-at-top
  from areal_jax import resume

  if asked.tokenizer:
    return _tokenizer(asked.tokenizer)
  if found.saved is not None:
    saved, front = found.saved, resume.TOKENIZER
    return tokenizer_files.beside_weights(
        {
            name.removeprefix(front): saved.read(name)
            for name in saved.files
            if name.startswith(front)
        }
    )
  for folder in (found.folder, pathlib.Path(asked.source)):
    if any((folder / name).is_file() for name in _TOKENIZERS):
      return _tokenizer(str(folder))
  return {}


def _special_ids(files: Mapping[str, bytes]) -> dict[str, Any]:
  """Returns the special ids of `config.json`, which readers generate by."""
  if not files:
    return {}
  with tempfile.TemporaryDirectory() as folder:
    for name, content in files.items():
      (pathlib.Path(folder) / name).write_bytes(content)
    tokenizer = tokenizer_files.open_tokenizer(folder).tokenizer
  found = {'bos_token_id': tokenizer.bos_id, 'pad_token_id': tokenizer.pad_id}
  ends = list(tokenizer.eos_ids)
  found['eos_token_id'] = ends[0] if len(ends) == 1 else ends or None
  return {name: value for name, value in found.items() if value is not None}


if __name__ == '__main__':
  os.environ['JAX_PLATFORMS'] = 'cpu'
  app.run(main, flags_parser=read_flags)
