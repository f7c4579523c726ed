"""Published shapes: their parameters add up to what is published of them."""

import math

import jax
import pytest

from areal_jax.config import resolve
from areal_jax.models import parameters
from areal_jax.models.shapes import SHAPES, published_shape

# Billions of parameters, from the model cards at https://huggingface.co.
PUBLISHED = {
    'Qwen2.5-0.5B': 0.494,
    'Qwen2.5-1.5B': 1.544,
    'Qwen2.5-3B': 3.086,
    'Qwen2.5-7B': 7.616,
    'Qwen2.5-14B': 14.770,
    'Qwen2.5-32B': 32.764,
    'DeepSeek-R1-Distill-Qwen-1.5B': 1.777,
    'DeepSeek-R1-Distill-Qwen-7B': 7.616,
    'DeepSeek-R1-Distill-Qwen-14B': 14.770,
    'DeepSeek-R1-Distill-Qwen-32B': 32.764,
    'Llama-3.1-8B': 8.030,
    'DeepSeek-R1-Distill-Llama-8B': 8.030,
    'Qwen3-30B-A3B': 30.532,
}


def test_every_shape_is_compared():
  assert PUBLISHED.keys() == SHAPES.keys()


@pytest.mark.parametrize('name', PUBLISHED)
def test_parameters_add_up(name):
  config = resolve(published_shape(f'somewhere/{name}'))
  shapes = jax.tree.leaves(parameters.abstract_params(config))
  billions = sum(math.prod(leaf.shape) for leaf in shapes) / 1e9
  assert billions == pytest.approx(PUBLISHED[name], abs=6e-4)


def test_endings_leave_the_shape_as_it_is():
  assert published_shape('x/Qwen2.5-7B-Instruct') == published_shape(
      'Qwen2.5-7B'
  )
  assert published_shape('x/Qwen2.5-8B') is None
