"""The decode engine: invariants 6, 8 and 9, with planted faults."""

import ast
import dataclasses
import functools
import importlib.util
import pathlib
import re

import jax
import numpy as np
import pytest

from areal_jax.config import ConfigError
from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import mesh_of
from areal_jax.models import parameters, transformer
from areal_jax.models.config import MoeSettings
from areal_jax.rollout.decode_state import Pieces
from areal_jax.rollout.engine import Engine
from areal_jax.rollout.engine_plan import plan as plan_of
from areal_jax.rollout.engine_settings import EngineSettings
from areal_jax.rollout.prefix_engine import PrefixEngine
from areal_jax.rollout.sampling import SamplingFeatures
from areal_jax.telemetry.compilations import CompilationCounter
from tests import tiny
from tests.closeness import assert_close
from tests.plain_sampling import plain_logps

SETTINGS = dict(
    slots=4,
    max_length=64,
    max_prompt_length=32,
    page_size=8,
    steps=8,
    prefill_rows=2,
)


@pytest.fixture(scope='module')
def engine():
  return Engine(tiny.config(), EngineSettings(**SETTINGS), tiny.mesh(), Rules())


def start(engine, weights, requests, slots, state=None, tables=None):
  """A state in which each request was cached for its slot and occupies it."""
  state = engine.init_decode_state() if state is None else state
  tables = engine.own_tables() if tables is None else tables
  for request, slot in zip(requests, slots):
    tokens = np.asarray(request.prompt_ids, np.int32)
    shard = slot // engine.share.slots
    state = engine.extend_whole(weights, state, tokens, tables[slot], shard)
    state = engine.occupy(state, [slot], [request], [tokens])
  return state


def finish(engine, weights, state, dispatches=20, k=8, tables=None):
  """Runs until no slot is active; ids and log-probs of each slot."""
  slots = engine.settings.slots
  ids, logps = [[] for _ in range(slots)], [[] for _ in range(slots)]
  for _ in range(dispatches):
    state, result = engine.generate_steps(weights, state, k, tables)
    result = jax.device_get(result)
    for slot in range(slots):
      chosen = result.valid[slot]
      ids[slot] += result.tokens[slot][chosen].tolist()
      logps[slot] += result.logps[slot][chosen].tolist()
    if not result.active.any():
      return ids, logps, result
  raise AssertionError('slots still active')


def answer(engine, weights, request, slot=0, others=()):
  requests, slots = [request], [slot]
  for other, other_slot in others:
    requests.append(other)
    slots.append(other_slot)
  ids, logps, _ = finish(
      engine, weights, start(engine, weights, requests, slots)
  )
  return ids[slot], logps[slot]


def greedy_by_forward(weights, prompt, n):
  """The slow plain form: a whole forward pass for each token."""
  ids = list(prompt)
  for _ in range(n):
    candidates = [
        tiny.trainer_logps(weights, [*ids, token])[-1]
        for token in range(tiny.VOCABULARY)
    ]
    ids.append(int(np.argmax(candidates)))
  return ids[len(prompt) :]


def test_greedy_tokens_are_those_of_the_plain_forward(engine):
  weights = tiny.params()
  request = tiny.request(new=4, temperature=0.0)
  ids, _ = answer(engine, weights, request)
  assert ids == greedy_by_forward(weights, request.prompt_ids, 4)


@pytest.mark.parametrize('temperature', [0.5, 1.0, 1.5])
def test_engine_and_trainer_logps_agree_at_any_temperature(engine, temperature):
  weights = tiny.params()
  request = tiny.request(new=50, temperature=temperature)
  ids, logps = answer(engine, weights, request)
  assert len(ids) == 50
  full = [*request.prompt_ids, *ids]
  trainer = tiny.trainer_logps(weights, full, temperature)[3:]
  assert np.abs(trainer - logps).max() < 1e-4
  if temperature != 1.0:  # planted fault: the trainer forgets the temperature
    forgetful = tiny.trainer_logps(weights, full, 1.0)[3:]
    assert np.abs(forgetful - logps).max() > 1e-2


def test_tokens_do_not_depend_on_slot_or_neighbours(engine):
  weights = tiny.params()
  request = tiny.request(new=20, draw=7)
  alone = answer(engine, weights, request, slot=0)
  others = [
      (tiny.request('a', (9, 8, 7, 6), new=30, draw=8), 0),
      (tiny.request('b', range(1, 20), new=5, draw=9), 3),
  ]
  crowded = answer(engine, weights, request, slot=2, others=others)
  assert alone == crowded  # bit for bit: the shapes are the same


def test_tokens_do_not_depend_on_steps_a_dispatch(engine):
  weights = tiny.params()
  request = tiny.request(new=12)
  state = start(engine, weights, [request], [1])
  ids, logps, _ = finish(engine, weights, state, dispatches=30, k=1)
  assert (ids[1], logps[1]) == answer(engine, weights, request, slot=1)


