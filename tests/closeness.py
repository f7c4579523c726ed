"""Comparing what was summed in another order.

Adding the same numbers in another order (on another processor, on more devices,
in a fused kernel) changes a float32 sum by some roundings *of what is summed*,
and not of the result: where terms cancel, an element near 0 may be off as much
as the largest one. So a tolerance follows the size of the whole tensor.
"""

from typing import Any

import jax
import numpy as np

# About 80 roundings of float32; the most seen on four kinds of processors is
# some 20.
RELATIVE = 1e-5


def assert_close(
    got: Any, wanted: Any, *, relative: float = RELATIVE, size: float = 0.0
) -> None:
  """Compares two trees of sums, tensor by tensor.

  An element may differ by relative · max(max |wanted|, size) of its tensor.
  Infinite elements and those that are no number have to be so in both.

  Args:
    got: a tree of arrays.
    wanted: one of the same structure.
    relative: allowed difference, as a share of the size of what is summed.
    size: of what is summed at the least; for tensors whose terms cancel.

  Raises:
    AssertionError: the trees or an element differ.
  """
  assert jax.tree.structure(got) == jax.tree.structure(wanted)
  for (path, one), other in zip(
      jax.tree.leaves_with_path(got), jax.tree.leaves(wanted)
  ):
    other = np.asarray(other)
    finite = np.abs(other[np.isfinite(other)])
    largest = max(size, float(finite.max(initial=0.0)))
    np.testing.assert_allclose(
        one,
        other,
        rtol=0,
        atol=relative * largest,
        err_msg=jax.tree_util.keystr(path),
    )
