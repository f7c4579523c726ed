"""How every command line is read: `--config=FILE`, then its overrides.

Argument strings go in, an open `Experiment` comes out (`prepare`
checks it further). Each mistake is one line on standard error, all of them
together, and the exit code is 2.
What a command does is left to the doors; a door with flags of its own defines
them on the flag values before it has the line read. jax is imported late and
only below a config file, because reward workers import a door again and need
none of it.
"""

from __future__ import annotations

import dataclasses
import json
import pathlib
import re
import sys
import types
import typing
from typing import Any, Callable, Sequence

from absl import flags, logging
from ml_collections import config_flags

from areal_jax import hints
from areal_jax.cluster.signals import Interrupted
from areal_jax.config import (
    ConfigError,
    from_dict,
    require,
    type_hints,
    unknown_field,
)
from areal_jax.rewards.base import BadReward
from areal_jax.rollout.failures import TooManyFailures
from areal_jax.sandbox.call import call
from areal_jax.telemetry import run_folder

if typing.TYPE_CHECKING:
  from areal_jax.settings.experiment import Experiment

_HELP = 'A file with get_config(), e.g. experiments/quickstart.py.'
_WANTED = 'a Python file with get_config(), e.g. experiments/quickstart.py'
# What flags of a type want, by the name absl has for it.
_KINDS = {'float': 'a number', 'int': 'a whole number', 'bool': 'true or false'}
_PARSERS = {
    float: flags.FloatParser(),
    int: flags.IntegerParser(),
    bool: flags.BooleanParser(),
}
_HELP_FLAGS = {'help', 'h', '?', 'helpshort', 'helpfull'}


@dataclasses.dataclass
class _NoFile:
  """Stands for `--config` until a file is given."""

  def __str__(self) -> str:
    return 'none'


def read_experiment(
    argv: Sequence[str], values: flags.FlagValues
) -> Experiment:
  """The experiment that a command line describes, overrides applied.

  Args:
    argv: the program's name, then `--config=FILE` or `--config=FILE:VARIANT`
      (get_config is called with the variant), then `--config.a.b=value`. FILE
      may be the config.json that a run has written.
    values: where the flags are defined and parsed.

  Raises:
    flags.Error: whatever is wrong with them or with the file, an argument for
      each mistake.
  """
  argv = values.read_flags_from_files(list(argv), force_gnu=False)
  files = [a for a in argv if re.match(r'--?config(=|$)', a)]
  overrides = [a for a in argv if re.match(r'--?(no)?config\.', a)]
  if not files:
    raise flags.Error(f'--config is missing, wanted {_WANTED}', *_stray(argv))
  if len(files) > 1:
    raise flags.Error(f'--config is given as {files}, wanted one of them')
  config_flags.DEFINE_config_dataclass(
      'config',
      _NoFile(),
      _HELP,
      flag_values=values,
      sys_argv=argv,
      parse_fn=lambda spec: _load(spec, overrides),
  )
  try:
    rest = values(argv)
  except flags.IllegalFlagValueError as error:
    found = re.match(r'flag --([\w.\[\]]+)=', str(error))
    kind = _KINDS.get(values[found[1]].flag_type()) if found else None
    raise flags.Error(f'{error}, wanted {kind}' if kind else error) from error
  except flags.UnrecognizedFlagError as error:
    form = _hint(_spelt(argv, error.flagname))
    raise flags.Error(f'{error}{form}') from error
  except ValueError as error:  # what config_flags raises below a None
    raise flags.Error(error) from error
  if len(rest) > 1:
    raise flags.Error(*map(_left_over, rest[1:]))
  return values['config'].value


def read_flags(argv: list[str]) -> Experiment:
  """Parses the flags of this program, those that a door has added as well.

  Raises:
    SystemExit: with code 2, after one line that says what is wrong.
  """
  show_help(argv)
  try:
    experiment = read_experiment(argv, flags.FLAGS)
  except flags.Error as error:
    sys.exit(complain(error))
  # absl would show what jax tells at level INFO: that it looked for a TPU.
  if flags.FLAGS['verbosity'].using_default_value:
    logging.set_verbosity(logging.WARNING)
  return experiment


def read_own_flags(argv: Sequence[str]) -> list[str]:
  """Parses the flags of a program that reads no settings.

  Returns:
    The program's name.

  Raises:
    SystemExit: with code 2, after one line for each mistake; with code 0 after
      the help, if that is asked for.
  """
  show_help(argv, config=False)
  try:
    rest = flags.FLAGS(list(argv))
    if len(rest) > 1:
      wanted = 'is left over, wanted only --flag=value'
      raise flags.Error(*(f'{word!r} {wanted}' for word in rest[1:]))
  except flags.Error as error:
    sys.exit(complain(error))
  return rest


