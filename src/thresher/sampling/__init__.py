"""Samples: fixed prompts answered by policy and reference at each evaluation, with statistics and a win rate."""
