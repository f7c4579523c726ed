"""Routers and experts against loops, hand-worked numbers and other meshes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
import numpy as np
import pytest
from safetensors import numpy as st

from areal_jax.config import ConfigError, resolve
from areal_jax.mesh.rules import Rules
from areal_jax.models import hf, kernels, moe, parameters, transformer
from areal_jax.models import layer_loop as layer_loop_lib
from areal_jax.models.config import MoeSettings
from tests import tiny
from tests.closeness import assert_close

M, D, E, F, K = 24, 8, 4, 6, 2


def _silu(x):
  return x / (1 + np.exp(-x))


@pytest.fixture(scope='module')
def layer():
  """Tokens, router and experts of one layer, in numpy."""
  draw = np.random.default_rng(0)
  shapes = {
      'h': (M, D),
      'router': (D, E),
      'gate': (E, D, F),
      'up': (E, D, F),
      'down': (E, F, D),
  }
  return {n: draw.normal(size=s).astype(np.float32) for n, s in shapes.items()}


def _by_loop(layer, renormalise, given=None):
  """Token after token, choice after choice, in float64."""
  p = {n: x.astype(np.float64) for n, x in layer.items()}
  out = np.zeros((M, D))
  experts = np.zeros((M, K), int)
  for t, h in enumerate(p['h']):
    scores = np.exp(h @ p['router'])
    scores /= scores.sum()
    best = np.argsort(-scores, kind='stable')[:K]
    if given is not None and given[t, 0] >= 0:
      best = given[t]
    experts[t] = best
    total = scores[best].sum() if renormalise else 1.0
    for e in best:
      inner = _silu(h @ p['gate'][e]) * (h @ p['up'][e])
      out[t] += scores[e] / total * (inner @ p['down'][e])
  return out, experts


def _layer_out(layer, *, form=None, given=None, renormalise=True,
               platform='cpu', mesh=None, rules=Rules()):  # fmt: skip
  """[M, D] of a whole sparse layer."""
  experts, weights, _ = moe.route(
      layer['h'],
      layer['router'],
      chosen=K,
      renormalise=renormalise,
      given=given,
  )
  matrices = layer['gate'], layer['up'], layer['down']
  arguments = (layer['h'], experts, weights, *matrices)
  if form is not None:
    return form(*arguments, activation=jax.nn.silu)
  return moe.mix(
      *arguments,
      activation=jax.nn.silu,
      platform=platform,
      mesh=mesh,
      rules=rules,
  )


FORMS = pytest.mark.parametrize('form', [moe.mix_every, moe.mix_sorted])


@FORMS
@pytest.mark.parametrize('renormalise', [True, False])
def test_a_layer_equals_a_loop_over_tokens_and_choices(
    layer, form, renormalise
):
  wanted, _ = _by_loop(layer, renormalise)
  got = _layer_out(layer, form=form, renormalise=renormalise)
  assert_close(got, wanted)


@FORMS
def test_experts_that_nobody_chose_and_one_that_all_chose_are_right(
    layer, form
):
  given = np.tile(np.array([2, 0]), (M, 1))
  wanted, _ = _by_loop(layer, True, given)
  got = _layer_out(layer, form=form, given=given)
  assert_close(got, wanted)


@FORMS
def test_choices_of_other_devices_add_nothing(layer, form):
  experts = np.array([[-1, 1], [E, 2], [-3, E + 5]])
  weights = np.full((3, K), 0.5, np.float32)
  matrices = layer['gate'], layer['up'], layer['down']
  got = form(layer['h'][:3], experts, weights, *matrices,
             activation=jax.nn.silu)  # fmt: skip
  wanted = np.zeros((3, D))
  for t, e in ((0, 1), (1, 2)):
    h = layer['h'][t]
    inner = _silu(h @ layer['gate'][e]) * (h @ layer['up'][e])
    wanted[t] = 0.5 * inner @ layer['down'][e]
  assert_close(got, wanted)


def _gradient(layer, **how):
  """Of a loss that weighs every output differently, by name."""
  scale = jnp.arange(M * D, dtype=jnp.float32).reshape(M, D) % 7 - 3

  def loss(layer):
    return jnp.sum(scale * _layer_out(layer, **how))

  return jax.jit(jax.grad(loss))(layer)


def test_both_forms_have_the_same_gradients(layer):
  every, sorted_ = (
      _gradient(layer, form=form) for form in (moe.mix_every, moe.mix_sorted)
  )
  for name, wanted in every.items():
    assert np.abs(wanted).max() > 0.1, name
    assert_close(sorted_[name], wanted)


# As a TPU has it, its kernel interpreted.
_PRODUCT = moe.grouped_product
INTERPRETED = lambda *given: _PRODUCT(*given, True)
AS_ON_TPU = functools.partial(moe.mix_sorted, product=INTERPRETED)


def test_the_kernel_of_the_gradient_sums_outer_products_by_group():
  draw = np.random.default_rng(0).normal
  x, y = (draw(size=(300, n)).astype(np.float32) for n in (20, 140))
  sizes = [0, 130, 1, 0, 129, 0]  # and 40 rows of no group
  got = kernels.grouped_outer(
      x, y, jnp.asarray(sizes, jnp.int32), interpret=True
  )
  ends = np.cumsum(sizes)
  wanted = [x[e - n : e].T @ y[e - n : e] for e, n in zip(ends, sizes)]
  assert_close(got, np.stack(wanted))


def test_gradients_by_groups_are_those_of_every_expert(layer):
  every = _gradient(layer, form=moe.mix_every)
  grouped = _gradient(layer, form=AS_ON_TPU)
  for name, wanted in every.items():
    assert_close(grouped[name], wanted)


MESHES = pytest.mark.parametrize(
    'shape, rules',
    [
        ((1, 2), Rules()),
        ((2, 4), Rules()),
        ((1, 2), Rules(expert=None, expert_mlp='tensor')),
        ((2, 2, 2), Rules()),  # the last one of expert
    ],
    ids=['2', '2x4', 'columns', 'gathered'],
)


@MESHES
@pytest.mark.parametrize(
    'platform, form',
    [
        ('cpu', moe.mix_every),
        ('gpu', moe.mix_sorted),
        ('tpu', moe.mix_every),
    ],
)
def test_experts_over_several_devices_equal_one_device(
    layer, platform, form, shape, rules, monkeypatch
):
  monkeypatch.setattr(moe, 'grouped_product', INTERPRETED)
  mesh = tiny.mesh(*shape)
  axes = {
      'h': ('tokens', None),
      'router': (None, None),
      'gate': ('expert', 'expert_embed', 'expert_mlp'),
      'up': ('expert', 'expert_embed', 'expert_mlp'),
      'down': ('expert', 'expert_mlp', 'expert_embed'),
  }
  placed = {
      name: jax.device_put(x, rules.sharding(axes[name], x.shape, mesh))
      for name, x in layer.items()
  }
  where = dict(platform=platform, mesh=mesh, rules=rules)
  got = jax.jit(functools.partial(_layer_out, **where))(placed)
  wanted = _layer_out(layer, form=form)
  assert_close(got, wanted)
  ours = _gradient(placed, **where)
  for name, theirs in _gradient(layer, form=form).items():
    assert_close(ours[name], theirs)


def test_given_choices_are_used_with_this_routers_weights(layer):
  _, own = _by_loop(layer, True)
  given = own.copy()
  given[: M // 2] = (own[: M // 2] + 1) % E
  given[M // 2 :] = moe.UNKNOWN
  experts, weights, probabilities = moe.route(
      layer['h'], layer['router'], chosen=K, renormalise=True, given=given
  )
  np.testing.assert_array_equal(experts[: M // 2], given[: M // 2])
  np.testing.assert_array_equal(experts[M // 2 :], own[M // 2 :])
  raw = np.take_along_axis(np.asarray(probabilities), np.asarray(experts), -1)
  np.testing.assert_allclose(
      weights, raw / raw.sum(-1, keepdims=True), rtol=1e-6
  )


def test_the_router_is_float32_where_tokens_are_not():
  # In bfloat16 both scores would be 256, and the first expert chosen.
  h = jnp.ones((1, 2), jnp.bfloat16)
  router = jnp.array([[256.0, 256.0], [0.0, 0.5]])
  experts, weights, _ = moe.route(h, router, chosen=1, renormalise=False)
  assert experts.tolist() == [[1]]
  assert weights.dtype == jnp.float32
  assert float(weights[0, 0]) == pytest.approx(1 / (1 + np.exp(-0.5)))


def test_balance_and_statistics_by_hand():
  # Three real tokens and one of padding, two experts, one choice each.
  probabilities = jnp.array([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.1, 0.9]])
  experts = jnp.array([[0], [0], [1], [1]])
  real = jnp.array([True, True, True, False])
  routing = moe.measure(experts, probabilities, real)
  assert routing.counts.tolist() == [2, 1]
  np.testing.assert_allclose(routing.mass, [1.7, 1.3], rtol=1e-6)
  found = moe.statistics(
      routing.counts[None],
      routing.mass[None],
      routing.entropy[None],
      jnp.float32(3),
  )
  # 2 (2/3 · 1.7/3 + 1/3 · 1.3/3)
  assert float(found['router_balance']) == pytest.approx(4.7 * 2 / 9)
  assert float(found['router_load_max']) == pytest.approx(4 / 3)
  assert float(found['router_unused']) == 0
  p = np.asarray(probabilities[:3])
  wanted = -(p * np.log(p)).sum() / 3
  assert float(found['router_entropy']) == pytest.approx(wanted, rel=1e-6)


def test_balance_is_k_where_all_is_even_and_e_at_worst():
  even = moe.balance_loss(
      jnp.full((3, E), 12.0), jnp.full((3, E), 6.0), jnp.float32(24)
  )
  assert float(even) == pytest.approx(K)
  one = jnp.array([[24.0, 0, 0, 0]])
  assert float(moe.balance_loss(one, one, jnp.float32(24))) == pytest.approx(E)


def test_balance_of_one_layer_is_the_published_formula(layer):
  """Worked as in transformers' `load_balancing_loss_func`, with a mask."""
  real = np.arange(M) % 3 != 0
  scores = layer['h'] @ layer['router']
  p = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
  best = np.argsort(-p, axis=-1)[:, :K]
  chosen = np.eye(E)[best]  # [M, k, E]
  fractions = chosen[real].mean(0)
  wanted = E * np.sum(fractions * p[real].mean(0)[None])
  experts, _, probabilities = moe.route(
      layer['h'], layer['router'], chosen=K, renormalise=True
  )
  routing = moe.measure(experts, probabilities, jnp.asarray(real))
  got = moe.balance_loss(
      routing.counts[None], routing.mass[None], jnp.float32(real.sum())
  )
  assert float(got) == pytest.approx(wanted, rel=1e-5)


