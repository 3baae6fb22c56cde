"""Simulate one rank of a run on tensors without values: its own code, every operation counted, no GPU."""
