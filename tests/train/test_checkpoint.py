"""Checkpoints: whole or refused by name, asynchronous, on any mesh."""

import dataclasses
import hashlib
import json
import resource
import shutil
import threading

from etils import epath
from etils.epath import testing as epath_testing
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from areal_jax.config import ConfigError, resolve
from areal_jax.telemetry.compilations import CompilationCounter
from areal_jax.telemetry.events import EventLog
from areal_jax.train import checkpoint as lib
from areal_jax.train import checkpoint_tensors, checkpoint_writer
from areal_jax.train.checkpoint import CheckpointError, CheckpointSettings
from areal_jax.train.optimizer import OptimizerSettings, make_optimizer
from areal_jax.train.state import Counters, Role, TrainState
from tests import tiny
from tests.limits import WAIT_S

PARTS = {'run.json': {'seed': 1, 'eta': float('inf')}, 'records.npz': b'PK'}


def on(spec, mesh):
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))


def state(version=3, mesh=None, vocabulary=10):
  """A small state whose values say which version it is of."""
  mesh = mesh or tiny.mesh()

  def array(shape, spec, start):
    values = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return jax.device_put(start + 100 * version + values, on(spec, mesh))

  # Padding is zeros, in the moments as well.
  def embedding(start):
    padded = np.zeros((vocabulary, 4), np.float32)
    padded[:10] = np.arange(40).reshape(10, 4) + start + 100 * version
    return jax.device_put(padded, on(('tensor', 'fsdp'), mesh))

  def params(start):
    return {
        'embedding': embedding(start),
        'blocks': {'query': array((2, 4, 6), (None, 'fsdp', 'tensor'), start)},
    }

  scalar = lambda value: jax.device_put(np.int32(value), on((), mesh))
  optimizer = ({'mu': params(0.25), 'nu': params(0.5)}, scalar(7), ())
  counters = Counters(scalar(5), scalar(1), scalar(0), scalar(0))
  return TrainState(
      {
          'policy': Role(params(0.125), {}, optimizer, counters),
          'reference': Role({}, params(0.75)),
      },
      version,
  )


def shapes(of):
  roles = jax.tree.map(
      lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding),
      of.roles,
  )
  return TrainState(roles, version=0)


def save(writer, step, of=None, parts=PARTS, **more):
  """Saves and waits until it is written."""
  writer.save(step, of or state(step), parts, **more)
  writer.wait()


def assert_same(one, other):
  jax.tree.map(np.testing.assert_array_equal, one, other)


@pytest.fixture
def open_(tmp_path):
  """Opens checkpointers and closes them again."""
  opened = []

  def make(start=None, folder=None, awaited=False, **settings):
    made = checkpoint_writer.Checkpointer(
        folder or tmp_path / 'checkpoints',
        CheckpointSettings(**settings),
        events=EventLog(None),
        start=start,
        awaited=awaited,
    )
    opened.append(made)
    return made

  yield make
  for made in opened:
    made.close()


@pytest.fixture(scope='module')
def written(tmp_path_factory):
  folder = tmp_path_factory.mktemp('written') / 'checkpoints'
  writer = checkpoint_writer.Checkpointer(
      folder, CheckpointSettings(), events=EventLog(None)
  )
  for step in (3, 4):
    save(writer, step)
  writer.close()
  return folder


@pytest.fixture
def folder(tmp_path, written):
  """Two whole checkpoints, of steps 3 and 4."""
  return shutil.copytree(written, tmp_path / 'checkpoints')


def test_round_trip_is_exact(folder):
  saved, refused = lib.latest(folder)
  assert (saved.step, saved.version, refused) == (4, 4, ())
  restored = checkpoint_tensors.restore_state(saved, shapes(state()))
  assert_same(restored, state(4))
  assert restored.version == 4
  assert saved.read('records.npz') == b'PK'
  assert saved.read_json('run.json') == {'seed': 1, 'eta': 'inf'}
  with pytest.raises(CheckpointError, match="no part 'data.json'"):
    saved.read('data.json')