def test_samples_of_a_group_share_a_prefill_and_differ(engine):
  weights = tiny.params()
  requests = [tiny.request(f'{i}', new=16, sample=i) for i in range(3)]
  prefixes = PrefixEngine(engine)
  prefix = prefixes.prefill(
      params=weights,
      padded_tokens=engine.pad_prompt(requests[0].prompt_ids),
      true_length=3,
  )
  state = prefixes.insert_many(
      prefix, engine.init_decode_state(), [3, 0, 2], requests
  )
  ids, _, _ = finish(engine, weights, state)
  for request, slot in zip(requests, [3, 0, 2]):
    assert ids[slot] == answer(engine, weights, request)[0]
  assert len({tuple(ids[s]) for s in (3, 0, 2)}) == 3
  assert ids[1] == []


def test_page_table_stands_between_slot_and_cache(engine):
  weights = tiny.params()
  request = tiny.request(new=20)
  tables = engine.own_tables()
  shuffled = np.random.default_rng(0).permutation(tables.size)
  tables = shuffled.astype(np.int32).reshape(tables.shape)
  state = start(engine, weights, [request], [1], tables=tables)
  ids, logps, _ = finish(engine, weights, state, tables=tables)
  assert (ids[1], logps[1]) == answer(engine, weights, request, slot=1)


def test_stop_ids_are_a_set_and_end_the_slot(engine):
  weights = tiny.params()
  free, _ = answer(engine, weights, tiny.request(new=20))
  stops = (free[9], free[5])
  expected = min(free.index(s) for s in stops) + 1
  request = tiny.request(new=20, stop_ids=stops)
  state = start(engine, weights, [request], [0])
  ids, _, result = finish(engine, weights, state)
  assert ids[0] == free[:expected]
  assert result.stopped[0]


def test_length_limit_ends_the_slot_without_a_stop(engine):
  weights = tiny.params()
  state = start(engine, weights, [tiny.request(new=7)], [0])
  ids, _, result = finish(engine, weights, state)
  assert len(ids[0]) == 7 and not result.stopped[0]


def test_stop_id_is_impossible_before_the_least_length(engine):
  weights = tiny.params()
  free, _ = answer(engine, weights, tiny.request(new=20))
  ids, _ = answer(
      engine,
      weights,
      tiny.request(new=20, stop_ids=(free[0],), min_new_tokens=6),
  )
  assert free[0] not in ids[:6] and len(ids) >= 6


def test_dispatch_ends_early_when_nobody_is_active(engine):
  weights = tiny.params()
  state = start(engine, weights, [tiny.request(new=3)], [0])
  _, result = engine.generate_steps(weights, state, 8)
  assert result.steps.tolist() == [3]


def test_released_slot_draws_nothing_more(engine):
  weights = tiny.params()
  state = start(engine, weights, [tiny.request(new=9)], [0])
  state = engine.release(state, [0])
  _, result = engine.generate_steps(weights, state, 8)
  assert result.steps.tolist() == [0] and not result.valid.any()


def test_slots_that_are_not_meant_stand_still(engine):
  weights = tiny.params()
  requests = [tiny.request(f'{i}', new=20, draw=i) for i in range(3)]
  state = start(engine, weights, requests, [0, 1, 3])
  before = jax.device_get((state.history, state.length, state.active))
  tables, slots = engine.own_tables(), np.array([3, 0], np.int32)
  state, result = engine.generate_steps(weights, state, 8, tables[slots], slots)
  after = jax.device_get((state.history, state.length, state.active))
  for was, now in zip(before, after):
    np.testing.assert_array_equal(was[[1, 2]], now[[1, 2]])
  assert after[1][[3, 0]].tolist() == (before[1][[3, 0]] + 8).tolist()
  for row, slot in enumerate(slots):
    wanted, _ = answer(engine, weights, requests[min(slot, 2)])
    assert np.asarray(result.tokens)[row].tolist() == wanted[:8]
  # And they go on as if nothing had happened.
  ids, _, _ = finish(engine, weights, state)
  assert ids[1] == answer(engine, weights, requests[1])[0]
  assert ids[0] == answer(engine, weights, requests[0])[0][8:]


def test_few_rows_are_halves_of_all_slots():
  rows = lambda slots, halvings: EngineSettings(
      slots=slots, halvings=halvings
  ).decode_rows
  assert rows(64, 2) == (64, 32, 16) and rows(64, 0) == (64,)
  assert rows(20, 9) == (20, 10, 5) and rows(8, 2) == (8,)
  with pytest.raises(ConfigError, match='e.halvings is -1, wanted at least 0'):
    EngineSettings(halvings=-1).validate('e')


def test_finished_slot_is_reused_without_a_trace(engine):
  weights = tiny.params()
  long = tiny.request('long', range(1, 25), new=30, draw=1)
  state = start(engine, weights, [long], [0])
  for _ in range(5):
    state, _ = engine.generate_steps(weights, state, 8)
  request = tiny.request(new=20, draw=2)
  ids, logps, _ = finish(
      engine, weights, start(engine, weights, [request], [0], state)
  )
  assert (ids[0], logps[0]) == answer(engine, weights, request)