def test_parts_of_a_batch_add_up_to_the_balance_of_the_whole(layer):
  def parts(router, cuts):
    """The loss of a batch cut there, its counts taken over the whole."""
    experts, _, p = moe.route(layer['h'], router, chosen=K, renormalise=True)
    counts = moe.measure(experts, p, jnp.ones(M, bool)).counts[None]
    total = 0.0
    for start, end in zip((0, *cuts), (*cuts, M)):
      part = moe.measure(
          experts[start:end], p[start:end], jnp.ones(end - start, bool)
      )
      total += moe.balance_loss(counts, part.mass[None], jnp.float32(M))
    return total

  both = jax.jit(jax.value_and_grad(parts), static_argnums=1)
  wanted = both(layer['router'], ())
  for cuts in ((12,), (5, 9, 20)):
    got = both(layer['router'], cuts)
    for ours, theirs in zip(got, wanted):
      assert_close(ours, theirs)
  assert np.abs(wanted[1]).max() > 1e-3


def test_a_step_down_the_balance_loss_evens_the_load(layer):
  router = jnp.asarray(layer['router'])

  def loss(router):
    experts, _, p = moe.route(layer['h'], router, chosen=K, renormalise=True)
    routing = moe.measure(experts, p, jnp.ones(M, bool))
    value = moe.balance_loss(
        routing.counts[None], routing.mass[None], jnp.float32(M)
    )
    return value, routing.counts

  step = jax.jit(jax.value_and_grad(loss, has_aux=True))
  (first, before), _ = step(router)
  for _ in range(100):
    (last, after), gradient = step(router)
    router = router - 0.3 * gradient
  assert float(last) < float(first)
  assert float(after.max()) < float(before.max())


