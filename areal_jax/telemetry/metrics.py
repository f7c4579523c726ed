"""The table of metrics: every number that a run may report.

A metric has its unit, definition and healthy range here before it can be
written (`metric_writer.py`). So a reader of `metrics.jsonl` or TensorBoard
finds every name explained in docs/metrics.md, which this file prints:

  python -m areal_jax.telemetry.metrics > docs/metrics.md
"""

from __future__ import annotations

from collections.abc import Mapping
import dataclasses
import re


@dataclasses.dataclass(frozen=True)
class Metric:
  """The definition of one metric; None leaves a side of its range open.

  `advice` is what a run says when the number leaves its range (`health.py`);
  without it the run says nothing.
  """

  name: str
  unit: str
  definition: str
  low: float | None = None
  high: float | None = None
  advice: str = ''


_CUT_OFF = (
    'answers are cut off at the limit; a larger rollout.max_new_tokens, or see'
    ' whether a stop id of the tokenizer can end them'
)

_LEARNING = (
    Metric(
        'reward_mean',
        'reward',
        'Mean score of the answers trained in the step. It should rise; its'
        ' range is that of the reward function.',
    ),
    Metric(
        'reward_std',
        'reward',
        'Standard deviation of those scores over the step. Near 0 there is'
        ' nothing left to compare.',
        1e-6,
        advice='all answers have the same score, so there is nothing to learn'
        ' from; a task of another difficulty, more samples of a problem, or'
        ' another reward',
    ),
    Metric(
        'eval_accuracy',
        'share',
        'pass@1 of the version in the row: mean over held-out problems of the'
        ' share of their answers that is right. It and the others of its kind'
        ' stand only in rows of an evaluation.',
        0.0,
        1.0,
    ),
    Metric(
        'eval_standard_error',
        'share',
        'Standard error of eval_accuracy over the problems.',
        0.0,
    ),
    Metric(
        'eval_score_mean',
        'reward',
        'Mean score of the evaluated answers, problems weighing the same.',
    ),
    Metric(
        'eval_pass_at_k',
        'share',
        'Chance that one of k answers to a held-out problem is right, unbiased'
        ' from all n; k is a number, as in eval_pass_at_8.',
        0.0,
        1.0,
    ),
    Metric(
        'eval_maj_at_k',
        'share',
        'Chance that what most of k answers to a held-out problem say is'
        ' right; k is a number.',
        0.0,
        1.0,
    ),
    Metric(
        'eval_length_mean',
        'tokens',
        'Mean number of sampled tokens an evaluated answer.',
        1.0,
    ),
    Metric(
        'eval_truncated_fraction',
        'share',
        'Share of evaluated answers that met the limit of new tokens.',
        0.0,
        0.2,
        _CUT_OFF,
    ),
    Metric(
        'eval_failed',
        'answers',
        'Evaluated answers that count nowhere, because generation or the'
        ' verifier failed.',
        0.0,
        0.0,
    ),
    Metric(
        'loss',
        'reward',
        'Objective that was minimised, over the loss tokens of the step. Its'
        ' sign and size say little by themselves.',
    ),
    Metric(
        'gradient_norm',
        'norm',
        'Global norm of the gradient before clipping, mean over the updates'
        ' of the step whose gradient was finite.',
        0.0,
        10.0,
    ),
    Metric(
        'update_norm',
        'norm',
        'Global norm of the change of the parameters, mean over the updates of'
        ' the step; 0 where nothing moved.',
        0.0,
    ),
    Metric(
        'learning_rate',
        'per update',
        'Learning rate of the last update of the step.',
        0.0,
    ),
    Metric(
        'entropy',
        'nats/token',
        'Mean entropy of the distribution over the vocabulary at the trained'
        ' tokens. A fall to 0 means that exploration has ended.',
        0.01,
    ),
    Metric(
        'clip_fraction',
        'share',
        'Share of loss tokens whose ratio π_θ / π_prox was clipped.',
        0.0,
        0.3,
    ),
    Metric(
        'clip_high_fraction',
        'share',
        'Share of the loss tokens with a positive advantage whose ratio was'
        ' clipped from above.',
        0.0,
        0.3,
    ),
    Metric(
        'clip_low_fraction',
        'share',
        'Share of the loss tokens with a negative advantage whose ratio was'
        ' clipped from below.',
        0.0,
        0.3,
    ),
    Metric(
        'dual_clip_fraction',
        'share',
        'Share of loss tokens at which `dual_clip` bound the objective.',
        0.0,
        0.1,
    ),
    Metric(
        'ratio_mean',
        'ratio',
        'Mean of π_θ / π_prox over the loss tokens; 1 in the first update of a'
        ' step.',
        0.8,
        1.25,
    ),
    Metric(
        'ratio_max',
        'ratio',
        'The largest of these.',
        0.0,
        20.0,
    ),
    Metric(
        'kl_update',
        'nats/token',
        'k3 estimate of KL(π_prox ‖ π_θ) over the loss tokens, each taken when'
        ' its minibatch is trained: how far the updates before it had moved the'
        ' policy. 0 with one update a step.',
        0.0,
        0.1,
    ),
    Metric(
        'rejected_fraction',
        'share',
        'Share of loss tokens that a weight rule or the second-moment mask took'
        ' out of the loss; the denominator goes on counting them.',
        0.0,
        0.3,
    ),
    Metric(
        'masked_fraction',
        'share',
        'Share of sampled tokens that never came into the loss, because their'
        ' answers were truncated (`mask_truncated`) or they were older than η'
        ' (staleness policy `mask`).',
        0.0,
        0.2,
    ),
    Metric(
        'clamped_fraction',
        'share',
        'Share of loss tokens with a log-ratio outside of ±20, which was held'
        ' there.',
        0.0,
        0.0,
    ),
    Metric(
        'kl_reference',
        'nats/token',
        'Mean estimate of KL(π_θ ‖ π_reference) on the trained tokens, weighted'
        ' as tokens of π_θ; only with a reference policy. With a KL in the'
        ' reward: of the policies that sampled, on all sampled tokens.',
        0.0,
        1.0,
    ),
    Metric(
        'kl_saturated_fraction',
        'share',
        'Share of the loss tokens that the reference finds e²⁰ times likelier'
        ' than the policy does, or more. There k3 has no gradient, however'
        ' large its value. 0 with k2.',
        0.0,
        0.0,
    ),
    Metric(
        'critic_loss',
        'reward²',
        'Loss of the critic; this and the next only with one.',
        0.0,
    ),
    Metric(
        'critic_gradient_norm',
        'norm',
        'Global norm of its gradient before clipping, mean over the updates of'
        ' the step.',
        0.0,
        10.0,
    ),
    Metric(
        'critic_clip_fraction',
        'share',
        'Share of loss tokens at which the clip made its loss larger.',
        0.0,
        0.5,
    ),
    Metric(
        'critic_skipped_updates',
        'updates',
        'Updates of the critic since the start of the run that were skipped,'
        ' because a gradient was not finite.',
        0.0,
        0.0,
    ),
    Metric(
        'value_mean',
        'reward',
        'Mean value that the critic gives to the states of the loss tokens.',
    ),
    Metric(
        'return_mean',
        'reward',
        'Mean of what it should have given, the returns.',
    ),
    Metric(
        'explained_variance',
        'share',
        '1 - Var(return - value) / Var(return) over the loss tokens: 1 is a'
        ' critic that knows all, 0 one that might as well be a constant, below'
        ' 0 one that does harm.',
        0.0,
        1.0,
    ),
    Metric(
        'response_length_mean',
        'tokens',
        'Mean number of sampled tokens an answer.',
        1.0,
    ),
    Metric(
        'truncated_fraction',
        'share',
        'Share of answers that met the limit of new tokens, by their stop'
        ' reason.',
        0.0,
        0.2,
        _CUT_OFF,
    ),
    Metric(
        'zero_variance_fraction',
        'share',
        'Share of groups whose members all have the same score, so that the'
        ' group teaches nothing.',
        0.0,
        0.8,
    ),
    Metric(
        'skipped_steps',
        'steps',
        'Updates since the start of the run that left the parameters alone,'
        ' because a gradient was not finite, was exactly 0, no token carried'
        ' one, or the critic was still to warm up.',
        0.0,
        0.0,
    ),
)

