"""Simulate one rank of a run on fake tensors: its own code, every operation counted, no GPU."""
