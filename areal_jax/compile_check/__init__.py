"""What a run would need of machines that are not there.

`chips` knows the accelerators and names their topologies, `hlo` reads what a
compiled program costs, `reshard` counts what crosses meshes, `programs`
compiles a run's programs from shapes, `check` puts it together, `report` prints
it; `python -m areal_jax.compile_check` is the door.
"""
