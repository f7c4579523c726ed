"""Notebooks: what is stored is what was run, and what was run still runs.

A notebook is a pair: a script to read and compare, and an .ipynb with outputs.

  python tests/test_notebooks.py --write

runs the scripts and stores them as notebooks; look at the outputs after it.
"""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

import jupytext
from nbclient import NotebookClient
import nbformat
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
FOLDER = ROOT / 'notebooks'
SCRIPTS = sorted(FOLDER.glob('*.py'))


def cells(notebook):
  return [(cell.cell_type, cell.source) for cell in notebook.cells]


def outputs(notebook):
  return [
      output
      for cell in notebook.cells
      if cell.cell_type == 'code'
      for output in cell.outputs
  ]


def faults(script, notebook):
  """What is wrong with a stored notebook, one line each."""
  if cells(jupytext.reads(script, fmt='py:percent')) != cells(notebook):
    yield 'its cells are not those of the script'
  code = [cell for cell in notebook.cells if cell.cell_type == 'code']
  if [c.execution_count for c in code] != list(range(1, len(code) + 1)):
    yield 'it was not run once from top to bottom'
  if any(output.output_type == 'error' for output in outputs(notebook)):
    yield 'it stores an error'
  if not any('image/png' in o.get('data', {}) for o in outputs(notebook)):
    yield 'it stores no picture'
  text = nbformat.writes(notebook)
  if re.search(r'[\"\' (](/work|/root|/home|/tmp)/', text):
    yield 'it names a path of the machine that ran it'


@pytest.fixture(params=SCRIPTS, ids=lambda path: path.stem)
def pair(request):
  script = request.param
  notebook = nbformat.read(script.with_suffix('.ipynb'), as_version=4)
  return script.read_text(), notebook


def test_every_notebook_has_its_script():
  stored = {path.stem for path in FOLDER.glob('*.ipynb')}
  assert stored == {path.stem for path in SCRIPTS} != set()


def test_stored_notebook_is_sound(pair):
  assert list(faults(*pair)) == []


def test_notebook_is_small_enough_to_be_kept(pair):
  _, notebook = pair
  assert len(nbformat.writes(notebook)) < 1_000_000


def test_faults_of_a_stored_notebook_are_found(pair):
  script, notebook = pair
  assert 'its cells are not those of the script' in faults(
      script.replace('# %%\n', '# %%\n1\n', 1), notebook
  )
  first = next(c for c in notebook.cells if c.cell_type == 'code')
  first.execution_count = 7
  first.outputs.append(nbformat.v4.new_output('error', ename='E', evalue='e'))
  first.outputs.append(
      nbformat.v4.new_output('stream', text="see '/root/runs/x'\n")
  )
  for cell in notebook.cells:
    for output in cell.get('outputs', []):
      output.get('data', {}).pop('image/png', None)
  assert len(list(faults(script, notebook))) == 4


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize('script', SCRIPTS, ids=lambda path: path.stem)
def test_notebook_runs_from_top_to_bottom(script, tmp_path):
  """In a checkout where no run has been made yet."""
  # As a user has it, not with the devices that conftest.py pretends.
  ours = ('XLA_FLAGS', 'NPROC')
  environment = {k: v for k, v in os.environ.items() if k not in ours}
  for name in ('areal_jax', 'experiments', 'notebooks'):
    shutil.copytree(
        ROOT / name,
        tmp_path / name,
        ignore=shutil.ignore_patterns('__pycache__'),
    )
  ran = subprocess.run(
      [sys.executable, '-m', 'pytest', '--nbmake', '--nbmake-timeout=1000',
       f'notebooks/{script.stem}.ipynb'],
      cwd=tmp_path,
      env=environment,
      capture_output=True,
      text=True,
      timeout=1100,
  )  # fmt: skip
  assert ran.returncode == 0, ran.stdout[-4000:]
  assert '1 passed' in ran.stdout
  assert list((tmp_path / 'runs').iterdir())


def write(script: pathlib.Path) -> None:
  """Runs a script as a notebook and stores it with its outputs."""
  notebook = jupytext.read(script)
  start = time.monotonic()
  NotebookClient(
      notebook,
      timeout=1000,
      kernel_name='python3',
      record_timing=False,
      coalesce_streams=True,
      resources={'metadata': {'path': str(FOLDER)}},
  ).execute()
  notebook.metadata.pop('language_info', None)  # the patch level of Python
  for number, cell in enumerate(notebook.cells):
    cell.id = f'cell-{number}'  # the same ones each time
  nbformat.write(notebook, script.with_suffix('.ipynb'))
  print(f'{script.stem}: {time.monotonic() - start:.0f} s')


if __name__ == '__main__':
  if sys.argv[1:2] != ['--write']:
    sys.exit('usage: python tests/test_notebooks.py --write [NAME ...]')
  for path in SCRIPTS:
    if not sys.argv[2:] or path.stem in sys.argv[2:]:
      write(path)
