"""Measurements that are too long or too noisy for tests.

This file must be here: the wheel of google-jetstream installs a top-level
package of the same name, and a folder without `__init__.py` would lose to it.
"""
