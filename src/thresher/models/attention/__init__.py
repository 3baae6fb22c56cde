"""Attention over packed pairs, on CPU and GPU, registered with transformers' attention interface."""