def test_folder_may_be_named_from_here(folder, open_, monkeypatch):
  monkeypatch.chdir(folder.parent)
  save(open_(start=4, folder='checkpoints'), 5)
  saved, _ = lib.latest('checkpoints')
  assert saved.step == 5
  assert_same(
      checkpoint_tensors.restore_state(saved, shapes(state())), state(5)
  )
  saved = lib.verify('checkpoints/00000004')
  assert_same(
      checkpoint_tensors.restore_state(saved, shapes(state())), state(4)
  )


def test_folder_says_what_it_holds(folder):
  manifest = json.loads((folder / '00000004/manifest.json').read_text())
  assert manifest['schema_version'] == lib.SCHEMA_VERSION
  assert manifest['tensors']['roles/policy/trainable/blocks/query'] == [
      'float32',
      [2, 4, 6],
  ]
  on_disk = {
      str(path.relative_to(folder / '00000004'))
      for path in (folder / '00000004').rglob('*')
      if path.is_file()
  }
  assert on_disk == {*manifest['files'], 'manifest.json', 'COMMITTED'}


@pytest.mark.parametrize('shape', [(1, 1), (2, 2), (1, 3)])
def test_restores_onto_another_mesh_with_another_padding(shape, folder):
  saved, _ = lib.latest(folder)
  mesh = tiny.mesh(*shape)
  wanted = state(4, mesh, vocabulary=12)
  with pytest.raises(CheckpointError, match=r'shape \(10, 4\), wanted float32'):
    checkpoint_tensors.restore_state(saved, shapes(wanted))
  restored = checkpoint_tensors.restore_state(
      saved, shapes(wanted), {'embedding': 0}
  )
  assert_same(restored, wanted)
  query = restored.policy.trainable['blocks']['query']
  assert query.sharding == on((None, 'fsdp', 'tensor'), mesh)


def test_padding_is_cut_off_again(tmp_path, open_):
  writer = open_()
  save(writer, 1, state(1, tiny.mesh(2, 2), vocabulary=12))
  saved, _ = lib.latest(tmp_path / 'checkpoints')
  restored = checkpoint_tensors.restore_state(
      saved, shapes(state()), {'embedding': 0}
  )
  assert_same(restored, state(1))


def factored(vocabulary, mesh):
  """A state of Adafactor after an update, its 130 tokens padded with zeros."""
  random = np.random.default_rng(0)

  def drawn():
    table, matrix = random.normal(size=(130, 128)), random.normal(
        size=(128, 130)
    )
    more = vocabulary - 130
    padded = {
        'embedding': np.pad(table, ((0, more), (0, 0))),
        'unembedding': np.pad(matrix, ((0, 0), (0, more))),
    }
    return {name: jnp.asarray(x, jnp.float32) for name, x in padded.items()}

  params, gradient = drawn(), drawn()
  optimizer = make_optimizer(OptimizerSettings(kind='adafactor'))
  cut = {
      'embedding': on(('tensor', 'fsdp'), mesh),
      'unembedding': on(('fsdp', 'tensor'), mesh),
  }
  start = optimizer.init(params)
  _, moments = jax.jit(optimizer.update)(gradient, start, params)
  scalar = jax.device_put(np.int32(1), on((), mesh))
  role = Role(
      jax.device_put(params, cut),
      {},
      jax.device_put(moments, on((), mesh)),
      Counters(*[scalar] * 4),
  )
  return TrainState({'policy': role}, version=1)