# Whole policies.

POLICY = tiny.config(
    qk_norm=True,
    family='qwen3_moe',
    moe=MoeSettings(experts=4, chosen=2, width=24),
)
ROWS, TOKENS = 2, 12
DENSE = dataclasses.replace(POLICY, moe=MoeSettings(), layers=3)
POLICIES = {
    'sparse': POLICY,
    'scanned': dataclasses.replace(POLICY, layer_loop='scan', remat='full'),
    'dense': DENSE,
    'mixed': dataclasses.replace(
        DENSE, moe=MoeSettings(1, 1, DENSE.mlp_width, dense_layers=(1,))
    ),
}


@functools.cache
def policy_params():
  params = parameters.init_params(POLICY, 0, None, None)
  # Routers that prefer some experts clearly, so that a mistake shows.
  blocks = dict(params['blocks'], router=8 * params['blocks']['router'])
  return {**params, 'blocks': blocks}


def rows():
  """Two rows of one and two sequences, with padding at the end."""
  draw = np.random.default_rng(1)
  ids = draw.integers(0, tiny.VOCABULARY, (ROWS, TOKENS)).astype(np.int32)
  segments = np.array([[1] * 9 + [0] * 3, [1] * 5 + [2] * 6 + [0]])
  positions = np.array([[*range(9), 0, 0, 0], [*range(5), *range(6), 0]])
  return ids, positions, segments


