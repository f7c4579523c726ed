"""What attention costs by the length of a row, in time and in memory.

  python -m benchmarks.attention
  python -m benchmarks.attention --short

Value and gradient of one layer's attention over packed rows of a fixed number
of tokens in all, in the form that `areal_jax/models/forms.py` chooses here and
in each of those in plain XLA, in turn, the fastest of some runs each: where the
choice changes from `by_head` to `blockwise` (`LONG_ON_CPU`) is right if the
chosen form is nowhere clearly slower than another. Rows are packed of answers
with the mean of `--answers` tokens. Beyond `--plain` tokens a row the others,
of which two have scores that grow with the square of the length, are left out.
Memory is what the compiler sets aside for temporary arrays. `--short` takes
short rows alone and fewer runs. The last line is one JSON object.
"""

from __future__ import annotations

import time
from typing import Any, Sequence

from absl import app, flags
import jax
import jax.numpy as jnp
import numpy as np

from areal_jax import command
from areal_jax.models import attention, forms, visibility
from benchmarks import report

Array = jax.Array

_TOKENS = 8192  # of all rows together, or one row of more
_HEADS, _KV_HEADS, _HEAD_SIZE = 4, 2, 64
_PLAIN = ('grouped', 'by_head', 'blockwise')


def inputs(tokens: int, answers: int, seed: int = 0) -> tuple[Array, ...]:
  """Queries, keys, values and segment ids of rows of so many tokens."""
  random = np.random.default_rng(seed)
  rows = max(1, _TOKENS // tokens)

  def draw(heads):
    shape = (rows, tokens, heads, _HEAD_SIZE)
    return random.normal(size=shape).astype('f') / _HEAD_SIZE**0.25

  # A token begins an answer with the same chance wherever it stands.
  begins = random.random((rows, tokens)) < 1 / answers
  segments = 1 + np.cumsum(begins, 1, dtype=np.int32)
  arrays = (draw(_HEADS), draw(_KV_HEADS), draw(_KV_HEADS), segments)
  return tuple(jnp.asarray(x) for x in arrays)


def chosen(tokens: int) -> str:
  """The form that rows of so many tokens get here."""
  asked = forms.Rows(
      platform=jax.devices()[0].platform,
      queries=tokens,
      keys=tokens,
      heads=_HEADS,
      head_size=_HEAD_SIZE,
  )
  return forms.of_rows('auto', asked)


def compiled(form: str, arrays: tuple[Array, ...]) -> Any:
  """The program of value and gradient in a form."""
  platform = jax.devices()[0].platform

  def loss(q, k, v, segments):
    visible = visibility.Visibility.of_rows(q.shape[1], segments)
    mixed = attention.attend(q, k, v, visible, form=form, platform=platform)
    return jnp.sin(mixed.astype(jnp.float32)).sum()

  program = jax.jit(jax.value_and_grad(loss, (0, 1, 2)))
  return program.lower(*arrays).compile()


def measure(
    tokens: int, answers: int, names: Sequence[str], repeats: int
) -> dict[str, tuple[float, float]]:
  """Milliseconds and megabytes of each form at rows of so many tokens."""
  arrays = inputs(tokens, answers)
  programs = {name: compiled(name, arrays) for name in names}
  seconds: dict[str, list[float]] = {name: [] for name in names}
  for repeat in range(repeats + 1):  # the first one warms up
    for name, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program(*arrays))
      if repeat:
        seconds[name].append(time.perf_counter() - start)
  return {
      name: (
          1e3 * min(seconds[name]),
          program.memory_analysis().temp_size_in_bytes / 1e6,
      )
      for name, program in programs.items()
  }


def rows_of(
    lengths: Sequence[int], plain: int, answers: int, repeats: int
) -> list[report.Row]:
  """Figures by length; the chosen form may be no slower than any other.

  And its memory grows no faster than the tokens: each length is to be twice the
  one before.
  """
  rows: list[report.Row] = []
  before = None
  for tokens in lengths:
    here = chosen(tokens)
    others = [n for n in _PLAIN if n != here] if tokens <= plain else []
    names = [here, *others]
    found = measure(tokens, answers, names, repeats)
    for name, (milliseconds, megabytes) in found.items():
      what = f'{tokens} tokens, {name}{" (chosen)" * (name == here)}'
      rows.append(report.Row(f'{what}: ms', milliseconds))
      rows.append(report.Row(f'{what}: MB', megabytes))
    own = found[here]
    if others:
      ratio = min(found[name][0] for name in others) / own[0]
      name = f'{tokens} tokens: fastest over chosen, time'
      rows.append(report.bounded(name, ratio, '>= 0.9'))
    # Below, longer rows are fewer, and there are as many tokens.
    if before is not None and tokens > _TOKENS:
      name = f'{tokens} tokens: memory over that of half'
      rows.append(report.bounded(name, own[1] / before[1], '<= 2.3'))
    before = own
  return rows


def main(argv: Sequence[str]) -> None:
  """Prints the table and the JSON line."""
  del argv
  settings = flags.FLAGS
  longest = 512 if settings.short else settings.longest
  lengths = [128]
  while lengths[-1] < longest:
    lengths.append(2 * lengths[-1])
  repeats = 3 if settings.short else 10
  rows = rows_of(lengths, settings.plain, settings.answers, repeats)
  report.show('attention', rows)


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_bool('short', False, 'Short rows alone and fewer runs.')
  flags.DEFINE_integer('longest', 32768, 'Tokens of the longest row.')
  flags.DEFINE_integer('plain', 4096, 'Longest rows of other forms.')
  flags.DEFINE_integer('answers', 512, 'Mean tokens of a packed sequence.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
