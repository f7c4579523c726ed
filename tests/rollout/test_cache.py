"""Which pages sequences get, what is computed for them, and what is not."""

import numpy as np
import pytest

from areal_jax.rollout.cache import SlotCache
from areal_jax.rollout.engine_settings import EngineSettings

PAGE = 4


def make(exact=False, shards=1, alone=lambda bucket: True, **changes):
  shape = dict(
      slots=4,
      max_length=64,
      max_prompt_length=48,
      page_size=PAGE,
      chunk=16,
      prefill_rows=4,
  )
  settings = EngineSettings(**{**shape, **changes})
  return SlotCache(settings, exact=exact, shards=shards, alone=alone)


def tokens(n, seed=0):
  return np.random.default_rng(seed).integers(0, 99, n).astype(np.int32)


def compute(cache):
  """All pieces: (start, length) of each row that is meant, call by call."""
  calls = []
  while True:
    pieces = cache.next_piece(long=False) or cache.next_piece(long=True)
    if pieces is None:
      return calls
    calls.append(
        [(s, n) for s, n in zip(pieces.starts, pieces.lengths) if n > 0]
    )


def test_siblings_share_full_pages_and_copy_the_rest():
  cache = make()
  prompt = tokens(11)  # 10 are cached: two pages and 2 tokens
  placed = [cache.place([s], prompt, 20) for s in range(3)]
  assert compute(cache) == [[(0, 10)]]
  ready = cache.ready()
  assert [r.sequence for r in ready] == placed
  shared = {tuple(p.pages[:2]) for p in placed}
  assert len(shared) == 1
  own = [p.pages[2] for p in placed]
  assert len(set(own)) == 3
  assert len({r.copy[0] for r in ready}) == 1
  assert [r.copy[1] for r in ready] == own
  # Two shared and one of its own each; what was copied is only remembered.
  assert cache.pools[0].used == 5 and cache.pools[0].idle == 1
  assert [p.found_tokens for p in placed] == [0, 10, 10]


@pytest.mark.parametrize(
    'exact, there, rows',
    [(False, True, 1), (False, False, 4), (True, False, 1)],
)
def test_a_prompt_alone_goes_through_the_program_that_is_there(
    exact, there, rows
):
  asked = []
  cache = make(
      exact, chunk=64, alone=lambda bucket: asked.append(bucket) or there
  )
  cache.place([0], tokens(11), 20)
  pieces = cache.next_piece(long=False)
  assert pieces.ids.shape == (rows, 16)
  assert pieces.lengths.tolist() == [10] + [0] * (rows - 1)
  assert asked == [] if exact else [16]


def test_a_late_sibling_finds_what_the_first_one_has_computed():
  cache = make()
  prompt = tokens(11)
  cache.place([0], prompt, 20)
  compute(cache)
  cache.ready()
  cache.grow(0, 19)
  cache.end(0, np.concatenate([prompt, tokens(9, 1)]))
  late = cache.place([1], prompt, 20)
  assert compute(cache) == []
  (ready,) = cache.ready()
  assert ready.sequence is late and ready.copy is not None