_AGES = ((0, '0'), (1, '1'), (2, '2'), (3, '3 or more'))

_OFF_POLICY = (
    Metric(
        'staleness_mean',
        'versions',
        'Mean over the trained tokens of (version trained from) - (version'
        ' that sampled the token).',
        0.0,
    ),
    Metric(
        'staleness_max',
        'versions',
        'The largest of these. At most η under the policies drop, fifo and'
        ' mask; soft may exceed it.',
        0.0,
    ),
    Metric(
        'head_staleness_max',
        'versions',
        'The largest age of the oldest token of a group in the step.',
        0.0,
    ),
    Metric(
        'mixed_version_fraction',
        'share',
        'Share of the answers of the step whose tokens were sampled by two'
        ' versions or more.',
        0.0,
        1.0,
    ),
    Metric(
        'importance_weight_mean',
        'ratio',
        'Mean of π_prox / π_behav over the loss tokens, before any rule cuts or'
        ' rejects it. Its expectation is 1 whatever the staleness.',
        0.8,
        1.25,
    ),
    Metric(
        'importance_weight_max',
        'ratio',
        'The largest of these, before any rule. One token of a large weight can'
        ' rule a step.',
        0.0,
        20.0,
    ),
    Metric(
        'used_weight_mean',
        'ratio',
        'Mean over the loss tokens of the weight that the loss used: after the'
        ' rules, 0 where a token was rejected.',
        0.5,
        1.25,
    ),
    Metric(
        'used_weight_max',
        'ratio',
        'The largest weight that the loss used.',
        0.0,
        20.0,
    ),
    Metric(
        'importance_capped_fraction',
        'share',
        'Share of loss tokens whose weight a rule cut.',
        0.0,
        0.1,
        'importance weights are clamped often, so the gradient is biased; a'
        ' smaller rollout.eta or learning rate keeps policies closer',
    ),
    Metric(
        'kl_behavior',
        'nats/token',
        'k3 estimate of KL(π_behav ‖ π_prox) over the loss tokens: how far the'
        ' policies that sampled them are from the one that the step started'
        ' from.',
        0.0,
        0.1,
    ),
    Metric(
        'logprob_gap_fresh_max',
        'nats',
        'Largest absolute difference between the log-probs of engine and'
        ' trainer over tokens of staleness 0, where both used the same'
        ' weights: an error of implementation or precision.',
        0.0,
        1e-4,
    ),
    Metric(
        'logprob_gap_mean',
        'nats',
        'Mean absolute difference between the log-probs of engine and trainer'
        ' over all trained tokens, stale ones included.',
        0.0,
        0.5,
    ),
    *(
        Metric(
            f'staleness_{age}_fraction',
            'share',
            f'Share of the trained tokens whose staleness is {words}.',
            0.0,
            1.0,
        )
        for age, words in _AGES
    ),
    *(
        Metric(
            f'logprob_gap_staleness_{age}',
            'nats',
            'Mean absolute difference between the log-probs of engine and'
            f' trainer over trained tokens whose staleness is {words}.',
            0.0,
            0.5 if age else 1e-5,
        )
        for age, words in _AGES
    ),
    *(
        Metric(
            f'{name}_staleness_{age}',
            unit,
            f'{what} over trained tokens whose staleness is {words}'
            + ('; here both used the same weights.' if age == 0 else '.'),
            low,
            high if age else fresh,
        )
        for name, unit, what, low, high, fresh in (
            (
                'logprob_gap_p99',
                'nats',
                'What 99 % of these differences stay below, to a quarter of a'
                ' decade,',
                0.0,
                2.0,
                1e-4,
            ),
            (
                'logprob_gap_max',
                'nats',
                'The largest of these differences',
                0.0,
                10.0,
                1e-4,
            ),
            (
                'kl_k1',
                'nats/token',
                'Mean of log π_behav - log π_prox, the k1 estimate of'
                ' KL(π_behav ‖ π_prox),',
                -0.1,
                0.1,
                1e-4,
            ),
            (
                'kl_k3',
                'nats/token',
                'k3 estimate of KL(π_behav ‖ π_prox)',
                0.0,
                0.1,
                1e-4,
            ),
            (
                'effective_sample_size',
                'share',
                '(Σ w)² / (N Σ w²) of the importance weights w before any'
                ' rule,',
                0.3,
                1.0,
                1.0,
            ),
        )
        for age, words in _AGES
    ),
    *(
        Metric(
            f'{name}_staleness_{age}',
            unit,
            f'{what} whose staleness is {words}.',
            low,
            high,
        )
        for name, unit, what, low, high in (
            (
                'importance_weight',
                'ratio',
                'Mean of π_prox / π_behav over the loss tokens',
                0.8,
                1.25,
            ),
            (
                'clip_fraction',
                'share',
                'Share that was clipped of the loss tokens',
                0.0,
                0.3,
            ),
            (
                'rejected_fraction',
                'share',
                'Share that a rule rejected of the loss tokens',
                0.0,
                0.3,
            ),
        )
        for age, words in _AGES
    ),
    Metric(
        'effective_sample_size',
        'share',
        '(Σ w)² / (N Σ w²) of the weights w = π_prox / π_behav over N loss'
        ' tokens, before any rule; 1 if all samples are fresh.',
        0.5,
        1.0,
    ),
    Metric(
        'used_sample_size',
        'share',
        'The same of the weights that the loss used; rejected tokens count in'
        ' N with a weight of 0.',
        0.5,
        1.0,
    ),
)

