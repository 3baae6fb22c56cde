"""Imported last by a process that forks others: collections of garbage in them then skip what it has imported."""

import gc

gc.collect()
gc.freeze()
