"""The arithmetic of benchmarks/generate.py by hand, and a small run of it."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest

from areal_jax.models import parameters
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.types import Completion, StopReason
from benchmarks import generate, serving
from benchmarks.serving import Ours, Peer, Served, Work
from tests import tiny
from tests.conftest import ROOT

WORK = Work('some', slots=4, requests=10, prompt=5, limit=6, stops=3, group=4)


def served(**changes) -> Served:
  values = dict(
      seconds=2.0,
      tokens=30,
      steps=20,
      waiting=(1.0, 27, 9),
      answers=[],
      host=0.0,
      step=0.004,
      prefilled=40,
      swaps=[],
  )
  return Served(**{**values, **changes})


def test_group_has_its_prompt_in_common_and_no_other():
  prompts = WORK.prompts(512)
  assert len(prompts) == 10 and {len(p) for p in prompts} == {5}
  assert len(set(prompts[:4])) == 1 and len(set(prompts)) == 3
  assert min(map(min, prompts)) >= 1  # 0 is padding elsewhere
  asked = serving.requests(WORK, 512)
  assert [r.prompt_ids for r in asked] == prompts
  assert [(r.draw_index, r.sample) for r in asked[3:6]] == [
      (0, 3), (1, 0), (1, 1),
  ]  # fmt: skip
  assert asked[0].sampling.stop_ids == (1, 2, 3)


def test_others_get_the_same_requests_in_the_same_order():
  work = WORK.batches(512)
  assert [len(batch) for batch in work['batches']] == [4, 4, 2]
  assert sum(work['batches'], []) == WORK.prompts(512)
  assert work['limit'] == 6 and work['stop_ids'] == [1, 2, 3]


def test_slots_are_busy_as_long_as_requests_wait():
  # 27 of 4 · 9 places, whatever came after.
  assert served().busy(4) == 0.75
  rows = {r.row: r for r in generate.steady_rows(WORK, [served()])}
  assert not rows['some: slots busy'].met
  assert rows['some: slots busy, to the last answer'].value == 30 / 80
  full = served(waiting=(1.0, 36, 9))
  assert generate.steady_rows(WORK, [full])[0].met


def test_ratio_is_taken_round_by_round():
  # The second round ran on a machine twice as slow: no ratio of medians is 3.
  assert generate.ratio_of([6.0, 3.0, 9.0], [2.0, 1.0, 3.0]) == 3
  with pytest.raises(ValueError):
    generate.ratio_of([1.0], [1.0, 2.0])


def span(kind, start, duration):
  return {'kind': kind, 'mono': start, 'duration': duration}


def test_host_has_the_time_in_which_no_program_runs():
  spans = [
      span('prefill', 9.5, 1.0),  # half of it before the window
      span('generate', 11.0, 4.0),
      span('swap', 14.0, 2.0),  # one second of it beside the last one
      span('score', 10.0, 10.0),  # of another room
  ]
  assert serving.host_share(spans, (10.0, 20.0)) == pytest.approx(0.45)


def test_products_are_those_of_the_policy():
  config = generate.plan(short=False).model
  *layer, last = generate.product_shapes(config)
  d, h = config.width, config.head_size
  params = {
      name: int(np.prod(leaf.shape))
      for name, leaf in _flat(config).items()
      if leaf.ndim > 2 or name == 'unembedding'
  }
  matrices = config.layers * sum(a * b for a, b in layer) + last[0] * last[1]
  assert matrices == sum(params.values())
  # Of the whole: 4 layers of (D, (N + 2 K) H), (N H, D), 3 D F; and D V.
  assert matrices == 4 * (d * 8 * h + 4 * h * d + 3 * d * 1024) + d * 512


def _flat(config):
  params = parameters.abstract_params(config)
  blocks = params['blocks']
  named = {n: x for n, x in blocks.items() if not n.endswith('bias')}
  return {**named, 'unembedding': params['unembedding']}


def test_floor_adds_products_reading_and_attention():
  config = tiny.config(tied_embeddings=False)
  floor = generate.Floor(config, slots=4, context=10.0)
  # Keys and values: 2 layers of 4 slots, 10 tokens, 2 heads of 8.
  assert floor._cache.size == 2 * 2 * 4 * 10 * 2 * 8
  floor.times = [(0.003, 0.001, 9.0), (0.002, 0.001, 9.0), (0.004, 0.003, 9.0)]
  products, reading, both, own = floor.seconds()
  assert both == 9.0
  assert (products, reading) == (0.003, 0.001)
  layer = 32 * 64 + 32 * 32 + 3 * 32 * 48
  plain = 2 * 4 * (2 * layer + 32 * 40)
  assert own == pytest.approx(0.003 * (2 * 4 * 4 * 4 * 8 * 10) / plain)
  share = generate.floor_rows(WORK, [served(step=0.005)], floor)[-2]
  assert share.value == pytest.approx((0.004 + own) / 0.005) and share.met
  slow = generate.floor_rows(WORK, [served(step=0.01)], floor)[-2]
  assert not slow.met


PEER = """
import json, sys
shape = json.loads(sys.argv[1])
for line in sys.stdin:
  work = json.loads(line)
  if work['limit'] > 6:
    sys.exit('too long for me')
  tokens = shape['layers'] * sum(map(len, work['batches']))
  print(json.dumps({'seconds': 0.5, 'tokens': tokens}), flush=True)