_ROUTERS = (
    Metric(
        'router_entropy',
        'nats/token',
        'Mean entropy of the routers over their experts, at the real tokens of'
        ' the step. It and the others of its kind stand only in rows of a'
        ' policy with experts. No token is ever dropped, so no share of dropped'
        ' ones is reported.',
        0.1,
    ),
    Metric(
        'router_load_max',
        'ratio',
        'Tokens of the busiest expert over the mean of all, mean over layers;'
        ' 1 is even. The busiest expert sets the pace of a layer.',
        1.0,
        4.0,
    ),
    Metric(
        'router_unused',
        'share',
        'Share of the experts that no token of the minibatch went to.',
        0.0,
        0.1,
    ),
    Metric(
        'router_balance',
        'ratio',
        'Load-balance loss E Σ f P before its coefficient, mean over layers:'
        ' the number of experts a token where all is even.',
        1.0,
    ),
)

_FLOW = (
    Metric(
        'drawn',
        'groups',
        'Problems drawn since the start of the run (its lineage of'
        ' checkpoints). drawn = trained + dropped + in_flight, always.',
        0.0,
    ),
    Metric(
        'trained',
        'groups',
        'Groups whose version has been published.',
        0.0,
    ),
    Metric(
        'dropped',
        'groups',
        'Groups that left untrained, each with a reason in the events.',
        0.0,
    ),
    Metric(
        'dropped_uninformative',
        'groups',
        'Of these, those that dynamic sampling left out, because their answers'
        ' all have the same score.',
        0.0,
    ),
    Metric(
        'dropped_unfinished',
        'groups',
        'Of the dropped, those without a score of which an answer was given up:'
        ' its workflow took longer than rollout.group_s or was cancelled from'
        ' within.',
        0.0,
        0.0,
    ),
    Metric(
        'dropped_stale',
        'groups',
        'Of the dropped, those that had become older than η (staleness policy'
        ' `drop`).',
        0.0,
    ),
    Metric(
        'dropped_tokens',
        'tokens',
        'Tokens sampled since the start for groups that were dropped: what the'
        ' policy, dynamic sampling and failures cost in generation.',
        0.0,
    ),
    Metric(
        'length_bias',
        'share',
        'Mean length of the answers trained so far over that of all whose'
        ' groups have left, trained or dropped, less 1. Below 0 long answers'
        ' are dropped more often than short ones.',
        -0.05,
        0.05,
    ),
    Metric(
        'in_flight',
        'groups',
        'Groups admitted that are neither trained nor dropped: running, ready'
        ' or in training. At most (η + 1) · B.',
        0.0,
    ),
    Metric(
        'running',
        'groups',
        'Groups being generated or scored.',
        0.0,
    ),
    Metric(
        'ready',
        'groups',
        'Finished groups that wait for training. Often 0: training waits for'
        ' generation. Often at the limit: generation waits for training.',
        0.0,
    ),
    Metric(
        'groups_failed',
        'groups',
        'Groups since the start of the run in which a member ended without a'
        ' score, those included in which all did.',
        0.0,
        0.0,
    ),
    Metric(
        'reward_errors',
        'answers',
        'Answers since the start whose scoring raised an error. They have no'
        ' score, and not a score of 0.',
        0.0,
        0.0,
    ),
    Metric(
        'reward_timeouts',
        'answers',
        'Answers since the start whose scoring ran out of time.',
        0.0,
        0.0,
    ),
    Metric(
        'reward_unparseable',
        'answers',
        'Answers since the start in which the verifier found nothing that it'
        ' could score.',
        0.0,
    ),
    Metric(
        'reward_unparseable_fraction',
        'share',
        'Share of the answers scored for training since the row before in which'
        ' the verifier found nothing that it could score. They leave training'
        ' without a score; in evaluation they are wrong.',
        0.0,
        0.1,
        'answers that the verifier cannot read are not trained, so nothing'
        ' teaches the form that it wants; ask for the form in the prompt, or'
        ' give 0.0 in place of None',
    ),
    Metric(
        'unfinished_members',
        'answers',
        'Times since this start of the process that an answer was given up'
        ' because its workflow took longer than rollout.group_s or was'
        ' cancelled from within.',
        0.0,
        0.0,
    ),
    Metric(
        'retried_members',
        'answers',
        'Times since this start of the process that an answer was tried again'
        ' after a failure.',
        0.0,
        0.0,
    ),
    Metric(
        'engine_deaths',
        'deaths',
        'Times since this start of the process that the thread of an engine'
        ' died, those that evaluate included.',
        0.0,
        0.0,
    ),
    Metric(
        'engines_evicted',
        'engines',
        'Engines, those that evaluate included, that are dead for good: the'
        ' others answer their requests.',
        0.0,
        0.0,
    ),
    Metric(
        'silences',
        'silences',
        'Times since this start of the process that nothing moved for'
        ' failures.quiet_s seconds; each is explained in the events.',
        0.0,
        0.0,
    ),
)