def swapped(engine, request, *, rebuilt):
  """Half an answer by version 0, the rest by version 1."""
  old, new = tiny.params(0), tiny.params(1)
  state = start(engine, old, [request], [1])
  state, result = engine.generate_steps(old, state, 8)
  first = np.asarray(result.tokens)[1].tolist()
  if rebuilt:
    state = engine.rebuild(new, state, [1])
  ids, logps, _ = finish(engine, new, state)
  return first, ids[1], logps[1]


def test_rebuilt_cache_equals_a_cold_prefill_under_the_new_weights(engine):
  request = tiny.request(new=24, temperature=0.0)
  first, rest, logps = swapped(engine, request, rebuilt=True)
  cold = tiny.request(prompt=[*request.prompt_ids, *first], new=16,
                      temperature=0.0)  # fmt: skip
  cold_ids, cold_logps = answer(engine, tiny.params(1), cold)
  assert rest == cold_ids
  assert_close(logps, cold_logps)


def test_windows_hold_in_prefill_decode_and_rebuild():
  # One layer slides, so that neither walk may take one mask for all.
  config = tiny.config(sliding_window=6, sliding_layers=(1,))
  mesh, rules = tiny.mesh(), Rules()
  engine = Engine(config, EngineSettings(**SETTINGS), mesh, rules)
  request = tiny.request(prompt=range(1, 12), new=24, temperature=1.0)
  first, rest, logps = swapped(engine, request, rebuilt=True)
  ids = np.array([[*request.prompt_ids, *first, *rest]])

  def score(window):
    chosen = tiny.config(sliding_window=window, sliding_layers=(1,))
    logits = transformer.forward(
        chosen, tiny.params(1), ids, np.arange(ids.size)[None],
        np.ones_like(ids), mesh=mesh, rules=rules,
    )  # fmt: skip
    own = jax.nn.log_softmax(logits[0, :-1])[
        np.arange(ids.size - 1), ids[0, 1:]
    ]
    return np.asarray(own)[-len(rest) :]

  np.testing.assert_allclose(logps, score(6), atol=1e-4)
  assert np.abs(logps - score(7)).max() > 1e-3


def test_stale_cache_is_seen(engine):
  """Planted fault: weights change and the cache does not (mode `keep`)."""
  request = tiny.request(new=24)
  first, rest, logps = swapped(engine, request, rebuilt=False)
  full = [*request.prompt_ids, *first, *rest]
  trainer = tiny.trainer_logps(tiny.params(1), full)[-len(rest) :]
  assert np.abs(trainer - logps).max() > 1e-2


def test_rebuild_leaves_other_slots_alone(engine):
  weights = tiny.params()
  requests = [tiny.request(f'{i}', new=20, draw=i) for i in range(4)]
  state = start(engine, weights, requests, range(4))
  state, result = engine.generate_steps(weights, state, 4)
  keys = np.asarray(state.keys)
  state = engine.rebuild(weights, state, [0, 2, 3])
  after = np.asarray(state.keys)
  tables = engine.own_tables()
  np.testing.assert_array_equal(after[:, tables[1]], keys[:, tables[1]])
  assert_close(after[:, tables[2, 0], :6], keys[:, tables[2, 0], :6])


@pytest.mark.parametrize('tensor', [2, 4])
def test_engine_on_a_tensor_mesh_says_the_same(engine, tensor):
  # tensor 4 exceeds the 2 key/value heads, which are replicated there
  mesh = tiny.mesh(1, tensor)
  other = Engine(tiny.config(), EngineSettings(**SETTINGS), mesh, Rules())
  request = tiny.request(new=20)
  ids, logps = answer(other, tiny.params(on=mesh), request)
  expected, expected_logps = answer(engine, tiny.params(), request)
  assert ids == expected
  assert_close(logps, expected_logps)


# Data shards.


@pytest.fixture(scope='module')
def sharded():
  """Two shards of 2 slots and of 512 pages, over two devices each."""
  mesh = mesh_of(jax.devices()[:4], data=2, tensor=2)
  settings = EngineSettings(**SETTINGS, pages=1024)
  made = Engine(tiny.config(), settings, mesh, Rules().for_rollout())
  return made, tiny.params(on=mesh)


def four_requests():
  return [
      tiny.request(f'{i}', range(1, 2 + 5 * i), new=n, draw=i)
      for i, n in enumerate((2, 3, 20, 12))
  ]


def test_data_shards_say_what_one_device_says(engine, sharded):
  other, weights = sharded
  requests, slots = four_requests(), [2, 0, 3, 1]
  wanted = finish(
      engine, tiny.params(), start(engine, tiny.params(), requests, slots)
  )
  state = start(other, weights, requests, slots)
  got = finish(other, weights, state)
  assert got[0] == wanted[0]
  for one, plain in zip(got[1], wanted[1]):
    assert_close(one, plain)


def test_each_shard_ends_by_itself(sharded):
  engine, weights = sharded
  state = start(engine, weights, four_requests(), range(4))
  _, result = engine.generate_steps(weights, state, 8)
  assert result.steps.tolist() == [3, 8]


