"""Experiments: each file returns one `Experiment` and holds no machinery."""