@pytest.mark.parametrize('before, after', [(130, 132), (132, 130)])
def test_adafactor_goes_on_with_another_padding(before, after, tmp_path, open_):
  """Rows and columns of a factored moment are padded, or cut off, like it."""
  saved_as = factored(before, tiny.mesh())
  save(open_(), 1, saved_as)
  saved, _ = lib.latest(tmp_path / 'checkpoints')
  wanted = factored(after, tiny.mesh(2, 2))
  axes = {'embedding': 0, 'unembedding': 1}
  restored = checkpoint_tensors.restore_state(saved, shapes(wanted), axes)
  jax.tree.map(np.testing.assert_array_equal, restored.policy.trainable,
               wanted.policy.trainable)  # fmt: skip
  found = jax.device_get(restored.policy.optimizer[1][0])
  kept = jax.device_get(saved_as.policy.optimizer[1][0])
  np.testing.assert_array_equal(found.count, kept.count)
  for name in axes:
    np.testing.assert_array_equal(found.v_row[name], kept.v_row[name])
    column = found.v_col[name]
    assert column.shape == (after,) and kept.v_col[name].any()
    np.testing.assert_array_equal(column[:130], kept.v_col[name][:130])
    assert not column[130:].any()


def test_a_moment_of_another_length_is_refused(tmp_path, open_):
  """The planted fault: a column is padded otherwise than its parameter."""
  save(open_(), 1, factored(130, tiny.mesh()))
  saved, _ = lib.latest(tmp_path / 'checkpoints')
  wanted = shapes(factored(132, tiny.mesh()))
  moments = wanted.policy.optimizer[1][0]
  longer = jax.ShapeDtypeStruct(
      (134,), jnp.float32, sharding=on((), tiny.mesh())
  )
  moments.v_col['unembedding'] = longer
  with pytest.raises(CheckpointError, match=r'v_col/unembedding.*\(134,\)'):
    checkpoint_tensors.restore_state(
        saved, wanted, {'embedding': 0, 'unembedding': 1}
    )


def test_parameters_alone(folder):
  saved, _ = lib.latest(folder)
  like = shapes(state()).policy.trainable
  params, left = checkpoint_tensors.restore_params(saved, like)
  assert left == ()
  ours = state(4).policy.trainable
  np.testing.assert_array_equal(params['embedding'], ours['embedding'])
  np.testing.assert_array_equal(params['blocks/query'], ours['blocks']['query'])


def test_matching_parameters_name_what_is_left(folder):
  saved, _ = lib.latest(folder)
  like = {
      **shapes(state()).policy.trainable,
      'embedding': jax.ShapeDtypeStruct((11, 4), jnp.float32),
      'final_norm': jax.ShapeDtypeStruct((4,), jnp.float32),
  }
  with pytest.raises(CheckpointError, match='embedding is float32 of shape'):
    checkpoint_tensors.restore_params(saved, like)
  params, left = checkpoint_tensors.restore_params(saved, like, matching=True)
  assert sorted(params) == ['blocks/query']
  assert sorted(left) == ['embedding', 'final_norm']


def test_state_that_goes_on_does_not_reach_what_is_saved(tmp_path, open_):
  # The next step donates the buffers while the thread is still writing.
  writer = open_()
  step = jax.jit(
      lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
  )
  arrays = state(1).roles
  for version in range(1, 6):
    before = jax.device_get(arrays)
    hold = threading.Event()
    parts = {'late': lambda hold=hold: hold.wait(WAIT_S) and b'late'}
    writer.save(version, TrainState(arrays, version=version), parts)
    for _ in range(3):
      arrays = step(arrays)
    jax.block_until_ready(arrays)
    hold.set()
    writer.wait()
    saved, _ = lib.latest(tmp_path / 'checkpoints')
    restored = checkpoint_tensors.restore_state(saved, shapes(state()))
    assert_same(restored.roles, before)


def test_saving_does_not_wait_for_the_disk(open_):
  writer = open_()
  hold = threading.Event()
  parts = {'slow': lambda: hold.wait(WAIT_S) and b'slow'}
  writer.save(1, state(), parts)  # and is back, though the disk holds it up
  writer.check()
  assert writer.busy and not hold.is_set()
  hold.set()
  writer.save(2, state(), PARTS)  # behind the first
  writer.wait()
  assert not writer.busy and writer.saved == 2


