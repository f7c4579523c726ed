"""A log of texts is bounded, and no file without a text."""

from areal_jax.telemetry.text_log import TextLog


def test_texts_stand_apart_and_are_continued(tmp_path):
  log = TextLog(tmp_path / 'log', 1000)
  assert not log.path.exists()
  log.append('one\ntwo\n')
  TextLog(tmp_path / 'log', 1000).append('half \ud83d')
  assert log.path.read_text() == 'one\ntwo\n\nhalf ?\n\n'


def test_the_limit_is_told_once(tmp_path):
  log = TextLog(tmp_path / 'log', 20)
  for _ in range(5):
    log.append('0123456789')
  text = log.path.read_text()
  assert text.count('0123456789') == 2
  assert text.count('the limit of this file is met') == 1