def test_a_page_that_slots_write_to_is_never_shared():
  """8 cached tokens are two full pages; the next token opens a third."""
  cache = make()
  for n in (8, 9, 10):
    slots = {}
    for slot in range(3):
      cache.place([slot], tokens(n), 30)
    compute(cache)
    cache.ready()
    for slot in range(3):
      assert cache.grow(slot, n)
      slots[slot] = cache.tables[slot, (n - 1) // PAGE]
    assert len(set(slots.values())) == 3, n
    for slot in range(3):
      cache.end(slot)


def test_another_prompt_with_the_same_beginning_starts_behind_it():
  cache = make()
  one = tokens(11)
  two = one.copy()
  two[6] += 1  # in the second page
  cache.place([0], one, 20)
  second = cache.place([1], two, 20)
  # The second waits for the page that both begin with, and computes the rest.
  assert compute(cache) == [[(0, 10)], [(4, 6)]]
  assert second.found_tokens == 4


def test_a_sequence_whose_leader_is_gone_computes_by_itself():
  cache = make()
  cache.place([0], tokens(11), 20)
  cache.place([1], tokens(11), 20)
  cache.end(0)
  assert compute(cache) == [[(0, 10)]]
  (ready,) = cache.ready()
  assert ready.sequence.slot == 1


def test_pieces_of_one_bucket_are_computed_together():
  cache = make(chunk=64)
  for slot, n in enumerate((9, 30, 12, 15)):
    cache.place([slot], tokens(n, seed=n), 60)
  # 16 by 4 rows, then 32 by itself.
  assert compute(cache) == [[(0, 8), (0, 11), (0, 14)], [(0, 29)]]


def test_long_sequences_come_in_pieces_and_wait_for_their_turn():
  cache = make()
  cache.place([0], tokens(40), 60)
  cache.place([1], tokens(5, 1), 60)
  assert list(cache.next_piece(long=False).lengths) == [4]
  assert cache.next_piece(long=False) is None
  starts = []
  while (pieces := cache.next_piece(long=True)) is not None:
    starts.append((int(pieces.starts[0]), int(pieces.lengths[0])))
  assert starts == [(0, 16), (16, 16)]
  last = cache.next_piece(long=False)  # no more than a piece is left
  assert (last.starts[0], last.lengths[0]) == (32, 7)
  row = last.tables[0]
  assert len(set(row[:10].tolist())) == 10  # it reads all pages before


def test_a_next_turn_goes_on_from_the_answer():
  cache = make()
  prompt, answer = tokens(9), tokens(12, 1)
  cache.place([0], prompt, 40)
  compute(cache)
  cache.ready()
  cache.grow(0, 20)
  whole = np.concatenate([prompt, answer])  # 20 of 21 are cached: 5 pages
  cache.end(0, whole)
  turn = cache.place([0], np.concatenate([whole, tokens(6, 2)]), 60)
  assert turn.found_tokens == 20
  assert compute(cache) == [[(20, 6)]]


def test_admission_keeps_a_page_for_everybody_who_may_need_one():
  cache = make(pages=17)
  assert cache.place([0], tokens(33), 64)  # 8 full pages
  compute(cache)
  cache.ready()
  # 9 left: this one would need 8, a page to copy and one of its own.
  assert cache.place([1], tokens(34, 1), 64) is None
  assert cache.pools[0].used == 8
  assert cache.place([1], tokens(26, 1), 64)


def test_no_slot_is_refused_with_the_default_number_of_pages():
  cache = make()
  for slot in range(4):
    assert cache.place([slot], tokens(48, slot), 64)
    compute(cache)
    cache.ready()
    assert cache.grow(slot, 63)


def test_new_weights_leave_nothing_to_find():
  cache = make()
  prompt = tokens(11)
  cache.place([0], prompt, 20)
  compute(cache)
  cache.ready()
  cache.new_weights(None)
  second = cache.place([1], prompt, 20)
  assert second.found_tokens == 0
  cache.end(0, prompt)  # its pages are of the old weights
  cache.end(1)
  assert cache.place([2], prompt, 20).found_tokens == 0


def test_shared_pages_are_rebuilt_once():
  cache = make(chunk=64)
  prompt = tokens(11)
  for slot in range(3):
    cache.place([slot], prompt, 40)
  compute(cache)
  cache.ready()
  whole = {}
  for slot in range(3):
    assert cache.grow(slot, 15)
    whole[slot] = np.concatenate([prompt, tokens(4, slot)])
  cache.new_weights(whole)
  # 14 are cached: the first one's all, of the others what is behind 8.
  assert compute(cache) == [[(0, 14)], [(8, 6), (8, 6)]]
  assert len(cache.ready()) == 3
  # And what is rebuilt can be found again.
  assert cache.place([3], prompt, 40).found_tokens == 8


@pytest.mark.parametrize('exact', [False, True])
def test_exact_books_find_only_what_the_same_programs_computed(exact):
  cache = make(exact, chunk=32)
  cache.place([0], tokens(12), 30)
  cache.place([1], tokens(12), 30)  # a sibling
  shorter = cache.place([2], tokens(9), 30)  # 8 of the 11 tokens, same bucket
  calls = compute(cache)
  assert calls == ([[(0, 11)], [(0, 8)]] if exact else [[(0, 11)]])
  assert shorter.found_tokens == (0 if exact else 8)
  assert cache[1].found_tokens == 11
  cache.ready()
  cache.end(0, np.concatenate([tokens(12), tokens(9, 1)]))
  longer = np.concatenate([tokens(12), tokens(9, 1), tokens(3, 2)])
  found = cache.place([3], longer, 40).found_tokens
  assert found == (0 if exact else 12)


def test_pages_follow_live_tokens():
  """64 requests of a limit of 1024 and answers of mean 128, as 32k and 4k.

  Each asks for its pages 8 steps ahead, as the loop does. Planted fault: slots
  times the longest would be eight times as much.
  """
  steps, slots = 8, 64
  cache = make(
      slots=slots, max_length=1024, max_prompt_length=32, chunk=1024, pages=6000
  )
  random = np.random.default_rng(0)
  left, length, ratios, started = {}, {}, [], 0
  for _ in range(300):
    for slot in range(slots):
      if slot not in left:
        if started:
          prompt = tokens(random.integers(8, 32), seed=started)
        else:
          prompt = tokens(20)
        assert cache.place([slot], prompt, 1024)
        started += 1
        left[slot] = min(int(random.exponential(110)) + 1, 990)
        length[slot] = len(prompt)
    compute(cache)
    cache.ready()
    for slot in range(slots):
      assert cache.grow(slot, length[slot] + steps - 1)
    ratios.append(cache.pools[0].used * PAGE / sum(length.values()))
    for slot in range(slots):
      drawn = min(steps, left[slot])
      left[slot] -= drawn
      length[slot] += drawn
      if not left[slot]:
        del left[slot]
        cache.end(slot)
  assert started > 500
  assert max(ratios[50:]) < 1.3
  assert slots * 1024 / sum(length.values()) > 5


# Data shards: of two, the first has slots 0 and 1, the second 2 and 3.


def test_unlike_prompts_go_to_the_shard_with_the_fewest():
  cache = make(shards=2, chunk=32)
  free = [0, 1, 2, 3]
  for seed in range(4):
    sequence = cache.place(free, tokens(11, seed), 20)
    free.remove(sequence.slot)
  assert cache.slots() == [0, 2, 1, 3]
  # Each in a row of its own shard's, on pages counted from 0 there.
  pieces = cache.next_piece(long=False)
  assert pieces.lengths.tolist() == [10, 10, 10, 10]
  for row, seed in enumerate((0, 2, 1, 3)):
    np.testing.assert_array_equal(
        pieces.ids[row, :10], tokens(11, seed)[:10], err_msg=f'row {row}'
    )
  assert cache.next_piece(long=False) is None
  cache.ready()
  assert cache.tables[:, :3].tolist() == 2 * cache.tables[:2, :3].tolist()
  assert [pool.used for pool in cache.pools] == [6, 6] and cache.used == 12


def test_rows_of_a_shard_without_work_stay_empty():
  cache = make(shards=2)
  cache.place([2], tokens(11), 20)
  pieces = cache.next_piece(long=False)
  # 10 tokens are a bucket of 16, of which a program computes one a shard.
  assert pieces.ids.shape == (2, 16)
  assert pieces.lengths.tolist() == [0, 10]


def test_what_is_known_draws_a_sequence_to_its_shard():
  cache = make(shards=2)
  prompt = tokens(11)
  cache.place([0], prompt, 20)
  cache.place([2], tokens(11, 1), 20)
  cache.place([3], tokens(11, 2), 20)
  assert cache.place([1, 3], prompt, 20).slot == 1  # a sibling
  compute(cache)
  cache.ready()
  for slot in (0, 1):
    cache.end(slot)
  # Nobody is there any more, but the pages are known; 2 of 6 would be too few.
  turn = np.concatenate([prompt[:8], tokens(5, 3)])
  placed = cache.place([3, 0], turn, 30)
  assert placed.slot == 0 and placed.found_tokens == 8


def test_a_short_common_beginning_does_not_fill_shards_one_after_another():
  cache = make(shards=2)
  start = tokens(PAGE)
  chats = [np.concatenate([start, tokens(12, n)]) for n in (1, 2)]
  first, second = (cache.place(free, chat, 40) for free, chat in
                   zip(([0, 1, 2, 3], [1, 2, 3]), chats))  # fmt: skip
  assert (first.slot, second.slot) == (0, 2)
  assert second.found_tokens == 0


def test_a_shard_without_room_leaves_a_sibling_to_the_next():
  # 17 pages a shard: 48 of 64 tokens take 12, and a sibling one of its own.
  cache = make(shards=2, pages=34)
  prompt = tokens(47)
  assert cache.place([0, 1, 2, 3], prompt, 64).slot == 0
  compute(cache)
  cache.ready()
  assert cache.grow(0, 63)
  assert cache.place([1], tokens(47, 5), 64) is None
  sibling = cache.place([1, 2], tokens(47, 5), 64)
  assert sibling.slot == 2 and sibling.found_tokens == 0
  # Whoever gives way for a slot is of its own shard.
  assert cache.youngest(0) == 0 and cache.youngest(3) == 2
  cache.end(0)
  with pytest.raises(ValueError, match='of shard 0 has a sequence'):
    cache.youngest(1)


def test_shards_forget_and_rebuild_alike():
  cache = make(shards=2)
  prompts = {0: tokens(11), 2: tokens(11, 1)}
  for slot, prompt in prompts.items():
    cache.place([slot], prompt, 20)
  compute(cache)
  cache.ready()
  cache.new_weights(prompts)
  assert compute(cache) == [[(0, 10), (0, 10)]]
  assert len(cache.ready()) == 2
  for slot in prompts:
    cache.end(slot, prompts[slot])
  assert cache.used == 0
