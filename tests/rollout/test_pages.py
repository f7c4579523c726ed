"""The pool of pages: counts of holders, what is remembered, what gives way."""

from hypothesis import given, settings, strategies
import pytest

from areal_jax.rollout.pages import PagePool


def test_a_page_is_free_again_when_its_last_holder_lets_go():
  pool = PagePool(3)
  pages = pool.take(2)
  pool.share(pages)
  assert (pool.used, pool.available) == (2, 1)
  pool.give_back(pages)
  assert [pool.holders(p) for p in pages] == [1, 1]
  pool.give_back(pages)
  assert (pool.used, pool.available, pool.idle) == (0, 3, 0)


def test_more_than_there_is_is_refused():
  pool = PagePool(3)
  pool.take(2)
  with pytest.raises(ValueError, match='2 pages asked for, 1 of 3 available'):
    pool.take(2)


def test_known_pages_are_found_by_their_beginning():
  pool = PagePool(8)
  pages = pool.take(3)
  pool.remember('abc', pages)
  assert pool.find('abx') == pages[:2]
  assert [pool.holders(p) for p in pages] == [2, 2, 1]
  assert pool.find('bc') == []
  # The same page behind another beginning is another page.
  other = pool.take(2)
  pool.remember('xb', other)
  assert pool.find('xb') == other


def test_what_was_known_first_stays():
  pool = PagePool(8)
  first, second = pool.take(2), pool.take(3)
  pool.remember('ab', first)
  pool.remember('abc', second)
  assert pool.find('abc') == first


def test_the_end_of_what_was_not_used_for_longest_gives_way_first():
  pool = PagePool(5)
  one, two = pool.take(2), pool.take(2)
  pool.remember('ab', one)
  pool.remember('xy', two)
  pool.give_back(one)
  pool.give_back(two)
  assert pool.idle == 4 and pool.available == 5
  pool.give_back(pool.find('ab'))  # used again: now it is the younger
  taken = pool.take(2)  # the free one, and the end of 'xy'
  assert two[1] in taken
  assert pool.find('xy') == two[:1] and pool.find('ab') == one


def test_nothing_is_found_after_forgetting_and_what_is_held_stays_held():
  pool = PagePool(4)
  held, idle = pool.take(1), pool.take(2)
  pool.remember('a', held)
  pool.remember('xy', idle)
  pool.give_back(idle)
  pool.forget()
  assert pool.find('a') == pool.find('xy') == []
  assert (pool.used, pool.idle, pool.available) == (1, 0, 3)
  pool.give_back(held)
  assert pool.available == 4


def test_a_page_that_was_never_computed_is_not_remembered():
  pool = PagePool(4)
  pages = pool.take(2)
  pool.pending.update(pages)
  pool.remember('ab', pages)
  assert pool.find('ab') == pages  # it is on its way
  pool.give_back(pages)
  pool.pending.discard(pages[0])  # the first one has come
  pool.give_back(pages)
  assert pool.find('ab') == pages[:1]
  assert not pool.pending


class Plain:
  """Who holds what, the slow plain way."""

  def __init__(self, pages):
    self.pages = pages
    self.held = []

  @property
  def used(self):
    return len({p for pages in self.held for p in pages})


@settings(max_examples=60, deadline=None)
@given(strategies.data())
def test_any_order_of_calls_keeps_the_books(data):
  """No page in two hands that do not share it; nothing lost; paths whole."""
  pool, plain = PagePool(9), Plain(9)
  for _ in range(30):
    what = data.draw(strategies.sampled_from(['ask', 'ask', 'leave', 'forget']))
    if what == 'ask':
      text = data.draw(strategies.text('ab', min_size=1, max_size=4))
      found = pool.find(text)
      missing = len(text) - len(found)
      if missing > pool.available:
        pool.give_back(found)
        continue
      taken = pool.take(missing)
      assert not {p for pages in plain.held for p in pages} & set(taken)
      assert not set(found) & set(taken)
      pool.remember(text, found + taken)
      plain.held.append(found + taken)
    elif what == 'leave' and plain.held:
      at = data.draw(strategies.integers(0, len(plain.held) - 1))
      pool.give_back(plain.held.pop(at))
    elif what == 'forget':
      pool.forget()
    assert pool.used == plain.used
    for page in range(9):
      assert pool.holders(page) == sum(page in pages for pages in plain.held)
