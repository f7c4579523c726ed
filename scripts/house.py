"""Checks the plan of the house: who may import whom, and what BUILD declares.

The checker reads source text only: `ast` for Python and for BUILD, whose form
is Python. So it also sees imports inside functions, and it needs neither Bazel
nor the packages. `faults(root)` returns one line for each fault.
`tests/test_house.py` runs it. BUILD follows from the imports, and

  python scripts/house.py --write

writes BUILD again after a room or an import was added or removed.
"""

from __future__ import annotations

import ast
import collections
from collections.abc import Iterable, Iterator
import dataclasses
import functools
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent

# A room imports lower floors and itself. The modules of the ground floor
# are one room, `words`: ledger counts what types names.
FLOORS = (
    ('words',),
    ('mesh', 'tokenizer', 'sandbox', 'telemetry'),
    ('models', 'losses', 'rewards', 'data'),
    ('rollout', 'buffer', 'train', 'weights', 'simulate'),
    ('settings', 'cluster', 'resume'),
    ('prepare',),
    ('build',),
    ('command', 'replay', 'session'),
    (
        'run',
        'evaluate',
        'serve',
        'report',
        'doctor',
        'compile_check',
        'convert',
    ),
    ('__main__',),
)
FLOOR_OF = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
WORDS = (
    '__init__',
    'config',
    'files',
    'hints',
    'ledger',
    'records',
    'types',
)

# Reward workers and remote clients start in a second because these rooms never
# load an accelerator library.
LIGHT_ROOMS = ('words', 'tokenizer', 'sandbox', 'rewards', 'data')
LIGHT_MODULES = (
    'areal_jax.command',
    'areal_jax.rewards.base',
    'areal_jax.sandbox.pool',
    'areal_jax.run',
    'areal_jax.evaluate',
    'areal_jax.serve',
)
HEAVY = ('jax', 'jaxlib', 'flax', 'optax', 'orbax', 'tensorflow', 'jetstream')

# Our top-level packages beside areal_jax, each one library.
OUTSIDE_ROOMS = {
    'benchmarks': 'benchmarks',
    'experiments': 'experiments',
    'scripts': 'scripts',
    'tests': 'testing',
}
# Scripts that interpreters of other environments run: their imports are theirs.
PEERS = 'benchmarks/peers/'
# Files of requirements, each with the hub that Bazel has for it. What a later
# one pins as well counts as the earlier one's.
REQUIREMENTS = {
    'requirements.txt': 'requirement',
    'requirements-dev.txt': 'dev_requirement',
    'requirements-notebooks.txt': 'notebook_requirement',
}
# The one file of the package that only notebooks call: imported late, and the
# only one that needs more than requirements.txt.
NOTEBOOK_FILE = 'areal_jax/telemetry/frames.py'
# Where the name of a distribution is not that of its package.
DISTRIBUTIONS = {
    'absl': 'absl-py',
    'grpc': 'grpcio',
    'jetstream': 'google-jetstream',
    'orbax': 'orbax-checkpoint',
    'PIL': 'pillow',
    'yaml': 'PyYAML',
    'google': 'protobuf',
}
# What a test must not call: it would say how fast a machine is.
CLOCKS = (
    'time.monotonic',
    'time.perf_counter',
    'time.process_time',
    'time.time',
)
# The limit of every wait; the seconds that a slow test prints; intervals of a
# load that is measured.
CLOCK_FILES = (
    'tests/limits.py',
    'tests/test_notebooks.py',
    'tests/benchmarks/test_runs.py',
)
# Seconds, the least limit of a wait. Shorter ones end on a busy machine.
LEAST_LIMIT_S = 300
# Split, so that this file does not mention them.
OUTSIDE_PATHS = ('..' + '/shared', '/work' + '/')


@dataclasses.dataclass(frozen=True)
class Import:
  """One import statement: `areal_jax/ledger.py:27` imports `module`."""

  file: str
  line: int
  module: str


@dataclasses.dataclass(frozen=True)
class Rule:
  """One library of BUILD; `srcs` are files, with patterns expanded."""

  name: str
  srcs: frozenset[str]
  deps: frozenset[str]


def faults(root: pathlib.Path) -> list[str]:
  """Everything at `root` that goes against the plan, one line each."""
  return sorted(
      {
          *floor_faults(root),
          *weight_faults(root),
          *build_faults(root),
          *pin_faults(root),
          *text_faults(root),
          *flag_faults(root),
          *clock_faults(root),
          *version_faults(root),
      }
  )


