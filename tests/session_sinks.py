"""Metric sinks of users, for runs in tests."""

import json


class Lines:
  """Appends each row to a file of the run."""

  def __init__(self, folder, config):
    self.file = open(folder / 'sink.jsonl', 'a')
    self.file.write(json.dumps({'opened': config['name']}) + '\n')

  def write(self, step, version, values):
    row = {'step': step, 'version': version, **values}
    self.file.write(json.dumps(row) + '\n')

  def close(self):
    self.file.write(json.dumps('closed') + '\n')
    self.file.close()


class Fails:
  """Takes nothing."""

  def __init__(self, folder, config):
    pass

  def write(self, step, version, values):
    raise ConnectionError('no route to host')

  def close(self):
    raise ConnectionError('still none')


def raises(folder, config):
  raise PermissionError('not logged in')


def returns_a_dict(folder, config):
  return {}


def takes_a_row(step, version, values):
  """The write method where what builds the sink is wanted."""
