"""Algorithm 1 against the authors' allocation on random lengths."""

import json

import numpy as np
import pytest

from areal_jax.train import packing


@pytest.fixture(scope='module')
def cases(golden_dir):
  index = json.loads((golden_dir / 'index.json').read_text())
  data = np.load(golden_dir / 'areal/packing.npz')
  found = [
      (case, data)
      for case in index['cases']
      if case.get('file') == 'areal/packing.npz'
      and case['function'] == 'ffd_allocate'
  ]
  assert found
  return found


def test_bins_equal_the_authors(cases):
  """Where no lengths are equal, bin for bin."""
  compared = 0
  for case, data in cases:
    args, name = case['args'], case['case']
    if args['ties'] or args['n_groups_divisor'] != 1:
      continue
    if 'raises' in case.get('out_scalars', {}):
      continue
    lengths = data[f'{name}/in/lens'].tolist()
    bins = packing.allocate(lengths, args['capacity'], args['min_groups'])
    peers = [
        sorted(int(i) for i in row if i >= 0)
        for row in data[f'{name}/out/bins']
    ]
    if len(set(lengths)) == len(lengths):
      assert sorted(map(sorted, bins)) == sorted(peers), name
      compared += 1
    else:
      loads = sorted(sum(lengths[i] for i in b) for b in bins)
      assert loads == sorted(data[f'{name}/out/loads'].tolist()), name
  assert compared >= 3


def test_no_more_bins_and_no_higher_load_than_the_authors(cases):
  """Everywhere: capacity, minimum and divisor hold."""
  for case, data in cases:
    args, name = case['args'], case['case']
    if 'raises' in case.get('out_scalars', {}):
      continue
    lengths = data[f'{name}/in/lens'].tolist()
    bins = packing.allocate_rows(
        lengths, args['capacity'], args['n_groups_divisor'], args['min_groups']
    )
    loads = [sum(lengths[i] for i in members) for members in bins]
    assert sorted(i for b in bins for i in b) == list(range(len(lengths)))
    assert len(bins) % args['n_groups_divisor'] == 0, name
    assert len(bins) >= args['min_groups'], name
    assert len(bins) <= case['out_scalars']['n_bins'], name
    assert max(loads) <= case['out_scalars']['max_load'], name


def test_what_the_authors_refuse_is_refused(cases):
  refused = [c for c in cases if 'raises' in c[0].get('out_scalars', {})]
  assert len(refused) == 2
  for case, data in refused:
    args = case['args']
    lengths = data[f'{case["case"]}/in/lens'].tolist()
    with pytest.raises(ValueError):
      packing.allocate(lengths, args['capacity'], args['min_groups'])
