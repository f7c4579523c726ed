"""Workflows of users, for runs in tests."""

from areal_jax.rollout.workflow import MemberFailed, SingleTurn

# (purpose, branch, whether it got a score) of each answer.
ANSWERED: list[tuple[str, int, bool]] = []


def retry_once(context):
  """Asks again, once, where the first answer got no score."""
  single = SingleTurn(context)

  async def ask(draw, sample, version, branch):
    try:
      made = await single(draw, sample, version, branch=branch)
    except MemberFailed:
      ANSWERED.append((draw.purpose.name, branch, False))
      raise
    ANSWERED.append((draw.purpose.name, branch, True))
    return made

  async def workflow(draw, sample, version):
    try:
      return await ask(draw, sample, version, 0)
    except MemberFailed:
      return await ask(draw, sample, version, 1)

  return workflow


def returns_nothing(context):
  """Its workflow forgets to return the trajectory."""
  single = SingleTurn(context)

  async def workflow(draw, sample, version):
    await single(draw, sample, version)

  return workflow


async def answers_itself(context):
  """A coroutine function where one that builds it is wanted."""


def is_the_workflow(draw, sample, version):
  """Takes what a workflow takes."""


def builds_no_coroutine(context):
  return lambda draw, sample, version: None


def builds_too_few(context):
  async def workflow(draw):
    pass

  return workflow
