"""How often the mathematics reward agrees with published verdicts.

  python -m benchmarks.graders --data=DATA

DATA is the folder with `gsm8k_model_solutions.jsonl` (verdicts of OpenAI on
solutions of four models), `math_cot_responses.jsonl` (of Qwen's grader on whole
responses) and `math_pairs.jsonl` (test sets of six graders, which disagree
among one another and have rows about letters and other things that are no
mathematics): rows of {"gold", "pred", "equal"}. Beside each figure stands that
of `math-verify` by itself, with its default settings. `--short` takes every
tenth row. The last line is one JSON object with a row a figure; no bar is
promised of any.
"""

from __future__ import annotations

import collections
import json
import logging
import pathlib
import sys
import time
from typing import Any

from absl import app, flags
import math_verify

from areal_jax import command
from areal_jax.rewards.math import correct, final_answer
from areal_jax.sandbox.call import call
from areal_jax.types import Problem
from benchmarks import report

FILES = ('gsm8k_model_solutions', 'math_cot_responses', 'math_pairs')


def judge(row: dict[str, Any]) -> str:
  """'agree', 'too kind', 'too strict' or 'error'."""
  # The pairs have whole texts for right answers, which problems do not.
  gold = final_answer(row['gold']) or row['gold']
  outcome = call(correct, Problem('', '', '', gold), row['pred'])
  if outcome.status != 'ok':
    return 'error'
  if (outcome.value == 1.0) == row['equal']:
    return 'agree'
  return 'too strict' if row['equal'] else 'too kind'


def agrees_alone(row: dict[str, Any]) -> bool:
  """Whether `math-verify` by itself agrees; it wants formulas in dollars."""
  gold = row['gold']
  texts = (gold if '$' in gold else f'${gold}$', row['pred'])
  gold, answer = (math_verify.parse(t, parsing_timeout=None) for t in texts)
  found = math_verify.verify(gold, answer, timeout_seconds=None)
  return found == row['equal']


def measure(path: pathlib.Path, stride: int) -> list[report.Row]:
  """The figures of one file."""
  lines = path.read_text('utf-8').splitlines()[::stride]
  rows = [json.loads(line) for line in lines]
  start = time.monotonic()
  verdicts = collections.Counter(judge(row) for row in rows)
  seconds = time.monotonic() - start
  alone = sum(agrees_alone(row) for row in rows)
  figures = {
      'agreement': verdicts['agree'] / len(rows),
      'agreement of math-verify alone': alone / len(rows),
      'answers': len(rows),
      **{k: verdicts[k] for k in ('too kind', 'too strict', 'error')},
      'ms an answer': 1000 * seconds / len(rows),
  }
  return [report.Row(f'{path.stem}: {k}', v) for k, v in figures.items()]


def main(argv: list[str]) -> int:
  """Prints the figures."""
  del argv
  files = [pathlib.Path(flags.FLAGS.data) / f'{name}.jsonl' for name in FILES]
  missing = [str(file) for file in files if not file.is_file()]
  if missing:
    print(f'error: --data is {flags.FLAGS.data!r}, without {missing}',
          file=sys.stderr)  # fmt: skip
    return 2
  logging.getLogger('math_verify').setLevel(logging.ERROR)
  stride = 10 if flags.FLAGS.short else 1
  rows = [row for file in files for row in measure(file, stride)]
  report.show('graders', rows)
  return 0


def define_flags() -> None:
  """Those of the command line; an importer has none of them."""
  flags.DEFINE_string('data', '', 'Folder with the three files.')
  flags.DEFINE_bool('short', False, 'Every tenth row.')


if __name__ == '__main__':
  define_flags()
  app.run(main, flags_parser=command.read_own_flags)