_SYSTEM = (
    Metric(
        'rollout_tokens_per_s',
        'tokens/s',
        'Tokens sampled by all replicas, a second of wall time since training'
        ' began.',
        0.0,
    ),
    Metric(
        'trained_tokens_per_s',
        'tokens/s',
        'Sampled tokens consumed by updates, a second of wall time since'
        ' training began: the effective throughput.',
        0.0,
    ),
    Metric(
        'step_s',
        's',
        'Wall time of the step, from the wait for its groups to the publishing'
        ' of its version.',
        0.0,
    ),
    Metric(
        'train_idle_fraction',
        'share',
        'Share of wall time in which the trainer waited for groups.',
        0.0,
        0.5,
    ),
    Metric(
        'rollout_idle_fraction',
        'share',
        'Share of wall time in which a replica had no request to work on,'
        ' a pause that goes on included; mean over replicas.',
        0.0,
        0.1,
    ),
    Metric(
        'published_bytes',
        'bytes',
        'Sent to the engines with the version of the step, a copy for each of'
        ' them: all weights, or the adapters where those alone learn.',
        0.0,
    ),
    Metric(
        'offloaded_bytes',
        'bytes',
        "Of optimizer state that lies in the host's memory between steps; only"
        ' with train.offload_optimizer.',
        0.0,
    ),
    Metric(
        'offload_s',
        's',
        'Time that the step took to bring it to the devices and to put it away'
        ' again.',
        0.0,
    ),
    Metric(
        'swap_stall_ms',
        'ms',
        'Time for which decoding stood still to take new weights in, the'
        ' rebuilding of caches included: the longest over the replicas, of the'
        ' last swap of each before the row.',
        0.0,
        1000.0,
    ),
    Metric(
        'rebuilt_tokens',
        'tokens',
        'Tokens whose caches were computed anew after swaps, since this start'
        ' of the process.',
        0.0,
    ),
    Metric(
        'prefix_hits',
        'requests',
        'Requests since this start of the process that began with tokens whose'
        ' cache was there already: siblings of one prompt, prompts with one'
        ' beginning, next turns.',
        0.0,
    ),
    Metric(
        'prefix_tokens',
        'tokens',
        'Tokens that were not computed for that reason.',
        0.0,
    ),
    Metric(
        'preemptions',
        'requests',
        'Times since this start of the process that a running answer gave its'
        ' pages to an older one and was computed again later. Many of them ask'
        ' for more rollout.engine.pages or fewer slots.',
        0.0,
        0.0,
    ),
    Metric(
        'peak_pages',
        'pages',
        'Most pages that running answers have held at once in one replica since'
        ' this start of the process.',
        0.0,
    ),
    Metric(
        'slots_busy_fraction',
        'share',
        'Share of decode slots that drew a token, mean over the decode steps'
        ' since this start of the process.',
        0.5,
        1.0,
    ),
    Metric(
        'padding_fraction',
        'share',
        'Share of token places in the microbatches of the step that were'
        ' padding.',
        0.0,
        0.5,
    ),
    Metric(
        'rss_bytes',
        'bytes',
        'What the process holds resident after the step; its children are not'
        ' in it.',
        0.0,
    ),
    Metric(
        'heap_bytes',
        'bytes',
        'The part of rss_bytes that is no page of a file: those of libraries'
        ' come and go as the kernel sees fit. Once warm it should stand still.',
        0.0,
    ),
    Metric(
        'peak_rss_bytes',
        'bytes',
        'Most memory that the process has held resident so far; its children'
        ' are not in it.',
        0.0,
    ),
    Metric(
        'recompiles',
        'programs',
        'XLA programs built since the end of the warm-up, those from the'
        ' persistent cache included. Shapes are static, so each is a defect.',
        0.0,
        0.0,
    ),
)