@functools.cache
def program(name):
  """`forward_routed` of a policy: one program for free and given choices."""
  config = POLICIES[name]
  return jax.jit(functools.partial(transformer.forward_routed, config))


def run(name, params, given=None):
  """Logits of the rows, and the routing."""
  if given is None and POLICIES[name].moe.experts:
    shape = (ROWS, TOKENS, *POLICIES[name].routing_shape)
    given = np.full(shape, moe.UNKNOWN, np.int16)
  return program(name)(params, *rows(), given=given)


def choices(routing):
  """The experts of a routing as recorded: [B, T, L, k] int16."""
  experts = np.swapaxes(np.asarray(routing.experts), 0, 1)
  return experts.reshape(ROWS, TOKENS, *POLICY.routing_shape).astype(np.int16)


def test_a_layer_with_one_expert_is_a_plain_mlp():
  dense_params = parameters.init_params(DENSE, 0, None, None)
  blocks = dict(dense_params['blocks'])
  sparse = np.array([0, 2])
  for name in ('gate', 'up', 'down'):
    stack = blocks[name]
    blocks[f'expert_{name}'] = stack[sparse][:, None]
    blocks[name] = stack[1:2]
  blocks['router'] = jnp.ones((2, DENSE.width, 1))
  mixed_params = {**dense_params, 'blocks': blocks}
  shapes = jax.tree.map(jnp.shape, mixed_params)
  wanted = parameters.abstract_params(POLICIES['mixed'])
  assert shapes == jax.tree.map(jnp.shape, wanted)
  logits, routing = run('mixed', mixed_params)
  wanted, nothing = run('dense', dense_params)
  assert_close(logits, wanted)
  assert nothing is None
  assert routing.experts.shape == (2, ROWS * TOKENS, 1)


MIXTURES = {
    'in the middle': (2,),
    'at both ends': (0, 3, 4),
    'every second': (0, 2, 4),
    'blocks that repeat': (2, 5),
}


def mixed(dense, **changes):
  """A policy whose layers differ: some dense, some sliding."""
  moe_settings = MoeSettings(3, 2, 20, dense_layers=dense)
  config = dataclasses.replace(
      POLICY,
      moe=moe_settings,
      layers=6,
      sliding_window=4,
      sliding_layers=(1, 2, 4),
      **changes,
  )
  return resolve(config)


@functools.cache
def mixed_params(dense):
  params = parameters.init_params(mixed(dense), 0, None, None)
  blocks = dict(params['blocks'], router=8 * params['blocks']['router'])
  return {**params, 'blocks': blocks}


def logits_and_gradients(config, params):
  """Of the rows, with what the routers did."""

  def loss(params):
    logits, routing = transformer.forward_routed(config, params, *rows())
    real = (rows()[2] != 0)[..., None]
    return jnp.square(jnp.where(real, logits, 0)).mean(), (logits, routing)

  return jax.jit(jax.value_and_grad(loss, has_aux=True))(params)


@pytest.mark.parametrize(
    'name, remat',
    [
        ('in the middle', 'none'),
        ('at both ends', 'none'),
        ('blocks that repeat', 'none'),
        ('every second', 'full'),
    ],
)
def test_scanned_layers_of_two_kinds_equal_unrolled_ones(name, remat):
  dense = MIXTURES[name]
  params = mixed_params(dense)
  (_, (wanted, routed)), slopes = logits_and_gradients(mixed(dense), params)
  scan = mixed(dense, layer_loop='scan', remat=remat)
  (_, (got, routing)), gradient = logits_and_gradients(scan, params)
  np.testing.assert_allclose(got, wanted, atol=1e-6)
  jax.tree.map(
      lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), gradient, slopes
  )
  for sparse in ('router', 'expert_down', 'down', 'query'):
    assert np.abs(slopes['blocks'][sparse]).max() > 1e-5
  np.testing.assert_array_equal(routing.experts, routed.experts)
  np.testing.assert_allclose(routing.mass, routed.mass, rtol=1e-5)


