"""The table of policies and slices: its rows, and what they say of failures."""

import dataclasses
import json
import sys

from absl import app
import pytest

from areal_jax.compile_check.chips import parse_topology
from benchmarks import scale


@dataclasses.dataclass(frozen=True)
class Planted(scale.Case):
  """A case that runs some other program."""

  program: str = ''

  def command(self) -> list[str]:
    return [sys.executable, '-c', self.program]


def planted(program: str) -> Planted:
  return Planted('Qwen2.5-7B', 'v5e:2x2', {'fsdp': 2}, 2, program=program)


SIDE = {'peak': 3 * 2**30}
FOUND = {
    'fits': True,
    'train': SIDE,
    'rollout': SIDE,
    'step': {'train_s': 2.0, 'rollout_s': 4.0, 'tokens_per_s': 1234.5},
}


def test_a_row_has_what_was_found():
  case = scale.Case('a', 'v5e:2x2', {'data': 2, 'fsdp': 4}, 2, 4)
  assert scale.line(case, FOUND) == (
      '| a | v5e:2x2 | data 2 · fsdp 4 | 2 × 4 | yes | 3.0 | 3.0 | 2 | 4 |'
      ' 1,234 |'
  )
  refused = {**FOUND, 'fits': False, 'step': None}
  assert scale.line(case, refused).endswith('| no | 3.0 | 3.0 | – | – | – |')
  assert scale.line(case, {'fits': None}).endswith(
      '| not known | – | – | – | – | – |'
  )


def test_a_program_that_could_not_be_compiled_leaves_what_is_known():
  said = json.dumps({**FOUND, 'fits': None, 'step': None})
  found = scale.measure(
      planted(
          f'import sys; print({said!r});'
          ' print("error: accumulate", file=sys.stderr); sys.exit(2)'
      )
  )
  assert found['why'] == 'error: accumulate'
  assert '| not known | 3.0 |' in scale.line(planted(''), found)


def test_planted_end_of_the_process_is_a_row_too():
  dies = 'import os, signal, sys; {} os.kill(os.getpid(), signal.SIGILL)'
  ended = 'the compiler ended by SIGILL'
  assert scale.measure(planted(dies.format(''))) == {
      'fits': None, 'why': ended,
  }  # fmt: skip
  for line, told in (
      ('apply: compiled in 4.6 s', "after 'apply: compiled in 4.6 s'"),
      ('F1130 x.cc:1] Check failed: y', 'F1130 x.cc:1] Check failed: y'),
  ):
    says = dies.format(f'print({line!r}, file=sys.stderr, flush=True);')
    assert scale.measure(planted(says))['why'] == f'{ended}, {told}'
  with pytest.raises(RuntimeError, match='v5e:2x2: .*planted'):
    scale.measure(planted('raise SystemExit("planted")'))


@pytest.mark.parametrize('case', [*scale.CASES, *scale.SHORT])
def test_meshes_cover_whole_parts_of_a_topology(case):
  topology = parse_topology(case.topology)
  train = 1
  for size in case.train.values():
    train *= size
  engine = case.tensor * case.expert
  used = train + case.replicas * engine
  assert used <= topology.count
  if topology.chip.name == 'v5e' and topology.slices > 1:
    slice_ = topology.count // topology.slices
    assert train % slice_ == 0 and engine in (1, slice_)


def test_rows_are_chosen_by_a_part_of_their_names():
  names = [case.name for case in scale.wanted(scale.CASES, '32B on v5p')]
  assert names == ['Qwen2.5-32B on v5p:4x8x8']
  assert scale.wanted(scale.CASES, '') == list(scale.CASES)
  with pytest.raises(app.UsageError, match="--only is 'v7', wanted a part of"):
    scale.wanted(scale.CASES, 'v7')
