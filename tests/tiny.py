"""A model small enough to compile in a second, and what tests ask of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from areal_jax.losses import logprobs
from areal_jax.mesh.rules import Rules
from areal_jax.mesh.slices import mesh_of
from areal_jax.models import parameters, transformer
from areal_jax.models.config import ModelConfig
from areal_jax.types import Request, SamplingParams

VOCABULARY = 40


def config(**changes) -> ModelConfig:
  settings = dict(
      vocab_size=VOCABULARY,
      width=32,
      layers=2,
      heads=4,
      kv_heads=2,
      head_size=8,
      mlp_width=48,
      max_length=128,
      tied_embeddings=True,
  )
  return ModelConfig(**{**settings, **changes})


def mesh(*shape: int, skip: int = 0) -> jax.sharding.Mesh:
  """A mesh of the pretended devices behind the first `skip`.

  Its shape is fsdp, tensor and, if there are three numbers, expert.
  """
  shape = shape or (1, 1)
  count = int(np.prod(shape))
  devices = jax.devices()[skip : skip + count]
  return mesh_of(devices, **dict(zip(('fsdp', 'tensor', 'expert'), shape)))


@functools.cache
def _sharp(seed: int):
  """Parameters scaled up, so that versions differ visibly in what they say."""
  params = parameters.init_params(config(), seed, mesh(), Rules())
  return jax.tree.map(lambda x: x * 3.0 if x.ndim > 2 else x, params)


def params(seed: int = 0, on: jax.sharding.Mesh | None = None):
  """Random parameters; another seed is another version of the weights."""
  on = on or mesh()
  shardings = parameters.param_shardings(config(), on, Rules())
  return jax.device_put(_sharp(seed), shardings)


@functools.cache
def _score_program():
  @jax.jit
  def score(weights, ids, temperatures):
    batch = jnp.ones_like(ids)
    positions = jnp.arange(ids.shape[1])[None]
    logits = transformer.forward(
        config(), weights, ids, positions, batch, mesh=mesh(), rules=Rules()
    )
    return logprobs.token_logps(logits, ids, batch, temperatures)[0]

  return score


def trainer_logps(weights, ids, temperature=1.0, padded=64) -> np.ndarray:
  """[T] log-probs of `ids` as the trainer computes them, unshifted."""
  row = np.zeros((1, padded), np.int32)
  row[0, : len(ids)] = ids
  temperatures = np.full(row.shape, temperature, np.float32)
  return np.asarray(_score_program()(weights, row, temperatures))[0, : len(ids)]


def request(
    name: str = 'r',
    prompt=(1, 2, 3),
    *,
    new: int = 12,
    draw: int = 0,
    sample: int = 0,
    **sampling,
) -> Request:
  return Request(
      request_id=name,
      prompt_ids=tuple(prompt),
      sampling=SamplingParams(max_new_tokens=new, **sampling),
      draw_index=draw,
      sample=sample,
  )