@pytest.mark.parametrize('name', ['in the middle', 'blocks that repeat'])
def test_scanned_layers_of_two_kinds_decode_as_unrolled_ones(name):
  dense = MIXTURES[name]
  params = mixed_params(dense)
  ids = rows()[0][:, :8]
  found = {}
  for loop in ('unroll', 'scan'):
    config = mixed(dense, layer_loop=loop)
    keys, values = transformer.prefill(
        config, params, ids, np.array([8, 8], np.int32)
    )
    logits, caches = [], []
    cache = [
        x.reshape(6, 2, 8, *x.shape[3:]).astype(np.float32)
        for x in (keys, values)
    ]
    # A page more for each row, behind those of the prompt.
    cache = [jnp.concatenate([x, jnp.zeros_like(x)], 1) for x in cache]
    table = np.array([[0, 2], [1, 3]], np.int32)
    step = jax.jit(functools.partial(transformer.decode, config))
    for position in (8, 9):
      out, *cache = step(
          params,
          rows()[0][:, position],
          np.full(2, position, np.int32),
          *cache,
          table,
          np.ones(2, bool),
      )
      logits.append(out)
      caches.append(cache[0])
    found[loop] = keys, np.stack(logits), np.stack(caches)
  for got, wanted in zip(found['scan'], found['unroll']):
    np.testing.assert_allclose(got, wanted, atol=1e-5)


def test_given_choices_reach_their_layers_in_a_scan():
  dense = MIXTURES['blocks that repeat']
  params = mixed_params(dense)
  draw = np.random.default_rng(3)
  shape = (ROWS, TOKENS, *mixed(dense).routing_shape)
  given = np.argsort(draw.random((*shape[:-1], 3)))[..., :2].astype(np.int16)
  routed = {}
  for loop in ('unroll', 'scan'):
    logits, routing = transformer.forward_routed(
        mixed(dense, layer_loop=loop), params, *rows(), given=given
    )
    routed[loop] = logits
    flat = np.swapaxes(given.reshape(-1, *shape[2:]), 0, 1)
    np.testing.assert_array_equal(routing.experts, flat)
  np.testing.assert_allclose(routed['scan'], routed['unroll'], atol=1e-5)


def test_a_scan_compiles_each_block_once():
  runs = layer_loop_lib.runs
  assert runs((True,) * 48) == ((0, 1, 48),)
  assert runs((False, *[True] * 47)) == ((0, 1, 1), (1, 1, 47))
  # aabaabb, of the docstring.
  a, b = False, True
  assert runs((a, a, b, a, a, b, b)) == ((0, 3, 2), (6, 1, 1))
  assert runs((a, b) * 12) == ((0, 2, 12),)
  # One layer in the middle is a scan of its own between two.
  middle = (*[b] * 10, a, *[b] * 12)
  assert runs(middle) == ((0, 1, 10), (10, 1, 1), (11, 1, 12))
  for kinds in (middle, (a, a, b, a, b, b, a)):
    walked = [
        run.first + n
        for run in runs(kinds)
        for n in range(run.size * run.times)
    ]
    assert walked == [*range(len(kinds))]


def test_padding_counts_in_no_sum():
  _, routing = run('sparse', policy_params())
  real = int((rows()[2] != 0).sum())
  np.testing.assert_array_equal(routing.counts.sum(-1), [real * 2] * 2)
  np.testing.assert_allclose(routing.mass.sum(-1), [real] * 2, rtol=1e-5)


def test_scanned_layers_route_as_unrolled_ones_do():
  _, routing = run('sparse', policy_params())
  for given in (None, (choices(routing) + 1) % 4):
    logits, routing = run('sparse', policy_params(), given)
    ours, theirs = run('scanned', policy_params(), given)
    assert_close(ours, logits)
    np.testing.assert_array_equal(theirs.experts, routing.experts)


def test_replayed_choices_give_the_same_logits_and_others_do_not():
  params = policy_params()
  logits, routing = run('sparse', params)
  own = choices(routing)
  again, _ = run('sparse', params, own)
  np.testing.assert_array_equal(again, logits)
  other = own.copy()
  other[0, 4] = (own[0, 4] + 1) % 4
  moved, _ = run('sparse', params, other)
  moved = np.abs(np.asarray(moved) - logits).max(-1) > 1e-4
  np.testing.assert_array_equal(moved[0, :4], False)  # nothing looks ahead
  assert moved[0, 4] and not moved[1].any()


