# ---
# jupyter:
#   jupytext:
#     formats: ipynb,py:percent
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first run: does an asynchronous run learn?
#
# This notebook trains a small policy while it goes on generating, looks at what
# came of it, and then breaks it on purpose. It runs from top to bottom in about
# two minutes on two CPU cores and downloads nothing.
#
# The task is `experiments/quickstart.py`: a few one-digit numbers in, every
# running total out (`3+5+7=` → `8;15.`). A short supervised warm start teaches
# the arithmetic and a bad habit: more than half of its examples stop one total
# too early. Reinforcement learning is to break the habit.

# %%
# %matplotlib inline
import os
import pathlib
import sys

here = pathlib.Path.cwd()
root = next(p for p in (here, *here.parents) if (p / 'areal_jax').is_dir())
os.chdir(root)
sys.path.insert(0, str(root))

from areal_jax import session, telemetry  # noqa: E402
from areal_jax.telemetry import plots  # noqa: E402
from experiments import quickstart  # noqa: E402

# %% [markdown]
# ## What is run?
#
# Settings are a tree of dataclasses. `get_config()` gives the quickstart's, and
# any field can be assigned. η = 2 means that generation may be two versions
# ahead of training. One device trains and one generates (on a CPU both are
# pretended, and share its cores); with 24 answers at a time neither outruns the
# other by much.

# %%
experiment = quickstart.get_config()
experiment.name = 'first_run'
experiment.steps = 60
experiment.train.optimizer.total_steps = 60
experiment.warm_start.steps = 1200
experiment.rollout.engine.slots = 24

result = session.run(experiment)
run = telemetry.read(result.folder)

# %% [markdown]
# ## Does it learn?
#
# Reward is the share of right answers among those that were trained on, sampled
# at temperature 1. Evaluation asks problems that are never trained on, before
# the first step and after the last.

# %%
plots.curves(run)

# %%
print(f'accuracy before {run.summary["eval_before"]:.2f}')
print(f'accuracy after  {run.summary["eval_after"]:.2f}')
print(f'standard error  {run.summary["eval_standard_error"]:.2f}')

# %% [markdown]
# ## How stale were the tokens?
#
# A token's staleness is the number of versions between the weights that sampled
# it and the weights that train on it. Synchronous training has 0 only. New
# weights reach answers in mid-sentence, so the oldest token of an answer is
# often older than its others.

# %%
plots.staleness(run)

# %%
mixed = run.samples.mixed.mean()
print(f'{mixed:.0%} of the answers were sampled by two versions or more')

# %% [markdown]
# ## Who waited for whom?
#
# Hatched is waiting. Where the trainer waits for groups, generation is too
# slow; where an engine waits for requests, training is, and η keeps generation
# from running further ahead. "Other" of the trainer is publishing weights and
# writing logs.

# %%
plots.shares(run)

# %% [markdown]
# One step from close by: while it trains, the engine goes on decoding. The
# next version is taken between two decode steps. This is the step whose version
# found most answers under way.

# %%
swaps = run.spans[run.spans.kind == 'swap']
plots.timeline(run, step=int(swaps.version[swaps.alive_before.idxmax()]))

# %% [markdown]
# ## Break it: what if nothing can be learnt?
#
# The same run from the same warm start with a learning rate of 0. Everything
# moves as before, groups, versions and swaps, but the policy cannot. If its
# reward rose too, the first picture would have shown something else than
# learning.

# %%
control = quickstart.get_config()
control.name = 'first_run_control'
control.steps = 40
control.policy.path = str(result.folder / 'warm_start')
control.tokenizer.path = str(result.folder / 'tokenizer.model')
control.warm_start.steps = 0
control.rollout.engine.slots = 24
control.train.optimizer.learning_rate = 0.0

broken = telemetry.read(session.run(control).folder)

# %%
plots.compare(
    {'learning rate 1e-4': run, 'learning rate 0': broken},
    'reward_mean',
    'reward\n(share of right answers)',
)

# %%
for name, each in (('learning', run), ('control', broken)):
  before, after = each.summary['eval_before'], each.summary['eval_after']
  print(f'{name:9} accuracy {before:.2f} -> {after:.2f}')

# %% [markdown]
# `02_read_a_run` looks deeper into a finished run.
