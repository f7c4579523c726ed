"""areal_jax: asynchronous reinforcement learning for language models in JAX.

The package imports nothing by itself: reward workers and the command lines
that must set the environment before jax starts depend on that.
"""

__version__ = '0.1.0'
