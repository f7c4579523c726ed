"""Verifiers: what an answer to a problem is worth."""
