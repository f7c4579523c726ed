"""Mixture of experts: a router, experts that run side by side, their balance.

A sparse layer has E gated MLPs in place of one. The router scores them for each
token, the k best run, and their outputs are added up by weight. In flow flat
tokens [M, D]; out flows [M, D] and what the router did. No token is ever
dropped and no expert has a capacity: shapes are static because M · k choices
are sorted by expert and multiplied group by group (`jax.lax.ragged_dot`).

`mix_every` runs every expert on every token: the plain form that `mix_sorted`
is compared with, and the one for a CPU, where XLA has no grouped product (it
masks a copy of the sorted tokens for each expert). On two busy CPU cores, the
gradient at (M, D, E, F, k) = (32, 96, 8, 64, 2), (3072, 96, 8, 64, 2),
(512, 256, 32, 128, 4) took 0.3, 88, 140 ms so, and 0.6, 98, 518 ms sorted.

Over a mesh, experts are cut over the axes of `rules.expert`. Along those that
do not cut tokens (tensor) each device runs its own experts on the tokens that
it has anyway, and the sum that follows any tensor-parallel MLP adds the shares
up, so no token is sent around. Along those that cut tokens as well (expert),
the tokens are gathered before and their sums scattered after: two collectives
of M · D numbers whatever the choices are, with static shapes, nothing dropped
and nobody waiting for the device with the most popular expert to be told.
Without enough experts, `rules.expert_mlp` cuts their columns instead, or as
well over another axis.

The scores, their softmax and the weights are float32 whatever the compute dtype
is: two scores that bfloat16 cannot tell apart are two different policies.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Callable

import jax
import jax.numpy as jnp

from areal_jax.mesh.rules import Rules, free_axes, mesh_axes
from areal_jax.models import kernels

Array = jax.Array

# An entry of recorded choices that nothing was recorded for.
UNKNOWN = -1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Routing:
  """The choices of one router, or of several with a leading axis L.

  Attributes:
    experts: [M, k] int32, the chosen ones, best first unless they were given.
    counts: [E] float32, choices of each by real tokens.
    mass: [E] float32, probability of each summed over real tokens; carries
      gradient.
    entropy: [] float32 nats, of the router's distribution, summed likewise.

  The sums are None where they were not asked for.
  """

  experts: Array
  counts: Array | None = None
  mass: Array | None = None
  entropy: Array | None = None


def route(
    h: Array,
    router: Array,
    *,
    chosen: int,
    renormalise: bool,
    given: Array | None = None,
) -> tuple[Array, Array, Array]:
  """Chooses the experts of each token, and their weights.

  p = softmax(h W); the k largest are chosen (of equal ones the first), with
  weights p or, renormalised, p / Σ p over the chosen. Given choices replace the
  router's; their weights still are those of this router, so that its gradient
  is whole ("routing replay", https://arxiv.org/abs/2510.11370).

  Args:
    h: [M, D] tokens.
    router: [D, E] W.
    chosen: k.
    renormalise: whether the weights of a token add up to 1.
    given: [M, k] choices to use; a token that has `UNKNOWN` chooses itself.

  Returns:
    Experts [M, k] int32, their weights [M, k] float32, and p [M, E] float32.
  """
  scores = jnp.matmul(
      h.astype(jnp.float32),
      router.astype(jnp.float32),
      precision=jax.lax.Precision.HIGHEST,
  )
  probabilities = jax.nn.softmax(scores)
  best = jax.lax.stop_gradient(probabilities)
  experts = jax.lax.top_k(best, chosen)[1].astype(jnp.int32)
  if given is not None:
    given = given.astype(jnp.int32)
    known = (given != UNKNOWN).all(-1, keepdims=True)
    experts = jnp.where(known, given, experts)
  weights = jnp.take_along_axis(probabilities, experts, -1)
  if renormalise:
    weights = weights / weights.sum(-1, keepdims=True)
  return experts, weights, probabilities


def measure(
    experts: Array, probabilities: Array, real: Array | None
) -> Routing:
  """Sums of what a router did over the real tokens.

  Args:
    experts: [M, k] chosen.
    probabilities: [M, E] of all.
    real: [M] bool; False is padding, which counts nowhere. None for no sums.
  """
  if real is None:
    return Routing(experts)
  real = real.astype(jnp.float32)
  chosen = jax.nn.one_hot(experts, probabilities.shape[-1]).sum(1)
  entropy = -jax.scipy.special.xlogy(probabilities, probabilities).sum(-1)
  return Routing(
      experts=experts,
      counts=jax.lax.stop_gradient(real @ chosen),
      mass=real @ probabilities,
      entropy=jax.lax.stop_gradient(jnp.vdot(real, entropy)),
  )


def balance_loss(counts: Array, mass: Array, tokens: Array) -> Array:
  """Measures how unevenly tokens are spread over experts, mean over layers.

  E Σ_e f_e P_e, f_e the share of tokens that chose e and P_e the mean
  probability of e, which alone carries gradient. k where all is even, at most
  E. The formula of https://arxiv.org/abs/2101.03961 with the scale of
  transformers' `load_balancing_loss_func` (f adds up to k), for each layer by
  itself: over all layers in one sum, as there, one layer may make up for
  another, which spreads no load.

  It is linear in P: with `counts` and `tokens` of a whole minibatch, parts of
  `mass` give parts of the value and of the gradient that add up.

  Args:
    counts: [L, E] choices over all tokens.
    mass: [L, E] probability, summed over all tokens or a part of them.
    tokens: [] all tokens; 0 gives 0.
  """
  tokens = jnp.maximum(tokens, 1.0)
  shares = jax.lax.stop_gradient(counts) / tokens
  each = counts.shape[-1] * jnp.sum(shares * mass / tokens, -1)
  return each.mean()


def statistics(
    counts: Array, mass: Array, entropy: Array, tokens: Array
) -> dict[str, Array]:
  """Scalars that describe the routers of a minibatch, means over layers.

  Args:
    counts: [L, E] choices over all real tokens.
    mass: [L, E] probability, summed likewise.
    entropy: [L] nats, summed likewise.
    tokens: [] real tokens.

  Returns:
    'router_entropy' in nats, 'router_load_max' (the busiest expert's tokens
    over the mean; 1 is even), 'router_unused' (share of experts without any
    token) and 'router_balance' (`balance_loss`). No share of dropped tokens:
    there are none.
  """
  mean = jnp.maximum(counts.mean(-1), 1e-30)
  return {
      'router_entropy': (entropy / jnp.maximum(tokens, 1.0)).mean(),
      'router_load_max': (counts.max(-1) / mean).mean(),
      'router_unused': (counts == 0).mean(),
      'router_balance': balance_loss(counts, mass, tokens),
  }


Activation = Callable[[Array], Array]
Product = Callable[[Array, Array, Array], Array]


def mix(
    h: Array,
    experts: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: Activation,
    platform: str,
    mesh: jax.sharding.Mesh | None = None,
    rules: Rules | None = None,
) -> Array:
  """Σ w_e down_e(activation(gate_e h) · up_e h) over the chosen experts.

  Args:
    h: [M, D] tokens.
    experts: [M, k] int32 chosen.
    weights: [M, k] float32 of each.
    gate: [E, D, F].
    up: [E, D, F].
    down: [E, F, D].
    activation: of the gate.
    platform: 'cpu', 'gpu' or 'tpu', which decides on the form.
    mesh: where the parameters lie; None for one device.
    rules: how they lie there.

  Returns:
    [M, D] in the dtype of `h`.
  """
  form = mix_every if platform == 'cpu' else mix_sorted
  if platform == 'tpu':
    form = functools.partial(mix_sorted, product=grouped_product)
  if mesh is None or mesh.size == 1:
    return form(h, experts, weights, gate, up, down, activation=activation)
  tokens = rules.spec(('tokens', None), h.shape, mesh)
  into = rules.spec(('expert', None, 'expert_mlp'), gate.shape, mesh)
  out_of = rules.spec(('expert', 'expert_mlp', None), down.shape, mesh)
  cut = (*mesh_axes(rules.expert), *mesh_axes(rules.expert_mlp))
  held = mesh_axes(rules.tokens)
  gathered = tuple(axis for axis in held if axis in cut)
  summed = tuple(axis for axis in cut if axis not in held)

  def share(h, experts, weights, gate, up, down):
    if gathered:
      h, experts, weights = (
          jax.lax.all_gather(x, gathered, axis=0, tiled=True)
          for x in (h, experts, weights)
      )
    if rules.expert is not None:
      # Those of other devices become numbers that no expert here has.
      place = jax.lax.axis_index(mesh_axes(rules.expert))
      experts = experts - place * len(gate)
    part = form(h, experts, weights, gate, up, down, activation=activation)
    if gathered:
      part = jax.lax.psum_scatter(
          part, gathered, scatter_dimension=0, tiled=True
      )
    return jax.lax.psum(part, summed) if summed else part

  return jax.shard_map(
      share,
      mesh=mesh,
      axis_names=free_axes(mesh),
      check_vma=False,  # the kernel for TPUs does not say where it varies
      in_specs=(tokens, tokens, tokens, into, into, out_of),
      out_specs=tokens,
  )(h, experts, weights, gate, up, down)


def mix_every(
    h: Array,
    experts: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: Activation,
) -> Array:
  """The plain form: every expert on every token, most of them times 0.

  Choices outside of 0..E-1 add nothing. Shapes as in `mix`.
  """
  mine = jax.nn.one_hot(experts, len(gate), dtype=jnp.float32)
  share = jnp.einsum('mk,mke->em', weights, mine)
  inner = activation(jnp.einsum('md,edf->emf', h, gate.astype(h.dtype)))
  inner = inner * jnp.einsum('md,edf->emf', h, up.astype(h.dtype))
  inner = (inner * share[..., None]).astype(h.dtype)
  return jnp.einsum('emf,efd->md', inner, down.astype(h.dtype))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped_product(
    x: Array, matrices: Array, sizes: Array, interpret: bool = False
) -> Array:
  """`jax.lax.ragged_dot`, with a gradient of the matrices by groups on a TPU.

  XLA for TPU has a kernel for the product and for the gradient of the rows.
  That of the matrices it computes as if every row were in every group, which
  takes E times the operations (libtpu 0.0.42).

  Args:
    x: [M, A] rows, sorted by group.
    matrices: [E, A, B] in the dtype of `x`.
    sizes: [E] int32 rows of each group.
    interpret: whether the gradient's kernel is to run without a TPU.

  Returns:
    [M, B]; not defined for rows behind all groups.
  """
  del interpret
  return jax.lax.ragged_dot(x, matrices, sizes)


def _grouped_forward(x, matrices, sizes, interpret):
  del interpret
  return jax.lax.ragged_dot(x, matrices, sizes), (x, matrices, sizes)


def _grouped_backward(interpret, kept, d_out):
  x, matrices, sizes = kept
  d_x = jax.lax.ragged_dot(d_out, matrices.swapaxes(1, 2), sizes)
  d_matrices = kernels.grouped_outer(x, d_out, sizes, interpret=interpret)
  return d_x, d_matrices.astype(matrices.dtype), None


grouped_product.defvjp(_grouped_forward, _grouped_backward)


def mix_sorted(
    h: Array,
    experts: Array,
    weights: Array,
    gate: Array,
    up: Array,
    down: Array,
    *,
    activation: Activation,
    product: Product = jax.lax.ragged_dot,
) -> Array:
  """The same with one row a choice, sorted by expert: M · k rows in all.

  Choices outside of 0..E-1 are sorted behind all groups. What a grouped product
  gives for rows that are in no group is not defined, so they are masked going
  in, for the gradient, and coming out. `product` multiplies rows [M · k, A] by
  the matrices [E, A, B] of their groups, of which [E] says the sizes.
  """
  (m, k), e = experts.shape, len(gate)
  flat = experts.reshape(-1)
  mine = (flat >= 0) & (flat < e)
  flat = jnp.where(mine, flat, e)
  order = jnp.argsort(flat, stable=True)
  sizes = jnp.bincount(flat, length=e + 1)[:e].astype(jnp.int32)
  mine = mine[order, None]

  def grouped(x, matrices):
    return product(x, matrices.astype(x.dtype), sizes)

  rows = jnp.where(mine, h[order // k], 0)
  inner = activation(grouped(rows, gate)) * grouped(rows, up)
  rows = jnp.where(mine, grouped(inner, down), 0).astype(jnp.float32)
  # Back into the order of choices: a gather, as adding would be a scatter.
  rows = rows[jnp.argsort(order)].reshape(m, k, -1)
  return jnp.einsum('mk,mkd->md', weights, rows).astype(h.dtype)
