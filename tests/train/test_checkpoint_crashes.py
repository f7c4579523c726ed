"""Crash consistency: whatever operation a save dies in, a checkpoint is whole.

The save is real. Before each of its file operations the disk is copied, so
every copy is what a process leaves that is killed there.
"""

import json
import random
import shutil

import pytest

from areal_jax.telemetry.events import EventLog
from areal_jax.train import checkpoint as lib
from areal_jax.train import checkpoint_tensors, checkpoint_writer
from areal_jax.train.checkpoint import CheckpointError, CheckpointSettings
from tests import file_operations
from tests.train.test_checkpoint import PARTS, assert_same, save, shapes, state


def crashes_of(kind, tmp_path):
  """Copies of the disk while step 2 is saved over step 1, with keep_last=1."""
  folder = tmp_path / 'checkpoints'
  writer = kind(folder, CheckpointSettings(keep_last=1), events=EventLog(None))
  save(writer, 1)
  crashes = file_operations.Crashes(folder, tmp_path / 'crashes')
  with file_operations.watched(crashes):
    save(writer, 2, parts={**PARTS, 'tokenizer/tokenizer.json': b'{}'})
    crashes.look('end')
  writer.close()
  return crashes.states


def faults(states):
  """What is wrong with the copies: nothing whole, or a step back."""
  found, reached = [], 0
  for name, folder in states:
    saved, refused = lib.latest(folder)
    if saved is None:
      found.append(f'{name}: {refused}')
      continue
    torn = ', with ' in name  # of an operation that had been made before
    if saved.step < reached and not torn:
      found.append(f'{name}: back at step {saved.step}')
    reached = max(reached, saved.step) if not torn else reached
  return found


@pytest.fixture(scope='module')
def states(tmp_path_factory):
  return crashes_of(
      checkpoint_writer.Checkpointer, tmp_path_factory.mktemp('crashes')
  )


def test_save_may_be_killed_at_every_operation(states):
  assert faults(states) == []
  names = [name for name, _ in states]
  assert any('COMMITTED' in name for name in names), names
  assert any(name.startswith('remove 00000001') for name in names), names
  assert len(states) > 20
  steps = [lib.latest(folder)[0].step for _, folder in states]
  assert steps[0] == 1 and steps[-1] == 2


def test_what_is_half_written_is_refused_by_name(states):
  for name, folder in states:
    saved, refused = lib.latest(folder)
    newer = [step for step in lib.steps(folder) if step > saved.step]
    for step, words in zip(reversed(newer), refused, strict=True):
      assert f'{step:08d}' in words, name
    # Whole means: every byte as it was written.
    manifest = json.loads((folder / saved.path.name / lib.MANIFEST).read_text())
    assert manifest['step'] == saved.step


def test_run_goes_on_from_every_kind_of_remains(states, tmp_path):
  """Whatever is left over, the next save works and what it keeps is exact."""
  chosen = random.Random(0).sample(states[:-2], 6) + [states[-2]]
  for name, folder in chosen:
    copy = shutil.copytree(folder, tmp_path / folder.name)
    start = lib.latest(copy)[0].step
    writer = checkpoint_writer.Checkpointer(
        copy, CheckpointSettings(keep_last=1), events=EventLog(None),
        start=start,
    )  # fmt: skip
    save(writer, start + 1)
    writer.close()
    saved, refused = lib.latest(copy)
    assert (saved.step, refused) == (start + 1, ()), name
    assert_same(
        checkpoint_tensors.restore_state(saved, shapes(state())),
        state(start + 1),
    )
    assert lib.steps(copy) == [start + 1], name


class DeletesFirst(checkpoint_writer.Checkpointer):
  """Makes room before it writes, as one might on a small disk."""

  def _write(self, step, *rest):
    self._whole.append(step)
    self._delete_old()
    self._whole.remove(step)
    super()._write(step, *rest)


def test_planted_deletion_before_the_new_one_is_whole_is_seen(tmp_path):
  found = faults(crashes_of(DeletesFirst, tmp_path))
  assert len(found) > 10 and any('no COMMITTED' in line for line in found)


def test_planted_marker_before_the_manifest_is_seen(states, tmp_path):
  """As a disk may leave it that loses power: order is not kept, hashes are."""
  _, whole = states[-1]
  for lost in ('manifest.json', 'run.json', 'records.npz'):
    copy = shutil.copytree(whole, tmp_path / lost)
    (copy / '00000002' / lost).write_bytes(b'')
    saved, refused = lib.latest(copy)
    assert saved is None and lost in refused[0]


@pytest.mark.parametrize('seed', range(20))
def test_random_damage_never_passes_for_whole(seed, states, tmp_path):
  """One file of a whole checkpoint is changed somehow: refused, or the same."""
  pick = random.Random(seed)
  _, whole = states[-1]
  copy = shutil.copytree(whole, tmp_path / 'copy')
  path = copy / '00000002'
  files = sorted(p for p in path.rglob('*') if p.is_file())
  file = pick.choice(files)
  data = bytearray(file.read_bytes())
  damage = pick.choice(('flip', 'cut', 'grow', 'gone', 'folder', 'swap'))
  if damage == 'flip' and data:
    data[pick.randrange(len(data))] ^= 1 << pick.randrange(8)
    file.write_bytes(data)
  elif damage == 'cut' and data:
    file.write_bytes(data[: pick.randrange(len(data))])
  elif damage == 'swap':
    other = pick.choice(files)
    if other.read_bytes() == bytes(data):
      return
    file.write_bytes(other.read_bytes())
  elif damage in ('gone', 'folder'):
    file.unlink()
    if damage == 'folder':
      file.mkdir()
  else:
    file.write_bytes(data + b'\0')
  if file.name == 'COMMITTED' and file.is_file():
    # White space around the hash is no damage.
    text = file.read_bytes().strip()
    if text == (whole / '00000002/COMMITTED').read_bytes().strip():
      return
  with pytest.raises(CheckpointError, match='00000002'):
    lib.verify(path)