def test_prefill_and_decode_record_what_the_trainer_would_choose():
  params = policy_params()
  _, routing = run('sparse', params)
  wanted = choices(routing)
  ids = rows()[0]
  lengths = np.array([9, 5])
  (keys, values), experts = jax.jit(
      functools.partial(transformer.prefill_routed, POLICY)
  )(params, ids, lengths)
  shape = (ROWS, TOKENS, *POLICY.routing_shape)
  recorded = np.swapaxes(np.asarray(experts), 0, 1).reshape(shape)
  for row, length in enumerate(lengths):
    np.testing.assert_array_equal(recorded[row, :length], wanted[row, :length])
  # The cache as pages of one sequence each; the last token is fed again.
  (_, _, _), decoded = jax.jit(
      functools.partial(transformer.decode_routed, POLICY)
  )(
      params,
      ids[np.arange(ROWS), lengths - 1],
      lengths - 1,
      keys,
      values,
      np.arange(ROWS)[:, None],
      np.ones(ROWS, bool),
  )
  for row, length in enumerate(lengths):
    np.testing.assert_array_equal(decoded[:, row], wanted[row, length - 1])


def test_a_policy_over_several_devices_equals_one_device():
  def loss(params, **where):
    logits, routing = transformer.forward_routed(
        POLICY, params, *rows(), **where
    )
    real = rows()[2] != 0
    spread = moe.balance_loss(
        routing.counts, routing.mass, jnp.float32(real.sum())
    )
    logps = jax.nn.log_softmax(logits)[..., 7]
    return jnp.sum(jnp.where(real, logps, 0)) + spread, routing.counts

  mesh = tiny.mesh(2, 4)
  placed = jax.device_put(
      policy_params(), parameters.param_shardings(POLICY, mesh, Rules())
  )
  (wanted, counts), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(
      policy_params()
  )
  where = functools.partial(loss, mesh=mesh, rules=Rules())
  (value, ours), moved = jax.jit(jax.value_and_grad(where, has_aux=True))(
      placed
  )
  np.testing.assert_allclose(value, wanted, rtol=1e-5)
  np.testing.assert_array_equal(ours, counts)
  assert_close(moved, gradient)


def test_experts_lie_on_the_devices_of_their_axis():
  mesh = tiny.mesh(2, 4)
  specs = parameters.param_shardings(POLICY, mesh, Rules())['blocks']
  over = ('expert', 'tensor')
  assert specs['expert_up'].spec == P(None, over, 'fsdp', None)
  assert specs['expert_down'].spec == P(None, over, None, 'fsdp')
  assert specs['router'].spec == P(None, ('fsdp', 'expert'), None)
  with pytest.raises(ConfigError, match='expert of size 4 .* the 8 devices'):
    parameters.param_shardings(POLICY, tiny.mesh(1, 8), Rules(heads=None))


@pytest.mark.parametrize('family', ['mixtral', 'qwen3_moe'])
def test_a_written_policy_is_read_back_layer_by_layer(family, tmp_path):
  dense = (1,) if family == 'qwen3_moe' else ()
  config = tiny.config(
      family=family,
      layers=3,
      qk_norm=family == 'qwen3_moe',
      moe=MoeSettings(experts=3, chosen=2, width=24, dense_layers=dense),
  )
  params = parameters.init_params(config, 0, None, None)
  hf.save_hf(tmp_path, config, params)
  read, found = hf.load_hf(tmp_path, None, None)
  jax.tree.map(np.testing.assert_array_equal, found, params)
  assert read.moe == resolve(config).moe and read.family == family
  names = set(st.load_file(tmp_path / 'model.safetensors'))
  layer = 'model.layers.2.'
  if family == 'mixtral':
    wanted = ('block_sparse_moe.gate', 'block_sparse_moe.experts.2.w1')
  else:
    wanted = ('mlp.gate', 'mlp.experts.2.gate_proj')
    assert 'model.layers.1.mlp.gate_proj.weight' in names
    assert 'model.layers.1.mlp.gate.weight' not in names
  assert {f'{layer}{name}.weight' for name in wanted} <= names
  taken, left = hf.load_matching(tmp_path, config, params)
  assert not left
  more = dataclasses.replace(
      config, moe=dataclasses.replace(config.moe, experts=2)
  )
  fewer = parameters.init_params(more, 0, None, None)
  _, left = hf.load_matching(tmp_path, more, fewer)
  assert 'blocks/expert_up' in left and 'blocks/query' not in left
