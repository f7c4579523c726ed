"""Sampling settings applied one token and one step at a time, in float64."""

import collections

import numpy as np

from areal_jax.types import SamplingParams


def plain_logps(
    logits, prompt, answer, asked: SamplingParams, forbidden=()
) -> np.ndarray:
  """[V] log-probs of the next token, -inf for those that are impossible."""
  x = [float(value) for value in logits]
  for token, bias in asked.logit_bias:
    x[token] += bias
  for token in {*prompt, *answer}:
    if x[token] > 0:
      x[token] /= asked.repetition_penalty
    else:
      x[token] *= asked.repetition_penalty
  for token, times in collections.Counter(answer).items():
    x[token] -= asked.frequency_penalty * times + asked.presence_penalty
  x = np.asarray(x) / (asked.temperature or 1.0)
  x[list(forbidden)] = -np.inf
  if asked.top_k:
    weakest = sorted(x)[-min(asked.top_k, len(x))]
    x[x < weakest] = -np.inf
  probs = _softmax(x)
  mass = 0.0
  for token in np.argsort(-probs):
    if mass >= asked.top_p and asked.top_p < 1:
      x[token] = -np.inf
    mass += probs[token]
  probs = _softmax(x)
  x[probs < asked.min_p * probs.max()] = -np.inf
  with np.errstate(divide='ignore'):
    return np.log(_softmax(x))


def _softmax(x: np.ndarray) -> np.ndarray:
  weights = np.exp(x - x.max())
  return weights / weights.sum()