def show_help(argv: Sequence[str], config: bool = True) -> None:
  """Prints what a door does and its flags, if its command line asks for it.

  Args:
    argv: the program's name and its arguments.
    config: whether the door reads settings by `--config`.

  Raises:
    SystemExit: with code 0, if the command line asks for help.
  """
  if not any(a.lstrip('-') in _HELP_FLAGS for a in argv[1:] if a[:1] == '-'):
    return
  lines = [(sys.modules['__main__'].__doc__ or '').strip(), '', 'flags:']
  if config:
    lines += [
        f'  --config: {_HELP} Also the {run_folder.CONFIG} of a run.',
        '  --config.FIELD=VALUE: Changes one setting, such as'
        ' --config.rollout.eta=2.',
    ]
  for name in sorted(flags.FLAGS):
    flag = flags.FLAGS[name]
    if not flags.FLAGS.find_module_defining_flag(name).startswith('absl'):
      lines.append(f'  --{name}: {flag.help} (default: {flag.value!r})')
  print('\n'.join(lines))
  sys.exit(0)


def point_to_run(experiment: Experiment, folder: str) -> None:
  """Makes the settings name the policy and the tokenizer of a finished run.

  Raises:
    ConfigError: the folder lacks one of them.
  """
  for settings, names in (
      (experiment.policy, [run_folder.POLICY]),
      (
          experiment.tokenizer,
          [run_folder.TOKENIZER, run_folder.TOKENIZER_FILES],
      ),
  ):
    paths = [pathlib.Path(folder) / name for name in names]
    path = next((path for path in paths if path.exists()), None)
    wanted = f'the folder of a finished run, with {names[0]!r} in it'
    require(path is not None, '--run', folder, wanted)
    settings.path = str(path)
  # A run saves its policy with the adapters merged.
  experiment.policy.adapter = ''
  experiment.policy.model.lora.projections = ()
  experiment.rollout.merge_adapters = False


def exit_code(work: Callable[..., Any], *args: Any) -> int:
  """Does the work of a command; returns its exit code.

  0 done, 1 the answers get no scores, 2 a mistake in the settings, 130 ended by
  SIGINT, 143 by SIGTERM; whatever else goes wrong passes through and ends the
  program with its traceback and code 1.
  """
  try:
    work(*args)
  except ConfigError as error:
    return complain(error)
  except (BadReward, TooManyFailures) as error:
    complain(error)
    return 1
  except Interrupted as error:
    print(error, file=sys.stderr)
    return error.code
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return 130
  return 0


def complain(error: Exception) -> int:
  """Prints one line for each mistake; returns the exit code of all of them."""
  for mistake in error.args or (error,):
    print(f'error: {" ".join(str(mistake).split())}', file=sys.stderr)
  return 2


def _stray(argv: Sequence[str]) -> list[str]:
  """Mistakes of a line without `--config`: words that belong to no flag."""
  values = {i + 1 for i, a in enumerate(argv) if a[:1] == '-' and '=' not in a}
  return [
      _left_over(word)
      for i, word in enumerate(argv)
      if i > 0 and i not in values and word[:1] != '-'
  ]


def _left_over(word: str) -> str:
  """Describes a word that belongs to no flag."""
  return f'{word!r} is left over, wanted only --flag=value{_hint(word)}'


def _hint(word: str) -> str:
  """'; did you mean ...?' or nothing."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.settings.experiment import Experiment

  form = hints.right_form(Experiment, word)
  return form and f'; {form}'


def _spelt(argv: Sequence[str], name: str) -> str:
  """The flag of this name as it stands on the line, with its value."""
  return next(
      (a for a in argv if a.lstrip('-').partition('=')[0] == name), f'--{name}'
  )


def _load(spec: str, overrides: Sequence[str]) -> Experiment:
  """The settings that a file describes; they have every overridden field."""
  if spec.endswith('.json'):
    experiment = _load_json(spec)
  else:
    experiment = _load_python(spec)
  mistakes = []
  for override in overrides:
    try:
      _check_fields(experiment, override)
    except flags.Error as error:
      mistakes += error.args
  if mistakes:
    raise flags.Error(*mistakes)
  _use_algorithm(experiment, overrides)
  return experiment


def _use_algorithm(experiment: Experiment, overrides: Sequence[str]) -> None:
  """Puts the preset of `--config.algorithm=NAME` under all other overrides."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.settings.algorithm import use_algorithm

  given = {}
  for override in overrides:
    path, sign, value = re.sub(r'^--?config\.', '', override).partition('=')
    given[path] = value
    if path == 'algorithm' and not sign:
      raise flags.Error(f'{override} has no value, wanted {override}=NAME')
  name = given.get('algorithm')
  if not name:
    return
  longest = given.get('rollout.max_new_tokens', '')
  if longest.isdecimal():  # what is wrong with it is told where it is read
    experiment.rollout.max_new_tokens = int(longest)
  try:
    use_algorithm(experiment, name)
  except ConfigError as error:
    raise flags.Error(error) from error


