"""Advantages and losses as pure functions of arrays.

Nothing here knows a model, an optimizer or a queue, so every function can be
called from a notebook with literals.
"""