def floor_faults(root: pathlib.Path) -> Iterator[str]:
  """Imports that point upward, sideways or out of the package."""
  for path in sources(root, 'areal_jax'):
    room = room_of_file(path.relative_to(root))
    if room not in FLOOR_OF:
      yield f'{path.relative_to(root)}: room {room!r} has no floor'
      continue
    for found in imports(root, path):
      at = f'{found.file}:{found.line} imports {found.module}'
      top = found.module.split('.')[0]
      if top in OUTSIDE_ROOMS:
        yield f'{at}: the package does not know what lies outside it'
      if top != 'areal_jax':
        continue
      other = room_of_module(found.module)
      if other == room:
        continue
      if other not in FLOOR_OF:
        yield f'{at}: room {other!r} has no floor'
      elif FLOOR_OF[other] > FLOOR_OF[room]:
        yield f'{at}: upward, from {_floor(room)} to {_floor(other)}'
      elif FLOOR_OF[other] == FLOOR_OF[room]:
        yield f'{at}: sideways, from {_floor(room)} to {_floor(other)}'


def weight_faults(root: pathlib.Path) -> Iterator[str]:
  """Accelerator libraries, or rooms that use them, in a light room."""
  for path in sources(root, 'areal_jax'):
    room = room_of_file(path.relative_to(root))
    if room not in LIGHT_ROOMS:
      continue
    for found in imports(root, path):
      at = f'{found.file}:{found.line} imports {found.module}'
      top = found.module.split('.')[0]
      if top in HEAVY:
        yield f'{at}: room {room!r} stays light'
      if top == 'areal_jax':
        other = room_of_module(found.module)
        if other not in LIGHT_ROOMS:
          yield f'{at}: room {room!r} stays light, {other!r} is not'


def build_faults(root: pathlib.Path) -> Iterator[str]:
  """Disagreements between BUILD and the files and imports."""
  wanted, seen = expected_rules(root), read_build(root)
  for name in sorted(wanted.keys() - seen.keys()):
    yield f'BUILD: no library {name!r}'
  for name in sorted(seen.keys() - wanted.keys()):
    yield f'BUILD: library {name!r} has no files'
  for name in sorted(wanted.keys() & seen.keys()):
    want, see = wanted[name], seen[name]
    for file in sorted(want.srcs - see.srcs):
      yield f'BUILD: {name!r} leaves out {file}'
    for file in sorted(see.srcs - want.srcs):
      yield f'BUILD: {name!r} takes in {file}'
    for dep in sorted(want.deps - see.deps):
      yield f'BUILD: {name!r} imports {dep} and has no edge to it'
    for dep in sorted(see.deps - want.deps):
      yield f'BUILD: {name!r} has an edge to {dep} and does not import it'
  if _TESTS not in (root / 'BUILD').read_text():
    yield 'BUILD: the tests are not declared as scripts/house.py writes them'


def pin_faults(root: pathlib.Path) -> Iterator[str]:
  """Imported packages without a pin; pins that are loose or disagree."""
  user, developer, notebook = files = [pins(root / f) for f in REQUIREMENTS]
  everywhere: dict[str, tuple[str, str]] = {}
  for file, found in zip(REQUIREMENTS, files):
    for name, version in found.items():
      if not version:
        yield f'{file}: {name} has no exact version'
      other, seen = everywhere.setdefault(name, (file, version))
      if seen != version:
        yield f'{file}: {name} is {version}, {other} has {seen}'
  for folder, allowed in (
      ('areal_jax', user),
      ('experiments', user),
      ('notebooks', {**user, **notebook}),
      ('benchmarks', {**user, **developer}),
      ('tests', {**user, **developer, **notebook}),
  ):
    for path in sources(root, folder):
      for found in imports(root, path):
        name = distribution(found.module)
        if found.file == NOTEBOOK_FILE and name in notebook:
          continue
        if name and name not in allowed:
          yield (
              f'{found.file}:{found.line} imports {found.module}: no file of'
              f' requirements pins {name!r} for {folder}'
          )


def text_faults(root: pathlib.Path) -> Iterator[str]:
  """Paths of somebody's machine; public names without a docstring."""
  for path in sources(root, 'areal_jax'):
    file, text = path.relative_to(root), path.read_text()
    for outside in OUTSIDE_PATHS:
      if outside in text:
        yield f'{file}: mentions {outside!r}'
    tree = parse(text)
    if ast.get_docstring(tree) is None:
      yield f'{file}: the file has no docstring'
    for node in tree.body:
      named = isinstance(
          node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
      )
      if named and not node.name.startswith('_'):
        if ast.get_docstring(node) is None:
          yield f'{file}:{node.lineno}: {node.name} has no docstring'