def test_a_page_of_another_shard_is_seen(engine, sharded):
  """Planted fault: the second shard's tables are counted from the first's."""
  other, weights = sharded
  requests = four_requests()
  plain = start(engine, tiny.params(), requests, range(4))
  wanted, _, _ = finish(engine, tiny.params(), plain)
  state = start(other, weights, requests, range(4))
  tables = other.own_tables()
  tables[2:] += tables[1, -1] + 1
  got, _, _ = finish(other, weights, state, tables=tables)
  assert got[:2] == wanted[:2]
  assert got[2] != wanted[2] and got[3] != wanted[3]


def test_rebuild_works_within_each_shard(engine, sharded):
  other, weights = sharded
  request = tiny.request(new=24, temperature=0.0)
  said = []
  for chosen, old, new in (
      (engine, tiny.params(), tiny.params(1)),
      (other, weights, tiny.params(1, on=other.mesh)),
  ):
    state = start(chosen, old, [request] * 2, [1, 2])
    state, _ = chosen.generate_steps(old, state, 8)
    state = chosen.rebuild(new, state, [1, 2])
    said.append(finish(chosen, new, state)[0])
  assert said[0] == said[1] and said[0][1] == said[0][2]


def test_prefix_of_jetstream_goes_to_any_shard(engine, sharded):
  other, weights = sharded
  request = tiny.request(prompt=range(1, 14), new=6)
  prefixes = PrefixEngine(other)
  prefix = prefixes.prefill(
      params=weights,
      padded_tokens=other.pad_prompt(request.prompt_ids),
      true_length=len(request.prompt_ids),
  )
  state = prefixes.insert_many(
      prefix, other.init_decode_state(), [3, 0], [request] * 2
  )
  ids, _, _ = finish(other, weights, state)
  wanted, _ = answer(engine, tiny.params(), request)
  assert ids[0] == ids[3] == wanted and not ids[1] and not ids[2]