"""


def test_peer_waits_for_work_and_its_end_is_told(tmp_path):
  script = tmp_path / 'peer.py'
  script.write_text(PEER)
  peer = Peer(sys.executable, str(script), tiny.config())
  work = WORK.batches(512)
  assert peer.serve(work) == (0.5, 20) == peer.serve(work)
  with pytest.raises(RuntimeError, match='too long for me'):
    peer.serve({**work, 'limit': 7})
  peer.close()


@pytest.fixture(scope='module')
def ours():
  counter = CompilationCounter().install()
  work = dataclasses.replace(WORK, requests=12)
  engine = Ours(tiny.config(tied_embeddings=False), [work], counter)
  yield engine
  counter.uninstall()


def test_all_requests_are_answered_and_counted(ours):
  work = dataclasses.replace(WORK, requests=12)
  found = ours.serve(work, ours.flat)
  assert len(found.answers) == 12
  assert [a.request_id for a in found.answers] == [str(i) for i in range(12)]
  assert found.tokens == sum(len(a.ids) for a in found.answers)
  # Each group once, or again; decoding feeds the last token of a prompt.
  assert found.prefilled >= 3 * (work.prompt - 1)
  seconds, tokens, steps = found.waiting
  assert 0 < seconds <= found.seconds
  assert 0 < tokens <= found.tokens and 0 < steps <= found.steps
  assert 0 < found.busy(work.slots) <= 1 and 0 <= found.host < 1
  assert not found.swaps


def test_every_token_is_as_likely_under_the_flat_policy(ours):
  work = dataclasses.replace(WORK, requests=12)
  for answer in ours.serve(work, ours.flat).answers:
    np.testing.assert_allclose(answer.logps, -np.log(tiny.VOCABULARY), 1e-5)


def test_gap_is_of_tokens_behind_a_swap(ours):
  ids = np.asarray([4, 5, 6, 7], np.int32)
  said = lambda versions, logps: Completion(
      '0',
      ids,
      np.asarray(logps, np.float32),
      np.asarray(versions, np.int32),
      StopReason.LENGTH,
  )
  even = -np.log(tiny.VOCABULARY)
  one = said([0, 0, 1, 1], [9, 9, even, even + 0.5])
  whole = said([1, 1, 1, 1], [9, 9, 9, 9])  # never swapped
  gaps = generate.gaps_after_swaps(
      generate.score_program(ours.config),
      ours.config.vocab_size,
      WORK,
      [one, whole],
      [None, ours.flat],
  )
  np.testing.assert_allclose(gaps, [0, 0.5], atol=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_short_run_prints_a_table():
  command = [sys.executable, '-m', 'benchmarks.generate', '--short']
  done = subprocess.run(
      command, cwd=ROOT, capture_output=True, text=True, check=True
  )
  last = json.loads(done.stdout.splitlines()[-1])
  assert last['name'] == 'generate'
  rows = {row['row']: row for row in last['rows']}
  assert rows['compilations after warm-up']['value'] == 0
  assert rows['interruption: recompute: largest gap, nats']['met']
  kept = rows['interruption: keep: mean gap, nats']['value']
  assert kept > 10 * rows['interruption: recompute: mean gap, nats']['value']
  assert rows['8 samples of 64: prompt tokens asked for / computed']['met']
  assert rows['first token: seconds after imports']['value'] > 0
