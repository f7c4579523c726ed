"""Small real records for tests: draws, trajectories and groups."""

import numpy as np

from areal_jax import types


def draw(index, problem_id=None):
  problem = types.Problem(problem_id or f'p/{index}', 'test', '1+1=', '2.')
  return types.Draw(index, 0, problem)


def trajectory(
    draw_index=0,
    sample=0,
    *,
    prompt=(5, 6),
    answer=(9, 2),
    versions=None,
    logps=None,
    score=1.0,
    stop_reason=types.StopReason.STOP,
    temperature=1.0,
):
  """A single-turn trajectory with the given sampled tokens."""
  n, m = len(prompt), len(answer)
  versions = [0] * m if versions is None else versions
  logps = [-0.5] * m if logps is None else logps
  return types.Trajectory(
      draw_index=draw_index,
      sample=sample,
      segments=(
          types.Segment('prompt', 0, n),
          types.Segment('sampled', n, m, stop_reason),
      ),
      ids=np.asarray([*prompt, *answer], np.int32),
      loss_mask=np.asarray([0] * n + [1] * m, np.float32),
      logps=np.asarray([0] * n + list(logps), np.float32),
      versions=np.asarray([-1] * n + list(versions), np.int32),
      turn_ids=np.zeros(n + m, np.int32),
      reward=types.RewardResult(types.RewardStatus.OK, score),
      temperature=temperature,
      admitted_version=min(versions, default=0),
  )


def group(draw_index, *, version=0, size=2, scores=None):
  """A group whose tokens all have one version."""
  scores = scores or [float(i % 2) for i in range(size)]
  return types.Group(
      draw=draw(draw_index),
      size=size,
      trajectories=tuple(
          trajectory(draw_index, i, versions=[version] * 2, score=score)
          for i, score in enumerate(scores)
      ),
      failed=(),
      admitted_version=version,
  )


class Draws:
  """Problems without end, with a position."""

  def __init__(self):
    self.index = 0

  def __iter__(self):
    return self

  def __next__(self):
    self.index += 1
    return draw(self.index - 1)

  def state(self):
    return {'next': self.index}

  def restore(self, state):
    self.index = state['next']