def version_faults(root: pathlib.Path) -> Iterator[str]:
  """A version of the package that Bazel's module does not have."""
  pattern = r"""^\s*(?:__)?version(?:__)? = ['"]([^'"]+)['"]"""
  found = {
      file: re.findall(pattern, (root / file).read_text(), re.M)
      for file in ('areal_jax/__init__.py', 'MODULE.bazel')
  }
  package, module = found.values()
  if package != module:
    yield f'MODULE.bazel: version {module}, areal_jax has {package}'


def flag_faults(root: pathlib.Path) -> Iterator[str]:
  """Flags defined by an import: no second module could have one of the name."""
  for folder in ('areal_jax', 'benchmarks'):
    for path in sources(root, folder):
      for node in parse(path.read_text()).body:
        if isinstance(node, (ast.Assign, ast.Expr)):
          if re.search(r'flags\.DEFINE_', ast.unparse(node)):
            file = path.relative_to(root)
            yield f'{file}:{node.lineno}: defines a flag when imported'


def clock_faults(root: pathlib.Path) -> Iterator[str]:
  """Tests that a slow machine can fail: they read a clock or have short limits.

  A test waits for a condition (`tests/limits.py`) or shows an order of events.
  """
  for path in sources(root, 'tests'):
    file = str(path.relative_to(root))
    for node in ast.walk(parse(path.read_text())):
      if not isinstance(node, ast.Call):
        continue
      called = ast.unparse(node.func)
      at = f'{file}:{node.lineno}: {called}'
      if called in CLOCKS and file not in CLOCK_FILES:
        yield f'{at} reads a clock: wait for a condition'
      if called == 'pytest.mark.timeout':
        limits = node.args
      elif called.startswith('asyncio.'):  # mostly under virtual time
        limits = []
      else:
        limits = [k.value for k in node.keywords if k.arg == 'timeout']
      for limit in limits:
        seconds = limit.value if isinstance(limit, ast.Constant) else None
        if isinstance(seconds, (int, float)) and seconds < LEAST_LIMIT_S:
          yield f'{at} has a limit of {seconds} s: WAIT_S is long enough'


def sources(root: pathlib.Path, folder: str) -> list[pathlib.Path]:
  """Python files below `folder`, sorted."""
  return sorted(
      path
      for path in (root / folder).rglob('*.py')
      if '__pycache__' not in path.parts
  )


@functools.cache
def parse(text: str) -> ast.Module:
  """The syntax tree of a source text; equal texts are read once."""
  return ast.parse(text)


def imports(root: pathlib.Path, path: pathlib.Path) -> tuple[Import, ...]:
  """All imports of a file: at its head, inside functions, by `import_module`.

  `from a import b` counts as `a.b`, which may be a module or a name in one.
  """
  file = path.relative_to(root)
  if str(file).startswith(PEERS):
    return ()
  found = _imports(file, path.read_text())
  return tuple(_resolved(root, path, each) for each in found)


def _resolved(root: pathlib.Path, path: pathlib.Path, found: Import) -> Import:
  """A helper beside a test, imported by its bare name, under its full one."""
  top = found.module.split('.')[0]
  if top in sys.stdlib_module_names or not (path.parent / f'{top}.py').exists():
    return found
  folder = '.'.join(path.parent.relative_to(root).parts)
  return dataclasses.replace(found, module=f'{folder}.{found.module}')


@functools.cache
def _imports(file: pathlib.Path, text: str) -> tuple[Import, ...]:
  package = file.parent.parts
  found = []
  for node in ast.walk(parse(text)):
    names: list[str] = []
    if isinstance(node, ast.Import):
      names = [alias.name for alias in node.names]
    elif isinstance(node, ast.ImportFrom):
      base = [node.module] if node.module else []
      if node.level:
        base = [*package[: len(package) - node.level + 1], *base]
      names = ['.'.join([*base, alias.name]) for alias in node.names]
    elif isinstance(node, ast.Call) and node.args:
      function = getattr(node.func, 'attr', getattr(node.func, 'id', ''))
      first = node.args[0]
      if function in ('import_module', '__import__') and isinstance(
          first, ast.Constant
      ):
        names = [str(first.value)]
    found += [Import(str(file), node.lineno, name) for name in names]
  return tuple(found)


