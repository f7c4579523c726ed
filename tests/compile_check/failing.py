"""A program that every compiler fails at, whatever memory there is."""

import jax
import jax.numpy as jnp


def no_such_program(*given: object) -> jax.stages.Traced:
  """A traced call of something that nobody has written.

  Args:
    *given: what a program of a step is told; not looked at.
  """
  del given
  shape = jax.ShapeDtypeStruct((8,), jnp.float32)
  call = jax.ffi.ffi_call('no_such_target', shape)
  return jax.jit(call).trace(shape)
