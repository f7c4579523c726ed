"""Checks of a setup before it costs anything: `python -m areal_jax.doctor`."""