def _load_json(path: str) -> Experiment:
  """The settings of a run, as it wrote them into its folder."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.settings.experiment import Experiment

  try:
    return from_dict(Experiment, json.loads(pathlib.Path(path).read_bytes()))
  except OSError as error:
    raise flags.Error(
        f'--config is {path!r}, which cannot be read ({error.strerror}), wanted'
        f' the {run_folder.CONFIG} of a run'
    ) from error
  except (json.JSONDecodeError, UnicodeDecodeError) as error:
    raise flags.Error(f'{path} is not JSON: {error}') from error
  except ConfigError as error:
    raise flags.Error(*(f'{path}: {m}' for m in error.mistakes)) from error


def _load_python(spec: str) -> Experiment:
  """Returns the result of `get_config()` of a file."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.settings.experiment import Experiment

  path, colon, variant = spec.partition(':')
  try:
    code = compile(
        pathlib.Path(path).read_bytes(), path, 'exec', dont_inherit=True
    )
  except OSError as error:
    raise flags.Error(
        f'--config is {spec!r}, which cannot be read ({error.strerror}), wanted'
        f' {_WANTED}'
    ) from error
  except (SyntaxError, ValueError) as error:  # ValueError: null bytes
    raise flags.Error(f'{path} is not Python: {error}') from error
  module = types.ModuleType('areal_jax_config')
  module.__file__ = path
  sys.modules[module.__name__] = module  # dataclasses look themselves up there
  _call(path, exec, code, vars(module))
  get_config = getattr(module, 'get_config', None)
  if not callable(get_config):
    raise flags.Error(f'{path} has no get_config(), wanted {_WANTED}')
  experiment = _call(path, get_config, *([variant] if colon else []))
  if not isinstance(experiment, Experiment):
    raise flags.Error(
        f'get_config() of {path} returned a {type(experiment).__name__}, wanted'
        ' an Experiment'
    )
  return experiment


def _call(path: str, function: Callable[..., Any], *args: Any) -> Any:
  """Calls into the config file; whatever it raises names file and line."""
  # pylint: disable=g-import-not-at-top
  from areal_jax.settings.experiment import Experiment

  outcome = call(function, *args)
  if outcome.status == 'ok':
    return outcome.value
  cause, _, trace = outcome.detail.partition('\n')
  lines = re.findall(rf'File "{re.escape(path)}", line (\d+)', trace)
  at = f'{path} line {lines[-1]}' if lines else path
  cause = hints.wrong_keyword(Experiment, cause) or cause
  raise flags.Error(f'{at} failed: {cause}')


def _check_fields(experiment: Experiment, override: str) -> None:
  """Refuses `--config.a.b=value` if there is no such field."""
  path = re.sub(r'^--?(no)?config\.', '', override).partition('=')[0]
  at, settings = 'config', experiment
  # `sources[0].path` is a field of the first of several settings.
  for name in re.sub(r'\[(\d+)\]', r'.\1', path).split('.'):
    if isinstance(settings, (tuple, list)):
      places = [str(place) for place in range(len(settings))]
      if name not in places:
        raise flags.Error(f'{override}: {at} has {len(places)} items')
      at, settings = f'{at}[{name}]', settings[int(name)]
      continue
    if settings is None:  # config_flags builds it, or says why it cannot
      return
    if not dataclasses.is_dataclass(settings):
      raise flags.Error(f'{override}: {at} is {settings!r} and has no fields')
    names = [field.name for field in dataclasses.fields(settings)]
    if name not in names:
      found = unknown_field(at, name, names)
      # A field of this name elsewhere is told where none here is like it.
      hint = _hint(override) if 'wanted one of' in found else ''
      raise flags.Error(f'{override}: {found}{hint}')
    kind = type_hints(type(settings))[name]
    at, settings = f'{at}.{name}', getattr(settings, name)
  if dataclasses.is_dataclass(settings):
    names = [field.name for field in dataclasses.fields(settings)]
    raise flags.Error(f'{override}: wanted one of the fields of {at}: {names}')
  _, sign, value = override.partition('=')
  if sign and kind in _PARSERS:
    try:
      _PARSERS[kind].parse(value)
    except ValueError as error:
      wanted = _KINDS[kind.__name__]
      raise flags.Error(f'flag {override}: {error}, wanted {wanted}') from error
