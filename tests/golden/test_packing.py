"""Algorithm 1 against the authors' allocation on random lengths."""

import pytest

from areal_jax.train import packing
from tests.golden import cases

# Functions of the peers that ours have not, and why.
NOT_HAD = {
    'allocate_balanced_mbs': 'by Karmarkar-Karp; by Algorithm 1 it is compared',
    'kk_allocate': 'Karmarkar-Karp; ours allocates by Algorithm 1 alone',
    'balanced_greedy_partition': 'the same; ours spreads by Algorithm 1',
    'min_abs_diff_partition': 'the same, of neighbours only',
    'reorder_to_balanced_batches': 'ours trains in the order of draws',
    'split_padded_tensor_dict_into_mb_list; pack_tensor_dict': (
        'rows of static shape in place of ragged ones'
    ),
    'get_seqlen_balanced_partitions': 'Karmarkar-Karp again',
    'calculate_workload': 'a static row costs the same whatever it holds',
}


def _is_algorithm_1(case) -> bool:
  return case.args.get('packing_algorithm', 'ffd') == 'ffd'


def _refused(case) -> bool:
  return 'raises' in case.scalars


def _asked(case) -> tuple[list[int], int, int, int]:
  """Lengths, capacity, least number of bins and their divisor."""
  args = case.args
  return (
      case.inputs['lens'].tolist(),
      args['capacity'] if 'capacity' in args else args['max_tokens_per_mb'],
      args['min_groups'] if 'min_groups' in args else args['n_mbs'],
      args['n_groups_divisor']
      if 'n_groups_divisor' in args
      else args['n_mbs_divisor'],
  )


_FUNCTIONS = ('areal/packing.npz', 'ffd_allocate', 'allocate_balanced_mbs')


@cases.matching(
    *_FUNCTIONS,
    when=lambda case: (
        _is_algorithm_1(case) and not _refused(case) and _asked(case)[3] == 1
    ),
)
def test_bins_equal_the_authors(case):
  """Bin for bin where no two lengths are equal, else load for load.

  Whether lengths are equal the authors' order rests on an unstable sort.
  """
  lengths, capacity, least, _ = _asked(case)
  bins = packing.allocate(lengths, capacity, least)
  if len(set(lengths)) == len(lengths):
    peers = [
        sorted(int(i) for i in row if i >= 0) for row in case.outputs['bins']
    ]
    assert sorted(map(sorted, bins)) == sorted(peers)
  else:
    loads = sorted(sum(lengths[i] for i in members) for members in bins)
    assert loads == sorted(case.outputs['loads'].tolist())


@cases.matching(
    *_FUNCTIONS,
    when=lambda case: _is_algorithm_1(case) and not _refused(case),
)
def test_no_more_bins_and_no_higher_load_than_the_authors(case):
  """Everywhere: capacity, minimum and divisor hold."""
  lengths, capacity, least, divisor = _asked(case)
  bins = packing.allocate(lengths, capacity, least)
  rows = -(-len(bins) // divisor) * divisor
  bins = packing.spread(lengths, capacity, bins, rows)
  loads = [sum(lengths[i] for i in members) for members in bins]
  assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
  assert max(loads) <= capacity
  assert len(bins) % divisor == 0
  assert len(bins) >= least
  assert len(bins) <= case.scalars['n_bins']
  assert max(loads) <= case.scalars['max_load']


@cases.matching(
    *_FUNCTIONS,
    when=lambda case: _is_algorithm_1(case) and _refused(case),
)
def test_what_the_authors_refuse_is_refused(case):
  lengths, capacity, least, _ = _asked(case)
  with pytest.raises(ValueError):
    packing.allocate(lengths, capacity, least)
