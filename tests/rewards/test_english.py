"""The share of words."""

from areal_jax.rewards import english


def test_words_keep_inner_apostrophes():
  assert english.words("Lily's \"mom\" didn't 'run' 3 times...") == [
      "lily's",
      'mom',
      "didn't",
      'run',
      'times',
  ]


def test_vocabulary_has_words_seen_twice_in_all_texts_together():
  vocabulary = english.vocabulary_of(['The cat. A cat', 'the dgo'])
  assert vocabulary == {'the', 'cat'}


def test_share_is_over_the_words_of_all_texts():
  assert english.word_share(['The cat', 'xq zzz'], {'the', 'cat'}) == 0.5
  assert english.word_share(['the', 'a b c'], {'the'}) == 0.25


def test_texts_without_a_word_have_none():
  assert english.word_share(['', '...'], {'the'}) == 0.0