def test_saving_compiles_nothing(open_):
  # orbax, left alone, cuts replicas apart by programs that it compiles.
  replicated = state(1, tiny.mesh(2, 2), vocabulary=12)
  counter = CompilationCounter()
  counter.install()
  counter.mark_warm()
  save(open_(), 1, replicated)
  counter.uninstall()
  assert counter.since_warm == 0, counter.names_since_warm


def test_nothing_is_renamed(tmp_path, open_):
  def refuse(*arguments):
    raise AssertionError(f'renamed: {arguments}')

  with epath_testing.mock_epath(rename=refuse, replace=refuse):
    writer = open_(folder=epath.Path(tmp_path / 'checkpoints'), keep_last=1)
    for step in (1, 2):
      save(writer, step)
  assert lib.steps(tmp_path / 'checkpoints') == [2]


def test_marker_is_written_last(tmp_path, open_):
  writer = open_()
  seen = []

  def look():
    path = tmp_path / 'checkpoints/00000001'
    seen.append(sorted(p.name for p in path.iterdir()))
    return b''

  save(writer, 1, parts={'last': look})
  assert seen and 'COMMITTED' not in seen[0]
  made = tmp_path / 'checkpoints/00000001'
  newest = max(made.rglob('*'), key=lambda p: p.stat().st_mtime_ns)
  files = [p for p in made.rglob('*') if p.is_file()]
  times = {p.name: p.stat().st_mtime_ns for p in files}
  assert times['COMMITTED'] == max(times.values()), newest


# What is refused.


def flip(path):
  data = bytearray(path.read_bytes())
  data[len(data) // 2] ^= 1
  path.write_bytes(data)


def truncate(path):
  path.write_bytes(path.read_bytes()[:-1])


def a_state_file(folder):
  return max((folder / 'state/d').iterdir(), key=lambda p: p.stat().st_size)


def rewrite_manifest(path):
  """A manifest that somebody edited, its marker along with it."""
  manifest = json.loads(path.read_text())
  path.write_text(json.dumps({**manifest, 'schema_version': 1}))
  marker = hashlib.sha256(path.read_bytes()).hexdigest()
  (path.parent / 'COMMITTED').write_text(marker)


FAULTS = {
    'flipped byte in a part': (
        lambda f: flip(f / 'run.json'),
        r'00000004: run.json has sha256 \w{64}, wanted \w{64} by manifest.json',
    ),
    'flipped byte in an array': (
        lambda f: flip(a_state_file(f)),
        r'state/d/\w+ has sha256 \w{64}, wanted',
    ),
    'truncated file': (
        lambda f: truncate(f / 'records.npz'),
        'records.npz has bytes 1, wanted 2 by manifest.json',
    ),
    'missing file': (
        lambda f: (f / 'records.npz').unlink(),
        'records.npz is missing, wanted 2 bytes',
    ),
    'missing marker': (
        lambda f: (f / 'COMMITTED').unlink(),
        'is incomplete: it has no COMMITTED',
    ),
    'flipped byte in the manifest': (
        lambda f: flip(f / 'manifest.json'),
        r'manifest.json has sha256 \w{64}, wanted \w{64} by COMMITTED',
    ),
    'no manifest': (
        lambda f: (f / 'manifest.json').unlink(),
        'manifest.json is missing',
    ),
    'empty marker': (
        lambda f: (f / 'COMMITTED').write_text(''),
        'manifest.json has sha256',
    ),
    'marker that is no text': (
        lambda f: (f / 'COMMITTED').write_bytes(b'\xff\xfe'),
        'manifest.json has sha256',
    ),
    'later schema': (
        lambda f: rewrite_manifest(f / 'manifest.json'),
        'has schema_version 1, wanted 2',
    ),
}


@pytest.mark.parametrize('fault', FAULTS)
def test_fault_is_refused_by_name_and_the_one_before_stands(fault, folder):
  plant, words = FAULTS[fault]
  plant(folder / '00000004')
  with pytest.raises(CheckpointError, match=words):
    lib.verify(folder / '00000004')
  saved, refused = lib.latest(folder)
  assert saved.step == 3 and len(refused) == 1
  assert_same(
      checkpoint_tensors.restore_state(saved, shapes(state())), state(3)
  )


def test_no_whole_checkpoint_is_none(folder, tmp_path):
  for step in ('00000003', '00000004'):
    (folder / step / 'COMMITTED').unlink()
  saved, refused = lib.latest(folder)
  assert saved is None and len(refused) == 2
  assert lib.latest(tmp_path / 'nowhere') == (None, ())


def test_state_of_another_kind_is_refused_by_tensor(folder):
  saved, _ = lib.latest(folder)
  like = shapes(state())
  roles = {'policy': like.roles['policy']}
  with pytest.raises(CheckpointError, match='2 tensors have no place .*refer'):
    checkpoint_tensors.restore_state(
        saved, dataclasses.replace(like, roles=roles)
    )
  roles = {**like.roles, 'critic': like.roles['reference']}
  with pytest.raises(CheckpointError, match='tensor roles/critic/.* missing'):
    checkpoint_tensors.restore_state(
        saved, dataclasses.replace(like, roles=roles)
    )


# What goes wrong while writing.


# A thread of orbax is told of the failure when its event loop is closed.
@pytest.mark.filterwarnings('ignore::pytest.PytestUnraisableExceptionWarning')
def test_full_disk_is_an_error_of_the_next_call_and_harms_nothing(
    folder, open_, capfd
):
  writer = open_(start=4)
  noise = jnp.asarray(np.random.rand(600, 300))
  large = TrainState({'policy': Role({'noise': noise}, {})}, 5)
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, hard))
  try:
    writer.save(5, large, PARTS)
    with pytest.raises(
        CheckpointError, match='00000005 could not be written: .*too large'
    ):
      writer.wait()
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert 'Traceback' not in capfd.readouterr().err
  saved, refused = lib.latest(folder)
  assert saved.step == 4 and 'has no COMMITTED' in refused[0]
  save(writer, 5)  # there is room again
  assert (writer.saved, writer.failed) == (1, 1)
  assert_same(
      checkpoint_tensors.restore_state(lib.latest(folder)[0], shapes(state())),
      state(5),
  )


