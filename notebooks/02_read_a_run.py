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
# # Reading a run: was it sound?
#
# A run leaves a folder. `areal_jax.telemetry.read` gives it back as pandas
# frames, and `areal_jax/telemetry/plots.py` draws them. This notebook asks of a
# finished run whether it was sound, and then breaks one on purpose.

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
from areal_jax.tokenizer.sentencepiece_tokenizer import (  # noqa: E402
    SentencePieceTokenizer,
)
from experiments import quickstart  # noqa: E402

# %% [markdown]
# ## Which run?
#
# Any folder below `runs/`. `./quickstart.sh` leaves `runs/quickstart`; where
# there is none, a short run is made here (half a minute).

# %%
folder = pathlib.Path('runs/quickstart')

if not (folder / 'summary.json').exists():
  experiment = quickstart.get_config()
  experiment.name = 'read_a_run'
  experiment.steps = 40
  experiment.warm_start.steps = 800
  experiment.rollout.engine.slots = 24
  folder = session.run(experiment).folder

run = telemetry.read(folder)
{name: len(getattr(run, name)) for name in ('metrics', 'groups', 'samples',
                                            'spans')}  # fmt: skip

# %% [markdown]
# ## What came of it?

# %%
plots.curves(run)

# %% [markdown]
# ## How old were the tokens in training?
#
# With η as bound, tokens rarely get older than η. Under the policy `soft` the
# oldest finished group goes first and nothing is thrown away, so a slow answer
# may exceed it.

# %%
print('eta', run.config['rollout']['eta'], run.config['rollout']['staleness'])
plots.staleness(run)

# %% [markdown]
# ## Do engine and trainer agree?
#
# The loss divides the trainer's probability of a token by the engine's. For
# tokens of staleness 0 both have the same weights, so what is left there is
# rounding. For older ones the gap is real: the policy has moved, and the loss
# corrects for it.

# %%
plots.gap_by_staleness({'this run': run})

# %% [markdown]
# ## How long are the answers?
#
# Lengths differ much, which is why it pays not to wait for the longest. An
# answer that met the limit of new tokens is cut off.

# %%
plots.lengths(run)

# %% [markdown]
# ## Which problems teach something?
#
# A group whose samples all have the same reward has no advantage to learn from.

# %%
trained = run.groups.dropna(subset='step')
kind = trained.reward_mean.map(
    lambda mean: {0.0: 'all wrong', 1.0: 'all right'}.get(mean, 'mixed')
)
half = trained.step > run.metrics.index.max() / 2
half = half.map({False: 'first half', True: 'second half'})
trained.groupby([half, kind]).agg(
    groups=('step', 'size'),
    staleness=('head_staleness', 'mean'),
    length=('length_mean', 'mean'),
).round(2)

# %% [markdown]
# ## What happened in one step?
#
# The step whose new version found most answers under way, and their caches were
# rebuilt. Shades of blue are versions; the trainer's step and the engine's
# decoding lie side by side.

# %%
swaps = run.spans[run.spans.kind == 'swap']
busiest = swaps.loc[swaps.alive_before.idxmax()]
print(f'{busiest.alive_before:.0f} answers alive before the swap,',
      f'{busiest.alive_after:.0f} after; {busiest.rebuilt_tokens:.0f} tokens',
      f'rebuilt in {1000 * busiest.duration:.1f} ms')  # fmt: skip
plots.timeline(run, step=int(busiest.version))

# %% [markdown]
# ## What does an interrupted answer look like?
#
# The longest answer that two versions wrote. Each token keeps the version and
# the log-probability of the weights that sampled it. The black square is the
# end of the answer.

# %%
tokenizer = SentencePieceTokenizer(run.folder / 'tokenizer.model')
interrupted = run.samples[run.samples.mixed]
answers = run.samples if interrupted.empty else interrupted
sample = answers.loc[answers.length.idxmax()]
plots.answer(sample, [tokenizer.decode([token]) for token in sample.ids])

# %% [markdown]
# ## Break it: what if caches are kept when weights change?
#
# `swap='recompute'`, the default, rebuilds the caches of running answers under
# the new weights. `keep` goes on over the old ones: a token is then sampled by
# a mixture of versions that no single set of weights reproduces. Its label says
# the newest version, and the trainer, which has only that, disagrees. The gap
# at staleness 0 shows it, so this one bar is worth watching in every run.
#
# With 8 answers at a time generation is the slower side: answers are under way
# at every swap, and many of their tokens are fresh when they are trained on.

# %%
runs = {}
for swap in ('recompute', 'keep'):
  experiment = quickstart.get_config()
  experiment.name = f'swap_{swap}'
  experiment.steps = 15
  experiment.policy.path = str(run.folder / 'warm_start')
  experiment.tokenizer.path = str(run.folder / 'tokenizer.model')
  experiment.warm_start.steps = 0
  experiment.train.optimizer.learning_rate = 1e-3  # versions that differ
  experiment.rollout.swap = swap
  experiment.rollout.eta = 1.0
  experiment.rollout.engine.slots = 8
  runs[swap] = telemetry.read(session.run(experiment).folder)

# %%
plots.gap_by_staleness(runs)

# %%
for swap, each in runs.items():
  gap = each.summary['engine_trainer_logprob_gap_max']
  print(f'{swap:9} largest gap at staleness 0: {gap:.1e} nats')
