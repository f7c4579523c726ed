"""Texts of another tokenizer than that of the task, for tests of a resume."""


def letters():
  return ['0123456789+=;.', 'abcdefghij']