def test_folder_that_cannot_be_written_is_an_error_of_the_next_call(
    tmp_path, open_
):
  (tmp_path / 'file').write_text('in the way')
  writer = open_(folder=tmp_path / 'file/checkpoints')
  writer.save(1, state(), PARTS)
  with pytest.raises(CheckpointError, match='00000001 could not be written'):
    writer.wait()


def test_part_that_cannot_be_made_is_named(open_):
  writer = open_()
  writer.save(1, state(), {'run.json': {'at': {1: object()}}})
  with pytest.raises(CheckpointError, match='TypeError: .* is a object'):
    writer.wait()


def test_half_a_checkpoint_is_written_anew(folder, open_):
  (folder / '00000005/state').mkdir(parents=True)
  (folder / '00000005/state/leftover').write_text('of a killed attempt')
  writer = open_(start=4)
  save(writer, 5)
  assert lib.verify(folder / '00000005').step == 5
  assert not (folder / '00000005/state/leftover').exists()


# What is kept.


def saved_steps(writer, folder, last, **metrics):
  for step in range(1, last + 1):
    save(writer, step)
    writer.rate(step, metrics.get(f'm{step}'))
  return lib.steps(folder)


def test_last_best_and_every_mth_are_kept(tmp_path, open_):
  writer = open_(keep_last=2, keep_every=4, keep_best='reward_mean')
  kept = saved_steps(writer, tmp_path / 'checkpoints', 9, m2=0.9, m3=0.5)
  assert kept == [2, 4, 8, 9]
  assert writer.best().step == 2


def test_best_is_kept_though_its_rating_comes_late(tmp_path, open_):
  writer = open_(keep_last=2, keep_best='eval_accuracy')
  for step in (10, 20, 30):
    save(writer, step, awaited=True)
  for step, rating in ((10, 0.9), (20, 0.2), (30, 0.1)):
    writer.rate(step, rating)
  save(writer, 40)
  assert writer.best().step == 10
  assert lib.steps(tmp_path / 'checkpoints') == [10, 30, 40]


