"""Calling and finding other people's functions."""

import operator
import sys

import pytest

from areal_jax.config import ConfigError
from areal_jax.sandbox.call import call, load_function


def test_value_comes_back():
  outcome = call(operator.add, 2, 3)
  assert (outcome.status, outcome.value, outcome.detail) == ('ok', 5, '')


def test_exception_has_type_message_and_place():
  outcome = call(operator.truediv, 1, 0)
  assert (outcome.status, outcome.value) == ('error', None)
  assert outcome.detail.startswith('ZeroDivisionError: division by zero\n')
  assert 'call.py' in outcome.detail


def test_long_message_is_shortened():
  def fail():
    raise ValueError('x' * 1_000_000)

  assert len(call(fail).detail) < 10_000


def test_exit_and_interrupt_pass_unless_they_are_to_be_caught():
  with pytest.raises(SystemExit):
    call(sys.exit, 1)
  outcome = call(sys.exit, 1, catch=BaseException)
  assert outcome.detail.startswith('SystemExit: 1')


def test_function_is_found_by_name():
  assert load_function('operator:add', 'at') is operator.add


@pytest.mark.parametrize('spec', ['operator.add', ':add', 'operator:', ''])
def test_other_form_is_refused(spec):
  with pytest.raises(ConfigError, match=f"'{spec}', wanted the form"):
    load_function(spec, 'rewards.function')


@pytest.mark.parametrize(
    'spec, cause',
    [
        ('no_such_module:f', "ModuleNotFoundError: No module named 'no_such"),
        ('operator:no_such', "operator has no 'no_such'"),
        ('sys:maxsize', 'that is a int, wanted a function'),
    ],
)
def test_error_names_setting_spec_and_cause(spec, cause):
  with pytest.raises(ConfigError, match=f"at.f is '{spec}', but .*{cause}"):
    load_function(spec, 'at.f')


@pytest.mark.parametrize(
    'text, cause', [('x = (', 'SyntaxError'), ('1 / 0', 'ZeroDivisionError')]
)
def test_module_that_fails_at_import_is_named(
    tmp_path, monkeypatch, text, cause
):
  (tmp_path / f'broken_{cause}.py').write_text(text)
  monkeypatch.syspath_prepend(tmp_path)
  with pytest.raises(ConfigError, match=f'importing broken_.*failed: {cause}'):
    load_function(f'broken_{cause}:f', 'at')