def crossing(text):
  """Lines of a compiled program that send something between two shards."""
  found = []
  for line in text.splitlines():
    if re.search(r' (all-|reduce-scatter|collective-)[a-z-]*\(', line) is None:
      continue
    short = re.search(
        r'replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', line
    )
    if short:
      count, size, shape, order = short.groups()
      numbers = lambda text: [int(n) for n in text.split(',')]
      groups = np.arange(int(count) * int(size)).reshape(numbers(shape))
      if order:
        groups = groups.transpose(numbers(order))
      groups = groups.reshape(int(count), int(size)).tolist()
    else:
      listed = re.search(r'(?:groups|pairs)=\{(\{.*?\})\}', line)[1]
      groups = [
          [int(n) for n in group.split(',')]
          for group in re.findall(r'\{([\d,]+)\}', listed)
      ]
    # Devices 0 and 1 are the first shard.
    if any(len({device // 2 for device in group}) > 1 for group in groups):
      found.append(line)
  return found


def test_no_collective_joins_two_shards_and_none_has_a_copy(sharded):
  engine, _ = sharded
  like = engine.abstract_weights()
  state = engine.jitted.abstract_state
  here = sum(
      np.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
      for x in (state.keys, state.values)
  )
  # Half of the pages, and of the heads.
  assert here == 2 * state.keys.size * state.keys.dtype.itemsize // 4
  for trace in (
      engine.jitted.trace_generate(like, 8),
      engine.jitted.trace_extend(like, 2, 16),
  ):
    program = trace.lower().compile()
    text, memory = program.as_text(), program.memory_analysis()
    assert 'all-reduce' in text  # over the two devices of a shard
    assert crossing(text) == []
    assert memory.alias_size_in_bytes >= here
    assert memory.temp_size_in_bytes < here / 4
  # Planted fault: slots in another order are of other shards.
  turned = jax.jit(
      lambda x: x[::-1], out_shardings=engine.state_shardings.history
  )
  assert crossing(turned.lower(state.history).compile().as_text())


def test_what_does_not_divide_over_shards_is_refused():
  mesh = mesh_of(jax.devices()[:2], data=2)
  for change, words in (
      ({'slots': 3}, 'slots is 3, wanted a multiple of the 2 data shards'),
      ({'pages': 19}, 'pages is 19, wanted a multiple of the 2 data shards'),
      ({'pages': 16}, 'pages is 16, wanted 0 or at least 18'),
  ):
    settings = EngineSettings(**{**SETTINGS, **change})
    with pytest.raises(ConfigError, match=f'config.rollout.engine.{words}'):
      Engine(tiny.config(), settings, mesh, Rules().for_rollout())


def test_nothing_compiles_after_warm_up(engine):
  given = tiny.params()
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    engine.warm_up(engine.abstract_weights())  # and not from arrays
    assert counter.since_warm == 0  # it is the warm-up
    weights = engine.lay_out(given)
    requests = [
        tiny.request(f'{n}', range(1, n), new=60 - n, draw=n)
        for n in (2, 9, 18, 30)
    ]
    state = start(engine, weights, requests, range(4))
    state = engine.rebuild(weights, state, range(4))
    finish(engine, weights, state)
    assert counter.names_since_warm == []
    planted = jax.tree.map(
        lambda x: jax.device_get(x).astype('bfloat16'), given
    )
    engine.lay_out(jax.device_put(planted, engine.param_shardings))
  finally:
    counter.uninstall()
  assert counter.names_since_warm == ['jit(layer_apart)']  # what nobody planned


def test_nothing_compiles_after_a_warm_up_for_jetstream():
  mesh = mesh_of(jax.devices()[:2], data=2)
  settings = EngineSettings(**{**SETTINGS, 'max_prompt_length': 20})
  engine = Engine(tiny.config(), settings, mesh, Rules().for_rollout())
  given = tiny.params(on=mesh)
  prefixes = PrefixEngine(engine)
  prefixes.compile_ahead(engine.abstract_weights())
  engine.programs.wait_for_all()
  counter = CompilationCounter().install()
  counter.mark_warm()
  try:
    weights, state = engine.lay_out(given), engine.init_decode_state()
    for slot, length in enumerate((3, 18, 2)):
      request = tiny.request(prompt=range(1, 1 + length), new=4)
      prefix = prefixes.prefill(
          params=weights,
          padded_tokens=engine.pad_prompt(request.prompt_ids),
          true_length=length,
      )
      state = prefixes.insert(prefix, state, slot, request)
      state, _ = prefixes.generate(weights, state)
  finally:
    counter.uninstall()
  assert counter.names_since_warm == []


def test_programs_are_planned_in_the_order_of_need():
  settings = EngineSettings(
      **{**SETTINGS, 'slots': 20, 'max_length': 256, 'page_size': 16}
  )
  engine = Engine(tiny.config(), settings, tiny.mesh(), Rules())

  def plan(exact, which='work', engine=engine):
    planned = plan_of(engine.jitted, engine.abstract_weights(), exact)
    return [name for name, _ in planned.get(which, ())]

  rows = settings.piece_rows(16)
  first = [('init',), ('lay_out',), ('extend', rows, 16), ('occupy',)]
  assert plan(False)[:6] == [*first, ('generate', 20, 4), ('release',)]
  # Rebuilds come with new weights, and behind what a trainer has to compile.
  rebuild = ('extend', settings.piece_rows(64), 64)
  assert rebuild in plan(False, 'soon') and rebuild not in plan(False)
  assert {name[0] for name in plan(False, 'soon')} == {'extend'}
  # One by one prompts can come when there is a program for several.
  assert ('extend', 1, 16) in plan(False, 'soon')
  assert ('extend', settings.piece_rows(32), 32) in plan(False)
  every = plan(False) + plan(False, 'soon') + plan(False, 'later')
  assert len(set(every)) == len(every)
  decodes = [name[1:] for name in plan(False) if name[0] == 'generate']
  assert decodes == [(20, 4), (20, 8), (20, 16)]
  # Those for few slots later, if ever: a run can do without them.
  few = [(rows, width) for width in (4, 8, 16) for rows in (10, 5)]
  assert plan(False, 'later') == [('generate', *name) for name in few]
  # Loops that are exact take one sequence at a time, all slots and one width.
  assert [n for n in plan(True) if n[0] == 'generate'] == [('generate', 20, 16)]
  # Nor do they get new weights in the middle of one; pages may be taken.
  assert not plan(True, 'soon')
  every = plan(True) + plan(True, 'later')
  pieces = [name[1:] for name in every if name[0] == 'extend']
  assert pieces == [(1, bucket) for bucket in settings.piece_buckets]
  few_pages = dataclasses.replace(settings, pages=64)
  engine = Engine(tiny.config(), few_pages, tiny.mesh(), Rules())
  assert plan(True, 'soon', engine) == plan(True, 'later')
  assert plan(True, 'later', engine) == []


@pytest.mark.parametrize(
    'request_, named',
    [
        (tiny.request(prompt=range(40)), 'prompt of 40 tokens, wanted 1..32'),
        (tiny.request(prompt=()), 'prompt of 0 tokens'),
        (tiny.request(new=62), '3 prompt \\+ 62 new tokens, wanted at most 64'),
        (
            tiny.request(stop_ids=(1, 2, 3, 4, 5)),
            '5 stop ids, wanted at most 4',
        ),
    ],
)
def test_request_that_does_not_fit_is_refused(engine, request_, named):
  with pytest.raises(ValueError, match=named):
    engine.check(request_)


@pytest.mark.parametrize('multiple', [1, 16])
@pytest.mark.parametrize('absent', [((30, 40),), ((7, 9), (30, 40))])
def test_absent_ids_are_impossible_in_engine_and_trainer(absent, multiple):
  config = tiny.config(absent_ids=absent, vocab_multiple=multiple)
  extra = config.padded_vocab_size - tiny.VOCABULARY
  weights = dict(tiny.params())
  # Rows of padding that would win if they were let.
  weights['embedding'] = np.pad(
      weights['embedding'], ((0, extra), (0, 0)), constant_values=3
  )
  features = SamplingFeatures(max_logit_bias=1, prompt_logps=True)
  settings = EngineSettings(**SETTINGS, sampling=features)
  engine = Engine(config, settings, tiny.mesh(), Rules())
  requests = [tiny.request(new=50, draw=i, temperature=1.5) for i in range(4)]
  state = start(engine, weights, requests, range(4))
  ids, logps, _ = finish(engine, weights, state)
  names = {i for first, end in absent for i in range(first, end)}
  drawn = {token for answer in ids for token in answer}
  assert not drawn & names and max(drawn) < tiny.VOCABULARY and len(drawn) > 20

  # Over the possible ids alone the probabilities make 1.
  full = np.asarray([[1, 2, 3, *answer] for answer in ids])
  ones = np.ones_like(full)
  at = np.broadcast_to(np.arange(53), full.shape)
  plain = transformer.forward(tiny.config(), tiny.params(), full, at, ones)
  scaled = np.asarray(plain, np.float64) / 1.5
  possible = [i for i in range(tiny.VOCABULARY) if i not in names]
  total = np.log(np.exp(scaled[..., possible]).sum(-1))
  chosen = np.take_along_axis(scaled[:, :-1], full[:, 1:, None], -1)[..., 0]
  expected = chosen - total[:, :-1]
  np.testing.assert_allclose(logps, expected[:, 2:], atol=1e-4)

  trainer, _ = logprobs.token_logps(
      transformer.forward(config, weights, full, at, ones),
      full, ones, np.full(full.shape, 1.5),
  )  # fmt: skip
  np.testing.assert_allclose(trainer[:, 1:], expected, atol=1e-4)
  # planted fault: a trainer that leaves some mass to the absent ids
  leaky, _ = logprobs.token_logps(plain, full, ones, np.full(full.shape, 1.5))
  assert np.abs(leaky[:, 1:] - expected).max() > 1e-2
  asked = tiny.request(logit_bias=((absent[0][0], 1.0),))
  with pytest.raises(ValueError, match=r'logit_bias names ids \['):
    engine.check(asked)


def test_prefill_buckets_hold_every_prompt_and_are_page_multiples():
  settings = EngineSettings(max_length=100, max_prompt_length=70, page_size=16)
  assert settings.prefill_buckets == (16, 32, 64, 112)
  assert all(b % settings.page_size == 0 for b in settings.prefill_buckets)


def test_method_names_and_arguments_are_those_of_jetstream():
  """Reads the pinned release without importing it (it loads TensorFlow)."""
  package = importlib.util.find_spec('jetstream')
  if package is None:
    pytest.skip('google-jetstream is not installed')
  folder = pathlib.Path(next(iter(package.submodule_search_locations)))
  tree = ast.parse((folder / 'engine' / 'engine_api.py').read_text())
  abstract = next(
      node
      for node in tree.body
      if isinstance(node, ast.ClassDef) and node.name == 'Engine'
  )
  theirs = {
      node.name: [a.arg for a in node.args.args + node.args.kwonlyargs]
      for node in abstract.body
      if isinstance(node, ast.FunctionDef)
  }
  for name in ('prefill', 'insert', 'generate'):
    assert name in theirs, f'{name} is not in the JetStream API'
    assert hasattr(PrefixEngine, name)
  assert {'params', 'padded_tokens', 'true_length'} <= set(theirs['prefill'])
  assert {'prefix', 'decode_state', 'slot'} <= set(theirs['insert'])
  assert {'params', 'decode_state'} <= set(theirs['generate'])


def test_decode_state_is_donated(engine):
  weights = tiny.params()
  state = start(engine, weights, [tiny.request(new=9)], [0])
  keys = state.keys
  engine.generate_steps(weights, state, 8)
  assert keys.is_deleted()


# What shapes the distribution, and what is told of it.

SHAPED = dict(
    temperature=0.8,
    top_k=30,
    top_p=0.95,
    min_p=0.01,
    repetition_penalty=1.3,
    frequency_penalty=0.4,
    presence_penalty=0.2,
    logit_bias=((5, 1.0), (9, -2.0)),
)


@pytest.fixture(scope='module')
def featured():
  """An engine that was built for everything."""
  features = SamplingFeatures(
      penalties=True,
      max_logit_bias=2,
      max_top_logps=3,
      raw_logps=True,
      prompt_logps=True,
  )
  settings = EngineSettings(**SETTINGS, sampling=features)
  return Engine(tiny.config(), settings, tiny.mesh(), Rules())


def plain_answer_logps(weights, request, ids):
  """Log-probs of an answer by a plain forward and the plain sampler."""
  full = np.zeros((1, 64), np.int32)
  prompt = request.prompt_ids
  full[0, : len(prompt) + len(ids)] = [*prompt, *ids]
  logits = jax.jit(functools.partial(transformer.forward, tiny.config()))(
      weights, full, np.arange(64)[None], np.ones_like(full)
  )[0]
  return [
      plain_logps(
          logits[len(prompt) + i - 1], prompt, ids[:i], request.sampling
      )[token]
      for i, token in enumerate(ids)
  ]


def test_engine_logps_are_those_of_the_plain_sampler(featured):
  weights = tiny.params()
  request = tiny.request(new=24, **SHAPED)
  ids, logps = answer(featured, weights, request)
  expected = plain_answer_logps(weights, request, ids)
  np.testing.assert_allclose(logps, expected, atol=1e-4)
  # planted fault: two tokens of the answer are taken for the prompt's
  state = start(featured, weights, [request], [0])
  state.prompt_length = state.prompt_length + 2
  _, wrong, _ = finish(featured, weights, state)
  assert np.abs(np.subtract(wrong[0], expected)).max() > 1e-2


def test_shaped_tokens_do_not_depend_on_slot_neighbours_or_steps(featured):
  weights = tiny.params()
  request = tiny.request(new=20, draw=7, **SHAPED)
  alone = answer(featured, weights, request, slot=0)
  others = [
      (tiny.request('a', (9, 8, 7, 6), new=30, draw=8), 0),
      (tiny.request('b', range(1, 20), new=5, draw=9, presence_penalty=2.0), 3),
  ]
  assert answer(featured, weights, request, slot=2, others=others) == alone
  state = start(featured, weights, [request], [1])
  ids, logps, _ = finish(featured, weights, state, dispatches=30, k=1)
  assert (ids[1], logps[1]) == alone


def test_request_that_uses_nothing_is_the_same_in_an_engine_built_for_all(
    engine, featured
):
  weights = tiny.params()
  request = tiny.request(new=20, draw=7)
  plain, featured = (answer(e, weights, request) for e in (engine, featured))
  assert plain[0] == featured[0]
  assert_close(plain[1], featured[1])


def test_penalties_go_on_over_a_rebuild_and_in_another_slot(featured):
  weights = tiny.params()
  request = tiny.request(new=24, **SHAPED)
  ids, logps = answer(featured, weights, request)
  state = start(featured, weights, [request], [1])
  state, result = featured.generate_steps(weights, state, 8)
  state = featured.rebuild(weights, state, [1])
  rest, rest_logps, _ = finish(featured, weights, state)
  assert np.asarray(result.tokens)[1].tolist() + rest[1] == ids
  assert_close(rest_logps[1], logps[8:])


def test_prompt_logps_are_those_of_the_trainer(featured):
  weights = tiny.params()
  prompt = tuple(range(1, 20))
  told = featured.prompt_logps(
      weights, featured.pad_prompt(prompt), len(prompt)
  )
  expected = tiny.trainer_logps(weights, prompt)
  np.testing.assert_allclose(np.asarray(told)[:19], expected, atol=1e-4)
  assert not np.asarray(told)[19:].any()


def test_no_program_copies_the_cache():
  """The compiled programs write where they read, with no room for a copy."""
  settings = EngineSettings(**{**SETTINGS, 'pages': 4096})
  large = Engine(tiny.config(), settings, tiny.mesh(), Rules())
  state, s = large.state_shapes, settings
  cache = 2 * state.keys.size * state.keys.dtype.itemsize
  rows = s.piece_rows(16)
  integers = lambda *shape: jax.ShapeDtypeStruct(shape, np.int32)
  pieces = dict(
      ids=integers(rows, 16),
      starts=integers(rows),
      lengths=integers(rows),
      tables=integers(rows, s.pages_per_slot),
  )
  settings = large.jitted.rows.settings_of([0], [tiny.request()], s.occupy_rows)
  length = integers(s.occupy_rows)
  capacity = s.pages_per_slot * s.page_size
  params = tiny.params()
  lowered = {
      'generate': large.jitted.generate.lower(
          params, state, integers(s.slots, 8), integers()
      ),
      'extend': large.jitted.extend.lower(params, state, pieces),
      'occupy': large.jitted.occupy.lower(
          state, vars(settings), integers(s.occupy_rows, capacity),
          length, length, integers(s.occupy_rows, 2),
      ),
      'release': large.jitted.release.lower(
          state, jax.ShapeDtypeStruct((s.slots,), bool)
      ),
  }  # fmt: skip
  for name, program in lowered.items():
    memory = program.compile().memory_analysis()
    assert memory.alias_size_in_bytes >= cache, name
    assert memory.temp_size_in_bytes < cache / 8, name
  # Planted fault: without donation there is a second one.
  kept = jax.jit(large.jitted.bodies.release).lower(
      state, jax.ShapeDtypeStruct((s.slots,), bool)
  )
  assert kept.compile().memory_analysis().alias_size_in_bytes == 0


def test_prefix_of_jetstream_gives_the_same_answer(engine):
  weights = tiny.params()
  request = tiny.request(prompt=range(1, 14), new=20)
  prefixes = PrefixEngine(engine)
  prefix = prefixes.prefill(
      params=weights,
      padded_tokens=engine.pad_prompt(request.prompt_ids),
      true_length=len(request.prompt_ids),
  )
  state = prefixes.insert_many(
      prefix, engine.init_decode_state(), [2, 0], [request] * 2
  )
  ids, logps, _ = finish(engine, weights, state)
  wanted_ids, wanted_logps = answer(engine, weights, request)
  assert ids[0] == ids[2] == wanted_ids
  assert_close(logps[2], wanted_logps)


# Experts.


@pytest.fixture(scope='module')
def sparse():
  """An engine that records choices, and weights for it."""
  config = tiny.config(
      family='mixtral', moe=MoeSettings(experts=4, width=24, replay=True)
  )
  weights = parameters.init_params(config, 0, tiny.mesh(), Rules())
  weights = jax.tree.map(lambda x: x * 3.0 if x.ndim > 2 else x, weights)
  settings = EngineSettings(**SETTINGS)
  return Engine(config, settings, tiny.mesh(), Rules()), weights


def recorded(engine, weights, request, slot, others=()):
  """Tokens, log-probs and the choices of all that was fed, in order."""
  requests, slots = [request, *(r for r, _ in others)], [slot]
  slots += [s for _, s in others]
  state = start(engine, weights, requests, slots)
  prefixes = PrefixEngine(engine)
  prefix = prefixes.prefill(
      params=weights,
      padded_tokens=engine.pad_prompt(request.prompt_ids),
      true_length=len(request.prompt_ids),
  )
  fed = [np.asarray(prefix.routing)[: len(request.prompt_ids) - 1]]
  ids, logps, active = [], [], True
  while active:
    state, result = engine.generate_steps(weights, state, 3)
    result = jax.device_get(result)
    count = result.valid[slot].sum()
    ids += result.tokens[slot, :count].tolist()
    logps += result.logps[slot, :count].tolist()
    fed.append(result.routing[slot, :count])
    active = result.active[slot]
  return ids, np.array(logps), np.concatenate(fed)


def test_engine_records_the_choices_that_the_trainer_would_make(sparse):
  engine, weights = sparse
  request = tiny.request(new=20)
  ids, logps, fed = recorded(engine, weights, request, 1)
  full = np.array([[*request.prompt_ids, *ids]])
  positions, ones = np.arange(full.shape[1])[None], np.ones_like(full)
  logits, routing = jax.jit(
      functools.partial(transformer.forward_routed, engine.config)
  )(weights, full, positions, ones)
  chosen = np.swapaxes(np.asarray(routing.experts), 0, 1)
  assert fed.dtype == np.int16
  np.testing.assert_array_equal(fed, chosen[:-1])  # the last is never fed
  trainer = jax.nn.log_softmax(logits)[0, :-1]
  trainer = np.asarray(trainer)[np.arange(len(trainer)), full[0, 1:]]
  assert np.abs(trainer[2:] - logps).max() < 1e-4


@pytest.mark.parametrize('axis', ['tensor', 'data'])
def test_engine_with_experts_over_an_axis_says_the_same(sparse, axis):
  engine, weights = sparse
  mesh = mesh_of(jax.devices()[:4], expert=2, **{axis: 2})
  other = Engine(engine.config, engine.settings, mesh, Rules().for_rollout())
  placed = jax.device_put(weights, other.param_shardings)
  experts, query = placed['blocks']['expert_up'], placed['blocks']['query']
  cut = 2 if axis == 'tensor' else 1
  assert experts.sharding.shard_shape(experts.shape)[1] == 2 // cut  # of 4
  own = query.sharding.shard_shape(query.shape)[1:3]
  assert own == (32, 4 // cut)  # of D, N 4
  request = tiny.request(new=12)
  ids, logps, fed = recorded(other, placed, request, 3)
  wanted_ids, wanted_logps, wanted_fed = recorded(engine, weights, request, 1)
  assert ids == wanted_ids
  assert_close(logps, wanted_logps)
  np.testing.assert_array_equal(fed, wanted_fed)


def test_experts_of_a_token_do_not_depend_on_slot_or_neighbours(sparse):
  engine, weights = sparse
  request = tiny.request(new=12, draw=7)
  alone = recorded(engine, weights, request, 0)
  others = [(tiny.request('b', range(1, 20), new=30, draw=9), 3)]
  crowded = recorded(engine, weights, request, 2, others)
  for one, other in zip(alone, crowded):
    np.testing.assert_array_equal(one, other)


def test_a_rebuild_records_the_choices_of_the_new_weights(sparse):
  engine, weights = sparse
  newer = {**weights, 'embedding': weights['embedding'][:, ::-1]}
  request = tiny.request(new=20)
  state = start(engine, weights, [request], [2])
  state, result = engine.generate_steps(weights, state, 6)
  ids = [*request.prompt_ids, *np.asarray(result.tokens)[2, :6].tolist()]
  padded = np.zeros((1, 16), np.int32)
  padded[0, : len(ids)] = ids
  pieces = Pieces(
      ids=padded,
      starts=np.zeros(1, np.int32),
      lengths=np.full(1, len(ids), np.int32),
      tables=engine.own_tables()[2:3],
  )
  _, rows = engine.extend(newer, state, pieces)
  full = np.array([ids])
  choose = jax.jit(functools.partial(transformer.forward_routed, engine.config))
  found = []
  for chosen_by in (newer, weights):
    _, routing = choose(
        chosen_by, full, np.arange(len(ids))[None], np.ones_like(full)
    )
    found.append(np.swapaxes(np.asarray(routing.experts), 0, 1))
  np.testing.assert_array_equal(rows[0, : len(ids)], found[0])
  assert not np.array_equal(*found)


def test_a_dense_policy_records_nothing(engine):
  weights = tiny.params()
  state = start(engine, weights, [tiny.request(new=2)], [0])
  assert engine.generate_steps(weights, state, 1)[1].routing is None
