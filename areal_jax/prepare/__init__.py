"""Opens what the settings of a run name: see `prepared.py`."""