GROUPS: Mapping[str, tuple[Metric, ...]] = {
    'learning': _LEARNING,
    'off-policy': _OFF_POLICY,
    'routers': _ROUTERS,
    'flow': _FLOW,
    'system': _SYSTEM,
}
METRICS: Mapping[str, Metric] = {
    metric.name: metric for group in GROUPS.values() for metric in group
}
GROUP_OF = {
    metric.name: group
    for group, members in GROUPS.items()
    for metric in members
}


def registered(name: str) -> str:
  """The name under which a metric is explained: of 'a_at_8' it is 'a_at_k'."""
  return re.sub(r'_at_[1-9]\d*$', '_at_k', name)


def documentation() -> str:
  """The registry as Markdown: one table for each group."""
  parts = [
      '# Metrics',
      '<!-- Printed by `python -m areal_jax.telemetry.metrics`: edit there -->',
      'Every number that a run reports. `metrics.jsonl` holds one row a step'
      ' with `step`, `version`, `wall` (seconds since 1970), these names, and'
      ' `nonfinite`, the names of values that were NaN or infinite and are'
      ' null in the row. In TensorBoard a metric stands under its group, such'
      ' as `learning/reward_mean`. A row leaves out what was not measured. The'
      ' healthy range is where a sound run is found; outside of it, look.',
  ]
  for group, members in GROUPS.items():
    rows = [
        f'| `{m.name}` | {m.unit} | {m.definition} | {healthy(m)} |'
        for m in members
    ]
    parts.append(f'## {group.capitalize()}')
    parts.append(
        '\n'.join(
            ['| name | unit | definition | healthy |', '|---|---|---|---|']
            + rows
        )
    )
  return '\n\n'.join(parts) + '\n'


def healthy(metric: Metric) -> str:
  """The healthy range of a metric in words, such as '0 to 0.2'."""
  low, high = metric.low, metric.high
  if low is None and high is None:
    return 'any'
  if high is None:
    return f'≥ {low:g}'
  if low is None:
    return f'≤ {high:g}'
  return f'{low:g}' if low == high else f'{low:g} to {high:g}'


if __name__ == '__main__':
  print(documentation(), end='')