def room_of_module(module: str) -> str:
  """`areal_jax.rollout.engine` -> `rollout`; the ground floor -> `words`."""
  parts = module.split('.')
  room = parts[1] if len(parts) > 1 else '__init__'
  return 'words' if room in WORDS else room


def room_of_file(file: pathlib.PurePath) -> str:
  """`areal_jax/rollout/engine.py` -> `rollout`."""
  return room_of_module('.'.join(file.with_suffix('').parts))


def distribution(module: str) -> str | None:
  """The name under which pip knows a module; None for ours and Python's."""
  top = module.split('.')[0]
  ours = top == 'areal_jax' or top in OUTSIDE_ROOMS
  if ours or top in sys.stdlib_module_names:
    return None
  return _normal(DISTRIBUTIONS.get(top, top))


def pins(path: pathlib.Path) -> dict[str, str]:
  """Name -> exact version ('' where there is none) of a requirements file."""
  found = {}
  for line in path.read_text().splitlines():
    line = line.split('#')[0].strip()
    if line:
      name, _, version = line.partition('==')
      found[_normal(name)] = version
  return found


def expected_rules(root: pathlib.Path) -> dict[str, Rule]:
  """The libraries that BUILD has to declare, from the files and imports.

  The library of the tests' helpers has the edges of all tests too.
  """
  hubs: dict[str, str] = {}
  for file, hub in REQUIREMENTS.items():
    hubs = dict.fromkeys(pins(root / file), hub) | hubs
  files = collections.defaultdict(list)
  for path in sources(root, 'areal_jax'):
    files[room_of_file(path.relative_to(root))].append(path)
  for folder, name in OUTSIDE_ROOMS.items():
    files[name] = sources(root, folder)
  rules = {
      name: _rule(root, name, paths, hubs)
      for name, paths in files.items()
      if paths
  }
  tests = rules.get('testing')
  if tests:
    helpers = {f for f in tests.srcs if not _is_test(f)}
    rules['testing'] = dataclasses.replace(tests, srcs=frozenset(helpers))
  return rules


def _is_test(file: str) -> bool:
  return pathlib.PurePath(file).name.startswith('test_')


def _rule(
    root: pathlib.Path,
    name: str,
    paths: Iterable[pathlib.Path],
    hubs: dict[str, str],
) -> Rule:
  deps = set()
  for path in paths:
    for found in imports(root, path):
      top = found.module.split('.')[0]
      outside = distribution(found.module)
      if outside:
        hub = hubs.get(outside, 'requirement')
        deps.add(f'{hub}("{outside}")')
      elif top == 'areal_jax':
        deps.add(':' + room_of_module(found.module))
      elif top in OUTSIDE_ROOMS:
        deps.add(':' + OUTSIDE_ROOMS[top])
  srcs = frozenset(str(path.relative_to(root)) for path in paths)
  return Rule(name, srcs, frozenset(deps - {':' + name}))


def read_build(root: pathlib.Path) -> dict[str, Rule]:
  """The libraries that BUILD declares."""
  rules = {}
  for node in parse((root / 'BUILD').read_text()).body:
    call = node.value if isinstance(node, ast.Expr) else None
    if not isinstance(call, ast.Call):
      continue
    if ast.unparse(call.func) != 'py_library':
      continue
    values = {keyword.arg: keyword.value for keyword in call.keywords}
    name = ast.literal_eval(values['name'])
    rules[name] = Rule(
        name,
        frozenset(_files(root, values['srcs'])),
        frozenset(
            _edge(node) for node in getattr(values.get('deps'), 'elts', ())
        ),
    )
  return rules


def _files(root: pathlib.Path, node: ast.expr) -> set[str]:
  """Files of `srcs`: a list, or a glob with its exclusions."""
  if isinstance(node, ast.List):
    return set(ast.literal_eval(node))
  assert isinstance(node, ast.Call), ast.unparse(node)
  assert ast.unparse(node.func) == 'glob', ast.unparse(node)
  taken = set(_matches(root, ast.literal_eval(node.args[0])))
  for keyword in node.keywords:
    if keyword.arg == 'exclude':
      taken -= set(_matches(root, ast.literal_eval(keyword.value)))
  return taken


def _matches(root: pathlib.Path, patterns: list[str]) -> Iterator[str]:
  for pattern in patterns:
    for path in root.glob(pattern):
      if '__pycache__' not in path.parts:
        yield str(path.relative_to(root))


