"""Folders in the Hugging Face layout: how they are written.

The shapes of all tensors come in first, then the tensors, one after another and
in any order; out comes a folder with `config.json` and safetensors: one file,
or several with an index where one would be too large. A header says where each
tensor belongs, so no more than one is held here. Which tensors there are is
left to `hf.py` and to the readers of other formats, which share `half_split`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import shutil
import struct
from typing import Any, BinaryIO, Iterable, Iterator, Mapping, Sequence

import ml_dtypes  # noqa: F401, numpy then knows bfloat16 by its name
import numpy as np

from areal_jax.config import ConfigError, require

CONFIG = 'config.json'
INDEX = 'model.safetensors.index.json'
WEIGHTS = 'model.safetensors'
_PARTS = 'model-*-of-*.safetensors'
# Of one file, in bytes; what published checkpoints mostly keep to.
LIMIT = 5 * 10**9
# As the headers of safetensors name them.
KINDS = {'float32': 'F32', 'bfloat16': 'BF16', 'float16': 'F16'}


@dataclasses.dataclass(frozen=True)
class Shape:
  """A tensor that is still to be written.

  Attributes:
    name: as it is published.
    sizes: of its axes.
    dtype: one of `KINDS`.
  """

  name: str
  sizes: tuple[int, ...]
  dtype: np.dtype

  @property
  def bytes(self) -> int:
    return math.prod(self.sizes) * self.dtype.itemsize


def write_folder(
    folder: pathlib.Path,
    config: Mapping[str, Any],
    shapes: Sequence[Shape],
    tensors: Iterable[tuple[str, np.ndarray]],
    *,
    limit: int = LIMIT,
    files: Mapping[str, bytes] | None = None,
) -> None:
  """Writes a checkpoint folder; weights that it had are replaced.

  Args:
    folder: made if it is not there.
    config: of `config.json`.
    shapes: of all tensors; files are filled in this order.
    tensors: each of them once, by name, in any order; cast to its dtype.
    limit: bytes of tensors in one file, if there is more than one in it.
    files: others that go along, such as those of a tokenizer.

  Raises:
    ConfigError: a dtype that is none of `KINDS`.
    ValueError: a tensor that is not among the shapes, has another one, or is
      missing.
  """
  parts = _parts(shapes, limit)
  folder.mkdir(parents=True, exist_ok=True)
  # A folder that goes on being read must not pair old tensors with new ones.
  for stale in [folder / INDEX, folder / WEIGHTS, *folder.glob(_PARTS)]:
    stale.unlink(missing_ok=True)
  (folder / CONFIG).write_text(json.dumps(config, indent=2) + '\n')
  for name, content in (files or {}).items():
    (folder / name).write_bytes(content)
  write_tensors({folder / n: part for n, part in parts.items()}, tensors)
  if len(parts) > 1:
    where = {s.name: name for name, part in parts.items() for s in part}
    total = sum(shape.bytes for shape in shapes)
    index = {'metadata': {'total_size': total}, 'weight_map': where}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + '\n')


def write_tensors(
    parts: Mapping[pathlib.Path, Sequence[Shape]],
    tensors: Iterable[tuple[str, np.ndarray]],
) -> None:
  """Writes safetensors files, byte for byte as the package of that name does.

  Args:
    parts: the tensors of each file.
    tensors: each of them once, by name, in any order.

  Raises:
    ConfigError, ValueError: see `write_folder`.
  """
  places: dict[str, tuple[BinaryIO, int, Shape]] = {}
  with contextlib.ExitStack() as stack:
    for path, shapes in parts.items():
      file = stack.enter_context(path.open('wb'))
      header, offsets = _header(shapes)
      file.write(header)
      for shape in shapes:
        start = len(header) + offsets[shape.name]
        places[shape.name] = file, start, shape
    for name, tensor in tensors:
      if name not in places:
        raise ValueError(f'tensor {name} has no place, or came twice')
      file, start, shape = places.pop(name)
      if tensor.shape != shape.sizes:
        raise ValueError(f'{name} is {tensor.shape}, wanted {shape.sizes}')
      whole = np.ascontiguousarray(tensor, shape.dtype)
      file.seek(start)
      file.write(memoryview(whole.reshape(-1).view(np.uint8)))
      # They may be views of something large, of which the next comes now.
      del tensor, whole
  if places:
    raise ValueError(f'tensors {[*places]} never came')


@contextlib.contextmanager
def whole_folder(path: str | os.PathLike, at: str) -> Iterator[pathlib.Path]:
  """A new folder that is there when all of it is, or not at all.

  Yields a folder beside it, which is renamed at the end and removed if anything
  goes wrong.

  Args:
    path: of the new folder.
    at: the setting's name, for messages.

  Raises:
    ConfigError: the path is taken, or cannot be written.
  """
  path = pathlib.Path(path)
  require(not path.exists(), at, str(path),
          'a folder that is not there yet')  # fmt: skip
  part = path.with_name(f'.{path.name}.{os.getpid()}.part')
  try:
    part.mkdir(parents=True)
  except OSError as error:
    raise ConfigError(
        f'{at} is {str(path)!r}, wanted a folder that can be written ({error})'
    ) from error
  try:
    yield part
    part.rename(path)
  finally:
    shutil.rmtree(part, ignore_errors=True)


def half_split(rows: np.ndarray, heads: int) -> np.ndarray:
  """Rotary rows of queries or keys in the order of the Hugging Face layout.

  Meta's own, llama2.c's and GGUF's Llama rotate the pairs (2i, 2i + 1) of a
  head, transformers (and we) the pairs (i, i + H / 2): row 2i + j of a head
  becomes row j · H / 2 + i. See `permute` of
  https://github.com/huggingface/transformers `convert_llama_weights_to_hf.py`,
  which this equals.

  Args:
    rows: [heads · H, ...] outputs of the projection.
    heads: of queries, or of keys.
  """
  pairs = rows.reshape(heads, -1, 2, *rows.shape[1:])
  return pairs.swapaxes(1, 2).reshape(rows.shape)


# What may lie where safetensors of the usual names are missing, and the remedy;
# the first that is found counts.
_INSTEAD = (
    (
        'adapter_model.safetensors',
        'adapters alone: policy.path is their base, policy.adapter this folder',
    ),
    (
        'model-*-of-*.safetensors',
        f'parts without {INDEX}: fetch that file too',
    ),
    (
        '*.safetensors',
        f'under another name: a single file has to be called {WEIGHTS}',
    ),
    *(
        (
            pattern,
            'weights in a form of PyTorch that can run code when it is read:'
            ' load them with its library and write them with'
            ' `save_pretrained`, which makes safetensors',
        )
        for pattern in ('*.bin', '*.pt', '*.pth')
    ),
    ('*.gguf', 'to be converted by `python -m areal_jax.convert`'),
)


def instead(folder: pathlib.Path) -> str:
  """What a folder has in place of the safetensors that were looked for.

  Returns:
    A part of a message that begins with a comma; empty where there is nothing.
  """
  for pattern, remedy in _INSTEAD:
    found = sorted(path.name for path in folder.glob(pattern))
    if found:
      names = ', '.join(found[:3]) + (', ...' if len(found) > 3 else '')
      return f', but {names}, {remedy}'
  return ''


# Helpers.


def _parts(shapes: Sequence[Shape], limit: int) -> dict[str, list[Shape]]:
  """The tensors of each file by its name."""
  parts, room = [[]], limit
  for shape in shapes:
    known = shape.dtype.name in KINDS
    require(known, f'dtype of {shape.name}', shape.dtype.name,
            f'one of {[*KINDS]}')  # fmt: skip
    if parts[-1] and shape.bytes > room:
      parts.append([])
      room = limit
    parts[-1].append(shape)
    room -= shape.bytes
  if len(parts) == 1:
    return {WEIGHTS: parts[0]}
  return {
      f'model-{i:05d}-of-{len(parts):05d}.safetensors': part
      for i, part in enumerate(parts, 1)
  }


def _header(shapes: Sequence[Shape]) -> tuple[bytes, dict[str, int]]:
  """Builds the header of a file and the offset of each tensor behind it.

  See https://github.com/huggingface/safetensors, 'Format': the length of the
  JSON as 8 bytes, little end first, then the JSON, filled up with spaces.
  """
  # Readers of the Hugging Face libraries ask which framework wrote it.
  fields: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  offsets, end = {}, 0
  # The widest numbers first, so that all are aligned.
  for shape in sorted(shapes, key=lambda s: (-s.dtype.itemsize, s.name)):
    offsets[shape.name] = end
    end += shape.bytes
    fields[shape.name] = {
        'dtype': KINDS[shape.dtype.name],
        'shape': list(shape.sizes),
        'data_offsets': [offsets[shape.name], end],
    }
  text = json.dumps(fields, separators=(',', ':'), ensure_ascii=False).encode()
  text += b' ' * (-len(text) % 8)
  return struct.pack('<Q', len(text)) + text, offsets