def test_what_is_awaited_no_longer_goes(tmp_path, open_):
  folder = tmp_path / 'checkpoints'
  writer = open_(keep_last=1, keep_best='eval_accuracy')
  for step in (1, 2, 3, 4):
    save(writer, step, awaited=step != 3)
  assert lib.steps(folder) == [1, 2, 4]
  writer.rate(1, None)  # its evaluation came to nothing
  save(writer, 5)
  assert lib.steps(folder) == [2, 4, 5]
  writer.rate(4, float('nan'))  # and so 2 will not be rated any more
  save(writer, 6, awaited=True)
  assert lib.steps(folder) == [6]
  save(writer, 7)
  assert lib.steps(folder) == [6, 7]
  assert writer.best() is None  # nothing comes behind the end
  assert lib.steps(folder) == [7]


def test_rating_may_come_before_saving(tmp_path, open_):
  folder = tmp_path / 'checkpoints'
  writer = open_(keep_last=1, keep_best='eval_accuracy')
  writer.rate(2, 0.5)
  for step in (2, 3):
    save(writer, step, awaited=step == 2)
  writer.rate(3, 0.4)
  save(writer, 4)
  assert lib.steps(folder) == [2, 4]
  assert writer.best().step == 2


def test_run_that_goes_on_awaits_what_it_rates_again(tmp_path, open_):
  folder = tmp_path / 'checkpoints'
  writer = open_(keep_last=1, keep_best='eval_accuracy')
  for step in (1, 2):
    save(writer, step, awaited=True)
  writer.close()
  writer = open_(start=2, awaited=True, keep_last=1, keep_best='eval_accuracy')
  for step in (3, 4):
    save(writer, step)
  assert lib.steps(folder) == [2, 4]  # 1 was evaluated by the other attempt
  writer.rate(2, 0.5)
  assert writer.best().step == 2


def test_rating_may_come_after_saving(tmp_path, open_):
  writer = open_(keep_last=2, keep_best='eval_accuracy')
  for step in (1, 2):
    save(writer, step, awaited=True)
  writer.rate(1, 0.75)
  writer.rate(2, float('nan'))
  writer.rate(7, 1.0)  # never saved
  save(writer, 3)
  save(writer, 4)
  assert lib.steps(tmp_path / 'checkpoints') == [1, 3, 4]
  assert writer.best().step == 1


def test_run_that_goes_on_leaves_the_other_line(folder, open_):
  # Resumed from 3, because 4 was refused; 4 may well be readable tomorrow.
  writer = open_(start=3, keep_last=1)
  assert lib.latest(folder)[0].step == 3
  save(writer, 5)
  assert lib.steps(folder) == [5]


def test_checkpoints_of_another_run_are_not_touched(folder, open_):
  with pytest.raises(ConfigError, match='the folder of checkpoints is .*/chec'):
    open_()
  assert lib.latest(folder)[0].step == 4


def test_due_steps():
  settings = CheckpointSettings(every=3)
  assert [s for s in range(1, 8) if settings.due(s, 7)] == [3, 6, 7]
  assert [s for s in range(1, 8) if CheckpointSettings().due(s, 7)] == [7]
  assert not CheckpointSettings(at_end=False).due(7, 7)


@pytest.mark.parametrize(
    'changes, words',
    [
        ({'every': -1}, 'checkpoint.every is -1, wanted at least 0'),
        ({'keep_last': 0}, 'checkpoint.keep_last is 0, wanted at least 1'),
        ({'keep_best': 'accuracy'}, "keep_best is 'accuracy', wanted the name"),
    ],
)
def test_settings_that_cannot_be_are_refused(changes, words):
  with pytest.raises(ConfigError, match=words):
    resolve(CheckpointSettings(**changes), 'checkpoint')