def _edge(node: ast.expr) -> str:
  """`":words"` -> `:words`; `requirement("jax")` with the name normalised."""
  if isinstance(node, ast.Constant):
    return str(node.value)
  assert isinstance(node, ast.Call), ast.unparse(node)
  name = ast.literal_eval(node.args[0])
  return f'{ast.unparse(node.func)}("{_normal(name)}")'


def render(rules: dict[str, Rule]) -> str:
  """The text of BUILD, laid out as buildifier does."""
  rooms = [room for rooms in FLOORS for room in rooms if room in rules]
  others = [name for name in OUTSIDE_ROOMS.values() if name in rules]
  blocks = [_HEAD]
  for room in rooms:
    srcs = sorted(rules[room].srcs)
    if any(file.count('/') > 1 for file in srcs):
      listed = f'glob(["areal_jax/{room}/**/*.py"])'
    else:
      listed = _listed(srcs)
    floor = f'# Floor {FLOOR_OF[room]}.\n' if _opens_floor(room, rooms) else ''
    blocks.append(
        f'{floor}py_library(\n    name = "{room}",\n    srcs = {listed},\n'
        f'{_deps(rules[room])})\n'
    )
  for name in others:
    folder = {v: k for k, v in OUTSIDE_ROOMS.items()}[name]
    listed, more = f'glob(["{folder}/**/*.py"])', ''
    if name == 'testing':
      listed = (
          'glob(\n        ["tests/**/*.py"],\n'
          '        exclude = ["tests/**/test_*.py"],\n    )'
      )
      more = '    testonly = True,\n'
    data = '    data = [":sources"],\n' if name == 'testing' else ''
    blocks.append(
        f'py_library(\n    name = "{name}",\n{more}    srcs = {listed},\n'
        f'{data}{_deps(rules[name])})\n'
    )
  blocks.append(_TESTS)
  return '\n'.join(blocks)


_HEAD = '''\
"""One library for each room of the house, one test for each test file.

The edges are the imports. `python scripts/house.py --write` writes this file,
and tests/test_house.py compares it with the imports. Bazel itself was not run
on it, because its registry was out of reach.
"""

load("@pypi//:requirements.bzl", "requirement")
load("@pypi_dev//:requirements.bzl", dev_requirement = "requirement")
load("@pypi_notebooks//:requirements.bzl", notebook_requirement = "requirement")
load("@rules_python//python:defs.bzl", "py_library", "py_test")

package(default_visibility = ["//visibility:public"])

exports_files([
    "requirements.txt",
    "requirements-dev.txt",
    "requirements-notebooks.txt",
])

# What tests read beside what they import.
filegroup(
    name = "sources",
    srcs = glob([
        "*",
        ".ci/*",
        "areal_jax/**/*.py",
        "benchmarks/**",
        "experiments/**",
        "notebooks/*",
        "scripts/*",
        "tests/**/*.py",
    ]),
)
'''


_TESTS = """\
# One test for each test file. A test may import any room.
[
    py_test(
        name = file[:-len(".py")].replace("/", "_"),
        srcs = [
            file,
            "tests/pytest_main.py",
        ],
        args = [file],
        main = "tests/pytest_main.py",
        deps = [":testing"],
    )
    for file in glob(["tests/**/test_*.py"])
]
"""


def _opens_floor(room: str, rooms: list[str]) -> bool:
  before = rooms[: rooms.index(room)]
  return not before or FLOOR_OF[before[-1]] != FLOOR_OF[room]


def _deps(rule: Rule) -> str:
  if not rule.deps:
    return ''
  edges = sorted(dep if '(' in dep else f'"{dep}"' for dep in rule.deps)
  return f'    deps = {_listed(edges, quoted=True)},\n'


def _listed(items: list[str], *, quoted: bool = False) -> str:
  items = list(items) if quoted else [f'"{item}"' for item in items]
  if len(items) == 1:
    return f'[{items[0]}]'
  return '[\n' + ''.join(f'        {item},\n' for item in items) + '    ]'


def _floor(room: str) -> str:
  return f'{room} (floor {FLOOR_OF[room]})'


def _normal(name: str) -> str:
  """A distribution's name as indexes compare it, without extras."""
  return re.sub(r'[-_.]+', '-', name.split('[')[0].strip()).lower()


def main() -> None:
  """Writes BUILD."""
  if sys.argv[1:] != ['--write']:
    sys.exit('usage: python scripts/house.py --write')
  (ROOT / 'BUILD').write_text(render(expected_rules(ROOT)))


if __name__ == '__main__':
  main()
